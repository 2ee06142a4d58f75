"""Turns at what several tenants wait for: so many at a time, one tenant after the other, and some before all others."""

import contextlib
from collections.abc import AsyncIterator, Callable, Hashable

from hotspan.core.turns import AsyncTurns
from hotspan.http.bodies import Budget
from hotspan.http.errors import HttpError


class Turns:
    """One event loop's.

    at_once:    how many have a turn at a time.
    waiting:    how many may wait or have a turn, of all owners; half of it is divided between them.
    for_urgent: turns of `at_once` that only what is urgent has.
    """

    def __init__(self, at_once: int, owners: int, waiting: int, *, for_urgent: int = 0) -> None:
        self._budget = Budget(waiting, owners)
        self._turns = AsyncTurns(at_once, for_urgent=for_urgent)

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
                self._turns.give(owner, is_urgent=is_urgent)

        try:
            await self._turns.take(owner, is_urgent=is_urgent)
            try:
                yield end
            finally:
                end()
        finally:
            self._budget.give(owner, 1)
