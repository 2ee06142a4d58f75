"""I/O queues without threads: jobs run when the test turns the crank, in an order that follows from a seed."""

import mmap
import random
from collections import deque

from hotspan.core.frame import HEADER_BYTES
from hotspan.tiers.io import Dropped, Job


class SimulatedQueue:
    """Plays the threads of one IoQueue: up to `threads` jobs have begun, the others wait, urgent ones first.

    A subclass notes what has begun (`begin`), and ends it.
    """

    def __init__(self, threads: int, scratch_bytes: int = HEADER_BYTES) -> None:
        self._threads = threads
        self._scratch = memoryview(mmap.mmap(-1, scratch_bytes))
        self._urgent: deque[tuple[Job, Dropped]] = deque()
        self._background: deque[tuple[Job, Dropped]] = deque()
        self._closing = False

    @property
    def begun(self) -> int:
        """How many jobs have begun and not ended."""
        raise NotImplementedError

    def begin(self, job: Job) -> None:
        """A job begins."""
        raise NotImplementedError

    def drain(self, timeout_s: float) -> bool:
        """End all that ends within that time; whether nothing is left."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self._urgent) + len(self._background) + self.begun

    def submit(self, job: Job, dropped: Dropped, *, urgent: bool) -> None:
        if self._closing:
            dropped()
            return
        (self._urgent if urgent else self._background).append((job, dropped))
        self.begin_more()

    def drop(self) -> None:
        jobs = [*self._urgent, *self._background]
        self._urgent.clear()
        self._background.clear()
        for _, dropped in jobs:
            dropped()

    def close(self, timeout_s: float) -> bool:
        self.drain(timeout_s)
        self._closing = True
        self.drop()
        if len(self):
            return False
        # Proofs open tiers by the hundred thousand, faster than cyclic garbage is collected: a process may have
        # 65,530 mappings.
        self._scratch = memoryview(b"")
        return True

    def begin_more(self) -> None:
        """As many as there are threads for."""
        while self.begun < self._threads and (self._urgent or self._background):
            self.begin((self._urgent or self._background).popleft()[0])


class InlineQueue(SimulatedQueue):
    """Any of the jobs that have begun may be the next to end, when a test turns the crank.

    A job runs as a whole when it ends. What has begun can't be dropped, and while the queue is `hung` it does not end.
    """

    def __init__(self, rng: random.Random, name: str, threads: int, scratch_bytes: int = HEADER_BYTES) -> None:
        super().__init__(threads, scratch_bytes)
        self.name = name
        self.hung = False
        self._rng = rng
        self._begun: list[Job] = []

    @property
    def begun(self) -> int:
        return len(self._begun)

    def begin(self, job: Job) -> None:
        self._begun.append(job)

    @property
    def can_turn(self) -> bool:
        """Whether a turn of the crank would end a job."""
        return not self.hung and len(self) > 0

    def turn(self) -> bool:
        """End one of the jobs that have begun; False if there is none, or the queue hangs."""
        if not self.can_turn:
            return False
        job = self._begun.pop(self._rng.randrange(len(self._begun)))
        self.begin_more()
        job(self._scratch)
        return True

    def drain(self, timeout_s: float) -> bool:
        while self.turn():
            pass
        return not len(self)


class InlineQueues:
    """All queues of one simulation; give its `queue` to DiskOptions.

    seed: of the order in which jobs end; the same seed and the same calls give the same order.
    """

    def __init__(self, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.all: list[InlineQueue] = []

    def queue(self, name: str, threads: int, scratch_bytes: int) -> InlineQueue:
        """A new queue: what `DiskOptions.queue` is."""
        queue = InlineQueue(self.rng, name, threads, scratch_bytes)
        self.all.append(queue)
        return queue

    def turn(self) -> bool:
        """End one job of any queue; False if none can end."""
        ready = [queue for queue in self.all if queue.can_turn]
        return bool(ready) and self.rng.choice(ready).turn()

    def run(self, most: int = 1 << 30) -> int:
        """Turn until nothing can end, at most so often; returns how often."""
        turns = 0
        while turns < most and self.turn():
            turns += 1
        return turns

    def hang(self, hung: bool = True) -> None:
        """Let no job of any queue end, or (False) let them end again."""
        for queue in self.all:
            queue.hung = hung
