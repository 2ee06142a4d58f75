"""A benchmark as one HTML file: figures, plots, machine and commands, readable without a network."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from hotspan.bench import report_figures as figures
from hotspan.bench import report_tables as tables
from hotspan.bench.compare import TIMES, NamedRun, match_answers, speed_up
from hotspan.bench.records import BenchResult
from hotspan.bench.report_style import STYLE
from hotspan.bench.terminal import failures, tiers_of
from hotspan.core.errors import ConfigError

__all__ = ["NamedRun", "ReportContext", "write_report"]


@dataclass(frozen=True, slots=True)
class ReportContext:
    """What a report says besides the runs' figures.

    The first run is what the others are compared with. `headline` is the run the cards are about (default: the second,
    or the only one), `answer_references` the runs whose answers all runs' answers are compared with.
    """

    lead: str = ""
    command: str = ""
    headline: str = ""
    answer_references: tuple[str, ...] = ()


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
    for name in (*context.answer_references, *([context.headline] if context.headline else [])):
        if name not in names:
            raise ConfigError(f"the report has no run {name!r}; it has {', '.join(sorted(names))}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_page(title, runs, context), encoding="utf-8")


def _page(title: str, runs: Sequence[NamedRun], context: ReportContext) -> str:
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="lead">{escape(context.lead or _lead(runs[0].result))}</p>',
        _alarms(runs),
        '<div class="cards">' + "".join(_card(card) for card in cards(runs, context)) + "</div>",
        tables.latency_section(runs),
        tables.cache_section(runs, context.answer_references),
        *_plots(runs),
        tables.rounds_section(runs),
        tables.environment_section(runs, context.command),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # An icon of nothing: without one, browsers ask the server of the page for it.
        '<link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>"
        f"<script>{get_plotlyjs()}</script></head>\n<body><main>\n" + "\n".join(body) + "\n</main></body></html>\n"
    )


def _lead(result: BenchResult) -> str:
    config = result.config
    return (
        f"Workload {config.get('workload')} on {config.get('model')}, seed {config.get('seed')}: "
        f"{result.query.summary.requests} requests in the query round. Measured {result.started_at}."
    )


def cards(runs: Sequence[NamedRun], context: ReportContext) -> list[Card]:
    """The headline figures: a comparison with the first run where there is one."""
    if len(runs) == 1:
        return _single_cards(runs[0])
    first = runs[0]
    headline = next((run for run in runs if run.name == context.headline), runs[1])
    ours, theirs = headline.result.query.summary, first.result.query.summary
    faster = speed_up(headline.result, first.result)
    against = f"{headline.title} against {first.title}"
    found = []
    if faster.ttft and ours.ttft_s and theirs.ttft_s:
        detail = f"{theirs.ttft_s.mean:.3f} s to {ours.ttft_s.mean:.3f} s on average, {against}"
        found.append(Card("Time to first token", *_factor(faster.ttft, detail)))
    if faster.total:
        detail = f"{theirs.elapsed_s:.2f} s to {ours.elapsed_s:.2f} s for the query round"
        found.append(Card("Total latency", *_factor(faster.total, detail)))
    found += _hit_card(headline)
    if ours.cpu_s is not None and theirs.cpu_s:
        detail = f"{theirs.cpu_s:.0f} to {ours.cpu_s:.0f} CPU-seconds in the query round"
        found.append(Card("CPU time", f"{ours.cpu_s / theirs.cpu_s - 1:+.0%}".replace("-", "\N{MINUS SIGN}"), detail))
    for name in context.answer_references[:1]:
        reference = next(run for run in runs if run.name == name)
        match = match_answers(headline.result, reference.result)
        found.append(Card("Identical answers", str(match), f"{headline.title}, byte for byte as {reference.title}"))
    return found


def _factor(speed_up: float, detail: str) -> tuple[str, str, str]:
    """Figure, detail and unit of a card about a speed-up."""
    faster = speed_up >= 1
    return f"{speed_up if faster else 1 / speed_up:.2f}{TIMES}", detail, "faster" if faster else "slower"


def _single_cards(run: NamedRun) -> list[Card]:
    summary = run.result.query.summary
    found = []
    if summary.ttft_s:
        detail = f"mean; p50 {summary.ttft_s.p50:.3f} s, p99 {summary.ttft_s.p99:.3f} s"
        found.append(Card("Time to first token", f"{summary.ttft_s.mean:.3f}", detail, "s"))
    found.append(Card("Total latency", f"{summary.elapsed_s:.2f}", f"{summary.requests} requests, query round", "s"))
    found.append(
        Card(
            "Throughput",
            f"{summary.input_throughput:,.0f}",
            f"and {summary.output_throughput:,.1f} tok/s out",
            "tok/s in",
        )
    )
    found += _hit_card(run)
    if summary.cpu_s is not None:
        found.append(Card("CPU time", f"{summary.cpu_s:.1f}", "of the server's processes, query round", "s"))
    return found


def _hit_card(run: NamedRun) -> list[Card]:
    summary = run.result.query.summary
    rates = summary.hit_rates
    if rates:
        parts = [f"{figures.TIER_TITLES.get(t, t)} {rates[t]:.1%}" for t in tiers_of([run.result.query]) if t in rates]
        return [Card("Tokens not recomputed", f"{min(1.0, sum(rates.values())):.1%}", ", ".join(parts))]
    if summary.cached_rate is not None:
        return [Card("Tokens not recomputed", f"{summary.cached_rate:.1%}", "as the server's usage says")]
    return []


def _card(card: Card) -> str:
    unit = f" <small>{escape(card.unit)}</small>" if card.unit else ""
    return (
        f'<div class="card"><div class="label">{escape(card.label)}</div>'
        f'<div class="figure">{escape(card.figure)}{unit}</div><div class="detail">{escape(card.detail)}</div></div>'
    )


def _alarms(runs: Sequence[NamedRun]) -> str:
    lines = []
    for run in runs:
        if run.result.failed:
            first = escape("; ".join(failures(run.result.rounds, limit=2)))
            lines.append(f"<strong>{escape(run.title)}: {run.result.failed} failed requests.</strong> {first}")
    return '<div class="alarm">' + "<br>".join(lines) + "</div>" if lines else ""


def _plots(runs: Sequence[NamedRun]) -> list[str]:
    titled = [(run.title, run.result) for run in runs]
    sections = [
        _plot(
            "Time to first token, by request",
            "Query round. The box spans the quartiles; each point is a request.",
            figures.ttft_distribution(titled),
        ),
        _plot(
            "Time to first token, in order of dispatch",
            "Query round. Click a name to hide it, double-click to see it alone.",
            figures.ttft_over_order(titled),
        ),
        _plot(
            "Where the prompt tokens came from",
            "Query round. What is grey was computed by the engine.",
            figures.hit_rate_by_tier(titled),
        ),
        _plot(
            "CPU-seconds by round",
            "User and system time of the server and all its processes.",
            figures.cpu_by_round(titled),
        ),
    ]
    return [section for section in sections if section]


def _plot(title: str, note: str, figure: go.Figure | None) -> str:
    if figure is None:
        return ""
    config = {"displaylogo": False, "responsive": True, "modeBarButtonsToRemove": ["lasso2d", "select2d"]}
    drawn = figure.to_html(full_html=False, include_plotlyjs=False, config=config)
    return f'<section><h2>{escape(title)}</h2><p class="note">{escape(note)}</p>{drawn}</section>'
