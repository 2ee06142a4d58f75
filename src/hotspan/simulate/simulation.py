"""One replay: a trace over simulated replicas behind one router.

Things happen in the order of time: arrivals, and what comes next at each replica out of a heap. An entry of the heap is
stale once its replica has changed since. A request that awaits others arrives when they have been answered and its
client has thought (a closed loop); the others at the times of the trace.
"""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from hotspan.core.trace import Trace
from hotspan.router.types import Medium
from hotspan.simulate.caches import BlockCache, Change, Pool, make_cache
from hotspan.simulate.costs import Setup
from hotspan.simulate.replica import NEVER, Job, SimulatedReplica
from hotspan.simulate.routers import Router, make_router


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that have not ended at a replica, at one moment: of the one that has most, and on average."""

    at_s: float
    most: int
    mean: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of each request, in the order of arrival.

    ttft_s, tpot_s: of each; the latter None where the answer has one token.
    replica:        that served it.
    found:          tokens found in the GPU's pool; `loaded`: by medium, those loaded.
    blended:        tokens taken from windows, those that are computed again included.
    busy_s:         by replica, in which it prefilled.
    load:           at some arrivals.
    """

    ttft_s: list[float]
    tpot_s: list[float | None]
    replica: list[int]
    tokens: int
    found: int
    loaded: dict[Medium, int]
    busy_s: list[float]
    load: list[Load]
    span_s: float
    blended: int

    @property
    def hit_rate(self) -> float:
        """Tokens of prefixes that were not computed, of all."""
        return (self.found + sum(self.loaded.values())) / self.tokens

    @property
    def window_rate(self) -> float:
        """Tokens taken from windows, of all."""
        return self.blended / self.tokens


class SimulationClock:
    """Stands where the simulation does."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def unix(self) -> float:
        return self.now_s


_SAMPLES = 600
"""Of the load, over a trace."""


class Simulation:
    """Replays once: make another for another replay."""

    def __init__(self, setup: Setup, policy: str, seed: int = 0) -> None:
        self._clock = SimulationClock()
        self._router: Router = make_router(policy, setup, self._clock, random.Random(f"{policy} {seed}"))
        self._costs = setup.costs
        self._delay_s = setup.events_s or 0.0
        self._events: deque[tuple[float, int, Medium, Change]] = deque()
        self._heap: list[tuple[float, int, int]] = []
        self._versions = [0] * setup.replicas
        self._arrivals: list[tuple[float, int]] = []  # when, and which
        self._awaited: list[int] = []  # of each request, how many have not been answered yet
        self._awaiting: dict[int, list[int]] = {}  # by request, those that await it
        shared = _caches(setup, (Medium.L2,))
        self.replicas = [
            SimulatedReplica(
                *(n, setup.costs, Pool(setup.sizes.gpu_tokens, setup.block_tokens, setup.gpu_block_tokens)),
                *(_caches(setup, (Medium.RAM, Medium.DISK)) | shared, setup.block_tokens),
                *(self._first, self._end),
                blend=setup.blend,
            )
            for n in range(setup.replicas)
        ]
        self._jobs: list[Job] = []

    def run(self, trace: Trace) -> Outcome:
        """What became of the requests. Takes a fraction of a millisecond for each."""
        jobs = self._jobs = [Job(n, each, each.at_s) for n, each in enumerate(trace.requests)]
        self._await(trace)
        load: list[Load] = []
        every = max(1, len(jobs) // _SAMPLES)
        for arrived in range(len(jobs)):
            job = self._next_job()
            self._clock.now_s = job.arrived_s
            self._hear(job.arrived_s)
            replica = self.replicas[self._router.send(job)]
            replica.arrive(job, job.arrived_s)
            self._plan(replica)
            if arrived % every == 0:
                waiting = [each.requests for each in self.replicas]
                load.append(Load(job.arrived_s, max(waiting), sum(waiting) / len(waiting)))
        self._until(NEVER)
        return self._outcome(jobs, load)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _await(self, trace: Trace) -> None:
        """Note which requests come at times of their own, and which others await."""
        self._arrivals = [(each.at_s, n) for n, each in enumerate(trace.requests) if not each.after]
        heapify(self._arrivals)
        self._awaited = [len(each.after) for each in trace.requests]
        for n, each in enumerate(trace.requests):
            for other in each.after:
                self._awaiting.setdefault(other, []).append(n)

    def _next_job(self) -> Job:
        """The next to arrive, after all that happens before."""
        while not self._arrivals or (self._heap and self._heap[0][0] <= self._arrivals[0][0]):
            self._step()
        at_s, number = heappop(self._arrivals)
        job = self._jobs[number]
        job.arrived_s = at_s
        return job

    def _until(self, end_s: float) -> None:
        """Let happen what comes before."""
        while self._heap and self._heap[0][0] <= end_s:
            self._step()

    def _step(self) -> None:
        at_s, number, version = heappop(self._heap)
        if version == self._versions[number]:
            self._clock.now_s = at_s
            replica = self.replicas[number]
            replica.advance(at_s)
            self._plan(replica)

    def _plan(self, replica: SimulatedReplica) -> None:
        self._versions[replica.number] += 1
        next_s = replica.next_s()
        if next_s < NEVER:
            heappush(self._heap, (next_s, replica.number, self._versions[replica.number]))

    def _hear(self, now_s: float) -> None:
        """Tell the router what the replicas have said until now."""
        events = self._events
        while events and events[0][0] <= now_s:
            _, number, medium, change = events.popleft()
            self._router.event(number, medium, change)

    def _first(self, job: Job, now_s: float) -> None:
        self._router.first_byte(job)
        if self._router.is_told:
            for medium, change in job.changes.items():
                self._events.append((now_s + self._delay_s, job.replica, medium, change))
        job.changes = {}

    def _end(self, job: Job, now_s: float) -> None:
        self._router.end(job)
        for number in self._awaiting.pop(job.index, ()):
            self._awaited[number] -= 1
            if not self._awaited[number]:
                heappush(self._arrivals, (now_s + self._jobs[number].request.think_s, number))

    def _outcome(self, jobs: Sequence[Job], load: list[Load]) -> Outcome:
        loaded = {
            medium: sum(job.loaded.get(medium, 0) for job in jobs) for medium in (Medium.RAM, Medium.DISK, Medium.L2)
        }
        return Outcome(
            ttft_s=[job.first_s - job.arrived_s + self._costs.latency_s for job in jobs],
            tpot_s=[
                (job.ended_s - job.first_s) / (job.request.answer_tokens - 1) if job.request.answer_tokens > 1 else None
                for job in jobs
            ],
            replica=[job.replica for job in jobs],
            tokens=sum(job.request.tokens for job in jobs),
            found=sum(job.found for job in jobs),
            loaded=loaded,
            busy_s=[replica.busy_s for replica in self.replicas],
            load=load,
            span_s=max(job.ended_s for job in jobs),
            blended=sum(job.blended for job in jobs),
        )


def _caches(setup: Setup, media: Sequence[Medium]) -> dict[Medium, BlockCache]:
    """One for each medium that has room."""
    found: dict[Medium, BlockCache] = {}
    for medium in media:
        blocks = setup.sizes.tokens(medium, setup.costs) // setup.block_tokens
        if blocks:
            found[medium] = make_cache(setup.sizes.eviction, blocks)
    return found
