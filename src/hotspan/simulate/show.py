"""A comparison in tables, for the terminal and for a report, and as JSON."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from hotspan.bench.tables import Cell, Group, Table
from hotspan.core.trace import TraceFacts
from hotspan.simulate.compare import Comparison, Line
from hotspan.simulate.costs import Sizes
from hotspan.simulate.shapes import SHAPES

QUANTILES = ("mean", "p50", "p90", "p99")


def print_lines(lines: Sequence[Line], facts: Mapping[str, Sequence[TraceFacts]], console: Console) -> None:
    """The tables of each trace, and what it is like."""
    for name, found in facts.items():
        for table in tables(name, lines):
            console.print(table.terminal())
        console.print(describe(found), soft_wrap=True, highlight=False)
        console.print()


def tables(trace: str, lines: Sequence[Line]) -> Iterator[Table]:
    """A table of strategies for each choice of tiers; one of tiers if there is one strategy.

    The best mean and the best p99 of a table are green.
    """
    own = [line for line in lines if line.trace == trace]
    if len({line.policy for line in own}) == 1:
        every = [line.sizes for line in own]
        common, short = shared(every), [(differing(line.sizes, every), line) for line in own]
        yield _table(", ".join((trace, own[0].policy, *common)), "tiers", short)
        return
    for sizes in dict.fromkeys(line.sizes for line in own):
        same = [(line.policy, line) for line in own if line.sizes == sizes]
        yield _table(f"{trace}, {sizes.label()}", "strategy", same)


def shared(every: Sequence[Sizes]) -> list[str]:
    """What all sizes have in common, in words; nothing of a single one."""
    first, *others = (each.label().split(", ") for each in dict.fromkeys(every))
    return [part for part in first if others and all(part in other for other in others)]


def differing(sizes: Sizes, every: Sequence[Sizes]) -> str:
    """Its label, less what all have in common."""
    common = shared(every)
    return ", ".join(part for part in sizes.label().split(", ") if part not in common)


def _table(title: str, head: str, lines: Sequence[tuple[str, Line]]) -> Table:
    same = [line for _, line in lines]
    has_windows = any(line.window_rate for line in same)
    columns = ("hits", *(["windows"] * has_windows), *QUANTILES, "TPOT", "imbalance")
    rows = []
    for label, line in lines:
        tpot = "-" if line.tpot_s is None else f"{line.tpot_s * 1000:.1f}"
        times = [_time(line, figure, same) for figure in QUANTILES]
        found = [Cell(f"{line.hit_rate:.3f}"), *([Cell(f"{line.window_rate:.3f}")] * has_windows)]
        rows.append((label, [*found, *times, Cell(tpot), Cell(f"{line.imbalance:.2f}")]))
    note = "Imbalance is the time that the busiest replica prefilled, by that of the average one."
    note += " Hits are of prefixes, windows of text that is none." * has_windows
    return Table(f"{title}: TTFT in s, TPOT in ms", [Group("", columns)], rows, head, note)


def _time(line: Line, figure: str, same: Sequence[Line]) -> Cell:
    value = line.ttft_s(figure)
    is_best = figure in ("mean", "p99") and len(same) > 1 and value == min(each.ttft_s(figure) for each in same)
    return Cell(f"{value:.2f}" if value < 100 else f"{value:,.0f}", "good" if is_best else "")


def describe(facts: Sequence[TraceFacts]) -> str:
    """A trace in a few words: means over its seeds."""
    tokens = statistics.mean(each.mean_tokens for each in facts)
    answers = statistics.mean(each.mean_answer_tokens for each in facts)
    before = statistics.mean(each.asked_before for each in facts)
    seeds = f"; means of {len(facts)} traces" if len(facts) > 1 else ""
    return (
        f"{facts[0].requests:,} requests over {facts[0].span_s:,.0f} s, {tokens:,.0f} tokens in and "
        f"{answers:,.0f} out, {before:.1%} of the blocks asked for before{seeds}{_recorded(facts[0])}"
    )


def _recorded(facts: TraceFacts) -> str:
    """What the server found and took that the trace was recorded from, to judge the simulation by."""
    if facts.recorded_hit_rate is None or facts.recorded_ttft_s is None:
        return ""
    return f"; recorded: hit rate {facts.recorded_hit_rate:.3f}, mean TTFT {facts.recorded_ttft_s:.2f} s"


def as_json(comparison: Comparison, lines: Sequence[Line], facts: Mapping[str, Sequence[TraceFacts]]) -> dict[str, Any]:
    """The figures, those of every seed included."""
    return {
        "settings": comparison.settings(),
        "traces": {name: _trace(name, found) for name, found in facts.items()},
        "results": [
            {
                "trace": line.trace,
                "policy": line.policy,
                "sizes": asdict(line.sizes),
                "hit_rate": line.hit_rate,
                "window_rate": line.window_rate,
                "ttft_s": {name: line.ttft_s(name) for name in QUANTILES},
                "tpot_s": line.tpot_s,
                "imbalance": line.imbalance,
                "runs": [asdict(run) for run in line.runs],
            }
            for line in lines
        ],
    }


def _trace(name: str, found: Sequence[TraceFacts]) -> dict[str, Any]:
    published = {"published": asdict(SHAPES[name].published)} if name in SHAPES and SHAPES[name].IS_PUBLISHED else {}
    return published | {"replayed": [asdict(each) for each in found]}
