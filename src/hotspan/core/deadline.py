"""A moment by which a call has to be done."""

import time

MIN_RATE = 8 << 20
"""Bytes per second that a peer must move on average once its timeout is used up."""


class Deadline:
    """How long a call may take: `timeout_s`, and one second more per MIN_RATE bytes that it reports as moved.

    A peer that hangs holds a call for `timeout_s`; one that trickles not much longer.
    """

    __slots__ = ("_at_s", "_timeout_s")

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._at_s = time.monotonic() + timeout_s

    def left_s(self) -> float:
        """Seconds that the next step may take. Raises: TimeoutError if there are none."""
        left = self._at_s - time.monotonic()
        if left <= 0:
            raise TimeoutError("no answer within the deadline")
        return min(left, self._timeout_s)

    def moved(self, count: int) -> None:
        """So many bytes moved."""
        self._at_s += count / MIN_RATE

    def within(self, seconds: float) -> "Deadline":
        """The earlier of this one and `seconds` from now."""
        other = Deadline(seconds)
        return other if other._at_s < self._at_s else self
