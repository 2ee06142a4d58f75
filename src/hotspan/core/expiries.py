"""What expires or falls due, earliest first."""

import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K")

_SLACK = 64


class Expiries(Generic[K]):
    """Times (in seconds) at which to look at keys. What is gone or expires later meanwhile stays noted, until that is
    more than what there is.

    current: all that expires, as (time, key).
    """

    def __init__(self, current: Callable[[], Iterable[tuple[float, K]]]) -> None:
        self._current = current
        self._heap: list[tuple[float, K]] = []

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def next_s(self) -> float | None:
        """The earliest time that is noted; None if there is none. May be read by any thread."""
        first = self._heap[:1]
        return first[0][0] if first else None

    def note(self, at_s: float, key: K, count: int) -> None:
        """Look at a key at that time. count: how much there is now, whether it expires or not."""
        heapq.heappush(self._heap, (at_s, key))
        if len(self._heap) > 2 * count + _SLACK:
            self._heap = list(self._current())
            heapq.heapify(self._heap)

    def due(self, now_s: float) -> Iterator[K]:
        """The keys whose time has come; each is noted no more."""
        while self._heap and self._heap[0][0] <= now_s:
            yield heapq.heappop(self._heap)[1]
