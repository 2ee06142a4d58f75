"""Limits for requests: memory for bodies, places in the queue, a time limit, and none admitted once the server stops.

Each principal has memory and places of its own, which no other principal can use.
"""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from hotspan.config.server_settings import ServerSettings
from hotspan.core.clock import Clock, SystemClock
from hotspan.http.bodies import Bodies, Budget, in_slices
from hotspan.http.connections import HttpLimits
from hotspan.http.errors import HttpError
from hotspan.http.exchange import ON_READ, Exchange
from hotspan.http.json_size import checked_json
from hotspan.http.texts import checked_characters
from hotspan.server.exchange import ended
from hotspan.server.principal import Principal, current_principal
from hotspan.server.sizes import ANY_BODY, BodyLimit
from hotspan.server.turns import Turns

_MAX_RETRY_S = 60
_WEIGHT = 0.1
"""Of the last request in the mean service time."""

_TEXTS_AT_ONCE, _MAX_TEXTS = 2, 256
"""Requests that have a turn at a time, and all that may wait for one."""

_LARGE_BYTES, _LARGE_AT_ONCE = 1 << 18, 2
"""A body that takes a turn, and how many have one: a parser takes 1 to 2 ms for each MB of text."""

_END_S = 1.0
"""How long an application may take to end once nobody waits for it, before its task is cancelled."""


Work = Callable[[bytes], Coroutine[Any, Any, None]]
"""What is done with a body."""


class _Overdue(Exception):
    """The time of a request is over."""


class Admission:
    """The requests in the engine. Belongs to one event loop.

    in_flight: how many there are. is_draining: no more are admitted.
    """

    def __init__(self, settings: ServerSettings, limits: HttpLimits, clock: Clock | None = None) -> None:
        self._settings = settings
        self._clock = clock or SystemClock()
        self._bodies = Bodies(limits)
        self._places = Budget(settings.job_queue_size, max(1, limits.principals - 1))  # who has no key has no work
        self._turns = Turns(_TEXTS_AT_ONCE, limits.principals, _MAX_TEXTS)
        # Whoever has a place may wait.
        self._large = Turns(_LARGE_AT_ONCE, max(1, limits.principals - 1), settings.job_queue_size + _MAX_TEXTS)
        self._limits: set[asyncio.Timeout] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._contended = asyncio.Event()
        self._mean_s = 1.0
        self._is_cut = False
        self.is_draining = False
        self.in_flight = 0

    async def run(
        self,
        exchange: Exchange,
        work: Work,
        *,
        is_counted: bool = True,
        takes_turn: bool = False,
        is_read_here: bool = False,
        limit: BodyLimit = ANY_BODY,
    ) -> None:
        """Read a request's body and do its work, which ends early if the client disconnects.

        is_counted: it takes a place in the queue, and has a limited time: its response ends with an error after that.
        takes_turn: it computes no tokens, but text, which is done for one principal after the other.
        is_read_here: this process parses the body. While it does so with a large one, until `note_read` or the first
                      byte of the response, the body has a turn of those, one principal after the other.
        limit:      of its body.
        Raises:     HttpError 400, 408, 413, 429 or 503; ClientGone.
        """
        owner = current_principal()
        async with self._bodies.body(exchange, owner, limit.bytes, limit.needs) as body:
            await in_slices(checked_json(body, limit.json))
            await in_slices(checked_characters(body))
            if takes_turn:
                async with self._turns.turn(owner) as exchange.on_begin, exchange.watched():
                    await work(body)
                return
            if is_read_here and len(body) > _LARGE_BYTES:
                work = self._in_turn(exchange, owner, work)
            if not is_counted:
                async with exchange.watched():
                    await work(body)
                return
            self._enter(owner)
            async with self._place(owner), exchange.watched():
                task = asyncio.create_task(work(body))
                try:
                    await self._in_time(task)
                    await task
                except _Overdue:
                    await exchange.fail(self._overdue())
                finally:
                    exchange.gone.set()
                    await ended(task, _END_S)

    def drain(self) -> None:
        """Admit no more requests."""
        self.is_draining = True
        self._contended.set()

    async def idle(self) -> None:
        """Return when no request is in the engine."""
        await self._idle.wait()

    async def contended(self) -> None:
        """Return when there are at least two, or the server stops."""
        await self._contended.wait()

    async def drained(self, within_s: float) -> None:
        """Return when the last request has ended; those that have not by then get an error."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), within_s)
        self._is_cut = True
        for limit in tuple(self._limits):
            limit.reschedule(asyncio.get_running_loop().time())
        await self._idle.wait()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _in_turn(self, exchange: Exchange, owner: Principal, work: Work) -> Work:
        """The same work, once it has a turn, which it gives back when it has read the body."""

        async def worked(body: bytes) -> None:
            async with self._large.turn(owner) as exchange.on_begin:
                if not exchange.gone.is_set():
                    token = ON_READ.set(exchange.on_begin)
                    try:
                        await work(body)
                    finally:
                        ON_READ.reset(token)

        return worked

    def _enter(self, owner: Principal) -> None:
        """Take a place. Raises: HttpError if there is none for this principal."""
        if self.is_draining:
            raise HttpError(503, "the server stops: send this to another one, or try again", retry_s=1)
        if self.in_flight >= self._settings.job_queue_size:
            raise HttpError(
                429, f"{self.in_flight} requests are in work, as many as may be: try again", retry_s=self._retry_s()
            )
        if not self._places.take(owner, 1):
            message = "as many of your requests are in work as may be beside those of others: try again"
            raise HttpError(429, message, retry_s=self._retry_s())
        self.in_flight += 1
        self._idle.clear()
        if self.in_flight > 1:
            self._contended.set()

    @contextlib.asynccontextmanager
    async def _place(self, owner: Principal) -> AsyncIterator[None]:
        """Gives the place back that `_enter` took."""
        began_s = self._clock.monotonic()
        try:
            yield
        finally:
            self.in_flight -= 1
            self._places.give(owner, 1)
            self._mean_s += _WEIGHT * (self._clock.monotonic() - began_s - self._mean_s)
            if self.in_flight < 2 and not self.is_draining:
                self._contended.clear()
            if not self.in_flight:
                self._idle.set()

    async def _in_time(self, task: "asyncio.Task[None]") -> None:
        """Return when the task has ended. Raises: _Overdue, and leaves it running."""
        try:
            async with asyncio.timeout(0 if self._is_cut else self._settings.predict_timeout_s) as limit:
                self._limits.add(limit)
                try:
                    await asyncio.wait({task})
                finally:
                    self._limits.discard(limit)
        except TimeoutError as error:
            raise _Overdue from error

    def _retry_s(self) -> int:
        """In the mean service time as many requests end as are in work now."""
        return min(max(math.ceil(self._mean_s), 1), _MAX_RETRY_S)

    def _overdue(self) -> HttpError:
        if self._is_cut:
            return HttpError(503, "the server stops before this answer is complete: send it to another one", retry_s=1)
        return HttpError(
            504,
            f"no complete answer within {self._settings.predict_timeout_s:g} s: ask for fewer tokens, or raise "
            "predict_timeout",
        )
