"""What an L2 is to hotspan: objects under chunk keys that all replicas share, and a log of what was invalidated.

    object = [ record 256 | zeros up to 4096 ][ frame: header 4096, payload ]       updates: terms joined since

The record says what a chunk stands on and on which terms it is kept; the frame (core/frame.py) proves its bytes. What a
store answers is believed of neither: the reader verifies the frame against the record, and the record by its checksum.
Objects never change; an update adds to the terms of one, and updates commute, so that replicas need no lock.
"""

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from hotspan.core.scopes import understood_scopes
from hotspan.core.terms import NEVER, Scope, Terms
from hotspan.core.types import PAGE_BYTES, ChunkKey
from hotspan.tiers.record import Record

PREAMBLE_BYTES = PAGE_BYTES
"""What stands before the frame in an object that is one run of bytes: its record, padded."""

UPDATE_BYTES = 17
_UPDATE = struct.Struct(
    ">cQQ"
)  # kind, value, generation: in this order they sort, the earliest update of a label first
_LABEL, _EXPIRY, _WILD = b"L", b"E", b"W"


def updates_of(terms: Terms, generation: int) -> list[bytes]:
    """What a request under `terms` adds to a chunk that it hits at `generation`: 17 bytes each, in any order."""
    updates = [_UPDATE.pack(_LABEL, value, generation) for value in sorted(terms.labels)]
    if terms.expires_s:
        updates.append(_UPDATE.pack(_EXPIRY, terms.expires_s, generation))
    if terms.is_wild:
        updates.append(_UPDATE.pack(_WILD, 0, generation))
    return updates


def updated(terms: Terms, updates: Iterable[bytes]) -> Terms:
    """The terms of a chunk with its updates, whatever their order and however often each is there.

    Its generation is that of the latest update that changed them: it outlived all that was invalidated before. Of
    several updates of one label the earliest counts. One that can't be read makes the chunk wild: any tag takes it.
    """
    generation = terms.generation
    for update in sorted(updates):
        kind, value, at = _UPDATE.unpack(update) if len(update) == UPDATE_BYTES else (_WILD, 0, 0)
        if kind == _LABEL:
            added = Terms(labels=frozenset([value]))
        elif kind == _EXPIRY:
            added = Terms(expires_s=value or NEVER)
        else:
            added = Terms(is_wild=True)
        joined = terms.joined(added)
        if joined is not terms:
            generation = max(generation, at)
            terms = joined
    return terms.at(generation)


@dataclass(frozen=True, slots=True)
class Found:
    """An object that is there whole.

    record: as it was put. terms: those of the record, and what was updated since.
    """

    record: Record
    terms: Terms


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """How full a store is, as far as it says; 0 for what it does not say.

    evicted: objects that this process deleted for room since it opened the store; None where processes do not.
    """

    objects: int = 0
    bytes: int = 0
    capacity_bytes: int = 0
    evicted: int | None = None


Landed = Callable[[int, memoryview], None]
"""Where a segment of a payload begins, and its bytes where they are to stay."""


class ObjectStore(Protocol):
    """Objects that replicas share. Methods block, each at most its deadline (the store's own setting, in seconds), and
    may be called from several threads.

    Raises: OSError (ConnectionError, TimeoutError) from every method when the store can't be reached or fails.
    """

    @property
    def log(self) -> "SharedLog | None":
        """None for a store that can't keep one."""
        ...

    def find(self, keys: Sequence[ChunkKey], tenant: int = 0, *, is_chain: bool = True) -> list[Found | None]:
        """What is there, in the order of `keys`, in one round trip where the store can.

        tenant:   whose chunks they are, for stores that keep tenants apart by name.
        is_chain: the keys are a chain from its root on: after the first that is not there a store may answer None for
                  the rest. If not, each stands for itself.
        """
        ...

    def get(self, found: Found, into: Sequence[memoryview], landed: Landed | None = None) -> bool:
        """Read an object's frame into buffers that have exactly its size, one after the other.

        landed: may be told of each segment of the payload as soon as it is there, while it is in the caches, and again
                if it is read again; `into` is header and payload then. A store need not.

        False if the object is gone, or is not of that size; what `into` holds is undefined then, and when it raises.
        """
        ...

    def put(self, record: Record, frame: Sequence[memoryview]) -> bool:
        """Store an object, seen by nobody before it is whole. False if one of that key is there already, and stays."""
        ...

    def add_updates(self, updates: Mapping[ChunkKey, Sequence[bytes]]) -> None:
        """Add updates to objects, in one round trip where the store can; to those that are not there yet, too."""
        ...

    def delete(self, keys: Sequence[ChunkKey], tenant: int = 0) -> None:
        """Delete objects and their updates; those that are not there are no error."""
        ...

    def usage(self) -> StoreUsage:
        """How full it is."""
        ...

    def close(self) -> None:
        """Let go of connections. Methods that other threads are in may raise."""
        ...


@dataclass(frozen=True, slots=True)
class SharedInvalidation:
    """One entry of a log: chunks of lower generations that one of `scopes` takes are gone.

    by:       the replica that asked.
    is_whole: False if not all of it could be read; then `scopes` take more than it said, in doubt everything.
    check:    by which it is known from another entry of its generation; empty in a log that loses none.
    """

    generation: int
    scopes: tuple[Scope, ...]
    by: str
    is_whole: bool = True
    check: bytes = field(default=b"", compare=False)


def read_entry(generation: int, body: Any, check: bytes = b"") -> SharedInvalidation:
    """The entry that a store keeps as `body`, of JSON types: {"scope": ..., "by": ...}. Never raises.

    What can't be understood may have invalidated anything of its tenant, or, if that can't be read either, anything.
    """
    said = body if isinstance(body, Mapping) else {}
    scopes, is_whole = understood_scopes(said.get("scope"))
    by = said.get("by")
    if not isinstance(by, str):
        return SharedInvalidation(generation, scopes, "", False, check)  # every replica takes it for another's
    return SharedInvalidation(generation, scopes, by, is_whole, check)


def is_lost(entry: SharedInvalidation) -> bool:
    """Whether nothing could be read of an entry, not even whose it was."""
    return not entry.is_whole and Scope() in entry.scopes


class LogPosition(NamedTuple):
    """How far a replica has done what a log says.

    check: of the entry of that generation; empty for the beginning of an epoch.
    """

    epoch: bytes
    generation: int
    check: bytes = b""


@dataclass(frozen=True, slots=True)
class LogPage:
    """What a log says after a generation.

    epoch:      of this log; another one means that the log was lost and began anew, and so did all objects.
    generation: of its newest entry; `floor` if there is none.
    floor:      entries up to this generation are gone from the log: who has not read them knows nothing. A new log's
                floor is the Unix time in milliseconds when it began: above all generations of the one before it, so
                that what is still stored under those is no hit.
    is_shared:  whether others write it, too, and it outlives this process.
    """

    epoch: bytes
    generation: int
    floor: int
    entries: Sequence[SharedInvalidation]
    is_shared: bool = True


class SharedLog(Protocol):
    """The log of generations that replicas share, and who has read how far. Blocks and raises as ObjectStore does."""

    def is_used(self) -> bool:
        """Whether a replica has ever used the store, as far as it shows. Begins no log where there is none."""
        ...

    def append(self, scopes: Sequence[Scope], by: str) -> int:
        """Write an entry of one or more scopes, and return its generation.

        It is higher than any before, and the entry as durable as the store can make it.
        """
        ...

    def read(self, after: int) -> LogPage:
        """The entries of generations above `after`, in order."""
        ...

    def report(self, replica: str, generation: int, ttl_s: float) -> None:
        """Say that this replica is alive for `ttl_s`, and has read the log up to `generation`."""
        ...

    def forget(self, replica: str) -> None:
        """Say that this replica is gone."""
        ...

    def replicas(self) -> dict[str, int]:
        """The replicas that are alive, and how far each has read."""
        ...

    def clock_offset_s(self) -> float:
        """How far the store's clock, by which all replicas go, is ahead of this one's."""
        ...
