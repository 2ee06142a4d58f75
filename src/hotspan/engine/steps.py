"""How long the engine's steps take, for the cost model."""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from vllm.v1.core.sched.output import SchedulerOutput

from hotspan.cache.cost import CostModel
from hotspan.core.clock import Clock

_MAX_IN_FLIGHT = 64
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
    """Sees each step when it is scheduled and when its output is there, which come in the same order.

    step_tokens: the most that one computes.
    """

    def __init__(self, cost: CostModel, step_tokens: int, clock: Clock) -> None:
        self._cost = cost
        self._step_tokens = step_tokens
        self._clock = clock
        self._steps: deque[Step] = deque(maxlen=_MAX_IN_FLIGHT)
        self._prompts: dict[str, int] = {}
        self._left: dict[str, int] = {}  # of the prompts that are not computed yet
        self._left_tokens = 0
        self._ended_s = 0.0
        self._last_s = 0.0
        self._is_busy = False

    @property
    def busy_s(self) -> float:
        """Seconds until the prompts that were admitted are computed."""
        return self._cost.prefill_s(0, self._left_tokens)

    @property
    def step_s(self) -> float:
        """What the next step takes without a further prompt; 0 if there is nothing to compute."""
        ahead_s = self._cost.prefill_s(0, min(self._left_tokens, self._step_tokens))
        return max(ahead_s, self._last_s) if self._is_busy else ahead_s

    def admit(self, request_id: str, prompt_tokens: int, kept_tokens: int) -> None:
        """A request begins to run, and finds so many of its prompt's tokens."""
        self._prompts[request_id] = prompt_tokens
        self._note(request_id, kept_tokens)

    def forget(self, request_id: str) -> None:
        """A request ended."""
        self._prompts.pop(request_id, None)
        self._left_tokens -= self._left.pop(request_id, 0)

    def begin(self, scheduled: SchedulerOutput) -> None:
        """A step was scheduled. Costs nothing per request that only decodes."""
        self._is_busy = scheduled.total_num_scheduled_tokens > 0
        tokens = context = 0
        for request_id, start in self._starts(scheduled):
            prompt = self._prompts.get(request_id, 0)
            stop = min(start + scheduled.num_scheduled_tokens.get(request_id, 0), prompt)
            if prompt:
                self._note(request_id, max(start, stop))
            if stop > start:
                tokens += stop - start
                context += (start + stop - 1) * (stop - start) // 2
        self._steps.append(Step(self._clock.monotonic(), scheduled.total_num_scheduled_tokens, tokens, context))

    def disregard(self) -> None:
        """The step that was scheduled last does also what is not known here: nothing is learnt from its time."""
        self._steps[-1] = self._steps[-1]._replace(scheduled=0)

    def end(self) -> None:
        """The output of the oldest step is there."""
        if not self._steps:
            return
        step, now_s = self._steps.popleft(), self._clock.monotonic()
        if step.scheduled:
            took_s = now_s - max(step.begun_s, self._ended_s)  # one scheduled ahead began when the last one ended
            if step.tokens:
                self._cost.observe_step(step.tokens, step.context, took_s)
            else:
                self._last_s = took_s
        self._ended_s = now_s

    def _note(self, request_id: str, done: int) -> None:
        """So many of its prompt's tokens are computed, or in a step."""
        left = self._prompts[request_id] - done
        self._left_tokens += max(0, left) - self._left.pop(request_id, 0)
        if left > 0:
            self._left[request_id] = left

    def _starts(self, scheduled: SchedulerOutput) -> Iterator[tuple[str, int]]:
        """The requests of a step that may compute prompt tokens, each with how many tokens were computed before."""
        for request in scheduled.scheduled_new_reqs:
            yield request.req_id, request.num_computed_tokens
        cached = scheduled.scheduled_cached_reqs
        if self._left or cached.resumed_req_ids:
            prefilling = self._left.keys() | cached.resumed_req_ids
            starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
            yield from ((name, starts[name]) for name in prefilling if name in starts)
