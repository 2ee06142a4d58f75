"""The table on disk: what was written comes back, what is torn is a free slot."""

import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hotspan.core.types import ChunkKey
from hotspan.testing.chunks import key_of
from hotspan.tiers.table import RECORD_BYTES, SUPERBLOCK_BYTES, DiskTable, Geometry, Record, read_geometry

GEOMETRY = Geometry(8192, 16)
DIGESTS = st.binary(min_size=32, max_size=32)
RECORDS = st.builds(Record, DIGESTS, st.none() | DIGESTS, DIGESTS, st.integers(0, 2**64 - 1))


def record(name: str) -> Record:
    """A record that a test calls `name`."""
    return Record(key_of(name), key_of("parent of " + name), bytes(32), 4096)


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    """An empty file."""
    fd = os.open(tmp_path / "table", os.O_RDWR | os.O_CREAT, 0o600)
    yield fd
    os.close(fd)


@pytest.fixture
def table(fd: int) -> DiskTable:
    """A fresh table."""
    table = DiskTable(fd, GEOMETRY)
    table.format()
    return table


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50, deadline=None)
@given(records=st.dictionaries(st.integers(0, GEOMETRY.slots - 1), RECORDS))
def test_records_come_back(table: DiskTable, records: dict[int, Record]) -> None:
    """Any records in any slots read back as they were written; a parent of zeros is not the same as none."""
    table.free_all()
    for slot, one in records.items():
        table.write(slot, one)
    assert table.read_all() == records


def test_a_parent_of_zeros_is_a_parent(table: DiskTable) -> None:
    """No parent and a parent of 32 zero bytes are told apart."""
    table.write(0, Record(key_of("a"), None, bytes(32), 1))
    table.write(1, Record(key_of("b"), ChunkKey(bytes(32)), bytes(32), 1))
    assert [one.parent for one in table.read_all().values()] == [None, bytes(32)]


def test_a_freed_slot_is_free(table: DiskTable) -> None:
    """`free` takes one record away, `free_all` all of them."""
    for slot in range(3):
        table.write(slot, record(str(slot)))
    table.free(1)
    assert sorted(table.read_all()) == [0, 2]
    table.free_all()
    assert table.read_all() == {}
    table.sync()


def test_every_flipped_bit_frees_one_slot(table: DiskTable, fd: int) -> None:
    """A record in which any bit flipped is a free slot; its neighbours stay."""
    for slot in range(3):
        table.write(slot, record(str(slot)))
    at = SUPERBLOCK_BYTES + RECORD_BYTES
    whole = os.pread(fd, RECORD_BYTES, at)
    for index in range(RECORD_BYTES):
        torn = bytearray(whole)
        torn[index] ^= 1 << (index % 8)
        os.pwrite(fd, torn, at)
        assert table.read_all() == {0: record("0"), 2: record("2")}, f"byte {index}"
    os.pwrite(fd, whole, at)
    assert len(table.read_all()) == 3


@pytest.mark.parametrize("kept", range(16, RECORD_BYTES, 8))
def test_a_torn_record_is_a_free_slot(table: DiskTable, fd: int, kept: int) -> None:
    """A record of which only the first bytes reached the disk, over nothing or over an older one, is a free slot."""
    at = SUPERBLOCK_BYTES
    table.write(0, record("old"))
    old = os.pread(fd, RECORD_BYTES, at)
    table.write(0, record("new"))
    new = os.pread(fd, RECORD_BYTES, at)
    os.pwrite(fd, new[:kept] + old[kept:], at)
    assert table.read_all() == {}
    os.pwrite(fd, new[:kept] + bytes(RECORD_BYTES - kept), at)
    assert table.read_all() == {}


def test_a_truncated_table_keeps_what_is_whole(table: DiskTable, fd: int) -> None:
    """Records before the cut are read, the one that it goes through and those after it are free slots."""
    for slot in range(4):
        table.write(slot, record(str(slot)))
    os.ftruncate(fd, SUPERBLOCK_BYTES + 2 * RECORD_BYTES + 60)
    assert sorted(table.read_all()) == [0, 1]


def test_the_geometry_comes_back(table: DiskTable, fd: int) -> None:
    """The superblock says for which slots the table was made; an empty or torn one says nothing."""
    assert read_geometry(fd) == GEOMETRY
    for at in range(40):
        byte = os.pread(fd, 1, at)
        os.pwrite(fd, bytes([byte[0] ^ 1]), at)
        assert read_geometry(fd) is None, f"byte {at}"
        os.pwrite(fd, byte, at)
    assert read_geometry(fd) == GEOMETRY
    os.ftruncate(fd, 39)
    assert read_geometry(fd) is None
    os.ftruncate(fd, 0)
    assert read_geometry(fd) is None


@pytest.mark.parametrize("slots", [4, 16, 64])
def test_a_resize_keeps_what_fits(table: DiskTable, fd: int, slots: int) -> None:
    """Grown or shrunk, a table keeps the records of the slots that it still has, and shrinking forgets the others."""
    for slot in (0, 3, 4, 15):
        table.write(slot, record(str(slot)))
    resized = DiskTable(fd, Geometry(GEOMETRY.slot_bytes, slots))
    resized.format()
    assert sorted(resized.read_all()) == [slot for slot in (0, 3, 4, 15) if slot < slots]
    assert read_geometry(fd) == Geometry(GEOMETRY.slot_bytes, slots)
    table.format()
    assert sorted(table.read_all()) == [slot for slot in (0, 3, 4, 15) if slot < slots]


def test_a_table_without_a_whole_superblock_is_empty(table: DiskTable, fd: int) -> None:
    """Records whose slot size nobody knows any more are not believed."""
    table.write(0, record("0"))
    os.pwrite(fd, b"\0" * 8, 0)
    table.format()
    assert table.read_all() == {}


def test_a_short_write_is_an_error(table: DiskTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that moved fewer bytes than given raises OSError."""
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[:-1], at))
    with pytest.raises(OSError, match="127 of 128"):
        table.write(0, record("0"))


def test_fields_stand_where_the_document_says(table: DiskTable, fd: int) -> None:
    """docs/frame.md, read with no help of the module: superblock and record, each field at its offset."""
    one = Record(key_of("a"), key_of("b"), bytes(range(32)), 0x1122334455)
    table.write(2, one)
    raw = os.pread(fd, 8192, 0)
    assert raw[0:8] == b"HOTSPANT"
    assert struct.unpack_from("<IIQQ", raw, 8) == (1, 128, GEOMETRY.slot_bytes, GEOMETRY.slots)
    assert raw[32:40] == xxhash.xxh3_64_digest(raw[:32]) and raw[40:4096] == bytes(4056)
    body = raw[4096 + 2 * 128 : 4096 + 3 * 128]
    assert struct.unpack_from("<IHH", body, 0) == (0x4B565348, 1, 0)
    assert (body[8:40], body[40:72], body[72:104]) == (one.key, one.parent, one.namespace)
    assert struct.unpack_from("<QQ", body, 104) == (one.payload_bytes, 0)
    assert body[120:128] == xxhash.xxh3_64_digest(body[:120])
