"""The table on disk: what was written comes back, what is torn is a free slot."""

import contextlib
import errno
import os
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hotspan.core.terms import WINDOW, Scope, Terms
from hotspan.core.types import ChunkKey
from hotspan.testing.chunks import key_of
from hotspan.tiers.log import Invalidation
from hotspan.tiers.record import MAX_PARTS, RECORD_BYTES, RECORD_LABELS, Record, pack, unpack
from hotspan.tiers.table import SUPERBLOCK_BYTES, DiskTable, Geometry, read_geometry
from kit.simulated.faults import SHORT, FaultyFiles, SlowFiles

GEOMETRY = Geometry(8192, 16)
DIGESTS = st.binary(min_size=32, max_size=32)
U64 = st.integers(0, 2**64 - 1)
LABELS = st.frozensets(st.integers(1, 2**64 - 1), max_size=RECORD_LABELS)
TERMS = st.builds(Terms, U64, U64, LABELS, U64, U64, st.booleans())
RECORDS = st.builds(
    *(Record, DIGESTS, st.none() | DIGESTS, DIGESTS, st.integers(0, 2**40 - 1), TERMS, U64, st.integers(0, 2**16 - 1)),
    *(st.integers(0, MAX_PARTS - 1), st.integers(0, 2**24 - 1).map(lambda pages: pages * 4096)),
)


def record(name: str, **terms: Any) -> Record:
    """A record that a test calls `name`."""
    return Record(key_of(name), key_of("parent of " + name), bytes(32), 4096, Terms(**terms))


def written(table: DiskTable, slot: int, one: Record | None) -> None:
    """Put a record in memory and on disk."""
    if one is None:
        table.free([slot])
    else:
        table.put(slot, one)
    table.write(slot)


def reread(table: DiskTable) -> dict[int, Record]:
    """What a new process reads from the table's file."""
    fresh = DiskTable(table._files, table._fd, table.geometry)
    fresh.read()
    return contents(fresh)


def contents(table: DiskTable) -> dict[int, Record]:
    """All records in memory."""
    return {slot: table.record(slot) for slot in table.slots()}


FILES = FaultyFiles()


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    """An empty file."""
    fd = os.open(tmp_path / "table", os.O_RDWR | os.O_CREAT, 0o600)
    yield fd
    os.close(fd)


@pytest.fixture
def table(fd: int) -> DiskTable:
    """A fresh table."""
    table = DiskTable(FILES, fd, GEOMETRY)
    FILES.disarm()
    table.format()
    return table


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50, deadline=None)
@given(records=st.dictionaries(st.integers(0, GEOMETRY.slots - 1), RECORDS))
def test_records_come_back(table: DiskTable, records: dict[int, Record]) -> None:
    """Any records in any slots read back as they were written, from memory and from the disk."""
    table.clear()
    for slot, one in records.items():
        written(table, slot, one)
    assert contents(table) == records == reread(table)
    assert {slot: (part, key, parent, namespace) for slot, part, key, parent, namespace, *_ in table.summaries()} == {
        slot: (one.part, one.key, one.parent, one.namespace) for slot, one in records.items()
    }
    assert {slot: (tenant, at) for slot, _, _, _, _, tenant, at, *_ in table.summaries()} == {
        slot: (one.terms.tenant, one.terms.expires_s) for slot, one in records.items()
    }
    assert table.newest_generation() == max((one.terms.generation for one in records.values()), default=0)


@given(RECORDS)
def test_a_record_is_256_bytes(one: Record) -> None:
    """A record packs into 256 bytes, and only those bytes are that record."""
    data = pack(one)
    assert len(data) == RECORD_BYTES == 256 and unpack(data) == one


@given(st.frozensets(st.integers(1, 2**64 - 1), min_size=RECORD_LABELS + 1, max_size=60), st.booleans())
def test_too_many_labels_make_it_wild(labels: frozenset[int], is_wild: bool) -> None:
    """Labels beyond 12 are not kept: then the record is wild, and every tag takes it, those that were lost included."""
    one = unpack(pack(record("a", labels=labels, is_wild=is_wild)))
    assert one is not None and one.terms.is_wild and one.terms.labels < labels
    assert len(one.terms.labels) == RECORD_LABELS
    for name in labels:
        assert Scope(labels=frozenset([name])).takes(one.key, one.namespace, one.terms)


def test_thirteen_labels_fit(table: DiskTable) -> None:
    """A record of 13 labels keeps them all and is not wild."""
    one = record("a", labels=frozenset(range(1, RECORD_LABELS + 1)))
    written(table, 0, one)
    assert reread(table) == {0: one} and table.taken([Scope(labels=frozenset([99]))]) == []


def test_a_parent_of_zeros_is_a_parent(table: DiskTable) -> None:
    """No parent and a parent of 32 zero bytes are told apart."""
    written(table, 0, Record(key_of("a"), None, bytes(32), 1, Terms()))
    written(table, 1, Record(key_of("b"), ChunkKey(bytes(32)), bytes(32), 1, Terms()))
    assert [one.parent for one in reread(table).values()] == [None, bytes(32)]


def test_a_freed_slot_is_free(table: DiskTable) -> None:
    """`free` takes one record away, `clear` all of them; what is not there raises KeyError."""
    for slot in range(3):
        written(table, slot, record(str(slot)))
    written(table, 1, None)
    assert sorted(reread(table)) == [0, 2] == table.slots()
    with pytest.raises(KeyError):
        table.record(1)
    table.clear()
    assert reread(table) == {} == contents(table)


def test_a_write_says_what_memory_says(table: DiskTable) -> None:
    """However late a write comes, it puts the newest record on disk and never the one it was asked for."""
    table.put(0, record("old"))
    table.put(0, record("new"))
    table.write(0)
    assert reread(table) == {0: record("new")}
    table.free([0])
    table.write(0)
    table.write(0)
    assert reread(table) == {}


def test_flush_writes_what_was_not_written(table: DiskTable) -> None:
    """After `flush` the disk says what memory says, also of records whose own write failed or never came."""
    written(table, 0, record("0"))
    table.put(1, record("1"))
    table.free([0])
    FILES.arm(1, kinds=["pwrite"])
    with pytest.raises(OSError):
        table.write(0)
    assert sorted(reread(table)) == [0]
    table.flush()
    assert reread(table) == {1: record("1")} == contents(table)
    before = FILES.calls["pwrite"], FILES.calls["sync"]
    table.flush()
    assert (FILES.calls["pwrite"], FILES.calls["sync"]) == (before[0], before[1] + 1)


@pytest.mark.parametrize("fails", [False, True], ids=["written", "failed"])
def test_a_flush_waits_for_a_write_that_has_begun(fd: int, fails: bool) -> None:
    """A record that another thread is writing is on the disk when `flush` returns, also if that thread failed."""
    files = SlowFiles(kinds=["pwrite"])
    table = DiskTable(files, fd, GEOMETRY)
    table.format()
    table.put(3, record("a"))
    files.hang()
    if fails:
        files.before = _after(files.before, OSError(errno.EIO, "no"))  # type: ignore[method-assign,assignment]
    order: list[str] = []

    def write() -> None:
        with contextlib.suppress(OSError):
            table.write(3)
        order.append("written")

    def flush() -> None:
        table.flush()
        order.append("flushed")

    threads = [threading.Thread(target=write), threading.Thread(target=flush)]
    threads[0].start()
    files.wait_hanging()
    threads[1].start()
    threads[1].join(0.05)
    assert files.calls["sync"] == 0 and not order
    files.release()
    for thread in threads:
        thread.join(60.0)
    assert sorted(order) == ["flushed", "written"] and files.calls["sync"] == 1
    assert reread(table) == {3: record("a")} and not table.is_dirty


def _after(before: Callable[[str], bool], error: OSError) -> Callable[[str], bool]:
    """Raise `error` once, when the first write has hung."""
    errors = [error]

    def hook(kind: str) -> bool:
        short = before(kind)
        if kind == "pwrite" and errors:
            raise errors.pop()
        return short

    return hook


@pytest.mark.parametrize("kind", ["pwrite", "sync"])
def test_a_flush_that_fails_says_so(table: DiskTable, kind: str) -> None:
    """If a write or the sync fails, `flush` raises OSError, and the next one does all again that may be lost."""
    written(table, 1, record("1"))
    table.put(0, record("0"))
    FILES.arm(1, kinds=[kind])
    with pytest.raises(OSError):
        table.flush()
    before = FILES.calls["pwrite"]
    table.flush()
    assert FILES.calls["pwrite"] - before == (GEOMETRY.slots if kind == "sync" else 1)
    assert reread(table) == {0: record("0"), 1: record("1")}


def test_adjacent_slots_are_one_write(table: DiskTable) -> None:
    """The records of a chunk's slots go to the disk in as few writes as there are runs of slots, and each is there."""
    for slot in (0, 1, 2, 4):
        table.put(slot, record(f"{slot}"))
    before = FILES.calls["pwrite"]
    table.write_all([4, 0, 1, 2])
    assert FILES.calls["pwrite"] - before == 2
    assert reread(table) == contents(table) and sorted(contents(table)) == [0, 1, 2, 4]


def test_every_flipped_bit_frees_one_slot(table: DiskTable, fd: int) -> None:
    """A record in which any bit flipped is a free slot; its neighbours stay."""
    for slot in range(3):
        written(table, slot, record(str(slot)))
    at = SUPERBLOCK_BYTES + RECORD_BYTES
    whole = os.pread(fd, RECORD_BYTES, at)
    for index in range(RECORD_BYTES):
        torn = bytearray(whole)
        torn[index] ^= 1 << (index % 8)
        os.pwrite(fd, torn, at)
        assert reread(table) == {0: record("0"), 2: record("2")}, f"byte {index}"
    os.pwrite(fd, whole, at)
    assert len(reread(table)) == 3


@pytest.mark.parametrize("kept", range(16, RECORD_BYTES, 8))
def test_a_torn_record_is_a_free_slot(table: DiskTable, fd: int, kept: int) -> None:
    """A record of which only the first bytes reached the disk, over nothing or over an older one, is a free slot."""
    at = SUPERBLOCK_BYTES
    written(table, 0, record("old"))
    old = os.pread(fd, RECORD_BYTES, at)
    written(table, 0, record("new"))
    new = os.pread(fd, RECORD_BYTES, at)
    os.pwrite(fd, new[:kept] + old[kept:], at)
    assert reread(table) == {}
    os.pwrite(fd, new[:kept] + bytes(RECORD_BYTES - kept), at)
    assert reread(table) == {}


def test_a_truncated_table_keeps_what_is_whole(table: DiskTable, fd: int) -> None:
    """Records before the cut are read, the one that it goes through and those after it are free slots."""
    for slot in range(4):
        written(table, slot, record(str(slot)))
    os.ftruncate(fd, SUPERBLOCK_BYTES + 2 * RECORD_BYTES + 60)
    assert sorted(reread(table)) == [0, 1]


def test_the_geometry_comes_back(table: DiskTable, fd: int) -> None:
    """The superblock says for which slots the table was made; an empty or torn one says nothing."""
    assert read_geometry(FILES, fd) == GEOMETRY
    for at in range(40):
        byte = os.pread(fd, 1, at)
        os.pwrite(fd, bytes([byte[0] ^ 1]), at)
        assert read_geometry(FILES, fd) is None, f"byte {at}"
        os.pwrite(fd, byte, at)
    assert read_geometry(FILES, fd) == GEOMETRY
    os.ftruncate(fd, 39)
    assert read_geometry(FILES, fd) is None
    os.ftruncate(fd, 0)
    assert read_geometry(FILES, fd) is None


@pytest.mark.parametrize("slots", [4, 16, 64])
def test_a_resize_keeps_what_fits(table: DiskTable, fd: int, slots: int) -> None:
    """Grown or shrunk, a table keeps the records of the slots that it still has, and shrinking forgets the others."""
    for slot in (0, 3, 4, 15):
        written(table, slot, record(str(slot)))
    resized = DiskTable(FILES, fd, Geometry(GEOMETRY.slot_bytes, slots))
    resized.format()
    resized.read()
    assert resized.slots() == sorted(reread(resized)) == [slot for slot in (0, 3, 4, 15) if slot < slots]
    assert read_geometry(FILES, fd) == Geometry(GEOMETRY.slot_bytes, slots)
    table.format()
    assert sorted(reread(table)) == [slot for slot in (0, 3, 4, 15) if slot < slots]


def test_a_table_without_a_whole_superblock_is_empty(table: DiskTable, fd: int) -> None:
    """Records whose slot size nobody knows any more are not believed."""
    written(table, 0, record("0"))
    os.pwrite(fd, b"\0" * 8, 0)
    table.format()
    assert reread(table) == {}


def test_a_short_write_is_an_error(table: DiskTable) -> None:
    """A write that moved fewer bytes than given raises OSError."""
    table.put(0, record("0"))
    FILES.arm(1, SHORT, kinds=["pwrite"])
    with pytest.raises(OSError, match="128 of 256"):
        table.write(0)


def test_a_short_read_is_read_on(table: DiskTable) -> None:
    """Reads that bring less than was asked for are continued, for the superblock and the records."""
    written(table, 3, record("3"))
    FILES.arm(1, SHORT, kinds=["pread"])
    assert read_geometry(FILES, table._fd) == GEOMETRY
    FILES.arm(1, SHORT, kinds=["pread"])
    assert sorted(reread(table)) == [3]


def test_fields_stand_where_the_document_says(table: DiskTable, fd: int) -> None:
    """docs/frame.md, read with no help of the module: superblock and record, each field at its offset."""
    labels = frozenset([0xA1, 0xA2, 0xB << 56])
    terms = Terms(0x7E, 0xAD, labels, 0x6E, 0xE0, is_wild=True)
    one = Record(key_of("a"), key_of("b"), bytes(range(32)), 0x1122334455, terms, 0x57A << 52)
    written(table, 2, one)
    raw = os.pread(fd, 8192 + 4096, 0)
    assert raw[0:8] == b"HOTSPANT"
    assert struct.unpack_from("<IIQQ", raw, 8) == (2, 256, GEOMETRY.slot_bytes, GEOMETRY.slots)
    assert raw[32:40] == xxhash.xxh3_64_digest(raw[:32]) and raw[40:4096] == bytes(4056)
    body = raw[4096 + 2 * 256 : 4096 + 3 * 256]
    assert struct.unpack_from("<IHH", body, 0) == (0x4B565348, 3, 0)
    assert (body[8:40], body[40:72], body[72:104]) == (one.key, one.parent, one.namespace)
    assert struct.unpack_from("<QQQQQQ", body, 104) == (one.payload_bytes, 0x6E, 0xE0, 0x7E, 0xAD, 0x57A << 52)
    assert struct.unpack_from("<12Q", body, 152) == (0xA1, 0xA2, 0xB << 56, *[0] * 9)
    assert body[248:256] == xxhash.xxh3_64_digest(body[:248])


# -- what an invalidation takes ------------------------------------------------------------------------------------

NAMES = [key_of(str(n)) for n in range(6)]
FEW_RECORDS = st.builds(
    Record,
    st.sampled_from(NAMES),
    st.none() | st.sampled_from(NAMES),
    st.sampled_from([bytes(32), b"\1" * 32]),
    st.just(4096),
    st.builds(
        Terms,
        st.integers(0, 1),
        st.integers(0, 1),
        st.frozensets(st.integers(1, 3) | st.just(WINDOW)),
        st.integers(0, 3),
        st.sampled_from([0, 5, 10]),
        st.booleans(),
    ),
    U64,
    *(st.just(0), st.just(0), st.just(0)),
)
FEW_SCOPES = st.builds(
    Scope,
    st.none() | st.integers(0, 1),
    st.none() | st.integers(0, 1),
    st.frozensets(st.integers(1, 3), max_size=2),
    st.none() | st.frozensets(st.sampled_from(NAMES)),
    st.none() | st.sampled_from([bytes(32), b"\1" * 32]),
)
TABLES = st.dictionaries(st.integers(0, GEOMETRY.slots - 1), FEW_RECORDS)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300, deadline=None)
@given(
    records=TABLES,
    scopes=st.lists(FEW_SCOPES, min_size=1, max_size=4),
    before=st.none() | st.integers(0, 4),
    now_s=st.floats(0, 12),
)
def test_taken_is_a_filter(
    table: DiskTable, records: dict[int, Record], scopes: list[Scope], before: int | None, now_s: float
) -> None:
    """`taken` finds the slots whose records any of the scopes takes, one by one; `expired` those whose time is over."""
    table.free(range(GEOMETRY.slots))
    for slot, one in records.items():
        table.put(slot, one)
    assert table.taken(scopes, before) == sorted(
        slot
        for slot, one in records.items()
        if any(scope.takes(one.key, one.namespace, one.terms) for scope in scopes)
        and (before is None or one.terms.generation < before)
    )
    assert table.expired(now_s) == sorted(
        slot for slot, one in records.items() if one.terms.expires_s and now_s >= one.terms.expires_s
    )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300, deadline=None)
@given(records=TABLES, scope=FEW_SCOPES, generation=st.integers(0, 4))
def test_what_stands_on_it_falls(table: DiskTable, records: dict[int, Record], scope: Scope, generation: int) -> None:
    """`deleted` finds what was taken and, step by step, all older chunks that stand on it or on a key that is named."""
    table.free(range(GEOMETRY.slots))
    for slot, one in records.items():
        table.put(slot, one)
    old = {slot: one for slot, one in records.items() if one.terms.generation < generation}
    deleted = {slot for slot, one in old.items() if scope.takes(one.key, one.namespace, one.terms)}
    while True:
        gone = {records[slot].key for slot in deleted} | (scope.keys or set())
        more = {slot for slot, one in old.items() if one.parent in gone} - deleted
        if not more:
            break
        deleted |= more
    assert table.deleted([Invalidation(generation, (scope,), 0.0)]) == sorted(deleted)


def test_windows_go_with_any_text_of_their_tenant(table: DiskTable) -> None:
    """Also one with more labels than fit, read by a new process; and one that was overwritten goes no more."""
    written(table, 0, record("a", tenant=7, labels=frozenset([WINDOW])))
    written(table, 1, record("b", tenant=7, labels=frozenset([WINDOW, *range(1, 20)])))
    written(table, 2, record("c", tenant=7))
    written(table, 3, record("d", tenant=8, labels=frozenset([WINDOW])))
    fresh = DiskTable(FILES, table._fd, GEOMETRY)
    fresh.read()
    text = Scope(tenant=7, keys=frozenset([key_of("x")]))
    for each in (table, fresh):
        assert each.taken([text]) == each.taken([text], slot_of={}.get) == [0, 1]
    table.put(0, record("a", tenant=7))
    assert table.taken([text]) == [1]


def test_a_new_process_takes_the_same(table: DiskTable) -> None:
    """Terms read from the disk take part in invalidations as those in memory do."""
    written(table, 0, record("a", tenant=7, labels=frozenset([1])))
    written(table, 1, record("b", adapter=8, labels=frozenset(range(1, 20))))
    fresh = DiskTable(FILES, table._fd, GEOMETRY)
    fresh.read()
    scopes = [Scope(), Scope(tenant=7), Scope(adapter=8), Scope(labels=frozenset([1])), Scope(labels=frozenset([99]))]
    assert [fresh.taken([scope]) for scope in scopes] == [[0, 1], [0], [1], [0, 1], [1]]
    assert [fresh.taken([scope]) for scope in scopes] == [table.taken([scope]) for scope in scopes]


def test_what_expires_is_found_when_it_does(table: DiskTable) -> None:
    """Not before; whatever was put meanwhile, changed, freed or read anew."""
    written(table, 0, record("never"))
    assert table.expired(1e9) == []
    for slot, expires_s in ((1, 300), (2, 100), (3, 200)):
        written(table, slot, record(f"{slot}", expires_s=expires_s))
    assert table.expired(99.9) == []
    assert table.expired(100.0) == [2] == table.expired(100.5)
    written(table, 2, None)
    assert table.expired(199.9) == []
    written(table, 3, record("3", expires_s=150))
    assert table.expired(199.9) == [3]
    fresh = DiskTable(table._files, table._fd, table.geometry)
    fresh.read()
    assert fresh.expired(300.0) == [1, 3] == table.expired(300.0)


def test_looking_for_what_expires_costs_nothing_before(table: DiskTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table is searched only when something's time has come."""
    written(table, 1, record("a", expires_s=100))
    table.expired(1.0)
    monkeypatch.setattr(table, "_records", None)
    assert table.expired(99.0) == []
    with pytest.raises(TypeError):
        table.expired(100.0)
