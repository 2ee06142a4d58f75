"""How fast threads go on with what nobody waits for."""

import threading
import time
from typing import Final

SHARE: Final = 0.05
"""Of one core, for a thread that is paced. Where the engine computes on the CPU, its steps are slower by as much."""


def rest_s(worked_s: float) -> float:
    """How long a thread rests that has worked for so many CPU-seconds, so that its share is kept."""
    return worked_s * (1 / SHARE - 1)


class Pace:
    """Full speed, or little at a time. The cache's thread sets it; each I/O thread keeps to it.

    is_slow: threads rest between the parts of a load. One that rests goes on at once when that ends.
    """

    def __init__(self) -> None:
        self._full = threading.Event()
        self._full.set()
        self._thread = threading.local()

    @property
    def is_slow(self) -> bool:
        return not self._full.is_set()

    @is_slow.setter
    def is_slow(self, value: bool) -> None:
        if value:
            self._full.clear()
        else:
            self._full.set()

    @property
    def rested_s(self) -> float:
        """Seconds that the calling thread has rested so far."""
        rested_s: float = getattr(self._thread, "rested_s", 0.0)
        return rested_s

    def rest(self, worked_s: float) -> None:
        """The calling thread has worked for so many CPU-seconds: it rests as long as its share asks for."""
        if self.is_slow:
            began_s = time.monotonic()
            self._full.wait(rest_s(worked_s))
            self._thread.rested_s = self.rested_s + time.monotonic() - began_s
