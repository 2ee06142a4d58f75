"""What is kept beside an object: one small blob per chunk, which is only appended to.

    metadata = [ life 16 ][ update 17, check 7 ] * n          update: terms that a hit added (base.py)
    check    = the beginning of the update's xxh3-64

An object is stored with the life that its metadata had then, and is valid only under that life. Where a medium may drop
metadata alone, lives are random: an object whose metadata was evicted or begun anew is gone, so that the tags and
expiries that hits added can't be lost unnoticed. An update whose check fails makes the chunk wild: any tag takes it.
"""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass

import xxhash

from hotspan.l2.base import UPDATE_BYTES

LIFE_BYTES = 16
NO_LIFE = b"hotspan metadata"
"""The life of a chunk on a medium that never drops metadata before its object, until its metadata is emptied."""

MAX_UPDATES = 1024
"""In one blob. With more of them the chunk counts as gone, and its next put begins another life."""

_CHECK_BYTES = 7
ENTRY_BYTES = UPDATE_BYTES + _CHECK_BYTES
MAX_BYTES = LIFE_BYTES + MAX_UPDATES * ENTRY_BYTES
_DAMAGED = b""
"""In the place of an update: what is none makes a chunk wild."""


@dataclass(frozen=True, slots=True)
class Metadata:
    """The life of a chunk, and the updates of hits in that life."""

    life: bytes
    updates: tuple[bytes, ...] = ()


def new_life() -> bytes:
    """A life that no chunk ever had."""
    return secrets.token_bytes(LIFE_BYTES)


def parse_metadata(data: bytes | None) -> Metadata | None:
    """The metadata in a blob; None if it is not there, is no metadata, or has too many updates."""
    if data is None or not LIFE_BYTES <= len(data) <= MAX_BYTES:
        return None
    entries = (data[at : at + ENTRY_BYTES] for at in range(LIFE_BYTES, len(data), ENTRY_BYTES))
    return Metadata(data[:LIFE_BYTES], tuple(map(_update, entries)))


def pack_updates(updates: Iterable[bytes]) -> bytes:
    """What is appended to metadata."""
    return b"".join(update + _check(update) for update in updates)


def _update(entry: bytes) -> bytes:
    update = entry[:UPDATE_BYTES]
    return update if entry[UPDATE_BYTES:] == _check(update) else _DAMAGED


def _check(update: bytes) -> bytes:
    return xxhash.xxh3_64_digest(update)[:_CHECK_BYTES]
