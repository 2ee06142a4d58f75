"""The scheduler's half: answers vLLM's questions about chunks from the TieredCache. One thread calls it."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from vllm.lora.request import LoRARequest
from vllm.v1.request import Request

from hotspan.cache.cost import Text
from hotspan.cache.tiered import TieredCache
from hotspan.core.clock import Clock
from hotspan.core.namespace import ChunkKeyer
from hotspan.core.scopes import ScopeSet
from hotspan.core.terms import Scope, Terms
from hotspan.core.types import Chunk, Lookup, Tier
from hotspan.engine.admission import Admission
from hotspan.engine.compat import (
    CacheHitSource,
    CPULoadStoreSpec,
    LookupResult,
    OffloadingConnectorStats,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    get_offload_group_idx,
    keep_state,
    kept_state,
)
from hotspan.engine.events import ChunkEvents
from hotspan.engine.metrics import CacheMetrics
from hotspan.engine.requests import RequestRecord
from hotspan.engine.steps import StepWatch
from hotspan.l2.follower import LogFollower
from hotspan.tiers.base import Durable

_RESULTS = {Lookup.MISS: LookupResult.MISS, Lookup.HIT: LookupResult.HIT, Lookup.RETRY: LookupResult.RETRY}
_SOURCES = {Tier.RAM: CacheHitSource.HOST, Tier.DISK: CacheHitSource.DISK}


class HotspanManager(OffloadingManager):
    """vLLM's offloading manager over a TieredCache.

    The engine makes it before the namespace is known: `open` must come before the first request.
    """

    def __init__(self) -> None:
        self._cache: TieredCache | None = None
        self._arriving: dict[str, RequestRecord] = {}
        self._states: dict[str, RequestRecord] = {}
        self._ended: list[RequestRecord] = []
        self.steps: StepWatch | None = None
        self.events: ChunkEvents | None = None

    # -- hotspan's connector -----------------------------------------------------------------------------------------

    def open(
        self,
        cache: TieredCache,
        admission: Admission,
        chunk_tokens: int,
        drain_s: float,
        clock: Clock,
        steps: StepWatch | None = None,
        follower: LogFollower | None = None,
    ) -> None:
        """Take over a cache; its tiers are closed by `shutdown`, within `drain_s`.

        steps: of a cache that decides what to load. follower: of its L2's log, for the metrics.
        """
        self._cache = cache
        self._metrics = CacheMetrics(cache, follower)
        self.steps = steps
        self._admission = admission
        self.namespace = admission.namespace
        self.chunk_tokens = chunk_tokens
        self._drain_s = drain_s
        self._clock = clock

    @property
    def cache(self) -> TieredCache:
        """The cache, once `open`."""
        if self._cache is None:
            raise RuntimeError("the manager is not open")
        return self._cache

    def admit(self, request: Request) -> RequestRecord:
        """A request is about to come: learn what its chunks' names and terms depend on."""
        state = self._admission.admit(request)
        self._arriving[request.request_id] = state
        return state

    def load_adapter(self, lora: LoRARequest) -> None:
        """The engine is about to load an adapter. Blocks: for one pass over its files."""
        self._admission.adapters.load(lora.lora_int_id, lora.lora_path)

    def named(self, request: Request, tenant: str, lora: LoRARequest | None) -> RequestRecord:
        """The chunks of a text that is not about to run."""
        keyer = self.keyer(tenant, lora)
        return RequestRecord(request=request, keyer=keyer, groups=self._admission.groups)

    def keyer(self, tenant: str, lora: LoRARequest | None) -> ChunkKeyer | None:
        """What names the chunks of a tenant and an adapter; None if that can't be told now."""
        return self._admission.keyer(tenant, lora)

    def matched(self, scopes: ScopeSet) -> dict[str, int]:
        """The requests that an invalidation takes, and from which chunk of their text on."""
        found: dict[str, int] = {}
        for state in (*self._ended, *self._arriving.values(), *self._states.values()):
            first = state.taken_from(scopes, self.namespace)
            if first is not None:
                state.may_store = False
                found[state.request.request_id] = first
        return found

    def disown(self, request_ids: Collection[str]) -> int:
        """Keep nothing that these requests still compute; returns how many there are."""
        states = [known[name] for known in (self._arriving, self._states) for name in request_ids if name in known]
        for state in states:
            state.may_store = False
        return len(states)

    def forget(self, scopes: Sequence[Scope], durable: Durable, *, is_foreign: bool = False) -> dict[Tier, int]:
        """Forget in every tier what any of these scopes takes, and what stands on it (TieredCache.invalidate)."""
        return self.cache.invalidate(scopes, durable, is_foreign=is_foreign)

    def is_waiting(self, request_id: str) -> bool:
        """Whether looking this request up would only defer it; if not, what it is to load is decided."""
        self.cache.step()
        state = self._states.get(request_id)
        if state is None:
            return False
        if state.is_answered:  # and it is asked again: the engine had no room for it
            state.is_answered = False
            self.cache.reconsider(state)
        if state.plan is None and self.steps is not None and state.groups:
            prompt, tokens = state.request.num_prompt_tokens, state.ranked[0].tokens
            text = Text(prompt, tokens, state.kept_tokens, self.steps.step_s, self.steps.busy_s)
            return not self.cache.choose(state.by_group(), state, text)
        return self.cache.is_waiting(state)

    def note_answer(self, request_id: str) -> None:
        """The engine was told what there is of a request."""
        state = self._states.get(request_id)
        if state is not None:
            state.is_answered = True

    def note_hit(self, request_id: str, tokens: int) -> None:
        """The engine has that many of a request's tokens in its own prefix cache."""
        state = self._states.get(request_id)
        if state is not None:
            state.kept_tokens = tokens

    def begin(self, request: Request, loaded_tokens: int, known: Callable[[int], Terms | None]) -> RequestRecord | None:
        """A request begins to run: its state, or None if that was said before.

        known: the terms of the chunk at an index, in the engine's own cache.
        """
        state = self._states.get(request.request_id)
        if state is None or state.is_begun:
            return None
        state.is_begun, state.is_answered = True, False
        state.kept_tokens += loaded_tokens
        self.cache.stats.lookup_tokens += request.num_prompt_tokens
        if self.steps is not None:
            self.steps.admit(request.request_id, request.num_prompt_tokens, state.kept_tokens)
        chunks = state.all_chunks()
        carried: Terms | None = None
        for chunk in chunks:
            carried = carried if chunk.index else None  # the next group's chunks begin
            carried = state.inherit(chunk.index, (carried, self.cache.terms(chunk.key), known(chunk.index)))
        if state.terms.labels or state.terms.expires_s or state.inherited:
            self.cache.join(chunks, state)
        if self.events is not None:
            self.events.tell(state)
        return state

    def state(self, request_id: str) -> RequestRecord | None:
        """What is known of a request that has not ended."""
        return self._states.get(request_id)

    def forget_ended(self) -> None:
        """A step is built: nothing more is stored of the requests that had ended before.

        vLLM 0.26 says that a request has ended before it stores its last chunks, which an invalidation in between must
        find.
        """
        for state in self._ended:
            if self._states.get(state.request.request_id) is state:
                del self._states[state.request.request_id]
        self._ended.clear()

    def idle(self, timeout_s: float) -> None:
        """The engine has nothing to compute: sleep until a promotion lands, at most `timeout_s`."""
        if self.cache.is_moving:
            self.cache.wait(timeout_s)

    # -- vLLM's interface ----------------------------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        state = self._arriving.pop(req_context.req_id, None)
        if state is not None:
            keep_state(req_context, state)
            self._states[req_context.req_id] = state
            self.cache.ask(state.all_chunks(), state)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        state = kept_state(req_context, RequestRecord)
        if state is not None:
            self.cache.release(state)
            self._ended.append(state)
        if self.steps is not None:
            self.steps.forget(req_context.req_id)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        state = kept_state(req_context, RequestRecord)
        chunk = state.chunk(key) if state is not None else None
        if state is None or chunk is None:
            return LookupResult.MISS
        return _RESULTS[self.cache.lookup(chunk, state)]

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        state = kept_state(req_context, RequestRecord)
        chunk = state.chunk(key) if state is not None else None
        if state is None or chunk is None:
            return CacheHitSource.EXTERNAL_UNSPECIFIED
        return _SOURCES.get(state.promoted.get(chunk.key, Tier.RAM), CacheHitSource.EXTERNAL_UNSPECIFIED)

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> CPULoadStoreSpec:
        state = self._state(req_context)
        chunks = self._chunks(keys, req_context)
        first = min((get_offload_group_idx(key) for key in keys), default=0)
        hits: Counter[Tier] = Counter()
        for key, chunk in zip(keys, chunks, strict=True):
            if get_offload_group_idx(key) == first:
                hits[state.promoted.get(chunk.key, Tier.RAM)] += self.chunk_tokens
        self.cache.stats.hit_tokens.update(hits)
        state.load_began_s = self._clock.monotonic()
        return CPULoadStoreSpec(self.cache.begin_load([chunk.key for chunk in chunks], state))

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.cache.end_load([chunk.key for chunk in self._chunks(keys, req_context)])
        size = len(keys) * self.cache.ram.slab.slot_bytes
        seconds = self._clock.monotonic() - self._state(req_context).load_began_s
        self.cache.stats.loaded(Tier.RAM, size, seconds)
        if self.cache.cost is not None:
            self.cache.cost.observe_copy(size, seconds)

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput:
        state = kept_state(req_context, RequestRecord)
        if state is None or not state.may_store:
            return PrepareStoreOutput(keys_to_store=[], store_spec=CPULoadStoreSpec([]), evicted_keys=[])
        named = {chunk.key: key for key in keys if (chunk := state.chunk(key)) is not None}
        placements = self.cache.begin_store([state.chunks[key] for key in named.values()], state)
        return PrepareStoreOutput(
            keys_to_store=[named[placement.chunk.key] for placement in placements],
            store_spec=CPULoadStoreSpec([placement.slot for placement in placements]),
            evicted_keys=[],
        )

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        chunks = self._chunks(keys, req_context)
        self.cache.end_store(sorted(chunks, key=lambda chunk: chunk.index), success=success)
        if self.events is not None:
            self.events.tell(self._state(req_context))

    def on_schedule_end(self, context: object) -> None:
        for request_id in getattr(context, "new_req_ids", ()):
            state = self._states.get(request_id)
            if state is not None:
                self.cache.release(state)

    def reset_cache(self) -> None:
        self.cache.clear()  # the connector calls `end_clear` when the workers' copies have ended

    def get_stats(self) -> OffloadingConnectorStats | None:
        token_bytes = self.cache.ram.slab.slot_bytes * len(self._admission.groups) / self.chunk_tokens
        return self._metrics.report(token_bytes)

    def shutdown(self) -> None:
        if self._cache is not None:
            self._cache.close(self._drain_s)
            self._cache = None

    # -- inside --------------------------------------------------------------------------------------------------------

    def _state(self, req_context: ReqContext) -> RequestRecord:
        state = kept_state(req_context, RequestRecord)
        if state is None:
            raise RuntimeError(f"request {req_context.req_id} was never admitted")
        return state

    def _chunks(self, keys: Collection[OffloadKey], req_context: ReqContext) -> list[Chunk]:
        chunks = self._state(req_context).chunks
        return [chunks[key] for key in keys]
