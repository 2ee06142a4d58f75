"""The cache against a model, under any order of events: requests, copies, transfers, faults, time, forgetting.

The model is a dict from key to the version of the bytes last written: forgetting begins a new version, so that bytes
from before it are told from those after. Each text is stored and hit under a tag of its own.
"""

import itertools
from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hotspan.cache.entry import Reader, State
from hotspan.cache.tiered import PATIENCE_S, Placement
from hotspan.core.terms import Scope, Terms
from hotspan.core.types import Chunk, ChunkKey, Lookup, Tier
from hotspan.testing.chunks import chain, content
from hotspan.tiers.base import Fault
from hotspan.tiers.shares import Share, Shares

from .rig import SIZE, Rig

RAM, DISK = 5, 12
HOLD_S = 0.1
"""Of what is announced."""

SHARES = Shares(by_tenant={tenant: Share(floor=0.4) for tenant in (1, 2)})
"""Prefetches may pin one chunk of each tenant."""

LONG = chain("long", 8)  # does not fit into RAM
BRANCH = LONG[:2] + [Chunk(c.key, LONG[1].key if c.index == 0 else c.parent, c.index + 2) for c in chain("branch", 3)]
TEXTS = [LONG, BRANCH, chain("short", 3), chain("other", 4)]
PARENTS = {chunk.key: chunk.parent for text in TEXTS for chunk in text}
JUNK = b"\x5a" * SIZE


@dataclass(eq=False)
class Request:
    """A reader as the model sees it.

    hits:     what it was told HIT of since it last let go, in order.
    waits:    what it was told RETRY of and what has not landed since.
    since_s:  when that wait began, or last saw one of them land.
    """

    text: list[Chunk]
    reader: Reader = field(default_factory=Reader)
    hits: list[ChunkKey] = field(default_factory=list)
    waits: set[ChunkKey] = field(default_factory=set)
    since_s: float = 0.0

    @property
    def prefix(self) -> list[ChunkKey]:
        """What it may load: hits with no gap before them. What stands on a chunk whose copy fails is taken back."""
        return [chunk.key for chunk in itertools.takewhile(lambda chunk: chunk.key in self.hits, self.text)]


@dataclass(eq=False)
class Load:
    """Copies to the engine that have begun and not ended."""

    keys: list[ChunkKey]
    slots: list[int]
    data: list[bytes]


def standing_on(keys: set[ChunkKey]) -> set[ChunkKey]:
    """All chunks of the texts that stand on these."""
    found: set[ChunkKey] = set()
    while more := {key for key, parent in PARENTS.items() if parent in keys | found} - found:
        found |= more
    return found


def terms_of(text: list[Chunk]) -> Terms:
    """On what terms a request for this text stores and hits."""
    return Terms(tenant=1 + TEXTS.index(text) % 2, labels=frozenset({1 + TEXTS.index(text)}))


class Cache(RuleBasedStateMachine):
    """The rules; every one of them leaves the books in agreement."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig(RAM, DISK, store_depth=3, shares=SHARES)
        self.cache, self.tier = self.rig.cache, self.rig.tier
        self.version = 0
        self.written: dict[ChunkKey, int] = {}
        self.requests: list[Request] = []
        self.stores: list[list[Placement]] = []
        self.deleted: set[int] = set()  # slots into which the engine copies what was forgotten meanwhile
        self.tags: dict[ChunkKey, set[int]] = {}
        self.loads: list[Load] = []

    # -- the engine --------------------------------------------------------------------------------------------------

    @rule(text=st.sampled_from(TEXTS), start=st.integers(0, 3), length=st.integers(1, 8))
    def begin_store(self, text: list[Chunk], start: int, length: int) -> None:
        """The engine computed a piece of a text; its copies are on their way."""
        placements = self.cache.begin_store(text[start : start + length], Reader(terms=terms_of(text)))
        fresh = {placement.chunk.key for placement in placements}
        for chunk in text[start : start + length]:
            if chunk.key in fresh and not self.tier.lookup(chunk.key):
                self.tags[chunk.key] = set()
            if chunk.key in self.cache.ram.entries:
                self.tags.setdefault(chunk.key, set()).update(terms_of(text).labels)
        for placement in placements:
            self.rig.slab.slot(placement.slot)[:] = JUNK
        if placements:
            self.stores.append(placements)

    @precondition(lambda self: self.stores)
    @rule(data=st.data(), success=st.integers(0, 4).map(bool))
    def end_store(self, data: st.DataObject, success: bool) -> None:
        """The copies are complete, or failed."""
        placements = self.stores.pop(data.draw(st.integers(0, len(self.stores) - 1)))
        for placement in placements:
            key, slot = placement.chunk.key, self.rig.slab.slot(placement.slot)
            assert slot == JUNK, "someone wrote into a slot that the engine copies into"
            if placement.slot in self.deleted:
                self.deleted.discard(placement.slot)
            elif success:
                slot[:] = content(key, SIZE, self.written.setdefault(key, self.version))
            self._landed(key)
            for descendant in () if success else standing_on({key}):
                self._landed(descendant)
        self.cache.end_store([placement.chunk for placement in placements], success=success)

    @rule(text=st.sampled_from(TEXTS))
    def arrive(self, text: list[Chunk]) -> None:
        """A request comes and looks its text up."""
        if len(self.requests) < 4:
            self.requests.append(Request(text, Reader(terms=terms_of(text))))
            self._ask(self.requests[-1])

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), step=st.booleans())
    def ask_again(self, data: st.DataObject, step: bool) -> None:
        """The engine looks a request up once more."""
        if step:
            self.cache.step()
        self._ask(data.draw(st.sampled_from(self.requests)))

    def _ask(self, request: Request) -> None:
        for chunk in request.text:
            could_load = chunk.key in request.prefix
            answer = self.cache.lookup(chunk, request.reader)
            if answer is not Lookup.HIT:
                assert not could_load, "a hit was taken back, and all that it stands on was there"
                if chunk.key in request.hits:
                    request.hits.remove(chunk.key)
            if answer is Lookup.HIT:
                assert self._bytes(chunk.key) == content(chunk.key, SIZE, self.written[chunk.key])
                if chunk.key not in request.hits:
                    request.hits.append(chunk.key)
            elif answer is Lookup.RETRY:
                if not request.waits:
                    request.since_s = self.rig.clock.monotonic()
                request.waits.add(chunk.key)
                assert self.rig.clock.monotonic() - request.since_s <= PATIENCE_S, "RETRY for too long"
            else:
                return

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), schedule=st.booleans())
    def schedule_or_give_up(self, data: st.DataObject, schedule: bool) -> None:
        """A request loads the prefix that it was told HIT of, or goes away."""
        request = self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1)))
        keys = request.prefix
        if not schedule or not keys:
            self.cache.release(request.reader)
            return
        self.cache.join(request.text, request.reader)
        for chunk in request.text:
            if chunk.key in self.cache.ram.entries or self.tier.lookup(chunk.key):
                self.tags.setdefault(chunk.key, set()).update(terms_of(request.text).labels)
        slots = self.cache.begin_load(keys, request.reader)
        self.loads.append(Load(keys, slots, [content(key, SIZE, self.written[key]) for key in keys]))

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def end_load(self, data: st.DataObject) -> None:
        """The engine has its copies."""
        load = self.loads.pop(data.draw(st.integers(0, len(self.loads) - 1)))
        self.cache.end_load(load.keys)

    @rule(text=st.sampled_from(TEXTS))
    def announce(self, text: list[Chunk]) -> None:
        """Somebody says that a request for a text is about to come."""
        self.cache.prefetches.begin(text, terms_of(text).tenant, HOLD_S, lambda found: None)

    @rule(tag=st.integers(1, len(TEXTS)), chunks=st.integers(0, 3))
    def pin(self, tag: int, chunks: int) -> None:
        """The owner of a text has it evicted last."""
        self.cache.pins.put(1 + (tag - 1) % 2, frozenset({tag}), chunks * SIZE, HOLD_S)

    # -- the world -----------------------------------------------------------------------------------------------------

    @rule(ms=st.integers(1, 70))
    def time_passes(self, ms: int) -> None:
        """Some milliseconds."""
        self.rig.clock.advance(ms / 1000)

    @precondition(lambda self: self.tier.flights)
    @rule(data=st.data(), fault=st.sampled_from([None, None, None, *Fault]), notice=st.booleans())
    def a_transfer_ends(self, data: st.DataObject, fault: Fault | None, notice: bool) -> None:
        """The tier below finishes a transfer, in any order, well or not; the cache notices now or later."""
        self.tier.finish(data.draw(st.sampled_from(self.tier.flights)), fault)
        if notice:
            self.step()

    @rule()
    def step(self) -> None:
        """The cache takes note of what ended."""
        for transfer in self.tier._ended:
            if transfer.is_load:
                for key in {transfer.key} | (standing_on({transfer.key}) if transfer.fault is not None else set()):
                    self._landed(key)
        self.cache.step()

    @precondition(lambda self: not self.stores and not self.loads)
    @rule()
    def clear(self) -> None:
        """RAM is emptied; the caller has made sure that no copy of the engine's is in flight."""
        self.cache.clear()
        assert not self.cache.ram.entries
        for request in self.requests:
            request.hits.clear()
            request.waits.clear()
            assert not self.cache.is_waiting(request.reader)

    @rule(tag=st.integers(1, len(TEXTS)))
    def invalidate(self, tag: int) -> None:
        """The owner of a text takes it back, whatever is in flight."""
        taken = {key for key, tags in self.tags.items() if tag in tags}
        taken |= standing_on(taken)
        self.cache.invalidate([Scope(labels=frozenset({tag}))], lambda done: None)
        self.version += 1
        for key in taken:
            assert key not in self.cache.ram.entries and not self.tier.lookup(key), "it was taken back and is here"
            self.written.pop(key, None)
            self.tags.pop(key, None)
            for request in self.requests:
                request.waits.discard(key)
                if key in request.hits:
                    del request.hits[request.hits.index(key) :]
        storing = [placement for placements in self.stores for placement in placements]
        self.deleted |= {placement.slot for placement in storing if placement.chunk.key in taken}

    def _landed(self, key: ChunkKey) -> None:
        for request in self.requests:
            if key in request.waits:
                request.waits.discard(key)
                request.since_s = self.rig.clock.monotonic()

    def _bytes(self, key: ChunkKey) -> memoryview:
        return self.rig.slab.slot(self.cache.ram.entries[key].slot)

    # -- what always holds ---------------------------------------------------------------------------------------------

    @invariant()
    def the_books_agree(self) -> None:
        self.cache.check()
        self.tier.check()

    @invariant()
    def a_hit_stays_until_release(self) -> None:
        for request in self.requests:
            for key in request.prefix:
                entry = self.cache.ram.entries[key]
                assert entry.state is State.READY and entry.pins > 0
                assert self._bytes(key) == content(key, SIZE, self.written[key])

    @invariant()
    def what_is_being_loaded_stays(self) -> None:
        for load in self.loads:
            for data, slot in zip(load.data, load.slots, strict=True):
                assert self.rig.slab.slot(slot) == data

    @invariant()
    def the_tier_below_holds_what_was_written(self) -> None:
        for key, data in self.tier.held.items():
            assert data == content(key, SIZE, self.written[key])

    @invariant()
    def nobody_waits_for_nothing(self) -> None:
        for request in self.requests:
            on_their_way = {key for key, e in self.cache.ram.entries.items() if e.state is not State.READY}
            assert request.reader.waiting <= on_their_way

    def teardown(self) -> None:
        """When all is released and finished, no pin and no slot is left over, and `clear` gives all room back."""
        self.rig.clock.advance(HOLD_S)
        for request in self.requests:
            self.cache.release(request.reader)
        for load in self.loads:
            self.cache.end_load(load.keys)
        while self.stores:
            placements = self.stores.pop()
            self.cache.end_store([placement.chunk for placement in placements], success=False)
        while self.tier.flights or self.tier._ended or self.cache.is_persisting:
            self.tier.finish_all()
            self.cache.step()
        self.cache.check()
        assert not self.cache.ram.is_pinned and not self.cache.is_moving and not self.cache.is_persisting
        assert self.cache.usage()[Tier.RAM].chunks == len(self.cache.ram.entries)
        self.cache.clear()
        assert self.cache.usage()[Tier.RAM].chunks == 0
        self.rig.slab.close()


TestCache = Cache.TestCase
TestCache.settings = settings(
    max_examples=250, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
