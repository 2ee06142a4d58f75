"""R13: load or compute, under load: at no point is the policy behind the better of "always load" and "never load".

A point is an engine, a tier, a RAM, texts and requests that come, drawn by its number. The three policies serve the
same requests on it, in simulated time, with hotspan's own decision code; each is warmed up first.
"""

import dataclasses
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from hotspan.cache.cost import CostModel
from hotspan.cache.tiered import TieredCache
from hotspan.core.types import MIB, Chunk, Tier
from hotspan.testing.chunks import chain
from hotspan.testing.clock import SimulatedClock
from hotspan.tiers.lower import LowerTier
from kit.measure import quantile
from kit.proof import Findings, Progress, Proof, rng_of
from proofs.load_world import NEVER, EmptySlab, Engine, LinkTier, Pace, Request, World

Policy = Literal["hotspan", "always", "never"]
MEASURES = ("wall_s", "mean_s", "p99_s")
BEHIND = 1.05
"""How far behind the better of the two a point may be."""

_WARM = 24
_PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True)
class Options:
    """points: drawn. only: the number of the one to run. requests: at each. draws: of these requests, pooled.

    Of one draw, the p99 of 200 requests is the second worst: two runs of one policy differ by a third in it.
    """

    seed: int = 0
    points: int = 2000
    only: int | None = None
    requests: int = 200
    draws: int = 3


@dataclass(frozen=True)
class Point:
    """One set-up.

    lanes: chunks that the tier moves at a time. ram_texts: texts that RAM holds. tail: tokens of a prompt behind its
    chunks. answer: tokens that are decoded. clients: of a closed loop, or 0. rate: requests per second that come else.
    burst: requests that come at once, in the middle of those. new: share of requests with a text that nobody has asked
    before. noise: of a transfer. is_sync: short copies from RAM are made within a step, as on CPU engines.
    rows: of the encoder output that each text has; 0: none. lead_s: how long before it comes a request is announced, if
    it is one of the share `announced`.
    """

    engine: Engine
    pace: Callable[[float], Pace]
    lanes: int
    chunk_bytes: int
    texts: int
    text_chunks: int
    tail: int
    answer: int
    ram_texts: float
    clients: int
    requests: int
    rate: float = 0.0
    burst: int = 0
    new: float = 0.0
    noise: float = 0.1
    tier: Tier = Tier.DISK
    is_sync: bool = True
    rows: int = 0
    announced: float = 0.0
    lead_s: float = 0.0
    seed: int = 0

    def with_small_chunks(self) -> "Point":
        """The same texts in chunks of half as many tokens."""
        engine = dataclasses.replace(self.engine, chunk_tokens=self.engine.chunk_tokens // 2)
        return dataclasses.replace(
            self, engine=engine, text_chunks=2 * self.text_chunks, chunk_bytes=self.chunk_bytes // 2
        )


@dataclass(frozen=True)
class Outcome:
    """How the requests fared: seconds until all were answered, and to their first tokens; the share of tokens hit.

    recovery_s: from a burst until no more requests were unanswered than before it; 0 without one.
    steps:      of the engine, with those that warmed it up.
    """

    wall_s: float
    mean_s: float
    p99_s: float
    hit: float
    ttft_s: np.ndarray[Any, np.dtype[np.float64]]
    recovery_s: float = 0.0
    steps: int = 0


def serve(point: Point, policy: Policy) -> Outcome:
    """The requests of a point under one policy."""
    world, texts = _world(point, policy)
    rng = random.Random(point.seed)
    picks = [
        chain(f"new/{point.seed}/{n}", point.text_chunks) if rng.random() < point.new else rng.choice(texts)
        for n in range(point.requests)
    ]
    began_s = _warm(world, point, texts)
    waits = [rng.expovariate(point.rate) if point.rate else 0.0 for _ in range(point.requests)]
    due = list(began_s + np.cumsum(waits))
    burst_s = due[point.requests // 3]
    due[point.requests // 3 : point.requests // 3 + point.burst] = [burst_s] * point.burst
    ended: list[Request] = []
    sent = 0
    is_announced = random.Random(point.seed + 3)
    notices = deque(
        (at_s - point.lead_s, pick)
        for at_s, pick in zip(due, picks, strict=True)
        if point.rate and point.announced and is_announced.random() < point.announced
    )

    def arrive(now_s: float) -> tuple[list[Request], float]:
        nonlocal sent
        new: list[Request] = []
        while notices and notices[0][0] <= now_s:
            world.announce(notices.popleft()[1], 2 * point.lead_s)
        while sent < point.requests and (due[sent] <= now_s if point.rate else sent - len(ended) < point.clients):
            at_s = float(due[sent]) if point.rate else now_s
            new.append(_request(point, str(sent), at_s, picks[sent]))
            sent += 1
        next_s = float(due[sent]) if point.rate and sent < point.requests else NEVER
        return new, min(next_s, float(notices[0][0])) if notices else next_s

    world.run(arrive, ended.append)
    ttft_s = np.array([request.ttft_s for request in ended])
    hits = sum(request.hit_tokens for request in ended) / sum(request.tokens for request in ended)
    wall_s = world.clock.monotonic() - began_s
    recovery_s = recovered_s(ended, burst_s) if point.burst else 0.0
    return Outcome(wall_s, float(ttft_s.mean()), quantile(ttft_s, 0.99), hits, ttft_s, recovery_s, world.steps)


def recovered_s(requests: Sequence[Request], burst_s: float) -> float:
    """Seconds from a burst until no more requests were unanswered than just before it, and one that is asked."""
    least = sum(request.arrival_s < burst_s <= request.ended_s for request in requests) + 1
    ends = sorted(request.ended_s for request in requests if request.ended_s >= burst_s)
    return next(
        at_s - burst_s
        for at_s in ends
        if sum(request.arrival_s <= at_s < request.ended_s for request in requests) <= least
    )


@dataclass(frozen=True, slots=True)
class Ratios:
    """How many times worse the policy is, by measure.

    behind:    than the better of always and never in that measure.
    dominated: than the better of those that are not behind it in throughput: first tokens that come sooner because
               fewer requests are answered are no gain.
    recovery:  seconds to recover from a burst, over those of always; 0 without a burst.
    """

    behind: dict[str, float]
    dominated: dict[str, float]
    recovery: float


def pooled(point: Point, policy: Policy, draws: int) -> Outcome:
    """The requests of several draws, each served on its own."""
    each = [serve(dataclasses.replace(point, seed=point.seed + draw), policy) for draw in range(draws)]
    ttft_s = np.concatenate([outcome.ttft_s for outcome in each])
    wall_s, hit = sum(outcome.wall_s for outcome in each), sum(outcome.hit for outcome in each) / draws
    recovery_s, steps = sum(outcome.recovery_s for outcome in each), sum(outcome.steps for outcome in each)
    return Outcome(wall_s, float(ttft_s.mean()), quantile(ttft_s, 0.99), hit, ttft_s, recovery_s, steps)


def compared(point: Point, draws: int = 1) -> Ratios:
    """The policy beside the two others."""
    hotspan, always, never = (pooled(point, policy, draws) for policy in get_args(Policy))
    others = [always, never]
    even = [other for other in others if other.wall_s <= BEHIND * hotspan.wall_s]

    def worse(than: list[Outcome]) -> dict[str, float]:
        return {
            name: max((getattr(hotspan, name) / getattr(each, name) for each in than), default=0.0) for name in MEASURES
        }

    recovery = hotspan.recovery_s / always.recovery_s if always.recovery_s else 0.0
    return Ratios(worse(others), worse(even), recovery)


def behind(point: Point) -> dict[str, float]:
    """How many times worse than the better of always and never the policy is, by measure."""
    return compared(point).behind


def draw(rng: random.Random, requests: int) -> Point:
    """A point: engines of 1k to 1M tokens/s, disks of 0.1 to 50 GB/s, L2s of 1 to 100 ms, idle to 3x overload."""
    per_s = _between(rng, 1e3, 1e6)
    engine = Engine(
        step_s=max(0.002, min(0.05, 40 / per_s)),
        token_s=1 / per_s,
        pair_s=rng.choice([0.0, 1 / per_s / 30_000]),
        decode_s=rng.choice([0.0, 1 / per_s]),
        step_tokens=rng.choice([512, 2048, 8192]),
        slots=rng.choice([8, 64, 256]),
        copy_bytes_per_s=rng.choice([5e9, 25e9]),
    )
    if rng.random() < 0.5:
        tier, pace, lanes = Tier.DISK, Pace(rng.choice([1e-4, 1e-3]), _between(rng, 1e8, 5e10)), rng.choice([2, 4, 8])
    else:
        tier, pace, lanes = Tier.L2, Pace(_between(rng, 1e-3, 0.1), _between(rng, 1e8, 1e10)), rng.choice([2, 4, 8, 16])
    texts = rng.choice([20, 60])
    point = Point(
        engine,
        lambda at_s: pace,
        lanes,
        rng.choice([1, 6, 14, 32]) * MIB,
        texts,
        text_chunks=rng.choice([2, 3, 8, 20]),
        tail=rng.choice([20, 112, 400]),
        answer=rng.choice([1, 16]),
        ram_texts=max(texts * rng.choice([0.1, 0.3, 0.7]), 8),
        clients=rng.choice([1, 2, 4, 8, 16, 32]),
        requests=requests,
        new=rng.choice([0.0, 0.2, 0.5, 0.9]),
        tier=tier,
        seed=rng.randrange(1 << 30),
    )
    if rng.random() >= 0.5:
        full = serve(dataclasses.replace(point, clients=32, requests=100), "never")
        load = rng.choice([0.1, 0.3, 0.5, 0.8, 1.0, 1.3, 2.0, 3.0])
        point = dataclasses.replace(point, clients=0, rate=load * 100 / full.wall_s)
    if rng.random() >= 0.75:
        pool = rng.choice([2, 4]) * _request(point, "", 0.0, []).tokens + 8  # too few for all answers: it preempts
        point = dataclasses.replace(point, engine=dataclasses.replace(engine, pool_tokens=pool))
    if point.rate and rng.random() < 0.5:
        point = dataclasses.replace(point, burst=rng.choice([10, requests // 4]))
    point = point.with_small_chunks() if rng.random() < 0.5 else point
    return _with_more(rng, point)


def _with_more(rng: random.Random, point: Point) -> Point:
    """The same with copies beside steps, slow ones among them, encoder outputs and announcements, or without."""
    engine = point.engine
    if rng.random() < 0.5:
        point = dataclasses.replace(point, is_sync=False)
    if rng.random() < 0.25:
        engine = dataclasses.replace(engine, copy_bytes_per_s=rng.choice([2e8, 1e9]))
    if rng.random() < 0.3:
        engine = dataclasses.replace(engine, row_s=engine.token_s * rng.choice([0.3, 1.0, 3.0]))
        point = dataclasses.replace(point, rows=rng.choice([64, 576, 2048]))
    if point.rate and rng.random() < 0.3:
        lead_s = rng.choice([0.5, 2.0, 8.0]) / point.rate
        point = dataclasses.replace(point, announced=rng.choice([0.3, 1.0]), lead_s=lead_s)
    return dataclasses.replace(point, engine=engine)


def run(options: Options, progress: Progress) -> Proof:
    """Draw points and serve them; a failure names a measure and how far behind it is."""
    findings = Findings()
    worst, over = dict.fromkeys(MEASURES, 0.0), dict.fromkeys(MEASURES, 0)
    worst_dominated, dominated = dict.fromkeys(MEASURES, 0.0), dict.fromkeys(MEASURES, 0)
    recoveries: list[float] = []
    cases = range(options.points) if options.only is None else [options.only]
    for done, case in enumerate(cases):
        found = compared(draw(rng_of("load", options.seed, case), options.requests), options.draws)
        for name in MEASURES:
            worst[name] = max(worst[name], found.behind[name])
            over[name] += found.behind[name] > BEHIND
            worst_dominated[name] = max(worst_dominated[name], found.dominated[name])
            dominated[name] += found.dominated[name] > BEHIND
        recoveries += [found.recovery] if found.recovery else []
        if any(ratio > BEHIND for ratio in found.behind.values()):
            findings.add(case, ", ".join(f"{name} {ratio:.2f}x" for name, ratio in found.behind.items()))
        progress(done + 1, len(cases))
    figures: dict[str, Any] = {"points": len(cases), "failures": findings.count}
    figures |= {f"behind_{name}": over[name] for name in MEASURES}
    figures |= {f"worst_{name}": round(worst[name], 3) for name in MEASURES}
    figures |= {f"dominated_{name}": dominated[name] for name in MEASURES}
    figures |= {f"worst_dominated_{name}": round(worst_dominated[name], 3) for name in MEASURES}
    figures |= {"bursts": len(recoveries), "slow_recoveries": sum(ratio > BEHIND for ratio in recoveries)}
    figures |= {"worst_recovery": round(max(recoveries, default=0.0), 3)}
    claim = "under load the policy is at most 5 % behind the better of always and never loading"
    return Proof("load", claim, figures, not findings.count, tuple(findings.kept))


# -- inside ------------------------------------------------------------------------------------------------------------


def _world(point: Point, policy: Policy) -> tuple[World, list[list[Any]]]:
    clock, rng = SimulatedClock(), random.Random(point.seed + 1)
    slab = EmptySlab(max(int(point.ram_texts * point.text_chunks), 2), point.chunk_bytes)
    depth = max(8, slab.slots // 2)
    tier = LinkTier(point.tier, point.pace, point.chunk_bytes, point.lanes, clock, rng, point.noise, depth)
    texts = [chain(f"{point.seed}/{n}", point.text_chunks) for n in range(point.texts)]
    tier.parents |= {chunk.key: chunk.parent for text in texts for chunk in text}
    tier.parents |= {_medium(text).key: None for text in texts if point.rows}
    lower = [LowerTier(lambda again: tier, clock)] if policy != "never" else []
    decides = policy == "hotspan"  # with RAM alone there is nothing to decide, and hotspan has no model
    lanes = {point.tier: point.lanes}
    steps, holds = point.engine.step_tokens, point.is_sync
    cost = CostModel(steps, lanes, clock, slab.slots, copies_hold=holds) if decides else None
    cache = TieredCache(slab, *lower, patience_s=_PATIENCE_S, cost=cost, clock=clock)  # type: ignore[arg-type]
    rng = random.Random(point.seed + 2)
    world = World(point.engine, cache, tier if lower else None, clock, rng, is_sync=point.is_sync)
    return world, texts


def _warm(world: World, point: Point, texts: list[list[Any]]) -> float:
    """Serve a few requests one after the other, as a server does before it is under load; returns when they ended."""
    sent: list[Request] = []

    def arrive(now_s: float) -> tuple[list[Request], float]:
        if len(sent) == _WARM or (sent and not sent[-1].ended_s):
            return [], NEVER
        n = len(sent)
        text = texts[n * 7 % len(texts)] if n % 2 else chain(f"warm/{point.seed}/{n}", point.text_chunks)
        sent.append(_request(point, f"warm-{n}", now_s, text))
        return sent[-1:], NEVER

    world.run(arrive, lambda request: None)
    return world.clock.monotonic()


def _request(point: Point, name: str, at_s: float, text: list[Any]) -> Request:
    tokens = point.text_chunks * point.engine.chunk_tokens + point.tail
    medium = _medium(text) if point.rows and text else None
    return Request(name, at_s, tokens, text, point.answer, medium, point.rows)


def _medium(text: Sequence[Chunk]) -> Chunk:
    """The encoder output of a text's picture."""
    return chain(f"picture/{text[0].key.hex()}", 1)[0]


def _between(rng: random.Random, least: float, most: float) -> float:
    return math.exp(rng.uniform(math.log(least), math.log(most)))
