"""A chunk in RAM, and one request as the cache sees it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from msgspec import Struct

from hotspan.cache.choice import Choice
from hotspan.core.terms import Terms
from hotspan.core.types import Chunk, ChunkKey, Tier

CutBy = Literal["fault", "late", "room", "unanswered"]
"""Why a request waits no longer for chunks that a lower tier has, or may have."""


class State(Enum):
    """What happens to a slot."""

    STORING = "storing"  # the engine copies into it
    PROMOTING = "promoting"  # the lower tier reads into it
    READY = "ready"


class Entry(Struct, eq=False, gc=False):
    """A chunk in RAM. The garbage collector does not track it (`Chunk`): who waits for it is known elsewhere.

    terms:   whose it is, and until when.
    pins:    who needs it to stay: readers told HIT, loads and writes in flight. It may go when READY and unpinned.
    loads:   those of them in which the engine copies from its slot.
    moving:  transfers of the lower tier that use its slot.
    held:    the engine uses its slot and will not say when that ends (after `clear`).
    deleted: forgotten while its slot was in use; the slot comes free when that ends.
    """

    chunk: Chunk
    slot: int
    state: State
    terms: Terms
    pins: int = 0
    loads: int = 0
    moving: int = 0
    held: bool = False
    deleted: bool = False

    @property
    def engine_copies(self) -> bool:
        """Whether the engine reads or writes its slot, and will say when that ends."""
        return self.state is State.STORING or self.loads > 0

    @property
    def is_used(self) -> bool:
        """Whether anybody reads or writes its slot."""
        return self.engine_copies or self.moving > 0 or self.held


def small_part(chunks: int) -> int:
    """Of so many chunks of RAM, how many that no request waits for may take: they push out what requests use."""
    return max(chunks // 32, 1)


@dataclass(slots=True, eq=False)
class Plan:
    """What was chosen for one request, and how far that has come.

    chain:    its chunks, from the first that the engine has not whole. refused: those that it does not wait for.
    began_s:  when it began to wait, for answers included. chosen_s: when all answers were there. Monotonic.
    risked:   it waited for answers longer than the bound allows. answered: all came.
    landed:   how many chunks from the front of the chain are in RAM. landed_s: since when.
    ended_s:  when its wait was over; None while it goes on.
    is_crowded: RAM had no room for some of it: nothing that a tier could be blamed for.
    """

    choice: Choice
    chain: Sequence[Chunk]
    refused: frozenset[ChunkKey]
    began_s: float
    chosen_s: float
    risked: bool
    answered: bool
    landed: int = 0
    landed_s: float = 0.0
    ended_s: float | None = None
    is_crowded: bool = False

    def is_late(self, now_s: float) -> bool:
        """Whether it has waited as long as it may."""
        since_s = self.chosen_s if self.risked else self.began_s
        return now_s - since_s > self.choice.patience_s(self.landed, max(0.0, self.landed_s - since_s))


@dataclass(slots=True, eq=False)
class Reader:
    """The cache's part of a request, from its first look-up to its load. `TieredCache` and `Waits` write it.

    terms:      under which it stores and hits: tenant, adapter, tags and expiry.
    bare_terms: the same without tags, for chunks before index `tags_from`.
    inherited:  terms by chunk index, for chunks that earlier requests used under more terms than this one's.
    renews:     a hit restarts the chunk's time to live.
    is_patient: it is never late here: who made it bounds its wait, by `give_up`, and no tier is blamed.
    pins:       entries that must not be evicted: the request was told HIT, or waits for them.
    waiting:    chunks being promoted that it waits for.
    held_s:     how long it has waited for tiers in all, up to the last plan that was settled.
    since_s:    start of its wait, or when one of its chunks last landed (monotonic); None if it waits for nothing.
    is_asking:  it waits for a tier's answer about what the tier has. awaited: a chunk without an answer yet.
    asks_s:     how long it may wait for answers; None before the first wait. expects_s: when they were expected then.
    risk_s:     how long with trust beyond the bound; None if not asked for, 0 if there is no trust.
    plan:       the cost model's choice, until it is settled.
    cut:        the wait is over: what is not in RAM is a MISS. cut_by: why, where something went wrong.
    refused:    chunks that a settled plan chose to compute. lost_s, plain_s: as in `Text`, by the last settled plan.
    promoted:   by chunk, the tier that it was promoted from.
    """

    terms: Terms = field(default_factory=Terms)
    bare_terms: Terms = field(default_factory=Terms)
    tags_from: int = 0
    inherited: dict[int, Terms] = field(default_factory=dict)
    renews: bool = False
    is_patient: bool = False
    pins: dict[ChunkKey, Entry] = field(default_factory=dict)
    waiting: set[ChunkKey] = field(default_factory=set)
    held_s: float = 0.0
    since_s: float | None = None
    is_asking: bool = False
    awaited: ChunkKey | None = None
    asks_s: float | None = None
    expects_s: float = 0.0
    risk_s: float | None = None
    plan: Plan | None = None
    cut: bool = False
    cut_by: CutBy | None = None
    refused: frozenset[ChunkKey] = frozenset()
    lost_s: float = 0.0
    plain_s: float = 0.0
    promoted: dict[ChunkKey, Tier] = field(default_factory=dict)

    def terms_at(self, index: int) -> Terms:
        """On what terms it keeps the chunk at `index` of its text."""
        return self.inherited.get(index) or self.own_terms_at(index)

    def own_terms_at(self, index: int) -> Terms:
        """The same, but for what it inherited."""
        return self.terms if index >= self.tags_from else self.bare_terms
