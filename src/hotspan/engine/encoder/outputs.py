"""The scheduler's half: finds the encoder outputs of a request's media in the tiers, and has new ones stored.

vLLM asks in each step, for each request with media (engine/encoder/connector.py):

    is_ready     whether to schedule it now: a promotion from disk or the L2 may be on its way
    begin_load   for a medium that the step needs and vLLM's own encoder cache lacks: whether it is here
    schedule     the step has room for it: the worker loads it, or encodes and stores it
    orders       the step is complete
    note         the worker has carried the orders out

An output is one object: a chunk without ancestors, in a slot like any other (engine/encoder/slots.py). The tiers keep,
verify, expire and forget it as they do KV. What is larger than a slot is not kept.

Which outputs of a request are loaded from lower tiers, and how long it waits for them, is decided once for all of them,
by the cost model that has decided about its chunks, and within what that left of the request's bound. Without a model a
request waits as long as a fixed patience, or as encoding takes if that is more.
"""

from dataclasses import dataclass, field

from vllm.config import VllmConfig
from vllm.platforms import current_platform

from hotspan.cache.choice import Part, Text
from hotspan.cache.engine_queue import EngineQueue
from hotspan.cache.entry import Reader
from hotspan.cache.tiered import TieredCache
from hotspan.config.settings import CacheSettings
from hotspan.core.clock import Clock
from hotspan.core.types import Chunk, ChunkKey, Lookup, Tier
from hotspan.engine.contract import ENGINE, TRIED_WITH
from hotspan.engine.encoder.slots import shape_of
from hotspan.engine.net import netted
from hotspan.engine.requests import RequestRecord

CONNECTOR = "OutputConnector"
"""The class of engine/encoder/connector.py that vLLM calls."""

_NO_ENCODER = "prompt_embeds"
"""A modality whose inputs are embeddings already."""

_NEWEST = 0.3
"""How much the newest measurement of the encoder's speed counts."""


def keeps_outputs(settings: CacheSettings, config: VllmConfig) -> bool:
    """Whether an engine's encoder outputs are kept: with the release, platform and model runner that it was tried with,
    in one worker on this host, unless another connector for them was configured.

    vLLM's second model runner takes connectors that were there before the model was loaded only.
    """
    if not settings.encoder_outputs or ENGINE != TRIED_WITH or not current_platform.is_cpu():
        return False
    given = config.ec_transfer_config
    is_free = given is None or given.ec_connector == CONNECTOR
    is_alone = config.parallel_config.world_size == 1 and not config.parallel_config.use_ray
    return config.model_config.is_multimodal_model and is_free and is_alone and not config.use_v2_model_runner


@dataclass(slots=True, eq=False)
class _Medium:
    """One medium of a request.

    reader: holds it in RAM from the end of the request's wait to the load. source: where it was found.
    rows: embeddings of its output. end: the prompt's tokens up to the end of its last place.
    is_settled: the request waits for it no longer.
    """

    chunk: Chunk
    reader: Reader
    rows: int
    end: int
    source: Tier = Tier.RAM
    is_settled: bool = False


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request with media, by vLLM's identifiers.

    end:     the prompt's tokens up to the end of the last one. reader: waits for them, and has the plan.
    since_s: since when the request waits (monotonic); None if it does not. is_decided: what to load, for this wait.
    """

    record: RequestRecord
    media: dict[str, _Medium]
    end: int
    reader: Reader
    since_s: float | None = None
    is_decided: bool = False


@dataclass(slots=True)
class Orders:
    """What a worker is to do in one step, by vLLM's identifiers.

    loads, stores: slot and rows. encoded_rows: of all that is encoded, stored or not.
    """

    number: int = 0
    loads: dict[str, tuple[int, int]] = field(default_factory=dict)
    stores: dict[str, tuple[int, int]] = field(default_factory=dict)
    encoded_rows: int = 0


@dataclass(slots=True)
class Report:
    """What a worker did.

    stored: bytes by identifier; 0 if larger than a slot. encoder_s: None if nothing was to be stored.
    """

    number: int
    stored: dict[str, int] = field(default_factory=dict)
    encoder_s: float | None = None


@dataclass(slots=True, eq=False)
class _Job:
    """The orders of a step that is on its way. is_stale: the cache was cleared meanwhile."""

    orders: Orders
    loads: list[ChunkKey] = field(default_factory=list)
    stores: dict[str, Chunk] = field(default_factory=dict)
    is_stale: bool = False


class EncoderOutputs:
    """Encoder outputs in a cache. One thread (the scheduler's) calls it.

    patience_s: without a cost model: how long a request waits for one, or as long as encoding takes if that is more.
    steps:      of a cache that decides what to load.
    """

    def __init__(self, cache: TieredCache, clock: Clock, patience_s: float, steps: EngineQueue | None = None) -> None:
        self._steps = steps
        self._cache = cache
        self._clock = clock
        self._patience_s = patience_s
        self._requests: dict[str, _Waiting] = {}
        self._asked: _Waiting | None = None  # the request that vLLM is about to schedule
        self._in_engine: set[str] = set()  # what vLLM's own cache should have: `reset_encoder_cache` is not told
        self._begun: dict[ChunkKey, tuple[int, int, Tier]] = {}  # of this step: slot, bytes, where it was found
        self._number = 0  # of the last orders
        self._next = _Job(Orders())
        self._jobs: dict[int, _Job] = {}
        self._row_s = 0.0  # encoding time of a row; 0 until it is measured
        self._max_rows: int | None = None  # what is known to fit into a slot

    @property
    def is_stale(self) -> bool:
        """Whether workers still copy from or into slots that were in use at the last `clear`."""
        return any(job.is_stale for job in (*self._jobs.values(), self._next))

    # -- a request -------------------------------------------------------------------------------------------------

    def admit(self, record: RequestRecord) -> None:
        """A request is about to come. Its media have no names if nothing of it may be cached."""
        name, features = record.request.request_id, record.request.mm_features
        self.forget(name)
        if record.keyer is None or not features:
            return
        keyer = record.keyer.salted(record.request.cache_salt or "")
        media: dict[str, _Medium] = {}
        for feature in features:
            if feature.modality == _NO_ENCODER:
                continue
            place, known = feature.mm_position, media.get(feature.identifier)
            end = place.offset + place.length
            if known is not None:
                known.end = max(known.end, end)
                continue
            reader = Reader(terms=record.terms, bare_terms=record.terms, renews=record.renews, is_patient=True)
            chunk = Chunk(keyer.output_key(feature.identifier), None)
            media[feature.identifier] = _Medium(chunk, reader, place.get_num_embeds(), end)
        if media:
            reader = Reader(terms=record.terms, bare_terms=record.terms, renews=record.renews)
            reader.is_patient = self._cache.cost is None
            end = max(medium.end for medium in media.values())
            self._requests[name] = _Waiting(record, media, end, reader)
            self._cache.ask([medium.chunk for medium in media.values()], record)

    def is_ready(self, name: str, computed_tokens: int) -> bool:
        """Whether a request need not wait for outputs. computed_tokens: of its text, whose KV is there."""
        asked = self._asked = self._requests.get(name)
        if asked is None or computed_tokens >= asked.end:
            return True
        needed = [
            medium
            for identifier, medium in asked.media.items()
            if medium.end > computed_tokens and identifier not in self._in_engine and not medium.is_settled
        ]
        if not needed:
            return True
        if self._is_awaited(asked, needed, computed_tokens):
            asked.record.is_answered = False  # it is asked again for this, not because the engine had no room
            return False
        self._settle(asked, needed)
        return True

    def begin_load(self, identifier: str) -> bool:
        """Whether an output is in RAM for the request that was asked about last; it stays there until the step ends."""
        self._in_engine.discard(identifier)
        medium = self._asked.media.get(identifier) if self._asked is not None else None
        if medium is None:
            return False
        key, reader = medium.chunk.key, medium.reader
        if key in self._begun:
            return True
        reader.cut = True
        if self._cache.lookup(medium.chunk, reader) is not Lookup.HIT:
            return False
        (slot,) = self._cache.begin_load([key], reader)
        shape = shape_of(self._cache.ram.slab.slot(slot), medium.rows)
        if shape is None:
            self._cache.end_load([key])
            return False
        self._begun[key] = (slot, shape.bytes, medium.source)
        return True

    def schedule(self, name: str, identifier: str) -> None:
        """A step has room for an output of a request: it is loaded if that was begun, else encoded and stored."""
        self._in_engine.add(identifier)
        asked = self._requests.get(name)
        medium = asked.media.get(identifier) if asked is not None else None
        if asked is None or medium is None:
            return
        chunk, stats, job = medium.chunk, self._cache.stats, self._next
        begun = self._begun.pop(chunk.key, None)
        if begun is not None:
            slot, size, tier = begun
            job.orders.loads[identifier] = (slot, medium.rows)
            job.loads.append(chunk.key)
            self._cache.join([chunk], medium.reader)
            stats.encoder_hits[tier] += 1
            stats.encoder_load_bytes += size
        else:
            stats.encoder_misses += 1
            job.orders.encoded_rows += medium.rows
            if asked.record.may_store and (self._max_rows is None or medium.rows <= self._max_rows):
                self._store(identifier, medium)
        medium.is_settled = False  # a preempted request begins anew

    def forget_all(self) -> None:
        """Nothing of the requests that are here is kept any more."""
        for name in list(self._requests):
            self.forget(name)
        self._asked = None

    def forget(self, name: str) -> None:
        """A request ended."""
        ended = self._requests.pop(name, None)
        if ended is not None:
            self._cache.release(ended.reader)
            for medium in ended.media.values():
                self._cache.release(medium.reader)

    # -- a step ----------------------------------------------------------------------------------------------------

    def orders(self, freed: list[str], *, computes: bool) -> Orders:
        """What the worker is to do in a step that is complete.

        freed: what vLLM's own cache drops. computes: whether the step computes anything; else orders wait for the next.
        """
        self._in_engine.difference_update(freed)
        self._cache.end_load(self._begun)  # of requests that found no room after all
        self._begun.clear()
        job = self._next
        if not computes or not (job.loads or job.orders.encoded_rows):
            return Orders()
        self._number += 1
        job.orders.number = self._number
        if self._steps is not None and job.orders.encoded_rows:
            self._steps.deduct(self._encode_s(job.orders.encoded_rows))
        self._jobs[self._number] = job
        self._next = _Job(Orders())
        return job.orders

    def note(self, report: Report) -> None:
        """A step's orders were carried out."""
        job = self._jobs.pop(report.number)
        if report.encoder_s is not None and job.orders.encoded_rows:
            self._note_speed(job.orders.encoded_rows, report.encoder_s)
        for identifier, size in report.stored.items():
            if not size:
                rows = job.orders.stores[identifier][1] - 1
                self._max_rows = rows if self._max_rows is None else min(rows, self._max_rows)
            self._cache.stats.encoder_store_bytes += size
        if job.is_stale:
            return
        self._cache.end_load(job.loads)
        for identifier, chunk in job.stores.items():
            self._cache.end_store([chunk], success=bool(report.stored.get(identifier)))

    def clear(self) -> None:
        """The cache was cleared: what workers copy now is of no use to it."""
        for job in (*self._jobs.values(), self._next):
            job.is_stale = bool(job.loads or job.stores)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _is_awaited(self, asked: _Waiting, needed: list[_Medium], computed_tokens: int) -> bool:
        """Whether a request is to wait for outputs: they are on their way to RAM, or may be somewhere, and not late."""
        now_s = self._clock.monotonic()
        asked.since_s = now_s if asked.since_s is None else asked.since_s
        if not asked.is_decided and not self._decide(asked, needed, computed_tokens):
            return True
        asked.is_decided = True
        answers = [self._cache.lookup(medium.chunk, asked.reader) for medium in needed]
        if Lookup.RETRY not in answers:
            return False
        if not asked.reader.is_patient:
            return True  # until the plan is late, and the look-up ends with it
        return now_s - asked.since_s <= max(self._patience_s, self._encode_s(sum(medium.rows for medium in needed)))

    @netted(lambda: True)
    def _decide(self, asked: _Waiting, needed: list[_Medium], computed_tokens: int) -> bool:
        """Decide which outputs are loaded; False while that has to wait for tiers that ask elsewhere."""
        cost, decisions, request = self._cache.cost, self._cache.decisions, asked.record.request
        if cost is None:
            return True
        prompt, rows = request.num_prompt_tokens, sum(medium.rows for medium in needed)
        whole_s = self._encode_s(rows)
        parts = [Part(medium.chunk, medium.rows, whole_s * medium.rows / rows) for medium in needed]
        if self._steps is not None:
            text = self._steps.text(request.request_id, prompt, 1, computed_tokens, waiting=self._cache.waiting)
        else:
            text = Text(prompt, 1, computed_tokens)
        text = decisions.after(text, asked.record, asked.reader)
        if not decisions.are_known(parts, asked.reader, text):
            return False
        decisions.weigh(parts, asked.reader, text, cost.prefill_s(computed_tokens, prompt), is_more=True)
        return True

    def _settle(self, asked: _Waiting, needed: list[_Medium]) -> None:
        """A request waits no longer: what has come is held for it, and the rest is encoded."""
        for medium in needed:
            medium.is_settled = medium.reader.cut = True
            self._cache.lookup(medium.chunk, medium.reader)
            medium.source = asked.reader.promoted.get(medium.chunk.key, medium.source)
        held_s = asked.reader.held_s
        self._cache.release(asked.reader)
        asked.record.held_s += asked.reader.held_s - held_s
        asked.reader.cut, asked.since_s, asked.is_decided = False, None, False

    def _encode_s(self, rows: int) -> float:
        """To encode so many rows in one step; 0 while unknown."""
        return self._cache.cost.encode_s(rows) if self._cache.cost is not None else rows * self._row_s

    def _note_speed(self, rows: int, seconds: float) -> None:
        """The encoder took so long for so many rows."""
        if self._cache.cost is not None:
            self._cache.cost.observe_encoding(rows, seconds)
        else:
            self._row_s += (seconds / rows - self._row_s) * (_NEWEST if self._row_s else 1.0)

    def _store(self, identifier: str, medium: _Medium) -> None:
        for placement in self._cache.begin_store([medium.chunk], medium.reader):
            self._next.orders.stores[identifier] = (placement.slot, medium.rows)
            self._next.stores[identifier] = medium.chunk
