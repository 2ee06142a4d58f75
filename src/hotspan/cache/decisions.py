"""What a request is to load: the cost model's choice, once tiers have said what they have or waiting for it is over.

    are its answers there?  -> what it has waited for, and lost -> CostModel.cut, weigh -> Plan

First of its chunks (`choose`); then, where it has any, of its encoder outputs or windows (`are_known`, `weigh`), within
what the first decision left of its bound (`after`).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby

from hotspan.cache.choice import Choice, Part, Run, Text
from hotspan.cache.cost import CostModel
from hotspan.cache.entry import Plan, Reader, State
from hotspan.cache.lower import LowerTiers
from hotspan.cache.ram import RamTier
from hotspan.core.clock import Clock
from hotspan.core.types import Chunk, ChunkKey, Tier

_HANGS_S = 1.0
"""A tier that takes longer to say what it has, and moves nothing meanwhile, is late although nobody waits for it."""


class Decisions:
    """All requests'. Without a cost model all that is there is loaded.

    promote: starts to read a chunk into RAM.
    """

    def __init__(
        self,
        ram: RamTier,
        lower: LowerTiers,
        clock: Clock,
        cost: CostModel | None,
        promote: Callable[[Chunk], object],
    ) -> None:
        self._ram = ram
        self._lower = lower
        self._clock = clock
        self._cost = cost
        self._promote = promote

    def choose(self, groups: Sequence[Sequence[Chunk]], reader: Reader, text: Text) -> bool:
        """Decide what a request is to load; False while a tier has yet to say what it has, and may.

        groups: the chunks of its text by KV cache group, that of which a chain is cut first.
        """
        if reader.plan is not None or self._cost is None:
            return True
        text = self._timed(text, reader)
        first = text.gpu_tokens // text.chunk_tokens
        left = [chunks[first:] for chunks in groups]
        if not self._are_answered(left, reader, text):
            return False
        chain = left[0] if left else []
        if reader.awaited is not None and left:
            unknown = sum(self._is_unknown(chunk.key) for chunk in chain)
            self._cost.note_unanswered(text, unknown * text.chunk_tokens)
        self._note_writes(self._cost)
        self._begin(reader, self._cost.cut(text, self._runs(chain, len(groups))), chain)
        return True

    def after(self, text: Text, first: Reader, reader: Reader) -> Text:
        """The text of a request for a decision that follows.

        first:  which has the one about its chunks. reader: for which it is to be decided, perhaps again.
        """
        lost_s, plain_s, held_s, plan = first.lost_s, first.plain_s, first.held_s, first.plan
        if plan is not None:
            waited_s = (self._clock.monotonic() if plan.ended_s is None else plan.ended_s) - plan.began_s
            lost_s, plain_s = plan.choice.lost_s(waited_s, plan.landed), plan.choice.recompute_s
            held_s += waited_s
        if reader.plain_s:
            lost_s, plain_s = reader.lost_s, reader.plain_s
        return replace(text, lost_s=lost_s, plain_s=plain_s, waited_s=max(text.waited_s - held_s, 0.0))

    def are_known(self, parts: Sequence[Part], reader: Reader, text: Text) -> bool:
        """Whether to decide about parts of a request now: tiers have said which they have, or waiting does not pay."""
        if self._cost is None or reader.plan is not None:
            return True
        text = self._timed(text, reader)
        if not self._are_answered([[part.chunk for part in parts]], reader, text):
            return False
        if reader.awaited is not None:
            unknown = sum(part.tokens for part in parts if self._is_unknown(part.chunk.key))
            self._cost.note_unanswered(text, unknown)
        return True

    def weigh(self, parts: Sequence[Part], reader: Reader, text: Text, rest_s: float = 0.0, *, is_more: bool) -> None:
        """Decide which of a request's parts are loaded, after `are_known`: a plan of those that lie somewhere.

        rest_s, is_more: as `CostModel.weigh` says.
        """
        if self._cost is None or reader.plan is not None:
            return
        self._note_writes(self._cost)
        ranks = {Tier.RAM: 0} | {tier.tier: rank for rank, tier in enumerate(self._lower.tiers, 1)}
        placed = [(ranks[source], part) for part in parts if (source := self._source(part.chunk)) is not None]
        absent_s = sum(part.work_s for part in parts if self._source(part.chunk) is None)
        parts = [part for _, part in sorted(placed, key=lambda each: each[0])]
        chain = [part.chunk for part in parts]
        if is_more and text.plain_s:
            self._cost.note_work(absent_s)
        text = self._timed(text, reader)
        choice = self._cost.weigh(text, self._runs(chain, 1), parts, rest_s + absent_s, is_more=is_more)
        self._begin(reader, choice, chain)

    def advance(self, plan: Plan, ended_s: float = 0.0) -> None:
        """Count what has landed of its chain; the last of it at `ended_s`, or (0) now."""
        before = plan.landed
        while plan.landed < len(plan.chain) and self._is_ready(plan.chain[plan.landed]):
            plan.landed += 1
        if plan.landed > before:
            plan.landed_s = max(plan.landed_s, ended_s or self._clock.monotonic())

    # -- inside ----------------------------------------------------------------------------------------------------

    def _timed(self, text: Text, reader: Reader) -> Text:
        """A text with what its request has waited for a place, and not for tiers. Mutates: the reader, which waits."""
        now_s = self._clock.monotonic()
        reader.since_s = reader.since_s if reader.since_s is not None else now_s
        return replace(text, queued_s=max(text.waited_s - reader.held_s - (now_s - reader.since_s), 0.0))

    def _are_answered(self, groups: Sequence[Sequence[Chunk]], reader: Reader, text: Text) -> bool:
        """Whether all tiers have said what they have of these, or a request waits no longer for it.

        Mutates: the reader's `awaited` is None in the first case.
        """
        assert reader.since_s is not None  # `_timed` set it
        now_s, began_s = self._clock.monotonic(), reader.since_s
        awaited = self._awaited(groups, reader)
        if awaited is not None and self._may_ask(awaited, reader, text, now_s - began_s):
            reader.is_asking = True
            return False
        reader.is_asking = False
        for tier in self._lower.asked(awaited) if awaited is not None else []:
            if (reader.risk_s or reader.asks_s) and now_s - began_s >= reader.expects_s:
                tier.late(began_s)  # else the request had less time than the tier takes when it is well
            elif tier.storage.answer_s > _HANGS_S:
                tier.late(now_s - tier.storage.answer_s)
        return True

    def _note_writes(self, cost: CostModel) -> None:
        """Tell the model what tiers are being given to store."""
        for writer, chunks in self._lower.writing().items():
            cost.note_stores(writer, chunks, self._ram.slab.slot_bytes)

    def _begin(self, reader: Reader, choice: Choice, chain: Sequence[Chunk]) -> None:
        """A request waits as was chosen for it."""
        now_s = self._clock.monotonic()
        began_s = now_s if reader.since_s is None else reader.since_s
        refused = frozenset(chunk.key for chunk in chain[choice.chunks :])
        plan = reader.plan = Plan(choice, chain, refused, began_s, now_s, bool(reader.risk_s), reader.awaited is None)
        reader.asks_s = reader.risk_s = None
        self.advance(plan)
        for chunk in chain[choice.chunks : choice.chunks + choice.probe]:
            if chunk.key not in self._ram.entries:
                self._promote(chunk)

    def _may_ask(self, awaited: ChunkKey, reader: Reader, text: Text, waited_s: float) -> bool:
        """Whether a request may go on to wait for the answer about a chunk."""
        if self._cost is None:
            return False
        if reader.asks_s is None:
            reader.expects_s = self._lower.answer_s(awaited)
            reader.asks_s = self._cost.asking_s(text, reader.expects_s)
        if reader.asks_s and waited_s <= reader.asks_s:
            return True
        if reader.risk_s is None:
            reader.risk_s = self._cost.risk_s(text, self._lower.answer_s(awaited))
        return reader.risk_s > 0 and waited_s <= reader.risk_s

    def _is_ready(self, chunk: Chunk) -> bool:
        entry = self._ram.entries.get(chunk.key)
        return entry is not None and entry.state is State.READY

    def _awaited(self, groups: Sequence[Sequence[Chunk]], reader: Reader) -> ChunkKey | None:
        """A chunk of which no tier has said yet whether it has it; the last one is looked at first."""
        if reader.awaited is not None and self._is_unknown(reader.awaited):
            return reader.awaited
        unknown = (chunk.key for chunks in groups for chunk in chunks if self._is_unknown(chunk.key))
        reader.awaited = next(unknown, None)
        return reader.awaited

    def _is_unknown(self, key: ChunkKey) -> bool:
        return key not in self._ram.entries and self._lower.find(key) is None and bool(self._lower.asked(key))

    def _runs(self, chain: Sequence[Chunk], groups: int) -> list[Run]:
        """Where the chunks of a chain lie, up to the first that is nowhere; each stands for those of all groups."""
        tiers: list[Tier] = []
        for chunk in chain:
            tier = self._source(chunk)
            if tier is None:
                break
            tiers.append(tier)
        size = self._ram.slab.slot_bytes * groups
        return [Run(tier, len(list(run)), size) for tier, run in groupby(tiers)]

    def _source(self, chunk: Chunk) -> Tier | None:
        """Where a request would have a chunk from; None if it is nowhere."""
        entry = self._ram.entries.get(chunk.key)
        source = None if entry is not None and entry.state is not State.PROMOTING else self._lower.find(chunk.key)
        if source is not None:
            return source.tier
        return Tier.RAM if entry is not None else None
