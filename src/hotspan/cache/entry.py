"""A chunk in RAM, and one request as the cache sees it."""

from dataclasses import dataclass, field
from enum import Enum

from hotspan.core.types import Chunk, ChunkKey, Tier


class State(Enum):
    """What happens to a slot."""

    STORING = "storing"  # the engine copies into it
    PROMOTING = "promoting"  # the tier below reads into it
    READY = "ready"


@dataclass(slots=True, eq=False)
class Entry:
    """A chunk in RAM.

    pins:    who needs it to stay: readers told HIT, loads and writes in flight. It may go when READY and unpinned.
    loads:   those of them in which the engine copies from its slot.
    doomed:  forgotten while its slot was in use; the slot comes free when that ends.
    readers: requests that wait for it.
    """

    chunk: Chunk
    slot: int
    state: State
    pins: int = 0
    loads: int = 0
    doomed: bool = False
    readers: "list[Reader]" = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Reader:
    """What a request holds and waits for between its first look-up and its load.

    pins:       entries that may not go, because this request was told HIT or waits for them.
    waiting:    chunks on their way to RAM that it waits for.
    since_s:    when its wait began or a chunk of its own last landed (monotonic); None while it waits for nothing.
    cut:        it has waited enough: from here on it is told MISS for what is not in RAM.
    promoted:   where chunks that it waited for came from.
    """

    pins: dict[ChunkKey, Entry] = field(default_factory=dict)
    waiting: set[ChunkKey] = field(default_factory=set)
    since_s: float | None = None
    cut: bool = False
    promoted: dict[ChunkKey, Tier] = field(default_factory=dict)
