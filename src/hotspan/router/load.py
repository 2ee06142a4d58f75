"""How busy a replica is and how fast, estimated from the requests that were sent there.

A replica computes prompts one after another. What was sent and has not answered yet is its queue:

    |-- sent, answered --|-- the first of the queue --|-- next --|-- next --|
                         ^ since                ^ now
    queue = what is left of the first + all the next

so the queue of a replica that is slower than estimated stays, and that of a faster one is corrected at first bytes.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from hotspan.core.errors import ConfigError
from hotspan.router.types import Medium

_FORGET_TOKENS = 100_000.0
"""The rate is the mean over about the last so many tokens."""

_PRIOR_TOKENS = 4_000.0
"""Weight of the prior."""

_ALIKE = 4 / 3
"""Rates that differ by no more than this factor count as equal: such differences are noise."""

TOLD_EVERY_S = 15.0
"""Seconds between two readings of a replica's metrics."""

_FURTHEST = 8.0
"""Limit, as a factor of the expected time in either direction, of what one prompt teaches."""

_LATE = 0.5

_LATELY_S = 30.0

_LEAST_S = 0.02
"""Shorter times are indistinguishable from those of the network."""


@dataclass(frozen=True, slots=True)
class TierSpeed:
    """Time to load from a tier: a latency, then a rate."""

    tokens_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not (self.tokens_per_s > 0 and self.latency_s >= 0):
            raise ConfigError(f"{self} is no speed; tokens_per_s is above 0 and latency_s not below 0")


def _tiers() -> Mapping[Medium, TierSpeed]:
    return {
        Medium.RAM: TierSpeed(150_000.0, 0.002),
        Medium.DISK: TierSpeed(30_000.0, 0.01),
        Medium.L2: TierSpeed(15_000.0, 0.02),
    }


@dataclass(frozen=True, slots=True)
class Speeds:
    """Speeds and capacity of a replica.

    tokens_per_s: of prompts, computed alone; until something was learnt of any replica.
    decode_s:     that one more running request adds to each step of all others.
    tiers:        how fast it loads what lies below the GPU.
    cache_tokens: capacity; 0: unknown.
    is_blending:  it reuses text that is no prefix.
    """

    tokens_per_s: float = 8_000.0
    decode_s: float = 0.0002
    tiers: Mapping[Medium, TierSpeed] = field(default_factory=_tiers)
    cache_tokens: int = 0
    is_blending: bool = False

    def __post_init__(self) -> None:
        if not (0 < self.tokens_per_s < float("inf") and self.decode_s >= 0 and self.cache_tokens >= 0):
            raise ConfigError(f"{self} are no speeds; tokens_per_s is above 0, the others not below 0")


class ReplicaLoad:
    """Load and speed of one replica. Times are the caller's, and never run backwards.

    usual: tokens a second of replicas like this one, which counts until enough was learnt of this one.
    pace:  tokens a second, for comparisons: that of all about as fast. Both are set by `settle_rates`.
    """

    def __init__(self, speeds: Speeds | None = None) -> None:
        self.speeds = speeds or Speeds()
        self.running = 0
        self.waiting_tokens = 0
        self.usual = self.pace = self.speeds.tokens_per_s
        self.learnt_tokens = self.learnt_s = 0.0
        self._prior_tokens = _PRIOR_TOKENS
        self._queue: dict[int, tuple[float, int, float]] = {}
        self._work_s = 0.0
        self._since = self._answered = 0.0

    @property
    def in_flight(self) -> int:
        """Requests that were sent and have not ended."""
        return self.running + len(self._queue)

    @property
    def tokens_per_s(self) -> float:
        """How fast it computes prompts."""
        return (self._prior_tokens + self.learnt_tokens) / (self._prior_tokens / self.usual + self.learnt_s)

    def tell(self, speeds: Speeds, *, is_measured: bool = True) -> None:
        """Take over what a replica says of its speed.

        is_measured: its rate of prompts is among it, and counts as much as all that was observed.
        """
        self.speeds = speeds
        if is_measured:
            self.learnt_tokens = max(self.learnt_tokens, _PRIOR_TOKENS)
            self.learnt_s = self.learnt_tokens / speeds.tokens_per_s
            self._prior_tokens = 0.0
            self.pace = speeds.tokens_per_s

    def queue_s(self, now: float) -> float:
        """Until it can begin with a prompt that is sent now.

        The first of its queue, once it is overdue, is taken to need half as long again as it is overdue: a replica that
        hangs looks busier and busier.
        """
        for work_s, _, _ in self._queue.values():
            left_s = work_s - max(now - self._since, 0.0)
            return self._work_s - work_s + (left_s if left_s > 0 else -_LATE * left_s)
        return 0.0

    def reserve(self, number: int, tokens: int, load_s: float, now: float) -> float:
        """A request was sent; its work in seconds.

        number: its own. tokens: that are to be computed. load_s: that goes to loading before.
        """
        if not self._queue:
            self._since = self._answered = now
        work_s = tokens / self.tokens_per_s + load_s
        self._queue[number] = (work_s, tokens, load_s)
        self._work_s += work_s
        self.waiting_tokens += tokens
        return work_s

    def first_byte(self, number: int, now: float) -> None:
        """A request's answer began: its prompt is computed, and it runs now."""
        is_first = next(iter(self._queue), None) == number
        found = self._take(number)
        if found is None:
            return
        work_s, tokens, load_s = found
        self.running += 1
        self._learn(tokens, now - self._answered - load_s, tokens / self.tokens_per_s)
        self._answered = now
        self._since = now if is_first else min(self._since + work_s, now)

    def end(self, number: int, now: float) -> None:
        """A request ended, in whatever way."""
        is_first = next(iter(self._queue), None) == number
        if self._take(number) is None:
            self.running -= 1
        elif is_first:
            self._since = self._answered = now

    def check(self) -> None:
        """Raise AssertionError if what it counts can't be."""
        work_s = sum(work_s for work_s, _, _ in self._queue.values())
        tokens = sum(tokens for _, tokens, _ in self._queue.values())
        if abs(work_s - self._work_s) > 1e-6 * max(work_s, 1.0) or tokens != self.waiting_tokens or self.running < 0:
            raise AssertionError(f"work {self._work_s} of {work_s} s, {self.running} running")
        if not 0 < self.tokens_per_s < float("inf"):
            raise AssertionError(f"{self.tokens_per_s} tokens/s")

    def _take(self, number: int) -> tuple[float, int, float] | None:
        found = self._queue.pop(number, None)
        if found is not None:
            self._work_s = self._work_s - found[0] if self._queue else 0.0
            self.waiting_tokens -= found[1]
        return found

    def _learn(self, tokens: int, seconds: float, expected_s: float) -> None:
        """Prompts may be computed together and answered at once, so it is the sums whose ratio is the rate."""
        if tokens <= 0 or max(seconds, expected_s) < _LEAST_S:
            return
        kept = max(1 - tokens / _FORGET_TOKENS, 0.1)
        self._prior_tokens *= kept
        self.learnt_tokens = self.learnt_tokens * kept + tokens
        self.learnt_s = self.learnt_s * kept + min(max(seconds, expected_s / _FURTHEST), expected_s * _FURTHEST)


def settle_rates(loads: Collection[ReplicaLoad]) -> None:
    """Apply what was learnt of some replicas to all of them. Call it after anything was learnt.

    A replica of which little is known counts as fast as all together; else the first one that was asked would be the
    only one known to be fast, and would get everything. Rates that differ by noise become one, so that sessions and the
    random choice decide between equals, and routers with other samples decide alike.
    """
    tokens = sum(load.learnt_tokens for load in loads)
    if tokens:
        usual = tokens / sum(load.learnt_s for load in loads)
        for load in loads:
            load.usual = usual
    rates = sorted(load.tokens_per_s for load in loads)
    sums = [0.0, *accumulate(rates)]
    for load in loads:
        rate = load.tokens_per_s
        first, end = bisect_left(rates, rate / _ALIKE), bisect_right(rates, rate * _ALIKE)
        load.pace = (sums[end] - sums[first]) / (end - first)


class Arrivals:
    """The recent rate of requests, per second."""

    def __init__(self) -> None:
        self._per_s = 0.0
        self._at_s = 0.0

    def count(self, now: float) -> None:
        """A request came."""
        self._per_s = self.per_s(now) + 1 / _LATELY_S
        self._at_s = now

    def per_s(self, now: float) -> float:
        """The rate now; correct after the first half minute."""
        return self._per_s * math.exp(-max(now - self._at_s, 0.0) / _LATELY_S)
