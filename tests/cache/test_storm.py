"""A tenant that invalidates all the time, over replicas with disks and one L2: the others lose nothing.

The deterministic part of benchmarks/invalidation_storm.py: simulated time, every job turned by hand, and only counts.
"""

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from hotspan.cache.entry import Reader
from hotspan.cache.tiered import TieredCache
from hotspan.core.terms import Scope, Terms
from hotspan.core.types import Chunk, Lookup, Tier
from hotspan.l2.follower import LogFollower
from hotspan.l2.remote import RemoteOptions, RemoteTier
from hotspan.testing.chunks import chain, content
from hotspan.testing.clock import SimulatedClock
from hotspan.tiers.disk import DiskOptions, DiskTier
from hotspan.tiers.lower import LowerTier
from hotspan.tiers.slab import SharedSlab
from kit.simulated.inline import InlineQueues
from kit.simulated.memory_store import MemoryServer

SIZE, RAM, DISK = 4096, 16, 256
NAMESPACE = bytes(range(32))
STORMY, CALM = 1, 2
TEXTS = [chain(f"calm {number}", 4) for number in range(6)]


class Replica:
    """RAM over a real disk tier and an L2, each guarded, on simulated time."""

    def __init__(self, server: MemoryServer, number: int, directory: Path) -> None:
        self.clock = server.clock
        self.queues = InlineQueues(number)
        self.slab = SharedSlab(f"test-{uuid.uuid4().hex}", RAM, SIZE)
        self.slab.unlink()
        self.follower = LogFollower(server.log(), f"replica-{number}", self.clock)
        disk = DiskOptions(
            directory / str(number), DISK * (SIZE + 4096), allow_direct=False, queue=self.queues.queue, threads=2
        )
        l2 = RemoteOptions(server.store(), self.follower, threads=2, queue=self.queues.queue)
        self.disk = LowerTier(lambda again: DiskTier(disk, NAMESPACE, SIZE, self.clock), self.clock)
        self.l2 = LowerTier(lambda again: RemoteTier(l2, NAMESPACE, SIZE, self.clock), self.clock)
        self.cache = TieredCache(self.slab, self.disk, self.l2, namespace=NAMESPACE, clock=self.clock)
        self.foreign = 0

    def step(self) -> None:
        """What an engine does between two steps, and some I/O."""
        if scopes := self.follower.foreign():
            self.foreign += len(scopes)
            self.cache.invalidate(scopes, lambda done: None, is_foreign=True)
        self.queues.run(12)
        self.cache.step()

    def read(self, chunks: list[Chunk], terms: Terms) -> list[Lookup]:
        """A request for a text: what of it was found. Raises: AssertionError for wrong bytes."""
        reader = Reader(terms=terms)
        self.cache.ask(chunks, reader)
        found: list[Lookup] = []
        while not found or Lookup.RETRY in found:
            found = []
            for chunk in chunks:
                found.append(self.cache.lookup(chunk, reader))
                if found[-1] is not Lookup.HIT:
                    break
            if Lookup.RETRY in found:
                self.queues.run()
                self.cache.step()
        hits = [chunk.key for chunk, answer in zip(chunks, found, strict=False) if answer is Lookup.HIT]
        self.cache.join(chunks, reader)
        for key, slot in zip(hits, self.cache.begin_load(hits, reader), strict=True):
            assert self.slab.slot(slot) == content(key, SIZE)
        self.cache.end_load(hits)
        self.cache.release(reader)
        placements = self.cache.begin_store(chunks[len(hits) :], Reader(terms=terms))
        for placement in placements:
            self.slab.slot(placement.slot)[:] = content(placement.chunk.key, SIZE)
        self.cache.end_store([placement.chunk for placement in placements])
        return found

    def rest(self) -> None:
        """Nothing is on its way any more."""
        while self.cache.is_persisting or self.queues.run():
            self.step()

    def close(self) -> None:
        self.rest()
        self.cache.check()
        self.cache.close(1.0)


@pytest.fixture
def server() -> MemoryServer:
    return MemoryServer(clock=SimulatedClock())


@pytest.fixture
def replicas(server: MemoryServer, tmp_path: Path) -> Iterator[list[Replica]]:
    """Three, which know all texts of the calm tenant: they lie on every disk and in the L2."""
    replicas = [Replica(server, number, tmp_path) for number in range(3)]
    for replica in replicas:
        replica.follower.poll()
        replica.step()
        for text in TEXTS:
            replica.read(text, Terms(CALM))
            replica.rest()
    yield replicas
    for replica in replicas:
        replica.close()


def test_a_storm_of_invalidations_costs_the_others_nothing(server: MemoryServer, replicas: list[Replica]) -> None:
    """60 updates of documents, each at every replica, as a router passes them on, at a thousand a minute."""
    clock = server.clock
    assert isinstance(clock, SimulatedClock)
    told: list[bool] = []
    hits = asked = 0
    for update in range(60):
        tags = frozenset([100 + update % 10])
        for replica in replicas:
            replica.cache.invalidate([Scope(tenant=STORMY, labels=tags)], told.append)
        replicas[update % 3].read(chain(f"document {update}", 2), Terms(STORMY, labels=tags))
        for nth, replica in enumerate(replicas):
            if nth != update % 3:  # one of them is behind
                replica.step()
            replica.follower.poll()
            found = replica.read(TEXTS[(update + nth) % len(TEXTS)], Terms(CALM))
            asked, hits = asked + 4, hits + found.count(Lookup.HIT)
        clock.advance(0.06)
    for replica in replicas:
        replica.rest()
        replica.follower.poll()
        replica.step()
    assert hits == asked == 60 * 3 * 4, "another tenant's chunk was a miss"
    assert told == [True] * 180, "each receipt is told once, and true"
    assert all(replica.disk.trips == replica.l2.trips == 0 for replica in replicas)
    for replica in replicas:
        assert all(Tier.DISK in replica.cache.where(chunk.key) for text in TEXTS for chunk in text)
        assert replica.follower.view.floor == replica.follower.view.latest(CALM) < replica.follower.view.latest(STORMY)


def test_a_burst_that_no_log_keeps_up_with_stops_at_its_tenant(server: MemoryServer, replicas: list[Replica]) -> None:
    """3,000 invalidations at once: few log entries, every receipt true, and only their tenant is widened."""
    told: list[bool] = []
    writer, *others = replicas
    writer.read(chain("document", 4), Terms(STORMY))
    writer.rest()
    before = len(server.entries)
    for number in range(3000):
        writer.cache.invalidate([Scope(tenant=STORMY, labels=frozenset([number + 1]))], told.append)
    writer.rest()
    assert told == [True] * 3000 and len(server.entries) - before <= 2
    for replica in others:
        replica.follower.poll()
        replica.step()
        assert replica.foreign == 1 + 1, "what was before it began, and one for all of the tenant"
    for replica in replicas:
        for text in TEXTS:
            assert replica.read(text, Terms(CALM)) == [Lookup.HIT] * 4
        assert replica.disk.trips == replica.l2.trips == 0
