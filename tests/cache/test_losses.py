"""What each tier gives up by itself is counted by that tier, once, and apart from what its owner took back."""

import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from hotspan.cache.entry import Reader
from hotspan.cache.stats import CacheStats
from hotspan.cache.tiered import TieredCache
from hotspan.core.terms import Scope, Terms, tag_labels
from hotspan.core.types import GIB, PAGE_BYTES, Chunk, Tier
from hotspan.l2.base import PREAMBLE_BYTES
from hotspan.l2.file import FileStore
from hotspan.l2.follower import LogFollower
from hotspan.l2.options import FileOptions
from hotspan.l2.remote import RemoteOptions, RemoteTier
from hotspan.testing.chunks import chain, content
from hotspan.testing.clock import SimulatedClock
from hotspan.tiers.base import Losses
from hotspan.tiers.disk import DiskOptions, DiskTier
from hotspan.tiers.lower import LowerTier
from hotspan.tiers.slab import SharedSlab
from kit.simulated.inline import InlineQueues
from kit.simulated.lower import steady
from kit.waiting import PATIENCE_S
from tests.cache.manual import ManualTier

SIZE, RAM, DISK, TEXT = PAGE_BYTES, 6, 8, 2
STORED = PREAMBLE_BYTES + PAGE_BYTES + SIZE
"""Bytes of an object of the directory."""


class Cache:
    """A cache over a real disk."""

    def __init__(self, path: Path, clock: SimulatedClock) -> None:
        self.clock = clock
        self.queues = InlineQueues()
        self.slab = SharedSlab(f"test-{uuid.uuid4().hex}", RAM, SIZE)
        self.slab.unlink()
        options = DiskOptions(path / "disk", DISK * (SIZE + PAGE_BYTES), queue=self.queues.queue)
        self.disk = DiskTier(options, bytes(32), SIZE, clock)
        self.cache = TieredCache(self.slab, steady(self.disk, clock), clock=clock)

    def settle(self) -> CacheStats:
        """All I/O ends; what was counted since the last call."""
        for _ in range(4):
            self.queues.run()
            self.cache.step()
        self.cache.check()
        return self.cache.take_stats()

    def store(self, text: list[Chunk], terms: Terms = Terms()) -> None:  # noqa: B008
        """Compute a text, and use it once more: a full disk takes only what is used twice."""
        placements = self.cache.begin_store(text, Reader(terms=terms))
        for placement in placements:
            self.slab.slot(placement.slot)[:] = content(placement.chunk.key, SIZE)
        self.cache.end_store(text)
        for _ in range(2):
            self.queues.run()
            self.cache.step()
        keys = [chunk.key for chunk in text]
        self.cache.begin_load(keys, Reader())
        self.cache.end_load(keys)
        for _ in range(4):
            self.queues.run()
            self.cache.step()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Cache]:
    rig = Cache(tmp_path, SimulatedClock())
    yield rig
    rig.disk.close(5.0)
    rig.slab.close()


def test_a_disk_that_is_written_four_times_over_says_so(rig: Cache) -> None:
    """Of each tier what came and is not there any more was evicted, and nothing else is counted."""
    texts = [chain(f"text {n}", TEXT) for n in range(4 * DISK // TEXT)]
    for text in texts:
        rig.store(text)
    stats = rig.settle()
    assert stats.store_bytes == {Tier.RAM: 4 * DISK * SIZE, Tier.DISK: 4 * DISK * SIZE}
    assert stats.evictions == {Tier.RAM: 4 * DISK - RAM, Tier.DISK: 3 * DISK}
    assert not stats.expired and not stats.invalidated and not stats.faults
    assert not rig.settle().evictions


def test_each_kind_of_loss_is_counted_apart(rig: Cache) -> None:
    """A text that expires, one that is invalidated and one that is corrupt, each of two chunks: none was evicted."""
    expiring, tagged, corrupt = (chain(name, TEXT) for name in ("expiring", "tagged", "corrupt"))
    labels = tag_labels(["manual"])
    rig.store(expiring, Terms(expires_s=int(rig.clock.unix()) + 10))
    rig.store(tagged, Terms(labels=labels))
    rig.store(corrupt)
    rig.settle()
    rig.clock.advance(20)
    stats = rig.settle()
    assert stats.expired == {Tier.RAM: TEXT, Tier.DISK: TEXT}
    rig.cache.invalidate([Scope(labels=labels)], lambda done: None)
    assert rig.settle().invalidated == {Tier.RAM: TEXT, Tier.DISK: TEXT}
    slot = rig.disk._entries[corrupt[-1].key].slot
    with (rig.disk.directory.path / "slab").open("r+b") as slab:
        slab.seek(slot * rig.disk.slot_bytes + PAGE_BYTES)
        slab.write(b"damage")
    rig.disk.verification().run()
    stats = rig.settle()
    assert stats.faults == {(Tier.DISK, "corrupt"): 1}
    assert not stats.evictions and not stats.expired and not stats.invalidated


def test_a_tier_that_is_opened_again_counts_once() -> None:
    """What it counted before it was given up is told, and what the next one counts is added to it."""
    clock, opened = SimulatedClock(), list[ManualTier]()

    def open_tier(is_again: bool) -> ManualTier:
        opened.append(ManualTier(4, SIZE, clock=clock))
        opened[-1].losses.expired = 1  # of what it found at its start
        return opened[-1]

    tier = LowerTier(open_tier, clock)
    opened[0].losses.evicted = 5
    assert tier.take_losses() == Losses(evicted=5, expired=1) and tier.take_losses() == Losses()
    opened[0].losses.evicted += 2
    tier._trip("test")
    clock.advance(100.0)
    tier.finished()
    assert tier._opening is not None
    tier._opening.join()
    tier.finished()
    opened[1].losses.quarantined = 3
    assert len(opened) == 2 and tier.is_up
    assert tier.take_losses() == Losses(evicted=2, expired=1, quarantined=3) and tier.take_losses() == Losses()


class Replica:
    """A replica's L2 tier over a directory with room for `objects`."""

    def __init__(self, root: Path, name: str, objects: float, clock: SimulatedClock) -> None:
        self.queues = InlineQueues()
        self.store = FileStore(
            root, FileOptions(timeout_s=PATIENCE_S, capacity_gib=objects * STORED / GIB), clock=clock
        )
        self.follower = LogFollower(self.store.log, name, clock)
        self.turn_log()
        self.tier = RemoteTier(
            RemoteOptions(self.store, self.follower, queue=self.queues.queue), bytes(32), SIZE, clock
        )
        self.cache = LowerTier(lambda is_again: self.tier, clock)

    def turn_log(self) -> None:
        """Read the log."""
        self.follower.poll()
        self.follower.foreign()

    def turn(self) -> None:
        """All I/O ends."""
        self.turn_log()
        for _ in range(3):
            self.queues.run()
            self.tier.finished()


def test_objects_that_replicas_sweep_from_a_directory_are_counted_once(tmp_path: Path) -> None:
    """Two replicas store and sweep: together they evicted what is not there any more, and each says what it did."""
    clock = SimulatedClock(unix_s=time.time())
    replicas = [Replica(tmp_path / "l2", name, 10.5, clock) for name in "ab"]
    texts = [chain(f"text {n}", 1)[0] for n in range(20)]
    for n, chunk in enumerate(texts):
        replica = replicas[n % 2]
        replica.turn()
        payload = memoryview(bytearray(content(chunk.key, SIZE)))
        assert replica.tier.submit_store(chunk, Terms(), payload)
        replica.turn()
        if replica.store.blobs.sweeper is not None:
            replica.store.blobs.sweeper.join()
        clock.advance(100.0)
    for replica in replicas:
        replica.store.blobs.sweep()
        replica.turn()
    there = sum(found is not None for found in replicas[0].store.find([chunk.key for chunk in texts], is_chain=False))
    losses = [replica.cache.take_losses() for replica in replicas]
    assert sum(each.evicted for each in losses) == len(texts) - there > 0
    assert all(each.evicted for each in losses) and all(replica.cache.usage().counts_evictions for replica in replicas)
    for replica in replicas:
        replica.tier.close(5.0)


def test_an_expired_object_is_counted_by_who_deletes_it(tmp_path: Path) -> None:
    """Once, however often its text is asked for."""
    clock = SimulatedClock(unix_s=time.time())
    one, other = (Replica(tmp_path / "l2", name, 100, clock) for name in "ab")
    text = chain("text", 2)
    for chunk in text:
        payload = memoryview(bytearray(content(chunk.key, SIZE)))
        assert one.tier.submit_store(chunk, Terms(expires_s=int(clock.unix()) + 10), payload)
        one.turn()
    clock.advance(20.0)
    for _ in range(3):
        other.turn()
        other.tier.ask(text, 0)
        other.turn()
        clock.advance(100.0)
    assert other.cache.take_losses() == Losses(expired=2) and one.cache.take_losses() == Losses()
    for replica in (one, other):
        replica.tier.close(5.0)
