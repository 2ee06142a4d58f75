"""The worker's half on CUDA: vLLM's own transfer worker (batched DMA on side streams) over hotspan's slab."""

from typing import Any

import torch
from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker
from vllm.v1.kv_offload.cpu.host_register import host_unregister

from hotspan.engine.compat import CanonicalKVCaches, OffloadingWorker
from hotspan.tiers.slab import SharedSlab


class SlabRegion:
    """hotspan's slab with the face of vLLM's SharedOffloadRegion, as far as its transfer worker looks.

    The worker pins `_base` with the driver, takes one view a tensor in order, and calls `cleanup` at the end.
    """

    def __init__(self, slab: SharedSlab, offset: int, rank: int) -> None:
        self._slab = slab
        self._next = offset
        self._row_stride = slab.slot_bytes
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

    def cleanup(self) -> None:
        """Unpin and unmap."""
        for address in reversed(self.pinned_addresses):
            host_unregister(address)
        self.pinned_addresses.clear()
        self.is_pinned = False
        self._base = None
        self._slab.close()


def cuda_worker(kv_caches: CanonicalKVCaches, slab: SharedSlab, blocks_per_chunk: int, offset: int) -> OffloadingWorker:
    """A worker that moves whole pages between the GPU and the slab's slots, starting at byte `offset` of each."""
    region: Any = SlabRegion(slab, offset, rank=torch.cuda.current_device())
    return CPUOffloadingWorker(
        kv_caches=kv_caches, blocks_per_chunk=blocks_per_chunk, num_cpu_chunks=slab.slots, mmap_region=region
    )
