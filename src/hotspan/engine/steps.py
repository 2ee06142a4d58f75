"""How long the engine's steps take, for the cost model."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from vllm.v1.core.sched.output import SchedulerOutput

from hotspan.cache.cost import CostModel
from hotspan.core.clock import Clock

_MOST_IN_FLIGHT = 64
"""Steps that are remembered at most: the engine schedules one or two ahead, one for each stage of a pipeline."""


class Step(NamedTuple):
    """One that was scheduled.

    tokens:  of prompts, computed in it. context: the sum, over these, of how many stand before each.
    """

    begun_s: float
    scheduled: int
    tokens: int
    context: int


class StepWatch:
    """Sees each step when it is scheduled and when its output is there, which come in the same order."""

    def __init__(self, cost: CostModel, prompt_tokens: Callable[[str], int], clock: Clock) -> None:
        self._cost = cost
        self._prompt_tokens = prompt_tokens
        self._clock = clock
        self._steps: deque[Step] = deque(maxlen=_MOST_IN_FLIGHT)
        self._ended_s = 0.0
        self._last_s = 0.0
        self._is_busy = False

    @property
    def step_s(self) -> float:
        """What the last step took, if the engine computes; 0 if it idles."""
        return self._last_s if self._is_busy else 0.0

    def begin(self, scheduled: SchedulerOutput) -> None:
        """A step was scheduled."""
        self._is_busy = scheduled.total_num_scheduled_tokens > 0
        tokens = context = 0
        for request_id, start in _starts(scheduled):
            stop = min(start + scheduled.num_scheduled_tokens.get(request_id, 0), self._prompt_tokens(request_id))
            if stop > start:
                tokens += stop - start
                context += (start + stop - 1) * (stop - start) // 2
        step = Step(self._clock.monotonic(), scheduled.total_num_scheduled_tokens, tokens, context)
        self._steps.append(step)

    def end(self) -> None:
        """The output of the oldest step is there."""
        if not self._steps:
            return
        step, now_s = self._steps.popleft(), self._clock.monotonic()
        if step.scheduled:
            self._last_s = now_s - max(step.begun_s, self._ended_s)  # one scheduled ahead began when the last one ended
            self._cost.observe_step(step.tokens, step.context, self._last_s)
        self._ended_s = now_s


def _starts(scheduled: SchedulerOutput) -> Iterator[tuple[str, int]]:
    """The requests of a step, each with how many of its tokens were computed before."""
    for request in scheduled.scheduled_new_reqs:
        yield request.req_id, request.num_computed_tokens
    cached = scheduled.scheduled_cached_reqs
    yield from zip(cached.req_ids, cached.num_computed_tokens, strict=True)
