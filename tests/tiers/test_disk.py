"""The disk tier: what it finds is what was stored, whatever happens to the disk, the process or the order of events."""

import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hotspan.core.errors import DirectoryError
from hotspan.core.terms import Scope, Terms, tag_labels
from hotspan.core.types import ChunkKey
from hotspan.testing.chunks import aligned, chain, content, key_of
from hotspan.testing.clock import SimulatedClock
from hotspan.testing.conformance import NAMESPACE, TERMS, DurableSpy, invalidate, load, settle, store
from hotspan.tiers.base import Fault
from hotspan.tiers.disk import DiskOptions, DiskTier
from hotspan.tiers.files import Files
from hotspan.tiers.record import RECORD_BYTES, Record
from hotspan.tiers.table import SUPERBLOCK_BYTES, DiskTable, Geometry
from kit.simulated.faults import FaultyFiles, SlowFiles
from kit.simulated.inline import InlineQueues

SIZE = 2 * 4096
SLOT = SIZE + 4096
SLOTS = 4
CHUNKS = chain("a", SLOTS)
ROOTS = [chain(f"root {n}", 1)[0] for n in range(SLOTS)]


@contextmanager
def opened(
    path: Path,
    slots: int = SLOTS,
    namespace: bytes = NAMESPACE,
    size: int = SIZE,
    clock: SimulatedClock | None = None,
    **options: Any,
) -> Iterator[DiskTier]:
    """A disk tier over `path`, checked and closed at the end."""
    tier = DiskTier(DiskOptions(path, slots * (4096 + size), **options), namespace, size, clock or SimulatedClock())
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
        table = DiskTable(Files(), fd, Geometry(SLOT, slots))
        table.read()
    finally:
        os.close(fd)
    (slot,) = [slot for slot in table.slots() if table.key(slot) == key]
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


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "killed"])
def test_an_invalidation_outlives_the_process(path: Path, closed: bool) -> None:
    """What was invalidated is not found by a new process, nor what stood on it, also if the old one was killed."""
    full(path)
    with opened(path) as tier:
        assert invalidate(tier, Scope(keys=frozenset([CHUNKS[1].key]))) == 3
        settle_frees(tier)
        assert store(tier, CHUNKS[1], SIZE) is not None
        if not closed:
            copy(path, path.with_name("killed"))
    with opened(path if closed else path.with_name("killed")) as tier:
        assert [hits(tier, chunk.key) for chunk in CHUNKS] == [True, True, False, False]


def copy(path: Path, target: Path) -> None:
    """What a new process would find if this one was killed now."""
    target.mkdir()
    for name in ("table", "slab", "log"):
        (target / name).write_bytes((path / name).read_bytes())


def test_terms_outlive_the_process(path: Path) -> None:
    """A new process finds the terms as they were stored and joined, enforces them, and counts tenants by them."""
    clock = SimulatedClock()
    at = int(clock.unix()) + 100
    with opened(path, clock=clock) as tier:
        store(tier, CHUNKS[0], SIZE, terms=Terms(7, 8, tag_labels(["x"])))
        store(tier, CHUNKS[1], SIZE, terms=Terms(9, 8, tag_labels(["y"]), expires_s=at))
        tier.join(CHUNKS[0].key, Terms(labels=tag_labels(["z"], "s")))
    with opened(path, clock=clock) as tier:
        terms = tier.terms(CHUNKS[0].key)
        assert (terms.tenant, terms.adapter, terms.labels) == (7, 8, tag_labels(["x", "z"], "s"))
        assert tier.terms(CHUNKS[1].key).expires_s == at and tier.usage().tenants == {7: 1, 9: 1}
        clock.advance(100)
        assert tier.lookup(CHUNKS[0].key) and not tier.lookup(CHUNKS[1].key)
        assert invalidate(tier, Scope(labels=tag_labels(["z"]))) >= 1
    with opened(path, clock=clock) as tier:
        assert tier.usage().chunks == 0


def test_a_tag_joined_while_the_log_is_written(path: Path) -> None:
    """A chunk outlived an invalidation of a tag that it got before that was durable: it is there after a restart."""
    queues = InlineQueues()
    tag = tag_labels(["z"])
    with opened(path, queue=queues.queue) as tier:
        assert tier.submit_store(CHUNKS[0], TERMS, aligned(SIZE))
        queues.run()
        tier.finished()
        tier.invalidate([Scope(labels=tag)], lambda done: None)
        tier.join(CHUNKS[0].key, Terms(labels=tag))
        queues.run()
        tier.finished()
        queues.run()
        copy(path, path.parent / "killed")
    with opened(path.parent / "killed") as tier:
        assert tier.lookup(CHUNKS[0].key) and tier.terms(CHUNKS[0].key).labels >= tag
        invalidate(tier, Scope(labels=tag))
        assert not tier.lookup(CHUNKS[0].key)


def test_what_expired_meanwhile_is_not_there(path: Path) -> None:
    """A chunk whose time ran out while no process was there is not found, nor what stood on it, and takes no slot."""
    clock = SimulatedClock()
    with opened(path, clock=clock) as tier:
        store(tier, CHUNKS[0], SIZE, terms=Terms(expires_s=int(clock.unix()) + 10))
        store(tier, CHUNKS[1], SIZE)
        store(tier, ROOTS[0], SIZE)
    clock.advance(11)
    with opened(path, clock=clock) as tier:
        assert not tier.lookup(CHUNKS[0].key) and not tier.lookup(CHUNKS[1].key) and hits(tier, ROOTS[0].key)
        tier.check()
        assert tier.usage().chunks == 1


def test_an_expired_frame_is_a_miss_whatever_its_record_says(path: Path) -> None:
    """The expiry that the frame itself says is enforced when it is read: a record alone can't prolong it."""
    clock = SimulatedClock()
    with opened(path, clock=clock) as tier:
        store(tier, CHUNKS[0], SIZE, terms=Terms(expires_s=int(clock.unix()) + 10))
        slot = tier.directory.table.slots()[0]
        record = tier.directory.table.record(slot)
    table = os.open(path / "table", os.O_RDWR)
    forger = DiskTable(Files(), table, Geometry(SLOT, SLOTS))
    forger.put(slot, record._replace(terms=Terms(generation=record.terms.generation)))
    forger.write(slot)
    os.close(table)
    clock.advance(20)
    with opened(path, clock=clock) as tier:
        result = load(tier, CHUNKS[0].key, SIZE)
        assert result is not None and result[0].fault is Fault.GONE


def test_an_old_frame_under_a_new_record_is_a_miss(path: Path) -> None:
    """R3, old files: a frame of an earlier generation that a lost write left in the slot is corrupt, not a hit."""
    with opened(path) as tier:
        store(tier, CHUNKS[0], SIZE, version=1)
        slot = tier.directory.table.slots()[0]
        old = (path / "slab").read_bytes()[slot * SLOT : (slot + 1) * SLOT]
        invalidate(tier, Scope())
        tier.check()
        store(tier, CHUNKS[0], SIZE)
        assert hits(tier, CHUNKS[0].key) and tier.terms(CHUNKS[0].key).generation == 2
        slot = tier.directory.table.slots()[0]
    slab = os.open(path / "slab", os.O_RDWR)
    os.pwrite(slab, old, slot * SLOT)
    os.close(slab)
    with opened(path) as tier:
        result = load(tier, CHUNKS[0].key, SIZE)
        assert result is not None and result[0].fault is Fault.CORRUPT and not tier.lookup(CHUNKS[0].key)


@pytest.mark.parametrize("scope", [Scope(tenant=TERMS.tenant), Scope(keys=frozenset([CHUNKS[1].key])), Scope()])
def test_what_an_invalidation_takes_waits_for_the_log(path: Path, scope: Scope) -> None:
    """Until it is durable nothing is stored that it takes: it would carry the generation of what was invalidated."""
    files = SlowFiles(kinds=("sync",))
    with opened(path, files=files) as tier:
        store(tier, CHUNKS[0], SIZE)
        files.hang()
        spy = DurableSpy()
        tier.invalidate([Scope(tenant=1), scope], spy)
        files.wait_hanging()
        assert tier.holds_back(CHUNKS[1].key, TERMS) and store(tier, CHUNKS[1], SIZE) is None
        assert hits(tier, CHUNKS[0].key) == (scope.keys is not None) and spy.told == []
        files.release()
        assert spy.wait(tier) and not tier.holds_back(CHUNKS[1].key, TERMS)
        for chunk in CHUNKS[:2]:
            store(tier, chunk, SIZE)
        assert tier.lookup(CHUNKS[1].key) and tier.terms(CHUNKS[1].key).generation == 2


def test_other_tenants_are_stored_while_one_invalidates(path: Path) -> None:
    """What an invalidation on its way to the log can't take is written at once."""
    files = SlowFiles(kinds=("sync",))
    with opened(path, files=files) as tier:
        files.hang()
        spies = [DurableSpy() for _ in range(50)]
        for number, spy in enumerate(spies):
            tier.invalidate([Scope(tenant=1, labels=frozenset([number + 1]))], spy)
        files.wait_hanging()
        for chunk in CHUNKS:
            assert store(tier, chunk, SIZE) is not None
        assert not any(spy.told for spy in spies)
        files.release()
        assert all(spy.wait(tier) for spy in spies)
        assert all(hits(tier, chunk.key) for chunk in CHUNKS)


def test_invalidations_that_wait_for_the_log_share_a_sync(path: Path) -> None:
    """However many come while the log is busy, they are one entry, with one sync of the table and one of the log."""
    files = SlowFiles(kinds=("sync",))
    with opened(path, files=files) as tier:
        store(tier, CHUNKS[0], SIZE)
        files.hang()
        spies = [DurableSpy() for _ in range(201)]
        tier.invalidate([Scope(tenant=1)], spies[0])
        files.wait_hanging()
        for number, spy in enumerate(spies[1:]):
            tier.invalidate([Scope(tenant=TERMS.tenant, labels=frozenset([number + 1])), Scope(tenant=2)], spy)
        before = files.calls["sync"]
        files.release()
        assert all(spy.wait(tier) for spy in spies)
        settle_log(tier)
        begun = 3  # more for the log that begins anew
        assert files.calls["sync"] - before <= 1 + 2 + begun
    with opened(path) as tier:
        assert hits(tier, CHUNKS[0].key)


def test_joins_are_durable_with_the_next_invalidation(path: Path) -> None:
    """When an invalidation is acknowledged, the disk knows of every join before it, also if its write failed."""
    files = FaultyFiles()
    with opened(path, files=files) as tier:
        store(tier, CHUNKS[0], SIZE)
        files.arm(1, kinds=["pwrite"])
        tier.join(CHUNKS[0].key, Terms(labels=tag_labels(["x"])))
        tier.check()
        assert files.hits == 1
        invalidate(tier, Scope(tenant=1))
        copy(path, path.with_name("killed"))
    with opened(path.with_name("killed")) as tier:
        assert tier.terms(CHUNKS[0].key).labels == tag_labels(["x"])


# -- what is broken ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0, 8, 45, 80, 300, 4095, 4096, 4096 + SIZE - 1])
def test_corruption_is_a_counted_miss_and_heals(path: Path, offset: int) -> None:
    """A bit that flipped on disk, in the header or the payload, is Fault.CORRUPT once; the next store heals it.

    What stood on the chunk goes with it, the rest stays.
    """
    full(path)
    victim = CHUNKS[2]
    flip(path, slot_of(path, victim.key) * SLOT + offset)
    with opened(path) as tier:
        assert tier.lookup(victim.key)
        result = load(tier, victim.key, SIZE)
        assert result is not None and result[0].fault is Fault.CORRUPT
        assert not tier.lookup(victim.key) and load(tier, victim.key, SIZE) is None
        assert [hits(tier, chunk.key) for chunk in CHUNKS] == [True, True, False, False]
        settle_frees(tier)
        assert store(tier, victim, SIZE) is not None
        assert hits(tier, victim.key) and not tier.lookup(CHUNKS[3].key)
        assert store(tier, CHUNKS[3], SIZE) is not None
    with opened(path) as tier:
        assert all(hits(tier, chunk.key) for chunk in CHUNKS)


def settle_frees(tier: DiskTier) -> None:
    """Wait until slots that are being freed are free."""
    tier.check()


def test_quarantine_outlives_the_process(path: Path) -> None:
    """A chunk that was found corrupt is not found by the next process either, nor what stood on it."""
    full(path)
    flip(path, slot_of(path, CHUNKS[2].key) * SLOT + 5000)
    with opened(path) as tier:
        assert not hits(tier, CHUNKS[2].key)
    with opened(path) as tier:
        assert [hits(tier, chunk.key) for chunk in CHUNKS] == [True, True, False, False]
        assert tier.usage().chunks == SLOTS - 2


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
    with opened(path) as tier:
        for chunk in ROOTS:
            store(tier, chunk, SIZE)
    first, second = slot_of(path, ROOTS[0].key), slot_of(path, ROOTS[1].key)
    fd = os.open(path / "table", os.O_RDWR)
    at = [SUPERBLOCK_BYTES + RECORD_BYTES * slot for slot in (first, second)]
    records = [os.pread(fd, RECORD_BYTES, one) for one in at]
    os.pwrite(fd, records[1], at[0])
    os.pwrite(fd, records[0], at[1])
    os.close(fd)
    with opened(path) as tier:
        for chunk in ROOTS[:2]:
            result = load(tier, chunk.key, SIZE)
            assert result is not None and result[0].fault is Fault.CORRUPT
        assert hits(tier, ROOTS[2].key)


def test_a_chunk_recorded_twice_is_one(path: Path) -> None:
    """Two records of one chunk (a crash between two writes) become one, and discarding it leaves none to come back."""
    full(path)
    slot = slot_of(path, CHUNKS[0].key)
    with opened(path, slots=6):
        pass
    slab, table = (os.open(path / name, os.O_RDWR) for name in ("slab", "table"))
    os.pwrite(slab, os.pread(slab, SLOT, slot * SLOT), 5 * SLOT)
    copied = DiskTable(Files(), table, Geometry(SLOT, 6))
    copied.put(5, Record(CHUNKS[0].key, None, NAMESPACE, SIZE, Terms(labels=tag_labels(["x"]))))
    copied.write(5)
    os.fsync(slab)
    os.close(slab)
    os.close(table)
    with opened(path, slots=6) as tier:
        assert hits(tier, CHUNKS[0].key)
        tier.check()
        assert tier.usage().chunks == SLOTS
        assert tier.terms(CHUNKS[0].key).labels == tag_labels(["x"])  # nobody knows which of them was joined
        tier.discard(CHUNKS[0].key)
    with opened(path, slots=6) as tier:
        assert not tier.lookup(CHUNKS[0].key)


def test_a_torn_record_takes_what_stood_on_it(path: Path) -> None:
    """Behind a chunk whose record is gone nothing is found: no invalidation of what is before it would reach it."""
    with opened(path) as tier:
        store(tier, CHUNKS[0], SIZE, terms=Terms(labels=tag_labels(["x"])))
        for chunk in CHUNKS[1:]:
            store(tier, chunk, SIZE)
    fd = os.open(path / "table", os.O_RDWR)
    os.pwrite(fd, b"torn", SUPERBLOCK_BYTES + RECORD_BYTES * slot_of(path, CHUNKS[1].key) + 50)
    os.close(fd)
    with opened(path) as tier:
        settle_frees(tier)
        assert tier.usage().chunks == 1
        assert invalidate(tier, Scope(labels=tag_labels(["x"]))) == 1
        settle_frees(tier)
        for chunk in CHUNKS[:2]:
            assert store(tier, chunk, SIZE) is not None
        assert [hits(tier, chunk.key) for chunk in CHUNKS] == [True, True, False, False]


@pytest.mark.parametrize("reopens", [False, True])
def test_a_gap_hides_nothing_from_an_invalidation(path: Path, reopens: bool) -> None:
    """root (tag x) -> mid -> leaf: mid is found corrupt, x invalidated, root and mid stored anew: no leaf, ever."""
    root, mid, leaf = CHUNKS[:3]
    with opened(path) as tier:
        for chunk in (root, mid, leaf):
            store(tier, chunk, SIZE, terms=Terms(labels=tag_labels(["x"]) if chunk is root else frozenset()))
        flip(path, slot_of(path, mid.key) * SLOT + 5000)
        assert not hits(tier, mid.key)
        if not reopens:
            assert invalidate(tier, Scope(labels=tag_labels(["x"]))) == 1
    with opened(path) as tier:
        if reopens:
            assert invalidate(tier, Scope(labels=tag_labels(["x"]))) == 1
            settle_frees(tier)
        for chunk in (root, mid):
            assert store(tier, chunk, SIZE) is not None
        assert [hits(tier, chunk.key) for chunk in (root, mid, leaf)] == [True, True, False]
    with opened(path) as tier:
        assert [hits(tier, chunk.key) for chunk in (root, mid, leaf)] == [True, True, False]


def test_a_store_that_fails_takes_what_stands_on_it(path: Path) -> None:
    """A chunk whose parent's write failed is not found, though its own succeeded, and can be stored behind it anew."""
    files, queues = FaultyFiles(), InlineQueues()
    with opened(path, files=files, queue=queues.queue, threads=1) as tier:
        files.arm(1, kinds=["pwritev"])
        for chunk in CHUNKS[:2]:
            assert tier.submit_store(chunk, TERMS, aligned(SIZE, content(chunk.key, SIZE)))
        queues.run()
        assert [(transfer.key, transfer.fault) for transfer in tier.finished()] == [
            (CHUNKS[0].key, Fault.IO),
            (CHUNKS[1].key, None),
        ]
        assert not any(tier.lookup(chunk.key) for chunk in CHUNKS)
        settle_frees(tier)
        for chunk in CHUNKS[:2]:
            assert tier.submit_store(chunk, TERMS, aligned(SIZE, content(chunk.key, SIZE)))
        queues.run()
        assert [transfer.fault for transfer in tier.finished()] == [None, None]
        assert all(tier.lookup(chunk.key) for chunk in CHUNKS[:2])


def test_the_log_is_shortened(path: Path) -> None:
    """After 64 invalidations the log begins anew, and what they took stays away after a reopening and a kill."""
    with opened(path) as tier:
        store(tier, ROOTS[0], SIZE)
        for n in range(130):
            store(tier, CHUNKS[0], SIZE, version=1, terms=Terms(labels=frozenset([n + 1])))
            assert invalidate(tier, Scope(labels=frozenset([n + 1]))) == 1
            settle_frees(tier)
            settle_log(tier)
            assert tier.directory.log.scopes == (n + 1) % 64
            if n in (62, 63, 64):
                copy(path, path.with_name(f"killed {n}"))
    for where in (path, *(path.with_name(f"killed {n}") for n in (62, 63, 64))):
        with opened(where) as tier:
            assert not tier.lookup(CHUNKS[0].key) and hits(tier, ROOTS[0].key)
            assert store(tier, CHUNKS[0], SIZE) is not None
        with opened(where) as tier:
            assert hits(tier, CHUNKS[0].key)


def test_what_invalidates_nothing_is_no_entry_of_the_log(path: Path) -> None:
    """Waiting for what was changed to be durable, or an invalidation without a scope, leaves the log as it is: an entry
    of none would be damage to the next process, which would then forget everything."""
    full(path)
    with opened(path) as tier:
        tier.discard(CHUNKS[3].key)
        for wait in (tier.settle, lambda durable: tier.invalidate([], durable)):
            durable = DurableSpy()
            wait(durable)
            assert durable.wait(tier) and tier.directory.log.scopes == 0
    with opened(path) as tier:
        assert [hits(tier, chunk.key) for chunk in CHUNKS] == [True, True, True, False]


def test_a_log_that_can_not_be_shortened_goes_on(path: Path) -> None:
    """If the log can't begin anew, invalidations are as durable as before, and it is tried again with the next."""
    files = FaultyFiles()
    with opened(path, files=files) as tier:
        store(tier, CHUNKS[0], SIZE)
        for _ in range(63):
            invalidate(tier, Scope(tenant=1))
        files.arm(1, kinds=["replace"])
        invalidate(tier, Scope(tenant=1))
        settle_log(tier)
        assert tier.directory.log.scopes == 64 and files.hits == 1
        assert invalidate(tier, Scope()) == 1
        settle_log(tier)
        assert tier.directory.log.scopes == 0
    with opened(path) as tier:
        assert tier.usage().chunks == 0


def settle_log(tier: DiskTier) -> None:
    """Wait until the log's thread has done what it has."""
    assert tier._log_queue.drain(60.0)


def test_one_flush_at_a_time(path: Path) -> None:
    """While a flush takes long no other is queued behind it, however much time passes; later there are more."""
    files, clock = SlowFiles(kinds=["sync"]), SimulatedClock()
    with opened(path, clock=clock, files=files) as tier:
        store(tier, CHUNKS[0], SIZE)
        before = files.calls["sync"]
        files.hang()
        for _ in range(10):
            clock.advance(1.0)
            assert tier.finished() == []
            files.wait_hanging()
        files.release()
        settle_log(tier)
        assert files.calls["sync"] == before + 1
        tier.join(CHUNKS[0].key, Terms(labels=frozenset([1])))
        tier.check()
        clock.advance(1.0)
        assert tier.finished() == []
        settle_log(tier)
        assert files.calls["sync"] == before + 2
        clock.advance(1.0)
        assert tier.finished() == []
        settle_log(tier)
        assert files.calls["sync"] == before + 2, "nothing changed"


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
    """`touch` decides which leaf goes: the one that was used stays, though it came first."""
    with opened(path) as tier:
        old, *new = (chain(name, 1)[0] for name in ("old", "1", "2", "3"))
        for chunk in (old, *new):
            store(tier, chunk, SIZE)
        tier.touch([old.key])
        for _ in range(2):
            store(tier, chain("b", 1)[0], SIZE)
        assert [tier.lookup(chunk.key) for chunk in (old, *new)] == [True, False, True, True]


def test_a_parent_does_not_make_room_for_its_child(path: Path) -> None:
    """A chunk is never stored in the place of its own parent: it would be useless."""
    with opened(path, slots=1) as tier:
        parent, child = chain("a", 2)
        store(tier, parent, SIZE)
        assert store(tier, child, SIZE) is None and store(tier, child, SIZE) is None
        assert hits(tier, parent.key)


# -- in flight -----------------------------------------------------------------------------------------------------


def test_a_slot_is_not_reused_while_it_is_read(path: Path) -> None:
    """A chunk that is discarded or invalidated while a reader's I/O hangs keeps its slot until the I/O ends."""
    full(path)
    files = SlowFiles(kinds=["preadv"])
    with opened(path, files=files) as tier:
        files.hang()
        into = aligned(SIZE)
        assert tier.submit_load(CHUNKS[0].key, into)
        files.wait_hanging()
        assert tier.invalidate([Scope()], (spy := DurableSpy())) == SLOTS and spy.wait(tier)
        newcomers = chain("b", SLOTS)
        deadline = time.monotonic() + 60
        while len(tier._room.spare()) < SLOTS - 1 and time.monotonic() < deadline:
            tier.wait(0.01)
            assert tier.finished() == []
        taken = 0
        for chunk in newcomers * 2:
            taken += tier.submit_store(chunk, TERMS, aligned(SIZE, content(chunk.key, SIZE)))
        assert taken == SLOTS - 1
        settle(tier, taken)
        files.release()
        (transfer,) = settle(tier, 1)
        assert transfer.fault is None and into == content(CHUNKS[0].key, SIZE)
        assert not tier.lookup(CHUNKS[0].key)


def test_a_chunk_that_is_read_is_not_evicted(path: Path) -> None:
    """While the only leaf is being read, a full tier has no room for others."""
    full(path)
    files = SlowFiles(kinds=["preadv"])
    with opened(path, files=files) as tier:
        files.hang()
        into = aligned(SIZE)
        assert tier.submit_load(CHUNKS[3].key, into)
        files.wait_hanging()
        (newcomer,) = chain("b", 1)
        assert store(tier, newcomer, SIZE) is None and store(tier, newcomer, SIZE) is None
        files.release()
        settle(tier, 1)
        assert into == content(CHUNKS[3].key, SIZE)


def test_the_store_queue_is_bounded(path: Path) -> None:
    """Beyond `store_depth` writes in flight a store is refused, `can_store` says so, and that is no second touch."""
    files = SlowFiles()
    with opened(path, store_depth=2, files=files) as tier:
        files.hang()
        results = [tier.submit_store(chunk, TERMS, aligned(SIZE, content(chunk.key, SIZE))) for chunk in CHUNKS]
        assert results == [True, True, False, False] and not tier.can_store()
        files.release()
        settle(tier, 2)
        assert tier.can_store() and store(tier, CHUNKS[2], SIZE) and all(hits(tier, c.key) for c in CHUNKS[:3])


@pytest.mark.parametrize("how", ["discard", "invalidate"])
def test_forgetting_a_chunk_that_is_being_written_is_final(path: Path, how: str) -> None:
    """A chunk forgotten during its write is not found again, not even by the next process if this one closes now."""
    files = SlowFiles()
    with opened(path, files=files) as tier:
        files.hang()
        assert tier.submit_store(CHUNKS[0], TERMS, aligned(SIZE, content(CHUNKS[0].key, SIZE)))
        files.wait_hanging()
        tier.invalidate([Scope()], DurableSpy()) if how == "invalidate" else tier.discard(CHUNKS[0].key)
        files.release()
        tier.close(5.0)
    with opened(path) as tier:
        assert not tier.lookup(CHUNKS[0].key) and tier.usage().chunks == 0


def test_a_chunk_stored_anew_during_its_old_write_is_right(path: Path) -> None:
    """Discarded while it is written and stored again at once, a chunk has the new bytes; its old slot comes free."""
    chunk = CHUNKS[0]
    files = SlowFiles()
    with opened(path, files=files) as tier:
        files.hang()
        assert tier.submit_store(chunk, TERMS, aligned(SIZE, content(chunk.key, SIZE, 1)))
        files.wait_hanging()
        tier.discard(chunk.key)
        assert tier.submit_store(chunk, TERMS, aligned(SIZE, content(chunk.key, SIZE)))
        files.release()
        settle(tier, 2)
        assert hits(tier, chunk.key)
        tier.check()
        assert tier.usage().chunks == 1
    with opened(path) as tier:
        assert hits(tier, chunk.key)


def test_closing_does_not_wait_for_a_hanging_disk(path: Path) -> None:
    """`close` returns after its timeout while an I/O hangs, and the descriptors that it uses stay open."""
    files = SlowFiles()
    tier = DiskTier(DiskOptions(path, SLOTS * SLOT, threads=1, files=files), NAMESPACE, SIZE)
    files.hang()
    assert tier.submit_store(CHUNKS[0], TERMS, aligned(SIZE))
    files.wait_hanging()
    tier.close(0.05)
    assert files.hanging, "it waited for what hangs"
    os.fstat(tier.directory.slab_fd)
    files.release()
    tier.close(5.0)
    with pytest.raises(OSError):
        os.fstat(tier.directory.slab_fd)


def test_a_tag_outlives_a_disk_that_hangs(path: Path) -> None:
    """A tag that a chunk got while everything hung is on the disk when that opens it again, and so is found by it."""
    files, tag = SlowFiles(kinds=["preadv", "sync"]), tag_labels(["x"])
    tier = DiskTier(DiskOptions(path, SLOTS * SLOT, threads=1, files=files), NAMESPACE, SIZE)
    assert store(tier, CHUNKS[0], SIZE)
    files.hang()
    assert tier.submit_load(CHUNKS[0].key, aligned(SIZE))
    tier.invalidate([Scope(tenant=99)], lambda done: None)
    files.wait_hanging(2)  # the only thread for data, and the log's
    tier.join(CHUNKS[0].key, Terms(labels=tag))
    tier.give_up()
    tier.close(0.05)
    assert files.hanging == 2, "it waited for what hangs"
    files.release()
    tier.close(5.0)
    with opened(path) as again:
        assert again.terms(CHUNKS[0].key).labels == tag and invalidate(again, Scope(labels=tag)) == 1


def test_loads_go_before_waiting_stores(path: Path) -> None:
    """A load that comes while stores wait for a thread is the next thing that is done."""
    files = SlowFiles()
    with opened(path, threads=1, files=files) as tier:
        store(tier, CHUNKS[0], SIZE)
        files.hang()
        for chunk in CHUNKS[1:]:
            assert tier.submit_store(chunk, TERMS, aligned(SIZE, content(chunk.key, SIZE)))
        files.wait_hanging()
        assert tier.submit_load(CHUNKS[0].key, aligned(SIZE))
        files.release()
        assert [transfer.is_load for transfer in settle(tier, 4)] == [False, True, False, False]


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
from hotspan.core.terms import Terms
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
            if tier.submit_store(chunk, Terms(), payload):
                buffers[chunk.key] = payload
        for transfer in tier.finished():
            buffers.pop(transfer.key, None)
            print("stored", flush=True)
        if n % 5 == 4:
            tier.discard(chunk.key)
"""


def test_killed_writers_leave_no_wrong_bytes(path: Path) -> None:
    """A process killed at any moment, after so many stores, leaves a directory that opens; every hit is right."""
    size, slots, rng = 160 * 1024, 16, random.Random(7)
    found = right = 0
    for _ in range(20):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(size), str(slots)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        for _ in range(rng.randint(10, 100)):
            assert process.stdout.readline() == "stored\n"
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


def test_a_table_that_can_not_be_read_is_explained(path: Path) -> None:
    """EIO while the records are read is a DirectoryError and leaks no descriptor."""
    full(path)
    files = FaultyFiles()
    files.arm(2, kinds=["pread"], lasting=True)
    with pytest.raises(DirectoryError), opened(path, files=files):
        pass
    assert files.hits and not files.open_fds
