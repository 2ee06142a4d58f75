"""Ways to move the metrics of tiers, without an engine."""

import uuid
from pathlib import Path

from hotspan.cache.entry import Reader
from hotspan.cache.tiered import TieredCache
from hotspan.core.terms import Scope, Terms, tag_labels
from hotspan.core.types import GIB, PAGE_BYTES, Chunk, Tier
from hotspan.engine.metrics import CacheMetrics
from hotspan.l2.base import PREAMBLE_BYTES, ObjectStore, SharedLog
from hotspan.l2.file import FileStore
from hotspan.l2.log import checked
from hotspan.l2.options import FileOptions
from hotspan.testing.chunks import chain
from hotspan.testing.clock import SimulatedClock
from hotspan.tiers.slab import SharedSlab
from kit.simulated.memory_store import MemoryServer
from kit.waiting import PATIENCE_S
from tests.tiers.test_places import Disk, roots, slot_place

from .stack import DISK, FULL, IO, RAM, SIZE, stack

LOWER = (Tier.DISK, Tier.L2)
TAG = tag_labels(["manual"])


class Memory:
    """A store in memory whose calls may fail."""

    def __init__(self) -> None:
        self.server = MemoryServer()
        self.error: int | None = None
        self.server.before = self._fail

    def open(self, clock: SimulatedClock) -> tuple[ObjectStore, SharedLog]:
        """A replica's connection."""
        self.server.clock = clock
        store = self.server.store()
        return store, store.log

    def _fail(self, call: str) -> None:
        if self.error is not None and "objects" in call:
            raise OSError(self.error, "injected")


def what_is_evicted(path: Path) -> None:
    """RAM, a disk and a directory with a capacity, each written several times over; a full disk refuses first."""
    opened: list[FileStore] = []

    def directory(clock: SimulatedClock) -> tuple[ObjectStore, SharedLog]:
        stored = PREAMBLE_BYTES + PAGE_BYTES + SIZE
        options = FileOptions(timeout_s=PATIENCE_S, capacity_gib=10.5 * stored / GIB)
        opened.append(FileStore(path / "l2", options, clock=clock))
        return opened[-1], opened[-1].log

    with stack(path, directory) as made:
        pin, quota = made.cache.pins, 4 * SIZE
        assert pin.put(0, TAG, quota, 1e6)
        made.stored(chain("pinned", 2), Terms(labels=TAG))
        for n in range(4 * DISK // 2):
            made.stored(chain(f"text {n}", 2))
            made.clock.advance(100.0)
        opened[0].blobs.sweep()
        made.clock.advance(10.0)
        made.read_log()
        made.store(chain("more", 1))
        made.settle()
        made.settle()


def what_ends(path: Path) -> None:
    """A text that expires, and one that is invalidated, on every tier."""
    memory = Memory()
    with stack(path, memory.open) as made:
        made.stored(chain("expiring", 2), Terms(expires_s=int(made.clock.unix()) + 50))
        made.stored(chain("tagged", 2), Terms(labels=TAG))
        assert made.cache.invalidate([Scope(labels=TAG)], lambda done: None)[Tier.L2]
        made.clock.advance(100.0)
        made.settle()
        made.ask(chain("expiring", 2))  # who finds an object that has expired deletes it


def what_fails(path: Path) -> None:
    """Each fault, and a tier that is given up and comes back."""
    memory = Memory()
    with stack(path, memory.open) as made:

        def loading(name: str, tier: Tier, terms: Terms = Terms()) -> list[Chunk]:  # noqa: B008
            """A text that is in this tier only, whose load has begun."""
            text = chain(f"{name} {tier}", 1)
            made.store(text, terms)
            made.settle()
            made.forget(text, *(other for other in LOWER if other is not tier))
            made.begin(text)
            return text

        def fail(error: int | None) -> None:
            made.files.error = memory.error = error

        for tier in LOWER:
            fail(None)
            loading("broken", tier)
            fail(IO)
            made.settle()
            fail(None)
            made.settle()
            (chunk,) = loading("corrupt", tier)
            if tier is Tier.DISK:
                disk = made.lower[tier].storage
                slot = disk._entries[chunk.key].slot  # type: ignore[attr-defined]
                with (disk.directory.path / "slab").open("r+b") as slab:  # type: ignore[attr-defined]
                    slab.seek(slot * disk.slot_bytes + PAGE_BYTES)  # type: ignore[attr-defined]
                    slab.write(b"damage")
            else:
                name = memory.server.objects[chunk.key]
                data = bytearray(memory.server.data[name])
                data[-1] ^= 1
                memory.server.data[name] = bytes(data)
            made.settle()
            loading("gone", tier, Terms(expires_s=int(made.clock.unix()) + 5))
            made.clock.advance(10.0)
            made.settle()
        made.store(chain("for a full disk", 1))
        fail(FULL)
        made.settle()
        fail(None)
        for tier in LOWER:
            made.stored(chain(f"before {tier}", 2))
            made.queues[tier].hang()
            for n in range(RAM):
                made.store(chain(f"late {tier} {n}", 1))
                made.cache.step()
            made.store(chain(f"evicts {tier}", RAM // 2))
            made.clock.advance(3600.0)
            made.read_log()
            made.cache.step()
            made.report()
            made.queues[tier].hang(False)
            made.heal(tier)


def what_is_set_aside(path: Path) -> None:
    """A slot of a disk that can't be written."""
    disk = Disk(path / "bad", slot_place("write", 0))
    slab = SharedSlab(f"test-{uuid.uuid4().hex}", 2, 3 * PAGE_BYTES)
    slab.unlink()
    cache = TieredCache(slab, disk.lower, clock=disk.clock)
    metrics = CacheMetrics(cache, None)
    for chunk in roots(4):
        disk.store(chunk)
    cache.stats.cuts += 1
    metrics.report(1.0)
    disk.close()
    slab.close()


def what_finds_no_room(path: Path) -> None:
    """Chunks that RAM refuses, chunks that leave it before a tier has them, and a prefix that is cut."""
    with stack(path, Memory().open) as made:
        below = chain("below", 2)
        made.stored(below)
        made.forget(below)
        held = chain("held", RAM)
        made.store(held)
        reader = Reader()
        for chunk in held:
            made.cache.lookup(chunk, reader)
        made.store(chain("refused", 1))
        cut = Reader()
        for _ in range(2):
            made.cache.lookup(below[0], cut)
            made.clock.advance(1.0)
        made.cache.release(reader)
        made.cache.release(cut)
        made.settle()
        for queues in made.queues.values():
            queues.hang()
        for n in range(5 * RAM):
            made.store(chain(f"late {n}", 1))
        made.report()
        for queues in made.queues.values():
            queues.hang(False)
        made.settle()


def what_is_announced(path: Path) -> None:
    """Texts that are prefetched, of which one is used in time."""
    with stack(path, Memory().open) as made:
        for name in ("used", "unused"):
            text = chain(name, 2)
            made.stored(text)
            made.forget(text)
            made.cache.prefetches.begin(text, 0, 60.0, lambda found: None)
            made.settle()
            if name == "used":
                made.ask(text)
                reader = Reader()
                for chunk in text:
                    made.cache.lookup(chunk, reader)
                keys = [chunk.key for chunk in text]
                made.cache.begin_load(keys, reader)
                made.cache.end_load(keys)
            made.clock.advance(100.0)
            made.settle()


def what_is_compressed(path: Path) -> None:
    """Chunks that shrink, chunks that do not, and chunks for which a fast medium does not pay; each read again."""
    for compress in ("always", "auto"):
        with stack(path / compress, Memory().open, compress=compress) as made:  # type: ignore[arg-type]
            for tier in LOWER:
                for is_noise in (False, True):
                    text = chain(f"{tier} {is_noise}", 1)
                    made.stored(text, is_noise=is_noise)
                    made.forget(text, *(other for other in LOWER if other is not tier))
                    made.ask(text)


def what_the_log_says(path: Path) -> None:
    """Entries that can't be understood, entries that are lost, and a log that can't be read."""
    memory = Memory()
    with stack(path, memory.open) as made:
        at = memory.server.log().append([Scope(tenant=1)], "b")
        (name,) = (name for name in memory.server.data if name.endswith(f"{at:016x}"))
        memory.server.data[name] = b"E" + checked(b'{"by": "b", "scope": {"tenant": 1, "labels": "x"}}')
        made.clock.advance(1.0)
        made.store(chain("one", 1))
        made.settle()
        memory.server.data.clear()
        made.store(chain("two", 1))
        made.settle()

        def mistake(after: int) -> None:
            raise RecursionError("too deep")

        made.follower._log.read = mistake  # type: ignore[method-assign]
        made.store(chain("three", 1))
        made.settle()


WAYS = (
    what_is_set_aside,
    what_is_evicted,
    what_ends,
    what_fails,
    what_finds_no_room,
    what_is_announced,
    what_is_compressed,
    what_the_log_says,
)
