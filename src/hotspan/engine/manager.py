"""The scheduler's half: answers vLLM's questions about chunks from the TieredCache. One thread calls it."""

import contextlib
import logging
from collections import Counter, deque
from collections.abc import Collection, Sequence
from functools import partial

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.request import Request

from hotspan.cache.rhythm import Rhythm
from hotspan.cache.tiered import TieredCache
from hotspan.core.clock import Clock
from hotspan.core.terms import Terms
from hotspan.core.types import Chunk, Lookup, Tier
from hotspan.engine.blend.admission import Blending
from hotspan.engine.compat import CacheHitSource, keep_state, kept_state
from hotspan.engine.counts import count, reads_cache
from hotspan.engine.encoder.outputs import EncoderOutputs
from hotspan.engine.events import ChunkEvents
from hotspan.engine.failed_loads import FailedLoad
from hotspan.engine.metrics import CacheMetrics
from hotspan.engine.net import netted
from hotspan.engine.prefixes import GpuPrefixes
from hotspan.engine.requests import Admission, RequestRecord, in_order
from hotspan.engine.step_waits import StepWaits
from hotspan.engine.steps import StepWatch
from hotspan.engine.watching import RequestWatcher
from hotspan.keyring.keyring import Keyring
from hotspan.l2.follower import LogFollower

logger = logging.getLogger(__name__)

_RESULTS = {Lookup.MISS: LookupResult.MISS, Lookup.HIT: LookupResult.HIT, Lookup.RETRY: LookupResult.RETRY}
_REPORT_EVERY_S = 1.0
"""How often metrics are reported while the engine computes and no request ends."""

_STORE_TRIES = 4
"""Steps in which a request's chunks may wait for room: copies take one or two, and vLLM logs each."""

_SOURCES = {Tier.RAM: CacheHitSource.HOST, Tier.DISK: CacheHitSource.DISK}


def no_store() -> PrepareStoreOutput:
    """What vLLM is told of chunks that are not to be stored."""
    return PrepareStoreOutput(keys_to_store=[], store_spec=CPULoadStoreSpec([]), evicted_keys=[])


class HotspanManager(StepWaits, OffloadingManager):
    """vLLM's offloading manager over a TieredCache.

    prefixes: the engine's own cache. steps: of a cache that decides what to load. events: where routers follow them.
    blending: reuse of text that is no prefix, where it is asked for. outputs: of encoders, where they are kept.
    watchers: of requests. rhythm: of sessions, where their next turns are prefetched. follower (of the
    L2's log), keyring: for the metrics. closing: what `shutdown` closes.
    """

    def __init__(
        self,
        cache: TieredCache,
        admission: Admission,
        prefixes: GpuPrefixes,
        chunk_tokens: int,
        clock: Clock,
        *,
        steps: StepWatch | None = None,
        events: ChunkEvents | None = None,
        blending: Blending | None = None,
        outputs: EncoderOutputs | None = None,
        watchers: Sequence[RequestWatcher] = (),
        rhythm: Rhythm | None = None,
        follower: LogFollower | None = None,
        keyring: Keyring | None = None,
    ) -> None:
        super().__init__(cache, admission, prefixes, clock, blending, outputs, steps, chunk_tokens)
        self.events = events
        self.watchers = watchers
        self.rhythm = rhythm
        self._metrics = CacheMetrics(cache, follower, keyring)
        self.closing = contextlib.ExitStack()
        self._prepared: list[tuple[Collection[OffloadKey], ReqContext]] = []
        self._report_s = 0.0  # when metrics are to be reported again

    # -- hotspan's connector -----------------------------------------------------------------------------------------

    def bind(self, pool: BlockPool) -> None:
        """The engine's pool of blocks, once it is made."""
        self.prefixes.bind(pool)
        if self.blending is not None:
            self.blending.checks.bind(pool)
        if self.events is not None:
            self.events.watch(pool)

    @netted(lambda: None)
    def admit(self, request: Request) -> None:
        """A request is about to come: learn what its chunks' names and terms depend on."""
        self.prefixes.expire(self._clock.unix())
        record = self._records[request.request_id] = self._admission.admit(request)
        if request.lora_request is not None:
            self._note_adapter(request.lora_request, record)
        self._pace_prefetches()
        if self.rhythm is not None and record.session is not None:
            self.rhythm.arrive(record.session)
        self.prefixes.arrive(record)
        self._withdraw(record)
        if self.steps is not None:
            self.steps.arrive(request.request_id)
        for watcher in self.watchers:
            watcher.admit(record)
        if self.outputs is not None:
            self.outputs.admit(record)

    @netted(lambda: False)
    def is_waiting(self, request_id: str, kept_tokens: int) -> bool:
        """Whether looking this request up would only defer it; if not, what it is to load is decided.

        kept_tokens: so many of its tokens are in the engine's own cache.
        """
        self.cache.step()
        record = self._records.get(request_id)
        if record is None:
            return False
        record.engine_tokens = kept_tokens
        if not record.is_begun:  # after it was preempted, its own blocks are among them
            record.kept_tokens = kept_tokens
        if record.is_answered:  # and it is asked again: the engine had no room for it
            record.is_answered = False
            self.cache.reconsider(record)
        if record.plan is None and record.groups and (text := self._text_of(record)) is not None:
            is_waiting = not self.cache.choose(record.by_group(), record, text)
            for watcher in self.watchers:
                watcher.choose(record)
            return is_waiting
        return self.cache.is_waiting(record)

    @netted(lambda: 0)
    def blended(self, request: Request, kept_tokens: int, loaded_tokens: int) -> int | None:
        """Tokens behind the exact prefix that blending claims; as `Blending.match`."""
        record = self._records.get(request.request_id)
        if self.blending is None or record is None:
            return 0
        return self.blending.match(request, record, kept_tokens, loaded_tokens, self._text_of(record))

    @netted(lambda: None)
    def note_answer(self, request_id: str) -> None:
        """The engine knows now what is cached of a request."""
        if (record := self._records.get(request_id)) is not None:
            record.is_answered = True

    @netted(lambda: None)
    def begin(self, request: Request, loaded_tokens: int) -> None:
        """A request begins to run."""
        record = self._records.get(request.request_id)
        if record is None or record.is_begun:
            return
        record.is_begun, record.is_answered = True, False
        count(record, 0 if record.has_failed_load else loaded_tokens, self.cache.stats)
        for watcher in self.watchers:
            watcher.begin(record)
        if self.steps is not None:
            self.steps.admit(request.request_id, request.num_prompt_tokens, record.kept_tokens)
        chunks = record.all_chunks()
        carried: Terms | None = None
        for chunk in chunks:
            carried = carried if chunk.index else None  # the next group's chunks begin
            known = self.prefixes.terms(record, chunk.index)
            carried = record.inherit(chunk.index, (carried, self.cache.terms(chunk.key), known))
        if record.terms.labels or record.terms.expires_s or record.inherited:
            self.cache.join(chunks, record)
        if self.events is not None:
            self.events.publish(record)
        self._keep(record)

    @netted(lambda: None)
    def retire(self, request: Request) -> None:
        """A request ended: what it left in the engine's own cache is known from now on, or gone if it may not stay.

        Its metrics are reported with this step.
        """
        self._report_s = 0.0
        if self.steps is not None:
            self.steps.forget(request.request_id)
        if (record := self._records.get(request.request_id)) is not None:
            try:
                self._end(record)
                if self.rhythm is not None and record.session is not None:
                    self.rhythm.end(record.session, in_order(record.all_chunks()))
            finally:
                for watcher in self.watchers:
                    watcher.retire(record)

    def end_allocation(self, request: Request | None = None) -> None:
        """vLLM has in its books what was prepared for a request; or else that request is given: its load is withdrawn.

        The request is computed, and not cached.
        """
        prepared, self._prepared = self._prepared, []
        if request is not None:
            for keys, context in prepared:
                self.complete_load(keys, context)
            if self.blending is not None:
                self._unfinished.do("withdraw", partial(self.blending.withdraw, request.request_id))
            if (record := self._records.get(request.request_id)) is not None:
                record.has_failed_load = True
            self.leave_out(request)

    @netted(lambda: None)
    def begin_step(self, scheduled: SchedulerOutput) -> None:
        """A step was scheduled."""
        self._unfinished.step()
        for watcher in self.watchers:
            watcher.step()
        if self.steps is not None:
            self.steps.schedule(scheduled)

    @netted(lambda: None)
    def idle(self, timeout_s: float) -> None:
        """The engine has nothing to compute: sleep until a promotion lands, at most `timeout_s`."""
        self._report_s = 0.0
        if self.cache.is_moving:
            self.cache.wait(timeout_s)

    # -- vLLM's interface ----------------------------------------------------------------------------------------------

    @netted(RequestOffloadingContext)
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        record = self._records.get(req_context.req_id)
        if record is None or record in self._ended:  # vLLM may announce one again that it no longer knows
            return RequestOffloadingContext()
        keep_state(req_context, record)
        if reads_cache(record.request):
            self.cache.ask(record.all_chunks(), record)
            if self.blending is not None:
                self.blending.ask(record.request, record)
        return RequestOffloadingContext()

    @netted(lambda: None)
    def on_request_finished(self, req_context: ReqContext) -> None:
        record = kept_state(req_context, RequestRecord)
        if record is not None:
            self._unfinished.do("release", partial(self.cache.release, record))
            self._ended.append(record)
            self._pace_prefetches()
        if self.steps is not None:
            self.steps.forget(req_context.req_id)
        if self.outputs is not None:
            self.outputs.forget(req_context.req_id)

    @netted(lambda: LookupResult.MISS)
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        record = kept_state(req_context, RequestRecord)
        chunk = record.chunk(key) if record is not None and not record.has_failed_load else None
        if record is None or chunk is None:
            return LookupResult.MISS
        return _RESULTS[self.cache.lookup(chunk, record)]

    @netted(lambda: CacheHitSource.EXTERNAL_UNSPECIFIED)
    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        record = kept_state(req_context, RequestRecord)
        chunk = record.chunk(key) if record is not None else None
        if record is None or chunk is None:
            return CacheHitSource.EXTERNAL_UNSPECIFIED
        return _SOURCES.get(record.promoted.get(chunk.key, Tier.RAM), CacheHitSource.EXTERNAL_UNSPECIFIED)

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> CPULoadStoreSpec:
        spec = self._slots(keys, req_context)
        record = kept_state(req_context, RequestRecord)
        if spec is not None:
            self._prepared.append((keys, req_context))
        elif record is not None:  # vLLM looks its text up again
            record.has_failed_load, record.failed_load = True, frozenset(keys)
        return spec or FailedLoad()

    @netted(lambda: None)
    def _slots(self, keys: Collection[OffloadKey], req_context: ReqContext) -> CPULoadStoreSpec | None:
        """Where a load reads; None if that can't be told."""
        record = self._record(req_context)
        chunks = self._chunks(keys, req_context)
        loaded = Counter(map(get_offload_group_idx, keys))
        # Of a sliding window only the end is loaded, of a recurrent state only the last one.
        counted = max(record.groups, key=lambda group: loaded[group.index] * group.tokens)
        record.sources = {}
        for key, chunk in zip(keys, chunks, strict=True):
            if get_offload_group_idx(key) == counted.index:
                tier = record.promoted.get(chunk.key, Tier.RAM)
                record.sources[tier] = record.sources.pop(tier, 0) + counted.tokens
        record.load_began_s = self._clock.monotonic()
        return CPULoadStoreSpec(self.cache.begin_load([chunk.key for chunk in chunks], record))

    @netted(lambda: None)
    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        record = kept_state(req_context, RequestRecord)
        if record is None:
            return  # it was never admitted: nothing was prepared for it
        if record.failed_load is not None and record.failed_load == frozenset(keys):
            record.failed_load = None
            return  # it has no pins, and those of its chunks are others'
        left = deque(chunk.key for chunk in self._chunks(keys, req_context))

        def unpin() -> None:
            while left:
                self.cache.end_load([left[0]])
                left.popleft()

        if not self._unfinished.do("end_load", unpin):
            self.leave_out(req_context)
        size = len(keys) * self.cache.ram.slab.slot_bytes
        seconds = self._clock.monotonic() - record.load_began_s
        self.cache.stats.loaded(Tier.RAM, size, seconds)
        self._note_saved(record, seconds)
        for watcher in self.watchers:
            watcher.load(record, seconds, size)

    @netted(no_store)
    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        record = kept_state(req_context, RequestRecord)
        if record is None or not record.may_store or not self._admission.may_keep(record):
            return no_store()
        named = {chunk.key: key for key in keys if (chunk := record.chunk(key)) is not None}
        chunks = [record.chunks[key] for key in named.values()]
        if record.store_tries < _STORE_TRIES:
            placements = self.cache.try_store(chunks, record)
            if placements is None:  # the connector asks again in the next step
                record.store_tries += 1
                return None
        else:
            placements = self.cache.begin_store(chunks, record)
        self._note_refused(record, chunks, len(placements))
        return PrepareStoreOutput(
            keys_to_store=[named[placement.chunk.key] for placement in placements],
            store_spec=CPULoadStoreSpec([placement.slot for placement in placements]),
            evicted_keys=[],
        )

    @netted(lambda: None)
    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        record = self._record(req_context)
        chunks = in_order(self._chunks(keys, req_context))
        forget = partial(self.cache.end_store, chunks, success=False)

        def end() -> None:
            self.cache.end_store(chunks, success=success and self._admission.may_keep(record))

        if not self._unfinished.do("end_store", end, forget):
            self.leave_out(req_context)
        if self.events is not None:
            self.events.publish(record)

    @netted(lambda: None)
    def on_schedule_end(self, context: object) -> None:
        for request_id in getattr(context, "new_req_ids", ()):
            record = self._records.get(request_id)
            if record is not None:
                self._unfinished.do("release", partial(self.cache.release, record))

    def reset_cache(self) -> None:
        """Empty this engine's RAM: an engine that sleeps or pauses resets it, and takes back nobody's text."""
        self._clear_texts()
        if self.outputs is not None:
            self.outputs.clear()
        self.cache.clear()  # the connector calls `end_clear` when the workers' copies have ended
        self._unfinished.clear()

    @netted(lambda: None)
    def get_stats(self) -> OffloadingConnectorStats | None:
        now_s = self._clock.monotonic()
        if now_s < self._report_s:
            return None
        self._report_s = now_s + _REPORT_EVERY_S
        return self._metrics.report(self.token_bytes)

    def shutdown(self) -> None:
        if self.is_own:
            self.closing.close()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _record(self, req_context: ReqContext) -> RequestRecord:
        record = kept_state(req_context, RequestRecord)
        if record is None:
            raise RuntimeError(f"request {req_context.req_id} was never admitted")
        return record

    def _chunks(self, keys: Collection[OffloadKey], req_context: ReqContext) -> list[Chunk]:
        chunks = self._record(req_context).chunks
        return [chunks[key] for key in keys]
