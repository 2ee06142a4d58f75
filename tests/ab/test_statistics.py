"""Intervals against published figures, and the number of items that a verdict needs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotspan.ab.statistics import (
    bootstrap,
    items_to_pass,
    needed_items,
    paired_difference,
    paired_limits,
    ratio,
    share,
    wilson,
)


@pytest.mark.parametrize(
    "count, total, low, high",
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_as_published(count: int, total: int, low: float, high: float) -> None:
    """Newcombe, Statistics in Medicine 17 (1998) 857, table I, method 3."""
    found = share([True] * count + [False] * (total - count))
    assert (found.low, found.high) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))
    assert found.value == count / total


@pytest.mark.parametrize(
    "cells", [(0.0, 0.02, 0.0, 0.98), (0.02, 0.03, 0.01, 0.94), (0.3, 0.2, 0.1, 0.4), (0, 0.1, 0.1, 0.8)]
)
def test_a_paired_difference_covers_the_true_one(cells: tuple[float, ...]) -> None:
    """Of 4,000 drawn tables of 300 items, about 95 % have the true difference in their interval."""
    tables = np.random.Generator(np.random.PCG64(1)).multinomial(300, cells, size=4000).T
    _, low, high = paired_limits(*tables)
    covered = ((low <= cells[1] - cells[2]) & (cells[1] - cells[2] <= high)).mean()
    assert 0.935 < covered <= 1


def test_a_paired_difference_without_any_has_a_width() -> None:
    """Two shares of 0 of 30: the interval is as wide as Wilson's of each."""
    _, low, high = paired_limits(0, 0, 0, 30)
    assert (float(low), float(high)) == (pytest.approx(-0.1135, abs=5e-5), pytest.approx(0.1135, abs=5e-5))


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60))
def test_a_difference_lies_in_its_interval_and_turns_with_its_sides(pairs: list[tuple[bool, bool]]) -> None:
    """low <= value <= high, and the difference the other way round has the negated interval."""
    first, second = zip(*pairs, strict=True)
    found, turned = paired_difference(first, second), paired_difference(second, first)
    assert -1 - 1e-9 <= found.low <= found.value + 1e-12 and found.value <= found.high + 1e-12 <= 1 + 1e-9
    assert (turned.low, turned.high) == (pytest.approx(-found.high), pytest.approx(-found.low))


def test_limits_of_no_item_and_of_large_counts() -> None:
    """Without items a share is anywhere from 0 to 1; a million items overflow nothing."""
    assert [float(each) for each in wilson(0, 0)] == [0.0, 1.0]
    _, low, high = paired_limits(500_000, 1_000, 1_000, 498_000)
    assert -0.001 < low < 0 < high < 0.001


def test_a_bootstrap_is_the_same_for_a_seed_and_covers_the_mean() -> None:
    """Equal seeds give equal intervals, other seeds others; a constant has no width; 0 / 0 gives none."""
    values = [float(at % 7) for at in range(200)]
    ones = [1.0] * len(values)
    assert ratio(values, ones, 1) == ratio(values, ones, 1) != ratio(values, ones, 2)
    found = ratio(values, ones, 1)
    assert found is not None and found.low < found.value < found.high
    assert found.value == pytest.approx(sum(values) / 200)
    half = 1.96 * 2.0 / 200**0.5  # of seven equally likely values, whose deviation is 2
    assert (found.low, found.high) == (
        pytest.approx(found.value - half, abs=0.05),
        pytest.approx(found.value + half, abs=0.05),
    )
    constant = ratio([2.0] * 9, [4.0] * 9, 1)
    assert constant is not None and (constant.value, constant.low, constant.high) == (0.5, 0.5, 0.5)
    assert ratio([0.0], [0.0], 1) is None and ratio([], [], 1) is None


def test_a_bootstrap_draws_items_with_all_that_belongs_to_them() -> None:
    """Items whose two figures are proportional have a ratio without a spread, however they differ from each other."""
    a = [float(at + 1) for at in range(50)]
    found = bootstrap(lambda x, y: x / y, ([2 * each for each in a], a), 3)
    assert found is not None and found.low == pytest.approx(2.0) == found.high


def test_needed_items_grow_with_noise_and_nearness() -> None:
    """A drift nearer to the maximum, or under more noise, needs more items; what can't be told apart has no number."""
    plain = needed_items(0.005, 0.02)
    assert plain is not None and items_to_pass(0.005) <= plain < 1200
    near, noisy = needed_items(0.005, 0.01), needed_items(0.005, 0.02, 0.01)
    assert near is not None and near > plain
    assert noisy is not None and noisy > plain
    assert needed_items(0.005, 0.02, 1.0) is None


def test_items_to_pass_are_exact() -> None:
    """So many without a hit have an upper limit within the maximum, and one fewer does not."""
    for most in (0.005, 0.01, 0.2):
        count = items_to_pass(most)
        assert share([False] * count).high <= most < share([False] * (count - 1)).high
