"""A comparison as one HTML file: tables, plots, settings, machine and command, readable without a network."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from hotspan.bench.machine import machine_facts
from hotspan.bench.page import Card, card_section, facts, folded, plot_section, styled, table_section, write_page
from hotspan.bench.tables import COLOURS
from hotspan.core.trace import TraceFacts
from hotspan.simulate.compare import Comparison, Line
from hotspan.simulate.routers import POLICIES
from hotspan.simulate.show import describe, differing, tables

_NOT_DRAWN = 100.0
"""Times the least mean: a strategy so far off would press all others together."""

_MIN_S = 0.01
_COLOURS = (*COLOURS[1:], COLOURS[0], "#111827")
_AXES = {
    "disk_gib": "disk tier per replica, in GiB",
    "ram_gib": "RAM tier per replica, in GiB",
    "l2_gib": "L2, in GiB",
    "gpu_tokens": "tokens of the GPU's pool",
}
_MARKERS = ("circle", "square", "diamond", "triangle-up", "cross", "x")


def write_report(
    path: Path, comparison: Comparison, lines: Sequence[Line], traces: Mapping[str, Sequence[TraceFacts]]
) -> None:
    """Write the page."""
    costs = comparison.setup.costs
    lead = (
        f"{_replicas(comparison)} simulated replicas that prefill {costs.prefill_tokens_per_s:,.0f} tokens/s each. "
        "The strategies of the router run the router's own code, and see only what they send, its first bytes and "
        "ends, and the replicas' events."
    )
    sections = [_trace(name, [line for line in lines if line.trace == name], found) for name, found in traces.items()]
    command = escape(" ".join(["hotspan", *sys.argv[1:]]))
    settings = escape(json.dumps(comparison.settings(), indent=1))
    environment = f"{facts(list(machine_facts().items()))}<pre>{command}</pre><pre>{settings}</pre>"
    write_page(path, "Routing, simulated", lead, [*sections, folded("Settings and machine", environment)])


def _trace(name: str, lines: Sequence[Line], found: Sequence[TraceFacts]) -> str:
    first = lines[0].sizes
    same = [line for line in lines if line.sizes == first]
    least = min(line.ttft_s("mean") for line in same)
    drawn = [line for line in same if line.ttft_s("mean") <= _NOT_DRAWN * least]
    seen = [line for line in lines if line.policy in {each.policy for each in drawn}]
    left = [line.policy for line in same if line not in drawn]
    note = f" Not drawn, being a hundred times off: {', '.join(left)}." if left else ""
    here = f"{name}, {first.label()}."
    named = {line.policy: line for line in drawn}
    if len(same) == 1 and len(lines) > 1:  # one strategy: what differs are the sizes
        every = [line.sizes for line in lines]
        here, named = f"{name}, {same[0].policy}.", {differing(line.sizes, every): line for line in lines}
    return "\n".join(
        (
            card_section(_cards(name, same)),
            f'<p class="note">{escape(describe(found))}.</p>',
            *(table_section(table) for table in tables(name, lines)),
            plot_section("Hit rate by size", f"{name}. Means over the seeds.{note}", _sweep(seen, "hits")),
            plot_section("Time to first token by size", f"{name}. Means over the seeds.{note}", _sweep(seen, "ttft")),
            plot_section("Time to first token", f"{here} The trace of the first seed.{note}", _distribution(named)),
            plot_section(
                "Found against waited",
                f"{here} A point is a seed. What finds most is not what waits least: it waits where it finds.{note}",
                _hits_and_ttft(named),
            ),
            plot_section(
                "The busiest replica",
                f"{here} Requests there that have not ended. Click a name to hide it.{note}",
                _load_over_time(named),
            ),
        )
    )


def _cards(name: str, lines: Sequence[Line]) -> list[Card]:
    """What `auto` gains over the best of the others; nothing where it is not compared."""
    auto = next((line for line in lines if line.policy == "auto"), None)
    others = [line for line in lines if not line.policy.startswith("auto")]
    if auto is None or not others:
        return []
    cards = []
    for figure in ("mean", "p99"):
        best = min(others, key=lambda line: line.ttft_s(figure))
        times = best.ttft_s(figure) / auto.ttft_s(figure)
        detail = f"{auto.ttft_s(figure):.2f} s, against {best.ttft_s(figure):.2f} s of {best.policy}, the next best"
        cards.append(Card(f"{name}: TTFT, {figure}", f"{times:.2f}x", detail, "faster with auto"))
    return cards


# -- plots: a curve for each strategy ----------------------------------------------------------------------------------


def _distribution(lines: Mapping[str, Line]) -> go.Figure:
    """The share of the first seed's requests that had their first token after so long."""

    def curve(name: str) -> dict[str, Any]:
        points = lines[name].curve.ttft_s
        return {
            "x": [max(value, _MIN_S) for value in points],
            "y": [n / (len(points) - 1) for n in range(len(points))],
            "line": {"width": 2 if name == "auto" else 1.5},
            "hovertemplate": "%{y:.1%} within %{x:.2f} s",
        }

    figure = _plot(list(lines), curve, "time to first token (s), log scale", "share of the requests")
    return figure.update_xaxes(type="log").update_yaxes(tickformat=".0%", range=[0, 1.01])


def _hits_and_ttft(lines: Mapping[str, Line]) -> go.Figure:
    """A point for each seed: what it found, and how long requests waited."""

    def points(name: str) -> dict[str, Any]:
        return {
            "x": [run.hit_rate for run in lines[name].runs],
            "y": [run.ttft_s.mean for run in lines[name].runs],
            "mode": "markers",
            "marker": {"size": 10, "symbol": _MARKERS[list(lines).index(name) % len(_MARKERS)]},
            "hovertemplate": "hit rate %{x:.3f}, mean %{y:.2f} s",
        }

    figure = _plot(list(lines), points, "hit rate", "mean time to first token (s), log scale")
    return figure.update_xaxes(tickformat=".0%", rangemode="tozero").update_yaxes(type="log")


def _load_over_time(lines: Mapping[str, Line]) -> go.Figure:
    """Requests at the replica that has most, over the first seed's trace; even load is low."""

    def curve(name: str) -> dict[str, Any]:
        loads = lines[name].curve.load
        return {
            "x": [load.at_s for load in loads],
            "y": [max(load.most, 0.5) for load in loads],
            "line": {"width": 1},
            "customdata": [[load.mean] for load in loads],
            "hovertemplate": "%{y:.0f}, on average %{customdata[0]:.1f}",
        }

    title = "requests at the busiest replica, log scale"
    return _plot(list(lines), curve, "seconds into the trace", title).update_yaxes(type="log")


def _sweep(lines: Sequence[Line], figure: str) -> go.Figure | None:
    """Mean TTFT, or the hit rate, over the size that varies most; a curve for each of the rest. None if there is one.

    If it is not a size that varies, such as the number of replicas, each combination is a point of its own.
    """
    sizes = list(dict.fromkeys(line.sizes for line in lines))
    if len(sizes) < 2:
        return None
    is_time = figure == "ttft"
    axis, unit = max(_AXES.items(), key=lambda each: len({getattr(size, each[0]) for size in sizes}))
    if len({getattr(size, axis) for size in sizes}) < 2:
        axis, unit = "", ""
    curves: dict[str, list[Line]] = {}
    for line in lines:
        rest = replace(line.sizes, **{axis: getattr(sizes[0], axis)}) if axis else line.sizes
        rests = [replace(size, **{axis: getattr(sizes[0], axis)}) if axis else size for size in sizes]
        name = ", ".join(filter(None, (line.policy, differing(rest, rests) if axis else "")))
        curves.setdefault(name, []).append(line)

    def curve(name: str) -> dict[str, Any]:
        own = sorted(curves[name], key=lambda line: getattr(line.sizes, axis)) if axis else curves[name]
        return {
            "x": [getattr(line.sizes, axis) if axis else differing(line.sizes, sizes) for line in own],
            "y": [line.ttft_s("mean") if is_time else line.hit_rate for line in own],
            "mode": "lines+markers" if axis else "markers",
            "line": {"width": 1.5},
            "marker": {"size": 9},
            "customdata": [[line.hit_rate, line.ttft_s("mean")] for line in own],
            "hovertemplate": "%{x}: %{customdata[1]:.2f} s, hit rate %{customdata[0]:.3f}",
        }

    title = "mean time to first token (s), log scale" if is_time else "hit rate"
    drawn = _plot(list(curves), curve, unit, title)
    if axis:
        drawn.update_xaxes(tickvals=sorted({getattr(size, axis) for size in sizes}))
    return drawn.update_yaxes(type="log") if is_time else drawn.update_yaxes(rangemode="tozero", tickformat=".0%")


def _plot(names: Sequence[str], curve: Callable[[str], dict[str, Any]], x: str, y: str) -> go.Figure:
    """What `curve` gives for each name, in its colour, with room for the tools above so many names."""
    figure = go.Figure()
    for n, name in enumerate(names):
        given = curve(name)
        at = POLICIES.index(name) if name in POLICIES else n
        colour = {"color": _COLOURS[at % len(_COLOURS)]}
        for part in ("line", "marker"):
            given[part] = {**given.get(part, {}), **colour}
        given["hovertemplate"] += f"<extra>{name}</extra>"
        figure.add_scatter(name=name, **given)
    figure.update_xaxes(title={"text": x}).update_yaxes(title={"text": y})
    return styled(figure, height=440).update_layout(margin={"t": 64}, showlegend=len(names) > 1)


def _replicas(comparison: Comparison) -> str:
    numbers = dict.fromkeys(sizes.replicas or comparison.setup.replicas for sizes in comparison.sizes)
    return ", ".join(map(str, numbers))
