"""What several owners wait for, in which order: one owner after the other, and what is urgent before all others."""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

_T = TypeVar("_T")


class InTurn(Generic[_T]):
    """A queue. The oldest of one owner comes next, then the oldest of another; an owner that was served goes last.

    One thread at a time.
    """

    def __init__(self) -> None:
        self._urgent: OrderedDict[Hashable, deque[_T]] = OrderedDict()
        self._others: OrderedDict[Hashable, deque[_T]] = OrderedDict()

    def __bool__(self) -> bool:
        """Whether anything waits."""
        return bool(self._urgent or self._others)

    @property
    def has_urgent(self) -> bool:
        """Whether anything urgent waits."""
        return bool(self._urgent)

    @property
    def has_others(self) -> bool:
        """Whether anything else waits."""
        return bool(self._others)

    @property
    def owners(self) -> int:
        """How many owners wait for something that is not urgent."""
        return len(self._others)

    def count(self, owner: Hashable) -> int:
        """How much an owner waits for that is not urgent."""
        return len(self._others.get(owner, ()))

    def oldest(self, owner: Hashable) -> _T:
        """The first of an owner, of what is not urgent. Raises: KeyError if it waits for nothing."""
        return self._others[owner][0]

    def add(self, owner: Hashable, item: _T, *, is_urgent: bool = False) -> None:
        """Put something behind what its owner waits for already."""
        queues = self._urgent if is_urgent else self._others
        queues.setdefault(owner, deque()).append(item)

    def discard(self, owner: Hashable, item: _T) -> None:
        """Its owner waits for it no longer. Costs what the owner has waiting."""
        for queues in (self._urgent, self._others):
            queue = queues.get(owner, deque())
            if item in queue:
                queue.remove(item)
                if not queue:
                    del queues[owner]
                return

    def look(self) -> _T:
        """What is next of what is not urgent: it stays the first of its owner, which goes behind all others.

        Raises: KeyError if nothing of that waits.
        """
        owner = next(iter(self._others), None)
        self._others.move_to_end(owner)
        return self._others[owner][0]

    def take(self, may: Callable[[Hashable], bool] = lambda owner: True) -> _T:
        """What is next of an owner that may be. Raises: KeyError if nothing of one waits."""
        queues = self._urgent or self._others
        owner = next(filter(may, queues), None)
        queue = queues.pop(owner)
        item = queue.popleft()
        if queue:
            queues[owner] = queue  # behind all other owners
        return item


class AsyncTurns:
    """Turns at something: so many at a time, one owner after the other. One event loop's.

    at_once:    how many have a turn at a time. of_one: how many of these one owner may have; all without it.
    for_urgent: turns of `at_once` that only what is urgent has.
    """

    def __init__(self, at_once: int, *, of_one: int | None = None, for_urgent: int = 0) -> None:
        self._at_once = at_once
        self._of_one = at_once if of_one is None else of_one
        self._for_others = at_once - for_urgent
        self._waiting: InTurn[tuple[Hashable, asyncio.Future[None]]] = InTurn()
        self._taken: Counter[Hashable] = Counter()
        self._taken_by_others = 0

    @property
    def taken(self) -> int:
        """Turns that are taken, of all owners."""
        return self._taken.total()

    async def take(self, owner: Hashable, *, is_urgent: bool = False) -> None:
        """A turn, until `give`. Waits for as long as none is free; cancelled, it has taken none."""
        came: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(owner, (owner, came), is_urgent=is_urgent)
        self._serve()
        try:
            await came
        except asyncio.CancelledError:
            self._waiting.discard(owner, (owner, came))
            if came.done() and not came.cancelled():  # it came in the moment in which nobody waited any more
                self.give(owner, is_urgent=is_urgent)
            raise

    def give(self, owner: Hashable, *, is_urgent: bool = False) -> None:
        """A turn of an owner has ended."""
        self._taken[owner] -= 1
        if not self._taken[owner]:
            del self._taken[owner]
        self._taken_by_others -= not is_urgent
        self._serve()

    def _serve(self) -> None:
        """Give turns to those who wait, as far as there are any."""
        while self._waiting and self.taken < self._at_once:
            is_urgent = self._waiting.has_urgent
            if not is_urgent and self._taken_by_others >= self._for_others:
                return
            try:
                owner, came = self._waiting.take(lambda owner: self._taken[owner] < self._of_one)
            except KeyError:
                return
            if not came.done():  # else its task is about to learn that it is cancelled
                self._taken[owner] += 1
                self._taken_by_others += not is_urgent
                came.set_result(None)
