"""The disk tier's index on disk: one fixed 128-byte record a slot. It is the truth; a dict in RAM mirrors it.

    table file: [ superblock 4096 ][ record 0 ][ record 1 ] ... [ record slots-1 ]

A record names the chunk in the slot of the same number. It is written after the chunk's bytes; every read verifies the
frame against the key, so a record that outlived its bytes (a crash, a lost write) costs a miss and no more.
"""

import os
import struct
from dataclasses import dataclass

import numpy as np
import xxhash

from hotspan.core.types import PAGE_BYTES, ChunkKey

SUPERBLOCK_BYTES = PAGE_BYTES
RECORD_BYTES = 128
_MAGIC = b"HOTSPANT"
_VERSION = 1
_SUPER = struct.Struct("<8sIIQQ")  # magic, version, record bytes, slot bytes, slots; then xxh3-64 of those

_RECORD = struct.Struct("<IHH32s32s32sQQ8x")  # the last 8 bytes: xxh3-64 of the first 120
_LIVE = 0x4B565348
_DTYPE = np.dtype(
    {
        "names": ["magic", "flags", "key", "parent", "namespace", "payload_bytes", "check"],
        "formats": ["<u4", "<u2", "V32", "V32", "V32", "<u8", "<u8"],
        "offsets": [0, 4, 8, 40, 72, 104, 120],
        "itemsize": RECORD_BYTES,
    }
)
_HAS_PARENT = 1


@dataclass(frozen=True, slots=True)
class Record:
    """What stands in one slot."""

    key: ChunkKey
    parent: ChunkKey | None
    namespace: bytes
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class Geometry:
    """The shape of a slab on disk: equal slots, each one frame."""

    slot_bytes: int
    slots: int

    @property
    def slab_bytes(self) -> int:
        return self.slot_bytes * self.slots

    @property
    def table_bytes(self) -> int:
        return SUPERBLOCK_BYTES + RECORD_BYTES * self.slots


def read_geometry(fd: int) -> Geometry | None:
    """The geometry that an existing table was made for, or None if it is no whole table."""
    data = os.pread(fd, _SUPER.size + 8, 0)
    if len(data) < _SUPER.size + 8:
        return None
    magic, version, record_bytes, slot_bytes, slots = _SUPER.unpack_from(data)
    whole = xxhash.xxh3_64_digest(data[: _SUPER.size]) == data[_SUPER.size :]
    if not whole or magic != _MAGIC or version != _VERSION or record_bytes != RECORD_BYTES:
        return None
    return Geometry(slot_bytes, slots)


class DiskTable:
    """The table file. Methods raise OSError; each touches one slot's record, so threads may share it."""

    def __init__(self, fd: int, geometry: Geometry) -> None:
        self.geometry = geometry
        self._fd = fd

    def format(self) -> None:
        """Write the superblock. Records stay, if the table was made for slots of this size; new slots are free."""
        found = read_geometry(self._fd)
        if found is None or found.slot_bytes != self.geometry.slot_bytes:
            os.ftruncate(self._fd, 0)
        os.ftruncate(self._fd, self.geometry.table_bytes)
        fields = _SUPER.pack(_MAGIC, _VERSION, RECORD_BYTES, self.geometry.slot_bytes, self.geometry.slots)
        self._write(fields + xxhash.xxh3_64_digest(fields), 0)

    def read_all(self) -> dict[int, Record]:
        """All whole records by slot; a torn or foreign one is a free slot.

        Blocks: for one sequential read and about a microsecond a live record.
        """
        data = self._read_records()
        records = np.frombuffer(data, _DTYPE, count=len(data) // RECORD_BYTES)
        found: dict[int, Record] = {}
        for slot in np.flatnonzero(records["magic"] == _LIVE).tolist():
            raw = data[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES]
            if xxhash.xxh3_64_digest(raw[:120]) != raw[120:]:
                continue
            _, flags, _, key, parent, namespace, payload_bytes, _ = _RECORD.unpack(raw[:128])
            found[slot] = Record(
                ChunkKey(key), ChunkKey(parent) if flags & _HAS_PARENT else None, namespace, payload_bytes
            )
        return found

    def write(self, slot: int, record: Record) -> None:
        """Say what stands in `slot`."""
        flags = _HAS_PARENT if record.parent is not None else 0
        parent = record.parent if record.parent is not None else bytes(32)
        body = _RECORD.pack(_LIVE, flags, 0, record.key, parent, record.namespace, record.payload_bytes, 0)[:120]
        self._write(body + xxhash.xxh3_64_digest(body), SUPERBLOCK_BYTES + slot * RECORD_BYTES)

    def free(self, slot: int) -> None:
        """Say that nothing stands in `slot`."""
        self._write(bytes(RECORD_BYTES), SUPERBLOCK_BYTES + slot * RECORD_BYTES)

    def free_all(self) -> None:
        """Say that nothing stands anywhere, durably."""
        os.ftruncate(self._fd, SUPERBLOCK_BYTES)
        os.ftruncate(self._fd, self.geometry.table_bytes)
        os.fdatasync(self._fd)

    def sync(self) -> None:
        """Make all records durable against a power loss."""
        os.fdatasync(self._fd)

    def _read_records(self) -> bytes:
        size, at, parts = self.geometry.table_bytes, SUPERBLOCK_BYTES, []
        while at < size:
            part = os.pread(self._fd, min(size - at, 1 << 24), at)
            if not part:
                break
            parts.append(part)
            at += len(part)
        data = b"".join(parts)
        return data[: len(data) // RECORD_BYTES * RECORD_BYTES]

    def _write(self, data: bytes, at: int) -> None:
        written = os.pwrite(self._fd, data, at)
        if written != len(data):
            raise OSError(f"short write to the table: {written} of {len(data)} bytes")
