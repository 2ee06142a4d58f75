"""The plots of a comparison, as Plotly figures."""

from collections.abc import Sequence

import plotly.graph_objects as go

from hotspan.bench.report_figures import RUN_COLOURS, styled
from hotspan.simulate.compare import Line
from hotspan.simulate.costs import Sizes
from hotspan.simulate.routers import POLICIES

_LEAST_S = 0.01
_COLOURS = (*RUN_COLOURS[1:], RUN_COLOURS[0], "#111827")
_MARKERS = ("circle", "square", "diamond", "triangle-up", "cross", "x")


def ttft_distribution(lines: Sequence[Line]) -> go.Figure:
    """The share of the first seed's requests that had their first token after so long, a curve for each strategy."""
    figure = go.Figure()
    for line in lines:
        points = line.curve.ttft_s
        figure.add_scatter(
            x=[max(value, _LEAST_S) for value in points],
            y=[n / (len(points) - 1) for n in range(len(points))],
            name=line.policy,
            line={"color": _colour(line), "width": 2 if line.policy == "auto" else 1.5},
            hovertemplate="%{y:.1%} within %{x:.2f} s<extra>" + line.policy + "</extra>",
        )
    figure.update_xaxes(title={"text": "time to first token (s), log scale"}, type="log")
    figure.update_yaxes(title={"text": "share of the requests"}, tickformat=".0%", range=[0, 1.01])
    return _finished(figure)


def hit_against_ttft(lines: Sequence[Line]) -> go.Figure:
    """A point for each strategy and seed: what it found, and how long requests waited."""
    figure = go.Figure()
    for line in lines:
        figure.add_scatter(
            x=[run.hit_rate for run in line.runs],
            y=[run.ttft_s.mean for run in line.runs],
            name=line.policy,
            mode="markers",
            marker={"color": _colour(line), "size": 10, "symbol": _MARKERS[_place(line) % len(_MARKERS)]},
            hovertemplate="hit rate %{x:.3f}, mean %{y:.2f} s<extra>" + line.policy + "</extra>",
        )
    figure.update_xaxes(title={"text": "hit rate"}, tickformat=".0%", rangemode="tozero")
    figure.update_yaxes(title={"text": "mean time to first token (s), log scale"}, type="log")
    return _finished(figure)


def load_over_time(lines: Sequence[Line]) -> go.Figure:
    """Requests at the replica that has most, over the first seed's trace; what is even lies low."""
    figure = go.Figure()
    for line in lines:
        figure.add_scatter(
            x=[load.at_s for load in line.curve.load],
            y=[max(load.most, 0.5) for load in line.curve.load],
            name=line.policy,
            line={"color": _colour(line), "width": 1},
            customdata=[[load.mean] for load in line.curve.load],
            hovertemplate="%{y:.0f}, on average %{customdata[0]:.1f}<extra>" + line.policy + "</extra>",
        )
    figure.update_xaxes(title={"text": "seconds into the trace"})
    figure.update_yaxes(title={"text": "requests at the busiest replica, log scale"}, type="log")
    return _finished(figure)


def sizes_sweep(lines: Sequence[Line]) -> go.Figure | None:
    """Mean TTFT over the tiers' sizes, a curve for each strategy; None if there is one size."""
    sizes = list(dict.fromkeys(line.sizes for line in lines))
    if len(sizes) < 2:
        return None
    figure = go.Figure()
    for policy in dict.fromkeys(line.policy for line in lines):
        own = {line.sizes: line for line in lines if line.policy == policy}
        first = next(iter(own.values()))
        figure.add_scatter(
            x=[_short(each, sizes) for each in sizes],
            y=[own[each].ttft_s("mean") for each in sizes],
            name=policy,
            mode="lines+markers",
            line={"color": _colour(first), "width": 1.5},
            customdata=[[own[each].hit_rate] for each in sizes],
            hovertemplate="%{x}: %{y:.2f} s, hit rate %{customdata[0]:.3f}<extra>" + policy + "</extra>",
        )
    figure.update_yaxes(title={"text": "mean time to first token (s), log scale"}, type="log")
    return _finished(figure)


def _finished(figure: go.Figure) -> go.Figure:
    """In the look of all reports, with room for the tools above so many names."""
    return styled(figure, height=440).update_layout(margin={"t": 64})


def _short(sizes: Sizes, every: Sequence[Sizes]) -> str:
    """Its label, less what all have in common."""
    common = set.intersection(*(set(each.label().split(", ")) for each in every))
    return ", ".join(part for part in sizes.label().split(", ") if part not in common) or sizes.label()


def _place(line: Line) -> int:
    return POLICIES.index(line.policy)


def _colour(line: Line) -> str:
    return _COLOURS[_place(line) % len(_COLOURS)]
