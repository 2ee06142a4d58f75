"""Turns at what several tenants wait for: so many at a time, one tenant after the other, and some before all others."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Hashable

from hotspan.core.turns import InTurn
from hotspan.http.bodies import Budget
from hotspan.http.errors import HttpError


class Turns:
    """One event loop's.

    at_once:    how many have a turn at a time.
    waiting:    how many may wait or have a turn, of all owners; half of it is divided between them.
    for_urgent: turns of `at_once` that only what is urgent has.
    """

    def __init__(self, at_once: int, owners: int, waiting: int, *, for_urgent: int = 0) -> None:
        self._at_once = at_once
        self._for_others = at_once - for_urgent
        self._budget = Budget(waiting, owners)
        self._waiting: InTurn[asyncio.Future[None]] = InTurn()
        self._taken = self._taken_by_others = 0

    @contextlib.asynccontextmanager
    async def turn(self, owner: Hashable, *, is_urgent: bool = False) -> AsyncIterator[Callable[[], None]]:
        """A turn until the end of the block, or until the function that the block is given is called.

        Raises: HttpError 429 if the owner has as many as it may.
        """
        if not self._budget.take(owner, 1):
            raise HttpError(429, "as many of your requests of this kind wait as may: try again", retry_s=1)
        has_ended = False

        def end() -> None:
            nonlocal has_ended
            if not has_ended:
                has_ended = True
                self._give(is_urgent=is_urgent)

        try:
            await self._take(owner, is_urgent=is_urgent)
            try:
                yield end
            finally:
                end()
        finally:
            self._budget.give(owner, 1)

    # -- inside --------------------------------------------------------------------------------------------------------

    async def _take(self, owner: Hashable, *, is_urgent: bool) -> None:
        came: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(owner, came, is_urgent=is_urgent)
        self._serve()
        try:
            await came
        except asyncio.CancelledError:
            self._waiting.discard(owner, came)  # its budget is given back: another may wait in its place
            if came.done() and not came.cancelled():  # it came in the moment in which nobody waited any more
                self._give(is_urgent=is_urgent)
            raise

    def _give(self, *, is_urgent: bool) -> None:
        self._taken -= 1
        self._taken_by_others -= not is_urgent
        self._serve()

    def _serve(self) -> None:
        """Give turns to those who wait, as far as there are any."""
        while self._taken < self._at_once:
            is_urgent = self._waiting.has_urgent
            if not is_urgent and (not self._waiting.has_others or self._taken_by_others >= self._for_others):
                return
            came = self._waiting.take()
            if not came.done():  # else its task is about to learn that it is cancelled
                self._taken += 1
                self._taken_by_others += not is_urgent
                came.set_result(None)
