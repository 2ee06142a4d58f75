"""HotspanConnector: vLLM's offloading connector with hotspan's spec, its namespace and its tiers."""

import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.lora.request import LoRARequest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from hotspan.cache.cost import CostModel
from hotspan.cache.tiered import PATIENCE_S, TieredCache
from hotspan.config.environment import digest_cache, environment
from hotspan.config.secrets import resolved
from hotspan.config.settings import CacheSettings, DiskSettings, L2Settings
from hotspan.core.clock import Clock, SystemClock
from hotspan.core.errors import HotspanError
from hotspan.core.terms import DEFAULT_TENANT, Terms, tenant_label
from hotspan.core.types import Tier
from hotspan.engine.admin import Administrator, Answer, replica_name
from hotspan.engine.admission import Admission
from hotspan.engine.compat import (
    OffloadingConnector,
    OffloadingConnectorMetadata,
    OffloadingConnectorScheduler,
    OffloadingWorker,
    block_hasher,
    build_offloading_config,
    cap_last_store,
    check_engine,
    fix_hash_seed,
    offer_utility,
    offloaded_groups,
    skip_unchanged_keys,
    watch_adapters,
)
from hotspan.engine.events import ChunkEvents
from hotspan.engine.fingerprint import FileDigests
from hotspan.engine.identity import namespace_of
from hotspan.engine.keys import TenantKeys
from hotspan.engine.manager import HotspanManager
from hotspan.engine.prefixes import GpuPrefixes
from hotspan.engine.publisher import offer_publisher
from hotspan.engine.requests import ChunkGroup
from hotspan.engine.spec import HotspanSpec
from hotspan.engine.steps import StepWatch
from hotspan.engine.worker import HostWorker
from hotspan.keyring.keyring import open_keyring
from hotspan.l2.follower import LogFollower, VolatileLog
from hotspan.l2.open import open_store
from hotspan.l2.position import read_position
from hotspan.l2.remote import RemoteOptions, RemoteTier
from hotspan.tiers.disk import DiskOptions, DiskTier
from hotspan.tiers.guard import GuardedTier
from hotspan.tiers.room import RESERVE_BYTES, step_bytes
from hotspan.tiers.shares import Share, Shares
from hotspan.tiers.slab import sweep_dead_slabs

_IDLE_S = 0.005
"""How long an engine with nothing to compute sleeps for a chunk on its way, rather than poll for it."""


_CLOSE_S = 1.0
_KEYS_S = 10.0
"""How long a start waits for the keys of the tenants that are known; the others' come later."""


class IdleMetadata(OffloadingConnectorMetadata):
    """The metadata of a step that computes nothing: the worker may sleep for its loads."""


class HotspanConnector(OffloadingConnector):
    """The engine's door to the cache. Extra config: `CacheSettings.to_json()` under "hotspan"."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        extra: dict[str, Any] = vllm_config.kv_transfer_config.kv_connector_extra_config
        settings = CacheSettings.from_json(extra["hotspan"])
        self._prefixes = GpuPrefixes()
        self._keys: TenantKeys | None = None
        self._follower: LogFollower | None = None
        self._administrator: Administrator | None = None
        self._stale: dict[int, int] = {}  # jobs of before the last reset, with the workers still to report them
        try:
            check_engine()
            fix_hash_seed()
            skip_unchanged_keys()
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
        manager = self._scheduler.manager
        if not isinstance(manager, HotspanManager):
            raise RuntimeError(f"the connector was given {type(manager).__name__} for a manager")
        return manager

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        super().bind_gpu_block_pool(gpu_block_pool)
        self._prefixes.bind(gpu_block_pool)
        if self.manager.events is not None:
            self.manager.events.watch(gpu_block_pool)

    def on_new_request(self, request: Request) -> None:
        self.run_waiting()
        self._prefixes.expire(self._clock.unix())
        self.manager.admit(request)
        self._prefixes.arrive(request)
        super().on_new_request(request)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._retire(request)
        return super().request_finished(request, block_ids)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._retire(request)
        return super().request_finished_all_groups(request, block_ids)

    def _retire(self, request: Request) -> None:
        """What the request left in the engine's prefix cache is known from now on; or goes, if it asked for that."""
        cap_last_store(self._scheduler, request)
        state = self.manager.state(request.request_id)
        if state is None:
            self._prefixes.end(request, lambda index: Terms(), lambda index: None)
            return
        self._prefixes.end(request, state.terms_at, state.keys_at)
        if not state.may_store:
            self._prefixes.forget(request, state.kept_tokens // self._hash_tokens)

    def administer(self, command: dict[str, Any]) -> "Answer | Future[Answer]":
        """Carry out one command of cache administration (engine/admin.py), between two steps."""
        return self._administrator.do(command)

    def run_waiting(self) -> None:
        """Do what other threads left to the scheduler's: foreign invalidations, the second half of commands."""
        if self._administrator is not None:
            self._administrator.run_waiting()

    def shutdown(self) -> None:
        super().shutdown()
        if self._administrator is not None:
            self._administrator.close()
        if self._follower is not None:
            self._follower.close()
        if self._keys is not None:
            self._keys.keyring.close()

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        self.manager.note_hit(request.request_id, num_computed_tokens)
        if self.manager.is_waiting(request.request_id):
            return None, False  # saves a scan of all its keys, once a millisecond
        tokens, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if tokens is not None:
            self.manager.note_answer(request.request_id)
        return tokens, is_async

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        known = partial(self._prefixes.terms, request)
        state = self.manager.begin(request, num_external_tokens, known)
        if state is not None:
            self._prefixes.keep(request, state.terms_at, state.keys_at)

    def reset_cache(self) -> bool | None:
        # vLLM forgets its jobs here and lets the workers finish them in the next step: until they say so, their slots
        # must not be given to anybody.
        self._stale = {job_id: job.pending_count for job_id, job in self._scheduler._jobs.items()} | self._stale
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
        self.run_waiting()
        if self.manager.steps is not None:
            self.manager.steps.begin(scheduler_output)
        meta = super().build_connector_meta(scheduler_output)
        self.manager.forget_ended()
        if scheduler_output.total_num_scheduled_tokens:
            return meta
        self.manager.idle(_IDLE_S)
        return IdleMetadata(meta.load_jobs, meta.store_jobs, meta.jobs_to_flush)

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        # The scheduler asks once for each step, when it has taken note of its output.
        if self.connector_scheduler is not None and self.manager.steps is not None:
            self.manager.steps.end()
        return super().get_kv_connector_stats()

    def take_events(self) -> list[KVCacheEvent]:
        return self.manager.events.take() if self.manager.events is not None else []

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        if isinstance(self._connector_metadata, IdleMetadata) and isinstance(self._worker, HostWorker):
            self._worker.await_loads(_IDLE_S)
        return super().get_finished(finished_req_ids)

    @property
    def _scheduler(self) -> OffloadingConnectorScheduler:
        if self.connector_scheduler is None:
            raise RuntimeError("this connector is a worker's")
        return self.connector_scheduler

    @property
    def _worker(self) -> OffloadingWorker | None:
        return self.connector_worker.worker if self.connector_worker is not None else None

    def _open(self, settings: CacheSettings) -> None:
        """Open the tiers under this engine's namespace, and hand them to the manager."""
        config = self._vllm_config
        spec = HotspanSpec(build_offloading_config(config, self._kv_cache_config))
        blocks = [group.tokens_per_block for group in offloaded_groups(spec.config)]
        chunk_tokens, largest = min(blocks) * spec.blocks_per_chunk, max(blocks) * spec.blocks_per_chunk
        digests = FileDigests(digest_cache(environment()))
        is_full = settings.model_digest == "full"
        namespace = namespace_of(config, self._kv_cache_config, chunk_tokens, digests, full=is_full)
        self._hash_tokens = spec.tokens_per_hash
        self._clock = SystemClock()  # the one that all below go by
        self._prefixes = GpuPrefixes(len(self._kv_cache_config.kv_cache_groups), largest // spec.tokens_per_hash)
        self._keys = _keys(settings, self._clock)
        sweep_dead_slabs()
        slab = spec.open_slab()
        with contextlib.ExitStack() as opened:  # what was opened is closed if anything after it can't be
            opened.callback(slab.close)
            if self._keys is not None:
                opened.callback(self._keys.keyring.close)
            try:
                disk = self._open_disk(settings, namespace, spec, opened)
                l2 = self._open_l2(settings, namespace, spec, opened)
            finally:
                slab.unlink()  # every worker has mapped it by now
            opened.pop_all()
        below = [tier for tier in (disk, l2) if tier is not None]
        cost = self._cost(settings)
        cache = TieredCache(
            slab,
            *below,
            namespace=namespace,
            shares=_shares(settings),
            patience_s=PATIENCE_S if settings.patience_s is None else settings.patience_s,
            cost=cost,
            clock=self._clock,
        )
        admission = Admission(settings, namespace, self._groups(spec), largest, self._keys, self._clock)
        step_tokens = config.scheduler_config.max_num_batched_tokens
        steps = StepWatch(cost, step_tokens, self._clock) if cost is not None else None
        self.manager.open(cache, admission, chunk_tokens, settings.drain_s, self._clock, steps, self._follower)
        chain = next((group for group in self._groups(spec) if group.is_chain), None)
        offer_publisher(settings.events_key)  # the scheduler makes its publisher after its connector
        if chain is not None and config.kv_events_config is not None and config.kv_events_config.enable_kv_cache_events:
            self.manager.events = ChunkEvents(cache, chain)
        self._administrator = Administrator(
            self.manager,
            self._prefixes,
            disk,
            self._follower,
            self._disk_directory(settings) if self._follower is not None and self._follower.is_shared else None,
            self._keys,
            lambda: block_hasher(config, spec.tokens_per_hash),
            self._clock,
        )
        offer_utility("hotspan", lambda core, command: core.scheduler.connector.administer(command))
        watch_adapters(_load_adapter)

    def _open_disk(
        self, settings: CacheSettings, namespace: bytes, spec: HotspanSpec, opened: contextlib.ExitStack
    ) -> GuardedTier | None:
        if settings.disk is None:
            return None
        disk = GuardedTier(self._disk_opener(settings, settings.disk, namespace, spec), self._clock)
        opened.callback(disk.close, _CLOSE_S)
        return disk

    def _open_l2(
        self, settings: CacheSettings, namespace: bytes, spec: HotspanSpec, opened: contextlib.ExitStack
    ) -> GuardedTier | None:
        """The L2, and the follower of its log."""
        if settings.l2 is None:
            return None
        follower = self._follower = _follower(settings.l2, self._disk_directory(settings), self._clock)
        opened.callback(follower.close)
        opener = self._l2_opener(settings.l2, follower, namespace, spec, is_isolated=settings.is_isolated)
        l2 = GuardedTier(opener, self._clock)
        opened.callback(l2.close, _CLOSE_S)
        follower.start()
        return l2

    def _cost(self, settings: CacheSettings) -> CostModel | None:
        """What decides between loading and computing, unless a patience was set, or nothing lies below RAM."""
        tiers = {Tier.DISK: settings.disk, Tier.L2: settings.l2}
        lanes = {tier: below.threads for tier, below in tiers.items() if below is not None}
        if settings.patience_s is not None or not lanes:
            return None
        return CostModel(self._vllm_config.scheduler_config.max_num_batched_tokens, lanes, self._clock)

    def _disk_directory(self, settings: CacheSettings) -> Path | None:
        """Where the disk tier of this engine is: data-parallel replicas of one server have one each."""
        if settings.disk is None:
            return None
        directory, parallel = Path(settings.disk.directory), self._vllm_config.parallel_config
        return directory / f"replica-{parallel.data_parallel_index}" if parallel.data_parallel_size > 1 else directory

    def _disk_opener(
        self, settings: CacheSettings, disk: DiskSettings, namespace: bytes, spec: HotspanSpec
    ) -> Callable[[bool], DiskTier]:
        """What opens the disk tier, and opens it again after trouble."""
        options = DiskOptions(
            self._disk_directory(settings) or Path(disk.directory),
            disk.bytes,
            disk.threads,
            store_depth=max(8, spec.slots // 2),
            keys=self._keys,
            shares=_shares(settings),
            step_bytes=step_bytes(disk.bytes),
            reserve_bytes=RESERVE_BYTES,
        )
        return lambda again: DiskTier(replace(options, is_new=not again), namespace, spec.slot_bytes, self._clock)

    def _l2_opener(
        self, settings: L2Settings, follower: LogFollower, namespace: bytes, spec: HotspanSpec, *, is_isolated: bool
    ) -> Callable[[bool], RemoteTier]:
        """What opens the L2 tier, and opens it again after trouble."""
        options = resolved(settings.store_options, environment())
        if settings.url.startswith("s3:") and not is_isolated:
            options |= {"is_per_tenant": "false"}

        def opened(again: bool) -> RemoteTier:
            remote = RemoteOptions(
                open_store("--l2", settings.url, options),
                follower,
                settings.threads,
                store_depth=max(4, spec.slots // 4),
                keys=self._keys,
            )
            return RemoteTier(remote, namespace, spec.slot_bytes, self._clock)

        return opened

    def _groups(self, spec: HotspanSpec) -> list[ChunkGroup]:
        return [
            ChunkGroup(
                group.index,
                group.tokens_per_block * spec.blocks_per_chunk // spec.tokens_per_hash,
                group.tokens_per_block * spec.blocks_per_chunk,
                isinstance(self._kv_cache_config.kv_cache_groups[group.index].kv_cache_spec, FullAttentionSpec),
            )
            for group in offloaded_groups(spec.config)
        ]


def _load_adapter(core: Any, lora: LoRARequest) -> None:
    """Learn what an adapter's files are before the engine reads them."""
    if isinstance(core.scheduler.connector, HotspanConnector):
        core.scheduler.connector.manager.load_adapter(lora)


def _blocks_per_chunk(chunk_tokens: int, kv_cache_config: KVCacheConfig) -> int:
    """Blocks that make at least `chunk_tokens` tokens of the group with the largest blocks."""
    largest = max(group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups)
    return max(1, -(-chunk_tokens // largest))


def _follower(settings: L2Settings, directory: Path | None, clock: Clock) -> LogFollower:
    """The reader of the L2's log, with a connection of its own."""
    if settings.log is not None:
        store = open_store("--l2-log", settings.log, resolved(settings.log_options, environment()))
    else:
        store = open_store("--l2", settings.url, resolved(settings.store_options, environment()))
    if store.log is None:
        store.close()
        log = VolatileLog(clock)
        return LogFollower(log, replica_name(), clock, since=log.position)
    since = read_position(directory) if directory is not None else None
    return LogFollower(store.log, replica_name(), clock, since=since, store=store)


def _shares(settings: CacheSettings) -> Shares:
    return Shares(by_tenant={tenant_label(share.tenant): Share(share.floor, share.quota) for share in settings.tenants})


def _keys(settings: CacheSettings, clock: Clock) -> TenantKeys | None:
    """The tenants' keys, those of the known tenants unwrapped."""
    if settings.encryption is None:
        return None
    tenants = {DEFAULT_TENANT, *(share.tenant for share in settings.tenants)}
    keyring = open_keyring(Path(settings.encryption.store), settings.encryption.kek, environment(), clock)
    keyring.prepare(tenants, _KEYS_S)
    return TenantKeys(keyring, tenants)
