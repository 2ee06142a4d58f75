"""One quantile, and one ratio of two ways that were asked in turn, with its interval."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

_DRAWS = 2000


class Interval(NamedTuple):
    """A median, its 95 % interval, and the quartiles of what it is the median of."""

    median: float
    low: float
    high: float
    quartile_1: float
    quartile_3: float

    def quartiles(self, digits: int = 4) -> dict[str, float]:
        """Median and quartiles, rounded, as result files have them."""
        named = {"median": self.median, "quartile_1": self.quartile_1, "quartile_3": self.quartile_3}
        return {name: round(value, digits) for name, value in named.items()}


def quantile(values: Iterable[float], share: float) -> float:
    """The value below which that share of all lies, interpolated linearly between ranks; 0 of none."""
    sample = np.fromiter(values, np.float64)
    return float(np.quantile(sample, share)) if sample.size else 0.0


def interval(values: Sequence[float], seed: int = 1, draws: int = _DRAWS) -> Interval:
    """The median of values, and its interval when they are drawn anew. Raises: ValueError of none."""
    sample = np.asarray(values, np.float64)
    if not sample.size:
        raise ValueError("there is no value")
    drawn = np.random.default_rng(seed).choice(sample, (draws, len(sample)))
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
    first, median, third = np.quantile(sample, (0.25, 0.5, 0.75))
    return Interval(float(median), float(low), float(high), float(first), float(third))


def paired_ratio(ours: Sequence[float], theirs: Sequence[float], seed: int = 1) -> Interval:
    """How many times theirs ours is, within each pair. Raises: ValueError if they are no pairs."""
    return interval([one / other for one, other in zip(ours, theirs, strict=True)], seed)
