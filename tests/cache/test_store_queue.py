"""Which chunks of RAM go to a tier below."""

import uuid
from pathlib import Path
from typing import NamedTuple

from hotspan.cache.entry import Reader
from hotspan.cache.lower import StoreQueue
from hotspan.cache.stats import CacheStats
from hotspan.cache.tiered import TieredCache
from hotspan.core.terms import Scope, Terms
from hotspan.core.types import Tier
from hotspan.testing.chunks import chain
from hotspan.testing.clock import SimulatedClock
from hotspan.tiers.disk import DiskOptions, DiskTier
from hotspan.tiers.lower import LOG_STALL_S, LowerTier
from hotspan.tiers.slab import SharedSlab
from kit.simulated.inline import InlineQueues
from tests.cache.rig import SIZE, Rig
from tests.operations import operations

CHUNKS = 40
TAGS = frozenset([1])


class Held:
    """A cache whose chunks are held back: the log of its disk hangs, with so many invalidations to write."""

    def __init__(self, path: Path, invalidations: int) -> None:
        self.queues, self.clock = InlineQueues(), SimulatedClock()
        self.slab = SharedSlab(f"test-{uuid.uuid4().hex}", CHUNKS, SIZE)
        self.slab.unlink()
        options = DiskOptions(path, CHUNKS * (SIZE + 4096), store_depth=CHUNKS, queue=self.queues.queue)
        self.tier = LowerTier(lambda is_back: DiskTier(options, bytes(32), SIZE, self.clock), self.clock)
        self.cache = TieredCache(self.slab, self.tier, clock=self.clock)
        self.queues.run()
        (self.log,) = (queue for queue in self.queues.all if queue.name == "disk-log")
        self.log.hung = True
        for number in reversed(range(invalidations)):  # the last takes them, the others other chunks of their tenant
            self.cache.invalidate([Scope(tenant=1, adapter=number, labels=TAGS)], lambda done: None)
        self.chunks = chain("held", CHUNKS)

    def store(self) -> None:
        """Compute and store all of the text."""
        self.cache.begin_store(self.chunks, Reader(terms=Terms(tenant=1, labels=TAGS)))
        self.cache.end_store(self.chunks)

    def land(self) -> None:
        """All I/O that can end does, and is noted; the tier is given a few chunks at a time."""
        for _ in range(CHUNKS):
            self.queues.run()
            self.cache.step()

    def close(self) -> None:
        self.log.hung = False
        self.land()
        self.cache.check()
        self.cache.close(1.0)
        self.slab.close()


class _Costs(NamedTuple):
    store: int
    step: int


def test_chunks_that_are_held_back_cost_nothing_until_they_may_go(tmp_path: Path) -> None:
    """A step costs the same with 40 chunks held back as with none; to hold back is independent of what is unlogged."""

    def costs(invalidations: int) -> _Costs:
        held = Held(tmp_path / str(invalidations), invalidations)
        store = operations(held.store)
        assert held.cache.queued()[Tier.DISK] == CHUNKS
        held.queues.run()
        held.cache.step()
        step = operations(held.cache.step)
        held.close()
        return _Costs(store, step)

    none, few, many = costs(0), costs(2), costs(400)
    assert few.step == many.step <= none.step
    assert many.store < 1.05 * few.store


def test_chunks_that_were_held_back_are_stored_in_order(tmp_path: Path) -> None:
    """Once the log has what held them back, all are written, the root first; what was forgotten meanwhile is not."""
    held = Held(tmp_path / "disk", 3)
    held.store()
    assert [held.tier.lookup(chunk.key) for chunk in held.chunks] == [False] * CHUNKS
    held.cache.invalidate([Scope(keys=frozenset([held.chunks[30].key]))], lambda done: None)
    held.log.hung = False
    held.land()
    assert [held.tier.lookup(chunk.key) for chunk in held.chunks] == [True] * 30 + [False] * 10
    assert held.cache.take_stats().stores_refused == {}
    held.close()


def test_what_a_tier_held_back_that_was_given_up_is_stored_when_it_is_back(tmp_path: Path) -> None:
    """Also if the entry of the log that held it back never ended."""
    held = Held(tmp_path / "disk", 3)
    held.store()
    held.clock.advance(2 * LOG_STALL_S)
    held.cache.step()
    assert not held.tier.is_up and held.cache.queued()[Tier.DISK] == CHUNKS
    held.log.hung = False  # the disk lets go of the directory, and it is opened anew
    for _ in range(100):
        held.clock.advance(1.0)
        held.queues.run()
        held.cache.step()
        if held.tier._opening is not None:
            held.tier._opening.join()
    assert held.tier.is_up and all(held.tier.lookup(chunk.key) for chunk in held.chunks)
    held.close()


def test_a_step_costs_the_same_however_many_wait() -> None:
    """To take one of 8,000 chunks that wait takes as many operations as to take one of 1,000."""

    def each(waiting: int) -> float:
        with Rig(ram=1, disk=1) as rig:
            queue = StoreQueue(rig.cache.ram.entries, rig.slab, rig.lower, CacheStats())
            for chunk in chain("c", waiting):  # none of them is in RAM any more: each is taken and passed over
                queue.offer(chunk.key)
            count = operations(queue.step)
            assert queue.queued == 0 and count > waiting
            return count / waiting

    assert each(8_000) < 1.1 * each(1_000)


def test_what_stands_on_a_chunk_that_is_held_back_waits_for_it(tmp_path: Path) -> None:
    """An invalidation by key holds back one chunk: those behind it are stored after it, and none is refused."""
    held = Held(tmp_path / "disk", 0)
    held.cache.invalidate([Scope(keys=frozenset([held.chunks[3].key]))], lambda done: None)
    held.store()
    held.land()
    assert [held.tier.lookup(chunk.key) for chunk in held.chunks] == [True] * 3 + [False] * (CHUNKS - 3)
    assert held.cache.queued()[Tier.DISK] == CHUNKS - 3
    held.log.hung = False
    held.land()
    assert all(held.tier.lookup(chunk.key) for chunk in held.chunks)
    assert held.cache.take_stats().stores_refused == {}
    held.close()


def test_a_tier_is_given_as_much_as_it_writes() -> None:
    """One that has none left is given twice as many, at most a quarter of RAM; one that takes seconds, eight chunks."""
    with Rig(ram=400, disk=400, store_depth=400) as rig:
        rig.store(chain("text", 300))
        given = []
        while rig.stores:
            given.append(len(rig.stores))
            rig.clock.advance(2.0 if len(given) == 5 else 0.0)
            rig.land_some()
        assert given[:6] == [8, 16, 32, 64, 100, 8] and sum(given) == 300


def test_a_fast_tier_is_given_what_it_writes_between_two_looks() -> None:
    """A step of the engine takes seconds: a tier that has long ended by then is given ten times as many at once."""
    with Rig(ram=400, disk=400, store_depth=400) as rig:
        rig.store(chain("text", 300))
        rig.clock.advance(0.05)
        rig.tier.finish_all()
        rig.clock.advance(0.45)
        rig.cache.step()
        assert len(rig.stores) == 80


def test_a_tier_takes_a_small_part_of_ram() -> None:
    """What is being written can't be evicted: at first it is a 32nd of RAM, at least one chunk and at most eight."""
    for ram, first in ((16, 1), (64, 2), (1024, 8)):
        with Rig(ram=ram, disk=2000, store_depth=400) as rig:
            rig.store(chain("text", ram))
            assert len(rig.stores) == first
            rig.land()


def test_chunks_stay_for_a_tier_only_while_it_keeps_up() -> None:
    """RAM evicts in the order of use while more chunks wait for a tier than it is given at a time."""
    with Rig(ram=256, disk=400, store_depth=400) as rig:
        texts = [chain(f"text {number}", 1) for number in range(261)]
        for text in texts:
            rig.store(text)
        assert not any(rig.in_ram(text[0].key) for text in texts[8:13])  # behind those that are being written
        assert all(rig.in_ram(text[0].key) for text in texts[13:])
        while rig.stores:
            rig.land()
