"""Turns at a formatter: so many at a time, of one owner and of all, one owner after the other."""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Hashable


class Turns:
    """One event loop's.

    of_one, of_all: how many turns one owner, and all together, may have at a time.
    """

    def __init__(self, of_one: int, of_all: int) -> None:
        self._of_one = of_one
        self._of_all = of_all
        self._taken: Counter[Hashable] = Counter()
        self._waiting: OrderedDict[Hashable, deque[asyncio.Future[None]]] = OrderedDict()

    @property
    def taken(self) -> int:
        """Turns that are taken, of all owners."""
        return self._taken.total()

    async def take(self, owner: Hashable) -> None:
        """A turn, until `give`. Waits for as long as none is free; cancelled, it has taken none."""
        came: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(came)
        self._serve()
        try:
            await came
        except asyncio.CancelledError:
            if came.cancelled():
                self._leave(owner, came)
            else:  # it came in the moment in which nobody waited any more
                self.give(owner)
            raise

    def give(self, owner: Hashable) -> None:
        """A turn of an owner has ended."""
        self._taken[owner] -= 1
        if not self._taken[owner]:
            del self._taken[owner]
        self._serve()

    def _leave(self, owner: Hashable, came: "asyncio.Future[None]") -> None:
        if came in self._waiting.get(owner, ()):
            self._waiting[owner].remove(came)
            self._forget_if_none(owner)

    def _forget_if_none(self, owner: Hashable) -> None:
        if not self._waiting[owner]:
            del self._waiting[owner]

    def _serve(self) -> None:
        """Give turns to those who wait, as far as there are any; an owner that is served goes behind the others."""
        while self.taken < self._of_all:
            owner = next((each for each in self._waiting if self._taken[each] < self._of_one), None)
            if owner is None:
                return
            came = self._waiting[owner].popleft()
            self._waiting.move_to_end(owner)
            self._forget_if_none(owner)
            if not came.done():  # else it was cancelled in this turn of the loop, and its task is about to learn it
                self._taken[owner] += 1
                came.set_result(None)
