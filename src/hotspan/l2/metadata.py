"""What is kept beside an object: one small blob per chunk, which is only appended to.

    metadata = [ life 16 ][ mark 17, check 7 ] * n          mark: terms that a hit added (base.py)
    check    = the beginning of the mark's xxh3-64

An object is stored with the life that its metadata had then, and is valid only under that life. Where a medium may drop
metadata alone, lives are random: an object whose metadata was evicted or begun anew is gone, so that the tags and
expiries that hits added can't be lost unnoticed. A mark whose check fails makes the chunk wild: any tag takes it.
"""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass

import xxhash

from hotspan.l2.base import MARK_BYTES

LIFE_BYTES = 16
NO_LIFE = b"hotspan metadata"
"""The life of a chunk on a medium that never drops metadata before its object, until its metadata is emptied."""

MAX_MARKS = 1024
"""In one blob. With more of them the chunk counts as gone, and its next put begins another life."""

_CHECK_BYTES = 7
ENTRY_BYTES = MARK_BYTES + _CHECK_BYTES
MAX_BYTES = LIFE_BYTES + MAX_MARKS * ENTRY_BYTES
_DAMAGED = b""
"""In the place of a mark: what is none makes a chunk wild."""


@dataclass(frozen=True, slots=True)
class Metadata:
    """The life of a chunk, and the marks of hits in that life."""

    life: bytes
    marks: tuple[bytes, ...] = ()


def new_life() -> bytes:
    """A life that no chunk ever had."""
    return secrets.token_bytes(LIFE_BYTES)


def parse_metadata(data: bytes | None) -> Metadata | None:
    """The metadata in a blob; None if it is not there, is no metadata, or has too many marks."""
    if data is None or not LIFE_BYTES <= len(data) <= MAX_BYTES:
        return None
    entries = (data[at : at + ENTRY_BYTES] for at in range(LIFE_BYTES, len(data), ENTRY_BYTES))
    return Metadata(data[:LIFE_BYTES], tuple(map(_mark, entries)))


def pack_marks(marks: Iterable[bytes]) -> bytes:
    """What is appended to metadata."""
    return b"".join(mark + _check(mark) for mark in marks)


def _mark(entry: bytes) -> bytes:
    mark = entry[:MARK_BYTES]
    return mark if entry[MARK_BYTES:] == _check(mark) else _DAMAGED


def _check(mark: bytes) -> bytes:
    return xxhash.xxh3_64_digest(mark)[:_CHECK_BYTES]
