"""The plots of a benchmark's report, as Plotly figures."""

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, Final

import plotly.graph_objects as go

from hotspan.bench.compare import Figure, NamedRun, cpu_s, hit_rate, over_repetitions
from hotspan.bench.page import styled
from hotspan.bench.records import TIMED_ROUNDS, RequestRecord, tiers_of
from hotspan.bench.tables import colour_of

TIER_COLOURS: Final = {"gpu": "#56b4e9", "ram": "#0072b2", "disk": "#e69f00", "l2": "#cc79a7", "external": "#009e73"}
COMPUTED_COLOUR: Final = "#e5e7eb"
TIER_TITLES: Final = {
    "gpu": "engine's own",
    "ram": "RAM",
    "disk": "disk",
    "l2": "L2",
    "external": "outside the engine",
}

_BINS: Final = 60
_MAX_TICKS: Final = 24
_LOGARITHMIC_FROM: Final = 5.0
_TTFT: Final = "time to first token (s)"


def of_runs(runs: Sequence[NamedRun]) -> Iterator[tuple[str, str, go.Figure | None]]:
    """Title, note and figure of each plot; None where the runs don't have what it shows."""
    note = "Query round. The box spans the quartiles; each point is a request."
    yield "Time to first token, by request", note, _ttft_distribution(runs)
    yield "Time to first token, share of requests", "Query round, all repetitions together.", _ttft_shares(runs)
    note = "Query round. Click a name to hide it, double-click to see it alone."
    yield "Time to first token, in order of dispatch", note, _ttft_over_order(runs)
    note = "Query round. What is grey was computed by the engine."
    yield "Where the prompt tokens came from", note, _hit_rate_by_tier(runs)
    note = "Query round of the first repetition. Prompt tokens of requests that began, by where they came from."
    for run in runs:
        yield f"Timeline by tier: {run.title}", note, _timeline_by_tier(run)
    yield "Throughput over time", "Query round of the first repetition. Tokens of answers as they came.", _output(runs)
    yield "CPU-seconds by round", "User and system time of the server and all its processes.", _cpu_by_round(runs)


def _ttft_distribution(runs: Sequence[NamedRun]) -> go.Figure:
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
        )
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(title=_axis(_TTFT), rangemode="tozero")
    return styled(figure, height=110 + 62 * len(runs), legend=False)


def _ttft_shares(runs: Sequence[NamedRun]) -> go.Figure:
    """The share of requests that had their first token by each time: the distribution function of each run."""
    figure = go.Figure()
    for index, run in enumerate(runs):
        times = sorted(record.ttft for record in _answered(run))
        figure.add_scatter(
            x=times,
            y=[(n + 1) / len(times) for n in range(len(times))],
            name=run.title,
            mode="lines",
            line={"color": colour_of(index), "width": 2, "shape": "hv"},
            hovertemplate="%{y:.0%} within %{x:.3f} s<extra>" + run.title + "</extra>",
        )
    figure.update_xaxes(title=_axis(_TTFT), rangemode="tozero")
    figure.update_yaxes(title=_axis("share of requests"), tickformat=".0%", range=[0, 1.02])
    return styled(figure, height=340)


def _ttft_over_order(runs: Sequence[NamedRun]) -> go.Figure:
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
        title=_axis("request, in order of dispatch"),
        range=[0.5, last + 0.5],
        dtick=1 if last <= _MAX_TICKS else None,
    )
    # From zero, or logarithmic where the values are too far apart to be told from each other near zero.
    values = [value for trace in figure.data for value in trace.y if value > 0]
    is_log = bool(values) and max(values) >= _LOGARITHMIC_FROM * min(values)
    scale = {"type": "log", "dtick": "D2", "tickformat": "~g"} if is_log else {"rangemode": "tozero"}
    figure.update_yaxes(title=_axis(_TTFT + (", log scale" if is_log else "")), **scale)
    return styled(figure, height=380)


def _cpu_by_round(runs: Sequence[NamedRun]) -> go.Figure | None:
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
    figure.update_yaxes(title=_axis("CPU-seconds"), rangemode="tozero")
    return styled(figure, height=380)


def _hit_rate_by_tier(runs: Sequence[NamedRun]) -> go.Figure | None:
    """Where the prompt tokens of the query round came from, a stack for each run; None where it is unknown."""
    tiers = tiers_of(result.query for run in runs for result in run.results)
    rates = [{tier: _median(run, hit_rate(tier)) or 0.0 for tier in tiers} for run in runs]
    if not tiers:
        rates = [{"cached": _median(run, lambda result: result.query.summary.cached_rate) or 0.0} for run in runs]
        if not any(rate["cached"] for rate in rates):
            return None
    figure = go.Figure()
    for rate in rates:
        rate["computed"] = max(0.0, 1.0 - sum(rate.values()))
    for tier in rates[0]:
        name = TIER_TITLES.get(tier, tier)
        is_computed = tier == "computed"
        figure.add_bar(
            y=[run.title for run in runs],
            x=[rate[tier] for rate in rates],
            name=name,
            orientation="h",
            marker={"color": COMPUTED_COLOUR if is_computed else TIER_COLOURS.get(tier, "#0072b2")},
            texttemplate=None if is_computed else "%{x:.1%}",
            insidetextanchor="middle",
            hovertemplate="%{y}: %{x:.1%}<extra>" + name + "</extra>",
        )
    figure.update_layout(barmode="stack", bargap=0.35, uniformtext={"minsize": 10, "mode": "hide"})
    figure.update_yaxes(autorange="reversed", showgrid=False)
    figure.update_xaxes(title=_axis("share of the prompt tokens"), tickformat=".0%", range=[0, 1])
    return styled(figure, height=140 + 44 * len(runs))


def _timeline_by_tier(run: NamedRun) -> go.Figure | None:
    """Prompt tokens per second by tier, a stack for each sample; None where none were taken."""
    query = run.results[0].query
    if not query.timeline:
        return None
    began = min((record.submit_time for record in query.records), default=0.0)
    ends = [each.at_s - began for each in query.timeline]
    widths = [end - start for start, end in zip([0.0, *ends], ends, strict=False)]
    found: dict[str, list[float]] = {
        tier: [each.use.hit_tokens.get(tier, 0.0) for each in query.timeline] for tier in tiers_of([query])
    }
    if all(each.use.lookup_tokens is not None for each in query.timeline):
        found["computed"] = [
            max(0.0, (each.use.lookup_tokens or 0.0) - sum(each.use.hit_tokens.values())) for each in query.timeline
        ]
    figure = go.Figure()
    for tier, tokens in found.items():
        name = TIER_TITLES.get(tier, tier)
        figure.add_bar(
            x=[end - width / 2 for end, width in zip(ends, widths, strict=True)],
            y=[count / max(width, 1e-3) for count, width in zip(tokens, widths, strict=True)],
            width=widths,
            name=name,
            marker={"color": TIER_COLOURS.get(tier, COMPUTED_COLOUR), "line": {"width": 0}},
            hovertemplate="%{x:.1f} s: %{y:,.0f} tokens/s<extra>" + name + "</extra>",
        )
    figure.update_layout(barmode="stack", bargap=0)
    figure.update_xaxes(title=_axis("seconds into the round"), rangemode="tozero")
    figure.update_yaxes(title=_axis("prompt tokens per second"), rangemode="tozero")
    return styled(figure, height=340)


def _output(runs: Sequence[NamedRun]) -> go.Figure | None:
    """Output tokens per second in equal parts of the round; None where no answer has a second token."""
    figure = go.Figure()
    for index, run in enumerate(runs):
        query = run.results[0].query
        if not any(record.inter_token_s for record in query.records):
            return None
        began = min(record.submit_time for record in query.records)
        width = max(query.summary.elapsed_s, 1e-3) / _BINS
        counts = [0.0] * _BINS
        for record in query.records:
            times = list(accumulate(record.inter_token_s, initial=record.first_token_time)) if record.successful else []
            for at_s in times:  # a piece of an answer may be several tokens
                part = min(_BINS - 1, int((at_s - began) / width))
                counts[part] += record.num_output_tokens / len(times)
        figure.add_scatter(
            x=[(n + 0.5) * width for n in range(_BINS)],
            y=[count / width for count in counts],
            name=run.title,
            mode="lines",
            line={"color": colour_of(index), "width": 1.5},
            hovertemplate="%{x:.1f} s: %{y:,.0f} tokens/s<extra>" + run.title + "</extra>",
        )
    figure.update_xaxes(title=_axis("seconds into the round"), rangemode="tozero")
    figure.update_yaxes(title=_axis("output tokens per second"), rangemode="tozero")
    return styled(figure, height=300)


def _answered(run: NamedRun) -> list[RequestRecord]:
    return [record for result in run.results for record in result.query.records if record.successful]


def _median(run: NamedRun, figure: Figure) -> float | None:
    found = over_repetitions(run, figure)
    return found.median if found else None


def _axis(title: str) -> dict[str, Any]:
    return {"text": title, "font": {"size": 13}}
