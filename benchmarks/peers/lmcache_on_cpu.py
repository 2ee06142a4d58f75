"""LMCache in the engine's process where there is no GPU: everything of its release but the copy of a GPU.

Its release has no copy for CPU engines, and would compute every prompt. The connector that vLLM loads here is LMCache's
own, with a copy of whole blocks between the engine's KV and LMCache's memory.
"""

from typing import Any

import torch
from lmcache.v1 import gpu_connector
from lmcache.v1.gpu_connector import GPUConnectorInterface
from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1


class HostCopies(GPUConnectorInterface):
    """Copies of chunks, as KV_2LTD: [2, layers, tokens, heads x size]."""

    def __init__(self, kv_shape: tuple[int, ...]) -> None:
        self._shape = kv_shape

    def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        """Into the engine's blocks, but for those that the engine has itself."""
        self._copy(memory_obj, start, end, kwargs, kwargs.get("vllm_cached_tokens", 0), is_load=True)

    def from_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        """Out of the engine's blocks."""
        self._copy(memory_obj, start, end, kwargs, 0, is_load=False)

    def batched_to_gpu(self, memory_objs: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
        for each in zip(memory_objs, starts, ends, strict=False):
            self.to_gpu(*each, **kwargs)

    def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
        for each in zip(memory_objs, starts, ends, strict=False):
            self.from_gpu(*each, **kwargs)

    def get_shape(self, num_tokens: int) -> torch.Size:
        layers, both, _, heads, size = self._shape
        return torch.Size([both, layers, num_tokens, heads * size])

    def _copy(
        self, memory_obj: Any, start: int, end: int, kwargs: dict[str, Any], cached: int, *, is_load: bool
    ) -> None:
        chunk = memory_obj.tensor
        for layer, cache in enumerate(kwargs["kvcaches"]):
            # As vLLM's CPU attention has it: [blocks, heads, tokens x 2, size], keys before values.
            blocks, heads, tokens, _ = cache.shape
            own = cache.view(blocks, heads, 2, tokens, -1)
            own_blocks = kwargs["slot_mapping"][start:end:tokens].to("cpu", torch.long) // tokens
            kept = chunk[:, layer, : len(own_blocks) * tokens].view(2, -1, tokens, heads, own.shape[-1])
            first = max(cached - start, 0) // tokens
            if is_load:
                own[own_blocks[first:]] = kept[:, first:].permute(1, 3, 0, 2, 4)
            else:
                kept.copy_(own[own_blocks].permute(2, 0, 3, 1, 4))


def _connector(config: Any, metadata: Any, engine: Any, layout_hints: Any = None) -> GPUConnectorInterface:
    return HostCopies(tuple(metadata.kv_shape))


gpu_connector.CreateGPUConnector = _connector


class LMCacheOnCpu(LMCacheConnectorV1):
    """LMCache's connector in an engine without a GPU."""
