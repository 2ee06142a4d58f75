"""The requests that wait for the engine or run in it, and its steps: whom computing one more prompt would delay."""

import math
from collections import deque
from collections.abc import Set
from typing import NamedTuple

from hotspan.cache.choice import Text
from hotspan.cache.cost import CostModel
from hotspan.cache.rates import Arrivals
from hotspan.core.clock import Clock

_MAX_IN_FLIGHT = 64
"""Steps that are remembered at most: the engine schedules one or two ahead, one for each stage of a pipeline."""

_MEMORY = 16
"""Requests over which the share of busy time is averaged."""

_LONG_S = 1e4

_STALL_SHARE = 0.1
"""Share of a step for which new requests may hold it up, with their copies and with waits for chunks."""


class Step(NamedTuple):
    """One that was scheduled.

    scheduled: tokens in it. tokens: of prompts, computed in it. context: the sum, over these, of how many stand before.
    aside_s:   what it takes besides computing tokens.
    """

    begun_s: float
    scheduled: int
    tokens: int
    context: int
    aside_s: float = 0.0


class EngineQueue:
    """The requests of one engine and its steps, as far as the cost model needs them. The scheduler's thread calls it.

    step_tokens: the most tokens that one step computes.
    """

    def __init__(self, cost: CostModel, step_tokens: int, clock: Clock) -> None:
        self._cost = cost
        self._step_tokens = step_tokens
        self._clock = clock
        self._steps: deque[Step] = deque(maxlen=_MAX_IN_FLIGHT)
        self._waiting: dict[str, float] = {}  # since when
        self._prompts: dict[str, int] = {}
        self._left: dict[str, int] = {}  # of the prompts that are not computed yet
        self._left_tokens = 0
        self._arrivals = Arrivals()
        self._utilization = 0.0
        self._ended_s = 0.0
        self._last_s = 0.0
        self._mean_s = 0.0  # of the last steps, of all kinds
        self._stalled_s = 0.0  # by what the step that is being scheduled is held up
        self._is_busy = False

    # -- what happens ------------------------------------------------------------------------------------------------

    def arrive(self, request_id: str, arrival_s: float | None = None) -> None:
        """A request came, now or at that moment (monotonic), and waits."""
        self._waiting[request_id] = now_s = self._clock.monotonic() if arrival_s is None else arrival_s
        self._arrivals.note(now_s)

    def admit(self, request_id: str, prompt_tokens: int, kept_tokens: int) -> None:
        """A request begins to run, and finds so many of its prompt's tokens."""
        self._waiting.pop(request_id, None)
        self._prompts[request_id] = prompt_tokens
        self.note(request_id, kept_tokens)

    def note(self, request_id: str, done: int) -> None:
        """So many tokens of a prompt are computed, or in a step."""
        left = self._prompts[request_id] - done
        self._left_tokens += max(0, left) - self._left.pop(request_id, 0)
        if left > 0:
            self._left[request_id] = left

    def forget(self, request_id: str) -> None:
        """A request ended."""
        self._waiting.pop(request_id, None)
        self._prompts.pop(request_id, None)
        self._left_tokens -= self._left.pop(request_id, 0)

    def begin(self, tokens: int, context: int, scheduled: int) -> None:
        """A step was scheduled; its parts as in `Step`."""
        self._is_busy = scheduled > 0
        self._stalled_s = 0.0
        self._steps.append(Step(self._clock.monotonic(), scheduled, tokens, context))

    def disregard(self) -> None:
        """The step that was scheduled last does also what is not known here: nothing is learnt from its time."""
        self._steps[-1] = self._steps[-1]._replace(scheduled=0)

    def deduct(self, seconds: float) -> None:
        """The step that was scheduled last also runs an encoder for about so long; 0: unknown, nothing is learnt."""
        if self._steps and not seconds:
            self.disregard()
        elif self._steps:
            self._steps[-1] = self._steps[-1]._replace(aside_s=seconds)

    def end(self) -> None:
        """The output of the oldest step is there."""
        if not self._steps:
            return
        step, now_s = self._steps.popleft(), self._clock.monotonic()
        if step.scheduled:
            took_s = now_s - max(step.begun_s, self._ended_s)  # one scheduled ahead began when the last one ended
            if step.tokens:
                self._cost.observe_step(step.tokens, step.context, took_s - step.aside_s)
            else:
                self._last_s = took_s
            self._note_busy(took_s, now_s - self._ended_s)
            self._mean_s += (took_s - self._mean_s) / _MEMORY if self._mean_s else took_s
        self._ended_s = now_s

    def _note_busy(self, busy_s: float, passed_s: float) -> None:
        """The engine was busy for a part of the time that passed."""
        per_s = self._arrivals.per_s(self._clock.monotonic())
        if per_s and 0 < busy_s <= passed_s < _LONG_S:
            share = 1 - math.exp(-passed_s * per_s / _MEMORY)
            self._utilization += (busy_s / passed_s - self._utilization) * share

    # -- what follows ------------------------------------------------------------------------------------------------

    @property
    def prefilling(self) -> Set[str]:
        """The requests whose prompts are not computed yet."""
        return self._left.keys()

    def prompt_tokens(self, request_id: str) -> int:
        """Of a request that runs; 0 if it is unknown."""
        return self._prompts.get(request_id, 0)

    @property
    def busy_s(self) -> float:
        """Seconds until the prompts that were admitted are computed."""
        return self._cost.prefill_s(0, self._left_tokens)

    @property
    def step_s(self) -> float:
        """What the next step takes without a further prompt; 0 if there is nothing to compute."""
        ahead_s = self._cost.prefill_s(0, min(self._left_tokens, self._step_tokens))
        return max(ahead_s, self._last_s) if self._is_busy else ahead_s

    def text(
        self, request_id: str, prompt_tokens: int, chunk_tokens: int, gpu_tokens: int = 0, waiting: int = 0
    ) -> Text:
        """A request's prompt as the cost model sees it now.

        waiting: requests that wait for tiers.
        """
        is_here = request_id in self._waiting or request_id in self._prompts
        others = len(self._waiting) + len(self._prompts) - is_here - waiting
        now_s = self._clock.monotonic()
        waited_s = now_s - self._waiting.get(request_id, now_s)
        return Text(
            prompt_tokens,
            chunk_tokens,
            gpu_tokens,
            step_s=self.step_s,
            busy_s=self.busy_s,
            others=max(others, 0),
            waiting=waiting,
            per_s=self._arrivals.per_s(now_s),
            utilization=self._utilization,
            waited_s=waited_s,
        )

    @property
    def stall_left_s(self) -> float:
        """How much later the step that is being scheduled may begin for what new requests need in it; 0 if it is empty.

        A request that is not ready begins in the next one: that is worth it only for what takes long beside a step.
        """
        is_empty = not (self._prompts or self.step_s)
        return 0.0 if is_empty else max(_STALL_SHARE * max(self.step_s, self._mean_s) - self._stalled_s, 0.0)

    def may_stall(self, copies_s: float) -> bool:
        """Whether the step that is being scheduled may wait for copies; where nothing else runs, for any."""
        return copies_s <= self.stall_left_s or not (self._prompts or self.step_s)

    def stall(self, seconds: float) -> None:
        """The step that is being scheduled begins so much later."""
        self._stalled_s += seconds
