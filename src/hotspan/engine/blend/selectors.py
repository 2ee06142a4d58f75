"""Which reused tokens are computed again. Pure functions on tensors; each returns sorted positions of the prompt.

first_k     the first tokens of each window, which lacked their context most (EPIC)
deviation   tokens whose keys in an early layer differ most from what this prompt would give (CacheBlend)
query       tokens that the question attends to (ProphetKV, QCFuse)
"""

from collections.abc import Sequence
from enum import StrEnum

import torch

from hotspan.engine.blend.runs import Run


class Selector(StrEnum):
    """The name of each, as the configuration has it."""

    FIRST_K = "first_k"
    DEVIATION = "deviation"
    QUERY = "query"


def first_k(reused: Sequence[Run], k: int) -> torch.Tensor:
    """The first `k` positions of each run. Shape: int64[selected]."""
    picked = [torch.arange(run.start, min(run.start + k, run.stop)) for run in reused]
    return torch.cat(picked).sort().values if picked else torch.empty(0, dtype=torch.int64)


def deviations(reused: torch.Tensor, computed: torch.Tensor) -> torch.Tensor:
    """How far each token's reused keys of one layer are from the computed ones: the squared distance over all heads.

    Shape: both [tokens, KV heads, head size]; returns float32[tokens].
    """
    return (computed.float() - reused.float()).square().flatten(1).sum(1)


def attention(
    queries: torch.Tensor,
    query_positions: torch.Tensor,
    keys: torch.Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """What one layer's attention of the question gives to each token: the most that any query gives, over all heads.

    queries: of the question's tokens, with the positions `query_positions`. Shape: [queries, heads, head size].
    keys:    of the whole prompt from position 0 on. Shape: [tokens, KV heads, head size].
    window:  of sliding-window attention: a query sees this many tokens, itself included.
    Returns: float32[tokens]. Memory: heads x queries x tokens floats.
    """
    kv_heads, groups = keys.shape[1], queries.shape[1] // keys.shape[1]
    if groups * kv_heads != queries.shape[1]:
        raise ValueError(f"{queries.shape[1]} heads do not share {kv_heads} KV heads evenly")
    grouped = queries.unflatten(1, (kv_heads, groups)).permute(1, 2, 0, 3).flatten(1, 2)  # [KV heads, rows, head size]
    scores = torch.bmm(grouped, keys.permute(1, 2, 0)).float().unflatten(1, (groups, len(queries))).mul_(scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    first = 0 if window is not None else int(query_positions.min())  # no query is before it: all see what is
    distance = query_positions[:, None] - torch.arange(first, len(keys), device=keys.device)[None, :]
    is_hidden = distance < 0
    if window is not None:
        is_hidden |= distance >= window
    scores[..., first:].masked_fill_(is_hidden, -torch.inf)
    return scores.softmax(-1).amax(2).sum((0, 1))


def highest(scores: torch.Tensor, positions: torch.Tensor, share: float, *, width: int = 1) -> torch.Tensor:
    """The positions with the highest scores, `share` of all, in groups of `width` neighbours.

    A forward over a few long runs is faster than over many single tokens (1.6 times at 15 % and a width of 16). A group
    counts by its sum, and is a piece of a run: groups do not reach over a gap. At most `width` - 1 positions more than
    the share are taken, so that a share of 1 is everything.
    Shape: scores float[n]; positions int64[n], ascending. Equal scores: the lower position first.
    """
    if not 0.0 <= share <= 1.0 or width < 1:
        raise ValueError(f"a share is between 0 and 1 and a width at least 1, not {share} and {width}")
    wanted = round(share * len(positions))
    if not wanted:
        return positions[:0]
    groups = _groups(positions, width)
    sums = torch.zeros(int(groups[-1]) + 1, dtype=torch.float64).index_add_(0, groups, scores.double().cpu())
    sizes = torch.bincount(groups)
    order = sums.sort(descending=True, stable=True).indices
    taken = order[: int((sizes[order].cumsum(0) < wanted).sum()) + 1]
    is_taken = torch.zeros(len(sums), dtype=torch.bool)
    is_taken[taken] = True
    return positions[is_taken[groups].to(positions.device)]


def _groups(positions: torch.Tensor, width: int) -> torch.Tensor:
    """The number of each position's group: up to `width` neighbours without a gap."""
    places = torch.arange(len(positions))
    begins = torch.ones(len(positions), dtype=torch.bool)
    begins[1:] = positions.cpu().diff() != 1
    run_start = torch.where(begins, places, 0).cummax(0).values
    begins |= (places - run_start) % width == 0
    return begins.cumsum(0) - 1
