"""Bad places: a slot that fails while the disk works elsewhere is set aside, and nothing else is lost."""

import errno
import logging
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hotspan.cli.main import app
from hotspan.core.errors import DirectoryError
from hotspan.core.terms import Scope, Terms
from hotspan.core.types import PAGE_BYTES, Chunk
from hotspan.testing.chunks import aligned, chain, content, key_of
from hotspan.testing.clock import SimulatedClock
from hotspan.testing.conformance import NAMESPACE, DurableSpy
from hotspan.tiers.base import Fault, Transfer
from hotspan.tiers.check import check_offline
from hotspan.tiers.directory import open_directory, remove_directory
from hotspan.tiers.disk import DiskOptions, DiskTier
from hotspan.tiers.lower import LowerTier
from hotspan.tiers.record import RECORD_BYTES, Flaw
from hotspan.tiers.table import SUPERBLOCK_BYTES
from kit.simulated.faults import PLACE_KINDS, BadPlace, BadPlaces, HidingPlaces, VanishedFiles, bad_slots
from kit.simulated.inline import InlineQueues
from kit.simulated.lower import SettledTier

SIZE = 3 * PAGE_BYTES
SLOT = SIZE + PAGE_BYTES
SLOTS = 16
TERMS = Terms()


class Disk:
    """A disk tier behind its breaker, in this thread, on a disk with bad places."""

    def __init__(
        self, path: Path, *places: BadPlace, slots: int = SLOTS, split: int = 1, is_direct: bool = False
    ) -> None:
        self.path, self.slots, self.split, self.is_direct = path, slots, split, is_direct
        self.clock = SimulatedClock()
        self.files: BadPlaces = BadPlaces(list(places), wait=self.clock.advance)
        self.open()

    def open(self) -> None:
        """A process starts."""
        self.queues = InlineQueues(1)
        self.lower: LowerTier = SettledTier(self._tier, self.clock)

    def _tier(self, again: bool) -> DiskTier:
        options = DiskOptions(
            *(self.path, self.slots * SLOT),
            allow_direct=self.is_direct,
            files=self.files,
            queue=self.queues.queue,
            slot_bytes=SLOT // self.split,
            is_new=not again,
        )
        self.tier = DiskTier(options, NAMESPACE, SIZE, self.clock)
        return self.tier

    def again(self) -> None:
        """The process ends, and another one starts."""
        self.lower.close(5.0)
        assert not self.files.open_fds
        self.open()

    def settle(self) -> list[Transfer]:
        """All I/O ends."""
        transfers, is_quiet = list[Transfer](), False
        while not is_quiet:
            is_quiet = not self.queues.run()
            ended = self.lower.finished()
            transfers += ended
            is_quiet = is_quiet and not ended
        return transfers

    def store(self, chunk: Chunk) -> bool:
        """Whether a chunk is stored now."""
        for _ in range(2):
            if self.lower.submit_store(chunk, TERMS, aligned(SIZE, content(chunk.key, SIZE))):
                break
        self.settle()
        return self.lower.lookup(chunk.key)

    def load(self, chunk: Chunk) -> bool:
        """Whether it is a hit; its bytes are right then."""
        into = aligned(SIZE)
        if not self.lower.submit_load(chunk.key, into):
            return False
        (transfer,) = [each for each in self.settle() if each.is_load]
        assert transfer.fault is not None or into == content(chunk.key, SIZE)
        return transfer.fault is None

    def close(self) -> None:
        """All is well with the books, and nothing is left open."""
        self.tier.check()
        self.lower.close(5.0)
        assert not self.files.open_fds


def roots(count: int, name: str = "root") -> list[Chunk]:
    """Chunks without parents."""
    return [chain(f"{name}{number}", 1)[0] for number in range(count)]


def slot_place(kind: str, slot: int, page: int = 1) -> BadPlace:
    """A bad page of one slot."""
    return BadPlace(kind, slot * SLOT + page * PAGE_BYTES, slot * SLOT + (page + 1) * PAGE_BYTES)


SLOW_KINDS = ("slow", "slow_write")
FLAWS = {"write": {Flaw.WRITE}, "read": {Flaw.READ}, "torn": {Flaw.WRONG}} | {kind: {Flaw.SLOW} for kind in SLOW_KINDS}


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Each fault is a line of the log."""
    with caplog.at_level(logging.CRITICAL, "hotspan"):
        yield


@pytest.mark.parametrize("page", [0, 2])
@pytest.mark.parametrize("kind", PLACE_KINDS)
def test_one_bad_slot_costs_one_slot(tmp_path: Path, kind: str, page: int) -> None:
    """Slot 0 of 16, which is taken first, is bad: it is set aside, 15 chunks are stored and found, no breaker opens."""
    disk = Disk(tmp_path, slot_place(kind, 0, page))
    for chunk in roots(40):
        disk.store(chunk)
        disk.load(chunk)
    assert disk.lower.trips == 0
    (flaw,) = disk.tier.directory.table.aside().values()
    assert flaw in FLAWS[kind] and disk.tier.directory.table.aside().keys() == {0}
    usage = disk.lower.usage()
    assert (usage.chunks, usage.capacity_chunks, usage.bad_slots, usage.bad_bytes) == (15, 15, 1, SLOT)
    assert sum(map(disk.load, roots(40))) == 15
    disk.close()


def test_a_chunk_that_can_not_be_read_heals(tmp_path: Path) -> None:
    """A slot becomes unreadable under a chunk: one fault, a miss, and the next store of it is a hit again."""
    disk = Disk(tmp_path)
    chunks = roots(3)
    assert all(map(disk.store, chunks))
    disk.files.places.append(slot_place("read", disk.tier._entries[chunks[0].key].slot))
    assert not disk.load(chunks[0]) and not disk.lower.lookup(chunks[0].key)
    assert not disk.load(chunks[0]) and disk.files.met["read"] == 2  # the load, and the test of its slot
    assert disk.store(chunks[0]) and all(map(disk.load, chunks))
    assert disk.lower.trips == 0 and disk.lower.usage().bad_slots == 1
    disk.close()


def test_a_fault_that_passes_sets_nothing_aside(tmp_path: Path) -> None:
    """One failed read or write, on a disk whose places are sound: a miss, and all slots stay in use."""
    disk = Disk(tmp_path)
    (chunk,) = roots(1)
    disk.files.arm(1, kinds=["pwritev"])
    assert not disk.store(chunk) and disk.store(chunk)
    disk.files.arm(1, kinds=["preadv"])
    assert not disk.load(chunk) and not disk.lower.lookup(chunk.key)
    assert disk.store(chunk) and disk.load(chunk)
    assert disk.lower.usage().bad_slots == 0
    disk.close()


@pytest.mark.parametrize("kinds", [["preadv"], ["pwritev"], ["sync"], None], ids=str)
def test_a_disk_that_fails_as_a_whole_sets_nothing_aside(tmp_path: Path, kinds: list[str] | None) -> None:
    """While nothing works elsewhere, the tier is given up, and no slot is blamed; what it holds is found afterwards."""
    disk = Disk(tmp_path)
    chunks = roots(8)
    assert all(map(disk.store, chunks))
    disk.files.places += [slot_place("read", slot) for slot in range(8)] if kinds == ["sync"] else []
    disk.files.arm(1, kinds=kinds, lasting=True)
    for chunk in roots(4, "other"):
        disk.store(chunk)
    for chunk in chunks:
        disk.load(chunk)
    disk.files.disarm()
    disk.files.places.clear()
    for _ in range(40):
        disk.clock.advance(1.0)
        disk.settle()
    assert disk.lower.is_up and disk.lower.usage().bad_slots == 0
    if kinds != ["pwritev"]:
        assert disk.lower.trips > 0
    assert all(map(disk.load, chunks))
    disk.close()


def test_a_vanished_drive_is_no_bad_place(tmp_path: Path) -> None:
    """A drive that is pulled and put back has no slot set aside."""
    files, queues = VanishedFiles(), InlineQueues()
    options = DiskOptions(tmp_path, SLOTS * SLOT, allow_direct=False, files=files, queue=queues.queue)
    tier = DiskTier(options, NAMESPACE, SIZE, SimulatedClock())
    (chunk,) = roots(1)
    assert tier.submit_store(chunk, TERMS, aligned(SIZE, content(chunk.key, SIZE)))
    queues.run()
    assert [each.fault for each in tier.finished()] == [None]
    files.go_away()
    assert tier.submit_load(chunk.key, aligned(SIZE))
    queues.run()
    assert [each.fault for each in tier.finished()] == [Fault.IO]
    files.come_back()
    assert tier.lookup(chunk.key) and tier.usage().bad_slots == 0
    tier.close(5.0)


def test_bad_slots_are_kept_over_restarts(tmp_path: Path) -> None:
    """A slot that is set aside is not touched by the next process, nor by one that forgets all chunks."""
    disk = Disk(tmp_path, slot_place("write", 0), slot_place("write", 5))
    for chunk in roots(30):
        disk.store(chunk)
    assert disk.lower.usage().bad_slots == 2
    met = disk.files.met["write"]
    disk.again()
    assert disk.lower.usage().bad_slots == 2 and disk.lower.usage().chunks == 14
    for chunk in roots(30, "more"):
        disk.store(chunk)
    disk.lower.close(5.0)
    (tmp_path / "log").unlink()  # what was invalidated is not known: all chunks are forgotten
    disk.open()
    assert (disk.lower.usage().bad_slots, disk.lower.usage().chunks) == (2, 0)
    for chunk in roots(30, "most"):
        disk.store(chunk)
    assert disk.files.met["write"] == met and disk.lower.usage().chunks == 14
    disk.close()


def test_a_release_that_knows_no_bad_slots_takes_them_for_free(tmp_path: Path) -> None:
    """The record of a bad slot has no live magic, and a record that is written over it wins: no format of its own."""
    disk = Disk(tmp_path, slot_place("write", 0))
    for chunk in roots(3):
        disk.store(chunk)
    disk.lower.close(5.0)
    table = (tmp_path / "table").read_bytes()
    first = table[SUPERBLOCK_BYTES : SUPERBLOCK_BYTES + RECORD_BYTES]
    assert first[:4] == b"HSVB" and table[8:12] == (2).to_bytes(4, "little")
    damaged = bytearray(table)
    damaged[SUPERBLOCK_BYTES + 100] ^= 1
    (tmp_path / "table").write_bytes(damaged)
    disk.open()
    assert disk.lower.usage().bad_slots == 0  # a damaged record is a free slot, as it is for chunks
    disk.close()


def test_a_bad_slot_that_a_page_cache_hides_costs_misses_alone(tmp_path: Path) -> None:
    """Without O_DIRECT a test of a slot may pass that the disk would fail: the slot is used again and again, each chunk
    in it is a miss once the cache has forgotten it, all others are hits, and the tier makes no pause.
    """
    disk = Disk(tmp_path)
    disk.lower.close(5.0)
    disk.files = files = HidingPlaces([slot_place("read", 0)])
    disk.open()
    for turn in range(20):
        chunks = roots(SLOTS, f"turn{turn}-")
        assert all(map(disk.store, chunks)) and all(map(disk.load, chunks))
        files.forget()
        assert sum(map(disk.load, chunks)) == SLOTS - 1
        assert disk.lower.trips == 0 and disk.lower.is_up
        disk.lower.invalidate([Scope()], DurableSpy())
        disk.settle()
    disk.close()


def test_neighbours_of_a_bad_slot_stay_in_use(tmp_path: Path) -> None:
    """A chunk in several adjacent slots fails in one of them: that one is set aside, and no other."""
    disk = Disk(tmp_path, BadPlace("write", 2 * PAGE_BYTES, 3 * PAGE_BYTES), slots=4, split=4)
    for chunk in roots(9):
        disk.store(chunk)
    assert disk.tier.directory.table.aside() == {2: Flaw.WRITE}
    assert disk.tier.usage().bad_slots == 1 and len(disk.tier) == 3
    disk.close()


def test_bad_slots_in_a_row_do_not_close_the_tier_for_good(tmp_path: Path) -> None:
    """Eight bad slots one after the other: the breaker judges eight places, pauses, and then the others are used."""
    disk = Disk(tmp_path, *(slot_place("write", slot) for slot in range(8)))
    for chunk in roots(40):
        disk.store(chunk)
        disk.clock.advance(5.0)
        disk.settle()
    assert disk.lower.usage().bad_slots == 8 and disk.lower.usage().chunks == 8
    assert 0 < disk.lower.trips <= 3
    disk.close()


def test_a_twentieth_of_bad_slots_leaves_the_rest(tmp_path: Path) -> None:
    """A disk whose slots are bad to 5 % at random, in all ways, serves the other 95 %."""
    places = bad_slots(random.Random(7), 200, SLOT, 0.05)
    disk = Disk(tmp_path, *places, slots=200)
    for chunk in roots(600):
        disk.store(chunk)
        disk.load(chunk)
        disk.clock.advance(1.0)
    usage = disk.lower.usage()
    assert (usage.bad_slots, usage.capacity_chunks, usage.chunks) == (10, 190, 190)
    assert sum(map(disk.load, roots(600))) == 190 and disk.lower.is_up
    disk.close()


def test_page_0_that_can_not_be_read_does_not_prevent_a_start(tmp_path: Path) -> None:
    """The first page of the slab fails: a server starts on it, again, too, and O_DIRECT stays."""
    disk = Disk(tmp_path, BadPlace("read", 0, PAGE_BYTES), is_direct=True)
    assert disk.store(chain("a", 1)[0])
    disk.load(chain("a", 1)[0])
    disk.again()
    for chunk in roots(20):
        disk.store(chunk)
    assert disk.lower.usage().bad_slots == 1 and disk.lower.usage().chunks == 15
    disk.close()


@pytest.mark.parametrize("page", [0, 1])
@pytest.mark.parametrize("name", ["table", "log"])
def test_a_bad_page_of_the_books_does_not_prevent_a_start(tmp_path: Path, name: str, page: int) -> None:
    """A page of the table, or the log, can't be read: its chunks are misses, others are not, and stores go on."""
    disk = Disk(tmp_path, slots=40)
    for chunk in roots(40):
        disk.store(chunk)
    disk.lower.close(5.0)
    disk.files.places.append(BadPlace("read", page * PAGE_BYTES, (page + 1) * PAGE_BYTES, name))
    disk.open()
    hits = sum(map(disk.load, roots(40)))
    is_past_the_end = (name, page) == ("log", 1)
    assert hits == (24 if (name, page) == ("table", 1) else 40 if is_past_the_end else 0)
    for chunk in roots(40, "more"):
        disk.store(chunk)
    assert sum(map(disk.load, roots(40, "more"))) == 40
    disk.close()


@pytest.mark.parametrize("page", [0, 1, 2])
def test_a_table_that_is_not_taken_moves(tmp_path: Path, page: int) -> None:
    """A page of the table can't be written: it is written anew elsewhere; invalidations stay durable, chunks found."""
    disk = Disk(tmp_path, BadPlace("write", page * PAGE_BYTES, (page + 1) * PAGE_BYTES, "table"), slots=40)
    chunks = roots(40)
    assert all(map(disk.store, chunks))
    spy = DurableSpy()
    disk.lower.invalidate([Scope(keys=frozenset([chunks[0].key]))], spy)
    disk.settle()
    assert spy.told == [True] and disk.lower.trips == 0 and disk.lower.usage().bad_slots == 0
    disk.again()
    assert not disk.files.places and sum(map(disk.load, chunks)) == 39
    assert not (tmp_path / "table.new").exists()
    disk.close()
    assert remove_directory(tmp_path) > 0


def test_a_log_that_is_not_taken_moves(tmp_path: Path) -> None:
    """The log's page can't be written: that invalidation is not durable; the tier opens again, and later ones are."""
    disk = Disk(tmp_path)
    assert all(map(disk.store, roots(2)))
    disk.files.places.append(BadPlace("write", 0, PAGE_BYTES, "log"))
    spies = [DurableSpy(), DurableSpy()]
    for spy in spies:
        disk.lower.invalidate([Scope(keys=frozenset([key_of("nobody")]))], spy)
        disk.settle()
        for _ in range(20):
            disk.clock.advance(1.0)
            disk.settle()
    assert [spy.told for spy in spies] == [[False], [True]] and disk.lower.is_up
    disk.close()


def test_a_check_finds_and_shows_bad_slots(tmp_path: Path) -> None:
    """What can't be read, also the second time, is forgotten and its slot set aside; the report counts all of them."""
    disk = Disk(tmp_path)
    chunks = roots(6)
    assert all(map(disk.store, chunks))
    slot = disk.tier._entries[chunks[2].key].slot
    disk.files.places.append(slot_place("read", slot))
    report = disk.tier.verification().run()
    assert (report["unreadable"], report["whole"], report["bad_slots"]) == (1, 5, 1)
    assert disk.store(roots(1, "other")[0])
    assert not disk.lower.lookup(chunks[2].key)
    assert disk.tier.directory.table.aside() == {slot: Flaw.READ}
    disk.close()
    report = check_offline(tmp_path, None)
    assert (report["chunks"], report["whole"], report["bad_slots"]) == (6, 6, 1)


def test_a_check_while_no_server_runs_sets_bad_slots_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`hotspan cache check --disk` does the same, and the next server knows it."""
    disk = Disk(tmp_path)
    chunks = roots(6)
    assert all(map(disk.store, chunks))
    slot = disk.tier._entries[chunks[2].key].slot
    disk.files.places.append(slot_place("read", slot))
    disk.close()
    monkeypatch.setattr("hotspan.tiers.check.Files", lambda: disk.files)
    monkeypatch.setattr("hotspan.tiers.directory.Files", lambda: disk.files)
    report = check_offline(tmp_path, None)
    assert (report["unreadable"], report["whole"], report["bad_slots"]) == (1, 5, 1)
    disk.open()
    assert disk.tier.directory.table.aside() == {slot: Flaw.READ}
    assert sum(map(disk.load, chunks)) == 5
    disk.close()
    monkeypatch.setenv("COLUMNS", "200")
    shown = CliRunner().invoke(app, ["cache", "check", "--disk", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    rows = [line.replace("┃", "│").split("│") for line in shown.output.splitlines()]
    heads, row = (row for row in rows if len(row) > 5 and row[1].strip() in ("tier", "disk"))
    cells = dict(zip(map(str.strip, heads), map(str.strip, row), strict=True))
    assert (cells["whole"], cells["unreadable"], cells["bad slots"]) == ("5", "0", "1"), shown.output


def test_errors_other_than_eio(tmp_path: Path) -> None:
    """ENODATA is what the kernel makes of a medium error: it is one of a place, too."""

    class Medium(BadPlaces):
        def pwritev(self, fd: int, buffers: list[memoryview], at: int) -> int:  # type: ignore[override]
            try:
                return super().pwritev(fd, buffers, at)
            except OSError:
                raise OSError(errno.ENODATA, "no data") from None

    disk = Disk(tmp_path, slot_place("write", 0))
    disk.lower.close(5.0)
    disk.files = Medium(disk.files.places, wait=disk.clock.advance)
    disk.open()
    assert not disk.store(roots(1)[0]) and disk.store(roots(1)[0])
    assert disk.lower.usage().bad_slots == 1
    disk.close()


@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_bad_place_under_the_lock_does_not_prevent_a_start(tmp_path: Path, kind: str) -> None:
    """The lock holds without the name of its owner, which only tells others whom they ask: they are refused as ever."""
    disk = Disk(tmp_path, BadPlace(kind, 0, PAGE_BYTES, "lock"))
    (chunk,) = roots(1)
    disk.store(chunk)
    assert disk.lower.usage().chunks == 1
    with pytest.raises(DirectoryError, match="in use by process"):
        open_directory(tmp_path, SLOT, SLOTS * SLOT, files=disk.files)
    disk.close()
