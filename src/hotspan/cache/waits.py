"""For what a request waits, and how long: as the cost model says, or else while nothing at all lands."""

from collections.abc import Sequence
from itertools import groupby

from hotspan.cache.cost import CostModel, Run, Text
from hotspan.cache.entry import Plan, Reader, State
from hotspan.cache.lower import LowerTiers
from hotspan.cache.ram import RamTier
from hotspan.core.clock import Clock
from hotspan.core.types import Chunk, ChunkKey, Tier

_QUEUE_PATIENCE = 20
"""Without a cost model: how many times longer a request waits in the queue while others' chunks land."""


class Waits:
    """All requests'.

    patience_s: how long one waits while nothing lands, where no cost model says so.
    """

    def __init__(
        self, ram: RamTier, lower: LowerTiers, clock: Clock, patience_s: float, cost: CostModel | None
    ) -> None:
        self.cost = cost
        self._ram = ram
        self._lower = lower
        self._clock = clock
        self._patience_s = patience_s
        self._landed_s = 0.0

    def choose(self, groups: Sequence[Sequence[Chunk]], reader: Reader, text: Text) -> list[Chunk] | None:
        """Decide what a request is to load; None while a tier has yet to say what it has, and may.

        groups: the chunks of its text by KV cache group, that of which a chain is cut first.
        Returns the chunks to promote although it does not wait for them.
        """
        if reader.plan is not None or self.cost is None:
            return []
        now_s = self._clock.monotonic()
        began_s = reader.since_s = reader.since_s if reader.since_s is not None else now_s
        first = text.gpu_tokens // text.chunk_tokens
        awaited = self._awaited(groups, first, reader)
        reader.is_asking = awaited is not None and self._may_ask(self.cost, reader, text, now_s - began_s)
        if reader.is_asking:
            return None
        for tier in self._lower.asked(awaited) if awaited is not None else []:
            tier.late()
        chain = groups[0][first:] if groups else []
        choice = self.cost.cut(text, self._runs(chain, len(groups)))
        refused = frozenset(chunk.key for chunk in chain[choice.chunks :])
        reader.plan = Plan(choice, chain, refused, began_s, now_s, bool(reader.risk_s), awaited is None)
        reader.asks_s = reader.risk_s = None
        self._advance(reader.plan)
        return list(chain[choice.chunks : choice.chunks + choice.probe])

    def is_late(self, reader: Reader) -> bool:
        """Whether a request has waited long enough.

        Without a plan: nothing has landed for too long. Anyone's chunk counts, since a reader may stand behind others
        in the tier's queue, but not for ever: one I/O may hang while others go on.
        """
        now_s = self._clock.monotonic()
        if reader.since_s is None:
            reader.since_s = now_s
        if reader.plan is not None:
            return reader.plan.is_late(now_s)
        own_s, any_s = now_s - reader.since_s, now_s - max(reader.since_s, self._landed_s)
        return any_s > self._patience_s or own_s > _QUEUE_PATIENCE * self._patience_s

    def landed(self) -> float:
        """A chunk came to RAM; when (monotonic)."""
        self._landed_s = self._clock.monotonic()
        return self._landed_s

    def progress(self, reader: Reader) -> None:
        """A chunk that a request waited for came, or never will."""
        if reader.plan is not None:
            self._advance(reader.plan)
            if not reader.waiting:
                self.end(reader)

    def end(self, reader: Reader) -> None:
        """A request waits no longer."""
        if reader.plan is not None and reader.plan.ended_s is None:
            reader.plan.ended_s = self._clock.monotonic()

    def reconsider(self, reader: Reader) -> None:
        """A request could not begin after all: what it was denied is decided anew when it is looked up again.

        Meanwhile it loses nothing by waiting, and there may be room in RAM, or an answer.
        """
        if reader.cut or (reader.plan is not None and (reader.plan.refused or not reader.plan.answered)):
            self.settle(reader)
            reader.cut = reader.is_asking = False
            reader.since_s = reader.awaited = None

    def settle(self, reader: Reader) -> None:
        """A request runs, or is gone: the model learns what became of its choice."""
        plan, reader.plan = reader.plan, None
        if plan is not None and self.cost is not None:
            ended_s = plan.ended_s if plan.ended_s is not None else self._clock.monotonic()
            waited_s, asked_s = ended_s - plan.chosen_s, plan.chosen_s - plan.began_s
            waited_s = 0.0 if plan.is_crowded else waited_s
            self.cost.settle(plan.choice, waited_s, plan.landed, asked_s=asked_s, risked=plan.risked and plan.answered)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _may_ask(self, cost: CostModel, reader: Reader, text: Text, waited_s: float) -> bool:
        """Whether a request may go on to wait for an answer."""
        if reader.asks_s is None:
            reader.asks_s = cost.asking_s(text)
        if waited_s <= reader.asks_s:
            return True
        if reader.risk_s is None:
            reader.risk_s = cost.risk_s(text)
        return waited_s <= reader.risk_s

    def _advance(self, plan: Plan) -> None:
        before = plan.landed
        while plan.landed < len(plan.chain) and self._is_ready(plan.chain[plan.landed]):
            plan.landed += 1
        if plan.landed > before:
            plan.landed_s = self._clock.monotonic()

    def _is_ready(self, chunk: Chunk) -> bool:
        entry = self._ram.entries.get(chunk.key)
        return entry is not None and entry.state is State.READY

    def _awaited(self, groups: Sequence[Sequence[Chunk]], first: int, reader: Reader) -> ChunkKey | None:
        """A chunk of which no tier has said yet whether it has it; the last one is looked at first."""
        if reader.awaited is not None and self._is_unknown(reader.awaited):
            return reader.awaited
        unknown = (chunk.key for chunks in groups for chunk in chunks[first:] if self._is_unknown(chunk.key))
        reader.awaited = next(unknown, None)
        return reader.awaited

    def _is_unknown(self, key: ChunkKey) -> bool:
        return key not in self._ram.entries and self._lower.find(key) is None and bool(self._lower.asked(key))

    def _runs(self, chain: Sequence[Chunk], groups: int) -> list[Run]:
        """Where the chunks of a chain lie, up to the first that is nowhere; each stands for those of all groups."""
        tiers: list[Tier] = []
        for chunk in chain:
            entry = self._ram.entries.get(chunk.key)
            source = None if entry is not None and entry.state is not State.PROMOTING else self._lower.find(chunk.key)
            if entry is None and source is None:
                break
            tiers.append(source.tier if source is not None else Tier.RAM)
        size = self._ram.slab.slot_bytes * groups
        return [Run(tier, len(list(run)), size) for tier, run in groupby(tiers)]
