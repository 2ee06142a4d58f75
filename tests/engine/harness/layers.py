"""A model of several kinds of layers: full attention, and a sliding window or a recurrent state beside it."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec, MambaSpec, SlidingWindowSpec
from vllm.v1.worker.utils import allocate_kv_cache

from .runner import KnownBytes, Row

WINDOW = 512
_HEADS: dict[str, Any] = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}


class Layers(KnownBytes):
    """Checks in every group what its layers would read; `wrong` and `read` are sums over these.

    A window reads what the first token of a step sees. A recurrent state is one number a block: that of the last token
    in it, as vLLM's "align" mode keeps it.
    """

    beside: ClassVar[type[KVCacheSpec]]

    def _get_kv_cache_spec(self) -> dict[str, Any]:
        size = self.cache_config.block_size
        full = FullAttentionSpec(block_size=size, **_HEADS)
        other: KVCacheSpec
        if self.beside is SlidingWindowSpec:
            other = SlidingWindowSpec(block_size=size, sliding_window=WINDOW, **_HEADS)
        else:
            self.cache_config.mamba_cache_mode = "align"
            shape = (full.page_size_bytes // 4,)
            other = MambaSpec(block_size=size, shapes=(shape,), dtypes=(torch.float32,), mamba_cache_mode="align")
        return {"model.layers.0.self_attn.attn": full, "model.layers.1.other": other}

    def _initialize_from_config(self, configs: list[KVCacheConfig]) -> None:
        (config,) = configs
        self._specs = [group.kv_cache_spec for group in config.kv_cache_groups]
        assert len(self._specs) == 2
        self._block = self._specs[0].block_size
        caches = allocate_kv_cache(config, torch.device("cpu"), self.cache_config.get_resolved_kv_cache_layout())
        # All layers lie over each other in one buffer; a block belongs to one group at a time.
        cache: Any = next(iter(caches.values()))
        storage = (cache[0] if isinstance(cache, list | tuple) else cache).untyped_storage()
        memory = torch.empty(0, dtype=torch.int8).set_(storage).numpy().view(np.uint64)
        self._kv = memory.reshape(config.num_blocks, -1)
        self.connector = KVConnectorFactory.create_connector(self.vllm_config, KVConnectorRole.WORKER, config)
        self.connector.register_kv_caches(caches)

    def _attend(self, row: Row, computed: int, end: int) -> None:
        for group, (spec, blocks) in enumerate(zip(self._specs, row.blocks, strict=True)):
            own = np.asarray(row.kv, np.uint64) ^ np.uint64(group)  # no layer has what another one has
            if isinstance(spec, MambaSpec):
                self._recur(own, blocks, computed, end)
            else:
                first = max(0, computed - WINDOW + 1) if isinstance(spec, SlidingWindowSpec) else 0
                self._see(own, blocks, first, computed, end)

    def _see(self, own: Any, blocks: list[int], first: int, computed: int, end: int) -> None:
        places = np.arange(end)
        at = np.asarray(blocks)[places // self._block], places % self._block
        here = self._kv[at[0][first:computed], at[1][first:computed]]
        self.read += computed - first
        self.wrong += int((here != own[first:computed]).sum())
        self._kv[at[0][computed:], at[1][computed:]] = own[computed:end]

    def _recur(self, own: Any, blocks: list[int], computed: int, end: int) -> None:
        if computed:
            self.read += 1
            self.wrong += int(self._kv[blocks[(computed - 1) // self._block], 0]) != int(own[computed - 1])
        self._kv[blocks[(end - 1) // self._block], 0] = own[end - 1]


class Windows(Layers):
    beside = SlidingWindowSpec


class States(Layers):
    beside = MambaSpec
