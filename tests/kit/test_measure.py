"""The kit's quantile and paired ratio."""

import random
import statistics

import pytest

from kit.measure import interval, paired_ratio, quantile


def test_quantiles_interpolate_between_ranks() -> None:
    """Of 1 to 100 the 99th percentile is 99.01 and the median 50.5; of one value it is that; of none 0."""
    values = [float(n) for n in range(1, 101)]
    assert quantile(values, 0.99) == pytest.approx(99.01) and quantile(reversed(values), 0.5) == 50.5
    assert quantile([3.0], 0.99) == 3.0 and quantile([], 0.99) == 0.0


def test_a_ratio_is_that_within_pairs() -> None:
    """A machine that gets slower over the pairs does not change the ratio, only the unpaired one."""
    theirs = [1.0, 2.0, 4.0, 8.0, 16.0]
    found = paired_ratio([1.5 * value for value in theirs], theirs)
    assert found == (1.5, 1.5, 1.5, 1.5, 1.5)
    assert found.quartiles() == {"median": 1.5, "quartile_1": 1.5, "quartile_3": 1.5}
    with pytest.raises(ValueError):
        paired_ratio([1.0], [1.0, 2.0])


def test_the_interval_has_the_median_in_most_samples() -> None:
    """Of 200 samples of 40 values, 95 % of the intervals have the true median, give or take five; a seed repeats."""
    rng, holds = random.Random(5), 0
    for number in range(200):
        sample = [rng.lognormvariate(0.0, 1.0) for _ in range(40)]
        found = interval(sample, seed=number, draws=400)
        assert found.low <= found.median <= found.high
        assert found.median == pytest.approx(statistics.median(sample))
        holds += found.low <= 1.0 <= found.high
    assert holds >= 180
    assert interval(sample, seed=3) == interval(sample, seed=3)
    with pytest.raises(ValueError):
        interval([])
