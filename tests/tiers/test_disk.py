"""The disk tier: what it finds is what was stored, whatever happens to the disk, the process or the order of events."""

import errno
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hotspan.core.types import ChunkKey
from hotspan.testing.chunks import aligned, chain, content, key_of
from hotspan.testing.clock import SimulatedClock
from hotspan.testing.conformance import load, settle, store
from hotspan.tiers.base import Fault
from hotspan.tiers.disk import DiskOptions, DiskTier
from hotspan.tiers.table import RECORD_BYTES, SUPERBLOCK_BYTES, DiskTable, Geometry, Record

SIZE = 2 * 4096
SLOT = SIZE + 4096
SLOTS = 4
NAMESPACE = bytes(range(32))
CHUNKS = chain("a", SLOTS)


@contextmanager
def opened(
    path: Path, slots: int = SLOTS, namespace: bytes = NAMESPACE, size: int = SIZE, **options: Any
) -> Iterator[DiskTier]:
    """A disk tier over `path`, checked and closed at the end."""
    tier = DiskTier(DiskOptions(path, slots * (4096 + size), **options), namespace, size, SimulatedClock())
    try:
        yield tier
        tier.check()
    finally:
        tier.close(5.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the tier lives."""
    return tmp_path / "disk"


def hits(tier: DiskTier, key: ChunkKey, size: int = SIZE) -> bool:
    """Whether the chunk loads; what loads is byte for byte what was stored."""
    result = load(tier, key, size)
    if result is None or result[0].fault is not None:
        return False
    assert result[1] == content(key, size)
    return True


def slot_of(path: Path, key: ChunkKey, slots: int = SLOTS) -> int:
    """The slot whose record names `key`."""
    fd = os.open(path / "table", os.O_RDONLY)
    try:
        found = DiskTable(fd, Geometry(SLOT, slots)).read_all()
    finally:
        os.close(fd)
    (slot,) = [slot for slot, record in found.items() if record.key == key]
    return slot


def flip(path: Path, at: int) -> None:
    """Flip one bit of the slab."""
    fd = os.open(path / "slab", os.O_RDWR)
    byte = os.pread(fd, 1, at)
    os.pwrite(fd, bytes([byte[0] ^ 4]), at)
    os.fsync(fd)
    os.close(fd)


def full(path: Path) -> None:
    """A directory that holds CHUNKS and nothing else, as a former process left it."""
    with opened(path) as tier:
        for chunk in CHUNKS:
            assert store(tier, chunk, SIZE)


# -- what stays ----------------------------------------------------------------------------------------------------


def test_reopening_finds_everything(path: Path) -> None:
    """A new process finds and loads every chunk that a former one stored, and knows their order in the chain."""
    full(path)
    with opened(path) as tier:
        assert tier.usage().chunks == SLOTS
        assert all(hits(tier, chunk.key) for chunk in CHUNKS)
        (newcomer,) = chain("b", 1)
        assert store(tier, newcomer, SIZE) is None and store(tier, newcomer, SIZE) is not None
        assert [tier.lookup(chunk.key) for chunk in CHUNKS] == [True, True, True, False]  # the leaf made room


@pytest.mark.parametrize("slots", [2, 9])
def test_a_resized_directory_keeps_what_fits(path: Path, slots: int) -> None:
    """With more or fewer bytes every chunk that is still found loads, and as many are found as fit."""
    full(path)
    with opened(path, slots) as tier:
        found = [chunk for chunk in CHUNKS if tier.lookup(chunk.key)]
        assert len(found) == min(slots, SLOTS) and all(hits(tier, chunk.key) for chunk in found)


def test_namespaces_share_a_directory_and_no_chunk(path: Path) -> None:
    """A second model finds nothing of the first one's, may take its room, and leaves the rest for it."""
    full(path)
    other = chain("b", 2)
    with opened(path, namespace=bytes(32)) as tier:
        assert not any(hits(tier, chunk.key) for chunk in other)
        for chunk in other * 2:
            store(tier, chunk, SIZE)
        assert all(hits(tier, chunk.key) for chunk in other)
    with opened(path) as tier:
        assert [hits(tier, chunk.key) for chunk in CHUNKS] == [True, True, False, False]
    with opened(path, namespace=bytes(32)) as tier:
        assert all(hits(tier, chunk.key) for chunk in other)


def test_a_model_of_another_namespace_never_hits(path: Path) -> None:
    """Even under the very same key, bytes of another namespace are a miss before they are read."""
    full(path)
    with opened(path, namespace=bytes(32)) as tier:
        assert not tier.lookup(CHUNKS[0].key)
        assert load(tier, CHUNKS[0].key, SIZE) is None


def test_a_smaller_model_may_use_larger_slots(path: Path) -> None:
    """Chunks smaller than the slots store and load, and do not disturb those of the larger model."""
    full(path)
    (small,) = chain("small", 1)
    with opened(path, namespace=bytes(32), size=4096, slots=2 * SLOTS) as tier:
        assert tier.usage().capacity_chunks == 2 * SLOTS * 8192 // SLOT
        store(tier, small, 4096)
        assert hits(tier, small.key, 4096)
    with opened(path, slots=6) as tier:
        assert all(hits(tier, chunk.key) for chunk in CHUNKS)


def test_clear_outlives_the_process(path: Path) -> None:
    """After `clear` and `close` a new process finds nothing."""
    full(path)
    with opened(path) as tier:
        assert tier.clear() == SLOTS
    with opened(path) as tier:
        assert tier.usage().chunks == 0 and not any(tier.lookup(chunk.key) for chunk in CHUNKS)


# -- what is broken ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0, 8, 45, 80, 300, 4095, 4096, 4096 + SIZE - 1])
def test_corruption_is_a_counted_miss_and_heals(path: Path, offset: int) -> None:
    """A bit that flipped on disk, in the header or the payload, is Fault.CORRUPT once; the next store heals it."""
    full(path)
    victim = CHUNKS[2]
    flip(path, slot_of(path, victim.key) * SLOT + offset)
    with opened(path) as tier:
        assert tier.lookup(victim.key)
        result = load(tier, victim.key, SIZE)
        assert result is not None and result[0].fault is Fault.CORRUPT
        assert not tier.lookup(victim.key) and load(tier, victim.key, SIZE) is None
        assert all(hits(tier, chunk.key) for chunk in CHUNKS if chunk is not victim)
        settle_frees(tier)
        assert store(tier, victim, SIZE) is not None
        assert hits(tier, victim.key)
    with opened(path) as tier:
        assert all(hits(tier, chunk.key) for chunk in CHUNKS)


def settle_frees(tier: DiskTier) -> None:
    """Wait until slots that are being freed are free."""
    tier.check()


def test_quarantine_outlives_the_process(path: Path) -> None:
    """A chunk that was found corrupt is not found by the next process either."""
    full(path)
    flip(path, slot_of(path, CHUNKS[2].key) * SLOT + 5000)
    with opened(path) as tier:
        assert not hits(tier, CHUNKS[2].key)
    with opened(path) as tier:
        assert not tier.lookup(CHUNKS[2].key) and tier.usage().chunks == SLOTS - 1


def test_a_slab_that_was_cut_is_misses(path: Path) -> None:
    """If the slab was truncated behind the tier's back, reads beyond its end are faults, the others hits."""
    full(path)
    with opened(path) as tier:
        cut = slot_of(path, CHUNKS[3].key)
        os.truncate(path / "slab", cut * SLOT + 4096 + 512)
        assert [hits(tier, chunk.key) for chunk in CHUNKS] == [slot_of_before < cut for slot_of_before in range(SLOTS)]
    with opened(path) as tier:
        assert not hits(tier, CHUNKS[3].key)


def test_a_record_that_names_anothers_slot_is_a_miss(path: Path) -> None:
    """Records that were exchanged point at whole frames of other chunks: faults, never the other's bytes."""
    full(path)
    first, second = slot_of(path, CHUNKS[0].key), slot_of(path, CHUNKS[1].key)
    fd = os.open(path / "table", os.O_RDWR)
    at = [SUPERBLOCK_BYTES + RECORD_BYTES * slot for slot in (first, second)]
    records = [os.pread(fd, RECORD_BYTES, one) for one in at]
    os.pwrite(fd, records[1], at[0])
    os.pwrite(fd, records[0], at[1])
    os.close(fd)
    with opened(path) as tier:
        for chunk in CHUNKS[:2]:
            result = load(tier, chunk.key, SIZE)
            assert result is not None and result[0].fault is Fault.CORRUPT
        assert hits(tier, CHUNKS[2].key)


def test_a_chunk_recorded_twice_is_one(path: Path) -> None:
    """Two records of one chunk (a crash between two writes) become one, and discarding it leaves none to come back."""
    full(path)
    slot = slot_of(path, CHUNKS[0].key)
    with opened(path, slots=6):
        pass
    slab, table = (os.open(path / name, os.O_RDWR) for name in ("slab", "table"))
    os.pwrite(slab, os.pread(slab, SLOT, slot * SLOT), 5 * SLOT)
    DiskTable(table, Geometry(SLOT, 6)).write(5, Record(CHUNKS[0].key, None, NAMESPACE, SIZE))
    os.fsync(slab)
    os.close(slab)
    os.close(table)
    with opened(path, slots=6) as tier:
        assert hits(tier, CHUNKS[0].key)
        tier.check()
        assert tier.usage().chunks == SLOTS
        tier.discard(CHUNKS[0].key)
    with opened(path, slots=6) as tier:
        assert not tier.lookup(CHUNKS[0].key)


# -- a full disk ---------------------------------------------------------------------------------------------------


def test_a_full_disk_admits_on_second_touch(path: Path) -> None:
    """Once full, a chunk is refused the first time and stored the second, in the place of the oldest leaf."""
    full(path)
    with opened(path) as tier:
        one, other = chain("b", 1)[0], chain("c", 1)[0]
        assert store(tier, one, SIZE) is None
        assert store(tier, other, SIZE) is None
        assert all(tier.lookup(chunk.key) for chunk in CHUNKS)
        assert store(tier, one, SIZE) is not None
        assert hits(tier, one.key) and not tier.lookup(CHUNKS[3].key)
        assert [tier.lookup(chunk.key) for chunk in CHUNKS[:3]] == [True] * 3


def test_used_chunks_outlive_unused_ones(path: Path) -> None:
    """`touch` decides which leaf goes."""
    with opened(path) as tier:
        old, new = chain("old", 2), chain("new", 2)
        for chunk in old + new:
            store(tier, chunk, SIZE)
        tier.touch(chunk.key for chunk in reversed(old))
        for _ in range(2):
            store(tier, chain("b", 1)[0], SIZE)
        assert [tier.lookup(chunk.key) for chunk in old + new] == [True, True, True, False]


def test_a_parent_does_not_make_room_for_its_child(path: Path) -> None:
    """A chunk is never stored in the place of its own parent: it would be useless."""
    with opened(path, slots=1) as tier:
        parent, child = chain("a", 2)
        store(tier, parent, SIZE)
        assert store(tier, child, SIZE) is None and store(tier, child, SIZE) is None
        assert hits(tier, parent.key)


# -- in flight -----------------------------------------------------------------------------------------------------


class Gate:
    """Holds `os.preadv` or `os.pwritev` back until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
        self._real = getattr(os, call)
        self._open = threading.Event()
        self.reached = threading.Event()
        monkeypatch.setattr(os, call, self._pass)

    def _pass(self, *arguments: Any) -> int:
        self.reached.set()
        assert self._open.wait(10)
        return self._real(*arguments)

    def open(self) -> None:
        self._open.set()


def test_a_slot_is_not_reused_while_it_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk that is evicted, discarded or cleared while a reader's I/O hangs keeps its slot until the I/O ends."""
    full(path)
    with opened(path) as tier:
        gate = Gate(monkeypatch, "preadv")
        into = aligned(SIZE)
        assert tier.submit_load(CHUNKS[0].key, into)
        assert gate.reached.wait(5)
        tier.clear()
        newcomers = chain("b", SLOTS)
        deadline = time.monotonic() + 5
        while len(tier._free) < SLOTS - 1 and time.monotonic() < deadline:
            tier.wait(0.01)
            assert tier.finished() == []
        taken = 0
        for chunk in newcomers * 2:
            taken += tier.submit_store(chunk, aligned(SIZE, content(chunk.key, SIZE)))
        assert taken == SLOTS - 1
        settle(tier, taken)
        gate.open()
        (transfer,) = settle(tier, 1)
        assert transfer.fault is None and into == content(CHUNKS[0].key, SIZE)
        assert not tier.lookup(CHUNKS[0].key)


def test_a_chunk_that_is_read_is_not_evicted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the only leaf is being read, a full tier has no room for others."""
    full(path)
    with opened(path) as tier:
        gate = Gate(monkeypatch, "preadv")
        into = aligned(SIZE)
        assert tier.submit_load(CHUNKS[3].key, into)
        assert gate.reached.wait(5)
        (newcomer,) = chain("b", 1)
        assert store(tier, newcomer, SIZE) is None and store(tier, newcomer, SIZE) is None
        gate.open()
        settle(tier, 1)
        assert into == content(CHUNKS[3].key, SIZE)


def test_the_store_queue_is_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond `store_depth` writes in flight a store is refused, `can_store` says so, and that is no second touch."""
    with opened(path, store_depth=2) as tier:
        gate = Gate(monkeypatch, "pwritev")
        results = [tier.submit_store(chunk, aligned(SIZE, content(chunk.key, SIZE))) for chunk in CHUNKS]
        assert results == [True, True, False, False] and not tier.can_store()
        gate.open()
        settle(tier, 2)
        assert tier.can_store() and store(tier, CHUNKS[2], SIZE) and all(hits(tier, c.key) for c in CHUNKS[:3])


@pytest.mark.parametrize("how", ["discard", "clear"])
def test_forgetting_a_chunk_that_is_being_written_is_final(
    path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A chunk forgotten during its write is not found again, not even by the next process if this one closes now."""
    with opened(path) as tier:
        gate = Gate(monkeypatch, "pwritev")
        assert tier.submit_store(CHUNKS[0], aligned(SIZE, content(CHUNKS[0].key, SIZE)))
        assert gate.reached.wait(5)
        tier.clear() if how == "clear" else tier.discard(CHUNKS[0].key)
        gate.open()
        tier.close(5.0)
    with opened(path) as tier:
        assert not tier.lookup(CHUNKS[0].key) and tier.usage().chunks == 0


def test_a_chunk_stored_anew_during_its_old_write_is_right(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Discarded while it is written and stored again at once, a chunk has the new bytes; its old slot comes free."""
    chunk = CHUNKS[0]
    with opened(path) as tier:
        gate = Gate(monkeypatch, "pwritev")
        assert tier.submit_store(chunk, aligned(SIZE, content(chunk.key, SIZE, 1)))
        assert gate.reached.wait(5)
        tier.discard(chunk.key)
        assert tier.submit_store(chunk, aligned(SIZE, content(chunk.key, SIZE)))
        gate.open()
        settle(tier, 2)
        assert hits(tier, chunk.key)
        tier.check()
        assert tier.usage().chunks == 1
    with opened(path) as tier:
        assert hits(tier, chunk.key)


def test_closing_does_not_wait_for_a_hanging_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`close` returns after its timeout while an I/O hangs, and the descriptors that it uses stay open."""
    tier = DiskTier(DiskOptions(path, SLOTS * SLOT, threads=1), NAMESPACE, SIZE)
    gate = Gate(monkeypatch, "pwritev")
    assert tier.submit_store(CHUNKS[0], aligned(SIZE))
    assert gate.reached.wait(5)
    started = time.monotonic()
    tier.close(0.05)
    assert time.monotonic() - started < 2
    os.fstat(tier._directory.slab_fd)
    gate.open()
    tier.close(5.0)
    with pytest.raises(OSError):
        os.fstat(tier._directory.slab_fd)


def test_loads_go_before_waiting_stores(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that comes while stores wait for a thread is the next thing that is done."""
    with opened(path, threads=1) as tier:
        store(tier, CHUNKS[0], SIZE)
        gate = Gate(monkeypatch, "pwritev")
        for chunk in CHUNKS[1:]:
            assert tier.submit_store(chunk, aligned(SIZE, content(chunk.key, SIZE)))
        assert gate.reached.wait(5)
        assert tier.submit_load(CHUNKS[0].key, aligned(SIZE))
        gate.open()
        assert [transfer.is_load for transfer in settle(tier, 4)] == [False, True, False, False]


# -- faults --------------------------------------------------------------------------------------------------------


def faulty(call: str, nth: int, short: bool) -> Callable[..., int]:
    """`os.<call>` whose nth call fails with EIO, or moves too few bytes."""
    real, calls, lock = getattr(os, call), iter(range(1, 1 << 30)), threading.Lock()

    def wrapped(fd: int, buffers: list[memoryview], at: int) -> int:
        with lock:
            hit = next(calls) == nth
        if hit and not short:
            raise OSError(errno.EIO, "Input/output error")
        if hit:
            return real(fd, [buffers[0][: 4096 if len(buffers[0]) > 4096 else 0]], at) if buffers[0] else 0
        return real(fd, buffers, at)

    return wrapped


@pytest.mark.parametrize("short", [False, True], ids=["eio", "short"])
@pytest.mark.parametrize("nth", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_a_failing_disk_costs_chunks_and_nothing_else(
    path: Path, monkeypatch: pytest.MonkeyPatch, call: str, nth: int, short: bool
) -> None:
    """Whichever read or write fails or falls short, one transfer reports a fault, nothing raises, no slot leaks."""
    monkeypatch.setattr("hotspan.tiers.io.IO_BYTES", 8192)  # two I/Os a frame
    with opened(path) as tier:
        monkeypatch.setattr(os, call, faulty(call, nth, short))
        faults: list[Fault | None] = []
        for chunk in CHUNKS:
            transfer = store(tier, chunk, SIZE)
            assert transfer is not None
            faults.append(transfer.fault)
        for chunk in CHUNKS:
            result = load(tier, chunk.key, SIZE)
            if result is not None:
                faults.append(result[0].fault)
                assert result[0].fault or result[1] == content(chunk.key, SIZE)
        assert [fault for fault in faults if fault] == [Fault.IO]
        tier.check()
        assert tier.usage().chunks == SLOTS - 1
        monkeypatch.undo()
        for chunk in CHUNKS:
            if not tier.lookup(chunk.key):
                assert store(tier, chunk, SIZE)
        assert all(hits(tier, chunk.key) for chunk in CHUNKS)


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_failing_table_costs_chunks_and_nothing_else(path: Path, monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
    """A record that can't be written is a fault of that store; one that can't be freed costs a miss later."""
    with opened(path) as tier:
        real, calls = os.pwrite, iter(range(1, 1 << 30))

        def pwrite(*arguments: Any) -> int:
            if next(calls) in (nth, nth + 1):
                raise OSError(errno.EIO, "Input/output error")
            return real(*arguments)

        monkeypatch.setattr(os, "pwrite", pwrite)
        for chunk in CHUNKS:
            store(tier, chunk, SIZE)
        tier.check()
        for chunk in CHUNKS:
            assert hits(tier, chunk.key) == tier.lookup(chunk.key)
        monkeypatch.undo()
    with opened(path) as tier:
        for chunk in CHUNKS:
            hits(tier, chunk.key)


def test_the_log_names_no_key(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What is logged of a corrupt frame is its slot and fault."""
    full(path)
    flip(path, slot_of(path, CHUNKS[1].key) * SLOT + 4096)
    with caplog.at_level(logging.DEBUG), opened(path) as tier:
        assert not hits(tier, CHUNKS[1].key)
    text = " ".join(record.getMessage() for record in caplog.records)
    assert "disk_frame_quarantined" in text and "fault=payload" in text
    assert CHUNKS[1].key.hex() not in text and repr(CHUNKS[1].key) not in text


# -- kill -9 -------------------------------------------------------------------------------------------------------

WRITER = """
import sys
from pathlib import Path
import hotspan.tiers.io
from hotspan.testing.chunks import aligned, chain, content
from hotspan.tiers.disk import DiskOptions, DiskTier

hotspan.tiers.io.IO_BYTES = 16384  # many I/Os a frame: many moments to die in
size, slots = int(sys.argv[2]), int(sys.argv[3])
tier = DiskTier(DiskOptions(Path(sys.argv[1]), slots * (size + 4096)), bytes(range(32)), size)
buffers = {}
print("ready", flush=True)
for n in range(1 << 30):
    for chunk in chain(str(n % 7), 6):
        for _ in range(2):
            payload = aligned(size, content(chunk.key, size))
            if tier.submit_store(chunk, payload):
                buffers[chunk.key] = payload
        for transfer in tier.finished():
            buffers.pop(transfer.key, None)
        if n % 5 == 4:
            tier.discard(chunk.key)
"""


def test_killed_writers_leave_no_wrong_bytes(path: Path) -> None:
    """A process killed at any moment leaves a directory that opens, and of which every hit is right."""
    size, slots, rng = 160 * 1024, 16, random.Random(7)
    found = right = 0
    for _ in range(20):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(size), str(slots)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(rng.uniform(0.01, 0.1))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        with opened(path, slots, size=size) as tier:
            for n in range(7):
                for chunk in chain(str(n), 6):
                    if tier.lookup(chunk.key):
                        found += 1
                        right += hits(tier, chunk.key, size)
    assert found >= right >= 20 * slots // 2


def test_a_slot_that_died_half_written_is_a_miss(path: Path) -> None:
    """An old record over a half-written new frame, as a crash between the two writes leaves it, is a miss."""
    full(path)
    slot = slot_of(path, CHUNKS[3].key)
    fd = os.open(path / "slab", os.O_RDWR)
    os.pwrite(fd, content(key_of("new"), 6000), slot * SLOT)
    os.fsync(fd)
    os.close(fd)
    with opened(path) as tier:
        assert [hits(tier, chunk.key) for chunk in CHUNKS] == [True, True, True, False]


def test_payloads_are_whole_pages(path: Path) -> None:
    """A payload that O_DIRECT can't move is refused at the start."""
    with pytest.raises(ValueError):
        DiskTier(DiskOptions(path, SLOT * SLOTS), NAMESPACE, SIZE + 1)
    assert not path.exists()


def test_a_table_that_can_not_be_read_is_explained(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EIO while the records are read is a DirectoryError and leaks no descriptor."""
    from hotspan.core.errors import DirectoryError

    full(path)
    before = len(os.listdir("/proc/self/fd"))
    real, calls = os.pread, iter(range(1, 1 << 30))

    def pread(*arguments: Any) -> bytes:
        if next(calls) == 3:
            raise OSError(errno.EIO, "Input/output error")
        return real(*arguments)

    monkeypatch.setattr(os, "pread", pread)
    with pytest.raises(DirectoryError), opened(path):
        pass
    assert len(os.listdir("/proc/self/fd")) == before
