"""What the weights of the router's cost are worth, simulated: both Mooncake-shaped workloads, one to four routers.

usage: python -m benchmarks.router_weights [--seeds 3 4 5] [--gpu-tokens 400000] [--output FILE]

Eight replicas of 8,000 tokens/s, with an LRU cache each. With several routers each request goes through one of them at
random, and no router knows of the others' requests; events reach all of them. The bound is what nobody can beat: every
request alone on an idle replica that has all that was ever computed anywhere.
"""

import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from benchmarks.harness import arguments
from hotspan.bench.machine import write_results
from hotspan.core.trace import BLOCK_TOKENS, Trace
from hotspan.router.fleet import Fleet
from hotspan.router.policy import Weights
from hotspan.router.types import Medium, Strategy
from hotspan.simulate.caches import Change
from hotspan.simulate.costs import Setup, Sizes
from hotspan.simulate.replica import Job
from hotspan.simulate.routers import FleetRouter, told_speeds
from hotspan.simulate.shapes import SHAPES
from hotspan.simulate.simulation import Simulation
from kit.measure import quantile

TRACES = ("conversation", "synthetic")
AFFINITIES = (0.0, 0.1, 0.2, 0.4, 0.8)
OTHERS = (0.0, 1.0, 2.0, 4.0, 8.0)


@dataclass(frozen=True, slots=True)
class Figure:
    """Means over the seeds, in seconds. events: whether replicas tell what they hold."""

    trace: str
    events: bool
    routers: int
    affinity: float
    others: float
    hit_rate: float
    mean_s: float
    p50_s: float
    p99_s: float


class Routers:
    """Several that know nothing of each other."""

    def __init__(self, routers: Sequence[FleetRouter], seed: int, is_told: bool) -> None:
        self.is_told = is_told
        self._routers = routers
        self._rng = random.Random(seed)
        self._of: dict[int, FleetRouter] = {}

    def send(self, job: Job) -> int:
        self._of[job.index] = router = self._rng.choice(self._routers)
        return router.send(job)

    def first_byte(self, job: Job) -> None:
        self._of[job.index].first_byte(job)

    def end(self, job: Job) -> None:
        self._of.pop(job.index).end(job)

    def event(self, replica: int, medium: Medium, change: Change) -> None:
        for router in self._routers:
            router.event(replica, medium, change)


class Weighed(Simulation):
    """A replay through some routers with given weights."""

    def __init__(self, setup: Setup, weights: Weights, routers: int, seed: int, events: bool) -> None:
        super().__init__(setup, Strategy.AUTO, seed)
        speeds = told_speeds(setup.costs, setup.sizes)
        made = []
        for n in range(routers):
            rng = random.Random(f"{seed} {n}")
            fleet = Fleet(strategy=Strategy.AUTO, clock=self._clock, rng=rng, weights=weights)
            made.append(FleetRouter(fleet, setup.replicas, is_told=events, speeds=speeds))
        self._router = Routers(made, seed, events)


def replay(setup: Setup, work: Sequence[Trace], weights: Weights, routers: int, events: bool) -> Figure:
    """The same over every seed."""
    outcomes = [Weighed(setup, weights, routers, n, events).run(each) for n, each in enumerate(work)]
    return Figure(
        trace=work[0].name,
        events=events,
        routers=routers,
        affinity=weights.affinity,
        others=weights.others,
        hit_rate=statistics.mean(outcome.hit_rate for outcome in outcomes),
        mean_s=statistics.mean(statistics.mean(outcome.ttft_s) for outcome in outcomes),
        p50_s=statistics.mean(quantile(outcome.ttft_s, 0.5) for outcome in outcomes),
        p99_s=statistics.mean(quantile(outcome.ttft_s, 0.99) for outcome in outcomes),
    )


def bound(setup: Setup, work: Sequence[Trace]) -> dict[str, float]:
    """No queues, and one cache without end."""
    means, p99s = [], []
    for each in work:
        seen: set[int] = set()
        taken = []
        for request in each.requests:
            held = next((n for n, key in enumerate(request.keys) if key not in seen), len(request.keys))
            held = min(held, (request.tokens - 1) // BLOCK_TOKENS)
            taken.append(setup.costs.prefill_s(held * BLOCK_TOKENS, request.tokens))
            seen.update(request.keys)
        means.append(statistics.mean(taken))
        p99s.append(quantile(taken, 0.99))
    return {"mean_s": statistics.mean(means), "p99_s": statistics.mean(p99s)}


def main() -> int:
    options = arguments(__doc__, seeds=[3, 4, 5], gpu_tokens=400_000)
    setup = Setup(sizes=Sizes(gpu_tokens=options.gpu_tokens))
    usual = Weights()
    cases = [
        *((Weights(others=others), 1, True) for others in OTHERS),
        *((Weights(affinity=affinity), 1, True) for affinity in AFFINITIES if affinity != usual.affinity),
        *((Weights(affinity=affinity), 4, True) for affinity in AFFINITIES),
        (usual, 1, False),
        *((Weights(affinity=affinity), 4, False) for affinity in AFFINITIES),
    ]
    figures: list[Figure] = []
    bounds = {}
    for trace in TRACES:
        work = [SHAPES[trace].draw(seed) for seed in options.seeds]
        bounds[trace] = bound(setup, work)
        print(f"{trace}: bound mean {bounds[trace]['mean_s']:.2f} s, p99 {bounds[trace]['p99_s']:.2f} s")
        for weights, routers, events in cases:
            figures.append(one := replay(setup, work, weights, routers, events))
            print(
                f"  {routers} {'told  ' if events else 'untold'} affinity {one.affinity:.1f} others {one.others:.0f}: "
                f"hit {one.hit_rate:.3f}, mean {one.mean_s:.2f}, p50 {one.p50_s:.2f}, p99 {one.p99_s:.2f} s",
                flush=True,
            )
    if options.output is not None:
        write_results(
            *(options.output, "router-weights", "python -m benchmarks.router_weights"),
            settings={"seeds": options.seeds, "gpu_tokens": options.gpu_tokens},
            bounds=bounds,
            figures=[asdict(figure) for figure in figures],
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
