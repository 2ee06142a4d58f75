"""Several consecutive chunks of one chain as one object, and the chunks that wait for the rest of theirs.

    object = [ index 4096 ][ frame | zeros up to a page ][ frame | zeros up to a page ] ...
    index  = [ "HSEG" | version 2 | chunks 2 | zeros 8 | xxh3-128 of the rest 16 | an entry each | zeros ]
    entry  = [ record 256 | life 16 | bytes of the frame 8 ]

Segments are cut at fixed places of a text, so that all who store a text cut it alike: with 4 chunks to a segment, a
segment ends at places 3, 7, 11, ... The key of its last chunk names everything before it, and is the segment's name.
A chunk without a parent beyond place 0 (of a sliding window, of recurrent state) stands alone, and is a segment.
"""

import struct
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import xxhash

from hotspan.core.types import PAGE_BYTES, ChunkKey, round_up
from hotspan.tiers.record import RECORD_BYTES, Record, pack, unpack

INDEX_BYTES = PAGE_BYTES
LIFE_BYTES = 16

_HEAD = struct.Struct("<4sHH8x16s")
_ENTRY = struct.Struct(f"<{RECORD_BYTES}s{LIFE_BYTES}sQ")
_MAGIC, _VERSION = b"HSEG", 1

MOST_CHUNKS = (INDEX_BYTES - _HEAD.size) // _ENTRY.size
"""That an index has room for."""

MOST_PLACE = 0xFFFF
"""Of a chunk that can be in a segment: a record does not tell higher ones apart."""


class Entry(NamedTuple):
    """One chunk of an object. life: that of the chunk's marks when it was put. Its frame is [at, at + size)."""

    record: Record
    life: bytes
    at: int
    size: int


class Part(NamedTuple):
    """One chunk on its way into an object."""

    record: Record
    life: bytes
    frame: bytes


@dataclass(frozen=True, slots=True)
class ChainSegment:
    """A segment as it is in the store. e_tag: of this version of the object."""

    path: str
    e_tag: str
    entries: tuple[Entry, ...]

    @property
    def keys(self) -> list[ChunkKey]:
        """Of its chunks, in the chain's order."""
        return [entry.record.key for entry in self.entries]


def packed(parts: Sequence[Part]) -> tuple[list[bytes], tuple[Entry, ...]]:
    """The object of these chunks as buffers one behind the other, and what its index says. No frame is copied."""
    entries, buffers, at = [], [], INDEX_BYTES
    for part in parts:
        size = len(part.frame)
        entries.append(Entry(part.record, part.life, at, size))
        buffers += [part.frame, bytes(round_up(size, PAGE_BYTES) - size)]
        at += round_up(size, PAGE_BYTES)
    body = b"".join(_ENTRY.pack(pack(entry.record), entry.life, entry.size) for entry in entries)
    body = body.ljust(INDEX_BYTES - _HEAD.size, b"\0")
    head = _HEAD.pack(_MAGIC, _VERSION, len(entries), xxhash.xxh3_128_digest(_counted(len(entries), body)))
    return [head, body, *buffers], tuple(entries)


def read_index(data: bytes, object_bytes: int) -> tuple[Entry, ...] | None:
    """What an index says; None if it is none, or not one of consecutive chunks, or not of an object of that size."""
    if len(data) != INDEX_BYTES:
        return None
    magic, version, count, check = _HEAD.unpack_from(data)
    body = data[_HEAD.size :]
    if (magic, version) != (_MAGIC, _VERSION) or not 0 < count <= MOST_CHUNKS:
        return None
    if xxhash.xxh3_128_digest(_counted(count, body)) != check:
        return None
    entries, at = [], INDEX_BYTES
    for packed_record, life, size in _ENTRY.iter_unpack(body[: count * _ENTRY.size]):
        record = unpack(packed_record)
        if record is None:
            return None
        entries.append(Entry(record, life, at, size))
        at += round_up(size, PAGE_BYTES)
    if at != object_bytes or not all(follows(two.record, one.record) for one, two in pairwise(entries)):
        return None
    return tuple(entries)


def _counted(count: int, body: bytes) -> bytes:
    return count.to_bytes(2, "little") + body


def follows(record: Record, before: Record) -> bool:
    """Whether a chunk is the next one in its chain."""
    return record.parent == before.key and record.place == before.place + 1


def is_alone(record: Record) -> bool:
    """Whether a chunk is in no chain."""
    return record.parent is None and record.place > 0


class Cut:
    """Where segments of `chunks` chunks are cut."""

    def __init__(self, chunks: int) -> None:
        self.chunks = chunks

    def begins(self, record: Record) -> bool:
        """Whether a chunk is the first of its segment."""
        return is_alone(record) or record.place % self.chunks == 0

    def ends(self, record: Record) -> bool:
        """Whether it is the last."""
        return is_alone(record) or record.place % self.chunks == self.chunks - 1


class Pending:
    """Chunks that wait for the rest of their segment, in bounded memory: what was extended longest ago goes first.

    Who owns it locks it.
    """

    def __init__(self, cut: Cut, most_bytes: int) -> None:
        self.bytes = 0
        self.dropped = 0
        self._cut = cut
        self._most_bytes = most_bytes
        self._parts: OrderedDict[ChunkKey, Part] = OrderedDict()
        self._children: dict[ChunkKey, set[ChunkKey]] = {}

    def get(self, key: ChunkKey) -> Part | None:
        """The chunk, if it waits here."""
        return self._parts.get(key)

    def add(self, part: Part) -> None:
        """Keep a chunk that is not here; for want of room others go, with those of their segments that follow them."""
        key, parent = part.record.key, part.record.parent
        self._parts[key] = part
        self.bytes += len(part.frame)
        if parent is not None:
            self._children.setdefault(parent, set()).add(key)
        line = [key]
        while parent is not None and parent in self._parts and len(line) < self._cut.chunks:
            line.append(parent)
            parent = self._parts[parent].record.parent
        for one in reversed(line):
            self._parts.move_to_end(one)
        while self.bytes > self._most_bytes:
            oldest = next(iter(self._parts.values()))
            gone = [after.record.key for after in self._line_after(oldest)]
            self.remove(gone)
            self.dropped += len(gone)

    def remove(self, keys: Iterable[ChunkKey]) -> None:
        """Forget chunks; those that are not here are no error."""
        for key in keys:
            part = self._parts.pop(key, None)
            if part is None:
                continue
            self.bytes -= len(part.frame)
            parent = part.record.parent
            if parent is not None:
                self._children[parent].discard(key)
                if not self._children[parent]:
                    del self._children[parent]

    def clear(self) -> None:
        """Forget all."""
        self._parts.clear()
        self._children.clear()
        self.bytes = 0

    def ends_after(self, part: Part) -> list[Part]:
        """The last chunks of segments with this chunk in them that are here: several where texts part behind it."""
        return [after for after in self._line_after(part) if self._cut.ends(after.record)]

    def check(self) -> None:
        """Raise AssertionError if the books do not agree."""
        if self.bytes != sum(len(part.frame) for part in self._parts.values()) or self.bytes > self._most_bytes:
            raise AssertionError("the bytes that wait are miscounted, or too many")
        children = {(parent, key) for parent, keys in self._children.items() for key in keys}
        if children != {(part.record.parent, key) for key, part in self._parts.items() if part.record.parent}:
            raise AssertionError("a chunk that waits is not found from its parent")

    def _line_after(self, part: Part) -> list[Part]:
        """This chunk and all of its segment that stand on it."""
        line = [part]
        for one in line:
            if not self._cut.ends(one.record):
                children = (self._parts[key] for key in self._children.get(one.record.key, ()))
                line += [child for child in children if follows(child.record, one.record)]
        return line
