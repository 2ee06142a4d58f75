"""Steps of the engine as the cost model sees them."""

from types import SimpleNamespace
from typing import Any

import pytest

from hotspan.engine.steps import StepWatch
from hotspan.testing.clock import SimulatedClock


class Told:
    """A cost model that remembers what it was told."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int, float]] = []

    def observe_step(self, tokens: int, context_tokens: int, seconds: float) -> None:
        self.steps.append((tokens, context_tokens, seconds))


def scheduled(new: dict[str, tuple[int, int]], cached: dict[str, tuple[int, int]]) -> Any:
    """A scheduler's output: by request, how many tokens were computed before, and how many are in this step."""
    counts = {name: count for name, (_, count) in (new | cached).items()}
    return SimpleNamespace(
        total_num_scheduled_tokens=sum(counts.values()),
        num_scheduled_tokens=counts,
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=start) for name, (start, _) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached), num_computed_tokens=[start for start, _ in cached.values()]
        ),
    )


def test_prompt_tokens_count_and_decoded_ones_do_not() -> None:
    """Of a step, what it computes of prompts is told, each token with those before it, and how long it took."""
    clock, told = SimulatedClock(), Told()
    watch = StepWatch(told, {"a": 100, "b": 10, "c": 50}.__getitem__, clock)  # type: ignore[arg-type]
    watch.begin(scheduled({"a": (60, 20)}, {"b": (10, 1), "c": (48, 4)}))
    clock.advance(0.25)
    assert watch.step_s == 0.0
    watch.end()
    tokens = [*range(60, 80), *range(48, 50)]
    assert told.steps == [(len(tokens), sum(tokens), pytest.approx(0.25))]
    assert watch.step_s == pytest.approx(0.25)


def test_a_step_that_was_scheduled_ahead_begins_when_the_last_one_ended() -> None:
    """With two steps in flight each is given its own time."""
    clock, told = SimulatedClock(), Told()
    watch = StepWatch(told, lambda name: 100, clock)  # type: ignore[arg-type]
    watch.begin(scheduled({"a": (0, 10)}, {}))
    watch.begin(scheduled({"b": (0, 20)}, {}))
    clock.advance(0.1)
    watch.end()
    clock.advance(0.2)
    watch.end()
    assert [(tokens, pytest.approx(seconds)) for tokens, _, seconds in told.steps] == [(10, 0.1), (20, 0.2)]


def test_an_idle_engine_teaches_nothing() -> None:
    """Steps without tokens, which poll for loads, are not told; then a load hides behind no step."""
    clock, told = SimulatedClock(), Told()
    watch = StepWatch(told, lambda name: 100, clock)  # type: ignore[arg-type]
    watch.begin(scheduled({"a": (0, 10)}, {}))
    clock.advance(0.1)
    watch.end()
    watch.begin(scheduled({}, {}))
    clock.advance(0.005)
    watch.end()
    assert len(told.steps) == 1 and watch.step_s == 0.0
