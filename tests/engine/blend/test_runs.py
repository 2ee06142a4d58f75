"""Runs and rows: no position is lost, computed twice, or computed before what it attends to."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotspan.engine.blend.runs import Run, as_positions, as_runs, attended, joined, rows, slices, token_count, without

POSITIONS = st.lists(st.integers(0, 60), max_size=40)
RUNS = st.lists(st.builds(lambda start, tokens: Run(start, start + tokens), st.integers(0, 40), st.integers(0, 9)))


@given(POSITIONS)
def test_runs_and_positions_say_the_same(positions: list[int]) -> None:
    """Runs have each position once, in order, and touch nowhere."""
    runs = as_runs(positions)
    assert as_positions(runs).tolist() == sorted(set(positions))
    assert token_count(runs) == len(set(positions))
    assert all(before.stop < after.start for before, after in pairwise(runs))


@given(RUNS)
def test_joined_runs_are_maximal(runs: list[Run]) -> None:
    """Overlapping, touching and empty runs become the runs of their positions."""
    assert joined(runs) == as_runs(at for run in runs for at in range(run.start, run.stop))


@given(RUNS, st.integers(0, 40), st.integers(0, 30))
def test_without_is_the_difference_of_sets(runs: list[Run], start: int, tokens: int) -> None:
    """What is left of a run are its positions that no other run has, as maximal runs."""
    gone = {at for run in runs for at in range(run.start, run.stop)}
    assert without(Run(start, start + tokens), runs) == as_runs(set(range(start, start + tokens)) - gone)


@given(POSITIONS, st.integers(1, 70))
def test_slices_are_ascending_and_within_the_budget(positions: list[int], budget: int) -> None:
    """However small the budget, batches in order have all positions in order; all but the last are full."""
    runs = as_runs(positions)
    batches = list(slices(runs, budget))
    assert [at for batch in batches for at in as_positions(batch).tolist()] == as_positions(runs).tolist()
    sizes = [token_count(batch) for batch in batches]
    assert all(size == budget for size in sizes[:-1]) and all(0 < size <= budget for size in sizes)


@given(POSITIONS.filter(bool))
def test_rows_compute_each_position_over_all_before_it(positions: list[int]) -> None:
    """A row has query_len tokens that end at seq_len; rows are sorted by length, and have each position once."""
    runs = as_runs(positions)
    batch = rows(runs)
    assert sorted(batch.query_lens.tolist()) == batch.query_lens.tolist()
    assert batch.query_start_locs.tolist() == [0, *np.cumsum(batch.query_lens).tolist()]
    for row, (length, stop) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
        mine = batch.positions[batch.query_start_locs[row] : batch.query_start_locs[row + 1]]
        assert mine.tolist() == list(range(stop - length, stop))
    assert sorted(batch.positions.tolist()) == sorted(set(positions))


@pytest.mark.parametrize("runs", [[], [Run(3, 3)], [Run(0, 4), Run(3, 5)], [Run(0, 4), Run(0, 4)]])
def test_rows_that_compute_nothing_or_twice_are_refused(runs: list[Run]) -> None:
    """Two rows that write the same slot would race in the kernel."""
    with pytest.raises(ValueError, match="run"):
        rows(runs)


def test_a_step_without_tokens_is_refused() -> None:
    """A budget of zero would never end."""
    with pytest.raises(ValueError, match="at least one token"):
        next(slices([Run(0, 1)], 0))


@given(RUNS)
def test_attended_counts_the_keys_before_each_token(runs: list[Run]) -> None:
    """A token attends to as many keys before it as its position says."""
    assert attended(runs) == sum(at for run in runs for at in range(run.start, run.stop))
