"""A comparison on the terminal and as JSON."""

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hotspan.bench.machine import machine_facts
from hotspan.simulate.compare import Comparison, Line
from hotspan.simulate.trace import SHAPES, Facts

QUANTILES = ("mean", "p50", "p90", "p99")


def print_lines(lines: Sequence[Line], facts: dict[str, list[Facts]], console: Console) -> None:
    """A table of strategies for each trace and choice of tiers; of tiers for each trace if there is one strategy.

    The best mean and the best p99 of a table are green.
    """
    for name, found in facts.items():
        rows = [line for line in lines if line.trace == name]
        if len({line.policy for line in rows}) == 1:
            console.print(_table(f"{name}, {rows[0].policy}", "tiers", [(line.sizes.label(), line) for line in rows]))
        else:
            for sizes in dict.fromkeys(line.sizes for line in rows):
                same = [(line.policy, line) for line in rows if line.sizes == sizes]
                console.print(_table(f"{name}, {sizes.label()}", "strategy", same))
        console.print(describe(found), soft_wrap=True, highlight=False)
        console.print()


def _table(title: str, head: str, lines: Sequence[tuple[str, Line]]) -> Table:
    table = Table(title=f"{title}: TTFT in s, TPOT in ms")
    table.add_column(head, overflow="fold")
    for column in ("hits", "mean", "p50", "p90", "p99", "TPOT", "imbalance"):
        table.add_column(column, justify="right", no_wrap=True)
    for label, line in lines:
        tpot = "-" if line.tpot_s is None else f"{line.tpot_s * 1000:.1f}"
        times = (_time(line, figure, [each for _, each in lines]) for figure in QUANTILES)
        table.add_row(label, f"{line.hit_rate:.3f}", *times, tpot, f"{line.imbalance:.2f}")
    return table


def describe(facts: Sequence[Facts]) -> str:
    """A trace in a few words: means over its seeds."""
    tokens = statistics.mean(each.mean_tokens for each in facts)
    answers = statistics.mean(each.mean_answer_tokens for each in facts)
    before = statistics.mean(each.asked_before for each in facts)
    seeds = f"; means of {len(facts)} traces" if len(facts) > 1 else ""
    return (
        f"{facts[0].requests:,} requests over {facts[0].span_s:,.0f} s, {tokens:,.0f} tokens in and "
        f"{answers:,.0f} out, {before:.1%} of the blocks asked for before{seeds}"
    )


def as_json(comparison: Comparison, lines: Sequence[Line], facts: dict[str, list[Facts]]) -> dict[str, Any]:
    """The figures with the machine, the command and every seed's."""
    return {
        "kind": "routing",
        "machine": machine_facts(),
        "command": " ".join(["hotspan", *sys.argv[1:]]),
        "settings": comparison.settings(),
        "traces": {name: _trace(name, found) for name, found in facts.items()},
        "results": [
            {
                "trace": line.trace,
                "policy": line.policy,
                "sizes": asdict(line.sizes),
                "hit_rate": line.hit_rate,
                "ttft_s": {name: line.ttft_s(name) for name in QUANTILES},
                "tpot_s": line.tpot_s,
                "imbalance": line.imbalance,
                "runs": [_run(asdict(run)) for run in line.runs],
            }
            for line in lines
        ],
    }


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write what `as_json` gives."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n")


def _trace(name: str, found: Sequence[Facts]) -> dict[str, Any]:
    shape = SHAPES.get(name)
    published = {} if shape is None else {"published": asdict(shape.published)}
    return published | {"replayed": [asdict(each) for each in found]}


def _run(run: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in run.items() if name not in ("trace", "policy", "sizes")}


def _time(line: Line, figure: str, same: Sequence[Line]) -> str:
    value = line.ttft_s(figure)
    text = f"{value:.2f}" if value < 100 else f"{value:,.0f}"
    is_best = figure in ("mean", "p99") and len(same) > 1 and value == min(each.ttft_s(figure) for each in same)
    return f"[green]{text}[/green]" if is_best else text
