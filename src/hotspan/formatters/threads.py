"""Threads for code that may never come back."""

import queue
import threading
from collections.abc import Callable

_IDLE_S = 10.0


class Threads:
    """Daemon threads: one that hangs keeps neither the process from ending nor other jobs from running.

    There are as many as jobs run at the same time; who calls `start` bounds that. An idle one ends after a while.
    """

    def __init__(self, idle_s: float = _IDLE_S) -> None:
        self._idle_s = idle_s
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._free = 0  # threads that wait, less the jobs that are on their way to them

    def start(self, job: Callable[[], None]) -> None:
        """Run `job`, which must not raise, in a thread; never waits for one."""
        with self._lock:
            is_short = self._free == 0
            if not is_short:
                self._free -= 1
            self._jobs.put(job)
        if is_short:
            threading.Thread(target=self._work, name="hotspan-formatter", daemon=True).start()

    def _work(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=self._idle_s)
            except queue.Empty:
                with self._lock:
                    if self._free == 0:
                        continue  # a job is on its way to this thread
                    self._free -= 1
                return
            job()
            del job  # and the payload that it holds
            with self._lock:
                self._free += 1
