"""Plans: exact prefix first, no token claimed twice or missed, and only where blending pays."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotspan.core.types import ChunkKey
from hotspan.engine.blend.index import Found, Window
from hotspan.engine.blend.plan import MIN_PIECE_TOKENS, MIN_REUSED_TOKENS, Pace, Refusal, SpanPlan, plan_spans
from hotspan.engine.blend.runs import Run, as_positions

WIDTH = 256
PACE = Pace(step_s=0.01, token_s=1e-4, attended_s=1e-9, move_s=1e-6, layers=0)


def found(*starts: int, position: int = 1000) -> list[Found]:
    return [Found(Run(start, start + WIDTH), Window(ChunkKey(bytes(32)), position)) for start in starts]


def planned(prompt: int, exact: int, starts: list[int]) -> SpanPlan:
    """Where only computed tokens take time."""
    plan = plan_spans(prompt, exact, found(*starts), Pace(0.0, 1e-4, 0.0, 0.0), 0.0)
    assert isinstance(plan, SpanPlan)
    plan.check()
    return plan


@given(
    st.integers(1, 6000),
    st.integers(0, 6000),
    st.lists(st.integers(0, 6000), max_size=20, unique=True),
    st.floats(0, 1),
)
def test_every_token_behind_the_prefix_is_reused_or_fresh(
    prompt: int, exact: int, starts: list[int], share: float
) -> None:
    """Reused and fresh tokens make up all that is claimed, but the last token of the prompt; each is claimed once."""
    exact = min(exact, prompt)
    windows = [start for start in starts if start + WIDTH <= prompt]
    plan = plan_spans(prompt, exact, found(*windows), PACE, share)
    if isinstance(plan, Refusal):
        return
    plan.check()
    assert plan.claimed == Run(exact, prompt - 1)
    assert plan.reused_tokens >= MIN_REUSED_TOKENS
    assert plan.blended_s <= 0.7 * plan.full_s + 1e-9
    for reuse in plan.reused:
        start = reuse.run.start - reuse.skip
        assert start in windows and reuse.run.stop <= start + WIDTH
        assert reuse.run.tokens >= MIN_PIECE_TOKENS
        assert reuse.shift == start - reuse.window.position
    assert plan.recomputed([]) == list(plan.fresh)
    everything = as_positions([reuse.run for reuse in plan.reused]).tolist()
    assert plan.recomputed(everything) == [plan.claimed]


def test_a_window_that_the_prefix_has_in_part_is_used_behind_it() -> None:
    """Its first tokens are exact; the rest is reused from there on, and rotated by the same shift."""
    plan = planned(2000, 300, [100, 600, 900])
    assert [(reuse.run, reuse.skip) for reuse in plan.reused] == [
        (Run(300, 356), 200),
        (Run(600, 856), 0),
        (Run(900, 1156), 0),
    ]
    assert {reuse.shift for reuse in plan.reused} == {-900, -400, -100}
    assert plan.first_approximate == 300
    assert plan.fresh == (Run(356, 600), Run(856, 900), Run(1156, 1999))


def test_overlapping_windows_are_used_once() -> None:
    """The window at the end of a section overlaps the one before it; of each token there is one reuse."""
    plan = planned(1000, 0, [100, 356, 480])
    assert [reuse.run for reuse in plan.reused] == [Run(100, 356), Run(356, 612), Run(612, 736)]
    assert plan.reused[-1].skip == 612 - 480


def test_a_few_tokens_of_a_window_are_computed() -> None:
    """A window of which others have all but a few tokens is not loaded."""
    plan = planned(1000, 0, [100, 356, 356 + MIN_PIECE_TOKENS - 1])
    assert [reuse.run for reuse in plan.reused] == [Run(100, 356), Run(356, 612)]


def test_the_last_token_is_computed_by_the_engine() -> None:
    """A prompt of windows alone leaves its last token."""
    assert planned(768, 0, [0, 256, 512]).claimed == Run(0, 767)


@pytest.mark.parametrize(
    ("prompt", "exact", "starts", "share", "refusal"),
    [
        (5000, 0, [], 0.0, Refusal.NO_WINDOWS),
        (1000, 1000, [0, 256], 0.0, Refusal.NO_WINDOWS),
        (1000, 744, [0, 256, 488], 0.0, Refusal.NO_WINDOWS),
        (5000, 0, [0], 0.0, Refusal.FEW_TOKENS),
        (5000, 0, [0, 256], 0.0, Refusal.LITTLE_SAVED),
        (1000, 0, [0, 256, 512], 0.9, Refusal.LITTLE_SAVED),
    ],
)
def test_what_saves_too_little_is_refused(
    prompt: int, exact: int, starts: list[int], share: float, refusal: Refusal
) -> None:
    """Below 512 tokens, or 30 % of the predicted time, the prompt is computed as if there were no windows."""
    assert plan_spans(prompt, exact, found(*starts), PACE, share) is refusal


def test_a_slow_tier_or_a_costly_choice_is_refused() -> None:
    """Moving the windows, and choosing what to recompute, count against what is saved."""
    starts = list(range(0, 4864, 256))
    assert isinstance(plan_spans(5000, 0, found(*starts), PACE, 0.3), SpanPlan)
    assert plan_spans(5000, 0, found(*starts), PACE._replace(move_s=1e-4), 0.3) is Refusal.LITTLE_SAVED
    assert plan_spans(5000, 0, found(*starts), PACE._replace(layers=5), 0.3, check_layer=2) is Refusal.LITTLE_SAVED
    assert isinstance(plan_spans(5000, 0, found(*starts), PACE._replace(layers=32), 0.3, check_layer=2), SpanPlan)


def test_an_engine_of_unknown_speed_does_not_blend() -> None:
    """Nothing can be said to be saved before the first steps were seen."""
    starts = list(range(0, 4864, 256))
    assert plan_spans(5000, 0, found(*starts), Pace(0, 0, 0, 0), 0.0) is Refusal.LITTLE_SAVED


def test_only_reused_tokens_can_be_selected() -> None:
    """A selector that names another token has a bug: it would be written twice."""
    plan = planned(2000, 0, [256, 512, 768, 1024, 1280, 1536])
    assert plan.recomputed([300, 301, 2 * 256]) == [Run(0, 256), Run(300, 302), Run(512, 513), Run(1792, 1999)]
    for stray in (-1, 255, 1792, 1999):
        with pytest.raises(ValueError, match=f"{stray} is not reused"):
            plan.recomputed([300, stray])


@pytest.mark.parametrize(("prompt", "exact", "share"), [(10, 11, 0.0), (10, 0, 1.5), (10, -1, 0.0)])
def test_what_is_no_prompt_is_refused(prompt: int, exact: int, share: float) -> None:
    """More exact tokens than there are, or a share that is none."""
    with pytest.raises(ValueError, match="are no prompt"):
        plan_spans(prompt, exact, [], PACE, share)


@pytest.mark.parametrize(("loaded", "pays"), [(0, True), (700, False)])
def test_a_prefix_in_the_tiers_counts(loaded: int, pays: bool) -> None:
    """Blending competes with what loading the exact prefix leaves to compute. What its own loads cost: test_cost.py."""
    windows = found(100, 356, 612)
    plan = plan_spans(1000, 0, windows, Pace(0.0, 1e-4, 0.0, 1e-6), 0.1, loaded_tokens=loaded)
    assert isinstance(plan, SpanPlan) == pays
