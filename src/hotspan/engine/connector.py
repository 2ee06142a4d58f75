"""HotspanConnector: vLLM's offloading connector with hotspan's spec, its namespace and its tiers."""

from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from hotspan.cache.tiered import TieredCache
from hotspan.config.settings import CacheSettings
from hotspan.core.errors import HotspanError
from hotspan.engine.compat import (
    OffloadingConnector,
    OffloadingConnectorMetadata,
    OffloadingWorker,
    build_offloading_config,
    check_engine,
)
from hotspan.engine.identity import namespace_of
from hotspan.engine.manager import HotspanManager
from hotspan.engine.requests import ChunkGroup
from hotspan.engine.spec import HotspanSpec
from hotspan.engine.worker import HostWorker
from hotspan.tiers.disk import DiskOptions, DiskTier
from hotspan.tiers.slab import sweep_dead_slabs

_IDLE_S = 0.005
"""How long an engine with nothing to compute sleeps for a chunk on its way, rather than poll for it."""


class IdleMetadata(OffloadingConnectorMetadata):
    """The metadata of a step that computes nothing: the worker may sleep for its loads."""


class HotspanConnector(OffloadingConnector):
    """The engine's door to the cache. Extra config: `CacheSettings.to_json()` under "hotspan"."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        extra: dict[str, Any] = vllm_config.kv_transfer_config.kv_connector_extra_config
        settings = CacheSettings.from_json(extra["hotspan"])
        self._stale: dict[int, int] = {}  # jobs of before the last reset, with the workers still to report them
        try:
            check_engine()
            extra["blocks_per_chunk"] = _blocks_per_chunk(settings.chunk_tokens, kv_cache_config)
            super().__init__(vllm_config, role, kv_cache_config)
            if role == KVConnectorRole.SCHEDULER:
                self._open(settings)
        except HotspanError as error:
            if settings.error_file is not None:
                Path(settings.error_file).write_text(str(error))
            raise

    @property
    def manager(self) -> HotspanManager:
        """The scheduler's half."""
        manager = self.scheduler.manager
        if not isinstance(manager, HotspanManager):
            raise RuntimeError(f"the connector was given {type(manager).__name__} for a manager")
        return manager

    def on_new_request(self, request: Request) -> None:
        self.manager.admit(request)
        super().on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self.manager.is_waiting(request.request_id):
            return None, False  # saves a scan of all its keys, once a millisecond
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self.manager.count_lookup(request)

    def reset_cache(self) -> bool | None:
        # vLLM forgets its jobs here and lets the workers finish them in the next step: until they say so, their slots
        # must not be given to anybody.
        self._stale = {job_id: job.pending_count for job_id, job in self.scheduler._jobs.items()} | self._stale
        answer = super().reset_cache()
        self._end_clear()
        return answer

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        super().update_connector_output(connector_output)
        if self._stale:
            done = getattr(connector_output.kv_connector_worker_meta, "completed_jobs", {})
            left = {job_id: pending - done.get(job_id, 0) for job_id, pending in self._stale.items()}
            self._stale = {job_id: pending for job_id, pending in left.items() if pending > 0}
            self._end_clear()

    def _end_clear(self) -> None:
        if not self._stale:
            self.manager.cache.end_clear()

    def has_pending_push_work(self) -> bool:
        return bool(self._stale) or super().has_pending_push_work()

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        meta = super().build_connector_meta(scheduler_output)
        if scheduler_output.total_num_scheduled_tokens:
            return meta
        self.manager.idle(_IDLE_S)
        return IdleMetadata(meta.load_jobs, meta.store_jobs, meta.jobs_to_flush)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        if isinstance(self._connector_metadata, IdleMetadata) and isinstance(self._worker, HostWorker):
            self._worker.await_loads(_IDLE_S)
        return super().get_finished(finished_req_ids)

    @property
    def _worker(self) -> OffloadingWorker | None:
        return self.connector_worker.worker if self.connector_worker is not None else None

    def _open(self, settings: CacheSettings) -> None:
        """Open the tiers under this engine's namespace, and hand them to the manager."""
        config = self._vllm_config
        spec = HotspanSpec(build_offloading_config(config, self._kv_cache_config))
        chunk_tokens = min(group.tokens_per_block for group in spec.config.groups) * spec.blocks_per_chunk
        namespace = namespace_of(config, self._kv_cache_config, chunk_tokens, full=settings.model_digest == "full")
        sweep_dead_slabs()
        slab = spec.open_slab()
        below = None
        try:
            if settings.disk is not None:
                directory = Path(settings.disk.directory)
                if config.parallel_config.data_parallel_size > 1:
                    directory /= f"replica-{config.parallel_config.data_parallel_index}"
                options = DiskOptions(
                    directory, settings.disk.bytes, settings.disk.threads, store_depth=max(8, spec.slots // 2)
                )
                below = DiskTier(options, namespace, spec.slot_bytes)
        except BaseException:
            slab.close()
            raise
        finally:
            slab.unlink()  # every worker has mapped it by now
        cache = TieredCache(slab, below, patience_s=settings.patience_s)
        self.manager.open(cache, namespace, self._groups(spec), chunk_tokens, settings.drain_s)

    def _groups(self, spec: HotspanSpec) -> list[ChunkGroup]:
        return [
            ChunkGroup(
                group.group_id,
                group.tokens_per_block * spec.blocks_per_chunk // spec.tokens_per_hash,
                isinstance(self._kv_cache_config.kv_cache_groups[group.group_id].kv_cache_spec, FullAttentionSpec),
            )
            for group in spec.config.groups
        ]


def _blocks_per_chunk(chunk_tokens: int, kv_cache_config: KVCacheConfig) -> int:
    """Blocks that make at least `chunk_tokens` tokens of the group with the largest blocks."""
    largest = max(group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups)
    return max(1, -(-chunk_tokens // largest))
