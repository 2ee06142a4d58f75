"""Puts a simulated machine in the place of CUDA, for vLLM's transfer worker and for hotspan's."""

from __future__ import annotations

import ctypes
import dataclasses
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker
from vllm.v1.kv_offload.cpu import gpu_worker, swap_blocks_triton

from hotspan.engine import connector, cuda, opening, spec
from hotspan.engine.contract import ENGINE
from hotspan.tiers.slab import SharedSlab
from kit.cuda.machine import Device, HostRange, Machine
from kit.cuda.streams import Event, Kernel, Pieces, Stream

_METADATA = frozenset(
    ("__get__", "view", "as_strided", "stride", "size", "data_ptr", "dim", "numel", "element_size", "storage_offset")
)
"""What the host may ask of a tensor on a device; all else would read or write its bytes."""


class DeviceTensor(torch.Tensor):  # type: ignore[misc]
    """A tensor in a device's memory: the host knows its shape and its address, and can't have its bytes."""

    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.__name__ not in _METADATA:
            raise RuntimeError(f"{function.__name__} on the host, of memory that is the device's")
        return super().__torch_function__(function, kinds, args, kwargs or {})

    @property
    def is_cuda(self) -> bool:
        return True


class PinnedTensor(torch.Tensor):  # type: ignore[misc]
    """A tensor in pinned host memory: a copy to the device reads it when its stream comes there."""

    def to(self, *where: Any, **how: Any) -> Any:
        device, copied = _installed[-1].current, _Copied(self.tolist())
        device.call("cudaMemcpyAsync")
        _streams[-1].submit(Kernel(lambda: copied.found.extend(self.tolist())))
        return copied


@dataclasses.dataclass(slots=True)
class _Copied:
    """Numbers on the device. expected: at the call. found: when the stream came to them."""

    expected: list[int]
    found: list[int] = dataclasses.field(default_factory=list)


_installed: list[Machine] = []
_streams: list[Stream] = []


def current_machine() -> Machine:
    """The machine that is in CUDA's place."""
    return _installed[-1]


def on_device(kv_caches: CanonicalKVCaches) -> CanonicalKVCaches:
    """The same KV caches, whose tensors say that they are on a device."""
    tensors = [dataclasses.replace(each, tensor=each.tensor.as_subclass(DeviceTensor)) for each in kv_caches.tensors]
    return dataclasses.replace(kv_caches, tensors=tensors)


def attach(machine: Machine, slab: SharedSlab, rank_bytes: int) -> HostRange:
    """The current device's rank copies to and from this mapping of the slab."""
    start = ctypes.addressof(ctypes.c_char.from_buffer(slab.view))
    found = HostRange(start, slab.bytes, slab.slot_bytes, rank_bytes)
    machine.current.ranges.append(found)
    return found


@contextmanager
def installed(machine: Machine) -> Iterator[Machine]:
    """Inside, vLLM's worker and hotspan's find this machine's runtime, and the engine takes its platform for CUDA."""
    with ExitStack() as patches:
        for module, name, instead in _replacements(machine):
            patches.enter_context(patch.object(module, name, instead))
        _installed.append(machine)
        patches.callback(_installed.pop)
        yield machine


def _replacements(machine: Machine) -> Iterator[tuple[Any, str, Any]]:
    platform = _Platform(machine)
    torch_there = types.ModuleType("torch")
    torch_there.__dict__.update(torch.__dict__)
    torch_there.__dict__.update(
        Event=lambda **_: Event(machine.current),
        empty=_empty,
        accelerator=types.SimpleNamespace(synchronize=lambda: _synchronize(machine)),
    )
    batched = types.SimpleNamespace(swap_blocks_batch=_batched(machine))
    for module in (gpu_worker, connector, cuda, opening, spec):
        yield module, "current_platform", platform
    yield from _registration(machine, platform)
    yield gpu_worker, "torch", torch_there
    yield gpu_worker, "ops", batched
    yield gpu_worker, "PIN_MEMORY", True
    yield gpu_worker, "HAS_TRITON", machine.has_triton
    yield gpu_worker, "triton", types.SimpleNamespace(next_power_of_2=lambda n: 1 << (n - 1).bit_length())
    yield swap_blocks_triton, "ops", batched
    yield swap_blocks_triton, "_swap_blocks_kernel", _TritonKernel(machine)
    yield torch.cuda, "current_device", lambda: machine.current.index
    yield cuda, "time", types.SimpleNamespace(sleep=lambda seconds: machine.drift())
    yield cuda, "cuda_worker", _making(machine, cuda.cuda_worker)


def _registration(machine: Machine, platform: Any) -> Iterator[tuple[Any, str, Any]]:
    """Where a release finds the driver that registers host memory, and how much it registers at a time."""
    if (most := getattr(gpu_worker, "MAX_HOST_REGISTER_CHUNK_BYTES", None)) is not None:
        yield gpu_worker, "MAX_HOST_REGISTER_CHUNK_BYTES", min(most, machine.chunk_bytes)
    if ENGINE < (0, 32):
        yield torch.cuda, "cudart", lambda: machine.current.driver
        return
    from vllm.v1.kv_offload.cpu import host_register

    yield host_register, "current_platform", platform
    yield host_register, "_load_cudart", lambda: machine.current.driver


class _Platform:
    """vLLM's platform, which is CUDA as far as copies go."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.Stream = lambda: _made_stream(machine.current)

    def current_stream(self) -> Stream:
        return self._machine.current.compute

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        _streams.append(stream)
        try:
            yield
        finally:
            _streams.pop()

    def is_cuda_alike(self) -> bool:
        return True

    def is_cpu(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(current_platform, name)


def _made_stream(device: Device) -> Stream:
    device.call("cudaStreamCreate")
    return Stream(device)


def _empty(*shape: Any, pin_memory: bool = False, **options: Any) -> Any:
    made = torch.empty(*shape, **options)
    return made.as_subclass(PinnedTensor) if pin_memory else made


def _synchronize(machine: Machine) -> None:
    for stream in [stream for stream in machine.streams if stream.device is machine.current]:
        stream.synchronize()


def _pieces(src: Any, dst: Any, sizes: Any) -> Pieces:
    """Copies of what descriptors have at the call."""
    return Pieces(*(np.array(numbers, np.int64) for numbers in (src, dst, sizes)))


def _batched(machine: Machine) -> Callable[..., None]:
    """`ops.swap_blocks_batch`: descriptors are read at the call."""

    def swap_blocks_batch(src: Any, dst: Any, sizes: Any, is_src_access_order_any: bool = False, **_: Any) -> None:
        device, pieces = machine.current, _pieces(*(each.numpy() for each in (src, dst, sizes)))
        what = "a store" if device.are_own(pieces.src, pieces.sizes).any() else "a load"
        device.copy(_streams[-1], pieces, reads_ahead=is_src_access_order_any, is_kernel=False, what=what)

    return swap_blocks_batch


class _TritonKernel:
    """The kernel of small copies: it takes its descriptors from where copies to the device have put them."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._launch

    def _launch(self, src: _Copied, dst: _Copied, sizes: _Copied, count: int, **_: Any) -> None:
        device, stream, given = self._machine.current, _streams[-1], (src, dst, sizes)

        def read() -> None:
            if any(numbers.found != numbers.expected for numbers in given):
                self._machine.wrong_uses.append("descriptors change before the kernel reads them")

        stream.submit(Kernel(read))
        pieces = _pieces(*(numbers.expected for numbers in given))
        device.copy(stream, pieces, reads_ahead=False, is_kernel=True, what="a load")


def _making(machine: Machine, make: Callable[..., OffloadingWorker]) -> Callable[..., OffloadingWorker]:
    """`cuda_worker`, whose KV caches are on the current device, and whose mapping of the slab the device knows."""

    def made(kv_caches: Any, slab: SharedSlab, blocks_per_chunk: int, offset: int, **how: Any) -> OffloadingWorker:
        rank_bytes = sum(tensor.page_size_bytes for tensor in kv_caches.tensors) * blocks_per_chunk
        attach(machine, slab, rank_bytes)
        return make(on_device(kv_caches), slab, blocks_per_chunk, offset, **how)

    return made
