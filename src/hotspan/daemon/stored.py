"""An object in the segment: its name, and where its bytes are."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hotspan.core.terms import MOST_LABELS, Terms
from hotspan.core.types import PAGE_BYTES, ChunkKey, round_up
from hotspan.daemon.space import Extent
from hotspan.tiers.stores.base import marked, marks_of

OWN_BUCKET = "hotspan"
"""Where replicas of hotspan keep theirs: the name of an object there is its chunk's key, in hexadecimal."""

_MOST_MARKS = 2 * MOST_LABELS


def object_key(bucket: str, name: str) -> ChunkKey:
    """The 32 bytes by which the daemon knows an object: those of the chunk, or a digest of both names."""
    if bucket == OWN_BUCKET and len(name) == 64 and not set(name) - set("0123456789abcdef"):
        return ChunkKey(bytes.fromhex(name))
    data = f"hotspan-object-1:{len(bucket)}:{bucket}:{name}".encode()
    return ChunkKey(hashlib.sha256(data).digest())


@dataclass(slots=True, eq=False)
class StoredObject:
    """Bytes under a name.

    extents: where they are, in their order. room: bytes that are free when it is gone.
    pins:    leases that read it. is_gone: it was deleted, and its bytes stay until the last of them ends.
    record:  what one of hotspan's own begins with; empty for any other.
    marks:   what was added to its terms since.
    version: by which clients know what they were told of it; see `CHANGE_BITS`.
    """

    key: ChunkKey
    size: int
    extents: Sequence[Extent]
    record: bytes = b""
    marks: set[bytes] = field(default_factory=set)
    pins: int = 0
    is_gone: bool = False
    version: int = 0
    room: int = field(init=False)

    def __post_init__(self) -> None:
        self.room = round_up(self.size, PAGE_BYTES)


def joined_marks(marks: set[bytes], more: Iterable[bytes]) -> set[bytes]:
    """Both; where they are too many, fewer that say the same or take the object along sooner."""
    joined = marks.union(more)
    if len(joined) <= _MOST_MARKS:
        return joined
    terms = marked(Terms(), joined)
    return set(marks_of(terms, terms.generation))
