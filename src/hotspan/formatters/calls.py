"""One formatter's calls: in threads, so many at a time, with a time limit, and what it returns is checked."""

import asyncio
import contextlib
import json
import logging
import queue
import threading
from asyncio import AbstractEventLoop, Future
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from hotspan.core.errors import FormatterError
from hotspan.core.threads import start
from hotspan.core.turns import AsyncTurns
from hotspan.formatters.formatter import Context, Formatter, Phase, line_in

logger = logging.getLogger(__name__)

MAX_RUNNING, MAX_OF_ALL = 8, 16
"""Calls of one formatter at the same time for one owner, and for all; those that hang included. The next wait for their
turn."""

MAX_HUNG = 4
"""An owner's calls of one formatter that are over their time and have not ended; with so many it is not called any more
for that owner, and with MAX_OF_ALL of any for nobody."""

_RETURNS: dict[Phase, tuple[type, ...]] = {Phase.INPUT: (dict,), Phase.OUTPUT: (dict, str, bytes)}
_MAX_TEXT = 300
_IDLE_S = 10.0  # of a thread, until it ends


class Threads:
    """Daemon threads: one that hangs keeps neither the process from ending nor other jobs from running.

    There are as many as jobs run at the same time; who calls `start` bounds that. An idle one ends after a while.
    """

    def __init__(self, idle_s: float = _IDLE_S) -> None:
        self._idle_s = idle_s
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._free = 0  # threads that wait, less the jobs that are on their way to them

    def start(self, job: Callable[[], None]) -> None:
        """Run `job`, which must not raise, in a thread; never waits for one."""
        with self._lock:
            is_short = self._free == 0
            if not is_short:
                self._free -= 1
            self._jobs.put(job)
        if is_short:
            start("formatter", self._work)

    def _work(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=self._idle_s)
            except queue.Empty:
                with self._lock:
                    if self._free == 0:
                        continue  # a job is on its way to this thread
                    self._free -= 1
                return
            try:
                job()
            except Exception:  # a mistake of ours: the caller runs into its time limit, the thread serves others
                logger.exception("formatter_job_failed")
            del job  # and the payload that it holds
            with self._lock:
                self._free += 1


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What became of a call: a value that was returned, or what was raised."""

    value: Any = None
    error: BaseException | None = None


class Calls:
    """The one way to call a formatter.

    A call that hangs keeps its turn until it ends, whether or not anybody still waits for it. So a formatter that
    hangs can't take more than MAX_OF_ALL threads, and none from any other formatter; and an owner whose inputs are slow
    can't take more than MAX_RUNNING turns from the others.
    """

    def __init__(self, formatter: Formatter, threads: Threads, timeout_s: float) -> None:
        self.formatter = formatter
        self._threads = threads
        self._timeout_s = timeout_s
        self._turns = AsyncTurns(MAX_OF_ALL, of_one=MAX_RUNNING)
        self._numbers = count()
        self._began: dict[int, tuple[Hashable, float]] = {}  # call -> its owner, the loop's time

    async def run(self, value: Any, context: Context, owner: Hashable = "") -> Any:
        """What the formatter makes of `value`, which it may change, for an owner.

        Raises: FormatterError with status 400 if an input formatter refuses the request with a ValueError, 500 if the
                formatter fails, 504 if it takes too long, 503 if it has no turn in that time, or too many calls hang.
        """
        loop = asyncio.get_running_loop()
        hung = [whose for whose, at_s in self._began.values() if loop.time() - at_s > self._timeout_s]
        if hung.count(owner) >= MAX_HUNG or len(hung) >= MAX_OF_ALL:
            raise self._failure(503, f"is not called: {len(hung)} earlier calls hang. Correct it, and load it again")
        deadline = loop.time() + self._timeout_s
        try:
            async with asyncio.timeout_at(deadline):
                await self._turns.take(owner)
        except TimeoutError:
            problem = f"had no turn within {self._timeout_s:g} s: {len(self._began)} other calls of it run"
            raise self._failure(503, problem, about="limit") from None
        future = self._begin(loop, value, context, owner)
        try:
            await asyncio.wait({future}, timeout=deadline - loop.time())
            if not future.done():
                raise self._failure(504, f"did not end within {self._timeout_s:g} s")
        finally:
            future.cancel()  # an async formatter is stopped; in a thread it runs on, and is counted
        return self._judged(future)

    def _begin(self, loop: AbstractEventLoop, value: Any, context: Context, owner: Hashable) -> "Future[_Outcome]":
        number = next(self._numbers)
        self._began[number] = owner, loop.time()
        future: Future[_Outcome]
        if self.formatter.is_async:
            future = loop.create_task(self._awaited(value, context))
            future.add_done_callback(lambda _: self._end(number))
        else:
            future = loop.create_future()
            self._threads.start(partial(self._in_thread, loop, future, number, value, context))
        return future

    def _end(self, number: int) -> None:
        owner, _ = self._began.pop(number)
        self._turns.give(owner)

    async def _awaited(self, value: Any, context: Context) -> _Outcome:
        try:
            return _Outcome(self._fit(await self.formatter.apply(value, context)))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # the boundary to users' code, whose SystemExit must not end the server
            return _Outcome(error=error)

    def _in_thread(
        self, loop: AbstractEventLoop, future: "Future[_Outcome]", number: int, value: Any, context: Context
    ) -> None:
        try:
            outcome = _Outcome(self._fit(self.formatter.apply(value, context)))
        except BaseException as error:  # as above, and a thread that died would leave its call waiting
            outcome = _Outcome(error=error)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(self._deliver, future, number, outcome)

    def _deliver(self, future: "Future[_Outcome]", number: int, outcome: _Outcome) -> None:
        self._end(number)
        if not future.done():
            future.set_result(outcome)

    def _fit(self, value: Any) -> Any:
        """What was returned, as what can be sent; the dict of a Pydantic model."""
        if hasattr(value, "model_dump"):
            value = value.model_dump(mode="json")
        wanted = _RETURNS[self.formatter.phase]
        if not isinstance(value, wanted):
            names = " or ".join(kind.__name__ for kind in wanted)
            raise _Unfit(f"returned {type(value).__name__}: let it return {names}")
        if isinstance(value, dict):
            try:
                json.dumps(value)
            except (TypeError, ValueError, RecursionError) as error:
                raise _Unfit(f"returned a dict that is no JSON: {error}") from error
        return value

    def _judged(self, future: "Future[_Outcome]") -> Any:
        if future.cancelled():
            raise self._failure(500, "cancelled itself: catch CancelledError in it")
        outcome = future.result()
        error = outcome.error
        if error is None:
            return outcome.value
        text = str(error)[:_MAX_TEXT]
        if isinstance(error, _Unfit):
            raise self._failure(500, text) from error
        if self.formatter.phase is Phase.INPUT and isinstance(error, ValueError):
            raise self._failure(400, f"refuses this request: {text}") from error
        raise self._failure(
            500, f"failed{line_in(self.formatter.file, error)}: {type(error).__name__}: {text}"
        ) from error

    def _failure(self, status: int, problem: str, about: str = "model") -> FormatterError:
        phase, name = self.formatter.phase.value, self.formatter.name
        return FormatterError(f"{phase} formatter {name} {problem}", phase=phase, name=name, status=status, about=about)


class _Unfit(Exception):
    """What a formatter returned can't be sent."""
