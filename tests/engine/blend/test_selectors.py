"""Selectors: what they choose, against plain definitions of each."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotspan.engine.blend.runs import Run, as_runs
from hotspan.engine.blend.selectors import attention, deviations, first_k, highest

POSITIONS = st.lists(st.integers(0, 50), min_size=1, max_size=40, unique=True).map(sorted)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=5), st.integers(0, 12))
def test_first_k_takes_the_beginning_of_each_window(pieces: list[tuple[int, int]], k: int) -> None:
    """The first tokens of each run, all of a shorter one, sorted."""
    runs, at = [], 0
    for gap, tokens in pieces:
        runs.append(Run(at + gap, at + gap + tokens))
        at += gap + tokens
    assert first_k(runs, k).tolist() == [p for run in runs for p in range(run.start, min(run.stop, run.start + k))]


def test_deviations_are_squared_distances() -> None:
    """Of each token's keys over all heads; none where the keys are the same."""
    reused, computed = drawn(5, 2, 3), drawn(5, 2, 3, seed=1)
    computed[3] = reused[3]
    expected = [float(((computed[n] - reused[n]) ** 2).sum()) for n in range(5)]
    found = deviations(reused, computed)
    assert torch.allclose(found, torch.tensor(expected)) and found[3] == 0
    assert deviations(reused.bfloat16(), computed.bfloat16()).dtype is torch.float32


@pytest.mark.parametrize("heads", [2, 4, 8])
@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_attention_is_that_of_the_model(heads: int, window: int | None, softcap: float | None) -> None:
    """Grouped heads, causal and sliding masks, a soft cap: as computed head by head and query by query."""
    tokens, dim, positions = 12, 4, torch.tensor([7, 9, 11])
    queries, keys = drawn(3, heads, dim), drawn(tokens, 2, dim, seed=1)
    given_to = torch.zeros(tokens)
    for head in range(heads):
        rows = []
        for n, position in enumerate(positions.tolist()):
            scores = keys[:, head // (heads // 2)] @ queries[n, head] * 0.5
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            seen = [p <= position and (window is None or position - p < window) for p in range(tokens)]
            rows.append(torch.where(torch.tensor(seen), scores, -torch.inf).softmax(0))
        given_to += torch.stack(rows).amax(0)
    found = attention(queries, positions, keys, 0.5, window=window, softcap=softcap)
    assert torch.allclose(found, given_to, atol=1e-5)
    assert torch.all(found[12:] == 0)


def test_heads_that_do_not_group_are_refused() -> None:
    """Three heads can't share two KV heads."""
    with pytest.raises(ValueError, match="evenly"):
        attention(drawn(1, 3, 4), torch.tensor([0]), drawn(5, 2, 4), 1.0)


@given(POSITIONS, st.floats(0, 1), st.integers(0, 9))
def test_the_highest_scores_are_taken(positions: list[int], share: float, seed: int) -> None:
    """Without grouping: exactly the share, none outside has a higher score than one inside, in order."""
    at, scores = torch.tensor(positions), drawn(len(positions), seed=seed).abs()
    chosen = highest(scores, at, share)
    assert len(chosen) == round(share * len(positions))
    assert chosen.tolist() == sorted(set(chosen.tolist()))
    inside = torch.isin(at, chosen)
    if len(chosen) and not inside.all():
        assert scores[inside].min() >= scores[~inside].max()


@given(POSITIONS, st.floats(0, 1), st.integers(1, 8), st.integers(0, 9))
@settings(max_examples=30)
def test_groups_are_taken_whole(positions: list[int], share: float, width: int, seed: int) -> None:
    """Pieces of runs, of up to `width` neighbours: the share is reached, and passed by less than one group."""
    at, scores = torch.tensor(positions), drawn(len(positions), seed=seed).abs()
    chosen = highest(scores, at, share, width=width).tolist()
    wanted = round(share * len(positions))
    assert wanted <= len(chosen) < wanted + width
    groups = [
        set(range(start, min(start + width, run.stop)))
        for run in as_runs(positions)
        for start in range(run.start, run.stop, width)
    ]
    assert all(group <= set(chosen) or group.isdisjoint(chosen) for group in groups)


def test_equal_scores_choose_the_lower_position() -> None:
    """All ranks of a model choose alike."""
    positions = torch.arange(10, 20)
    assert highest(torch.ones(10), positions, 0.3).tolist() == [10, 11, 12]


@pytest.mark.parametrize(("share", "width"), [(-0.1, 1), (1.1, 1), (0.5, 0)])
def test_what_is_no_share_or_width_is_refused(share: float, width: int) -> None:
    """A share is between 0 and 1, and a group has a token at least."""
    with pytest.raises(ValueError, match="share"):
        highest(torch.ones(1), torch.zeros(1, dtype=torch.int64), share, width=width)
