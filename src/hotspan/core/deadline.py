"""A moment by which a call has to be done."""

import time
from collections.abc import Callable

MIN_RATE = 8 << 20
"""Bytes per second that a peer must move on average once its timeout is used up."""


class Deadline:
    """How long a call may take: `timeout_s`, and one second more per MIN_RATE bytes that it reports as moved.

    A peer that hangs holds a call for `timeout_s`; one that trickles not much longer. now: monotonic seconds.
    """

    __slots__ = ("_at_s", "_now", "_timeout_s")

    def __init__(self, timeout_s: float, now: Callable[[], float] | None = None) -> None:
        self._timeout_s = timeout_s
        self._now = now or time.monotonic
        self._at_s = self._now() + timeout_s

    def rest_s(self) -> float:
        """Seconds until then, 0 after it."""
        return max(0.0, self._at_s - self._now())

    def left_s(self) -> float:
        """Seconds that the next step may take. Raises: TimeoutError if there are none."""
        left = self.rest_s()
        if not left:
            raise TimeoutError("no answer within the deadline")
        return min(left, self._timeout_s)

    def moved(self, count: int) -> None:
        """So many bytes moved."""
        self._at_s += count / MIN_RATE

    def within(self, seconds: float) -> "Deadline":
        """The earlier of this one and `seconds` from now."""
        other = Deadline(seconds, self._now)
        return other if other._at_s < self._at_s else self
