"""For what a request waits, and how long: as the cost model says, or else while nothing at all lands.

It waits for tiers to say what they have, for room in RAM, and for chunks that a lower tier reads into RAM.
"""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal

from hotspan.cache.cost import CostModel
from hotspan.cache.decisions import Decisions
from hotspan.cache.entry import CutBy, Entry, Reader, State
from hotspan.cache.lower import LowerTiers
from hotspan.cache.ram import RamTier
from hotspan.cache.stats import CacheStats
from hotspan.core.clock import Clock
from hotspan.core.terms import Terms
from hotspan.core.types import Chunk, ChunkKey, Lookup, Tier
from hotspan.tiers.base import Transfer
from hotspan.tiers.lower import LowerTier
from hotspan.tiers.pace import Pace

_QUEUE_PATIENCE = 20
"""Without a cost model: how many times longer a request waits in the queue while others' chunks land."""


@dataclass(frozen=True, slots=True, eq=False)
class _Promotion:
    """A chunk that a lower tier reads into RAM."""

    entry: Entry
    source: LowerTier


class Waits:
    """All requests', and the promotions that they wait for.

    patience_s: how long one waits while nothing lands, where no cost model says so. pace: of loads nobody waits for.
    """

    def __init__(
        self,
        ram: RamTier,
        lower: LowerTiers,
        stats: CacheStats,
        clock: Clock,
        patience_s: float,
        cost: CostModel | None,
        pace: Pace | None = None,
    ) -> None:
        self._pace = pace
        self._cost = cost
        self._ram = ram
        self._lower = lower
        self._stats = stats
        self._clock = clock
        self._patience_s = patience_s
        self._landed_s = 0.0
        self.decisions = Decisions(ram, lower, clock, cost, self.promote)
        self._promoting: dict[ChunkKey, _Promotion] = {}
        self._readers: dict[ChunkKey, list[Reader]] = {}  # of chunks that are on their way to RAM
        self._waiters: set[Reader] = set()

    # -- promotions ------------------------------------------------------------------------------------------------

    @property
    def is_promoting(self) -> bool:
        """Whether chunks are being promoted."""
        return bool(self._promoting)

    def promoting(self) -> list[Entry]:
        """The entries of chunks that are being promoted, forgotten ones among them."""
        return [each.entry for each in self._promoting.values()]

    def sources(self, keys: AbstractSet[ChunkKey] | None = None) -> set[LowerTier]:
        """The tiers from which chunks are being promoted: these, or all."""
        found = self._promoting if keys is None else self._promoting.keys() & keys
        return {self._promoting[key].source for key in found}

    @property
    def waiting(self) -> int:
        """How many requests wait for chunks that are being promoted."""
        return len(self._waiters)

    @property
    def is_waited_for(self) -> bool:
        """Whether a request waits for a chunk that is being promoted."""
        return bool(self._readers)

    def promote(self, chunk: Chunk, *, is_modest: bool = False) -> Entry | None:
        """Start to read a chunk from a lower tier into RAM; None if it is not there or RAM has no room.

        is_modest: as `RamTier.add` says.
        """
        source = self._lower.find(chunk.key)
        if source is None:
            return None
        if chunk.key in self._promoting or chunk.key in self._ram.forgotten:
            return None  # forgotten, and its slot is still in use: two of one name could not be told apart
        terms = self._lower.terms(chunk.key) or Terms()
        entry = self._ram.add(chunk, terms, State.PROMOTING, self._lower, is_modest=is_modest)
        if entry is None:
            return None
        if not source.submit_load(chunk.key, self._ram.slab.slot(entry.slot)):
            self._ram.forget(entry)
            return None
        if self._cost is not None:
            self._cost.begin_load(source.tier, self._ram.slab.slot_bytes)
        entry.moving += 1
        self._promoting[chunk.key] = _Promotion(entry, source)
        return entry

    def end_promotion(self, tier: Tier, transfer: Transfer) -> Entry:
        """A promotion ended: its entry, whose slot the tier uses no more. If it failed, its readers' waits are over."""
        entry = self._promoting.pop(transfer.key).entry
        entry.moving -= 1
        if self._cost is not None:
            seconds = transfer.seconds if transfer.fault is None else None
            self._cost.end_load(tier, self._ram.slab.slot_bytes, seconds, transfer.ended_s or None)
        if not entry.deleted and transfer.fault is None:
            entry.state = State.READY
            self.wake(transfer.key, tier, transfer.ended_s)
        elif not entry.deleted:
            for reader in self._readers.get(transfer.key, ()):
                reader.cut, reader.cut_by = True, "fault"
        return entry

    # -- a request ---------------------------------------------------------------------------------------------------

    def is_late(self, reader: Reader) -> bool:
        """Whether a request has waited long enough.

        Without a plan: nothing has landed for too long. Anyone's chunk counts, since a reader may stand behind others
        in the tier's queue, but not for ever: one I/O may hang while others go on.
        """
        now_s = self._clock.monotonic()
        if reader.since_s is None:
            reader.since_s = now_s
        if reader.is_patient:
            return False
        if reader.plan is not None:
            return reader.plan.is_late(now_s)
        own_s, any_s = now_s - reader.since_s, now_s - max(reader.since_s, self._landed_s)
        return any_s > self._patience_s or own_s > _QUEUE_PATIENCE * self._patience_s

    def join(self, key: ChunkKey, reader: Reader) -> bool:
        """A request waits for a chunk that is on its way to RAM; False if it does so already."""
        if key in reader.waiting:
            return False
        if self._pace is not None:
            self._pace.is_slow = False
        reader.waiting.add(key)
        self._waiters.add(reader)
        self._readers.setdefault(key, []).append(reader)
        return True

    def await_landing(self, reader: Reader) -> Lookup:
        """What to tell a request that waits for chunks."""
        if not self.is_late(reader):
            return Lookup.RETRY
        since_s = reader.plan.chosen_s if reader.plan is not None else reader.since_s
        for source in self.sources(reader.waiting):
            source.late(since_s or 0.0)
        return self._cut(reader, "late")

    def await_room(self, reader: Reader, is_loading: bool) -> Lookup:
        """What to tell one whose chunk could not be promoted: wait a little if others are about to make room.

        is_loading: whether the engine copies chunks, which may go afterwards.
        """
        if reader.plan is not None:
            reader.plan.is_crowded = True
        others_move = is_loading or len(self._promoting) > len(reader.waiting)
        if not others_move or reader.pins or self.is_late(reader):
            return self._cut(reader, "room")
        return Lookup.RETRY

    def await_answer(self, chunk: Chunk, reader: Reader) -> Lookup:
        """What to tell one whose chunk no tier is known to have: wait a little for those that ask elsewhere."""
        asked = self._lower.asked(chunk.key)
        if not asked or reader.plan is not None:  # a plan is made when the answers are there, or late
            return Lookup.MISS
        reader.is_asking = True
        if not self.is_late(reader):
            return Lookup.RETRY
        for tier in asked:
            tier.late(reader.since_s or 0.0)
        return self._cut(reader, "unanswered")

    def wake(self, key: ChunkKey, source: Tier | None, ended_s: float = 0.0) -> None:
        """Tell the readers of a chunk that it came to RAM from `source`, or (None) that it never will.

        ended_s: when it landed, which a step of the engine ago may be; 0 for now.
        """
        landed_s = None
        if source is not None:
            landed_s = self._landed_s = self._clock.monotonic()
        for reader in self._readers.pop(key, ()):
            reader.waiting.discard(key)
            reader.since_s = landed_s if reader.waiting else None
            if source is not None:
                reader.promoted[key] = source
            if not reader.waiting:
                self._waiters.discard(reader)
            if reader.plan is not None:
                self.decisions.advance(reader.plan, ended_s)
                if not reader.waiting:
                    self._end(reader, reader.plan.landed_s)

    def reconsider(self, reader: Reader) -> None:
        """A request could not begin after all: what it was denied is decided anew when it is looked up again.

        Meanwhile it loses nothing by waiting, and there may be room in RAM, or an answer.
        """
        if reader.cut or (reader.plan is not None and (reader.plan.refused or not reader.plan.answered)):
            self._learn(reader)
            reader.cut = reader.is_asking = False
            reader.since_s = reader.awaited = reader.cut_by = None

    def release(self, reader: Reader) -> None:
        """A request runs, or is gone: it waits for nothing, and the model learns what became of its choice."""
        for key in reader.waiting:
            readers = self._readers[key]
            readers.remove(reader)
            if not readers:
                del self._readers[key]
        reader.waiting.clear()
        self._waiters.discard(reader)
        self._learn(reader)
        reader.since_s = None
        reader.is_asking = False

    # -- inside ----------------------------------------------------------------------------------------------------

    def _cut(self, reader: Reader, why: CutBy) -> Lookup:
        reader.cut, reader.cut_by = True, why
        self._end(reader)
        self._stats.cuts += 1
        return Lookup.MISS

    def _end(self, reader: Reader, ended_s: float = 0.0) -> None:
        """A request waits no longer, since `ended_s` or (0) from now on."""
        if reader.plan is not None and reader.plan.ended_s is None:
            reader.plan.ended_s = max(ended_s, reader.plan.chosen_s) if ended_s else self._clock.monotonic()

    def _learn(self, reader: Reader) -> None:
        """The model learns what became of a request's choice."""
        plan, reader.plan = reader.plan, None
        if plan is not None and self._cost is not None:
            reader.refused = plan.refused
            ended_s = plan.ended_s if plan.ended_s is not None else self._clock.monotonic()
            reader.held_s += ended_s - plan.began_s
            waited_s, asked_s = ended_s - plan.chosen_s, plan.chosen_s - plan.began_s
            reader.lost_s, reader.plain_s = plan.choice.lost_s(waited_s + asked_s, plan.landed), plan.choice.recompute_s
            waited_s = 0.0 if plan.is_crowded else waited_s
            cut: Literal["late", "room"] | None = None
            if reader.cut:
                cut = "room" if plan.is_crowded else "late"
            risked = plan.risked and plan.answered
            self._cost.settle(plan.choice, waited_s, plan.landed, asked_s=asked_s, risked=risked, cut=cut)
