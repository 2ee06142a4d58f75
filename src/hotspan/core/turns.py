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

    def add(self, owner: Hashable, item: _T, *, is_urgent: bool = False) -> None:
        """Put something behind what its owner waits for already."""
        queues = self._urgent if is_urgent else self._others
        queues.setdefault(owner, deque()).append(item)

    def take(self) -> _T:
        """What is next. Raises: KeyError if nothing waits."""
        queues = self._urgent or self._others
        owner, queue = queues.popitem(last=False)
        item = queue.popleft()
        if queue:
            queues[owner] = queue  # behind all other owners
        return item
