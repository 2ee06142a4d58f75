"""Seconds as a sum of amounts, each at a rate of its own: learnt from measurements, never negative, never wild.

    seconds = rates[0] * amounts[0] + rates[1] * amounts[1] + ...

A Kalman filter over rates that drift, its errors relative to what it predicts, so that one setting fits engines of 1k
tokens/s and of 1M; a rate is forgotten only as far as there is new evidence about it. Much can slow a measurement down
(compilation, preemption, a stalled drive) and nothing can hurry it: what was much faster than predicted is believed at
once, what was much slower only when it has happened `doubts` times in a row.
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

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
