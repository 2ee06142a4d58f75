"""Eviction policies side by side on recorded traces: sessions of agents, Mooncake's, or your own.

One tier has room for a part of a trace's different chunks. Each request is looked up, then stored, in the order of the
trace. How it ended is told to the policy that learns from it. Nothing here is timed but the CPU that a policy took.

usage: python -m benchmarks.eviction_real FILE... [--hours 12] [--part 0.01 --part 0.05] [--output FILE]
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.policies import LeafBelady, LeafLru
from hotspan.bench.machine import write_results
from hotspan.bench.tables import Cell, Group, Table
from hotspan.core.trace import Request, Trace, read
from hotspan.core.types import ChunkKey
from hotspan.simulate.caches import LearnedCache, TierCache
from hotspan.tiers.eviction import LeafArc

PARTS = (0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3)
"""Of a trace's different chunks, for which the tier has room."""

LRU, ARC, LEARNED, BELADY = "LRU", "ARC", "learned", "Belady"

ALLOWED_POINTS = 0.2
"""What the policy that learns may be worse than the better of LRU and ARC."""


@dataclass(frozen=True, slots=True)
class Found:
    """What one policy found at one size. change_us: CPU for each chunk that was looked up, used or stored."""

    trace: str
    part: float
    chunks: int
    policy: str
    hit_rate: float
    change_us: float


def replay(tier: TierCache, requests: Sequence[Request]) -> float:
    """The part of the chunks that are found."""
    found = asked = 0
    for request in requests:
        found += tier.prefix(request.keys, 0, len(request.keys))
        asked += len(request.keys)
        tier.use(request.keys)
        tier.ended(request)
    return found / asked


def requests_of(trace: Trace, hours: float) -> list[Request]:
    """Those of the first hours."""
    begins_s = trace.requests[0].at_s
    return [each for each in trace.requests if each.at_s - begins_s <= hours * 3600]


def figures(trace: Trace, hours: float, parts: Sequence[float], tell: Callable[[str], None]) -> list[Found]:
    """All policies at all sizes, one after the other."""
    requests = requests_of(trace, hours)
    different = len({key for each in requests for key in each.keys})
    asked = sum(len(each.keys) for each in requests)
    keys: list[tuple[ChunkKey, ...]] = [each.keys for each in requests]  # type: ignore[misc]
    makers: dict[str, Callable[[int], TierCache]] = {
        LRU: lambda chunks: TierCache(chunks, LeafLru(chunks)),
        ARC: lambda chunks: TierCache(chunks, LeafArc(chunks)),
        LEARNED: LearnedCache,
        BELADY: lambda chunks: TierCache(chunks, LeafBelady(chunks, keys)),
    }
    rows = []
    for part in parts:
        chunks = max(1, round(part * different))
        for policy, make in makers.items():
            tell(f"{trace.name}: {policy}, {part:.0%}")
            tier = make(chunks)
            begun = time.process_time()
            rate = replay(tier, requests)
            took_s = time.process_time() - begun
            rows.append(Found(trace.name, part, chunks, policy, rate, took_s / asked * 1e6))
    return rows


def by_policy(rows: Sequence[Found], trace: str, part: float) -> dict[str, Found]:
    """Of one size."""
    return {each.policy: each for each in rows if (each.trace, each.part) == (trace, part)}


def way_to_belady(of: dict[str, Found]) -> float:
    """The part of the way from the better of LRU and ARC to Belady; below 0 if it is worse."""
    better = max(of[LRU].hit_rate, of[ARC].hit_rate)
    return (of[LEARNED].hit_rate - better) / max(1e-9, of[BELADY].hit_rate - better)


def points_below(of: dict[str, Found]) -> float:
    """By how many points the policy that learns is worse than the better of LRU and ARC."""
    return 100 * (max(of[LRU].hit_rate, of[ARC].hit_rate) - of[LEARNED].hit_rate)


def print_figures(rows: Sequence[Found], console: Console) -> None:
    """A table a trace; what loses more than is allowed is bad."""
    names = (LRU, ARC, LEARNED, BELADY)
    for trace in dict.fromkeys(each.trace for each in rows):
        shown = []
        for part in dict.fromkeys(each.part for each in rows if each.trace == trace):
            of = by_policy(rows, trace, part)
            rates = [Cell(f"{of[name].hit_rate:.3f}") for name in names]
            way = Cell(f"{way_to_belady(of):.0%}", "bad" if points_below(of) > ALLOWED_POINTS else "")
            shown.append((f"{part:.0%}", [*rates, way]))
        columns = [Group("", (*names, "to Belady"))]
        console.print(Table(f"{trace}: chunks found of chunks asked for", columns, shown, "room").terminal())


def main(
    files: Annotated[list[Path], typer.Argument(help="Traces: Mooncake's format, or sessions of agents.")],
    hours: Annotated[float, typer.Option(min=0.01, help="Replay the requests of the first hours.")] = 12.0,
    part: Annotated[list[float] | None, typer.Option(min=0.0001, max=1.0, help="Room, of the chunks; several.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write the figures and the machine's facts as JSON.")] = None,
) -> None:
    """Replay recorded traces through eviction policies, on this CPU (minutes a trace)."""
    console, rows, parts = Console(), list[Found](), part or PARTS
    traces = [read(each) for each in files]
    with console.status("") as status:
        for trace in traces:
            rows += figures(trace, hours, parts, status.update)
    print_figures(rows, console)
    if output is not None:
        write_results(
            *(output, "eviction-real", "python -m benchmarks.eviction_real"),
            settings={"hours": hours, "parts": parts},
            traces=[{"name": each.name, **asdict(each.facts())} for each in traces],
            results=[asdict(each) for each in rows],
        )
        print(f"written: {output}")


if __name__ == "__main__":
    typer.run(main)
