"""Chunks that lie compressed on disk: fewer slots, the same bytes."""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotspan.core.frame import HEADER_BYTES
from hotspan.core.terms import Scope, Terms
from hotspan.core.types import GIB, MIB, PAGE_BYTES, Chunk, Compress
from hotspan.testing.chunks import aligned, chain, content, key_of
from hotspan.testing.clock import SimulatedClock
from hotspan.testing.conformance import NAMESPACE
from hotspan.tiers.check import check_offline
from hotspan.tiers.disk import DiskOptions, DiskTier, slot_bytes_for
from hotspan.tiers.files import Files
from hotspan.tiers.packer import Packer
from kit.places import in_memory
from kit.simulated.inline import InlineQueues
from kit.simulated.keys import FixedKeys

PAGES = 15
SIZE = PAGES * PAGE_BYTES
FRAME = SIZE + HEADER_BYTES
CHUNKS = 8
NOISE = random.Random(1).randbytes(SIZE)


class Bench:
    """A disk tier of one page per slot, whose jobs run when they are told to."""

    def __init__(self, path: Path, compress: Compress = "always", **options: Any) -> None:
        self.queues = InlineQueues(seed=1)
        clock = SimulatedClock()
        self.tier = DiskTier(
            DiskOptions(
                *(path / "disk", CHUNKS * FRAME),
                packer=Packer(compress, 4, clock),
                queue=self.queues.queue,
                allow_direct=False,
                **{"slot_bytes": PAGE_BYTES} | options,
            ),
            *(NAMESPACE, SIZE, clock),
        )

    def store(self, chunk: Chunk, data: bytes, terms: Terms | None = None) -> bool:
        """Whether it is stored, if need be with another's place."""
        for _ in range(2):
            if self.tier.submit_store(chunk, terms or Terms(), aligned(SIZE, data)):
                self.end()
                return True
        return False

    def load(self, chunk: Chunk) -> bytes | None:
        into = aligned(SIZE)
        if not self.tier.submit_load(chunk.key, into):
            return None
        self.queues.run()
        (transfer,) = self.tier.finished()
        return bytes(into) if transfer.fault is None else None

    def end(self) -> None:
        """All that was begun has ended."""
        self.queues.run()
        self.tier.finished()
        self.queues.run()
        self.tier.finished()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.end()
    made.tier.check()
    made.tier.close(5.0)


def roots(count: int) -> list[Chunk]:
    """Chunks that do not stand on each other."""
    return [Chunk(key_of(f"root-{n}"), None, 0) for n in range(count)]


def test_a_compressed_chunk_takes_fewer_slots(bench: Bench) -> None:
    """A chunk of 15 pages that shrinks to half takes 9 slots, header included, and the rest is free at once."""
    (chunk,) = roots(1)
    assert bench.store(chunk, content(chunk.key, SIZE))
    assert bench.tier.usage().bytes == 9 * PAGE_BYTES
    assert bench.load(chunk) == content(chunk.key, SIZE)


def test_what_does_not_shrink_is_stored_as_it_is(bench: Bench) -> None:
    """Noise takes all 16 slots, and comes back."""
    (chunk,) = roots(1)
    assert bench.store(chunk, NOISE)
    assert bench.tier.usage().bytes == FRAME
    assert bench.load(chunk) == NOISE


def test_a_tier_holds_as_many_more_as_they_shrink(bench: Bench) -> None:
    """Where 8 plain chunks fit, 12 of 9 slots each are held, and a store has the room of a plain one meanwhile."""
    chunks = roots(20)
    for chunk in chunks:
        assert bench.store(chunk, content(chunk.key, SIZE))
    held = [chunk for chunk in chunks if bench.tier.lookup(chunk.key)]
    assert all(bench.load(chunk) == content(chunk.key, SIZE) for chunk in held)
    usage = bench.tier.usage()
    assert len(held) == usage.chunks >= 12 and usage.capacity_chunks == CHUNKS * 16 // 9


@pytest.mark.parametrize("keys", [None, FixedKeys()])
@pytest.mark.parametrize(("first", "then"), [("always", "never"), ("never", "always"), ("always", "auto")])
def test_each_mode_reads_what_another_wrote(
    tmp_path: Path, first: Compress, then: Compress, keys: FixedKeys | None
) -> None:
    """After a restart in another mode every chunk is found with its bytes and its place."""
    chunks = chain("a", 3)
    bench = Bench(tmp_path, first, keys=keys)
    for chunk in chunks:
        assert bench.store(chunk, content(chunk.key, SIZE))
    used = bench.tier.usage().bytes
    bench.tier.close(5.0)
    again = Bench(tmp_path, then, keys=keys)
    assert again.tier.usage().bytes == used
    assert [again.load(chunk) for chunk in chunks] == [content(chunk.key, SIZE) for chunk in chunks]
    again.tier.check()
    again.tier.close(5.0)


def test_a_directory_of_whole_slots_is_used_as_it_is(tmp_path: Path) -> None:
    """Where a chunk fills a slot, as without compression, compressed ones are stored and found, and save no slot."""
    bench = Bench(tmp_path, "never", slot_bytes=None)
    bench.tier.close(5.0)
    again = Bench(tmp_path, "always")
    (chunk,) = roots(1)
    assert again.store(chunk, content(chunk.key, SIZE)) and again.load(chunk) == content(chunk.key, SIZE)
    assert again.tier.usage().bytes == FRAME
    again.tier.close(5.0)


def test_an_invalidation_takes_every_part(bench: Bench) -> None:
    """After one nothing is found, nothing is left in the table, and all the room is there again."""
    chunks = chain("a", 4)
    for chunk in chunks:
        assert bench.store(chunk, content(chunk.key, SIZE))
    durable: list[bool] = []
    assert bench.tier.invalidate([Scope(keys=frozenset([chunks[1].key]))], durable.append) == 3
    bench.end()
    assert durable == [True]
    assert [bench.tier.lookup(chunk.key) for chunk in chunks] == [True, False, False, False]
    assert len(bench.tier.directory.table.slots()) == 9 == bench.tier.usage().bytes // PAGE_BYTES


def test_every_chunk_can_be_verified(tmp_path: Path) -> None:
    """A check counts compressed chunks as chunks, and finds a flipped bit in any of their slots."""
    bench = Bench(tmp_path)
    chunks = roots(3)
    for chunk in chunks:
        assert bench.store(chunk, content(chunk.key, SIZE))
    assert bench.tier.verification().run()["whole"] == 3
    slot = bench.tier.directory.table.slots()[12]
    bench.tier.close(5.0)
    with open(tmp_path / "disk" / "slab", "r+b") as slab:
        slab.seek(slot * PAGE_BYTES + 77)
        byte = slab.read(1)[0]
        slab.seek(slot * PAGE_BYTES + 77)
        slab.write(bytes([byte ^ 4]))
    report = check_offline(tmp_path / "disk", None)
    assert (report["chunks"], report["whole"], sum(report["corrupt"].values())) == (3, 2, 1)
    again = Bench(tmp_path)
    assert sum(again.load(chunk) == content(chunk.key, SIZE) for chunk in chunks) == 2 == len(again.tier)
    again.tier.close(5.0)


class StoppingFiles(Files):
    """After `stop` nothing is written any more."""

    is_stopped = False

    def pwrite(self, fd: int, data: Any, at: int) -> int:
        return len(data) if self.is_stopped else super().pwrite(fd, data, at)


def test_a_kill_before_the_record_costs_a_miss(tmp_path: Path) -> None:
    """A frame that is there compressed, and a record that never came, are a miss; no slot is lost."""
    files = StoppingFiles()
    bench = Bench(tmp_path, files=files)
    kept, lost = roots(2)
    assert bench.store(kept, content(kept.key, SIZE))
    files.is_stopped = True
    assert bench.store(lost, content(lost.key, SIZE))
    shutil.copytree(tmp_path / "disk", tmp_path / "image" / "disk")
    again = Bench(tmp_path / "image")
    assert again.load(kept) == content(kept.key, SIZE) and again.load(lost) is None
    again.end()
    again.tier.check()
    again.tier.close(5.0)
    bench.tier.close(5.0)


Step = tuple[str, int, int]
STEPS = st.tuples(st.sampled_from(("store", "load", "forget", "again")), st.integers(0, 19), st.integers(0, PAGES))


def shrinking(chunk: Chunk, noisy: int) -> bytes:
    """A chunk's content of which so many pages do not shrink."""
    return content(chunk.key, SIZE - noisy * PAGE_BYTES) + NOISE[: noisy * PAGE_BYTES]


@given(st.lists(STEPS, max_size=60))
def test_slots_of_all_sizes_are_neither_lost_nor_shared(steps: list[Step]) -> None:
    """Whatever is stored, evicted, forgotten and reopened: hits are right, and every slot has one owner."""
    chunks, stored = roots(20), dict[int, bytes]()
    with in_memory() as path:
        bench = Bench(path)
        for name, number, noisy in steps:
            chunk = chunks[number]
            if name == "store" and bench.store(chunk, data := shrinking(chunk, noisy)):
                stored[number] = data
            elif name == "load" and (found := bench.load(chunk)) is not None:
                assert found == stored[number]
            elif name == "forget":
                bench.tier.discard(chunk.key)
                bench.end()
            elif name == "again":
                bench.tier.close(5.0)
                bench = Bench(path)
            bench.tier.check()
        bench.tier.close(5.0)


@pytest.mark.parametrize(
    ("size", "disk", "compress", "slots"),
    [
        (14 * MIB, 64 * GIB, "always", 16),
        (MIB, 64 * GIB, "auto", 4),
        (MIB, 64 * GIB, "never", 1),
        (14 * MIB, 16384 * GIB, "auto", 3),
    ],
)
def test_a_chunk_has_few_slots(size: int, disk: int, compress: Compress, slots: int) -> None:
    """At most 16, none below 256 KiB, and 4 million in all: so few records and I/Os, however long the disk is used."""
    slot = slot_bytes_for(
        size + HEADER_BYTES, DiskOptions(Path("disk"), disk, packer=Packer(compress, 4, SimulatedClock()))
    )
    assert -(-(size + HEADER_BYTES) // slot) == slots and slot % PAGE_BYTES == 0
    assert disk // slot <= 1 << 22


def with_speed(clock: SimulatedClock, bytes_per_s: float) -> Files:
    """Files of a disk of that speed."""

    class Slow(Files):
        def pwritev(self, fd: int, buffers: Any, at: int) -> int:
            clock.advance(sum(map(len, buffers)) / bytes_per_s)
            return super().pwritev(fd, buffers, at)

    return Slow()


@pytest.mark.parametrize(("bytes_per_s", "is_less"), [(100e6, True), (5e9, False)])
def test_auto_compresses_where_the_disk_is_slow(tmp_path: Path, bytes_per_s: float, is_less: bool) -> None:
    """What it measured of the disk decides: at 100 MB/s later chunks take fewer slots, at 5 GB/s none does."""
    clock, queues = SimulatedClock(), InlineQueues()
    options = DiskOptions(
        *(tmp_path / "disk", CHUNKS * FRAME),
        packer=Packer("auto", 4, clock),
        slot_bytes=PAGE_BYTES,
        files=with_speed(clock, bytes_per_s),
        queue=queues.queue,
        allow_direct=False,
    )
    tier = DiskTier(options, NAMESPACE, SIZE, clock)
    for chunk in roots(6):
        assert tier.submit_store(chunk, Terms(), aligned(SIZE, content(chunk.key, SIZE)))
        queues.run()
        tier.finished()
    assert (tier.usage().bytes < 6 * FRAME) is is_less
    tier.close(5.0)
