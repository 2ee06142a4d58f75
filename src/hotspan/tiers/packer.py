"""Chunks compressed and restored as a tier chooses (tiers/compressing.py), with what that takes measured."""

import os
import threading
from collections.abc import Callable
from typing import TypeVar

from hotspan.core.clock import Clock
from hotspan.core.compression import compress, decompress
from hotspan.core.types import Compress
from hotspan.tiers.compressing import Compressing, Packing

_T = TypeVar("_T")


class Packer:
    """Compresses, restores and moves the chunks of one tier. Any thread.

    threads: of the tier, each of which has one transfer in flight.
    """

    def __init__(self, mode: Compress, threads: int, clock: Clock) -> None:
        self.mode = mode
        self._compressing = Compressing(mode, min(threads, os.cpu_count() or 1))
        self._clock = clock
        self._moving = 0
        self._lock = threading.Lock()

    def pack(self, payload: memoryview, room: Callable[[], memoryview]) -> Packing:
        """Compress a chunk into `room()`, if that is chosen and the chunk shrinks.

        Shape: room uint8[len(payload) or more].
        """
        if not self._compressing.wants():
            return Packing("plain", len(payload))
        started_s = self._clock.monotonic()
        size = compress(payload, room())
        self._compressing.encoded(len(payload), size)
        seconds = self._clock.monotonic() - started_s
        return Packing("compressed", size, seconds) if size else Packing("left", len(payload), seconds)

    def unpack(self, stored: memoryview, into: memoryview) -> Packing | None:
        """Restore a chunk; None if that gives another one, and `into` is undefined."""
        started_s = self._clock.monotonic()
        if not decompress(stored, into):
            return None
        seconds = self._clock.monotonic() - started_s
        self._compressing.decoded(len(into), seconds)
        return Packing("compressed", len(stored), seconds)

    def asked(self, seconds: float) -> None:
        """An answer without payload took so long."""
        self._compressing.asked(seconds)

    def cross(self, move: Callable[[], _T], size: int, *, is_load: bool) -> _T:
        """Have `size` bytes moved over the tier's link, and learn from the time unless `move` returns False or raises.

        Transfers that run meanwhile share the link.
        """
        with self._lock:
            self._moving += 1
            moving = self._moving
        started_s = self._clock.monotonic()
        try:
            moved = move()
        finally:
            with self._lock:
                moving = max(moving, self._moving)
                self._moving -= 1
        if moved is not False:
            self._compressing.crossed(size, self._clock.monotonic() - started_s, moving, is_load=is_load)
        return moved
