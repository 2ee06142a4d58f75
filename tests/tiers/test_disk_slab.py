"""Chunks of any size on the disk engine, in this thread: I/O ends when the test turns the crank."""

import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hotspan.core.terms import Terms
from hotspan.core.types import PAGE_BYTES, ChunkKey
from hotspan.testing.chunks import aligned, content, key_of
from hotspan.testing.clock import SimulatedClock
from hotspan.tiers.base import Fault, Transfer
from hotspan.tiers.directory import DirectoryLayout
from hotspan.tiers.disk_options import DiskOptions
from hotspan.tiers.disk_slab import DiskSlab
from hotspan.tiers.files import Files
from hotspan.tiers.record import Record
from kit.simulated.faults import FaultyFiles
from kit.simulated.inline import InlineQueues
from kit.simulated.power import RecordingFiles, power_loss_images

SLOT = 3 * PAGE_BYTES
SLOTS = 12
NAMESPACE = bytes(32)
LAYOUT = DirectoryLayout("the test", "table", (), has_log=False)


def record(name: str, size: int, parent: str | None = None, stamp: int = 1, **terms: int) -> Record:
    """A record that a test calls `name`."""
    return Record(key_of(name), None if parent is None else key_of(parent), NAMESPACE, size, Terms(**terms), stamp)


def pages(data: bytes, *sizes: int) -> list[memoryview]:
    """Page-aligned memory with these bytes, in pieces of so many pages and one with the rest."""
    whole = data.ljust(-(-len(data) // PAGE_BYTES) * PAGE_BYTES, b"\0")
    cuts = [0]
    for size in sizes:
        cuts.append(cuts[-1] + size * PAGE_BYTES)
    parts = zip(cuts, [*cuts[1:], len(whole)], strict=True)
    return [aligned(stop - start, whole[start:stop]) for start, stop in parts]


@dataclass
class Rig:
    """An engine and its queues."""

    path: Path
    files: Files = field(default_factory=Files)
    slots: int = SLOTS
    has_gaps: bool = True

    def __post_init__(self) -> None:
        self.gone: list[ChunkKey] = []
        self.start()

    def start(self) -> None:
        """Open the directory."""
        self.queues = InlineQueues(3)
        options = DiskOptions(
            *(self.path, self.slots * SLOT), allow_direct=False, files=self.files, queue=self.queues.queue
        )
        self.slab = DiskSlab(
            *(options, SLOT, SimulatedClock()), layout=LAYOUT, has_gaps=self.has_gaps, gone=self.gone.append
        )
        self.slab.adopt()

    def store(self, one: Record, data: bytes, *sizes: int) -> Transfer | None:
        """How a store ended; None if it was refused."""
        told: list[Transfer] = []
        if not self.slab.store(one, pages(data, *sizes), told=told.append):
            return None
        self.settle()
        return told[0]

    def read(self, name: str, *sizes: int) -> bytes | None:
        """The bytes of a chunk; None for a miss."""
        if key_of(name) not in self.slab:
            return None
        size = self.slab.record(key_of(name)).payload_bytes
        told: list[Transfer] = []
        into = pages(bytes(size), *sizes)
        if not self.slab.load(key_of(name), into, told.append):
            return None
        self.settle()
        return b"".join(into)[:size] if told[0].fault is None else None

    def settle(self) -> None:
        """All I/O ends."""
        while self.queues.run() or self.slab.finished():
            pass

    def restart(self) -> None:
        """As after a kill."""
        self.slab.directory.close()
        self.start()


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    """With an empty disk."""
    return Rig(tmp_path / "disk")


def test_reused_slots_are_one_run(tmp_path: Path) -> None:
    """A chunk in slots that others had is written and read in as few system calls as on an empty disk."""
    files = FaultyFiles()
    rig = Rig(tmp_path / "disk", files)
    size, calls = 10 * PAGE_BYTES, []
    for name in "abcde":
        before = files.calls.copy()
        assert rig.store(record(name, size), content(key_of(name), size)) is not None
        assert rig.read(name) == content(key_of(name), size)
        calls.append(files.calls - before)
        if name == "c":  # all slots but those of one chunk are free again
            rig.slab.discard(key_of("b"))
            rig.slab.discard(key_of("a"))
            rig.settle()
    assert calls == [{"pwritev": 1, "pwrite": 1, "preadv": 1}] * 5


@pytest.mark.parametrize("size", [1, 2 * PAGE_BYTES, 2 * PAGE_BYTES + 1, 5 * PAGE_BYTES, 30 * PAGE_BYTES - 7])
@pytest.mark.parametrize("sizes", [(), (1,)])
def test_chunks_of_any_size_come_back(rig: Rig, size: int, sizes: tuple[int, ...]) -> None:
    """A chunk in one slot or several, from memory in one piece or two, is read back as it was; after a kill, too."""
    data = content(key_of("a"), size)
    cuts = sizes if size > 2 * PAGE_BYTES else ()
    stored = rig.store(record("a", size), data, *cuts)
    assert stored is not None and stored.fault is None and stored.bytes == size
    assert rig.slab.usage().chunks == -(-(PAGE_BYTES + size) // SLOT)
    for _ in range(2):
        assert rig.read("a", *cuts) == data
        rig.slab.check()
        rig.restart()


def test_slots_of_a_chunk_need_not_be_adjacent(rig: Rig) -> None:
    """Where single slots are free here and there, a chunk lies in them, with one I/O per run of adjacent ones."""
    for n in range(SLOTS):
        assert rig.store(record(str(n), 100), b"%d" % n)
    for n in (1, 2, 5, 9):
        rig.slab.discard(key_of(str(n)))
    rig.settle()
    data = content(key_of("large"), 4 * SLOT - PAGE_BYTES)
    assert rig.store(record("large", len(data)), data) is not None and rig.slab.losses.evicted == 0
    assert sorted(rig.slab._entries[key_of("large")].slots) == sorted(
        set(range(SLOTS)) - {entry.slot for key, entry in rig.slab._entries.items() if key != key_of("large")}
    )
    assert rig.read("large") == data and rig.read("3") == b"3" + bytes(99)
    rig.slab.check()


def test_as_many_are_evicted_as_it_takes(rig: Rig) -> None:
    """On a full disk the oldest make room, and no more of them; what is larger than the disk is refused."""
    for n in range(SLOTS // 2):
        assert rig.store(record(str(n), SLOT), bytes(SLOT))
    rig.slab.touch([key_of("0")])
    assert rig.store(record("large", 2 * SLOT), bytes(2 * SLOT)) is not None
    assert rig.gone == [key_of("1"), key_of("2")] and rig.slab.losses.evicted == 2
    rig.slab.check()
    assert rig.store(record("one", 1), b"1") is not None and len(rig.gone) == 2, "a slot was left over"
    assert rig.store(record("huge", SLOTS * SLOT), bytes(SLOTS * SLOT)) is None and len(rig.gone) == 2
    assert rig.store(record("another", 2 * SLOT), bytes(2 * SLOT)) is not None
    rig.restart()
    rig.slab.check()


def test_a_chunk_of_which_a_record_is_missing_is_gone(rig: Rig) -> None:
    """A torn record of any part costs the whole chunk, and its other slots are free again."""
    for name in "ab":
        assert rig.store(record(name, 3 * SLOT), content(key_of(name), 3 * SLOT))
    for part in range(4):
        assert rig.store(record("torn", 3 * SLOT, stamp=part), bytes(3 * SLOT))
        slot = rig.slab._entries[key_of("torn")].slots[part]
        table = rig.slab.directory.table
        table.free([slot])
        table.write(slot)
        rig.restart()
        rig.settle()
        assert key_of("torn") not in rig.slab and rig.read("a") == content(key_of("a"), 3 * SLOT)
        rig.slab.check()
        assert rig.slab.usage().chunks == 8


def test_new_terms_are_those_of_all_parts(rig: Rig) -> None:
    """What is stamped on a chunk holds after a restart, whichever record of it is looked at."""
    assert rig.store(record("a", 2 * SLOT), bytes(2 * SLOT))
    rig.slab.stamp(key_of("a"), Terms(tenant=3, labels=frozenset([7]), generation=9))
    told: list[bool] = []
    rig.slab.settle(told.append)
    rig.settle()
    assert told == [True]
    rig.restart()
    rig.slab.check()
    assert rig.slab.record(key_of("a")).terms == Terms(tenant=3, labels=frozenset([7]), generation=9)


def test_a_gap_is_allowed_or_not(tmp_path: Path) -> None:
    """Without gaps nothing is stored or stays behind a chunk that is not there; with them it may."""
    closed, open_ = Rig(tmp_path / "closed", has_gaps=False), Rig(tmp_path / "open")
    for rig in (closed, open_):
        assert rig.store(record("a", 1), b"a") and rig.store(record("b", 1, "a"), b"b")
        assert (rig.store(record("x", 1, "nobody"), b"x") is None) is (rig is closed)
        rig.slab.discard(key_of("a"))
        rig.settle()
        assert rig.read("b") == (None if rig is closed else b"b")
        rig.slab.check()


def test_a_deletion_that_was_settled_holds_over_a_power_loss(tmp_path: Path) -> None:
    """Whatever of the unsynced writes is lost, a chunk is read as it was stored, or is a miss; never one deleted."""
    files = RecordingFiles(tmp_path / "disk")
    rig, rng = Rig(tmp_path / "disk", files), random.Random(5)
    versions: dict[str, list[bytes]] = {name: [] for name in "abcdef"}
    for n in range(60):
        name = rng.choice("abcdef")
        if key_of(name) in rig.slab:
            rig.slab.discard(key_of(name))
            told: list[bool] = []
            rig.slab.settle(told.append)
            rig.settle()
            assert told == [True]
            files.mark((name, len(versions[name])))
        versions[name].append(content(key_of(name), rng.randrange(1, 3 * SLOT), n))
        rig.slab.store(record(name, len(versions[name][-1]), stamp=n), pages(versions[name][-1]))
        rig.queues.run(rng.randrange(6))
        rig.slab.finished()
    found = dead = 0
    for image in power_loss_images(files.recording, seed=4, count=100):
        shutil.rmtree(tmp_path / "image", ignore_errors=True)
        image.restore(tmp_path / "image")
        after = Rig(tmp_path / "image")
        gone = dict(image.marks)
        for name, stored in versions.items():
            value = after.read(name)
            assert value is None or value in stored[gone.get(name, 0) :]
            found += value is not None
            dead += gone.get(name, 0)
        after.slab.check()
        after.slab.directory.close()
    assert found > 20 and dead > 100


def test_a_changed_byte_is_a_miss(rig: Rig) -> None:
    """One bit in any slot of a chunk costs that chunk, and no other."""
    for name in "ab":
        assert rig.store(record(name, 2 * SLOT), content(key_of(name), 2 * SLOT))
    slots = rig.slab._entries[key_of("a")].slots
    with (rig.path / "slab").open("r+b") as file:
        file.seek(slots[-1] * SLOT + 17)
        byte = file.read(1)[0]
        file.seek(slots[-1] * SLOT + 17)
        file.write(bytes([byte ^ 4]))
    told: list[Transfer] = []
    assert rig.slab.load(key_of("a"), pages(bytes(2 * SLOT)), told.append)
    rig.settle()
    assert told[0].fault is Fault.CORRUPT and rig.gone == [key_of("a")] and rig.read("a") is None
    assert rig.read("b") == content(key_of("b"), 2 * SLOT)
    rig.slab.check()


@pytest.mark.parametrize("is_load", [False, True])
def test_too_little_memory_is_no_fault_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_load: bool
) -> None:
    """MemoryError in a transfer: it is reported as dropped, its slots are let go, and the next one works."""
    rig = Rig(tmp_path)
    assert rig.store(record("a", 100), b"a" * 100) is not None

    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("hotspan.tiers.disk_jobs._contiguous", fail)
        if is_load:
            assert rig.read("a") is None
        else:
            ended = rig.store(record("b", 100), b"b" * 100)
            assert ended is not None and ended.fault is Fault.DROPPED
    assert rig.read("a") == b"a" * 100 and rig.slab.usage().bad_slots == 0
    rig.slab.check()


def test_a_test_of_slots_that_raises_sets_nothing_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MemoryError while slots are tested: they are let go, as if the disk failed as a whole."""
    files = FaultyFiles()
    rig = Rig(tmp_path, files)

    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("hotspan.tiers.places.PlaceTests.test", fail)
    files.arm(1, kinds=["pwritev"])
    ended = rig.store(record("a", 100), b"a" * 100)
    assert ended is not None and ended.fault is Fault.IO
    assert rig.store(record("a", 100), b"a" * 100) is not None and rig.read("a") == b"a" * 100
    rig.slab.check()
