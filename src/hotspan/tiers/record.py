"""The record of a stored chunk, 256 bytes: its name, its parent, and the terms on which it is kept."""

import struct
from enum import IntEnum
from typing import NamedTuple

import xxhash

from hotspan.core.terms import WINDOW, Terms, shared
from hotspan.core.types import PAGE_BYTES, ChunkKey

RECORD_BYTES = 256
RECORD_LABELS = 12
LIVE = 0x4B565348
"""The first four bytes of a record, little-endian; a free one has zeros there."""

ASIDE = 0x42565348
"""In its place, of a slot that is set aside. Releases that do not know it take the slot for a free one."""

CHECK_AT = RECORD_BYTES - 8
_ASIDE = struct.Struct("<IH")
_RECORD = struct.Struct(f"<IHH32s32s32sQQQQQQ{RECORD_LABELS}Q8x")
_FLAGS, _FLAGS_AT = struct.Struct("<H"), 4
HAS_PARENT, IS_WILD = 1, 2
PART_BITS_AT = 2
MAX_PARTS = 1 << (16 - PART_BITS_AT)
"""Slots of one chunk."""

_MAX_INDEX = 0xFFFF
SIZE_BITS = 40
"""Of the field with the payload's length; above them, of a compressed one, the chunk's length in pages."""

_MAX_SIZE, _MAX_PAGES = (1 << SIZE_BITS) - 1, (1 << (64 - SIZE_BITS)) - 1


class Flaw(IntEnum):
    """Why a slot is set aside: writes or reads of it fail, it gives back other bytes, or takes as long as a stall."""

    WRITE = 1
    READ = 2
    WRONG = 3
    SLOW = 4


def pack_aside(flaw: Flaw) -> bytes:
    """The 256 bytes that say of a slot that it is set aside."""
    body = _ASIDE.pack(ASIDE, flaw).ljust(CHECK_AT, b"\0")
    return body + xxhash.xxh3_64_digest(body)


class Record(NamedTuple):
    """One stored chunk.

    payload_bytes:  behind the frame's header.
    stamp: of the store that wrote it; its frame must say the same.
    place: in its text, counted in chunks; 65535 stands for that and all above.
    part:  which of the chunk's slots this one is.
    unpacked_bytes: of the chunk, whole pages, if the payload is compressed; else 0.
    """

    key: ChunkKey
    parent: ChunkKey | None
    namespace: bytes
    payload_bytes: int
    terms: Terms
    stamp: int = 0
    place: int = 0
    part: int = 0
    unpacked_bytes: int = 0

    @property
    def chunk_bytes(self) -> int:
        """Of the chunk, as it is in RAM."""
        return self.unpacked_bytes or self.payload_bytes

    def packed(self, size: int) -> "Record":
        """The record of the same chunk, compressed to so many bytes."""
        return self._replace(payload_bytes=size, unpacked_bytes=self.payload_bytes)


def pack(record: Record) -> bytes:
    """The 256 bytes of a record. Labels beyond those that fit make it wild.

    Raises: ValueError for sizes that it can't hold: a bug of the caller.
    """
    terms = record.terms
    pages, odd = divmod(record.unpacked_bytes, PAGE_BYTES)
    if odd or pages > _MAX_PAGES or record.payload_bytes > _MAX_SIZE:
        raise ValueError(f"{record.payload_bytes} bytes of payload, {record.unpacked_bytes} unpacked")
    labels = sorted(terms.labels, key=lambda label: (label != WINDOW, label))
    is_wild = terms.is_wild or len(labels) > RECORD_LABELS
    labels = [*labels[:RECORD_LABELS], *[0] * (RECORD_LABELS - len(labels))]
    flags = (HAS_PARENT if record.parent is not None else 0) | (IS_WILD if is_wild else 0)
    flags |= record.part << PART_BITS_AT
    body = _RECORD.pack(
        *(LIVE, flags, min(record.place, _MAX_INDEX), record.key, record.parent or bytes(32), record.namespace),
        *(record.payload_bytes | pages << SIZE_BITS, terms.generation, terms.expires_s),
        *(terms.tenant, terms.adapter, record.stamp, *labels),
    )[:CHECK_AT]
    return body + xxhash.xxh3_64_digest(body)


def pack_parts(record: Record, count: int) -> bytes:
    """The records of so many slots of a chunk, one after the other; `record` is the first of these."""
    data = bytearray(pack(record) * count)
    view = memoryview(data)
    (flags,) = _FLAGS.unpack_from(data, _FLAGS_AT)
    for at in range(RECORD_BYTES, len(data), RECORD_BYTES):
        flags += 1 << PART_BITS_AT
        _FLAGS.pack_into(data, at + _FLAGS_AT, flags)
        view[at + CHECK_AT : at + RECORD_BYTES] = xxhash.xxh3_64_digest(view[at : at + CHECK_AT])
    return bytes(data)


def unpack(data: bytes) -> Record | None:
    """The record in 256 bytes, or None if they are not one."""
    if xxhash.xxh3_64_digest(data[:CHECK_AT]) != data[CHECK_AT:]:
        return None
    magic, flags, place, key, parent, namespace, size, generation, expires_s, tenant, adapter, stamp, *labels = (
        _RECORD.unpack(data)
    )
    if magic != LIVE:
        return None
    named = shared(frozenset(value for value in labels if value))
    terms = Terms(tenant, adapter, named, generation, expires_s, bool(flags & IS_WILD))
    above = ChunkKey(parent) if flags & HAS_PARENT else None
    part, unpacked_bytes = flags >> PART_BITS_AT, (size >> SIZE_BITS) * PAGE_BYTES
    return Record(ChunkKey(key), above, namespace, size & _MAX_SIZE, terms, stamp, place, part, unpacked_bytes)
