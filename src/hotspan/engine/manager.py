"""The scheduler's half: answers vLLM's questions about chunks from the TieredCache. One thread calls it."""

import logging
import time
from collections import Counter
from collections.abc import Collection, Sequence

from vllm.v1.request import Request

from hotspan.cache.tiered import TieredCache
from hotspan.core.namespace import NO_ADAPTER, ChunkKeyer
from hotspan.core.types import Chunk, Lookup, Tier
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
)
from hotspan.engine.fingerprint import AdapterDigests
from hotspan.engine.metrics import report
from hotspan.engine.requests import ChunkGroup, RequestState

logger = logging.getLogger(__name__)

_RESULTS = {Lookup.MISS: LookupResult.MISS, Lookup.HIT: LookupResult.HIT, Lookup.RETRY: LookupResult.RETRY}
_SOURCES = {Tier.RAM: CacheHitSource.HOST, Tier.DISK: CacheHitSource.DISK}


class HotspanManager(OffloadingManager):
    """vLLM's offloading manager over a TieredCache.

    The engine makes it before the namespace is known: `open` must come before the first request.
    """

    def __init__(self) -> None:
        self._cache: TieredCache | None = None
        self._adapters = AdapterDigests()
        self._arriving: dict[str, RequestState] = {}
        self._states: dict[str, RequestState] = {}

    # -- hotspan's connector -----------------------------------------------------------------------------------------

    def open(
        self, cache: TieredCache, namespace: bytes, groups: Sequence[ChunkGroup], chunk_tokens: int, drain_s: float
    ) -> None:
        """Take over a cache; its tiers are closed by `shutdown`, within `drain_s`."""
        self._cache = cache
        self._namespace = namespace
        self._groups = tuple(groups)
        self._chunk_tokens = chunk_tokens
        self._drain_s = drain_s

    @property
    def cache(self) -> TieredCache:
        """The cache, once `open`."""
        if self._cache is None:
            raise RuntimeError("the manager is not open")
        return self._cache

    def admit(self, request: Request) -> None:
        """A request is about to come: learn what its chunks' names depend on."""
        adapter: bytes | None = NO_ADAPTER
        if request.lora_request is not None:
            adapter = self._adapters.of(request.lora_request.lora_path)
            if adapter is None:
                logger.warning(
                    "adapter_unreadable name=%s: its requests are not cached", request.lora_request.lora_name
                )
        keyer = ChunkKeyer(self._namespace, adapter) if adapter is not None else None
        self._arriving[request.request_id] = RequestState(request, keyer, self._groups)

    def is_waiting(self, request_id: str) -> bool:
        """Whether looking this request up again would only defer it again."""
        self.cache.step()
        state = self._states.get(request_id)
        return state is not None and self.cache.is_waiting(state.reader)

    def count_lookup(self, request: Request) -> None:
        """A request begins to run: count its tokens as looked up, once."""
        state = self._states.get(request.request_id)
        if state is not None and not state.is_counted:
            state.is_counted = True
            self.cache.stats.lookup_tokens += request.num_prompt_tokens

    def idle(self, timeout_s: float) -> None:
        """The engine has nothing to compute: sleep until a promotion lands, at most `timeout_s`."""
        if self.cache.is_moving:
            self.cache.wait(timeout_s)

    # -- vLLM's interface ----------------------------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        state = self._arriving.pop(req_context.req_id, None)
        if state is not None:
            req_context.set_state(state)
            self._states[req_context.req_id] = state
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        state = self._states.pop(req_context.req_id, None)
        if state is not None:
            self.cache.release(state.reader)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        state = req_context.get_state(RequestState)
        chunk = state.chunk(key) if state is not None else None
        if state is None or chunk is None:
            return LookupResult.MISS
        return _RESULTS[self.cache.lookup(chunk, state.reader)]

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        state = req_context.get_state(RequestState)
        chunk = state.chunk(key) if state is not None else None
        if state is None or chunk is None:
            return CacheHitSource.EXTERNAL_UNSPECIFIED
        return _SOURCES.get(state.reader.promoted.get(chunk.key, Tier.RAM), CacheHitSource.EXTERNAL_UNSPECIFIED)

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> CPULoadStoreSpec:
        state = self._state(req_context)
        chunks = self._chunks(keys, req_context)
        first = min((get_offload_group_idx(key) for key in keys), default=0)
        hits: Counter[Tier] = Counter()
        for key, chunk in zip(keys, chunks, strict=True):
            if get_offload_group_idx(key) == first:
                hits[state.reader.promoted.get(chunk.key, Tier.RAM)] += self._chunk_tokens
        self.cache.stats.hit_tokens.update(hits)
        state.load_began_s = time.monotonic()
        return CPULoadStoreSpec(self.cache.begin_load([chunk.key for chunk in chunks], state.reader))

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.cache.end_load([chunk.key for chunk in self._chunks(keys, req_context)])
        size = len(keys) * self.cache.ram.slab.slot_bytes
        self.cache.stats.loaded(Tier.RAM, size, time.monotonic() - self._state(req_context).load_began_s)

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput:
        state = req_context.get_state(RequestState)
        named = {chunk.key: key for key in keys if state is not None and (chunk := state.chunk(key)) is not None}
        placements = self.cache.begin_store([state.chunks[key] for key in named.values()] if state is not None else [])
        return PrepareStoreOutput(
            keys_to_store=[named[placement.chunk.key] for placement in placements],
            store_spec=CPULoadStoreSpec([placement.slot for placement in placements]),
            evicted_keys=[],
        )

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        chunks = self._chunks(keys, req_context)
        self.cache.end_store(sorted(chunks, key=lambda chunk: chunk.index), success=success)

    def on_schedule_end(self, context: object) -> None:
        for request_id in getattr(context, "new_req_ids", ()):
            state = self._states.get(request_id)
            if state is not None:
                self.cache.release(state.reader)

    def reset_cache(self) -> None:
        self.cache.clear()  # the connector calls `end_clear` when the workers' copies have ended

    def get_stats(self) -> OffloadingConnectorStats | None:
        return report(self.cache)

    def shutdown(self) -> None:
        if self._cache is not None:
            self._cache.close(self._drain_s)
            self._cache = None

    # -- inside --------------------------------------------------------------------------------------------------------

    def _state(self, req_context: ReqContext) -> RequestState:
        state = req_context.get_state(RequestState)
        if state is None:
            raise RuntimeError(f"request {req_context.req_id} was never admitted")
        return state

    def _chunks(self, keys: Collection[OffloadKey], req_context: ReqContext) -> list[Chunk]:
        chunks = self._state(req_context).chunks
        return [chunks[key] for key in keys]
