"""vLLM's own offloading without a GPU: its look-up, eviction, tiers and files, with a copy between two memories.

vLLM refuses CPU engines because its copies are CUDA's. Everything else runs as released: this spec hands its worker
streams and events that are always done, and a copy that is.
"""

import contextlib
import ctypes
import time
from typing import Any

import torch
from vllm.v1.kv_offload.cpu import gpu_worker
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class Host(torch.Tensor):
    """KV in memory that its worker takes for a GPU's."""

    is_cuda = True


class Moment:
    """An event, and a stream, of work that is done when it was asked for."""

    def __init__(self) -> None:
        self._at = 0.0

    def record(self, stream: object = None) -> None:
        self._at = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def elapsed_time(self, later: "Moment") -> float:
        """Milliseconds."""
        return 1e3 * (later._at - self._at)


class Moments(list[Moment]):
    """A pool that always has one more."""

    def __bool__(self) -> bool:
        return True

    def pop(self, index: Any = -1) -> Moment:
        return Moment()

    def append(self, moment: Moment) -> None: ...


class Platform:
    """What the worker asks of a GPU's platform."""

    is_xpu = staticmethod(lambda: False)
    current_stream = staticmethod(Moment)
    stream = staticmethod(lambda stream: contextlib.nullcontext())


def copy(
    sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor, *, is_src_access_order_any: bool = False
) -> None:
    """Copy sizes[i] bytes from address sources[i] to targets[i]."""
    for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(target, source, size)


class HostCopies(gpu_worker.SingleDirectionOffloadingHandler):
    """One direction's copies."""

    def __init__(self, gpu_tensors: list[torch.Tensor], *args: Any, **kwargs: Any) -> None:
        super().__init__([tensor.as_subclass(Host) for tensor in gpu_tensors], *args, **kwargs)
        self._stream_pool, self._event_pool = Moments(), Moments()
        self._swap_blocks_batch = copy


class NativeOnCpu(TieringOffloadingSpec):
    """vLLM's `TieringOffloadingSpec` for CPU engines."""

    def get_worker(self, kv_caches: Any) -> Any:
        if not self._worker:
            gpu_worker.current_platform = Platform()
            gpu_worker.SingleDirectionOffloadingHandler = HostCopies
            self._worker = self.create_worker(kv_caches)
        return self._worker
