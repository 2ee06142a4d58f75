"""The plots of a report, as Plotly figures."""

from collections.abc import Sequence
from typing import Final

import plotly.graph_objects as go

from hotspan.bench.compare import AnswerMatch
from hotspan.bench.records import BenchResult, RoundName
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

Titled = Sequence[tuple[str, BenchResult]]
"""Runs with the titles they go by."""


def colour_of(index: int) -> str:
    return RUN_COLOURS[index % len(RUN_COLOURS)]


def ttft_distribution(runs: Titled) -> go.Figure:
    """One box a run over the TTFT of its query round, with every request as a point."""
    figure = go.Figure()
    for index, (title, result) in enumerate(runs):
        records = [r for r in result.query.records if r.successful]
        figure.add_box(
            x=[r.ttft for r in records],
            name=title,
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
    return _styled(figure, height=110 + 62 * len(runs), legend=False)


def ttft_over_order(runs: Titled) -> go.Figure:
    """TTFT of each request of the query round in order of dispatch: shows warming up, queueing and eviction."""
    figure = go.Figure()
    for index, (title, result) in enumerate(runs):
        records = [r for r in result.query.records if r.successful]
        figure.add_scatter(
            x=[r.order + 1 for r in records],
            y=[r.ttft for r in records],
            name=title,
            mode="lines+markers",
            text=[r.request_id for r in records],
            hovertemplate="%{text}: %{y:.3f} s<extra>" + title + "</extra>",
            line={"color": colour_of(index), "width": 1.5},
            marker={"size": 6},
        )
    figure.update_xaxes(title={"text": "request, in order of dispatch", "font": {"size": 13}}, rangemode="tozero")
    figure.update_yaxes(title={"text": "time to first token (s)", "font": {"size": 13}}, rangemode="tozero")
    return _styled(figure, height=380)


def cpu_by_round(runs: Titled) -> go.Figure | None:
    """CPU-seconds of the server's process tree, a bar for each run and round; None where none was measured."""
    figure = go.Figure()
    for index, (title, result) in enumerate(runs):
        rounds = [r for r in result.rounds if r.summary.cpu_s is not None]
        if rounds:
            figure.add_bar(
                x=[r.name.value for r in rounds],
                y=[r.summary.cpu_s for r in rounds],
                name=title,
                marker={"color": colour_of(index)},
                texttemplate="%{y:.3s}",
                textposition="outside",
                hovertemplate="%{x}: %{y:.1f} CPU-seconds<extra>" + title + "</extra>",
            )
    if not figure.data:
        return None
    figure.update_layout(barmode="group", bargap=0.25, uniformtext={"minsize": 9, "mode": "hide"})
    figure.update_xaxes(categoryorder="array", categoryarray=[name.value for name in RoundName])
    figure.update_yaxes(title={"text": "CPU-seconds", "font": {"size": 13}}, rangemode="tozero")
    return _styled(figure, height=380)


def hit_rate_by_tier(runs: Titled) -> go.Figure | None:
    """Where the prompt tokens of the query round came from, a stack for each run; None where it is unknown."""
    titles = [title for title, _ in runs]
    rates = [result.query.summary.hit_rates for _, result in runs]
    if not any(rates):
        rates = [{"cached": r.query.summary.cached_rate or 0.0} for _, r in runs]
        if not any(rate["cached"] for rate in rates):
            return None
    figure = go.Figure()
    tiers = tiers_of(result.query for _, result in runs) or ["cached"]
    for tier in tiers:
        figure.add_bar(
            y=titles,
            x=[rate.get(tier, 0.0) for rate in rates],
            name=TIER_TITLES.get(tier, tier),
            orientation="h",
            marker={"color": TIER_COLOURS.get(tier, "#0072b2")},
            texttemplate="%{x:.0%}",
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
    return _styled(figure, height=140 + 44 * len(runs))


def match_colour(match: AnswerMatch) -> str:
    """The style class of a count of identical answers."""
    return "good" if match.all_same else ("" if match.compared == 0 else "poor")


def _translucent(colour: str) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.15)"


def _styled(figure: go.Figure, height: int, *, legend: bool = True) -> go.Figure:
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
