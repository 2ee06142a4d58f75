"""The harness in simulated time: the engine computes, sleeps and does I/O on one clock that nothing else turns.

    with simulated(model_directory, disk=path) as engine:
        text = engine.stored(engine.text(1, 2000))
        engine.disk.hang()                               # reads and writes that begin now do not end
        asked = engine.time(text)                        # seconds to the first token, tokens that were cached
        assert asked.seconds <= 1.05 * engine.plain_s(2000) + 0.05

A step takes what `ENGINE` takes for its tokens, or 1 ms without any. A job of an I/O thread takes what its medium takes
when it begins; its bytes are really moved, to and from the disk with O_DIRECT, when it ends. An engine that sleeps
wakes when a job ends. Copies between the engine and RAM take no time.
"""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from hotspan.cache.tiered import TieredCache
from hotspan.core.frame import HEADER_BYTES
from hotspan.engine import opening
from hotspan.l2.follower import READ_EVERY_S, LogFollower
from hotspan.l2.remote import RemoteOptions
from hotspan.l2.store_clock import StoreClock
from hotspan.l2.written_under import StoreNames
from hotspan.testing.clock import SimulatedClock
from hotspan.tiers import lower
from hotspan.tiers.disk import DiskOptions
from hotspan.tiers.files import Files
from hotspan.tiers.io import Job
from kit.simulated.inline import SimulatedQueue
from kit.simulated.memory_store import MemoryServer
from tests.cache.cost_rig import CPU, attended

from .core import HANG_S, STEP_TOKENS, Core, core

ENGINE = replace(CPU, step_tokens=STEP_TOKENS)
NEVER = float("inf")
POLL_S = 0.001
"""What a step takes that computes nothing."""

_numbers = itertools.count()


class WorldClock(SimulatedClock):
    """Is turned by the engine's steps and sleeps, and shows a job of an I/O thread its own time."""

    def turn_to(self, monotonic_s: float) -> None:
        self._unix_s += monotonic_s - self._monotonic_s
        self._monotonic_s = monotonic_s

    @contextmanager
    def at(self, monotonic_s: float) -> Iterator[None]:
        """Show another time meanwhile."""
        now_s = self.monotonic()
        self.turn_to(monotonic_s)
        try:
            yield
        finally:
            self.turn_to(now_s)


class Medium:
    """A disk, or a way to a store, that is well, slow, hung or broken, and the I/O threads that use it.

    seconds: what a job takes that begins now. fails: whether calls end with an error then.
    jobs:    how many have begun.
    """

    def __init__(self, clock: WorldClock) -> None:
        self.clock = clock
        self.seconds, self.fails, self.jobs = 0.0, False, 0
        self.queues: list[TimedQueue] = []
        self._until_s = 0.0

    def slow(self, seconds: float) -> None:
        """What begins from now on takes so long."""
        self.seconds, self.fails = seconds, False

    def hang(self) -> None:
        """What begins from now on does not end."""
        self.slow(NEVER)

    def fail(self, seconds: float = 0.0) -> None:
        """What begins from now on is an error, so late."""
        self.seconds, self.fails = seconds, True

    def heal(self, seconds: float = 0.0) -> None:
        """It is well, and what hung ends."""
        self.slow(seconds)
        for queue in self.queues:
            queue.release()

    def queue(self, name: str, threads: int, scratch_bytes: int) -> TimedQueue:
        """What `DiskOptions.queue` and `RemoteOptions.queue` are."""
        self.queues.append(queue := TimedQueue(self, threads, scratch_bytes))
        return queue

    def call(self, method: str = "") -> None:
        """A job calls it: when that ends, it is as late as the job ends, and perhaps an error."""
        self.clock.turn_to(max(self.clock.monotonic(), self._until_s))
        if self.fails:
            raise OSError(errno.EIO, "injected")

    def run(self, job: Job, scratch: memoryview, begun_s: float, ended_s: float) -> None:
        """Let a job see the time from its begin to its end."""
        self._until_s = ended_s
        with self.clock.at(begun_s):
            job(scratch)
        self._until_s = 0.0


class TimedQueue(SimulatedQueue):
    """Each thread takes a job and ends it when the job's time is over."""

    def __init__(self, medium: Medium, threads: int, scratch_bytes: int = HEADER_BYTES) -> None:
        super().__init__(threads, scratch_bytes)
        self._medium = medium
        self._begun: list[tuple[float, float, Job]] = []
        self._ended_s: float | None = None  # of the job whose thread takes the next one

    @property
    def begun(self) -> int:
        return len(self._begun)

    def begin(self, job: Job) -> None:
        begun_s = self._medium.clock.monotonic() if self._ended_s is None else self._ended_s
        self._begun.append((begun_s, begun_s + self._medium.seconds, job))
        self._medium.jobs += 1

    @property
    def next_s(self) -> float:
        """When the next job ends."""
        return min((ended_s for _, ended_s, _ in self._begun), default=NEVER)

    def drain(self, timeout_s: float) -> bool:
        """As if the time had passed, for whoever asked: the clock stands still."""
        self.run(self._medium.clock.monotonic() + timeout_s)
        return not len(self)

    def run(self, until_s: float) -> None:
        """End what has ended until then."""
        while (ended_s := self.next_s) <= until_s:
            begun = min(self._begun, key=lambda each: each[1])
            self._begun.remove(begun)
            self._medium.run(begun[2], self._scratch, begun[0], ended_s)
            self._ended_s = ended_s
            self.begin_more()
            self._ended_s = None

    def release(self) -> None:
        """What hangs ends now."""
        now_s = self._medium.clock.monotonic()
        self._begun = [(begun_s, min(ended_s, now_s), job) for begun_s, ended_s, job in self._begun]


class SlowFiles(Files):
    """The real disk, at the pace of a medium."""

    def __init__(self, medium: Medium) -> None:
        self._medium = medium

    def preadv(self, *arguments: Any) -> int:
        self._medium.call()
        return super().preadv(*arguments)

    def pwritev(self, *arguments: Any) -> int:
        self._medium.call()
        return super().pwritev(*arguments)

    def sync(self, *arguments: Any) -> None:
        self._medium.call()
        super().sync(*arguments)


class AtOnce:
    """A thread that opens a tier again, as if that took no time."""

    def __init__(self, target: Callable[[], None], **_: Any) -> None:
        self._target = target

    def start(self) -> None:
        self._target()

    def is_alive(self) -> bool:
        return False

    def join(self, timeout_s: float) -> None:
        return


def at_once(name: str, run: Callable[[], None], **_: Any) -> AtOnce:
    """`core.threads.start`, whose thread has done its work when it is there."""
    thread = AtOnce(run)
    thread.start()
    return thread


class Timed(NamedTuple):
    """What became of a request: simulated seconds to its first token, tokens that were cached, steps."""

    seconds: float
    cached: int
    steps: int


class SimulatedCore(Core):
    """A running core on a clock of its own, over a disk and an L2 whose pace a test sets."""

    def __init__(self, running: Core, clock: WorldClock, disk: Medium, l2: Medium) -> None:
        super().__init__(running.core)
        self.clock, self.disk, self.l2 = clock, disk, l2
        self.tiers = self.cache._lower.tiers
        self._read_s = clock.monotonic()
        parts = [self.cache, self.cache.cost, self.manager, self.manager.steps, self.manager._admission]
        parts += [self.follower, self.administrator, *self.tiers, *(tier.storage for tier in self.tiers)]
        clocks = [part._clock for part in parts if part is not None]
        clocks = [each._own if isinstance(each, StoreClock) else each for each in clocks]
        assert all(each is clock for each in clocks), "not all go by one clock"

    @property
    def medium(self) -> Medium:
        """That of its only tier."""
        return self.l2 if self.follower is not None else self.disk

    def step(self, times: int = 1) -> dict[str, int]:
        ended: dict[str, int] = {}
        for _ in range(times):
            began_s = self.clock.monotonic()
            ended |= super().step()
            if self.clock.monotonic() == began_s:
                self.sleep(POLL_S)
        return ended

    def sleep(self, most_s: float) -> None:
        """Let time pass until a job ends, and no longer than that."""
        now_s = self.clock.monotonic()
        next_s = min((queue.next_s for medium in (self.disk, self.l2) for queue in medium.queues), default=NEVER)
        self.compute(max(0.0, min(now_s + most_s, next_s) - now_s))

    def compute(self, seconds: float) -> None:
        """Let time pass for everybody."""
        self.clock.advance(seconds)
        now_s = self.clock.monotonic()
        for medium in (self.disk, self.l2):
            for queue in list(medium.queues):
                queue.run(now_s)
        if self.follower is not None and now_s - self._read_s >= max(READ_EVERY_S, self.l2.seconds):
            with self.clock.at(self._read_s):  # it began then
                self.follower.poll()
            self._read_s = now_s

    def plain_s(self, tokens: int) -> float:
        """To the first token of so long a text without any cache."""
        return ENGINE.prefill(0, tokens)

    def time(self, prompt: list[int], **directives: Any) -> Timed:
        """Ask a prompt of which neither the engine nor RAM has anything."""
        self.forget()
        name, began_s, steps = f"timed-{next(_numbers)}", self.clock.monotonic(), self.runner.steps
        self.start(name, prompt, **directives)
        ended: dict[str, int] = {}
        while name not in ended:
            ended |= self.step()
            assert self.clock.monotonic() - began_s < HANG_S, "it hangs"
        return Timed(self.clock.monotonic() - began_s, ended[name], self.runner.steps - steps)

    def forget(self) -> None:
        """Leave the chunks to the tiers below, whatever still hangs there."""
        self.until(lambda: not self.connector.has_pending_push_work(), self.step)
        while self.cache.ram.entries:
            self.cache._forget(next(iter(self.cache.ram.entries.values())))
        self.until(self.scheduler.reset_prefix_cache, self.step)


@contextmanager
def simulated(
    model: Path, *, disk: Path | None = None, l2: MemoryServer | None = None, **options: Any
) -> Iterator[SimulatedCore]:
    """A running core in simulated time, its cost model at work; `options` as in `core`."""
    clock = WorldClock()
    media = disk_medium, l2_medium = Medium(clock), Medium(clock)
    steps: dict[str, SimulatedCore] = {}

    def sleep(cache: TieredCache, timeout_s: float) -> None:
        if "engine" in steps:
            steps["engine"].sleep(timeout_s)

    disk_options = partial(DiskOptions, files=SlowFiles(disk_medium), queue=disk_medium.queue)
    with ExitStack() as patches:
        for where, name, instead in (
            (opening, "DiskOptions", disk_options),
            (opening, "RemoteOptions", partial(RemoteOptions, queue=l2_medium.queue)),
            (LogFollower, "start", lambda self: self.poll()),
            (StoreNames, "start", lambda self: None),
            (TieredCache, "wait", sleep),
            (lower, "start", at_once),
        ):
            patches.enter_context(patch.object(where, name, instead))
        if l2 is not None:
            l2.clock, l2.before = clock, l2_medium.call
        options["cache"] = {"patience_s": None, "drain_s": 0.0} | options.get("cache", {})
        running = patches.enter_context(core(model, disk=disk, l2=l2, clock=clock, **options))
        engine = steps["engine"] = SimulatedCore(running, clock, *media)
        engine.runner.on_step = lambda pairs: engine.compute(
            ENGINE.step_s + sum(ENGINE.token_s * n + ENGINE.pair_s * attended(at, n) for at, n in pairs)
        )
        try:
            yield engine
        finally:
            for medium in media:
                medium.heal()
