"""A chunk in RAM, and one request as the cache sees it."""

from dataclasses import dataclass, field
from enum import Enum

from hotspan.cache.choice import Plan
from hotspan.core.terms import Terms
from hotspan.core.types import Chunk, ChunkKey, Tier


class State(Enum):
    """What happens to a slot."""

    STORING = "storing"  # the engine copies into it
    PROMOTING = "promoting"  # the tier below reads into it
    READY = "ready"


@dataclass(slots=True, eq=False)
class Entry:
    """A chunk in RAM.

    terms:   whose it is, and until when.
    pins:    who needs it to stay: readers told HIT, loads and writes in flight. It may go when READY and unpinned.
    loads:   those of them in which the engine copies from its slot.
    moving:  transfers of the tier below that use its slot.
    held:    the engine uses its slot and will not say when that ends (after `clear`).
    doomed:  forgotten while its slot was in use; the slot comes free when that ends.
    readers: requests that wait for it.
    """

    chunk: Chunk
    slot: int
    state: State
    terms: Terms
    pins: int = 0
    loads: int = 0
    moving: int = 0
    held: bool = False
    doomed: bool = False
    readers: "list[Reader]" = field(default_factory=list)

    @property
    def engine_copies(self) -> bool:
        """Whether the engine reads or writes its slot, and will say when that ends."""
        return self.state is State.STORING or self.loads > 0

    @property
    def is_used(self) -> bool:
        """Whether anybody reads or writes its slot."""
        return self.engine_copies or self.moving > 0 or self.held


@dataclass(slots=True, eq=False)
class Reader:
    """What a request holds and waits for between its first look-up and its load.

    terms:      on which it stores and hits: its tenant, adapter, tags and expiry.
    bare_terms: the same without tags, for the chunks before `tags_from`, an index.
    inherited:  the terms of chunks, by index, that others had used under more than this request's own.
    renews:     a hit begins its time to live anew.
    pins:       entries that may not go, because this request was told HIT or waits for them.
    waiting:    chunks on their way to RAM that it waits for.
    since_s:    when its wait began or a chunk of its own last landed (monotonic); None while it waits for nothing.
    is_asking:  it waits for a tier to say what it has. awaited: a chunk that it was told nothing of yet.
    asks_s:     how long it waits to be told; None before it began to.
    risk_s:     the same, beyond what the bound allows; None if that was not asked, 0 if it may not.
    plan:       what the cost model chose for it, while that goes on.
    cut:        it has waited enough: from here on it is told MISS for what is not in RAM.
    promoted:   where chunks that it waited for came from.
    """

    terms: Terms = field(default_factory=Terms)
    bare_terms: Terms = field(default_factory=Terms)
    tags_from: int = 0
    inherited: dict[int, Terms] = field(default_factory=dict)
    renews: bool = False
    pins: dict[ChunkKey, Entry] = field(default_factory=dict)
    waiting: set[ChunkKey] = field(default_factory=set)
    since_s: float | None = None
    is_asking: bool = False
    awaited: ChunkKey | None = None
    asks_s: float | None = None
    risk_s: float | None = None
    plan: Plan | None = None
    cut: bool = False
    promoted: dict[ChunkKey, Tier] = field(default_factory=dict)

    def terms_at(self, index: int) -> Terms:
        """On what terms it keeps the chunk at `index` of its text."""
        return self.inherited.get(index) or self.own_terms_at(index)

    def own_terms_at(self, index: int) -> Terms:
        """The same, but for what it inherited."""
        return self.terms if index >= self.tags_from else self.bare_terms
