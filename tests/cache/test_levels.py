"""A cache over two tiers, a disk and an L2 that must be asked, in simulated time."""

import uuid
from collections.abc import Iterator

import pytest

from hotspan.cache.cost import CostModel
from hotspan.cache.entry import Reader
from hotspan.cache.tiered import PATIENCE_S, TieredCache
from hotspan.core.terms import Scope, Terms
from hotspan.core.types import Chunk, ChunkKey, Lookup, Tier
from hotspan.l2.follower import LogFollower
from hotspan.l2.remote import RemoteOptions, RemoteTier
from hotspan.testing.chunks import chain, content
from hotspan.testing.clock import SimulatedClock
from hotspan.tiers.slab import SharedSlab
from kit.simulated.inline import InlineQueues
from kit.simulated.lower import steady
from kit.simulated.memory_store import MemoryServer
from tests.cache.manual import ManualTier

SIZE = 4096
TEXT = chain("text", 3)


class Levels:
    """A replica's cache over RAM, a manual disk and a store that others may share."""

    def __init__(
        self, server: MemoryServer, name: str = "a", ram: int = 8, disk: int = 8, cost: CostModel | None = None
    ) -> None:
        self.clock = server.clock
        assert isinstance(self.clock, SimulatedClock)
        self.slab = SharedSlab(f"test-{uuid.uuid4().hex}", ram, SIZE)
        self.slab.unlink()
        self.disk = ManualTier(disk, SIZE, clock=self.clock)
        self.queues = InlineQueues()
        self.follower = LogFollower(server.log(), name, self.clock)
        self.follower.poll()
        self.follower.foreign()
        options = RemoteOptions(server.store(), self.follower, queue=self.queues.queue)
        self.l2 = RemoteTier(options, bytes(32), SIZE, self.clock)
        lower = [steady(tier, self.clock) for tier in (self.disk, self.l2)]
        self.cache = TieredCache(self.slab, *lower, clock=self.clock, cost=cost)

    def store(self, chunks: list[Chunk], terms: Terms = Terms()) -> None:  # noqa: B008
        """Compute and store chunks, on every tier that takes them."""
        placements = self.cache.begin_store(chunks, Reader(terms=terms))
        for placement in placements:
            self.slab.slot(placement.slot)[:] = content(placement.chunk.key, SIZE)
        self.cache.end_store([placement.chunk for placement in placements])
        self.land()

    def land(self) -> None:
        """All I/O in flight ends and is noted."""
        for _ in range(4):
            self.disk.finish_all()
            self.queues.run()
            self.cache.step()
        self.cache.check()

    def look(self, chunks: list[Chunk], reader: Reader) -> list[Lookup]:
        """One pass over a text, as the engine makes it."""
        answers: list[Lookup] = []
        for chunk in chunks:
            answers.append(self.cache.lookup(chunk, reader))
            if answers[-1] is Lookup.MISS:
                break
        self.cache.check()
        return answers

    def read(self, chunks: list[Chunk]) -> list[Tier | None]:
        """A request for a text: from where each chunk came (None: a miss). Raises: AssertionError for wrong bytes."""
        reader = Reader()
        self.cache.ask(chunks, reader)
        for _ in range(4):
            answers = self.look(chunks, reader)
            if Lookup.RETRY not in answers:
                break
            self.land()
        hits = [chunk.key for chunk, answer in zip(chunks, answers, strict=False) if answer is Lookup.HIT]
        for key, slot in zip(hits, self.cache.begin_load(hits, reader), strict=True):
            assert self.slab.slot(slot) == content(key, SIZE)
        self.cache.end_load(hits)
        self.cache.release(reader)
        return [reader.promoted.get(chunk.key, Tier.RAM) if chunk.key in hits else None for chunk in chunks]

    def evict(self, keys: list[ChunkKey]) -> None:
        """RAM gives chunks up."""
        for key in keys:
            if key in self.cache.ram.entries:
                self.cache._forget(self.cache.ram.entries[key])


@pytest.fixture
def server() -> MemoryServer:
    return MemoryServer(clock=SimulatedClock())


@pytest.fixture
def levels(server: MemoryServer) -> Iterator[Levels]:
    one = Levels(server)
    yield one
    server.before = lambda call: None
    one.land()
    one.cache.check()
    one.slab.close()


def test_what_is_stored_goes_to_every_tier(levels: Levels, server: MemoryServer) -> None:
    """A chunk that was computed is on disk and in the L2 soon, while it is still in RAM."""
    levels.store(TEXT)
    assert all(chunk.key in levels.disk.held and chunk.key in server.objects for chunk in TEXT)
    assert levels.read(TEXT) == [Tier.RAM] * 3


def test_the_fastest_tier_gives_it_back(levels: Levels) -> None:
    """What is on disk and in the L2 comes from the disk; what only the L2 has comes from there."""
    levels.store(TEXT)
    levels.evict([TEXT[0].key])
    assert levels.read(TEXT) == [Tier.DISK] * 3
    levels.evict([TEXT[0].key])
    levels.disk.discard(TEXT[1].key)
    assert levels.read(TEXT) == [Tier.DISK, Tier.L2, Tier.L2]


def test_a_cold_replica_reads_what_another_computed(levels: Levels, server: MemoryServer) -> None:
    """A replica with nothing in RAM and on disk waits for the answer of the L2, and hits all of it."""
    levels.store(TEXT)
    cold = Levels(server, "b")
    assert cold.read(TEXT) == [Tier.L2] * 3
    assert cold.read(TEXT) == [Tier.RAM] * 3
    cold.land()
    assert all(chunk.key in cold.disk.held for chunk in TEXT), "what came from the L2 is offered to the disk when used"
    cold.slab.close()


def test_nothing_there_is_a_miss_at_once(levels: Levels) -> None:
    """When the L2 has answered that it has nothing, no request waits."""
    reader = Reader()
    levels.cache.ask(TEXT, reader)
    assert levels.look(TEXT, reader) == [Lookup.RETRY] * 3
    levels.land()
    assert levels.look(TEXT, reader) == [Lookup.MISS]
    assert not reader.cut


def test_an_l2_that_does_not_answer_costs_the_patience_and_no_more(levels: Levels) -> None:
    """A request waits for an answer as long as it would for a chunk, and then goes on without."""
    levels.queues.hang()
    reader = Reader()
    levels.cache.ask(TEXT, reader)
    assert levels.look(TEXT, reader) == [Lookup.RETRY] * 3 and levels.cache.is_moving
    levels.clock.advance(PATIENCE_S * 0.9)
    assert Lookup.MISS not in levels.look(TEXT, reader)
    levels.clock.advance(PATIENCE_S * 0.2)
    assert levels.look(TEXT, reader) == [Lookup.MISS] and reader.cut
    levels.queues.hang(False)
    levels.land()
    assert not levels.cache.is_moving


def test_the_wait_for_a_chunk_begins_with_the_answer(levels: Levels, server: MemoryServer) -> None:
    """An answer that took most of the patience leaves all of it to the chunks."""
    levels.store(TEXT)
    cold, reader = Levels(server, "b"), Reader()
    cold.cache.ask(TEXT, reader)
    cold.look(TEXT, reader)
    cold.clock.advance(PATIENCE_S * 0.9)
    cold.queues.run()
    cold.cache.step()
    assert cold.look(TEXT, reader) == [Lookup.RETRY] * 3
    cold.clock.advance(PATIENCE_S * 0.9)
    assert cold.look(TEXT, reader) == [Lookup.RETRY] * 3
    cold.land()
    assert cold.look(TEXT, reader) == [Lookup.HIT] * 3
    cold.cache.release(reader)
    cold.slab.close()


def test_what_ram_has_is_a_hit_while_the_l2_is_asked(levels: Levels) -> None:
    """The part of a text that is in RAM is never made to wait for an answer, and is used when none comes."""
    levels.store(TEXT[:2])
    levels.queues.hang()
    reader = Reader()
    levels.cache.ask(TEXT, reader)
    assert levels.look(TEXT, reader) == [Lookup.HIT, Lookup.HIT, Lookup.RETRY]
    levels.clock.advance(PATIENCE_S * 1.1)
    assert levels.look(TEXT, reader) == [Lookup.HIT, Lookup.HIT, Lookup.MISS]
    levels.cache.release(reader)
    levels.queues.hang(False)


def test_a_text_that_is_all_here_asks_nobody(levels: Levels) -> None:
    """The L2 is not asked about a text that RAM and disk have."""
    levels.store(TEXT)
    levels.cache.ask(TEXT, Reader())
    assert not levels.l2.asking


def test_an_invalidation_takes_it_from_every_tier(levels: Levels, server: MemoryServer) -> None:
    """It is counted by tier, and durable when it is on all of them."""
    levels.store(TEXT, Terms(labels=frozenset({7})))
    told: list[bool] = []
    levels.disk.holds_durables = True
    removed = levels.cache.invalidate([Scope(labels=frozenset({7}))], told.append)
    assert removed == {Tier.RAM: 3, Tier.DISK: 3, Tier.L2: 3}
    levels.land()
    assert told == []
    levels.disk.durables.pop()(True)
    assert told == [True]
    assert levels.read(TEXT) == [None] * 3
    assert Levels(server, "b").read(TEXT) == [None] * 3


def test_an_invalidation_that_one_tier_could_not_log_is_not_durable(levels: Levels) -> None:
    """It is enough that one tier could not make it so."""
    told: list[bool] = []
    levels.disk.holds_durables = True
    levels.cache.invalidate([Scope()], told.append)
    levels.disk.durables.pop()(False)
    levels.land()
    assert told == [False]


def test_what_others_invalidated_is_not_logged_twice(levels: Levels, server: MemoryServer) -> None:
    """A replica that forgets what another invalidated does so on its own tiers, and adds nothing to the log."""
    levels.store(TEXT, Terms(labels=frozenset({7})))
    other = Levels(server, "b")
    assert other.read(TEXT) == [Tier.L2] * 3
    levels.cache.invalidate([Scope(labels=frozenset({7}))], lambda done: None)
    levels.land()
    other.follower.poll()
    (scope,) = other.follower.foreign()
    told: list[bool] = []
    assert other.cache.invalidate([scope], told.append, is_foreign=True)[Tier.RAM] == 3
    assert len(server.entries) == 1 and told == [True]
    assert other.read(TEXT) == [None] * 3
    other.slab.close()


def test_a_tag_reaches_every_tier(levels: Levels, server: MemoryServer) -> None:
    """A request that hits in RAM under a new tag updates the copies on disk and in the L2."""
    levels.store(TEXT)
    levels.cache.join(TEXT, Reader(terms=Terms(labels=frozenset({9}))))
    levels.land()
    assert levels.disk.terms(TEXT[0].key).labels == {9}
    other = Levels(server, "b")
    other.read(TEXT)
    assert other.cache.terms(TEXT[0].key) == Terms(labels=frozenset({9}), generation=other.follower.applied)
    other.slab.close()


def test_closing_writes_what_waits(levels: Levels, server: MemoryServer) -> None:
    """What was stored just before the end is in the L2 afterwards."""
    placements = levels.cache.begin_store(TEXT)
    levels.cache.end_store([placement.chunk for placement in placements])
    levels.disk.finish_all()

    def turn(timeout_s: float) -> bool:
        levels.queues.run()
        levels.disk.finish_all()
        return True

    levels.l2.wait = levels.disk.wait = turn  # type: ignore[method-assign]
    levels.cache.close(5.0)
    assert all(chunk.key in server.objects for chunk in TEXT)
