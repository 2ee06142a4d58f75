"""What a decision of the tiers' eviction costs: CPU for each chunk that is looked up, used, stored or evicted.

A full tier of sessions that grow, and of texts that come once, is asked for more. `learned` beside `arc`, in turn, on
the same requests. The figures are of one core, and only their ratio is worth comparing between machines.

usage: python -m benchmarks.eviction_cpu [--chunks 50000 --chunks 1000000] [--requests 4000] [--rounds 3]
                                         [--output FILE]
"""

import gc
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from hotspan.bench.machine import write_results
from hotspan.bench.tables import Cell, Group, Table
from hotspan.core.requests import STOP, TOOL_CALLS, Request
from hotspan.simulate.caches import LearnedCache, TierCache
from hotspan.tiers.eviction import LeafArc
from kit.measure import interval

GOAL = 1.2
"""What `learned` may cost of `arc` in a tier of a million chunks."""

_TEXT, _GROWS, _ONCE = 40, 4, 0.3
_SESSIONS = 64


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one size. arc_us, learned_us: CPU for a chunk of a request, one figure a round."""

    chunks: int
    requests: int
    arc_us: list[float]
    learned_us: list[float]

    @property
    def ratio(self) -> float:
        """Of the medians."""
        return interval(self.learned_us).median / interval(self.arc_us).median


def requests_for(chunks: int, seed: int) -> Iterator[Request]:
    """Without an end: sessions that grow by some chunks each time, with texts between that come once."""
    rng = random.Random(seed)
    key = 0
    sessions: list[list[int]] = []
    while True:
        if rng.random() < _ONCE or not sessions:
            keys = list(range(key, key + _TEXT))
            key += _TEXT
            if len(sessions) < max(_SESSIONS, chunks // (4 * _TEXT)):
                sessions.append(keys)
        else:
            keys = sessions[rng.randrange(len(sessions))]
            if len(keys) > 4 * _TEXT:
                del keys[_TEXT // 2 :]  # it begins anew behind its system prompt
            keys += range(key, key + _GROWS)
            key += _GROWS
        ending = TOOL_CALLS if rng.random() < 0.8 else STOP
        yield Request(0.0, 256 * len(keys), 1, tuple(keys), finish_reason=ending)


def measure(chunks: int, requests: int, rounds: int) -> Cost:
    """Both policies in full tiers of so many chunks."""
    arc, learned = TierCache(chunks, LeafArc(chunks)), LearnedCache(chunks)
    sources = {each: requests_for(chunks, 1) for each in (arc, learned)}
    for tier, source in sources.items():
        while len(tier) < chunks - 4 * _TEXT:
            serve(tier, next(source))
        for _ in range(requests):
            serve(tier, next(source))
    gc.freeze()
    found: dict[TierCache, list[float]] = {arc: [], learned: []}
    for _ in range(rounds):
        for tier, figures in found.items():
            asked = [next(sources[tier]) for _ in range(requests)]
            begun = time.process_time()
            for request in asked:
                serve(tier, request)
            took_s = time.process_time() - begun
            figures.append(took_s / sum(len(each.keys) for each in asked) * 1e6)
    gc.unfreeze()
    return Cost(chunks, requests, found[arc], found[learned])


def serve(tier: TierCache, request: Request) -> None:
    """One request, and its end."""
    tier.prefix(request.keys, 0, len(request.keys))
    tier.use(request.keys)
    tier.ended(request)


def main(
    chunks: Annotated[list[int] | None, typer.Option(min=1000, help="Size of the tier; several.")] = None,
    requests: Annotated[int, typer.Option(min=10, help="Requests a round.")] = 4000,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each policy, in turn.")] = 3,
    output: Annotated[Path | None, typer.Option(help="Write the figures and the machine's facts as JSON.")] = None,
) -> None:
    """Measure the CPU of both policies, on one core (a minute for a million chunks)."""
    console, costs = Console(), list[Cost]()
    for each in chunks or (50_000, 1_000_000):
        costs.append(measure(each, requests, rounds))
    rows = [
        (
            f"{cost.chunks:,}",
            [
                Cell(f"{interval(cost.arc_us).median:.1f}"),
                Cell(f"{interval(cost.learned_us).median:.1f}"),
                Cell(f"{cost.ratio:.2f}x", "bad" if cost.ratio > GOAL else ""),
            ],
        )
        for cost in costs
    ]
    columns = [Group("", ("arc, us", "learned, us", "ratio"))]
    console.print(Table("CPU for each chunk of a request", columns, rows, "chunks").terminal())
    if output is not None:
        write_results(
            *(output, "eviction-cpu", "python -m benchmarks.eviction_cpu"),
            settings={"requests": requests, "rounds": rounds},
            results=[asdict(cost) | {"ratio": cost.ratio} for cost in costs],
        )
        print(f"written: {output}")


if __name__ == "__main__":
    typer.run(main)
