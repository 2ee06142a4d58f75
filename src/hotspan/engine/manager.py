"""The scheduler's half: answers vLLM's questions about chunks from the TieredCache. One thread calls it."""

import contextlib
import logging
import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.lora.request import LoRARequest
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
from hotspan.cache.savings import SavedText, Savings
from hotspan.cache.tiered import TieredCache
from hotspan.cache.withdrawals import Withdrawals
from hotspan.core.clock import Clock
from hotspan.core.namespace import ChunkKeyer
from hotspan.core.scopes import ScopeSet
from hotspan.core.terms import Scope, Terms, adapter_label
from hotspan.core.types import Chunk, Lookup, Tier
from hotspan.engine.adapters import registered_name
from hotspan.engine.blend.admission import Blending
from hotspan.engine.compat import CacheHitSource, keep_state, kept_state
from hotspan.engine.encoder.outputs import EncoderOutputs
from hotspan.engine.events import ChunkEvents
from hotspan.engine.failed_loads import FailedLoad
from hotspan.engine.metrics import CacheMetrics
from hotspan.engine.net import netted
from hotspan.engine.prefixes import GpuPrefixes
from hotspan.engine.requests import Admission, RequestRecord, in_order
from hotspan.engine.steps import StepWatch
from hotspan.keyring.keyring import Keyring
from hotspan.l2.follower import LogFollower
from hotspan.tiers.base import Durable

if TYPE_CHECKING:
    from hotspan.engine.tracing import CacheTracing

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


class Removed(NamedTuple):
    """What an invalidation removed here: blocks and chunks by where, and how many requests keep nothing any more."""

    counts: dict[str, int]
    requests: int


class HotspanManager(OffloadingManager):
    """vLLM's offloading manager over a TieredCache.

    prefixes: the engine's own cache. steps: of a cache that decides what to load. events: where routers follow them.
    blending: reuse of text that is no prefix, where it is asked for. outputs: of encoders, where they are kept.
    tracing: where requests are traced. rhythm: of sessions, where their next turns are prefetched. follower (of the
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
        tracing: "CacheTracing | None" = None,
        rhythm: Rhythm | None = None,
        follower: LogFollower | None = None,
        keyring: Keyring | None = None,
    ) -> None:
        self.cache = cache
        self.prefixes = prefixes
        self.steps = steps
        self.events = events
        self.blending = blending
        self.outputs = outputs
        self.tracing = tracing
        self.rhythm = rhythm
        self.namespace = admission.namespace
        self.former: set[bytes] = set()  # other names that this engine's chunks may have in lower tiers
        self.chunk_tokens = chunk_tokens
        self.savings = Savings()
        self._metrics = CacheMetrics(cache, follower, keyring)
        self._admission = admission
        self._clock = clock
        self.closing = contextlib.ExitStack()
        self._records: dict[str, RequestRecord] = {}
        self._ended: list[RequestRecord] = []
        self._withdrawals = Withdrawals()
        self._ended_s = -math.inf  # when the last namespace ended
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
        if self.tracing is not None:
            self.tracing.admit(record)
        if self.outputs is not None:
            self.outputs.admit(record)

    def _withdraw(self, record: RequestRecord) -> None:
        """Let a request leave nothing whose text was invalidated while somebody held it."""
        if record.held_since_s is None:
            return
        if record.held_since_s <= self._ended_s:  # what was invalidated before has other names
            record.may_store = False
            self.prefixes.withdraw(record, 0)
            return
        chunks = None if record.keyer is None else record.all_chunks()
        first = self._withdrawals.first_of(record, chunks, self.namespace, record.held_since_s)
        if first is not None:
            record.may_store = False
            self.prefixes.withdraw(record, first)

    @property
    def group_count(self) -> int:
        """Number of KV cache groups whose chunks are kept."""
        return len(self._admission.groups)

    def load_adapter(self, lora: LoRARequest, *, anew: bool) -> None:
        """The engine is about to load an adapter. Blocks: for one pass over its files.

        anew: also if it has one of that id. What was computed with another content under its name is not found then.
        """
        self._admission.adapters.load(lora.lora_int_id, lora.lora_path, anew=anew)
        self._note_adapter(lora, None)

    def unload_adapter(self, adapter_id: int) -> None:
        """The engine has dropped an adapter."""
        self._admission.adapters.unload(adapter_id)

    def _note_adapter(self, lora: LoRARequest, but: RequestRecord | None) -> None:
        """Know an adapter's name by its content: the engine's own cache knows blocks by the name alone.

        but: a request that comes with it.
        """
        if not self._admission.adapters.is_other(lora.lora_name, lora.lora_int_id, lora.lora_path):
            return
        records = (*self._ended, *self._records.values())
        users = [
            record
            for record in records
            if record is not but
            and (mine := record.request.lora_request) is not None
            and (mine.lora_name == lora.lora_name or mine.lora_int_id == lora.lora_int_id)
        ]
        self._disown(users)
        label = adapter_label(registered_name(lora.lora_name))
        hit = {record.request.request_id: 0 for record in users}
        blocks, _ = self.prefixes.invalidate([Scope(adapter=label)], self.namespace, hit)
        logger.warning("adapter_changed name=%s blocks=%d requests=%d", lora.lora_name, blocks, len(users))

    def keyer(self, tenant: str, lora: LoRARequest | None, namespace: bytes | None = None) -> ChunkKeyer | None:
        """What names the chunks of a tenant and an adapter; None if that is not known now.

        namespace: another than that of the weights which the engine has now.
        """
        return self._admission.keyer(tenant, lora, namespace)

    def named(self, request: Request, keyer: ChunkKeyer | None) -> RequestRecord:
        """The chunks of a text that is not about to run."""
        return RequestRecord(request=request, keyer=keyer, groups=self._admission.groups)

    def invalidate(self, scopes: Sequence[Scope], durable: Durable, *, is_foreign: bool = False) -> Removed:
        """Delete what any of these scopes takes, with its descendants, from the engine's own cache and every tier.

        Requests that it concerns go on, and keep nothing. durable: called as `TieredCache.invalidate` says.
        """
        hit, known = dict[str, int](), ScopeSet(scopes)
        self._withdrawals.note(scopes, self._clock.monotonic())
        for record in (*self._ended, *self._records.values()):
            first = record.matched_from(known, self.namespace)
            if first is not None:
                record.may_store = False
                hit[record.request.request_id] = first
        self.savings.invalidate(scopes, self.namespace)
        blocks, stale = self.prefixes.invalidate(scopes, self.namespace, hit)
        for name in stale & self._records.keys():
            self._records[name].may_store = False
        tiers = self.cache.invalidate(scopes, durable, is_foreign=is_foreign)
        return Removed({"gpu_blocks": blocks} | {f"{tier.value}_chunks": n for tier, n in tiers.items()}, len(stale))

    def end_namespace(self, nobody: bytes | None, *, forget: bool) -> None:
        """The weights are about to change, or may: nothing that was computed so far is found or kept from now on.

        Requests that are here go on, in part with other weights: nothing of them is kept. Those that come are not
        cached until `begin_namespace`.

        nobody: a name that nothing has; None if nothing has the present one. forget: nobody will look for what is there
        under the present one.
        """
        self._disown((*self._ended, *self._records.values()))
        if self._admission.is_open and not forget:
            self.former.add(self.namespace)
        self._ended_s = self._clock.monotonic()
        self._admission.end()
        self.prefixes.forget_all()
        self.savings.clear()
        if self.outputs is not None:
            self.outputs.forget_all()
        if self.blending is not None:
            self.blending.forget_all()
        if nobody is not None:
            self._rename(nobody, forget=forget)
        self.cache.stats.weights_known = False

    def begin_namespace(self, namespace: bytes, *, source: str) -> None:
        """Cache requests that come from now on under a name of the weights that the engine has now.

        source: what the name is made of, for the metrics.
        """
        self._rename(namespace, forget=True)
        self.former.discard(namespace)
        self._admission.is_open = True
        self.cache.stats.weights_known = True
        self.cache.stats.namespaces[source] += 1

    @property
    def named_requests(self) -> int:
        """How many requests so far had names for their chunks."""
        return self._admission.named

    def reset_outputs(self) -> None:
        """The engine forgot all outputs of its encoder."""
        self._admission.reset_outputs(any(record.request.mm_features for record in self._records.values()))

    def _rename(self, namespace: bytes, *, forget: bool) -> None:
        self.cache.rename(namespace, forget=forget)
        self.namespace = self._admission.namespace = namespace

    @staticmethod
    def _disown(records: Iterable[RequestRecord]) -> None:
        """What these requests compute has no name any more."""
        for record in records:
            record.may_store, record.keyer = False, None

    @netted(lambda: False)
    def is_waiting(self, request_id: str, kept_tokens: int) -> bool:
        """Whether looking this request up would only defer it; if not, what it is to load is decided.

        kept_tokens: so many of its tokens are in the engine's own cache.
        """
        self.cache.step()
        record = self._records.get(request_id)
        if record is None:
            return False
        record.kept_tokens = kept_tokens
        if record.is_answered:  # and it is asked again: the engine had no room for it
            record.is_answered = False
            self.cache.reconsider(record)
        if record.plan is None and self.steps is not None and record.groups:
            prompt, tokens = record.request.num_prompt_tokens, record.ranked[0].tokens
            text = self.steps.text(request_id, prompt, tokens, record.kept_tokens, waiting=self.cache.waiting)
            is_waiting = not self.cache.choose(record.by_group(), record, text)
            if self.tracing is not None:
                self.tracing.choose(record)
            return is_waiting
        return self.cache.is_waiting(record)

    @netted(lambda: 0)
    def blended(self, request: Request, kept_tokens: int, loaded_tokens: int) -> int | None:
        """Tokens behind the exact prefix that blending claims; as `Blending.match`."""
        record = self._records.get(request.request_id)
        if self.blending is None or record is None:
            return 0
        return self.blending.match(request, record, kept_tokens, loaded_tokens)

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
        record.kept_tokens += loaded_tokens
        record.loaded_tokens = loaded_tokens
        self.cache.stats.lookup_tokens += request.num_prompt_tokens
        if self.tracing is not None:
            self.tracing.begin(record)
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
        self.prefixes.keep(record)

    @netted(lambda: None)
    def retire(self, request: Request) -> None:
        """A request ended: what it left in the engine's own cache is known from now on, or gone if it may not stay.

        Its metrics are reported with this step.
        """
        self._report_s = 0.0
        if self.steps is not None:
            self.steps.forget(request.request_id)
        if (record := self._records.get(request.request_id)) is not None:
            self.prefixes.end(record)
            if self.rhythm is not None and record.session is not None:
                self.rhythm.end(record.session, in_order(record.all_chunks()))
            if self.tracing is not None:
                self.tracing.retire(record)

    @netted(lambda: None)
    def begin_step(self, scheduled: SchedulerOutput) -> None:
        """A step was scheduled."""
        if self.tracing is not None:
            self.tracing.step()
        if self.steps is not None:
            self.steps.schedule(scheduled)

    @netted(lambda: None)
    def note_blends(self) -> None:
        """The step that was scheduled last computes tokens of blends, too: its time says nothing of others."""
        if self.steps is not None:
            self.steps.disregard()

    @netted(lambda: None)
    def note_copies(self, size: int, seconds: float) -> None:
        """The worker copied so many bytes from RAM to the engine, in so much of its thread's time."""
        if self.cache.cost is not None and size:
            self.cache.cost.observe_copy(size, seconds)

    @netted(lambda: False)
    def may_stall(self, tokens: int) -> bool:
        """Whether the step that is being scheduled may wait for the copies of a request that loads so many tokens."""
        if self.steps is None or self.cache.cost is None:
            return True
        return self.steps.may_stall(self.cache.cost.copy_s(self._size(tokens)))

    @netted(lambda: None)
    def note_stall(self, tokens: int) -> None:
        """The step that is being scheduled waits for such copies."""
        if self.steps is not None and self.cache.cost is not None:
            self.steps.stall(self.cache.cost.copy_s(self._size(tokens)))

    @netted(lambda: False)
    def await_chunks(self, request_id: str) -> bool:
        """Wait for the chunks of a request if that holds up the step only a little; whether all of them came.

        Blocks: at most a tenth of a step.
        """
        record = self._records.get(request_id)
        if record is None or record.plan is None or self.steps is None or not record.waiting:
            return False
        left_s = self.steps.stall_left_s
        if record.plan.choice.load_s > left_s:
            return False
        began_s = self._clock.monotonic()
        for _ in range(len(record.waiting) + 1):  # each time at least one lands, or the time is over
            waited_s = self._clock.monotonic() - began_s
            if not record.waiting or waited_s >= left_s:
                break
            self.cache.wait(left_s - waited_s)
            self.cache.step()
        self.steps.stall(self._clock.monotonic() - began_s)
        return not record.waiting

    @netted(lambda: None)
    def end_step(self) -> None:
        """The output of the oldest step was processed."""
        if self.steps is not None:
            self.steps.end()

    @netted(lambda: None)
    def forget_ended(self) -> None:
        """A step is built: nothing more is stored of the requests that had ended before.

        vLLM 0.26 says that a request has ended before it stores its last chunks, which an invalidation in between must
        find.
        """
        for record in self._ended:
            if self._records.get(record.request.request_id) is record:
                del self._records[record.request.request_id]
        self._ended.clear()

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
        if record is not None and record not in self._ended:  # vLLM may announce one again that it no longer knows
            keep_state(req_context, record)
            self.cache.ask(record.all_chunks(), record)
            if self.blending is not None:
                self.blending.ask(record.request, record)
        return RequestOffloadingContext()

    @netted(lambda: None)
    def on_request_finished(self, req_context: ReqContext) -> None:
        record = kept_state(req_context, RequestRecord)
        if record is not None:
            self.cache.release(record)
            self._ended.append(record)
            self._pace_prefetches()
        if self.steps is not None:
            self.steps.forget(req_context.req_id)
        if self.outputs is not None:
            self.outputs.forget(req_context.req_id)

    @netted(lambda: LookupResult.MISS)
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        record = kept_state(req_context, RequestRecord)
        chunk = record.chunk(key) if record is not None else None
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
        spec = self._prepared(keys, req_context)
        record = kept_state(req_context, RequestRecord)
        if spec is None and record is not None:
            record.has_failed_load = True
            record.chunks.clear()  # vLLM looks its text up again
        return spec or FailedLoad()

    @netted(lambda: None)
    def _prepared(self, keys: Collection[OffloadKey], req_context: ReqContext) -> CPULoadStoreSpec | None:
        record = self._record(req_context)
        chunks = self._chunks(keys, req_context)
        loaded = Counter(map(get_offload_group_idx, keys))
        # Of a sliding window only the end is loaded, of a recurrent state only the last one.
        counted = max(record.groups, key=lambda group: loaded[group.index] * group.tokens)
        hits: Counter[Tier] = Counter()
        for key, chunk in zip(keys, chunks, strict=True):
            if get_offload_group_idx(key) == counted.index:
                hits[record.promoted.get(chunk.key, Tier.RAM)] += counted.tokens
        self.cache.stats.hit_tokens.update(hits)
        record.load_began_s = self._clock.monotonic()
        return CPULoadStoreSpec(self.cache.begin_load([chunk.key for chunk in chunks], record))

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        record = kept_state(req_context, RequestRecord)
        if record is None or record.has_failed_load:
            return  # it has no pins, and those of its chunks are others'
        self.cache.end_load([chunk.key for chunk in self._chunks(keys, req_context)])
        size = len(keys) * self.cache.ram.slab.slot_bytes
        seconds = self._clock.monotonic() - record.load_began_s
        self.cache.stats.loaded(Tier.RAM, size, seconds)
        self._note_saved(record, seconds)
        if self.tracing is not None:
            self.tracing.load(record, seconds, size)

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
        return PrepareStoreOutput(
            keys_to_store=[named[placement.chunk.key] for placement in placements],
            store_spec=CPULoadStoreSpec([placement.slot for placement in placements]),
            evicted_keys=[],
        )

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        chunks = self._chunks(keys, req_context)
        success = success and self._admission.may_keep(self._record(req_context))
        self.cache.end_store(sorted(chunks, key=lambda chunk: chunk.index), success=success)
        if self.events is not None:
            self.events.publish(self._record(req_context))

    @netted(lambda: None)
    def on_schedule_end(self, context: object) -> None:
        for request_id in getattr(context, "new_req_ids", ()):
            record = self._records.get(request_id)
            if record is not None:
                self.cache.release(record)

    def reset_cache(self) -> None:
        self.savings.clear()
        if self.outputs is not None:
            self.outputs.clear()
        self.cache.clear()  # the connector calls `end_clear` when the workers' copies have ended

    @netted(lambda: None)
    def get_stats(self) -> OffloadingConnectorStats | None:
        now_s = self._clock.monotonic()
        if now_s < self._report_s:
            return None
        self._report_s = now_s + _REPORT_EVERY_S
        token_bytes = self.cache.ram.slab.slot_bytes * self.group_count / self.chunk_tokens
        return self._metrics.report(token_bytes)

    def shutdown(self) -> None:
        self.closing.close()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _size(self, tokens: int) -> int:
        """Bytes of so many tokens in RAM, over all groups."""
        return -(-tokens // self.chunk_tokens) * self.group_count * self.cache.ram.slab.slot_bytes

    def leave_out(self, subject: object) -> None:
        """Find and store nothing of a request any more, which is named as vLLM's calls name it."""
        name = subject if isinstance(subject, str) else getattr(subject, "request_id", getattr(subject, "req_id", None))
        if isinstance(name, str) and (record := self._records.get(name)) is not None:
            record.may_store, record.keyer = False, None
        elif isinstance(subject, Request):
            self._records[subject.request_id] = self._admission.left_out(subject)

    def _pace_prefetches(self) -> None:
        self.cache.prefetches.is_busy = len(self._records) > len(self._ended)

    def _note_saved(self, record: RequestRecord, load_s: float) -> None:
        """A request's load is complete: its text has saved what computing it would have taken more."""
        chunks = record.all_chunks()
        if chunks and record.loaded_tokens:
            begin, end = record.kept_tokens - record.loaded_tokens, record.kept_tokens
            cost = self.cache.cost
            saved_s = cost.prefill_s(begin, end) - load_s if cost is not None else 0.0
            self.savings.note(SavedText(record.tags, chunks[0].key, record.terms), record.loaded_tokens, saved_s)

    def _record(self, req_context: ReqContext) -> RequestRecord:
        record = kept_state(req_context, RequestRecord)
        if record is None:
            raise RuntimeError(f"request {req_context.req_id} was never admitted")
        return record

    def _chunks(self, keys: Collection[OffloadKey], req_context: ReqContext) -> list[Chunk]:
        chunks = self._record(req_context).chunks
        return [chunks[key] for key in keys]
