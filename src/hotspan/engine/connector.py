"""HotspanConnector: vLLM's offloading connector, which hands what the engine asks and tells to hotspan's manager."""

import contextlib
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.forward_context import ForwardContext
from vllm.platforms import current_platform
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from hotspan.config.connector import HASH, SPEC, connector_settings, extra_config
from hotspan.config.environment import environment
from hotspan.config.settings import CacheSettings
from hotspan.core.aftermath import end_with_parent
from hotspan.core.deadline import Deadline
from hotspan.core.errors import ConfigError, HotspanError
from hotspan.core.message_buffers import BufferNote, sweep_buffers
from hotspan.engine.admin import Administrator
from hotspan.engine.blend.orders import Orders, Report
from hotspan.engine.compat import (
    cap_last_store,
    check_engine,
    fix_hash_seed,
    is_engine_core,
    offer_utility,
    skip_unchanged_keys,
    watch_ends,
    watch_executors,
    watch_runners,
)
from hotspan.engine.contract import ENGINE, STATES_SINCE, TRIED_WITH, engine_version
from hotspan.engine.counts import reads_cache
from hotspan.engine.encoder.outputs import keeps_outputs
from hotspan.engine.failed_loads import FailedLoads, Lost
from hotspan.engine.hosts import ADAPTERS, NODES, START, RankReport, check_reports, check_shape, nodes
from hotspan.engine.inline import InlineLoads, can_load_inline
from hotspan.engine.manager import HotspanManager
from hotspan.engine.net import LEFT_OUT, netted
from hotspan.engine.older import mend_scheduler
from hotspan.engine.opening import open_cache
from hotspan.engine.plugin import log_as_vllm, open_controls
from hotspan.engine.replicas import REPLICAS, replicas_of
from hotspan.engine.spec import HotspanSpec, managed
from hotspan.engine.weights import WeightsWatch
from hotspan.engine.worker import HostWorker

if TYPE_CHECKING:
    from hotspan.engine.blend.steps import BlendSteps

logger = logging.getLogger(__name__)

_FINISH_S = 5.0
"""How long an engine that ends, and has no process of its own, goes on for what its last requests left to store."""

_IDLE_S = 0.005
"""How long an engine with nothing to compute sleeps for a chunk on its way, rather than poll for it."""


@dataclass
class StepMetadata(OffloadingConnectorMetadata):
    """What hotspan's worker is told besides of a step.

    is_idle: it computes nothing: the worker may sleep for its loads.
    inline:  load jobs that its forward pass waits for, and their requests.
    lost:    what is not loaded, though vLLM counts on it.
    """

    is_idle: bool = False
    blend: Orders | None = None
    inline: dict[int, str] = field(default_factory=dict)
    lost: Lost = field(default_factory=Lost)


@dataclass
class BlendedMetadata(OffloadingWorkerMetadata):
    """What a worker that blends tells besides."""

    blend: Report = field(default_factory=Report)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> OffloadingWorkerMetadata:
        meta = super().aggregate(other)
        report = self.blend.joined(other.blend) if isinstance(other, BlendedMetadata) else self.blend
        return BlendedMetadata(meta.completed_jobs, meta.transfer_stats, report)


class HotspanConnector(OffloadingConnector):
    """The engine's way to the cache. Extra config: `CacheSettings.to_json()` under "hotspan", or as
    `connector_settings` reads it where somebody else starts the engine.

    manager, administrator, weights: the scheduler's; a worker's connector has none.
    """

    manager: HotspanManager
    administrator: Administrator
    weights: WeightsWatch

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        extra: dict[str, Any] = vllm_config.kv_transfer_config.kv_connector_extra_config
        settings = _settings(vllm_config, extra)
        self._blends: BlendSteps | None = None  # a worker's that can blend
        self._no_blends: Report | None = None  # why it can't, until the scheduler is told
        self._inline: InlineLoads | None = None
        self._failed_loads = FailedLoads()  # a worker's
        self._lost = Lost()  # of the step that is being scheduled
        self._stale: dict[int, int] = {}  # jobs of before the last reset, with the workers still to report them
        self._awaits_reports = False  # of ranks on other hosts

        def opened(spec: HotspanSpec) -> HotspanManager:
            self._spec = spec
            sweep_buffers()
            self.manager, self.administrator, self.weights = open_cache(spec, vllm_config, kv_cache_config)
            self.weights.is_in_program = not is_engine_core()
            return self.manager

        try:
            check_engine(HotspanConnector, HotspanManager, HotspanSpec, HostWorker)
            fix_hash_seed()
            skip_unchanged_keys()
            extra[ADAPTERS] = vllm_config.lora_config is not None
            check_shape(vllm_config.parallel_config, settings, has_adapters=extra[ADAPTERS])
            _check_groups(kv_cache_config)
            extra[NODES] = nodes(vllm_config.parallel_config)
            extra[START] = getattr(vllm_config, "instance_id", "")
            extra[REPLICAS] = replicas_of(vllm_config, kv_cache_config)
            extra["blocks_per_chunk"] = _blocks_per_chunk(settings.chunk_tokens, kv_cache_config)
            with managed(opened):
                super().__init__(vllm_config, role, kv_cache_config)
        except HotspanError as error:
            _explain(settings, error)
            raise
        if role == KVConnectorRole.WORKER and settings.blend is not None:
            if ENGINE == TRIED_WITH and current_platform.is_cpu():
                watch_runners(self._try_blending)
            else:
                self._no_blends = Report(off=f"it works with vLLM {TRIED_WITH[0]}.{TRIED_WITH[1]} on CPU only")
        if keeps_outputs(settings, vllm_config):
            self._keep_outputs(vllm_config)
        self._buffers: BufferNote | None = None
        if role == KVConnectorRole.WORKER and getattr(vllm_config.parallel_config, "node_rank", 0):
            self._buffers = BufferNote()  # on a further host nobody else does
        if role == KVConnectorRole.SCHEDULER:
            self.manager.closing.callback(BufferNote().close)  # those of the executor, which is there already
            self._awaits_reports = self._spec.is_over_hosts
            if current_platform.is_cpu() and can_load_inline(self._scheduler):
                self._inline = InlineLoads(self._scheduler, self.manager)
            if is_engine_core():
                end_with_parent()
            offer_utility("hotspan", lambda core, command: core.scheduler.connector.administrator.do(command))
            mend_scheduler(self.manager)
            watch_executors(_follow)
            watch_ends(_finish_stores)
            for close in () if settings.is_served else open_controls(self.administrator, vllm_config):
                self.manager.closing.callback(close)

    def _keep_outputs(self, vllm_config: VllmConfig) -> None:
        """Let the engine ask for encoder outputs, too."""
        from hotspan.engine.encoder.connector import offer_outputs, offer_slots  # of vLLM's it takes what others lack

        if self.connector_worker is None:
            if self.manager.outputs is not None:
                offer_outputs(vllm_config, self.manager.outputs)
        else:
            worker = self.connector_worker
            offer_slots(vllm_config, lambda index: worker.worker.slot(index))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """The metrics on vLLM's page. The process that shows it makes no connector: only here it learns the spec."""
        vllm_config.kv_transfer_config.kv_connector_extra_config |= SPEC
        return super().build_prom_metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # -- the scheduler's -----------------------------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        super().bind_gpu_block_pool(gpu_block_pool)
        self.manager.bind(gpu_block_pool)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[Any, KVConnectorHandshakeMetadata]) -> None:
        # The engine core asks all workers once, when each has registered its KV cache and this connector is there.
        parallel = self._vllm_config.parallel_config
        # vLLM has one place for those that differ in this rank only.
        ranks = parallel.world_size if parallel.prefill_context_parallel_size == 1 else None
        reports = [each for each in metadata.values() if isinstance(each, RankReport)]
        try:
            check_reports(reports, self._spec.report(), ranks)
        except HotspanError as error:
            _explain(self._spec.settings, error)
            raise
        self._awaits_reports = False

    def on_new_request(self, request: Request) -> None:
        self.weights.require_bound()
        self.weights.look()
        self.administrator.run_waiting()
        if self._awaits_reports:  # an executor that asks no worker
            LEFT_OUT.note("error")
            self.manager.leave_out(request)
        else:
            self.manager.admit(request)
        super().on_new_request(request)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._retire(request)
        delayed, said = super().request_finished(request, block_ids)
        return delayed, self._report(request) or said

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._retire(request)
        delayed, said = super().request_finished_all_groups(request, block_ids)
        return delayed, self._report(request) or said

    @netted(lambda: None)
    def _retire(self, request: Request) -> None:
        cap_last_store(self._scheduler, request)
        self.manager.retire(request)

    @netted(lambda: None)
    def _report(self, request: Request) -> dict[str, Any] | None:
        """What the answer says in its `kv_transfer_params`: of blending, of why its tokens were computed, and of wrong
        directives.
        """
        name = request.request_id
        said = {
            "blend": self.manager.end_blend(name),
            "explain": self.manager.explained(name),
            "refused": self.manager.objection(name),
        }
        return {part: told for part, told in said.items() if told} or None

    def _leave_out(self, subject: object) -> None:
        """Nothing of a request is cached any more."""
        self.manager.leave_out(subject)

    @netted(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if not reads_cache(request):
            super().get_num_new_matched_tokens(request, num_computed_tokens)
            return 0, False
        if self.manager.is_waiting(request.request_id, num_computed_tokens):
            return None, False  # saves a scan of all its keys, once a millisecond
        tokens, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if tokens is None and self._inline is not None and self.manager.await_chunks(request.request_id):
            tokens, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if tokens is not None:
            blended = self.manager.blended(request, num_computed_tokens, tokens)
            if blended is None:
                return None, False  # windows are on their way
            self.manager.note_answer(request.request_id)
            if blended:
                return blended, True
            if self._inline is not None and self._inline.answer(request, num_computed_tokens, tokens):
                return tokens, False
        return tokens, is_async

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        is_inline = self._inline is not None and self._inline.is_asked(request)
        try:
            self._begin_load(request, blocks, num_external_tokens)
        except Exception as error:
            LEFT_OUT.caught("update_state_after_alloc", error)
            self._lose_load(request, blocks, num_external_tokens, is_inline=is_inline)
        else:
            self.manager.end_allocation()
        self.manager.begin(request, num_external_tokens)

    def _begin_load(self, request: Request, blocks: KVCacheBlocks, tokens: int) -> None:
        if tokens and self._blend(request, blocks):
            tokens = 0  # of the tiers' chunks
        fresh = self._inline.fresh(request, blocks) if self._inline is not None and tokens else None
        super().update_state_after_alloc(request, fresh or blocks, tokens)
        if self._inline is not None and fresh is not None:
            self._inline.take(request, tokens)

    def _lose_load(self, request: Request, blocks: KVCacheBlocks, tokens: int, *, is_inline: bool) -> None:
        """A load could not begin on whose bytes vLLM counts: let it compute them."""
        scheduler = self._scheduler
        state = scheduler._req_status.get(request.request_id)
        for job_id in [n for n, job in scheduler._current_batch_load_jobs.items() if job.req_id == request.request_id]:
            del scheduler._current_batch_load_jobs[job_id]
            if state is not None:
                state.transfer_jobs.discard(job_id)
            job = scheduler._jobs.pop(job_id, None)
            if job is not None and scheduler._chunks_being_loaded:
                scheduler._chunks_being_loaded.difference_update(job.keys)
        if self._inline is not None:
            self._inline.withdraw(request)
        self.manager.end_allocation(request)
        if not tokens:
            return
        if not is_inline:
            self._lost.requests.add(request.request_id)
        else:
            groups, size = blocks.get_block_ids(), self._vllm_config.cache_config.block_size
            kept = self.manager.engine_tokens(request.request_id) // size if len(groups) == 1 else 0
            self._lost.blocks.update(block for group in groups for block in group[kept:] if block)

    def _blend(self, request: Request, blocks: KVCacheBlocks) -> bool:
        """Whether a request is blended in the blocks that it got."""
        if self.manager.blending is None:
            return False
        own = blocks.get_block_ids()[0]
        plan = self.manager.blending.begin(request, own)
        if plan is None:
            return False
        if request.prefill_stats is not None:  # what is blended is reported apart from what was cached
            request.prefill_stats.set(request.num_prompt_tokens, plan.claimed.start, 0)
        # Copies out of these blocks that still run must end before the blend writes into them.
        self._scheduler._current_batch_allocated_block_ids.update(own)
        return True

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        self.weights.look()
        self.administrator.run_waiting()
        self._end_clear()
        self.manager.begin_step(scheduler_output)
        meta = super().build_connector_meta(scheduler_output)
        self.manager.forget_ended()
        is_idle, orders = not scheduler_output.total_num_scheduled_tokens, self._orders(scheduler_output)
        if orders is not None:
            self.manager.note_blends()
        if is_idle and orders is None:
            self.manager.idle(_IDLE_S)
        inline = self._inline.scheduled() if self._inline is not None else {}
        is_idle = is_idle and orders is None
        lost, self._lost = self._lost, Lost()
        return StepMetadata(meta.load_jobs, meta.store_jobs, meta.jobs_to_flush, is_idle, orders, inline, lost)

    def _orders(self, scheduled: SchedulerOutput) -> Orders | None:
        """What the worker is to blend in this step; what has begun goes on, whatever else can't be told."""
        blending = self.manager.blending
        if blending is None:
            return None
        try:
            return blending.orders(scheduled)
        except Exception as error:
            LEFT_OUT.caught("orders", error)
            return self._bare_orders()

    @netted(lambda: None)
    def _bare_orders(self) -> Orders | None:
        return self.manager.blending.bare_orders() if self.manager.blending is not None else None

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        # The scheduler asks once for each step, when it has taken note of its output.
        if self.connector_scheduler is not None:
            self.manager.end_step()
        return super().get_kv_connector_stats()

    @netted(list)
    def take_events(self) -> list[KVCacheEvent]:
        return self.manager.events.take() if self.manager.events is not None else []

    def reset_cache(self) -> bool | None:
        # vLLM forgets its jobs here and lets the workers finish them in the next step: until they report, their slots
        # must not be given to anybody.
        self._stale = {job_id: job.pending_count for job_id, job in self._scheduler._jobs.items()} | self._stale
        if self._inline is not None:
            self._stale |= self._inline.reset()
        # It also takes for granted that the last reset's jobs were handed to the workers since: two may come in a row.
        unflushed, self._scheduler._current_batch_jobs_to_flush = self._scheduler._current_batch_jobs_to_flush, set()
        answer = super().reset_cache()
        self._scheduler._current_batch_jobs_to_flush |= unflushed
        if self.manager.blending is not None:
            self.manager.blending.clear()
        self._end_clear()
        return answer

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        meta, blending = connector_output.kv_connector_worker_meta, self.manager.blending
        done = dict(getattr(meta, "completed_jobs", {}))
        if isinstance(meta, OffloadingWorkerMetadata):
            self.manager.note_copies(meta.transfer_stats.load.bytes, meta.transfer_stats.load.time)
            if self._inline is not None:
                self._inline.note(meta)
        super().update_connector_output(connector_output)
        if isinstance(meta, BlendedMetadata) and meta.blend and blending is not None:
            self.manager.note_report(meta.blend)
            self._end_clear()
        if self._stale:
            left = {job_id: pending - done.get(job_id, 0) for job_id, pending in self._stale.items()}
            self._stale = {job_id: pending for job_id, pending in left.items() if pending > 0}
            self._end_clear()

    @netted(lambda: True)
    def has_pending_push_work(self) -> bool:
        blending = self.manager.blending
        return bool(self._stale) or (blending is not None and blending.is_busy) or super().has_pending_push_work()

    @netted(lambda: None)
    def _end_clear(self) -> None:
        others = (self.manager.blending, self.manager.outputs)
        if not self._stale and not any(each is not None and each.is_stale for each in others):
            self.manager.cache.end_clear()

    @property
    def _scheduler(self) -> OffloadingConnectorScheduler:
        if self.connector_scheduler is None:
            raise RuntimeError("this connector is a worker's")
        return self.connector_scheduler

    # -- a worker's ----------------------------------------------------------------------------------------------------

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        if self.connector_worker is None:
            return None
        spec: HotspanSpec = self.connector_worker.spec
        spec.unlink_slab()  # asked once all have mapped it; on a host without a scheduler nobody else does
        return spec.report()

    def shutdown(self) -> None:
        if self.connector_worker is not None:  # a rank that was asked for no report: the engine did not start, say
            self.connector_worker.spec.unlink_slab()
            if self._buffers is not None:
                self._buffers.close()
        super().shutdown()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        meta = self._connector_metadata
        if isinstance(meta, StepMetadata) and self.connector_worker is not None:
            self._failed_loads.take(meta, meta.inline, self.connector_worker._connector_worker_meta)
            self._failed_loads.lose(meta.lost)
        super().start_load_kv(forward_context, **kwargs)
        if isinstance(meta, StepMetadata) and meta.inline and self.connector_worker is not None:
            self.connector_worker.worker.wait(set(meta.inline))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        worker = self.connector_worker.worker if self.connector_worker is not None else None
        meta = self._connector_metadata
        if isinstance(meta, StepMetadata) and meta.is_idle and worker is not None:
            worker.await_loads(_IDLE_S)
        sending, receiving = super().get_finished(finished_req_ids)
        if isinstance(meta, StepMetadata):
            receiving = receiving.difference(meta.inline.values())  # they run already
        if self._blends is not None and isinstance(meta, StepMetadata) and meta.blend is not None:
            self._blends.run(meta.blend)  # behind the step's forward, whose tokens it may store
            receiving = receiving | self._blends.take_finished()
        return sending, receiving | self._failed_loads.take_requests()

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving |= self._failed_loads.requests
        if self._blends is not None:
            results.failed_recving |= self._blends.take_failed()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        return super().get_block_ids_with_load_errors() | self._failed_loads.take_blocks()

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        meta = super().build_connector_worker_meta()
        report = self._blends.take_report() if self._blends is not None else self._no_blends
        if report is None or (not report and meta is None):
            return meta  # a worker that blends says so whenever it tells anything: vLLM joins what all of them tell
        self._no_blends = None
        meta = meta or OffloadingWorkerMetadata()
        return BlendedMetadata(meta.completed_jobs, meta.transfer_stats, report)

    def _try_blending(self, runner: Any) -> None:
        """Find out whether this engine can blend, when its model and its KV cache are there."""
        from hotspan.engine.blend.start import CanNotBlend, started  # of vLLM's it takes what other releases lack

        try:
            if self.connector_worker is None or not isinstance(worker := self.connector_worker.worker, HostWorker):
                raise CanNotBlend("its KV cache is not in host memory")
            self._blends = started(runner, self.connector_worker.spec, worker.slot)
        except CanNotBlend as reason:
            self._no_blends = Report(off=str(reason))


def _settings(vllm_config: VllmConfig, extra: dict[str, Any]) -> CacheSettings:
    """The tiers. Mutates: the engine's configuration, where it was not made for hotspan. Raises: ConfigError."""
    parallel = vllm_config.parallel_config
    workers = parallel.tensor_parallel_size * parallel.pipeline_parallel_size // nodes(parallel)
    found = connector_settings(extra, environment(), workers)
    log_as_vllm()
    for note in found.notes:  # once in each process: the next connector finds the settings in `extra`
        if note.is_warning:
            logger.warning("%s %s", note.event, note)
    if "hotspan" not in extra:
        extra |= extra_config(found.cache)
        # The engine reads both after it has made its connectors (v1/core/sched/scheduler.py, v1/engine/core.py).
        vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"
        vllm_config.cache_config.prefix_caching_hash_algo = HASH
    return found.cache


def _explain(settings: CacheSettings, error: HotspanError) -> None:
    """Tell the launcher why the engine does not start; it may be on another host."""
    if settings.error_file is not None:
        with contextlib.suppress(OSError):
            Path(settings.error_file).write_text(str(error))


def _follow(executor: Any, connector: Any) -> None:
    """Follow what an engine's workers are asked for."""
    if isinstance(connector, HotspanConnector):
        connector.weights.bind(executor)


def _finish_stores(core: Any) -> None:
    """Let the last requests' chunks reach RAM: vLLM begins to store them in the step after a request's end."""
    if not isinstance(core.scheduler.connector, HotspanConnector) or not core.scheduler.connector.manager.is_own:
        return
    deadline = Deadline(_FINISH_S)
    try:
        core.scheduler.finish_requests(list(core.scheduler.requests), RequestStatus.FINISHED_ABORTED)
        while (core.scheduler.has_requests() or core.batch_queue) and deadline.rest_s():
            core.step_fn()
    except Exception as error:  # of an engine that failed: its end goes on
        logger.warning("stores_not_finished error=%s", str(error))


def _check_groups(kv_cache_config: KVCacheConfig) -> None:
    """Raise ConfigError for a model of whose texts nothing could be found again."""
    groups = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    specs = [spec for group in groups for spec in getattr(group, "kv_cache_specs", {"": group}).values()]
    if not any(isinstance(spec, FullAttentionSpec | SlidingWindowSpec | ChunkedLocalAttentionSpec) for spec in specs):
        raise ConfigError(
            "the model keeps nothing of a text that another request could use: serve it without hotspan's tiers"
        )
    if ENGINE < STATES_SINCE and any(isinstance(spec, MambaSpec) for spec in specs):
        raise ConfigError(
            f"the model has recurrent states, which hotspan does not keep with vLLM {engine_version()}: install vLLM "
            f"{'.'.join(map(str, STATES_SINCE))} or later, or serve without hotspan's tiers"
        )
    if any(isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "none" for spec in specs):
        raise ConfigError(
            "the engine keeps no recurrent states at the ends of blocks without prefix caching: give "
            "--enable-prefix-caching, or serve without hotspan's tiers"
        )


def _blocks_per_chunk(chunk_tokens: int, kv_cache_config: KVCacheConfig) -> int:
    """Blocks that make at least `chunk_tokens` tokens of the group with the largest blocks.

    One where recurrent states are kept at the ends of blocks: the engine cuts a prompt where its last whole block ends,
    and a chunk that ends elsewhere has no state and is no hit.
    """
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if any(isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "align" for spec in specs):
        return 1
    return max(1, -(-chunk_tokens // max(spec.block_size for spec in specs)))
