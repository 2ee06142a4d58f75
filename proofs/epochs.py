"""What is known of all replicas: how often each chunk was invalidated, by whom, and who has learnt of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hotspan.cache.entry import Reader
from hotspan.core.terms import Scope
from hotspan.core.types import Chunk, ChunkKey
from hotspan.l2.base import LogPage, ObjectStore, SharedLog
from hotspan.l2.node import ChosenLog
from proofs.engine import Text


@dataclass(slots=True)
class Epochs:
    """What is known outside: how often each chunk was taken, and by which invalidation."""

    latest: dict[ChunkKey, int]
    taken: dict[int, tuple[int, set[ChunkKey]]] = field(default_factory=dict)  # by the scope's id
    scopes: list[Scope] = field(default_factory=list)  # kept, so that ids stay theirs
    written: dict[tuple[str, int], list[tuple[int, set[ChunkKey]]]] = field(default_factory=dict)  # by place in a log
    read: int = 0  # entries from which a replica learnt what others took


@dataclass(slots=True, eq=False)
class Asked:
    """A request that was admitted and not scheduled yet.

    least: the epochs of its chunks that it may be given. present: those of the bytes that it computes.
    since_s: since when it has to wait, and nothing has happened (the replica's `stirs`).
    """

    text: Text
    reader: Reader
    least: dict[ChunkKey, int]
    present: dict[ChunkKey, int]
    may_store: bool = True
    since_s: float = 0.0
    stirs: int = -1


@dataclass(slots=True, eq=False)
class Held:
    """A text that is held for later: a warm-up's by a server, the copy of a request by a router.

    since_s: from when on. present: epochs of its bytes.
    """

    text: Text
    since_s: float
    present: dict[ChunkKey, int]


@dataclass(slots=True, eq=False)
class Copies:
    """Chunks that the engine is about to have copied into their slots."""

    parts: list[tuple[int, int]]  # index in the text, slot
    text: Text
    epochs: dict[ChunkKey, int]


@dataclass(slots=True, eq=False)
class Loads:
    """Chunks that are being copied to the engine: each with its slot, and the bytes that were a hit."""

    parts: list[tuple[Chunk, int, bytes]]


class ReadLog:
    """A shared log that says which invalidations were read from it, and knows those that were written by their place.

    An entry is written once its append has returned; what is read of another binds nobody.
    """

    def __init__(self, log: SharedLog, epochs: Epochs, owner: str) -> None:
        self._log = log
        self._owner = owner
        self._epochs = epochs
        self._read: list[tuple[str, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    def append(self, scopes: Sequence[Scope], by: str) -> int:
        """An entry, whose generation is noted with what it takes."""
        generation = self._log.append(scopes, by)
        known = [self._epochs.taken[id(scope)] for scope in scopes if id(scope) in self._epochs.taken]
        is_own = isinstance(self._log, ChosenLog) and not self._log.is_shared
        self._epochs.written.setdefault((self._owner if is_own else "", generation), []).extend(known)
        return generation

    def read(self, after: int) -> LogPage:
        """A page of the log."""
        page = self._log.read(after)
        owner = "" if page.is_shared else self._owner
        self._read += [(owner, entry.generation) for entry in page.entries]
        return page

    def take(self, applied: int) -> list[tuple[int, set[ChunkKey]]]:
        """What entries up to a generation took that were read since the last call."""
        ready = {place for place in self._read if place[1] <= applied}
        self._read = [place for place in self._read if place not in ready]
        return [one for place in sorted(ready) for one in self._epochs.written.get(place, ())]


def log_of(store: ObjectStore) -> SharedLog:
    if store.log is None:
        raise ValueError("replicas share a store that has a log")
    return store.log
