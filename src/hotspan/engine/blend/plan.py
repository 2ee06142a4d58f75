"""What of a prompt is taken from windows, and what is computed: exact prefix first, windows beyond it if it pays.

    prompt   [exact prefix][fresh][ window ][ window ][fresh][ window ][question][last]
    claimed                ^------------------------------------------------------^
    reused                        [--------][--------]       [--------]
    fresh                  [-----]                    [-----]          [--------]

The last token is never claimed: the engine computes it as in every request, and samples from it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np

from hotspan.engine.blend.index import Found, Window
from hotspan.engine.blend.runs import Run, as_runs, attended, joined, token_count, without

MIN_REUSED_TOKENS = 512
MIN_SAVED_SHARE = 0.30
"""What blending has to save of the predicted time to compute everything behind the exact prefix."""

MIN_PIECE_TOKENS = 16
"""Fewer tokens of a window are computed rather than loaded: most of the window is covered by others."""


class Pace(NamedTuple):
    """Predicted seconds: of one step, of computing a token, per key that a token attends to, of loading and rotating a
    reused token. layers: of the model; 0: what a probe takes is not known.
    """

    step_s: float
    token_s: float
    attended_s: float
    move_s: float
    layers: int = 0

    def compute_s(self, runs: Iterable[Run]) -> float:
        """To compute runs in one step."""
        runs = list(runs)
        return self.step_s + self.token_s * token_count(runs) + self.attended_s * attended(runs)

    def probe_share(self, check_layer: int) -> float:
        """How much of computing everything it is to compute it up to the keys of a layer; nothing for the first."""
        return probe_share(check_layer, self.layers) if check_layer and self.layers else 0.0


def probe_share(check_layer: int, layers: int) -> float:
    """How much of a forward it is to compute up to the keys of a layer, which is the first one, 0, or one behind it."""
    return min(1.0, (check_layer + 0.5) / layers)


class Reuse(NamedTuple):
    """A part of a window in a prompt: `run` of the prompt is the window's tokens from `skip` on."""

    run: Run
    window: Window
    skip: int

    @property
    def shift(self) -> int:
        """How many positions later it is than where it was seen before; windows that lay side by side share it."""
        return self.at - self.window.position

    @property
    def at(self) -> int:
        """Where the window begins in the prompt: how many positions its keys, as they are stored, are rotated by."""
        return self.run.start - self.skip


class Refusal(Enum):
    """Why a prompt is computed as if there were no windows."""

    NO_WINDOWS = "no_windows"
    FEW_TOKENS = "few_tokens"
    LITTLE_SAVED = "little_saved"


@dataclass(frozen=True, slots=True)
class SpanPlan:
    """How one prompt is blended.

    claimed: all tokens behind the exact prefix, but the last.
    reused:  from left to right, without overlap.
    fresh:   the rest of `claimed`.
    full_s, blended_s: predicted, to compute `claimed` (but what the tiers have of it) and to blend it.
    """

    claimed: Run
    reused: tuple[Reuse, ...]
    fresh: tuple[Run, ...]
    full_s: float
    blended_s: float

    @property
    def reused_tokens(self) -> int:
        """Tokens that are taken from windows, those that are recomputed included."""
        return sum(reuse.run.tokens for reuse in self.reused)

    @property
    def first_approximate(self) -> int:
        """The first token whose KV is not what a prefill would give: everything from there on stays private."""
        return self.reused[0].run.start

    def recomputed(self, selected: Iterable[int]) -> list[Run]:
        """The runs to compute, in order: everything fresh, and the selected of the reused tokens.

        Raises: ValueError if a selected position is not reused.
        """
        chosen = np.fromiter(selected, np.int64)
        is_reused = np.zeros(self.claimed.stop, bool)
        for reuse in self.reused:
            is_reused[reuse.run.start : reuse.run.stop] = True
        strays = chosen[(chosen < 0) | (chosen >= len(is_reused))].tolist()
        strays = strays or chosen[~is_reused[chosen]].tolist()
        if strays:
            raise ValueError(f"token {strays[0]} is not reused: a selector chooses among reused tokens only")
        return joined([*self.fresh, *as_runs(chosen.tolist())])

    def check(self) -> None:
        """Raise AssertionError if claimed, reused and fresh do not agree."""
        pieces = sorted([*self.fresh, *(reuse.run for reuse in self.reused)])
        assert [piece.start for piece in pieces] == [self.claimed.start, *(piece.stop for piece in pieces[:-1])]
        assert pieces[-1].stop == self.claimed.stop
        assert all(piece.tokens > 0 for piece in pieces)
        assert all(reuse.skip >= 0 for reuse in self.reused)


def plan_spans(
    prompt_tokens: int,
    exact_tokens: int,
    found: Sequence[Found],
    pace: Pace,
    recompute_share: float,
    *,
    min_tokens: int = MIN_REUSED_TOKENS,
    loaded_tokens: int = 0,
    fresh_passes: int = 1,
    check_layer: int = 0,
) -> SpanPlan | Refusal:
    """How to blend a prompt, or why not to.

    exact_tokens:    from the front, those that the prefix caches have. Windows within them are not used.
    found:           windows that the tiers have, as `WindowIndex.find` gives them.
    recompute_share: of the reused tokens that the selector will choose.
    min_tokens:      fewer reused tokens are not worth it.
    loaded_tokens:   behind the exact tokens, that the tiers have and that are computed if the prompt is blended.
    fresh_passes:    how often what is fresh is computed: a selector may need it first.
    check_layer:     up to which everything is computed before tokens are selected; 0: nothing is.
    Raises: ValueError for a share that is none, or for more exact tokens than there are.
    """
    if not 0.0 <= recompute_share <= 1.0 or not 0 <= exact_tokens <= prompt_tokens:
        raise ValueError(f"{exact_tokens} of {prompt_tokens} tokens and a share of {recompute_share} are no prompt")
    claimed = Run(exact_tokens, max(exact_tokens, prompt_tokens - 1))
    reused = _reuse(claimed, found)
    if not reused:
        return Refusal.NO_WINDOWS
    tokens = sum(reuse.run.tokens for reuse in reused)
    if tokens < min_tokens:
        return Refusal.FEW_TOKENS
    fresh = without(claimed, [reuse.run for reuse in reused])
    full_s = pace.compute_s([Run(min(claimed.start + loaded_tokens, claimed.stop), claimed.stop)])
    blended_s = (
        fresh_passes * pace.compute_s(fresh)
        + recompute_share * (pace.compute_s([reuse.run for reuse in reused]) - pace.step_s)
        + pace.probe_share(check_layer) * full_s
        + pace.move_s * tokens
    )
    if full_s <= 0 or full_s - blended_s < MIN_SAVED_SHARE * full_s:  # 0: the engine's speed is unknown
        return Refusal.LITTLE_SAVED
    return SpanPlan(claimed, tuple(reused), tuple(fresh), full_s, blended_s)


def _reuse(claimed: Run, found: Iterable[Found]) -> list[Reuse]:
    """The parts of windows that lie in `claimed` and in no window before them."""
    reused = []
    at = claimed.start
    for piece in sorted(found, key=lambda each: each.run):
        start, stop = max(at, piece.run.start), min(claimed.stop, piece.run.stop)
        if stop - start >= MIN_PIECE_TOKENS:
            reused.append(Reuse(Run(start, stop), piece.window, start - piece.run.start))
            at = stop
    return reused
