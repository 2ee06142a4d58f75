"""Runs of token positions, and the rows of the forward that computes them."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int64]


class Run(NamedTuple):
    """Token positions [start, stop) of one text."""

    start: int
    stop: int

    @property
    def tokens(self) -> int:
        """How many positions."""
        return self.stop - self.start


class Rows(NamedTuple):
    """One varlen batch: a row per run, all with the block table of their request.

    Row i computes the tokens [seq_lens[i] - query_lens[i], seq_lens[i]) and attends to everything before each. Short
    rows come first: attention backends expect what looks like decoding in front.

    Shape: query_start_locs int32[rows + 1]; query_lens, seq_lens int32[rows]; positions int64[tokens], row by row.
    """

    query_start_locs: npt.NDArray[np.int32]
    query_lens: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    positions: Positions


def as_runs(positions: Iterable[int]) -> list[Run]:
    """The maximal runs of these positions, which may come in any order and repeatedly."""
    found = np.unique(np.fromiter(positions, np.int64))
    if not len(found):
        return []
    breaks = np.flatnonzero(np.diff(found) != 1) + 1
    pieces = np.split(found, breaks)
    return [Run(int(piece[0]), int(piece[-1]) + 1) for piece in pieces]


def as_positions(runs: Sequence[Run]) -> Positions:
    """All positions of runs, in their order."""
    if not runs:
        return np.empty(0, np.int64)
    return np.concatenate([np.arange(run.start, run.stop, dtype=np.int64) for run in runs])


def token_count(runs: Iterable[Run]) -> int:
    """How many positions runs have that do not overlap."""
    return sum(run.tokens for run in runs)


def joined(runs: Iterable[Run]) -> list[Run]:
    """The same positions as maximal runs, in order; empty runs are left out."""
    merged: list[Run] = []
    for run in sorted(runs):
        if run.tokens <= 0:
            continue
        if merged and run.start <= merged[-1].stop:
            merged[-1] = Run(merged[-1].start, max(merged[-1].stop, run.stop))
        else:
            merged.append(run)
    return merged


def without(whole: Run, runs: Iterable[Run]) -> list[Run]:
    """The positions of `whole` that are in none of `runs`, as maximal runs."""
    rest, at = [], whole.start
    for run in joined(runs):
        if run.start > at and at < whole.stop:
            rest.append(Run(at, min(run.start, whole.stop)))
        at = max(at, run.stop)
    return [*rest, Run(at, whole.stop)] if at < whole.stop else rest


def slices(runs: Sequence[Run], budget: int) -> Iterator[list[Run]]:
    """Runs in ascending order, cut into batches of at most `budget` tokens for one step each.

    A position is computed after all positions before it, whatever the budget: the result is the same as at once.
    Raises: ValueError for a budget below one token.
    """
    if budget < 1:
        raise ValueError(f"a step computes at least one token, not {budget}")
    batch: list[Run] = []
    room = budget
    for run in joined(runs):
        start = run.start
        while start < run.stop:
            stop = min(run.stop, start + room)
            batch.append(Run(start, stop))
            room -= stop - start
            start = stop
            if not room:
                yield batch
                batch, room = [], budget
    if batch:
        yield batch


def rows(runs: Sequence[Run]) -> Rows:
    """The batch that computes runs. Raises: ValueError for no runs, an empty one, or runs that overlap."""
    ordered = sorted(runs)
    if not ordered or any(run.tokens < 1 for run in ordered):
        raise ValueError("a forward has at least one run, and a run at least one token")
    if any(after.start < before.stop for before, after in pairwise(ordered)):
        raise ValueError("runs of one forward do not overlap: a token is computed once")
    by_length = sorted(ordered, key=lambda run: (run.tokens, run.start))
    query_lens = np.array([run.tokens for run in by_length], np.int32)
    starts = np.zeros(len(by_length) + 1, np.int32)
    np.cumsum(query_lens, out=starts[1:])
    return Rows(starts, query_lens, np.array([run.stop for run in by_length], np.int32), as_positions(by_length))


def attended(runs: Iterable[Run]) -> int:
    """How many keys the tokens of runs attend to in sum, themselves left out: what attention costs."""
    return sum((run.start + run.stop - 1) * run.tokens // 2 for run in runs)
