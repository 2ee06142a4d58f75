"""The rates of the cost model: what computing and loading take, learnt from measurements.

`Fit` learns seconds as a sum of amounts, each at a rate of its own, never negative, never wild:

    seconds = rates[0] * amounts[0] + rates[1] * amounts[1] + ...

It is a Kalman filter over rates that drift. Its errors are relative to what it predicts, so that one setting fits
engines of 1k tokens/s and of 1M; a rate is forgotten only as far as there is new evidence about it. Much can slow a
measurement down (compilation, preemption, a stalled drive) and nothing can hurry it: what was much faster than
predicted is believed at once, what was much slower only after `doubts` such measurements in a row.

`Prefill` is the engine's fit, `TierSpeed` that of one tier. A tier moves `lanes` chunks at a time, which share its
bandwidth. One transfer takes latency + bytes x chunks moving / bandwidth; many behind a queue take

    latency x ceil(chunks / lanes) + bytes / bandwidth + how long the tier is overdue

A stalled tier ends no transfer to learn from. Its delay so far counts instead, as if it stalled as long again.
"""

import math
import operator
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hotspan.core.types import MIB

Numbers = int | npt.NDArray[np.int64]

_MEMORY = 16
"""Measurements over which errors are averaged."""

_DRIFT = 0.02**2
"""Relative variance of a rate that each measurement adds."""

_IGNORANCE = 1.5**2
"""Relative variance of a rate of which nothing is known but the prior."""

_LEAST_NOISE = 0.05
_SURPRISE = math.log(2)
_LEAST_SHARE = 1e-6
_TINIEST, _HUGEST = 1e-30, 1e12
_SHORTEST_S, _LONGEST_S = 1e-9, 1e6
_LEAST, _MOST = 1e-12, 1e18


@dataclass(frozen=True, slots=True)
class Accuracy:
    """How well something was predicted.

    predicted_s, actual_s: sums over all `count` predictions.
    error:                 mean absolute relative error of about the last 16 of them; 0 if there was none.
    """

    count: int = 0
    predicted_s: float = 0.0
    actual_s: float = 0.0
    error: float = 0.0

    def after(self, predicted_s: float, actual_s: float) -> "Accuracy":
        """The same with one prediction more."""
        count = self.count + 1
        error = min(abs(predicted_s - actual_s) / max(actual_s, 1e-9), 1e6)
        return Accuracy(
            count,
            self.predicted_s + predicted_s,
            self.actual_s + actual_s,
            self.error + (error - self.error) / min(count, _MEMORY),
        )


class Fit:
    """The rates of a sum.

    prior:  what the rates are to each other before anything is known; the first measurement says how large they are.
    doubts: surprisingly slow measurements in a row that it takes to be believed.
    """

    def __init__(self, prior: Sequence[float], doubts: int) -> None:
        self._prior = tuple(prior)
        self._doubts = doubts
        self._streak = 0
        self._covariance: list[list[float]] = []
        self.rates = (0.0,) * len(self._prior)
        self.count = 0
        self.spread = 1.0

    @property
    def factor(self) -> float:
        """How far off it typically is: seconds are within `factor` times the prediction, either way."""
        return math.exp(self.spread)

    def predict(self, amounts: Sequence[float]) -> float:
        """Seconds for these amounts; 0 before the first measurement."""
        return _dot(self.rates, amounts)

    def factor_for(self, amounts: Sequence[float]) -> float:
        """The same for these amounts, which may be far from what was measured: then it is larger."""
        predicted = max(self.predict(amounts), _TINIEST)
        variance = _dot(amounts, [_dot(row, amounts) for row in self._covariance]) if self.count else 0.0
        return math.exp(self.spread + min(math.sqrt(max(variance, 0.0)) / predicted, 3.0))

    def can_observe(self, amounts: Sequence[float], seconds: float) -> bool:
        """Whether this can be a measurement: finite, not negative, and of something."""
        is_sane = _SHORTEST_S <= seconds < _LONGEST_S and all(0 <= amount < _MOST for amount in amounts)
        return is_sane and _dot(self._prior, amounts) >= _LEAST

    def observe(self, amounts: Sequence[float], seconds: float) -> None:
        """Learn from one measurement, or leave it out if it can't be one. Costs about 10 us."""
        if not self.can_observe(amounts, seconds):
            return
        self.count += 1
        if self.count == 1:
            self._begin(self._prior, seconds / _dot(self._prior, amounts), amounts)
            return
        predicted = self.predict(amounts)
        ratio = seconds / predicted
        error = math.log(ratio)
        surprise = max(_SURPRISE, 2 * self.spread)
        self._streak = self._streak + 1 if error > surprise else 0
        self.spread += (min(abs(error), 1.0) - self.spread) / min(self.count, _MEMORY)
        if error < -surprise:
            self._begin(self.rates, ratio, amounts)
        elif self._streak >= self._doubts:  # more of what it was mostly, or may be
            self._covariance = self._ignorance(amounts)
            self._correct([amount / predicted for amount in amounts], ratio - 1, _LEAST_NOISE**2)
            self._covariance = self._ignorance(amounts)
        else:
            noise = max(self.spread, _LEAST_NOISE) ** 2
            self._correct([amount / predicted for amount in amounts], min(ratio, math.exp(surprise)) - 1, noise)
            self._drift(amounts)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _begin(self, rates: Sequence[float], factor: float, amounts: Sequence[float]) -> None:
        """Start anew, with `factor` times these rates."""
        self.rates = self._bounded([factor * rate for rate in rates])
        self._covariance = self._ignorance(amounts)

    def _correct(self, slopes: list[float], error: float, noise: float) -> None:
        """One step of the filter, towards a measurement that was 1 + `error` times what was predicted."""
        covariance, n = self._covariance, len(slopes)
        towards = [_dot(row, slopes) for row in covariance]
        variance = _dot(towards, slopes) + noise
        rates = [rate + value * error / variance for rate, value in zip(self.rates, towards, strict=True)]
        for i in range(n):
            for j in range(i, n):
                covariance[i][j] -= towards[i] * towards[j] / variance
                covariance[j][i] = covariance[i][j]
        self.rates = self._bounded(rates)

    def _drift(self, amounts: Sequence[float]) -> None:
        """What was learnt grows old."""
        for i, scale in enumerate(self._scales(amounts)):
            if self._covariance[i][i] < _IGNORANCE * scale**2:
                self._covariance[i][i] += _DRIFT * scale**2

    def _ignorance(self, amounts: Sequence[float]) -> list[list[float]]:
        scales = self._scales(amounts)
        return [[_IGNORANCE * scale**2 * (i == j) for j in range(len(scales))] for i, scale in enumerate(scales)]

    def _scales(self, amounts: Sequence[float]) -> list[float]:
        """What each rate could be: what it is, or would be if all were to each other as the prior says."""
        unit = self.predict(amounts) / _dot(self._prior, amounts)
        return [max(rate, unit * prior) for rate, prior in zip(self.rates, self._prior, strict=True)]

    def _bounded(self, rates: Sequence[float]) -> tuple[float, ...]:
        """Rates that are finite, positive, and none so small beside the others that it could be lost."""
        unit = max(rate / prior for rate, prior in zip(rates, self._prior, strict=True))
        return tuple(
            min(max(rate, _LEAST_SHARE * unit * prior, _TINIEST), _HUGEST)
            for rate, prior in zip(rates, self._prior, strict=True)
        )


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return float(sum(map(operator.mul, a, b)))


_STEP_PRIOR = (256.0, 1.0, 1 / 30_000)
"""Before anything is known: a step costs as much as 256 tokens, and a token that attends to 30,000 twice what the first
costs (a layer's attention does 4 d FLOP a token of context, all else in it about 24 d^2, with d = 4096 to 5120)."""

_STEP_DOUBTS = 4
"""Slow steps in a row until they are believed: compilation and preemption come in twos and threes."""

_LEAST_STEPS = 3


class Prefill:
    """Seconds = a x steps + b x tokens + c x the tokens that each of them attends to.

    step_tokens: the most tokens that the engine computes in one step.
    """

    def __init__(self, step_tokens: int) -> None:
        if step_tokens < 1:
            raise ValueError(f"an engine computes at least one token a step, not {step_tokens}")
        self._step_tokens = step_tokens
        self.fit = Fit(_STEP_PRIOR, _STEP_DOUBTS)
        self.accuracy = Accuracy()

    @property
    def is_known(self) -> bool:
        """Whether enough steps were seen to say anything."""
        return self.fit.count >= _LEAST_STEPS

    def observe_step(self, tokens: int, context_tokens: int, seconds: float) -> None:
        """One step took so long: `tokens` of prompts, which attended to `context_tokens` before them in sum."""
        amounts = (1.0, float(tokens), float(context_tokens))
        if tokens <= 0:
            return
        if self.is_known and self.fit.can_observe(amounts, seconds):
            self.accuracy = self.accuracy.after(self.fit.predict(amounts), seconds)
        self.fit.observe(amounts, seconds)

    def seconds(self, start: Numbers, stop: int) -> Any:
        """To compute the tokens [start, stop) of a text, for a number or an array of starts; 0 while unknown."""
        return sum(rate * amount for rate, amount in zip(self.fit.rates, self._amounts(start, stop), strict=True))

    def factor(self, start: int, stop: int) -> float:
        """How far off that typically is, either way."""
        return self.fit.factor_for([float(amount) for amount in self._amounts(start, stop)])

    def _amounts(self, start: Numbers, stop: int) -> tuple[Any, Any, Any]:
        tokens = np.maximum(stop - np.asarray(start, np.float64), 0.0)
        attended = np.maximum(tokens * (2.0 * stop - tokens - 1.0) / 2, 0.0)
        return np.ceil(tokens / self._step_tokens), tokens, attended


LEAST_FREE = 0.5
"""Least share of time in which an engine or a tier is taken to be free: what may come later never counts most."""


class Arrivals:
    """How many requests come per second: over about the last 16 of them."""

    def __init__(self) -> None:
        self._last_s = 0.0
        self._gap_s = 0.0

    def note(self, now_s: float) -> None:
        """One came."""
        if self._last_s:
            gap_s = max(now_s - self._last_s, 0.0)
            self._gap_s = self._gap_s + (gap_s - self._gap_s) / _MEMORY if self._gap_s else gap_s
        self._last_s = now_s

    def per_s(self, now_s: float) -> float:
        """Requests per second; 0 before the second one. It falls while none comes: a burst is over some time."""
        silence_s = max(now_s - self._last_s - self._gap_s, 0.0)
        return 1 / (self._gap_s + silence_s / _MEMORY) if self._gap_s > _SHORTEST_S else 0.0


_LOAD_PRIOR = (1.0, 1 / (64 * MIB))
"""Before anything is known: a transfer's latency is as long as moving 64 MiB, so that a small one teaches latency."""

_LOAD_DOUBTS = 2
_LONGEST_GAP = 8
_MAX_CAUTION = 64.0
_BOLDER = 0.9
_PROBE_S = 1.0


class TierSpeed:
    """One tier's. `now_s` is monotonic.

    lanes: chunks that it moves at a time, its I/O threads.
    """

    def __init__(self, lanes: int) -> None:
        if lanes < 1:
            raise ValueError(f"a tier moves at least one chunk at a time, not {lanes}")
        self._lanes = lanes
        self.fit = Fit(_LOAD_PRIOR, _LOAD_DOUBTS)
        self.queued_bytes = 0
        self.storing_bytes = 0
        self._depths: deque[int] = deque()  # chunks in the queue when each of them joined it, itself included
        self._moved_s = 0.0  # when a transfer last ended, or the first in the queue began
        self._caution = 1.0
        self._requests = Arrivals()
        self._request_s = 0.0
        self._refused = 0
        self._gap = 1
        self._probed_s = 0.0

    @property
    def factor(self) -> float:
        """How many times longer than predicted a load is to be expected at worst."""
        return self.fit.factor * self._caution

    def begin(self, size: int, now_s: float) -> None:
        """A chunk of `size` bytes was queued."""
        if not self._depths:
            self._moved_s = now_s
        self._depths.append(len(self._depths) + 1)
        self.queued_bytes += size

    def end(self, size: int, seconds: float | None, now_s: float) -> None:
        """A queued chunk landed, `seconds` after its transfer left the queue; or it never will (None)."""
        if not self._depths:
            return
        moving = min(self._lanes, max(self._depths[0], self._depths[-1]))  # while it was on its way, about
        amounts = (1.0, float(size * moving))
        if seconds is not None:
            self.fit.observe(amounts, seconds)
        elif self._overdue_s(now_s) > 0:
            self.fit.observe(amounts, now_s - self._moved_s)  # it took at least that long
        self._depths.popleft()
        self.queued_bytes = max(0, self.queued_bytes - size) if self._depths else 0
        self._moved_s = now_s

    def load_s(self, chunks: Numbers, size: Numbers, now_s: float) -> Any:
        """Until `chunks` more, `size` bytes in all, are up if they are queued now. Numbers, or arrays of one shape."""
        latency_s, per_byte_s = self.fit.rates
        waves = np.maximum(np.ceil((len(self._depths) + np.asarray(chunks)) / self._lanes), 1.0)
        ahead = self.queued_bytes + self.storing_bytes
        return latency_s * waves + per_byte_s * (ahead + np.asarray(size)) + self._overdue_s(now_s)

    def queue_s(self, now_s: float) -> float:
        """Until what is queued now is up."""
        latency_s, per_byte_s = self.fit.rates
        ahead = self.queued_bytes + self.storing_bytes
        return latency_s * (len(self._depths) / self._lanes) + per_byte_s * ahead + self._overdue_s(now_s)

    def coming(self, seconds: Any, now_s: float) -> Any:
        """How many requests are expected to load from here within so long, and to wait for what is loaded now."""
        per_s = self._requests.per_s(now_s)
        return per_s * seconds / max(1 - per_s * self._request_s, LEAST_FREE)

    def note_stores(self, chunks: int, chunk_bytes: int) -> None:
        """So many chunks are being written, or wait for it: a load lets those go first that have begun."""
        self.storing_bytes = min(chunks, self._lanes) * chunk_bytes

    def judge(self, gained: bool) -> None:
        """Note whether a request that loaded from this tier gained by it, compared with computing.

        If not, for whatever reason, the caution doubles: as long as that goes on, such loads become rare.
        """
        self._caution = max(1.0, self._caution / 2) if gained else min(2 * self._caution, _MAX_CAUTION)

    def take(self, size: int, now_s: float) -> None:
        """A request loads so many bytes from here: the tier is found fast enough."""
        self._refused, self._gap = 0, 1
        self._requests.note(now_s)
        self._request_s += (self.fit.rates[1] * size - self._request_s) / _MEMORY

    def refuse(self, now_s: float) -> int:
        """A request had better not load from here; how many chunks should be, to see whether the tier is still slow.

        One at the first refusal, then 2, 4, 8, 8, .. after as many more, or as many seconds: together they show the
        bandwidth, too. None while the last are in flight.
        """
        self._refused += 1
        self._caution = max(1.0, _BOLDER * self._caution)
        rests = self._refused < self._gap and now_s - self._probed_s < self._gap * _PROBE_S
        if rests or self._depths:
            return 0
        self._refused, self._probed_s = 0, now_s
        probe, self._gap = self._gap, min(2 * self._gap, _LONGEST_GAP)
        return probe

    # -- inside ----------------------------------------------------------------------------------------------------

    def _overdue_s(self, now_s: float) -> float:
        """How long ago something should have landed."""
        if not self._depths:
            return 0.0
        size = self.queued_bytes / len(self._depths)
        expected_s = self.fit.predict((1.0, size * min(self._lanes, len(self._depths)))) * self.fit.factor
        return max(0.0, now_s - self._moved_s - expected_s)
