"""Threads that move frames between memory and a file: whole, in I/Os of at most 4 MiB, loads before stores."""

import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable

from hotspan.core.frame import HEADER_BYTES
from hotspan.core.types import MIB

IO_BYTES = 4 * MIB


def write_frame(fd: int, at: int, header: memoryview, payload: memoryview) -> None:
    """Write header and payload as one frame at `at`. Raises: OSError, also for a short write."""
    first = IO_BYTES - HEADER_BYTES
    _whole(os.pwritev(fd, [header, payload[:first]], at), HEADER_BYTES + min(first, len(payload)))
    for start in range(first, len(payload), IO_BYTES):
        part = payload[start : start + IO_BYTES]
        _whole(os.pwritev(fd, [part], at + HEADER_BYTES + start), len(part))


def read_frame(fd: int, at: int, header: memoryview, payload: memoryview) -> None:
    """Read the frame at `at` into header and payload. Raises: OSError, also for a short read."""
    first = IO_BYTES - HEADER_BYTES
    _whole(os.preadv(fd, [header, payload[:first]], at), HEADER_BYTES + min(first, len(payload)))
    for start in range(first, len(payload), IO_BYTES):
        part = payload[start : start + IO_BYTES]
        _whole(os.preadv(fd, [part], at + HEADER_BYTES + start), len(part))


def _whole(moved: int, wanted: int) -> None:
    if moved != wanted:
        raise OSError(f"short transfer: {moved} of {wanted} bytes")


Job = Callable[[memoryview], None]
"""Work for an I/O thread, given a page-aligned buffer for one frame header. Must not raise."""


class IoThreads:
    """A few threads over two queues: what a request waits for goes first."""

    def __init__(self, name: str, threads: int) -> None:
        self._urgent: deque[Job] = deque()
        self._background: deque[Job] = deque()
        lock = threading.Lock()
        self._wake = threading.Condition(lock)
        self._idle = threading.Condition(lock)
        self._busy = 0
        self._closing = False
        self._threads = [
            threading.Thread(target=self._run, name=f"hotspan-{name}-{n}", daemon=True) for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job, *, urgent: bool) -> None:
        """Queue a job; returns at once. Jobs are dropped after `close`."""
        with self._wake:
            if not self._closing:
                (self._urgent if urgent else self._background).append(job)
                self._wake.notify()

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is queued or running; False if that took longer than `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with self._wake:
            while self._urgent or self._background or self._busy:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._idle.wait(left)
        return True

    def close(self, timeout_s: float) -> bool:
        """Finish what is queued and stop, at most `timeout_s`; False if threads are still in an I/O."""
        done = self.drain(timeout_s)
        with self._wake:
            self._closing = True
            self._urgent.clear()
            self._background.clear()
            self._wake.notify_all()
        for thread in self._threads:
            thread.join(0.1 if not done else None)
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        with mmap.mmap(-1, HEADER_BYTES) as page:
            header = memoryview(page)
            while (job := self._next()) is not None:
                job(header)
                with self._idle:
                    self._busy -= 1
                    if not (self._busy or self._urgent or self._background):
                        self._idle.notify_all()
            header.release()

    def _next(self) -> Job | None:
        with self._wake:
            while True:
                if self._urgent or self._background:
                    self._busy += 1
                    return (self._urgent or self._background).popleft()
                if self._closing:
                    return None
                self._wake.wait()
