"""What several owners wait for, in which order: one owner after the other, and what is urgent before all others."""

from collections import OrderedDict, deque
from collections.abc import Hashable
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

    def take(self) -> _T:
        """What is next. Raises: KeyError if nothing waits."""
        queues = self._urgent or self._others
        owner, queue = queues.popitem(last=False)
        item = queue.popleft()
        if queue:
            queues[owner] = queue  # behind all other owners
        return item
