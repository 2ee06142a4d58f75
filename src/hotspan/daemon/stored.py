"""An object: its name, where its bytes are, and what writes it."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from hotspan.core.terms import MAX_LABELS, Terms
from hotspan.core.types import PAGE_BYTES, ChunkKey, round_up
from hotspan.daemon.space import Extent
from hotspan.l2.base import updated, updates_of
from hotspan.l2.options import OWN_BUCKET
from hotspan.tiers.record import unpack

_MAX_UPDATES = 2 * MAX_LABELS


class Standing(NamedTuple):
    """Which chunk an object stands on, and whose it is."""

    parent: ChunkKey | None
    tenant: int


def object_key(bucket: str, name: str) -> ChunkKey:
    """The 32 bytes by which the daemon knows an object: those of the chunk, or a digest of both names."""
    if bucket == OWN_BUCKET and len(name) == 64 and not set(name) - set("0123456789abcdef"):
        return ChunkKey(bytes.fromhex(name))
    data = f"hotspan-object-1:{len(bucket)}:{bucket}:{name}".encode()
    return ChunkKey(hashlib.sha256(data).digest())


@dataclass(slots=True, eq=False)
class StoredObject:
    """Bytes under a name.

    extents: where they are in the segment, in their order; none if they are on disk only.
    room:    bytes of the segment that they take, or would take. is_saved: they are on disk, too.
    pins:    leases that read it. is_gone: it was deleted, and its bytes stay until the last of them ends.
    record:  what one of hotspan's own begins with; empty for any other.
    updates: what was added to its terms since.
    version: by which clients know what they were told of it; see `CHANGE_BITS`.
    has_all_updates: False if it may have had others, which its slot covers (daemon/metadata.py).
    """

    key: ChunkKey
    size: int
    extents: Sequence[Extent]
    record: bytes = b""
    updates: set[bytes] = field(default_factory=set)
    pins: int = 0
    is_gone: bool = False
    version: int = 0
    is_saved: bool = False
    has_all_updates: bool = True
    room: int = field(init=False)

    def __post_init__(self) -> None:
        self.room = round_up(self.size, PAGE_BYTES)

    @property
    def standing(self) -> Standing:
        """By its record; on nothing, and nobody's, if it has none."""
        record = unpack(self.record) if self.record else None
        return Standing(None, 0) if record is None else Standing(record.parent, record.terms.tenant)


class Refusal(Enum):
    """Why nothing was reserved.

    EXISTS: an object of that name is there, or being written. TOO_LARGE: for the segment.
    NO_ROOM: what is there is being read or written, and can't give way now.
    """

    EXISTS = "exists"
    TOO_LARGE = "too_large"
    NO_ROOM = "no_room"


@dataclass(slots=True, eq=False)
class Writing:
    """An object whose bytes are on their way; ends with `Pool.commit` or `Pool.abort`.

    is_own: of hotspan: it begins with its record.
    on_end: called once, whichever it was. Of bytes that are read from disk (`Pool.load`) it may come before their end.
    """

    object: StoredObject
    is_own: bool
    on_end: list[Callable[[], None]] = field(default_factory=list)

    def tell(self) -> None:
        """Call what is to be called at its end."""
        on_end, self.on_end = self.on_end, []
        for each in on_end:
            each()


def joined_updates(updates: set[bytes], more: Iterable[bytes]) -> set[bytes]:
    """Both; where they are too many, fewer that say the same or take the object along sooner."""
    joined = updates.union(more)
    if len(joined) <= _MAX_UPDATES:
        return joined
    terms = updated(Terms(), joined)
    return set(updates_of(terms, terms.generation))


@dataclass(slots=True)
class PoolCounts:
    """What happened since the start, in objects, bytes and leases."""

    stored: int = 0
    stored_bytes: int = 0
    aborted: int = 0
    evicted: int = 0
    evicted_bytes: int = 0
    deleted: int = 0
    leased: int = 0
    leases_expired: int = 0
    hits: int = 0
    misses: int = 0
    refused_exists: int = 0
    refused_too_large: int = 0
    refused_no_room: int = 0
    refused_lease: int = 0
