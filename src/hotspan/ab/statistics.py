"""Intervals of shares, differences and ratios, and how many items a verdict needs.

Shares:       Wilson's score interval. It has a width also at 0 of n: 0 of 100 is [0 %, 3.7 %].
Differences:  of two shares of the same items, Newcombe's square-and-add interval over Wilson's limits (Statistics in
              Medicine 17, 1998, p. 2635, method 10), which holds at and near 0, where a bootstrap has no width.
All else:     percentile bootstrap over items: an item is drawn with all that was measured of it, on both sides.

All intervals are two-sided at 95 %.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from statistics import NormalDist
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

CONFIDENCE: Final = 0.95
POWER: Final = 0.95
"""Probability of the right verdict at the stated number of items, of a drift that is there and of none."""

MAX_ITEMS: Final = 1_000_000

_Z: Final = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
_DRAWS: Final = 1000
_AT_ONCE: Final = 100
_SIMULATIONS: Final = 4000
_MARGIN: Final = 0.015
"""Above POWER in simulations: their own error, and that the power of whole counts rises and falls with the items."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Share:
    """`count` of `total` items, with the 95 % interval of the share behind it."""

    count: int
    total: int
    low: float
    high: float

    @property
    def value(self) -> float:
        return self.count / self.total if self.total else 0.0


def wilson(count: Any, total: Any) -> tuple[Any, Any]:
    """The limits of a share; of arrays, element by element. Without any item: 0 and 1."""
    n = np.maximum(total, 1)
    p = count / n
    middle = (p + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z / (1 + _Z**2 / n) * np.sqrt(p * (1 - p) / n + _Z**2 / (4 * n**2))
    low, high = np.maximum(middle - half, 0.0), np.minimum(middle + half, 1.0)
    # At the ends the limits are exact; the sums above miss them by a rounding error.
    low = np.where((np.asarray(count) == 0) | (np.asarray(total) == 0), 0.0, low)
    high = np.where((np.asarray(count) == total) | (np.asarray(total) == 0), 1.0, high)
    return low, high


def share(hits: Sequence[bool]) -> Share:
    """How many of the items are hits."""
    low, high = wilson(sum(hits), len(hits))
    return Share(sum(hits), len(hits), float(low), float(high))


def items_to_pass(max_share: float) -> int:
    """Items of which none may be a hit, so that the upper limit of the share is at most `max_share`."""
    return math.ceil(_Z**2 * (1 - max_share) / max_share)


def paired_limits(both: Any, first: Any, second: Any, neither: Any) -> tuple[Any, Any, Any]:
    """Difference of two shares of the same items, first less second, with its limits; of arrays, element by element.

    both, first, second, neither: numbers of items that are hits in both, in the first alone, and so on.
    """
    both, first, second, neither = (np.asarray(each, dtype=np.float64) for each in (both, first, second, neither))
    n = np.maximum(both + first + second + neither, 1)
    p1, p2 = (both + first) / n, (both + second) / n
    low1, high1 = wilson(both + first, n)
    low2, high2 = wilson(both + second, n)
    # The correlation of the two, 0 where either share is 0 or 1 (Newcombe's rule), with his continuity correction.
    spread = np.sqrt((both + first) * (second + neither) * (both + second) * (first + neither))
    cross = both * neither - first * second
    cross = np.where(cross > n / 2, cross - n / 2, np.where(cross >= 0, 0.0, cross))
    phi = np.where(spread > 0, cross / np.where(spread > 0, spread, 1.0), 0.0)
    down = (p1 - low1) ** 2 - 2 * phi * (p1 - low1) * (high2 - p2) + (high2 - p2) ** 2
    up = (high1 - p1) ** 2 - 2 * phi * (high1 - p1) * (p2 - low2) + (p2 - low2) ** 2
    return p1 - p2, p1 - p2 - np.sqrt(np.maximum(down, 0.0)), p1 - p2 + np.sqrt(np.maximum(up, 0.0))


def paired_difference(first: Sequence[bool], second: Sequence[bool]) -> Interval:
    """How much larger the first share is than the second, of the same items in the same order."""
    table = np.zeros((2, 2), dtype=np.int64)
    for x, y in zip(first, second, strict=True):
        table[int(x), int(y)] += 1
    value, low, high = paired_limits(table[1, 1], table[1, 0], table[0, 1], table[0, 0])
    return Interval(float(value), float(low), float(high))


def bootstrap(of: Callable[..., Any], columns: Sequence[Sequence[float]], seed: int) -> Interval | None:
    """A figure of the sums of columns that have a value per item, and its interval when items are drawn anew.

    of: takes the sum of each column, as numbers or as arrays. None where the figure does not exist (0 / 0).
    """
    values = [np.asarray(column, dtype=np.float64) for column in columns]
    count = len(values[0])
    if not count:
        return None
    rng = np.random.Generator(np.random.PCG64(seed))
    with np.errstate(divide="ignore", invalid="ignore"):
        estimate = float(of(*(np.asarray(column.sum()) for column in values)))
        drawn = []
        for _ in range(_DRAWS // _AT_ONCE):
            weights = rng.multinomial(count, np.full(count, 1 / count), size=_AT_ONCE)
            drawn.append(of(*(weights @ column for column in values)))
    found = np.concatenate(drawn)
    found = found[np.isfinite(found)]
    if not np.isfinite(estimate) or not found.size:
        return None
    low, high = np.percentile(found, (50 * (1 - CONFIDENCE), 50 * (1 + CONFIDENCE)))
    return Interval(estimate, float(low), float(high))


def ratio(numerators: Sequence[float], denominators: Sequence[float], seed: int) -> Interval | None:
    """Ratio of two sums over the same items."""
    return bootstrap(lambda top, bottom: top / bottom, (numerators, denominators), seed)


# -- how many items a verdict needs ------------------------------------------------------------------------------------


@cache
def needed_items(max_drift: float, drift: float, noise: float = 0.0) -> int | None:
    """Items at which a drift of that size is found, and none passes, each with a probability of at least POWER.

    drift:  share of the items that B answers otherwise, each time alike. noise: share at which A differs from itself.
    Simulated over the verdict's own intervals. None if MAX_ITEMS are not enough.
    """

    def is_enough(items: int) -> bool:
        found = _simulated(items, drift, noise)[0]
        passed = _simulated(items, 0.0, noise)[1] <= max_drift
        return bool((found > max_drift).mean() >= POWER + _MARGIN and passed.mean() >= POWER + _MARGIN)

    most = 1
    while not is_enough(most):
        if most >= MAX_ITEMS:
            return None
        most = min(2 * most, MAX_ITEMS)
    least = most // 2
    while most - least > max(1, least // 200):
        middle = (least + most) // 2
        least, most = (least, middle) if is_enough(middle) else (middle, most)
    return most


def _simulated(items: int, drift: float, noise: float) -> tuple[Floats, Floats]:
    """Largest lower and largest upper limit of the two differences that a verdict is made of, in each simulated run.

    The upper limit is for the items at which A does not differ from itself, as in `compare.judge`.
    """
    cells: dict[tuple[bool, bool, bool], float] = {}
    flip = 1 - np.sqrt(1 - noise)  # of an answer, so that two of them differ with the probability `noise`
    for drifts, a1, a2, b1, b2 in product((False, True), repeat=5):
        odds = drift if drifts else 1 - drift
        for flips in (a1, a2, b1, b2):
            odds *= flip if flips else 1 - flip
        cell = (drifts or a1 or b1, b1 or b2, a1 or a2)
        cells[cell] = cells.get(cell, 0.0) + odds
    names, odds_of = list(cells), np.array(list(cells.values()))
    rng = np.random.Generator(np.random.PCG64(items))
    drawn = rng.multinomial(items, odds_of / odds_of.sum(), size=_SIMULATIONS)

    def limits(which: int) -> tuple[Any, Any, Any]:
        def count(x: bool, y: bool) -> Any:
            wanted = [at for at, cell in enumerate(names) if (cell[which], cell[2]) == (x, y)]
            return drawn[:, wanted].sum(axis=1)

        return paired_limits(count(True, True), count(True, False), count(False, True), count(False, False))

    (_, low1, high1), (_, low2, high2) = limits(0), limits(1)
    with np.errstate(divide="ignore"):
        return np.maximum(low1, low2), np.maximum(high1, high2) / (1 - noise)
