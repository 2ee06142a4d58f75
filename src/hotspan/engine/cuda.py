"""The worker's half on CUDA: vLLM's own transfer worker (batched DMA on side streams) over hotspan's slab."""

from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker
from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker

from hotspan.core.types import PAGE_BYTES
from hotspan.engine.contract import ENGINE
from hotspan.engine.copies import places
from hotspan.engine.gaps import Gaps
from hotspan.tiers.slab import SharedSlab

if ENGINE >= (0, 32):
    from vllm.v1.kv_offload.cpu.host_register import host_unregister
else:

    def host_unregister(address: int) -> None:
        """Let the driver forget a pinned range."""
        torch.cuda.cudart().cudaHostUnregister(address)


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
    """vLLM's worker, which leaves nothing in a slot of what was there before."""

    def __init__(self, kv_caches: CanonicalKVCaches, slab: SharedSlab, blocks_per_chunk: int, offset: int) -> None:
        region: Any = SlabRegion(slab, offset, rank=torch.cuda.current_device())
        super().__init__(kv_caches, blocks_per_chunk, slab.slots, region)
        self._per_chunk = blocks_per_chunk
        self._gaps: Gaps | None = Gaps(kv_caches, slab, blocks_per_chunk, offset)

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any, **rest: Any) -> bool:
        if self._gaps is not None:
            self._gaps.blank(places(src_spec, dst_spec, self._per_chunk))
        return bool(super().submit_store(job_id, src_spec, dst_spec, **rest))

    def shutdown(self) -> None:
        self._gaps = None
        super().shutdown()


def cuda_worker(kv_caches: CanonicalKVCaches, slab: SharedSlab, blocks_per_chunk: int, offset: int) -> OffloadingWorker:
    """A worker that moves whole pages between the GPU and the slab's slots, starting at byte `offset` of each."""
    return CudaWorker(kv_caches, slab, blocks_per_chunk, offset)
