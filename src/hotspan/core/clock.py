"""Time, injected: production reads the system's clock, tests turn their own."""

import time
from typing import Protocol


class Clock(Protocol):
    """Where the cache takes the time from."""

    def monotonic(self) -> float:
        """Seconds that never run backwards; only differences mean anything."""
        ...

    def unix(self) -> float:
        """Seconds since 1970: what is written down and compared across processes."""
        ...


class SystemClock:
    """The machine's own clock."""

    def monotonic(self) -> float:
        return time.monotonic()

    def unix(self) -> float:
        return time.time()
