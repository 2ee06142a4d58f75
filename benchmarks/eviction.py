"""Eviction policies side by side on the same requests, each over leaves only: how many tokens it would have found.

Traces have the shape of public ones (hotspan/simulate/shapes.py); the product's policy is the class that the tiers
use, the others are for comparison (benchmarks/policies.py). Nothing here is timed: the figures follow from the seeds
alone.

usage: python -m benchmarks.eviction [--seed 1] [--seeds 3] [--scale 1.0] [--only-floods] [--output FILE]
"""

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.policies import LeafBelady, LeafLru, LeafPaperArc, LeafS3Fifo, Policy, replay_one
from hotspan.bench.machine import write_results
from hotspan.core.trace import BLOCK_TOKENS, Request, Trace, TraceFacts
from hotspan.simulate.shapes import CONVERSATION, TOOLAGENT, Shape
from hotspan.tiers.eviction import LeafArc, Shares
from hotspan.tiers.retention import LeafRetention

SHAPES = (CONVERSATION, TOOLAGENT)

CAPACITIES = (0.01, 0.03, 0.1, 0.3)
"""Of a trace's footprint."""

FLOODED_CAPACITIES = (0.4, 1.2)
"""Of the footprint of the tenant that is flooded. A quarter of it, its floor beside one other, is 10 % and 30 %: the
latter is enough for nearly all that it uses again."""

FLOODED_SCALE = 0.25
"""Of the trace that is flooded: the flood is many times larger."""

FLOOD_TEXTS = 16
"""So many one-time texts of another tenant stand between any two requests of the one that is flooded."""

FLOOD_CHUNKS = 24
"""Of each of these texts: as many as the flooded tenant's have on average."""

GOAL_POINTS = 5.0
"""What a flood may cost another tenant whose working set fits its floor."""

LRU = "LRU"
PAPER = "ARC as in the paper"
OURS = "ARC of hotspan"
NO_FLOORS = "ARC of hotspan, no floors"
LEARNED = "learned"
S3_FIFO = "S3-FIFO"
BELADY = "Belady (knows the future)"


@dataclass(frozen=True, slots=True)
class HitRate:
    """Tokens found of tokens asked for, one figure a seed.

    capacity: of the trace's footprint.
    """

    trace: str
    policy: str
    capacity: float
    rates: list[float]

    @property
    def mean(self) -> float:
        return statistics.mean(self.rates)


@dataclass(frozen=True, slots=True)
class FloodCost:
    """The hit rates of one tenant, alone in a tier and beside another's flood, one figure a seed.

    capacity: of the flooded tenant's footprint.
    """

    policy: str
    capacity: float
    alone: list[float]
    beside: list[float]

    @property
    def points(self) -> float:
        """What the flood costs, in points of the hit rate."""
        return 100 * (statistics.mean(self.alone) - statistics.mean(self.beside))

    @property
    def is_promised(self) -> bool:
        """Whether the floor holds the working set, so that the cost is bounded."""
        return self.policy in (OURS, LEARNED) and self.capacity == max(FLOODED_CAPACITIES)


@dataclass(frozen=True, slots=True)
class EvictionFigures:
    """Everything that one run found."""

    traces: dict[str, list[TraceFacts]]
    hit_rates: list[HitRate]
    floods: list[FloodCost]


@dataclass(frozen=True, slots=True)
class EvictionBench:
    """What to replay.

    seed, seeds: that many traces of each shape, from this seed on.
    scale:       of the published number of requests.
    only_floods: leave out the hit rates without a flood.
    """

    seed: int = 1
    seeds: int = 3
    scale: float = 1.0
    only_floods: bool = False

    def run(self, tell: Callable[[str], None] = lambda step: None) -> EvictionFigures:
        """All figures; `tell` is given a word on each step. Takes minutes."""
        facts: dict[str, list[TraceFacts]] = {}
        hit_rates: list[HitRate] = []
        for shape in () if self.only_floods else SHAPES:
            traces = self._traces(shape, tell)
            facts[shape.name] = [trace.facts() for trace in traces]
            hit_rates += self._hit_rates(traces, tell)
        floods = list(self._floods(self._traces(CONVERSATION, tell, FLOODED_SCALE), tell))
        return EvictionFigures(facts, hit_rates, floods)

    def _traces(self, shape: Shape, tell: Callable[[str], None], part: float = 1.0) -> list[Trace]:
        tell(f"{shape.name}: making {self.seeds} traces")
        return [shape.draw(seed, scale=self.scale * part) for seed in range(self.seed, self.seed + self.seeds)]

    def _hit_rates(self, traces: Sequence[Trace], tell: Callable[[str], None]) -> Iterator[HitRate]:
        makers: dict[str, Callable[[int, Trace], Policy]] = {
            LRU: lambda chunks, trace: LeafLru(chunks),
            PAPER: lambda chunks, trace: LeafPaperArc(chunks),
            OURS: lambda chunks, trace: LeafArc(chunks),
            LEARNED: lambda chunks, trace: LeafRetention(chunks),
            S3_FIFO: lambda chunks, trace: LeafS3Fifo(chunks),
            BELADY: lambda chunks, trace: LeafBelady(chunks, [request.keys for request in trace.requests]),
        }
        for policy, make in makers.items():
            for capacity in CAPACITIES:
                tell(f"{traces[0].name}: {policy}, {capacity:.0%}")
                rates = []
                for trace in traces:
                    chunks = capacity_chunks(trace, capacity)
                    rates.append(hit_rate(make(chunks, trace), chunks, alone(trace)))
                yield HitRate(traces[0].name, policy, capacity, rates)

    def _floods(self, traces: Sequence[Trace], tell: Callable[[str], None]) -> Iterator[FloodCost]:
        makers: dict[str, Callable[[int], Policy]] = {
            LRU: LeafLru,
            PAPER: LeafPaperArc,
            NO_FLOORS: lambda chunks: LeafArc(chunks, Shares(default_floor=0.0)),
            OURS: LeafArc,
            LEARNED: LeafRetention,
        }
        for capacity in FLOODED_CAPACITIES:
            for policy, make in makers.items():
                tell(f"flood: {policy}, {capacity:.0%}")
                without, beside = [], []
                for trace in traces:
                    chunks = capacity_chunks(trace, capacity)
                    without.append(hit_rate(make(chunks), chunks, alone(trace)))
                    beside.append(hit_rate(make(chunks), chunks, flooded(trace)))
                yield FloodCost(policy, capacity, without, beside)


def capacity_chunks(trace: Trace, capacity: float) -> int:
    """How many chunks a tier of this fraction of the footprint holds."""
    return max(1, round(capacity * len({key for request in trace.requests for key in request.keys})))


def hit_rate(policy: Policy, capacity: int, requests: Iterable[tuple[int, Request]]) -> float:
    """Tokens that tenant 0 found of those it asked for, beginning with an empty tier of so many chunks."""
    found = asked = 0
    for tenant, request in requests:
        hits = replay_one(policy, capacity, request.keys, tenant)
        if tenant == 0:
            found += hits * BLOCK_TOKENS
            asked += request.tokens
    return found / asked


def alone(trace: Trace) -> Iterator[tuple[int, Request]]:
    """The trace, as tenant 0."""
    return ((0, request) for request in trace.requests)


def flooded(trace: Trace) -> Iterator[tuple[int, Request]]:
    """The trace, as tenant 0, with tenant 1's one-time texts before each request."""
    key = 1 << 40
    for request in trace.requests:
        for _ in range(FLOOD_TEXTS):
            yield 1, Request(request.at_s, FLOOD_CHUNKS * BLOCK_TOKENS, 0, tuple(range(key, key + FLOOD_CHUNKS)))
            key += FLOOD_CHUNKS
        yield 0, request


# -- what is shown -------------------------------------------------------------------------------------------------


def print_figures(bench: EvictionBench, figures: EvictionFigures, console: Console) -> None:
    """A table of hit rates for each trace, and one of what a flood costs; red where the promise is broken."""
    published = {shape.name: shape.published for shape in SHAPES}
    for name, facts in figures.traces.items():
        tokens = statistics.mean(fact.mean_tokens for fact in facts)
        before = statistics.mean(fact.asked_before for fact in facts)
        table = Table(title=f"{name}: tokens found of tokens asked for, mean of {bench.seeds}")
        table.add_column("tier, of the footprint")
        for capacity in CAPACITIES:
            table.add_column(f"{capacity:.0%}", justify="right")
        rows = [rate for rate in figures.hit_rates if rate.trace == name]
        for policy in dict.fromkeys(rate.policy for rate in rows):
            table.add_row(policy, *(f"{rate.mean:.3f}" for rate in rows if rate.policy == policy))
        console.print(table)
        console.print(
            f"{tokens:,.0f} tokens a request (published: {published[name].mean_tokens:,}), "
            f"{before:.1%} of the chunks asked for before ({published[name].asked_before:.1%})\n",
            soft_wrap=True,
            highlight=False,
        )
    table = Table(title=f"conversation beside another tenant's {FLOOD_TEXTS} one-time texts a request")
    table.add_column("policy")
    for column in ("tier", "alone", "flooded", "points lost"):
        table.add_column(column, justify="right")
    for cost in figures.floods:
        table.add_row(
            cost.policy,
            f"{cost.capacity:.0%}",
            f"{statistics.mean(cost.alone):.3f}",
            f"{statistics.mean(cost.beside):.3f}",
            f"{cost.points:.1f}",
            style="red" if cost.is_promised and cost.points > GOAL_POINTS else None,
        )
    console.print(table)


def write_figures(path: Path, bench: EvictionBench, figures: EvictionFigures) -> None:
    """The figures as JSON, with the machine, the command and every seed's."""
    traces = {
        shape.name: {
            "published": asdict(shape.published),
            "drawn": [asdict(facts) for facts in figures.traces[shape.name]],
        }
        for shape in SHAPES
        if shape.name in figures.traces
    }
    write_results(
        *(path, "eviction", "python -m benchmarks.eviction"),
        settings=asdict(bench),
        traces=traces,
        hit_rates=[asdict(rate) | {"mean": rate.mean} for rate in figures.hit_rates],
        floods=[asdict(cost) | {"points": cost.points} for cost in figures.floods],
    )


def main(
    seed: Annotated[int, typer.Option(help="Of the first trace.")] = 1,
    seeds: Annotated[int, typer.Option(min=1, help="Traces of each shape; the means are reported.")] = 3,
    scale: Annotated[float, typer.Option(min=0.001, max=10.0, help="Of the published number of requests.")] = 1.0,
    only_floods: Annotated[bool, typer.Option(help="Leave out the hit rates without a flood.")] = False,
    output: Annotated[Path | None, typer.Option(help="Write the figures and the machine's facts as JSON.")] = None,
) -> None:
    """Replay traces of the shape of Mooncake's through eviction policies, on this CPU (some minutes)."""
    console = Console()
    bench = EvictionBench(seed, seeds, scale, only_floods)
    with console.status("") as status:
        figures = bench.run(status.update)
    print_figures(bench, figures, console)
    if output is not None:
        write_figures(output, bench, figures)
        print(f"written: {output}")


if __name__ == "__main__":
    typer.run(main)
