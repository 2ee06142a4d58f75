"""The plots of a report, as Plotly figures."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Final

import plotly.graph_objects as go

from hotspan.bench.compare import Figure, NamedRun, cpu_s, hit_rate, over_repetitions
from hotspan.bench.records import TIMED_ROUNDS, RequestRecord
from hotspan.bench.terminal import tiers_of

# Okabe and Ito's palette, told apart by people who don't see all colours; the first run is grey, being the reference.
RUN_COLOURS: Final = ("#6b7280", "#0072b2", "#009e73", "#e69f00", "#cc79a7", "#56b4e9", "#d55e00")
TIER_COLOURS: Final = {"gpu": "#56b4e9", "ram": "#0072b2", "disk": "#e69f00", "l2": "#cc79a7", "external": "#009e73"}
COMPUTED_COLOUR: Final = "#e5e7eb"
TIER_TITLES: Final = {
    "gpu": "engine's own",
    "ram": "RAM",
    "disk": "disk",
    "l2": "L2",
    "external": "outside the engine",
}

_MOST_TICKS: Final = 24
_LOGARITHMIC_FROM: Final = 5.0


def colour_of(index: int) -> str:
    return RUN_COLOURS[index % len(RUN_COLOURS)]


def ttft_distribution(runs: Sequence[NamedRun]) -> go.Figure:
    """One box a run over the TTFT of its query rounds, with every request of every repetition as a point."""
    figure = go.Figure()
    for index, run in enumerate(runs):
        records = _answered(run)
        figure.add_box(
            x=[r.ttft for r in records],
            name=run.title,
            text=[r.request_id for r in records],
            hovertemplate="%{text}: %{x:.3f} s<extra></extra>",
            boxpoints="all",
            jitter=0.5,
            pointpos=0,
            marker={"color": colour_of(index), "size": 6, "opacity": 0.65},
            line={"width": 1.5},
            fillcolor=_translucent(colour_of(index)),
        )
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(title={"text": "time to first token (s)", "font": {"size": 13}}, rangemode="tozero")
    return styled(figure, height=110 + 62 * len(runs), legend=False)


def ttft_over_order(runs: Sequence[NamedRun]) -> go.Figure:
    """Median TTFT of each request of the query round in order of dispatch: shows queueing and eviction."""
    figure = go.Figure()
    for index, run in enumerate(runs):
        by_order: defaultdict[int, list[RequestRecord]] = defaultdict(list)
        for record in _answered(run):
            by_order[record.order].append(record)
        orders = sorted(by_order)
        figure.add_scatter(
            x=[order + 1 for order in orders],
            y=[statistics.median(r.ttft for r in by_order[order]) for order in orders],
            name=run.title,
            mode="lines+markers",
            text=[by_order[order][0].request_id for order in orders],
            hovertemplate="%{text}: %{y:.3f} s<extra>" + run.title + "</extra>",
            line={"color": colour_of(index), "width": 1.5},
            marker={"size": 6},
        )
    last = max((record.order + 1 for run in runs for record in _answered(run)), default=1)
    figure.update_xaxes(
        title={"text": "request, in order of dispatch", "font": {"size": 13}},
        range=[0.5, last + 0.5],
        dtick=1 if last <= _MOST_TICKS else None,
    )
    # From zero, or logarithmic where the values are too far apart to be told from each other near zero.
    values = [value for trace in figure.data for value in trace.y if value > 0]
    far_apart = bool(values) and max(values) >= _LOGARITHMIC_FROM * min(values)
    scale = {"type": "log", "dtick": "D2", "tickformat": "~g"} if far_apart else {"rangemode": "tozero"}
    title = "time to first token (s)" + (", log scale" if far_apart else "")
    figure.update_yaxes(title={"text": title, "font": {"size": 13}}, **scale)
    return styled(figure, height=380)


def cpu_by_round(runs: Sequence[NamedRun]) -> go.Figure | None:
    """CPU-seconds of the server's process tree, a bar for each run and round; None where none was measured."""
    figure = go.Figure()
    for index, run in enumerate(runs):
        medians = {name: _median(run, cpu_s(name)) for name in TIMED_ROUNDS}
        known = {name.value: value for name, value in medians.items() if value is not None}
        if known:
            figure.add_bar(
                x=list(known),
                y=list(known.values()),
                name=run.title,
                marker={"color": colour_of(index)},
                texttemplate="%{y:.1f}",
                textposition="outside",
                cliponaxis=False,
                hovertemplate="%{x}: %{y:.1f} CPU-seconds<extra>" + run.title + "</extra>",
            )
    if not figure.data:
        return None
    figure.update_layout(barmode="group", bargap=0.25, uniformtext={"minsize": 9, "mode": "hide"})
    figure.update_xaxes(categoryorder="array", categoryarray=[name.value for name in TIMED_ROUNDS])
    figure.update_yaxes(title={"text": "CPU-seconds", "font": {"size": 13}}, rangemode="tozero")
    return styled(figure, height=380)


def hit_rate_by_tier(runs: Sequence[NamedRun]) -> go.Figure | None:
    """Where the prompt tokens of the query round came from, a stack for each run; None where it is unknown."""
    titles = [run.title for run in runs]
    tiers = tiers_of(result.query for run in runs for result in run.results)
    rates = [{tier: _median(run, hit_rate(tier)) or 0.0 for tier in tiers} for run in runs]
    if not tiers:
        tiers = ["cached"]
        rates = [{"cached": _median(run, lambda result: result.query.summary.cached_rate) or 0.0} for run in runs]
        if not any(rate["cached"] for rate in rates):
            return None
    figure = go.Figure()
    for tier in tiers:
        figure.add_bar(
            y=titles,
            x=[rate[tier] for rate in rates],
            name=TIER_TITLES.get(tier, tier),
            orientation="h",
            marker={"color": TIER_COLOURS.get(tier, "#0072b2")},
            texttemplate="%{x:.1%}",
            insidetextanchor="middle",
            hovertemplate="%{y}: %{x:.1%}<extra>" + TIER_TITLES.get(tier, tier) + "</extra>",
        )
    figure.add_bar(
        y=titles,
        x=[max(0.0, 1.0 - sum(rate.values())) for rate in rates],
        name="computed",
        orientation="h",
        marker={"color": COMPUTED_COLOUR},
        hovertemplate="%{y}: %{x:.1%}<extra>computed</extra>",
    )
    figure.update_layout(barmode="stack", bargap=0.35, uniformtext={"minsize": 10, "mode": "hide"})
    figure.update_yaxes(autorange="reversed", showgrid=False)
    figure.update_xaxes(
        title={"text": "share of the prompt tokens", "font": {"size": 13}}, tickformat=".0%", range=[0, 1]
    )
    return styled(figure, height=140 + 44 * len(runs))


def _answered(run: NamedRun) -> list[RequestRecord]:
    return [record for result in run.results for record in result.query.records if record.successful]


def _median(run: NamedRun, figure: Figure) -> float | None:
    found = over_repetitions(run, figure)
    return found.median if found else None


def _translucent(colour: str) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.15)"


def styled(figure: go.Figure, height: int, *, legend: bool = True) -> go.Figure:
    """The figure, in the look of all reports."""
    figure.update_layout(
        template="plotly_white",
        height=height,
        margin={"l": 12, "r": 24, "t": 24, "b": 12},
        font={"family": "system-ui, -apple-system, 'Segoe UI', sans-serif", "size": 13, "color": "#1f2937"},
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.02, "xanchor": "left", "x": 0, "traceorder": "normal"},
        showlegend=legend,
        hoverlabel={"font": {"size": 13}},
    )
    figure.update_xaxes(automargin=True, gridcolor="#eef0f3", zerolinecolor="#d1d5db")
    figure.update_yaxes(automargin=True, gridcolor="#eef0f3", zerolinecolor="#d1d5db", ticklabelstandoff=6)
    return figure
