"""The worker's half on CUDA: vLLM's own transfer worker (batched DMA on side streams) over hotspan's slab.

Stores and loads are not ordered against each other: no load may see a slot whose store has not ended, and a slot stays
as it is from the submission of a load until every rank has reported it (tests/engine/cuda searches for exceptions).
"""

import ast
import inspect
import logging
import time
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu import gpu_worker
from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker

from hotspan.core.errors import EngineError
from hotspan.core.types import GIB, PAGE_BYTES
from hotspan.engine.compat import check_engine
from hotspan.engine.contract import ENGINE, SEARCHED, engine_version
from hotspan.engine.copies import places
from hotspan.engine.gaps import Gaps
from hotspan.tiers.slab import SharedSlab

if ENGINE >= (0, 32):
    from vllm.v1.kv_offload.cpu.host_register import host_unregister
else:

    def host_unregister(address: int) -> None:
        """Let the driver forget a pinned range."""
        torch.cuda.cudart().cudaHostUnregister(address)


logger = logging.getLogger(__name__)

_POLL_S = 0.0002
_REGIONS = ("region", "mmap_region", "self._mmap_region", "self.mmap_region")
_NOT_ASKED = {"create_next_canonical_view", "iter_worker_slot_ranges"}
"""For a layout that hotspan does not ask for, and where a worker's part of a row is said to be less than the row."""


class SlabRegion:
    """hotspan's slab with the face of vLLM's SharedOffloadRegion, as far as its transfer worker looks.

    The worker pins `_base` with the driver, takes one view a tensor in order, and calls `cleanup` at the end. It pins
    all of it, as the engine's own does by default before 0.33: a worker's part is said to be the whole of a row.
    """

    def __init__(self, slab: SharedSlab, offset: int, rank: int) -> None:
        self._slab = slab
        self._next = offset
        self._row_stride = self.cpu_page_size = slab.slot_bytes
        self.page_size = PAGE_BYTES
        self._base: torch.Tensor | None = torch.frombuffer(slab.view, dtype=torch.int8)
        self.rank = rank
        self.total_size_bytes = slab.bytes
        self.is_pinned = False
        self.pinned_addresses: list[int] = []

    @property
    def base_tensor(self) -> torch.Tensor:
        if self._base is None:
            raise RuntimeError("the slab is released")
        return self._base

    def create_next_worker_view(self, tensor_page_size: int) -> torch.Tensor:
        """The next tensor's place in every slot, int8[slots, tensor_page_size] with the slot as row stride."""
        view = torch.as_strided(
            self.base_tensor, (self._slab.slots, tensor_page_size), (self._row_stride, 1), self._next
        )
        self._next += tensor_page_size
        return view

    create_next_view = create_next_worker_view  # its name until 0.27

    def cleanup(self) -> None:
        """Unpin and unmap."""
        if self.is_pinned and not self.pinned_addresses:  # until 0.30 in one piece, which is not noted
            self.pinned_addresses.append(self.base_tensor.data_ptr())
        for address in reversed(self.pinned_addresses):
            host_unregister(address)
        self.pinned_addresses.clear()
        self.is_pinned = False
        self._base = None
        self._slab.close()


class CudaWorker(CPUOffloadingWorker):
    """vLLM's worker, which leaves nothing in a slot of what was there before.

    An error of the driver is raised from any call, and from all later ones: the engine stops, and no copy that it has
    not reported is a hit.
    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        slab: SharedSlab,
        blocks_per_chunk: int,
        offset: int,
        *,
        stores: bool = True,
    ) -> None:
        """stores: False where another rank stores the same bytes: stores end as they are submitted."""
        region: Any = SlabRegion(slab, offset, rank=torch.cuda.current_device())
        try:
            super().__init__(kv_caches, blocks_per_chunk, slab.slots, region)
            self._gaps: Gaps | None = Gaps(kv_caches, slab, blocks_per_chunk, offset)
        except BaseException:
            region.cleanup()  # of which vLLM's worker is the owner only once it is made
            raise
        self._per_chunk, self._stores = blocks_per_chunk, stores
        self._loading: set[int] = set()
        self._ended: list[TransferResult] = []
        if not region.is_pinned:
            logger.warning(
                "slab_not_registered rank=%d gib=%.1f: the driver did not register hotspan's RAM (vLLM's log has its "
                "code): copies are right, and slower. Raise the limit of locked memory (ulimit -l, "
                "docker --ulimit memlock=-1), or lower --ram-gib",
                region.rank,
                slab.bytes / GIB,
            )

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any, **rest: Any) -> bool:
        if not self._stores:
            self._ended.append(TransferResult(job_id, True))
            return True
        if self._gaps is not None and not self._gaps.fills(src_spec):
            self._gaps.blank(places(src_spec, dst_spec, self._per_chunk))
        return bool(super().submit_store(job_id, src_spec, dst_spec, **rest))

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, **rest: Any) -> bool:
        self._loading.add(job_id)
        if ENGINE < (0, 28):
            _await_compute(self._load_handler)
        return bool(super().submit_load(job_id, src_spec, dst_spec, **rest))

    def get_finished(self) -> list[TransferResult]:
        self._collect()
        ended, self._ended = self._ended, []
        return ended

    def await_loads(self, timeout_s: float) -> None:
        """Sleep until no load is in flight, at most `timeout_s`: for steps in which the engine computes nothing."""
        for _ in range(int(timeout_s / _POLL_S)):
            self._collect()
            if not self._loading:
                return
            time.sleep(_POLL_S)

    def shutdown(self) -> None:
        self._gaps = None
        try:
            super().shutdown()
        except RuntimeError:  # until 0.27; later releases log it and go on
            logger.exception("copies_not_ended: the GPU failed; what it was asked to copy is in no tier")
            for handler in (self._store_handler, self._load_handler):
                handler._transfers.clear()
            super().shutdown()  # or the engine would end before it has closed its tiers

    def _collect(self) -> None:
        for result in super().get_finished():
            self._loading.discard(result.job_id)
            self._ended.append(result)


def _await_compute(handler: Any) -> None:
    """Let a direction's next copy wait for all that the engine computes now: until 0.27 vLLM lets stores alone do so.

    Else the zeroing of a block, or a step that is dropped, may write over what was loaded into it.
    """
    streams = handler._stream_pool
    stream = streams.pop() if streams else current_platform.Stream()
    stream.wait_stream(current_platform.current_stream())
    streams.append(stream)


def cuda_worker(
    kv_caches: CanonicalKVCaches, slab: SharedSlab, blocks_per_chunk: int, offset: int, *, stores: bool = True
) -> OffloadingWorker:
    """A worker that moves whole pages between the GPU and the slab's slots, starting at byte `offset` of each.

    Raises: EngineError if vLLM's worker is not the one that hotspan was built for.
    """
    if ENGINE not in SEARCHED:
        known = ", ".join(".".join(map(str, each)) for each in sorted(SEARCHED))
        raise EngineError(
            f"vLLM {engine_version()} has not passed hotspan's search for wrong orders of copies on GPUs: "
            f"install one of {known} (docs/compatibility.md)"
        )
    check_engine(CudaWorker)
    if missing := asked_of_region(ast.parse(inspect.getsource(gpu_worker))) - set(dir(SlabRegion)) - _FIELDS:
        raise EngineError(
            f"vLLM {engine_version()} asks hotspan's slab for {', '.join(sorted(missing))}, which it does not have: "
            "install a vLLM that hotspan was tested with (docs/compatibility.md)"
        )
    return CudaWorker(kv_caches, slab, blocks_per_chunk, offset, stores=stores)


_FIELDS = {
    *("_base", "_row_stride", "cpu_page_size", "page_size"),
    *("rank", "total_size_bytes", "is_pinned", "pinned_addresses"),
}
"""What a SlabRegion has besides its methods."""


def asked_of_region(worker: ast.AST) -> set[str]:
    """What vLLM's transfer worker asks of the region that it is given."""
    attributes = (node for node in ast.walk(worker) if isinstance(node, ast.Attribute))
    return {node.attr for node in attributes if ast.unparse(node.value) in _REGIONS} - _NOT_ASKED
