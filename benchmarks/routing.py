"""Routing strategies over simulated replicas: conversation and synthetic traces, several seeds, every strategy.

usage: python -m benchmarks.routing [--seeds 5] [--tier-seeds 2] [--output benchmarks/results/routing.json]

Eight replicas that prefill 8,000 tokens a second each. Bound: `auto` has the least mean TTFT and the least p99 TTFT of
all strategies, on average over the seeds and on each trace; and no strategy of the router sends a replica more than
twice its part of the work, though all conversations share their first block.
Then `auto` over replicas with a small GPU pool and tiers of several sizes below it, with ARC and with LRU.
These figures follow from the seeds. Last, the CPU time of 10^5 requests behind `auto`.
"""

import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from benchmarks.harness import arguments
from hotspan.bench.machine import write_results
from hotspan.router.types import Strategy
from hotspan.simulate.compare import Comparison, Line
from hotspan.simulate.costs import Setup, Sizes
from hotspan.simulate.routers import UNTOLD
from hotspan.simulate.shapes import SHAPES, sources
from hotspan.simulate.show import as_json, print_lines
from hotspan.simulate.simulation import Simulation

TRACES = ("conversation", "synthetic")
MAX_IMBALANCE = 2.0
REQUESTS = 100_000
SMALL = 200_000
TIERS = (
    Sizes(SMALL),
    *(Sizes(SMALL, ram_gib=gib, eviction=eviction) for gib in (50, 200) for eviction in ("lru", "arc")),
    *(Sizes(SMALL, ram_gib=50, l2_gib=1000, eviction=eviction) for eviction in ("lru", "arc")),
)


def unmet(lines: Sequence[Line]) -> list[str]:
    """What does not hold, one sentence each."""
    found = []
    for trace in TRACES:
        own = {line.policy: line for line in lines if line.trace == trace}
        for figure in ("mean", "p99"):
            others = {name: line.ttft_s(figure) for name, line in own.items() if name not in (Strategy.AUTO, UNTOLD)}
            best = min(others, key=others.__getitem__)
            if others[best] <= own[Strategy.AUTO].ttft_s(figure):
                found.append(f"{trace}: {best} has a {figure} TTFT that is no longer than auto's")
        found += [
            f"{trace}: {strategy} sends one replica {own[strategy].imbalance:.1f} times its part"
            for strategy in Strategy
            if own[strategy].imbalance > MAX_IMBALANCE
        ]
    return found


def speed() -> list[dict[str, Any]]:
    """CPU seconds of conversations behind `auto`, by what lies below the GPU's pool."""
    found = []
    for below, requests, sizes in (
        ("nothing", REQUESTS, Sizes()),
        ("RAM with lru", REQUESTS // 10, Sizes(ram_gib=200, eviction="lru")),
        ("RAM with arc", REQUESTS // 10, Sizes(ram_gib=200)),
    ):
        trace = SHAPES["conversation"].draw(1, requests)
        begun = time.process_time()
        Simulation(Setup(sizes=sizes), Strategy.AUTO).run(trace)
        cpu_s = round(time.process_time() - begun, 1)
        found.append({"below": below, "requests": requests, "cpu_s": cpu_s, "us_each": round(cpu_s / requests * 1e6)})
    return found


def main() -> int:
    options = arguments(__doc__, seeds=5, tier_seeds=2)
    console = Console()
    policies = Comparison(sources(TRACES), sizes=(Sizes(),), seeds=options.seeds)
    tiers = Comparison(sources(TRACES), policies=(Strategy.AUTO.value,), sizes=TIERS, seeds=options.tier_seeds)
    with console.status("") as status:
        lines, facts = policies.run(status.update)
        tier_lines, tier_facts = tiers.run(status.update)
    print_lines(lines, facts, console)
    print_lines(tier_lines, tier_facts, console)
    missed = unmet(lines)
    took = speed()
    print("\n".join(str(each) for each in took))
    print("\n".join(missed) if missed else "all bounds met")
    if options.output is not None:
        data = as_json(policies, lines, facts) | {"tiers": as_json(tiers, tier_lines, tier_facts)["results"]}
        command = f"python -m benchmarks.routing --seeds {options.seeds} --tier-seeds {options.tier_seeds}"
        write_results(options.output, "routing", command=command, **data, unmet=missed, speed=took)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
