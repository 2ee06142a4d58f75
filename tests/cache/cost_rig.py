"""A simulated replica for the cost model: an engine that computes in steps, tiers that move chunks, and their clock."""

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hotspan.cache.choice import Choice, Run, Text
from hotspan.cache.cost import CostModel
from hotspan.core.types import MIB, Tier
from hotspan.testing.clock import SimulatedClock

NEVER = float("inf")
CHUNK = 256
START_S = 1000.0


@dataclass(frozen=True)
class Engine:
    """What computing truly costs, and by what share a step differs from that."""

    step_s: float
    token_s: float
    pair_s: float
    step_tokens: int = 2048
    noise: float = 0.0

    def step(self, start: int, tokens: int) -> float:
        """One step, without noise."""
        return self.step_s + self.token_s * tokens + self.pair_s * attended(start, tokens)

    def prefill(self, start: int, stop: int) -> float:
        """All steps of a text from `start`, without noise."""
        steps = range(start, stop, self.step_tokens)
        return sum(self.step(at, min(self.step_tokens, stop - at)) for at in steps)


GPU = Engine(0.004, 1 / 20_000, 1.6e-9)
CPU = Engine(0.020, 1 / 1_000, 3e-8, step_tokens=512)


def attended(start: int, tokens: int) -> int:
    """How many tokens stand before each of these, in sum."""
    return tokens * start + tokens * (tokens - 1) // 2


@dataclass(frozen=True)
class Pace:
    """How a tier is at a moment: what a transfer waits for, and the bandwidth of all together."""

    latency_s: float
    bytes_per_s: float


FAST = Pace(0.0005, 4e9)
SLOW = Pace(0.001, 10e6)
REMOTE = Pace(0.200, 2e9)
HUNG = Pace(NEVER, 1.0)


@dataclass
class SimulatedTier:
    """Lanes over one link: a transfer takes a free lane, waits out the latency and has its turn on the link."""

    pace: Callable[[float], Pace]
    lanes: int = 8
    free_s: list[float] = field(default_factory=list)
    link_s: float = 0.0

    def submit(self, now_s: float, size: int) -> tuple[float, float]:
        """Queue a transfer: when it will end, and how long it will take by then on its lane."""
        self.free_s = self.free_s or [0.0] * self.lanes
        begun_s = max(now_s, heapq.heappop(self.free_s))
        pace = self.pace(begun_s)
        self.link_s = max(self.link_s, begun_s) + size / pace.bytes_per_s
        ended_s = self.link_s + pace.latency_s
        heapq.heappush(self.free_s, ended_s)
        return ended_s, ended_s - begun_s


@dataclass(eq=False)
class Request:
    """One request, and what becomes of it.

    began_s, waited_s: when it was looked up, and how long it waited then. done: tokens that it has.
    """

    arrival_s: float
    tokens: int
    chain: Sequence[Run]
    choice: Choice | None = None
    began_s: float = 0.0
    waited_s: float = 0.0
    landed: list[bool] = field(default_factory=list)
    landed_s: float = 0.0
    done: int = 0
    ttft_s: float = 0.0

    @property
    def front(self) -> int:
        """Chunks from the front of its chain that are in RAM."""
        return next((index for index, landed in enumerate(self.landed) if not landed), len(self.landed))


@dataclass(frozen=True, eq=False)
class Flight:
    """A chunk on its way, for a request that waits for it or for none."""

    run: Run
    seconds: float
    request: Request | None
    index: int


@dataclass(eq=False)
class World:
    """Runs requests as vLLM does: those that wait for loads are passed over, one other computes a step at a time."""

    engine: Engine
    tiers: dict[Tier, SimulatedTier]
    model: CostModel | None
    clock: SimulatedClock
    rng: random.Random = field(default_factory=lambda: random.Random(7))
    flying: list[tuple[float, int, Flight]] = field(default_factory=list)
    waiting: list[Request] = field(default_factory=list)
    computing: list[Request] = field(default_factory=list)
    submitted: int = 0

    def run(self, requests: Sequence[Request]) -> list[float]:
        """Serve them all; the times to their first tokens."""
        queue = sorted(requests, key=lambda request: request.arrival_s)
        at = 0
        while at < len(queue) or self.waiting or self.computing:
            self._land()
            while at < len(queue) and queue[at].arrival_s <= self.clock.monotonic():
                self._arrive(queue[at])
                at += 1
            self._look()
            if self.computing:
                self._step()
            else:
                self._sleep(queue[at].arrival_s if at < len(queue) else NEVER)
        return [request.ttft_s for request in requests]

    def _land(self) -> None:
        now = self.clock.monotonic()
        while self.flying and self.flying[0][0] <= now:
            flight = heapq.heappop(self.flying)[2]
            assert self.model is not None
            self.model.end_load(flight.run.tier, flight.run.chunk_bytes, flight.seconds)
            if flight.request is not None:
                flight.request.landed[flight.index] = True
                flight.request.landed_s = now

    def _arrive(self, request: Request) -> None:
        if self.model is None:
            self.computing.append(request)
            return
        now = self.clock.monotonic()
        busy_s = sum(self.model.prefill_s(other.done, other.tokens) for other in self.computing)
        choice = self.model.cut(Text(request.tokens, CHUNK, busy_s=busy_s), request.chain)
        places = [run for run in request.chain for _ in range(run.chunks)]
        request.choice, request.began_s, request.landed_s = choice, now, now
        request.landed = [run.tier is Tier.RAM for run in places[: choice.chunks]]
        for index, run in enumerate(places[: choice.chunks + choice.probe]):
            if run.tier is not Tier.RAM:
                self._submit(run, request if index < choice.chunks else None, index)
        self.waiting.append(request)

    def _submit(self, run: Run, request: Request | None, index: int) -> None:
        assert self.model is not None
        self.model.begin_load(run.tier, run.chunk_bytes)
        ended_s, seconds = self.tiers[run.tier].submit(self.clock.monotonic(), run.chunk_bytes)
        self.submitted += 1
        heapq.heappush(self.flying, (ended_s, self.submitted, Flight(run, seconds, request, index)))

    def _look(self) -> None:
        now = self.clock.monotonic()
        for request in list(self.waiting):
            assert self.model is not None and request.choice is not None
            if request.front == request.choice.chunks or now > self._deadline_s(request):
                self.model.settle(request.choice, now - request.began_s, request.front)
                request.waited_s = now - request.began_s
                request.done = min(request.front * CHUNK, request.tokens - 1)
                self.waiting.remove(request)
                self.computing.append(request)
                self.computing[1:] = sorted(self.computing[1:], key=lambda request: request.arrival_s)

    def _deadline_s(self, request: Request) -> float:
        assert request.choice is not None
        return request.began_s + request.choice.patience_s(request.front, request.landed_s - request.began_s)

    def _step(self) -> None:
        request = self.computing[0]
        tokens = min(self.engine.step_tokens, request.tokens - request.done)
        seconds = self.engine.step(request.done, tokens) * self.rng.lognormvariate(0, self.engine.noise)
        self.clock.advance(seconds)
        if self.model is not None:
            self.model.observe_step(tokens, attended(request.done, tokens), seconds)
        request.done += tokens
        if request.done == request.tokens:
            request.ttft_s = self.clock.monotonic() - request.arrival_s
            self.computing.pop(0)

    def _sleep(self, arrival_s: float) -> None:
        """Until something lands, arrives or runs late; the scheduler polls once a millisecond."""
        events = [arrival_s, *(self._deadline_s(request) for request in self.waiting)]
        if self.flying:
            events.append(self.flying[0][0])
        self.clock.advance(max(0.0, min(events) - self.clock.monotonic()) + (0.001 if self.waiting else 0.0))


def texts(count: int, gap_s: float, chunks: Sequence[int], chunk_bytes: int = 14 * MIB) -> list[Request]:
    """Requests `gap_s` apart whose chunks, of these numbers in turn, lie on disk; 100 tokens more are new."""
    lengths = [chunks[index % len(chunks)] for index in range(count)]
    return [
        Request(START_S + index * gap_s, length * CHUNK + 100, [Run(Tier.DISK, length, chunk_bytes)])
        for index, length in enumerate(lengths)
    ]


@dataclass(frozen=True)
class Trial:
    """The same requests with the model and without any cache: times to first token, and what the model said of them."""

    requests: list[Request]
    ttft_s: Sequence[float]
    plain_s: Sequence[float]
    model: CostModel


def trial(
    engine: Engine,
    pace: Callable[[float], Pace],
    requests: Callable[[], list[Request]],
    lanes: int = 8,
) -> Trial:
    """Run the requests against a disk tier of this pace, and without."""
    clock = SimulatedClock(START_S)
    model = CostModel(engine.step_tokens, {Tier.DISK: lanes}, clock)
    served = requests()
    ttft_s = World(engine, {Tier.DISK: SimulatedTier(pace, lanes)}, model, clock).run(served)
    plain_s = World(engine, {}, None, SimulatedClock(START_S)).run(requests())
    return Trial(served, ttft_s, plain_s, model)


def load_s(model: CostModel, tier: Tier, chunks: int, chunk_bytes: int) -> float:
    """What the model predicts for so many chunks, behind what is queued now; 0 while unknown."""
    return float(model._tiers[tier].load_s(chunks, chunks * chunk_bytes, model._clock.monotonic()))
