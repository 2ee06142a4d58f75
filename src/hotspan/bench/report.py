"""A benchmark as one HTML file: figures, plots, machine and commands, readable without a network."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from hotspan.bench import report_figures as figures
from hotspan.bench import report_tables as tables
from hotspan.bench.compare import (
    TIMES,
    NamedRun,
    Spread,
    answers_as,
    cpu_s,
    hit_rate,
    over_repetitions,
    ratio,
    speed_up,
    total_s,
    ttft_s,
)
from hotspan.bench.records import BenchResult, RoundName
from hotspan.bench.report_style import STYLE
from hotspan.bench.terminal import failures, pacing, tiers_of
from hotspan.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ReportContext:
    """What a report says besides the runs' figures.

    The first run is what the others are compared with.

    headline:         name of the run the cards are about (default: the second, or the only one).
    bound:            name of the run that the CPU time of the query round is compared with (default: the first).
    answer_reference: name of the run whose answers all answers are compared with; `answer_label` heads that column,
                      and `answer_note` says what the comparison is worth.
    """

    lead: str = ""
    command: str = ""
    headline: str = ""
    bound: str = ""
    answer_reference: str = ""
    answer_label: str = ""
    answer_note: str = ""


@dataclass(frozen=True, slots=True)
class Card:
    """One headline figure."""

    label: str
    figure: str
    detail: str
    unit: str = ""


def write_report(path: Path, title: str, runs: Sequence[NamedRun], context: ReportContext) -> None:
    """Write the page.

    Raises: ConfigError if there is no run, or a name in `context` is none of the runs.
    """
    if not runs:
        raise ConfigError("a report needs at least one result")
    names = {run.name for run in runs}
    for name in (context.headline, context.bound, context.answer_reference):
        if name and name not in names:
            raise ConfigError(f"the report has no run {name!r}; it has {', '.join(sorted(names))}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_page(title, runs, context), encoding="utf-8")


def _page(title: str, runs: Sequence[NamedRun], context: ReportContext) -> str:
    reference = _named(runs, context.answer_reference)
    label = context.answer_label or (f"as {reference.title}" if reference else "")
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="lead">{escape(context.lead or _lead(runs[0].results[0]))}</p>',
        _alarms(runs),
        '<div class="cards">' + "".join(card_section(card) for card in cards(runs, context)) + "</div>",
        tables.latency_section(runs),
        tables.cpu_section(runs, _named(runs, context.bound)),
        tables.cache_section(runs, reference, label, context.answer_note),
        *_plots(runs),
        tables.rounds_section(runs),
        tables.environment_section(runs, context.command),
    ]
    return html_page(title, body)


def html_page(title: str, body: Sequence[str]) -> str:
    """A whole page that needs no network: style and scripts, and these parts of its body."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # An icon of nothing: without one, browsers ask the server of the page for it.
        '<link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>"
        f"<script>{get_plotlyjs()}</script></head>\n<body><main>\n" + "\n".join(body) + "\n</main></body></html>\n"
    )


def _named(runs: Sequence[NamedRun], name: str) -> NamedRun | None:
    return next((run for run in runs if run.name == name), None)


def _lead(result: BenchResult) -> str:
    config = result.config
    return (
        f"Workload {config.get('workload')} on {config.get('model')}, seed {config.get('seed')}: "
        f"{result.query.summary.requests} requests in the query round. Measured {result.started_at}. "
        f"{pacing(result.query)}"
    ).strip()


def cards(runs: Sequence[NamedRun], context: ReportContext) -> list[Card]:
    """The headline figures: a comparison with the first run where there is one."""
    if len(runs) == 1:
        return _single_cards(runs[0])
    headline = _named(runs, context.headline) or runs[1]
    found = _speed_up_cards(headline, runs[0])
    found += _hit_card(headline)
    found += _cpu_card(headline, runs[0], _named(runs, context.bound))
    reference = _named(runs, context.answer_reference)
    match = answers_as(headline, reference) if reference else None
    if reference and match:
        title = context.answer_label or f"as {reference.title}"
        found.append(Card("Same answers", str(match), f"{headline.title}, byte for byte {title}"))
    return found


def _speed_up_cards(run: NamedRun, first: NamedRun) -> list[Card]:
    faster = speed_up(run, first)
    found = []
    for label, factor, figure, what in (
        ("Time to first token", faster.ttft, ttft_s(RoundName.QUERY), f"on average, {run.title} against {first.title}"),
        ("Total latency", faster.total, total_s(RoundName.QUERY), "for the query round"),
    ):
        ours, theirs = over_repetitions(run, figure), over_repetitions(first, figure)
        if factor and factor.median and ours and theirs:
            times = factor.median if factor.median >= 1 else 1 / factor.median
            detail = f"{_seconds(theirs)} to {_seconds(ours)} {what}"
            found.append(Card(label, f"{times:.1f}{TIMES}", detail, "faster" if factor.median >= 1 else "slower"))
    return found


def _cpu_card(run: NamedRun, first: NamedRun, bound: NamedRun | None) -> list[Card]:
    less = ratio(first, run, cpu_s(RoundName.QUERY))
    ours, theirs = over_repetitions(run, cpu_s(RoundName.QUERY)), over_repetitions(first, cpu_s(RoundName.QUERY))
    if not (less and less.median and ours and theirs):
        return []
    detail = f"{theirs.median:.1f} to {ours.median:.1f} CPU-seconds for the query round"
    over = ratio(run, bound, cpu_s(RoundName.QUERY)) if bound else None
    detail += f"; {over.median:.2f}{TIMES} the {bound.title}" if over and bound else ""
    times = less.median if less.median >= 1 else 1 / less.median
    return [Card("CPU time", f"{times:.1f}{TIMES}", detail, "less" if less.median >= 1 else "more")]


def _seconds(value: Spread) -> str:
    return f"{value.median:.3f} s" if value.median < 1 else f"{value.median:.2f} s"


def _single_cards(run: NamedRun) -> list[Card]:
    summary = run.results[0].query.summary
    found = []
    if summary.ttft_s:
        detail = f"mean; p50 {summary.ttft_s.p50:.3f} s, p99 {summary.ttft_s.p99:.3f} s"
        found.append(Card("Time to first token", f"{summary.ttft_s.mean:.3f}", detail, "s"))
    found.append(Card("Total latency", f"{summary.elapsed_s:.2f}", f"{summary.requests} requests, query round", "s"))
    speeds = f"and {summary.output_throughput:,.1f} tok/s out"
    found.append(Card("Throughput", f"{summary.input_throughput:,.0f}", speeds, "tok/s in"))
    found += _hit_card(run)
    if summary.cpu_s is not None:
        found.append(Card("CPU time", f"{summary.cpu_s:.1f}", "of the server's processes, query round", "s"))
    return found


def _hit_card(run: NamedRun) -> list[Card]:
    rates = {t: over_repetitions(run, hit_rate(t)) for t in tiers_of(result.query for result in run.results)}
    known = {figures.TIER_TITLES.get(tier, tier): rate.median for tier, rate in rates.items() if rate}
    if known:
        detail = ", ".join(f"{title} {rate:.1%}" for title, rate in known.items())
        return [Card("Tokens not recomputed", f"{min(1.0, sum(known.values())):.1%}", detail)]
    cached = over_repetitions(run, lambda result: result.query.summary.cached_rate)
    return [Card("Tokens not recomputed", f"{cached.median:.1%}", "as the server's usage says")] if cached else []


def card_section(card: Card) -> str:
    """A card as HTML."""
    unit = f" <small>{escape(card.unit)}</small>" if card.unit else ""
    return (
        f'<div class="card"><div class="label">{escape(card.label)}</div>'
        f'<div class="figure">{escape(card.figure)}{unit}</div><div class="detail">{escape(card.detail)}</div></div>'
    )


def _alarms(runs: Sequence[NamedRun]) -> str:
    lines = []
    for run in runs:
        if run.failed:
            first = escape("; ".join(failures((r for result in run.results for r in result.rounds), limit=2)))
            lines.append(f"<strong>{escape(run.title)}: {run.failed} failed requests.</strong> {first}")
    return '<div class="alarm">' + "<br>".join(lines) + "</div>" if lines else ""


def _plots(runs: Sequence[NamedRun]) -> list[str]:
    sections = [
        plot_section(
            "Time to first token, by request",
            "Query round. The box spans the quartiles; each point is a request.",
            figures.ttft_distribution(runs),
        ),
        plot_section(
            "Time to first token, in order of dispatch",
            "Query round. Click a name to hide it, double-click to see it alone.",
            figures.ttft_over_order(runs),
        ),
        plot_section(
            "Where the prompt tokens came from",
            "Query round. What is grey was computed by the engine.",
            figures.hit_rate_by_tier(runs),
        ),
        plot_section(
            "CPU-seconds by round",
            "User and system time of the server and all its processes.",
            figures.cpu_by_round(runs),
        ),
    ]
    return [section for section in sections if section]


def plot_section(title: str, note: str, figure: go.Figure | None) -> str:
    """A plot with its heading and a note; "" without a figure."""
    if figure is None:
        return ""
    config = {"displaylogo": False, "responsive": True, "modeBarButtonsToRemove": ["lasso2d", "select2d"]}
    drawn = figure.to_html(full_html=False, include_plotlyjs=False, config=config)
    return f'<section><h2>{escape(title)}</h2><p class="note">{escape(note)}</p>{drawn}</section>'
