"""The spec: sizes the slab, and makes the manager (scheduler's process) and the worker (worker processes) over it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
)
from vllm.v1.kv_offload.config import OffloadingConfig

from hotspan.config.settings import CacheSettings
from hotspan.core.errors import ConfigError
from hotspan.core.types import GIB, PAGE_BYTES, round_up
from hotspan.engine.metrics import DEFINITIONS, unregister_metrics
from hotspan.tiers.slab import SharedSlab

_MANAGED: ContextVar[Callable[["HotspanSpec"], OffloadingManager]] = ContextVar("hotspan_manager")


@contextmanager
def managed(make: Callable[["HotspanSpec"], OffloadingManager]) -> Iterator[None]:
    """Specs made inside get their manager from `make`, which knows more of the engine than vLLM tells a spec."""
    token = _MANAGED.set(make)
    try:
        yield
    finally:
        _MANAGED.reset(token)


class HotspanSpec(OffloadingSpec):
    """vLLM's offloading spec for hotspan's tiers.

    A slot is one chunk of one KV cache group: the blocks' pages of every worker, one after the other.

        slot: [ rank 0: tensor 0 | tensor 1 ... ][ rank 1: ... ] ... [ zeros up to a page ]
    """

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        unregister_metrics()
        return DEFINITIONS

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self.settings = CacheSettings.from_json(self.extra_config["hotspan"])
        self.rank_bytes = config.worker_kv_bytes_per_block * self.blocks_per_chunk
        self.slot_bytes = round_up(max(1, self.rank_bytes * config.parallel.world_size), PAGE_BYTES)
        self.slots = self.settings.ram_bytes // self.slot_bytes
        if self.slots < 1:
            raise ConfigError(
                f"--ram-gib {self.settings.ram_bytes / GIB:g} holds not one chunk of this model "
                f"({self.slot_bytes / GIB:.4f} GiB): raise it, or lower --chunk-tokens"
            )
        self._manager: OffloadingManager | None = None
        self._worker: OffloadingWorker | None = None

    def open_slab(self) -> SharedSlab:
        """This process's mapping of the slab; the first process to ask makes it.

        Blocks: that process, for about a second a GiB.
        """
        return SharedSlab(self.config.engine_id, self.slots, self.slot_bytes)

    def get_manager(self) -> OffloadingManager:
        if self._manager is None:
            self._manager = _MANAGED.get()(self)
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            offset = self.config.parallel.rank * self.rank_bytes
            if current_platform.is_cuda_alike():
                from hotspan.engine.cuda import cuda_worker

                self._worker = cuda_worker(kv_caches, self.open_slab(), self.blocks_per_chunk, offset)
            else:
                from hotspan.engine.worker import HostWorker

                self._worker = HostWorker(kv_caches, self.open_slab(), self.blocks_per_chunk, offset)
        return self._worker
