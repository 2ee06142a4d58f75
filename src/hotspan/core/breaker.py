"""A circuit breaker: opens after failures in a row, and lets one call try again after a pause."""

import math
import random
from enum import Enum

from hotspan.core.clock import Clock

_SPREAD = 0.1


class BreakerState(Enum):
    """Whether calls may be made."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Breaker:
    """closed -> open -> half-open -> closed; a failure while half-open opens it again, for twice as long.

    failures:           in a row, that open it.
    first_s, longest_s: of a pause.
    steady_s:           after so long closed, the next pause is the first again.
    rng:                lengthens each pause by up to a tenth, so that several processes do not try at the same moment.
    opened:             how often it opened.
    """

    def __init__(
        self,
        clock: Clock,
        failures: int = 3,
        first_s: float = 1.0,
        longest_s: float = 10.0,
        *,
        steady_s: float = 0.0,
        rng: random.Random | None = None,
    ) -> None:
        self._clock = clock
        self._max_failures = failures
        self._first_s, self._longest_s, self._steady_s = first_s, longest_s, steady_s
        self._rng = rng
        self._failures = 0
        self._pause_s = first_s
        self._until_s: float | None = None  # None: closed
        self._closed_s = -math.inf  # inf: nothing has succeeded since
        self._is_trying = False
        self.opened = 0

    @property
    def state(self) -> BreakerState:
        if self._until_s is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if self._clock.monotonic() < self._until_s else BreakerState.HALF_OPEN

    @property
    def can_take(self) -> bool:
        """Whether a call may be made: none while it is open, one at a time while it is half-open."""
        return self.state is not BreakerState.OPEN and not self._is_trying

    @property
    def pause_s(self) -> float:
        """The latest pause, without what `rng` added."""
        return self._pause_s

    @property
    def wait_s(self) -> float:
        """Seconds until a call may try."""
        return 0.0 if self._until_s is None else max(0.0, self._until_s - self._clock.monotonic())

    def took(self) -> None:
        """A call begins."""
        self._is_trying = self._until_s is not None

    def gave_up(self) -> None:
        """A call ended without a result, for example because its client hung up."""
        self._is_trying = False

    def answered(self) -> None:
        """A call has begun to succeed: the breaker closes. Until one succeeded, a failure is one more in the row."""
        self._is_trying = False
        if self._until_s is not None:
            self._until_s, self._closed_s = None, math.inf

    def succeeded(self) -> None:
        """A call succeeded."""
        self.answered()
        self._failures = 0
        self._closed_s = min(self._closed_s, self._clock.monotonic())

    def failed(self) -> bool:
        """A call failed. Returns whether that opened the breaker."""
        self._failures += 1
        state = self.state
        if state is BreakerState.HALF_OPEN or (state is BreakerState.CLOSED and self._failures >= self._max_failures):
            self.open()
            return True
        return False

    def open(self) -> None:
        """Open it at once, whatever was counted."""
        now = self._clock.monotonic()
        is_steady = self._until_s is None and now - self._closed_s >= self._steady_s
        self._pause_s = self._first_s if is_steady else min(2 * self._pause_s, self._longest_s)
        self._until_s = now + self._pause_s * (1.0 if self._rng is None else self._rng.uniform(1.0, 1.0 + _SPREAD))
        self._is_trying = False
        self.opened += 1

    def half_open(self) -> None:
        """Let a call try now, if it is open."""
        if self._until_s is not None:
            self._until_s = self._clock.monotonic()
