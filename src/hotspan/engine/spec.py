"""The spec: sizes the slab, and makes the manager (scheduler's process) and the worker (worker processes) over it."""

import logging
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
from hotspan.core.message_buffers import sweep_buffers
from hotspan.core.types import GIB, PAGE_BYTES, round_up
from hotspan.engine.hosts import ADAPTERS, NODES, START, RankReport, mark, over_hosts_refused, ranks_here
from hotspan.engine.metrics import DEFINITIONS, unregister_metrics
from hotspan.engine.replicas import REPLICAS
from hotspan.tiers.slab import SharedSlab, sweep_dead_slabs

logger = logging.getLogger(__name__)

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

    A slot is one chunk of one KV cache group: the blocks' pages of every worker, one after the other. Where several
    hosts share the ranks by configuration, the slots of each have room for its own. Ranks that hold the same KV have
    one part: the first of them stores it, and all load it.

        slot: [ rank 0: tensor 0 | tensor 1 ... ][ rank 1: ... ] ... [ zeros up to a page ]

    ranks:         how many share a slot.
    replicas:      how many of these, one after the other, hold the same KV.
    is_over_hosts: whether a rank is elsewhere than the scheduler, which asks (`find_ranks`).
    """

    is_over_hosts = False

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        unregister_metrics()
        return DEFINITIONS

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self.settings = CacheSettings.from_json(self.extra_config["hotspan"])
        self.rank_bytes = config.worker_kv_bytes_per_block * self.blocks_per_chunk
        self.ranks = config.parallel.world_size // self.extra_config.get(NODES, 1)
        self.replicas: int = self.extra_config.get(REPLICAS, 1)
        self.slot_bytes = round_up(max(1, self.rank_bytes * self.ranks // self.replicas), PAGE_BYTES)
        self.slots = self.settings.ram_bytes // self.slot_bytes
        if self.slots < 1:
            raise ConfigError(
                f"--ram-gib {self.settings.ram_bytes / GIB:g} holds not one chunk of this model "
                f"({self.slot_bytes / GIB:.4f} GiB): raise it, or lower --chunk-tokens"
            )
        self._manager: OffloadingManager | None = None
        self._worker: OffloadingWorker | None = None
        self._slab: SharedSlab | None = None

    def open_slab(self) -> SharedSlab:
        """This process's mapping of the slab; the first process to ask makes it.

        Blocks: that process, for about a second a GiB.
        """
        name = "-".join(filter(None, (self.extra_config.get(START), self.config.engine_id)))
        self._slab = SharedSlab(name, self.slots, self.slot_bytes)
        return self._slab

    def find_ranks(self, slab: SharedSlab) -> None:
        """Find out which ranks share the scheduler's slab. Raises: ConfigError if what is asked for needs them all."""
        here, ranks = ranks_here(slab, self._mark_bytes, self.ranks), self.config.parallel.world_size
        self.is_over_hosts = len(here) < ranks
        if self.is_over_hosts:
            how = f"{len(here)} of its {ranks} ranks are on the scheduler's"
            over_hosts_refused(self.settings, how, has_adapters=self.extra_config.get(ADAPTERS, False))
            logger.info("engine_over_hosts ranks=%d ranks_on_this_host=%d: served with RAM alone", ranks, len(here))

    def report(self) -> RankReport:
        """What the slab of this process looks like to its rank."""
        rank = self.config.parallel.rank
        return RankReport(rank, self.slots, self.slot_bytes, self.rank_bytes, self.blocks_per_chunk)

    def unlink_slab(self) -> None:
        """Drop the slab's name on this host: all who share it have mapped it."""
        if self._slab is not None:
            self._slab.unlink()

    def get_manager(self) -> OffloadingManager:
        if self._manager is None:
            self._manager = _MANAGED.get()(self)
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            rank = self.config.parallel.rank % self.ranks
            offset, stores = rank // self.replicas * self.rank_bytes, rank % self.replicas == 0
            sweep_dead_slabs()  # on a host without a scheduler nobody else does
            sweep_buffers()
            slab = self.open_slab()
            if current_platform.is_cuda_alike():
                from hotspan.engine.cuda import cuda_worker

                self._worker = cuda_worker(kv_caches, slab, self.blocks_per_chunk, offset, stores=stores)
            else:
                from hotspan.engine.worker import HostWorker

                self._worker = HostWorker(kv_caches, slab, self.blocks_per_chunk, offset, stores=stores)
            mark(slab, rank * self._mark_bytes)
        return self._worker

    @property
    def _mark_bytes(self) -> int:
        """How far apart the marks of two ranks are in a slot, which may have one part for both."""
        return self.slot_bytes // self.ranks
