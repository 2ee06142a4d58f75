"""Whether an engine that has work makes steps, and whether these compute anything.

An engine core takes calls between two steps, so an answered call proves that a step has ended. While requests are in
work each core has one call to answer; none is sent to an idle engine. The answer is how many of the core's steps have
computed: twice the same, and those between computed nothing.

    has work --call--> every core --answers, or not; more than before, or not--> `reason` --> /ping and /health
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Protocol

import psutil

from hotspan.core.clock import Clock, SystemClock

logger = logging.getLogger(__name__)

TICK_S: Final = 1.0
_MAX_TICK_S: Final = 2 * TICK_S
"""Counted of one tick at most: where this process was stopped, or busy, it has not looked at answers for longer."""

COMPUTING: Final = 0.1
"""What a second counts in which the engine's processes compute, on a CPU engine: a step may take minutes there."""

_BUSY: Final = 0.1
"""Of one CPU: the engine computes."""


class Steps(Protocol):
    """What is asked of an engine."""

    @property
    def has_work(self) -> bool:
        """Whether requests are in work."""
        ...

    async def turn(self) -> Sequence[int | None]:
        """When each engine core has ended the step it is in: how many of its steps have computed; None for a core that
        has nothing to compute, or does not tell.
        """
        ...


class Liveness:
    """Watches an engine. Belongs to one event loop.

    limit_s:      how long a step may take.
    is_computing: whether the engine's processes computed since it was last called; None where that proves nothing.
    """

    def __init__(
        self, engine: Steps, limit_s: float, is_computing: Callable[[], bool] | None = None, clock: Clock | None = None
    ) -> None:
        self._engine = engine
        self._limit_s = limit_s
        self._is_computing = is_computing
        self._clock = clock or SystemClock()
        self._at_s = self._clock.monotonic()
        self._asked: asyncio.Task[Sequence[int | None]] | None = None
        self._unanswered_s = 0.0
        self._states: Sequence[int | None] = ()
        self._idling_s: list[float] = []  # for how long each core has been where it is
        self._why: str | None = None

    @property
    def reason(self) -> str | None:
        """Why the engine is ill; None if it is not."""
        if self._why is None:
            return None
        return f"requests are in work, and the engine has {self._why} for {self._limit_s:g} s or more"

    async def watch(self, pause: Callable[[float], Awaitable[object]] = asyncio.sleep) -> None:
        """Look at the engine every second, until cancelled."""
        try:
            while True:
                self.tick()
                await pause(TICK_S)
        finally:
            if self._asked is not None:
                self._asked.cancel()

    def tick(self) -> None:
        """Count the time since the last tick, and ask if there is work and nothing is asked."""
        now_s = self._clock.monotonic()
        passed_s, self._at_s = min(now_s - self._at_s, _MAX_TICK_S), now_s
        if self._asked is not None:
            counted_s = passed_s * (COMPUTING if self._computes() else 1.0)
            if not self._asked.done():
                self._unanswered_s += counted_s
                self._judge(self._unanswered_s, "made no step")
                return
            self._compare(self._asked.result(), counted_s + self._unanswered_s)
        if max(self._idling_s, default=0.0) >= self._limit_s:
            self._judge(self._limit_s, "computed nothing in its steps")
        elif self._why is not None:
            logger.warning("engine_steps_again")
            self._why = None
        self._unanswered_s, self._asked = 0.0, None
        if self._engine.has_work:
            self._computes()  # counts from now on
            self._asked = asyncio.create_task(self._turn())
        else:
            self._compare((), 0.0)

    def _judge(self, seconds: float, what: str) -> None:
        if seconds >= self._limit_s and self._why is None:
            self._why = what
            logger.error("engine_stalled limit_s=%g: it has work and has %s", self._limit_s, what)

    def _compare(self, states: Sequence[int | None], passed_s: float) -> None:
        """How far each core is now, and was before. passed_s: since then."""
        before = dict(enumerate(zip(self._states, self._idling_s, strict=True)))
        self._idling_s = []
        for core, state in enumerate(states):
            former, idling_s = before.get(core, (None, 0.0))
            self._idling_s.append(idling_s + passed_s if state is not None and state == former else 0.0)
        self._states = states

    def _computes(self) -> bool:
        return self._is_computing is not None and self._is_computing()

    async def _turn(self) -> Sequence[int | None]:
        with contextlib.suppress(Exception):  # an engine that failed is seen elsewhere; it does not hang
            return await self._engine.turn()
        return ()


class ProcessorTime:
    """Whether the processes below this one compute: none of them is stopped, and together they use a CPU."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._at_s = self._clock.monotonic()
        self._used_s = 0.0

    def __call__(self) -> bool:
        """Of the time since the last call."""
        now_s, used_s, is_stopped = self._clock.monotonic(), 0.0, False
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                used_s += times.user + times.system
                is_stopped |= process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        is_busy = used_s - self._used_s >= _BUSY * (now_s - self._at_s)
        self._at_s, self._used_s = now_s, used_s
        return is_busy and not is_stopped
