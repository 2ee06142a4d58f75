"""A demo's figures in the terminal, in tables that fit into 80 columns."""

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

from hotspan.bench.compare import (
    TIMES,
    Figure,
    NamedRun,
    Spread,
    cpu_s,
    hit_rate,
    over_repetitions,
    ratio,
    speed_up,
    total_s,
    ttft_s,
)
from hotspan.bench.records import RoundName
from hotspan.bench.terminal import tiers_of
from hotspan.demo.results import DemoResult

PRE_WARM_UP, WARM_UP, QUERY = RoundName.PRE_WARM_UP, RoundName.WARM_UP, RoundName.QUERY


def latency_table(demo: DemoResult) -> Table:
    """Mean TTFT cold and in the query round, total of the query round, and how much faster that is."""
    first = demo.runs[0]
    heads = ("TTFT\nwarm-up", "TTFT\nquery", "total\nquery", "speed-up\nTTFT", "speed-up\ntotal")
    table = _table(f"Latency in seconds; speed-up over {first.title}, query round", heads)
    for run in demo.runs:
        faster = speed_up(run, first)
        table.add_row(
            run.title,
            _figure(run, ttft_s(WARM_UP), 3),
            _figure(run, ttft_s(QUERY), 3),
            _figure(run, total_s(QUERY), 2),
            _number(faster.ttft, 1, TIMES),
            _number(faster.total, 1, TIMES),
        )
    return table


def earlier_rounds_table(runs: Sequence[NamedRun]) -> Table:
    """TTFT and total latency of the rounds before the query round, and the CPU-seconds of the cold one."""
    heads = [f"{figure}\n{name}" for name in (PRE_WARM_UP, WARM_UP) for figure in ("TTFT", "total")]
    table = _table("The rounds before it, in seconds", [*heads, f"CPU-s\n{WARM_UP}"])
    for run in runs:
        latency = ((ttft_s(name), total_s(name)) for name in (PRE_WARM_UP, WARM_UP))
        cells = [cell for ttft, total in latency for cell in (_figure(run, ttft, 3), _figure(run, total, 2))]
        table.add_row(run.title, *cells, _figure(run, cpu_s(WARM_UP), 1))
    return table


def cache_table(demo: DemoResult) -> Table:
    """Hit rate by tier, CPU time of the query round and of the cold one, and how many answers are the bound's."""
    first, bound = demo.runs[0], demo.bound
    tiers = tiers_of(result.query for run in demo.runs for result in run.results)
    heads = [*(f"hit\n{tier}" for tier in tiers), "CPU-s\nquery"]
    heads += [f"CPU-s\n{TIMES} {bound.title}"] if bound else []
    heads += ["cold\nCPU"]
    heads += ["answers as\nengine's\nown hit"] if bound else []
    table = _table(f"Query round; cold CPU: CPU-s of the warm-up, {TIMES} {first.title}", heads)
    for run in demo.runs:
        cells = [_figure(run, hit_rate(tier), 1, "%", 100.0) for tier in tiers]
        cells.append(_figure(run, cpu_s(QUERY), 1))
        cells += [_number(ratio(run, bound, cpu_s(QUERY)), 2, TIMES)] if bound else []
        cells.append(_number(ratio(run, first, cpu_s(WARM_UP)), 2, TIMES))
        cells += [str(demo.answers(run) or "-")] if bound else []
        table.add_row(run.title, *cells)
    return table


def _table(title: str, heads: Sequence[str]) -> Table:
    look: dict[str, Any] = {"box": box.SIMPLE_HEAD, "show_edge": False, "pad_edge": False}
    table = Table(title=title, title_justify="left", title_style="bold", **look)
    table.add_column("mode", vertical="bottom", no_wrap=True)
    for head in heads:
        table.add_column(head, justify="right", vertical="bottom", no_wrap=True)
    return table


def _figure(run: NamedRun, figure: Figure, digits: int, unit: str = "", factor: float = 1.0) -> str:
    return _number(over_repetitions(run, figure), digits, unit, factor)


def _number(value: Spread | None, digits: int, unit: str = "", factor: float = 1.0) -> str:
    return "-" if value is None else f"{value.median * factor:,.{digits}f}{unit}"
