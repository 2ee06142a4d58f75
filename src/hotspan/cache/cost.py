"""Load or compute? For one request, before it computes anything: how much of its prefix to load from lower tiers.

    first token = max(loads of the tiers, the step that runs, the prompts before it) + computing the rest
    total = first token + what other requests wait longer, for the engine and for the tiers

The k with the least total is taken if it saves enough (docs/design/cost.md). What was predicted may be wrong, so a
request also gets a patience, which grows with every chunk that lands by what that chunk saves. At whatever moment it
runs out, the request can compute what has not landed, and its first token still comes within

    1.05 x (what it takes without lower tiers, with the same arrivals) + 50 ms, and 2 x

as far as the engine's speed is known. A load that is well worth its time, but brings its first chunk later than that,
needs trust: one in a hundred requests may break the first bound, and each request earns half of that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Literal

import numpy as np
import numpy.typing as npt

from hotspan.cache.choice import BOUND_S, BOUND_SHARE, RESERVE, Choice, Part, Run, Seconds, Text
from hotspan.cache.cost_report import CostReport, estimate
from hotspan.cache.entry import small_part
from hotspan.cache.rates import LEAST_FREE, Accuracy, Fit, Prefill, TierSpeed
from hotspan.cache.refusals import Refusals
from hotspan.core.clock import Clock, SystemClock
from hotspan.core.types import MIB, Tier

_MARGIN = 0.03
"""The least share of a request's computing that a load has to save."""

_TRUST_EARNED, _MAX_TRUST = 0.005, 10.0
_UNKNOWN_TOKENS_PER_S = 10_000
"""While the engine's speed is unknown, a tier that brings less is not waited for."""

_COPY_PRIOR = (1.0, 1 / (64 * MIB))
_ENCODE_PRIOR, _ENCODE_DOUBTS = (64.0, 1.0), 4
"""Before anything is known: an encoder's run costs as much as 64 rows of its output."""


@dataclass(frozen=True, slots=True, eq=False)
class _Forecast:
    """What happens if a request takes the first k chunks, for all k from 0.

    waits:   until they are up, by tier. late_s: until all are, if the tiers are as slow as they sometimes are.
    rest_s:  of the engine, for the rest. copies_s: beside the engine, before that.
    total_s: to this request's first token, and what all others wait more.
    tokens:  of the first k chunks.
    """

    waits: Mapping[Tier, Seconds]
    late_s: Seconds
    rest_s: Seconds
    copies_s: Seconds
    total_s: Seconds
    tokens: npt.NDArray[np.int64]


class CostModel:
    """One engine's. All calls come from the scheduler's thread and return at once.

    step_tokens: the most tokens that the engine computes in one step.
    lanes:       the lower tiers, and how many chunks each moves at a time.
    ram_chunks:  of the RAM tier; a look at a tier's speed takes a small part of them at most.
    copies_hold: whether copies from RAM hold up the engine, whose cores make them, and so all who wait for it.
    """

    def __init__(
        self,
        step_tokens: int,
        lanes: Mapping[Tier, int],
        clock: Clock | None = None,
        ram_chunks: int = 1 << 10,
        *,
        copies_hold: bool = True,
    ) -> None:
        self._copies_hold = copies_hold
        self._clock = clock or SystemClock()
        self._most_probed = small_part(ram_chunks)
        self._prefill = Prefill(step_tokens)
        self._copies = Fit(_COPY_PRIOR, doubts=2)
        self._encoding = Fit(_ENCODE_PRIOR, _ENCODE_DOUBTS)
        self._tiers = {tier: TierSpeed(count) for tier, count in lanes.items()}
        self._loads = {tier: Accuracy() for tier in lanes}
        self._trust = 1.0
        self._plain_s = 0.0  # when an engine that loads nothing would have computed all requests so far
        self._refusals = Refusals()
        self._asked = self._loaded = self._refused = self._probed = self._late = 0

    # -- learn -----------------------------------------------------------------------------------------------------

    def observe_step(self, tokens: int, context_tokens: int, seconds: float) -> None:
        """The engine ran one step.

        tokens:         of prompts, computed in it; decoded ones do not count. A step without any teaches nothing.
        context_tokens: the sum, over these tokens, of how many stand before each.
        """
        self._prefill.observe_step(tokens, context_tokens, seconds)

    def observe_copy(self, size: int, seconds: float) -> None:
        """The engine copied `size` bytes of one request from RAM."""
        self._copies.observe((1.0, float(size)), seconds)

    def observe_encoding(self, rows: int, seconds: float) -> None:
        """The engine's encoder computed so many rows of outputs in one step."""
        self._encoding.observe((1.0, float(rows)), seconds)

    def begin_load(self, tier: Tier, size: int) -> None:
        """A chunk was queued at a tier, for whomever."""
        self._tiers[tier].begin(size, self._clock.monotonic())

    def end_load(self, tier: Tier, size: int, seconds: float | None, ended_s: float | None = None) -> None:
        """A chunk landed, `seconds` after its transfer left the queue (`Transfer.seconds`); None: it never will.

        ended_s: when (monotonic); None for now. The scheduler learns of it when a step has ended.
        """
        self._tiers[tier].end(size, seconds, self._clock.monotonic() if ended_s is None else ended_s)

    def note_stores(self, tier: Tier, chunks: int, chunk_bytes: int) -> None:
        """A tier is being given so many chunks to store."""
        self._tiers[tier].note_stores(chunks, chunk_bytes)

    def note_work(self, seconds: float) -> None:
        """A request that was decided about takes so much more of the engine, with tiers or without."""
        self._plain_s += seconds

    def note_unanswered(self, text: Text, tokens: int) -> None:
        """A store did not say in time whether it has so many tokens of a request."""
        self._refusals.note("unanswered", tokens, is_busy=text.is_engine_busy)

    def settle(
        self,
        choice: Choice,
        waited_s: float,
        landed: int,
        *,
        asked_s: float = 0.0,
        risked: bool = False,
        cut: Literal["late", "room"] | None = None,
    ) -> None:
        """The wait of a request is over, whatever the reason; once for every choice.

        waited_s: since the choice. asked_s: for answers, before it; `risked` if `risk_s` allowed that.
        landed:   how many chunks from the front of the chain are in RAM. cut: why it goes on without the others.
        """
        if choice.tier is None:
            return
        if cut is not None and landed < choice.chunks:
            tokens = int(choice.tokens[choice.chunks] - choice.tokens[landed])
            saved_s = float(choice.saved_s[choice.chunks] - choice.saved_s[landed])
            self._refusals.note(cut, tokens, is_busy=choice.is_busy, saved_s=saved_s)
        is_whole = landed >= choice.chunks
        lost_s = choice.lost_s(waited_s + asked_s, landed)
        if is_whole or waited_s >= choice.patience_s(landed, 0.0):  # else it was aborted, or met a fault
            self._late += not is_whole
            self._loads[choice.tier] = self._loads[choice.tier].after(choice.load_s, waited_s)
            if choice.recompute_s:
                self._tiers[choice.tier].judge(choice.gained(waited_s, landed))
        if lost_s <= choice.bound_s:
            self._trust = min(self._trust + choice.is_risky + risked, _MAX_TRUST)

    # -- ask -------------------------------------------------------------------------------------------------------

    def prefill_s(self, from_token: int, to_token: int) -> float:
        """To compute the tokens [from_token, to_token) of a text; 0 while unknown."""
        return float(self._prefill.seconds(from_token, to_token))

    @property
    def prefill_rates(self) -> tuple[float, float, float] | None:
        """Seconds per step, per token computed, and per token that one of these attends to; None while unknown."""
        if not self._prefill.is_known:
            return None
        per_step_s, per_token_s, per_attended_s = self._prefill.fit.rates
        return per_step_s, per_token_s, per_attended_s

    def copy_s(self, size: int) -> float:
        """To copy `size` bytes from RAM to the engine; 0 while unknown."""
        return self._copies.predict((1.0, float(size)))

    def encode_s(self, rows: int) -> float:
        """To compute so many rows of the encoder's outputs in one step; 0 while unknown."""
        return self._encoding.predict((1.0, float(rows)))

    def asking_s(self, text: Text, answer_s: float) -> float:
        """How long a request should wait to be told what a tier has; as long again is left for what is there then.

        No longer than it waits for the engine in any case, if an answer takes longer than that. answer_s: so long.
        """
        patience_s = self._asking_s(text)
        return patience_s if answer_s <= patience_s else text.busy_s

    def risk_s(self, text: Text, answer_s: float) -> float:
        """How long it may wait in all for a tier whose answer takes longer than that, and 0 without trust.

        Takes some, which `settle` gives back when the wait was worth it.
        """
        risk_s = text.busy_s + (text.queued_s + self.prefill_s(text.gpu_tokens, text.total_tokens)) / 2
        risk_s -= max(text.lost_s, 0.0)
        least_s = max(self._asking_s(text), answer_s)
        if self._trust < 1 or not self._prefill.is_known or risk_s <= least_s:
            return 0.0
        self._trust -= 1
        return risk_s

    def cut(self, text: Text, chain: Sequence[Run]) -> Choice:
        """How many chunks of a request to take. Ask once a request, after noting what has landed. Costs about 0.1 ms.

        chain: where its chunks lie, from the first that the engine has not whole.
        """
        self._asked += 1
        self._trust = min(self._trust + _TRUST_EARNED, _MAX_TRUST)
        chain = [run for run in chain if run.chunks > 0]
        chunks = sum(run.chunks for run in chain)
        ram = sum(run.chunks for run in takewhile(lambda run: run.tier is Tier.RAM, chain))
        waits = self._waits(chain)
        if ram == chunks or not self._prefill.is_known:
            self._loaded += chunks > ram
            have = min(text.gpu_tokens + ram * text.chunk_tokens, text.total_tokens)
            plain_s = self.prefill_s(have, text.total_tokens)
            choice = _whole(ram, waits, np.arange(chunks + 1) * text.chunk_tokens)
            queue_s = self._queue_s(text, plain_s)
            if chunks > ram:
                return choice
            return replace(choice, recompute_s=queue_s + plain_s, saved_s=choice.saved_s + queue_s)
        first = text.gpu_tokens // text.chunk_tokens
        haves = np.minimum(np.arange(first, first + chunks + 1) * text.chunk_tokens, max(text.total_tokens - 1, 0))
        haves[0] = text.gpu_tokens
        rest_s, copies_s = self._prefill.seconds(haves, text.total_tokens), self._copying(chain)
        if self._copies_hold:
            rest_s, copies_s = rest_s + copies_s, np.zeros(chunks + 1)
        factor = self._prefill.factor(int(haves[ram]), text.total_tokens)
        queue_s = self._queue_s(text, float(rest_s[ram]))
        forecast = self._forecast(waits, rest_s, copies_s, text, np.arange(chunks + 1) * text.chunk_tokens)
        return self._choose(chain, ram, text, forecast, queue_s + float(rest_s[ram]), queue_s, 1 / factor)

    def weigh(self, text: Text, chain: Sequence[Run], parts: Sequence[Part], rest_s: float, *, is_more: bool) -> Choice:
        """As `cut`, how many of a request's parts to take; those that are refused are made by the engine.

        chain: where the parts lie, in their order: those in RAM first. rest_s: what is computed in any case.
        is_more: making them takes the engine's time besides what was decided about before.
        """
        ram = sum(run.chunks for run in takewhile(lambda run: run.tier is Tier.RAM, chain))
        waits = self._waits(chain)
        tokens = np.cumsum([0, *(part.tokens for part in parts)], dtype=np.int64)
        made_s = np.cumsum([0.0, *(part.work_s for part in parts)])
        rests_s = made_s[-1] - made_s + rest_s
        if ram == len(parts):
            return _whole(ram, waits, tokens)
        self._asked += 1
        if not made_s[-1] - made_s[ram]:
            self._loaded += 1
            return _whole(ram, waits, tokens)
        forecast = self._forecast(waits, rests_s, np.zeros(len(rests_s)), text, tokens)
        if not text.plain_s:
            queue_s = self._queue_s(text, float(rests_s[ram]))
            return self._choose(chain, ram, text, forecast, queue_s + float(rests_s[ram]), queue_s)
        more_s = float(rests_s[ram] - rest_s) if is_more else 0.0
        self._plain_s += more_s
        return self._choose(chain, ram, text, forecast, text.plain_s + more_s, -text.lost_s)

    def report(self) -> CostReport:
        """All of it, as it is now."""
        per_token_s = self._prefill.fit.rates[1]
        return CostReport(
            asked=self._asked,
            loaded=self._loaded,
            refused=self._refused,
            probed=self._probed,
            late=self._late,
            prefill=self._prefill.accuracy,
            loads=dict(self._loads),
            tiers={tier: estimate(speed) for tier, speed in self._tiers.items()},
            tokens_per_s=1 / per_token_s if per_token_s else 0.0,
            trust=self._trust,
            refusals=self._refusals.counts(),
        )

    def check(self) -> None:
        """Raise AssertionError if what it knows can't be."""
        if not 0 <= self._trust <= _MAX_TRUST:
            raise AssertionError(f"trust is {self._trust}")
        rates = [
            self._prefill.fit.rates,
            self._copies.rates,
            self._encoding.rates,
            *(speed.fit.rates for speed in self._tiers.values()),
        ]
        if not all(0 <= rate < float("inf") for each in rates for rate in each):
            raise AssertionError(f"a rate is not one: {rates}")

    # -- inside ----------------------------------------------------------------------------------------------------

    def _asking_s(self, text: Text) -> float:
        """How long a request may wait for an answer."""
        recompute_s = self.prefill_s(text.gpu_tokens, text.total_tokens)
        patience_s = RESERVE * (BOUND_SHARE * (text.queued_s + recompute_s) + BOUND_S) / 2
        patience_s = max(patience_s - max(text.lost_s, 0.0), 0.0)
        return text.busy_s + (min(patience_s, recompute_s) if self._prefill.is_known else patience_s)

    def _waits(self, chain: Sequence[Run]) -> dict[Tier, Seconds]:
        """By tier: until those of the first k chunks are up that lie there. Raises: KeyError for an unknown tier."""
        now_s = self._clock.monotonic()
        lengths = [run.chunks for run in chain]
        waits = {}
        for tier in {run.tier for run in chain} - {Tier.RAM}:
            counts = _sums([run.tier is tier for run in chain], lengths)
            sizes = _sums([run.chunk_bytes * (run.tier is tier) for run in chain], lengths)
            waits[tier] = self._tiers[tier].load_s(counts, sizes, now_s) * (counts > 0)
        return waits

    def _copying(self, chain: Sequence[Run]) -> Seconds:
        """To copy the first k chunks from RAM to the engine."""
        sizes = _sums([run.chunk_bytes for run in chain], [run.chunks for run in chain])
        latency_s, per_byte_s = self._copies.rates
        return np.asarray((per_byte_s * sizes + latency_s) * (sizes > 0), np.float64)

    def _forecast(
        self,
        waits: Mapping[Tier, Seconds],
        rest_s: Seconds,
        copies_s: Seconds,
        text: Text,
        tokens: npt.NDArray[np.int64],
    ) -> _Forecast:
        late_s = np.maximum.reduce([wait_s * self._tiers[tier].factor for tier, wait_s in waits.items()])
        is_waiting = late_s > 0
        # What lands while a step runs is used by the next one.
        wait_s = np.maximum(np.maximum.reduce(list(waits.values())), text.step_s) * is_waiting
        late_s = np.maximum(late_s, text.step_s) * is_waiting
        own_s = np.maximum(wait_s + copies_s, text.busy_s) + rest_s
        coming = text.per_s * (text.busy_s + rest_s / 2) / max(1 - text.utilization, LEAST_FREE)
        total_s = own_s + (text.others + coming) * rest_s
        queue_s, now_s = 0.0, self._clock.monotonic()
        for tier, load_s in waits.items():
            speed = self._tiers[tier]
            tier_queue_s = speed.queue_s(now_s)
            work_s = np.maximum(load_s - tier_queue_s, 0.0)
            total_s = total_s + speed.coming(tier_queue_s + work_s / 2, now_s) * work_s
            queue_s = max(queue_s, tier_queue_s)
        total_s = total_s + text.waiting * np.maximum(rest_s - queue_s / 2, 0.0)
        return _Forecast(waits, late_s, rest_s, copies_s, total_s, tokens)

    def _choose(
        self,
        chain: Sequence[Run],
        ram: int,
        text: Text,
        forecast: _Forecast,
        recompute_s: float,
        credit_s: float,
        known: float = 1.0,
    ) -> Choice:
        """The best choice, between the `ram` chunks that are up and all.

        recompute_s: to its first token without tiers. credit_s: how long it may wait for nothing and be no later.
        known: the share of the predicted computing that can be counted on.
        """
        late_s, rest_s = forecast.late_s, forecast.rest_s
        after_s = rest_s + forecast.copies_s
        spared_s = np.maximum(after_s[ram] - after_s, 0.0)
        least_s, earned_s = known * recompute_s + text.queued_s, known * (spared_s + credit_s)
        patiences_s = earned_s + min(RESERVE * (BOUND_SHARE * least_s + BOUND_S), least_s)
        limits_s = earned_s + least_s
        sure, last = (_reach(late_s, ram, within_s) for within_s in (patiences_s, np.maximum(limits_s, patiences_s)))
        margin_s = _MARGIN * (1 + text.others) * float(rest_s[ram])
        best = _best(forecast.total_s, ram, last, margin_s)
        is_risky = best > sure and self._trust >= 1
        taken = best if is_risky or best <= sure else _best(forecast.total_s, ram, sure, margin_s)
        if taken < len(rest_s) - 1:
            saved_s = float(forecast.total_s[taken] - forecast.total_s[best])
            tokens = int(forecast.tokens[-1] - forecast.tokens[taken])
            self._refusals.note(
                "bound" if taken < best else "slower", tokens, is_busy=text.is_engine_busy, saved_s=saved_s
            )
        if is_risky:
            self._trust -= 1
            next_s = np.append(late_s[1:], late_s[-1])
            patiences_s = np.maximum(patiences_s, np.minimum(limits_s, 2 * next_s + BOUND_S))
        tier = _slowest(forecast.waits, taken) if taken > ram else None
        worth_s = (1 + text.others) * spared_s + max(text.busy_s, text.step_s)
        return Choice(
            chunks=taken,
            probe=self._note(chain, ram, taken),
            tier=tier,
            load_s=float(forecast.waits[tier][taken]) if tier else 0.0,
            rest_s=float(rest_s[taken]),
            recompute_s=recompute_s,
            is_risky=is_risky,
            saved_s=spared_s + credit_s,
            patiences_s=patiences_s,
            worth_s=worth_s,
            tokens=forecast.tokens,
            is_busy=text.is_engine_busy,
            queued_s=text.queued_s,
        )

    def _queue_s(self, text: Text, rest_s: float) -> float:
        """How long from now a request would wait for the engine if nothing were ever loaded, and note that it came."""
        now_s = self._clock.monotonic()
        begin_s = max(self._plain_s, now_s - text.waited_s)
        self._plain_s = begin_s + rest_s
        # One client that asks again once it is answered would not have come so soon: nobody was before it in a queue.
        is_alone = not (text.others or text.waiting)
        return text.busy_s if is_alone else max(begin_s - now_s, text.busy_s)

    def _note(self, chain: Sequence[Run], ram: int, taken: int) -> int:
        """Count a choice, and tell the tiers; returns how many chunks to probe."""
        self._loaded += taken > ram
        at = 0
        for run in chain:
            if run.tier is not Tier.RAM and at >= taken:
                self._refused += 1
                if at > taken:
                    return 0
                probe = min(self._tiers[run.tier].refuse(self._clock.monotonic()), run.chunks, self._most_probed)
                self._probed += probe
                return probe
            if run.tier is not Tier.RAM:
                size = min(run.chunks, taken - at) * run.chunk_bytes
                self._tiers[run.tier].take(size, self._clock.monotonic())
            at += run.chunks
        self._refused += taken < at
        return 0


def _whole(ram: int, waits: Mapping[Tier, Seconds], tokens: npt.NDArray[np.int64]) -> Choice:
    """Take all: lower tiers have nothing, or computing has no known cost, and one is assumed."""
    chunks = len(tokens) - 1
    tier = _slowest(waits, chunks)
    load_s = float(waits[tier][chunks]) if tier else 0.0
    saved_s = np.maximum(tokens - tokens[ram], 0) / _UNKNOWN_TOKENS_PER_S
    return Choice(
        chunks=chunks,
        probe=0,
        tier=tier,
        load_s=load_s,
        rest_s=0.0,
        recompute_s=0.0,
        is_risky=False,
        saved_s=saved_s,
        patiences_s=saved_s + RESERVE * BOUND_S,
        worth_s=saved_s,
        tokens=tokens,
    )


def _slowest(waits: Mapping[Tier, Seconds], taken: int) -> Tier | None:
    return max(waits, key=lambda tier: float(waits[tier][taken]), default=None)


def _reach(late_s: Seconds, ram: int, patiences_s: Seconds) -> int:
    """How many chunks land in time, each before the patience ends that those before it have bought."""
    over = np.flatnonzero(late_s[ram + 1 :] > patiences_s[ram:-1])
    return ram + int(over[0]) if len(over) else len(late_s) - 1


def _best(total_s: Seconds, first: int, last: int, least_s: float) -> int:
    """The k in [first, last] with the least total; `first` if that does not save more than `least_s`."""
    best = first + int(np.argmin(total_s[first : last + 1]))
    return best if total_s[first] - total_s[best] > least_s else first


def _sums(values: Sequence[int], lengths: Sequence[int]) -> npt.NDArray[np.int64]:
    """Sums over the first k chunks of what each chunk of a run adds."""
    out = np.zeros(sum(lengths) + 1, np.int64)
    np.cumsum(np.repeat(np.array(values, np.int64), lengths), out=out[1:])
    return out
