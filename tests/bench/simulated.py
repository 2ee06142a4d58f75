"""Event loops with a time of their own: one whose time passes while nothing can run, one where a test lets it pass.

In the first hours of schedule take no time, and are the same every time. The second is for what talks to threads and
sockets, which take their time while nothing is due.
"""

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

P = ParamSpec("P")


class _Selector(selectors.DefaultSelector):
    """Doesn't wait: while no socket is ready, it sets the clock forward by as long as it would have waited."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if not (events := super().select(0)):
            if timeout is None:
                raise RuntimeError("everything waits, and nothing is going to happen")
            self.now += max(0.0, timeout)
        return events


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Its time starts at 0."""

    def __init__(self) -> None:
        self._simulated = _Selector()
        super().__init__(self._simulated)

    def time(self) -> float:
        return self._simulated.now

    def pass_time(self, seconds: float) -> None:
        """What runs takes so long."""
        self._simulated.now += seconds


def run_simulated(main: Callable[[Callable[[], float]], Coroutine[Any, Any, None]]) -> float:
    """Run `main`, which is given the clock, to its end, and return the time then."""
    loop = SimulatedLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main(loop.time))
        return loop.time()


class _Patient(selectors.DefaultSelector):
    """Looks again soon, because time may have passed."""

    def select(self, timeout: float | None = None) -> list[Any]:
        return super().select(None if timeout is None else min(timeout, 0.005))


class SteppedLoop(asyncio.SelectorEventLoop):
    """Its time stands still until `pass_time`."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_Patient())

    def time(self) -> float:
        return self.now


async def pass_time(seconds: float) -> None:
    """Let time pass on a SteppedLoop, and what is due by then begin."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SteppedLoop)
    loop.now += seconds
    await asyncio.sleep(0)


def in_stepped_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """The test in a SteppedLoop."""

    @functools.wraps(test)
    def run(*given: P.args, **named: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=SteppedLoop) as runner:
            runner.run(test(*given, **named))

    return run


def in_simulated_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """The test in such a loop. Whom it talks to must be in it as well, over Unix sockets, which don't lag."""

    @functools.wraps(test)
    def run(*given: P.args, **named: P.kwargs) -> None:
        run_simulated(lambda _: test(*given, **named))

    return run
