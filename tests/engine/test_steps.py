"""Steps of the engine as the cost model sees them."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from hotspan.engine.steps import StepWatch
from hotspan.testing.clock import SimulatedClock
from tests.operations import operations


def scheduled(new: dict[str, tuple[int, int]], cached: dict[str, tuple[int, int]], resumed: Iterable[str] = ()) -> Any:
    """A scheduler's output: by request, how many tokens were computed before, and how many are in this step."""
    counts = {name: count for name, (_, count) in (new | cached).items()}
    return SimpleNamespace(
        total_num_scheduled_tokens=sum(counts.values()),
        num_scheduled_tokens=counts,
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=start) for name, (start, _) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached),
            num_computed_tokens=[start for start, _ in cached.values()],
            resumed_req_ids=set(resumed),
        ),
    )


class Watched:
    """A watch over a model that remembers what it was told, and computes 100 tokens a second."""

    def __init__(self, **prompts: int) -> None:
        self.clock = SimulatedClock()
        self.told: list[tuple[int, int, float]] = []
        self.watch = StepWatch(self, 50, self.clock)  # type: ignore[arg-type]
        for name, tokens in prompts.items():
            self.watch.admit(name, tokens, 0)

    def observe_step(self, tokens: int, context_tokens: int, seconds: float) -> None:
        self.told.append((tokens, context_tokens, seconds))

    def prefill_s(self, from_token: int, to_token: int) -> float:
        return (to_token - from_token) / 100


def test_prompt_tokens_count_and_decoded_ones_do_not() -> None:
    """Of a step, what it computes of prompts is told, each token with those before it, and how long it took."""
    rig = Watched(a=100, b=10, c=50)
    rig.watch.schedule(scheduled({"a": (60, 20)}, {"b": (10, 1), "c": (48, 4), "unknown": (3, 1)}))
    rig.clock.advance(0.25)
    rig.watch.end()
    tokens = [*range(60, 80), *range(48, 50)]
    assert rig.told == [(len(tokens), sum(tokens), pytest.approx(0.25))]


def test_a_step_that_was_scheduled_ahead_begins_when_the_last_one_ended() -> None:
    """With two steps in flight each is given its own time."""
    rig = Watched(a=100, b=100)
    rig.watch.schedule(scheduled({"a": (0, 10)}, {}))
    rig.watch.schedule(scheduled({"b": (0, 20)}, {}))
    rig.clock.advance(0.1)
    rig.watch.end()
    rig.clock.advance(0.2)
    rig.watch.end()
    assert [(tokens, pytest.approx(seconds)) for tokens, _, seconds in rig.told] == [(10, 0.1), (20, 0.2)]


def test_an_idle_engine_teaches_nothing() -> None:
    """Steps without tokens, which poll for loads, are not told; then a load hides behind no step."""
    rig = Watched(a=10)
    rig.watch.schedule(scheduled({"a": (0, 10)}, {}))
    rig.clock.advance(0.1)
    rig.watch.end()
    rig.watch.schedule(scheduled({}, {}))
    rig.clock.advance(0.005)
    rig.watch.end()
    assert len(rig.told) == 1 and rig.watch.step_s == 0.0 and rig.watch.busy_s == 0.0


def test_prompts_that_came_before_are_work_ahead() -> None:
    """What is left of admitted prompts is how long the engine is busy, a step's worth of it how long the next step."""
    rig = Watched(a=100)
    rig.watch.admit("b", 80, 50)
    assert rig.watch.busy_s == pytest.approx(1.3) and rig.watch.step_s == pytest.approx(0.5)
    rig.watch.schedule(scheduled({"a": (0, 50)}, {}))
    assert rig.watch.busy_s == pytest.approx(0.8)
    rig.watch.forget("a")
    assert rig.watch.busy_s == pytest.approx(0.3) and rig.watch.step_s == pytest.approx(0.3)
    rig.watch.schedule(scheduled({"b": (50, 30)}, {}))
    assert rig.watch.busy_s == 0.0


def test_a_step_that_decodes_is_as_long_as_the_last_one() -> None:
    """Without prompts to compute, the next step takes what decoding took."""
    rig = Watched(a=10)
    for _ in range(2):
        rig.watch.schedule(scheduled({}, {"a": (10, 1)}))
        rig.clock.advance(0.04)
        rig.watch.end()
    assert rig.watch.step_s == pytest.approx(0.04)


def test_a_preempted_request_computes_its_prompt_again() -> None:
    """A request that is resumed after it began to decode counts like one that has just come."""
    rig = Watched(a=100)
    rig.watch.schedule(scheduled({"a": (0, 100)}, {}))
    rig.watch.schedule(scheduled({}, {"a": (40, 20)}, resumed=["a"]))
    assert rig.watch.busy_s == pytest.approx(0.4)
    rig.watch.schedule(scheduled({}, {"a": (60, 40)}))
    assert rig.watch.busy_s == 0.0
    for _ in range(3):
        rig.watch.end()
    assert [tokens for tokens, _, _ in rig.told] == [100, 20, 40]


def test_requests_that_decode_cost_a_step_nothing() -> None:
    """A step costs as many operations with 500 decoding requests as with one."""

    def cost(requests: int) -> int:
        names = [f"r{n}" for n in range(requests)]
        rig = Watched(**dict.fromkeys(names, 10))
        rig.watch.schedule(scheduled(dict.fromkeys(names, (0, 10)), {}))
        step = scheduled({}, dict.fromkeys(names, (10, 1)))
        return operations(lambda: rig.watch.schedule(step))

    assert cost(500) == cost(1)
