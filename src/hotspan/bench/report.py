"""A benchmark's tables and headline figures, and the HTML file with them, plots, machine and commands."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from operator import attrgetter
from pathlib import Path
from typing import Final

from hotspan.bench import plots
from hotspan.bench.compare import (
    TIMES,
    Figure,
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
from hotspan.bench.failures import failures
from hotspan.bench.figures import paired_ttft
from hotspan.bench.page import Card, card_section, facts, folded, plot_section, section, table_section, write_page
from hotspan.bench.records import (
    TIMED_ROUNDS,
    BenchResult,
    RoundName,
    RoundResult,
    RoundSummary,
    tiers_of,
)
from hotspan.bench.tables import NO_VALUE, Cell, Group, Table
from hotspan.core.errors import ConfigError

QUERY: Final = RoundName.QUERY


@dataclass(frozen=True, slots=True)
class ReportContext:
    """What a report says besides the runs' figures.

    The first run is what the others are compared with.

    headline:         name of the run the cards are about (default: the second, or the only one).
    bound:            name of the run that the CPU time of the query round is compared with (default: the first).
    answer_reference: name of the run whose answers all answers are compared with; `answer_label` heads that column,
                      and `answer_note` says what the comparison is worth.
    opening, sections: more of the page, as HTML: in front of the cards, and behind the tables.
    warnings:         what puts the figures into doubt.
    """

    lead: str = ""
    command: str = ""
    headline: str = ""
    bound: str = ""
    answer_reference: str = ""
    answer_label: str = ""
    answer_note: str = ""
    sections: Sequence[str] = ()
    opening: Sequence[str] = ()
    warnings: Sequence[str] = ()

    def label(self, reference: NamedRun) -> str:
        return self.answer_label or f"as {reference.title}"


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
    sections = [
        _alarms(runs, context.warnings),
        *context.opening,
        card_section(cards(runs, context)),
        *map(table_section, comparison_tables(runs, context)),
        _notes(runs),
        *context.sections,
        *(plot_section(*plot) for plot in plots.of_runs(runs)),
        folded("Every round in figures", "".join(_rounds_of(run) for run in runs)),
        *_environment(runs, context.command),
    ]
    write_page(path, title, context.lead or _lead(runs[0].results[0]), sections)


def _named(runs: Sequence[NamedRun], name: str) -> NamedRun | None:
    return next((run for run in runs if run.name == name), None)


def _lead(result: BenchResult) -> str:
    config = result.config
    return (
        f"Workload {config.get('workload')} on {config.get('model')}, seed {config.get('seed')}: "
        f"{result.query.summary.requests} requests in the query round. Measured {result.started_at}. "
        f"{result.query.pacing}"
    ).strip()


# -- tables: runs beside each other ------------------------------------------------------------------------------------


def comparison_tables(runs: Sequence[NamedRun], context: ReportContext) -> list[Table]:
    """Latency, CPU time, hit rates and answers, a row for each run; without tables that would be empty."""
    first, bound = runs[0], _named(runs, context.bound) or runs[0]
    speed = f"Speed-up, {TIMES} {first.title}"
    cpu: list[_Ratio] = [
        (f"warm-up\n/ {first.title}", lambda run: ratio(run, first, cpu_s(RoundName.WARM_UP))),
        (f"query\n/ {bound.title}", lambda run: ratio(run, bound, cpu_s(QUERY))),
    ]
    found = [
        _round_table(
            "Mean time to first token, in seconds", runs, ttft_s, 3, speed, [("query", _faster("ttft", first))]
        ),
        _round_table("Total latency, in seconds", runs, total_s, 2, speed, [("query", _faster("total", first))]),
        _round_table("CPU-seconds of the server's processes", runs, cpu_s, 1, "Ratio", cpu, _CPU_NOTE),
        _cache_table(runs, context),
    ]
    return [table for table in found if table is not None]


_Ratio = tuple[str, Callable[[NamedRun], Spread | None]]
_CPU_NOTE: Final = "User and system time, with what they still did in the background after the round."


def _faster(figure: str, first: NamedRun) -> Callable[[NamedRun], Spread | None]:
    return lambda run: getattr(speed_up(run, first), figure)


def _round_table(
    title: str,
    runs: Sequence[NamedRun],
    figure: Callable[[RoundName], Figure],
    digits: int,
    compared: str,
    ratios: Sequence[_Ratio],
    note: str = "",
) -> Table | None:
    """One figure of each timed round, and ratios of it where there are several runs; None where no run has it."""
    rounds = [name for name in TIMED_ROUNDS if any(over_repetitions(run, figure(name)) for run in runs)]
    if not rounds:
        return None
    groups = [Group("", [name.value for name in rounds])]
    if len(runs) > 1:
        groups.append(Group(compared, [heading for heading, _ in ratios]))
    rows = []
    for run in runs:
        cells = [
            _cell(over_repetitions(run, figure(name)), f"{{:,.{digits}f}}", "strong" if name is QUERY else "soft")
            for name in rounds
        ]
        if len(runs) > 1:
            cells += [_cell(of(run), f"{{:.2f}}{TIMES}", "strong") for _, of in ratios]
        rows.append((run.title, cells))
    return Table(title, groups, rows, "mode", f"{note}{_median_note(runs)}".strip(), is_keyed=True)


def _cache_table(runs: Sequence[NamedRun], context: ReportContext) -> Table | None:
    """Hit rate by tier and equal answers; None if neither is known."""
    reference = _named(runs, context.answer_reference)
    tiers = tiers_of(result.query for run in runs for result in run.results)
    groups = [Group("Hit rate", [plots.TIER_TITLES.get(tier, tier) for tier in tiers])] if tiers else []
    groups += [Group("Same answers", [context.label(reference)])] if reference else []
    rows = []
    for run in runs:
        cells = [_cell(over_repetitions(run, hit_rate(tier)), "{:.1%}") for tier in tiers]
        cells += [_answers_cell(run, reference)] if reference else []
        rows.append((run.title, cells))
    note = "Hit rate is a tier's hit tokens over all prompt tokens. " if tiers else ""
    note += f"Answers are compared byte for byte, request by request. {context.answer_note}" if reference else ""
    title = "Query round: " + " and ".join((*(["cache"] if tiers else []), *(["answers"] if reference else [])))
    return Table(title, groups, rows, "mode", note.strip(), is_keyed=True) if groups else None


def _answers_cell(run: NamedRun, reference: NamedRun) -> Cell:
    if run.name == reference.name:
        return Cell("itself", "soft")
    match = answers_as(run, reference)
    if match is None or not match.compared:
        return NO_VALUE
    return Cell(str(match), "good" if match.all_same else "poor")


def _cell(value: Spread | None, shown: str, style: str = "") -> Cell:
    """The median, with the range as a hint."""
    if value is None:
        return NO_VALUE
    hint = "" if value.min == value.max else f"{shown.format(value.min)} to {shown.format(value.max)}"
    return Cell(shown.format(value.median), style, hint)


def _median_note(runs: Sequence[NamedRun]) -> str:
    repetitions = max(len(run.results) for run in runs)
    return f" Medians of {repetitions} repetitions; point at one for its range." if repetitions > 1 else ""


# -- tables: every figure of a run -------------------------------------------------------------------------------------


def rounds_table(rounds: Sequence[RoundResult], title: str = "Results by round") -> Table:
    """All figures of each round, one column a round; without figures that no round has."""
    shown = [(label, [of(played) for played in rounds]) for label, of in _figures(rounds)]
    rows = [
        (label, [Cell(text, "bad" if label == "failed" and text != "0" else "") for text in texts])
        for label, texts in shown
        if any(text != "-" for text in texts)
    ]
    return Table(title, [Group("", [played.name.value for played in rounds])], rows)


def _figures(rounds: Sequence[RoundResult]) -> Iterator[tuple[str, Callable[[RoundResult], str]]]:
    """Each figure's name, and how it is shown of a round."""

    def number(of: Callable[[RoundSummary], float | None], shown: str) -> Callable[[RoundResult], str]:
        def text(played: RoundResult) -> str:
            value = of(played.summary)
            return "-" if value is None else shown.format(value)

        return text

    def quantile(field: str, name: str, factor: float = 1.0) -> Callable[[RoundResult], str]:
        def of(summary: RoundSummary) -> float | None:
            values = getattr(summary, field)
            return None if values is None else getattr(values, name) * factor

        return number(of, "{:.3f}")

    yield "requests", number(attrgetter("requests"), "{}")
    yield "failed", number(attrgetter("failed"), "{}")
    yield "due, not sent", number(lambda summary: summary.unsent or None, "{}")
    yield "total latency (s)", number(attrgetter("elapsed_s"), "{:.3f}")
    for name in ("mean", "p50", "p90", "p99"):
        yield f"TTFT {name} (s)", quantile("ttft_s", name)
    yield "prefill alone (tok/s)", _prefill_rate
    for name in ("mean", "p50", "p90", "p99"):
        yield f"TTFT from due {name} (s)", quantile("ttft_from_due_s", name)
    for name in ("mean", "p99"):
        yield f"request latency {name} (s)", quantile("request_latency_s", name)
    for label, field in (("inter-token", "inter_token_s"), ("TPOT", "tpot_s")):
        for name in ("mean", "p50", "p90", "p99"):
            yield f"{label} {name} (ms)", quantile(field, name, 1e3)
    yield "prompt tokens", number(attrgetter("prompt_tokens"), "{:,}")
    yield "input (tok/s)", number(attrgetter("input_throughput"), "{:,.0f}")
    yield "output (tok/s)", number(attrgetter("output_throughput"), "{:,.1f}")
    yield "right answers", number(attrgetter("quality"), "{:.1%}")
    yield "F1 of answers", number(attrgetter("f1"), "{:.3f}")
    yield "answers in tags", number(attrgetter("parse_rate"), "{:.1%}")
    yield "F1 of answers in tags", number(attrgetter("parsed_f1"), "{:.3f}")
    yield "goodput (requests/s)", number(attrgetter("goodput"), "{:.3f}")
    yield "CPU-seconds", number(attrgetter("cpu_s"), "{:.1f}")
    for tier in tiers_of(rounds):
        yield f"hit rate {tier}", number(lambda summary, tier=tier: summary.hit_rates.get(tier), "{:.1%}")  # type: ignore[misc]
    yield "cached (usage)", number(attrgetter("cached_rate"), "{:.1%}")


def _prefill_rate(played: RoundResult) -> str:
    """Prompt tokens computed per second of TTFT, of the round in which each prompt runs alone."""
    if played.name is not RoundName.WARM_UP:
        return "-"
    good = [record for record in played.records if record.successful]
    tokens, seconds = sum(r.num_input_tokens - (r.cached_tokens or 0) for r in good), sum(r.ttft for r in good)
    return f"{tokens / seconds:,.0f}" if tokens > 0 and seconds > 0 else "-"


def _rounds_of(run: NamedRun) -> str:
    number = len(run.results) > 1
    tables = (
        rounds_table(result.rounds, f"{run.title}, {n}" if number else run.title)
        for n, result in enumerate(run.results, 1)
    )
    return "".join(f"<h3>{escape(table.title)}</h3>{table.html()}" for table in tables)


# -- headline figures --------------------------------------------------------------------------------------------------


def cards(runs: Sequence[NamedRun], context: ReportContext) -> list[Card]:
    """The headline figures: a comparison with the first run where there is one."""
    if len(runs) == 1:
        return _single_cards(runs[0])
    run, first = _named(runs, context.headline) or runs[1], runs[0]
    against = f"on average, {run.title} against {first.title}"
    found = [
        *_ratio_card(
            "Time to first token",
            run,
            first,
            ttft_s(QUERY),
            ("faster", "slower"),
            f"s {against}{_questions(run, first)}",
        ),
        *_ratio_card("Total latency", run, first, total_s(QUERY), ("faster", "slower"), "s for the query round"),
        *_hit_card(run),
    ]
    bound = _named(runs, context.bound)
    over = ratio(run, bound, cpu_s(QUERY)) if bound else None
    detail = "CPU-seconds for the query round"
    detail += f"; {over.median:.2f}{TIMES} the {bound.title}" if over and bound else ""
    found += _ratio_card("CPU time", run, first, cpu_s(QUERY), ("less", "more"), detail)
    reference = _named(runs, context.answer_reference)
    match = answers_as(run, reference) if reference else None
    if reference and match:
        found.append(Card("Same answers", str(match), f"{run.title}, byte for byte {context.label(reference)}"))
    return found


def _ratio_card(
    label: str, run: NamedRun, first: NamedRun, figure: Figure, words: tuple[str, str], detail: str
) -> list[Card]:
    """How many times the first run's figure is the run's, or the other way round if that is more."""
    factor = ratio(first, run, figure)
    ours, theirs = over_repetitions(run, figure), over_repetitions(first, figure)
    if not (factor and factor.median and ours and theirs):
        return []
    times, unit = (factor.median, words[0]) if factor.median >= 1 else (1 / factor.median, words[1])
    shown = f"{theirs.median:.3g} to {ours.median:.3g} {detail}"
    if factor.min < factor.max:
        ends = sorted((factor.min, factor.max) if factor.median >= 1 else (1 / factor.min, 1 / factor.max))
        shown += f"; {ends[0]:.1f} to {ends[1]:.1f}{TIMES} over repetitions"
    return [Card(label, f"{times:.1f}{TIMES}", shown, unit)]


def _questions(run: NamedRun, first: NamedRun) -> str:
    """The interval of the ratio of times to first token over questions, where one repetition gives no range."""
    found = paired_ttft(first.results, run.results)
    if len(run.results) > 1 or found is None or not found.low or not found.high:
        return ""
    ends = sorted((found.low, found.high) if found.mean >= 1 else (1 / found.low, 1 / found.high))
    return f"; {ends[0]:.1f} to {ends[1]:.1f}{TIMES} (95 %, over questions)"


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
    known = {plots.TIER_TITLES.get(tier, tier): rate.median for tier, rate in rates.items() if rate}
    if known:
        detail = ", ".join(f"{title} {rate:.1%}" for title, rate in known.items())
        return [Card("Tokens not recomputed", f"{min(1.0, sum(known.values())):.1%}", detail)]
    cached = over_repetitions(run, lambda result: result.query.summary.cached_rate)
    return [Card("Tokens not recomputed", f"{cached.median:.1%}", "as the server's usage says")] if cached else []


# -- the rest of the page ----------------------------------------------------------------------------------------------


def _alarms(runs: Sequence[NamedRun], warnings: Sequence[str]) -> str:
    lines = [escape(warning) for warning in warnings]
    for run in runs:
        if run.failed:
            first = escape("; ".join(failures((r for result in run.results for r in result.rounds), limit=2)))
            lines.append(f"<strong>{escape(run.title)}: {run.failed} failed requests.</strong> {first}")
    return '<div class="alarm">' + "<br>".join(lines) + "</div>" if lines else ""


def _notes(runs: Sequence[NamedRun]) -> str:
    notes = [(run.title, run.note) for run in runs if run.note]
    return section("Modes", "", facts(notes)) if notes else ""


def _environment(runs: Sequence[NamedRun], command: str) -> Iterator[str]:
    """Machine, settings and the exact commands."""
    first = runs[0].results[0]
    commands = [("This report", command), *((run.title, run.command) for run in runs)]
    shown = "".join(
        f'<div class="soft">{escape(title)}</div><pre>{escape(text)}</pre>' for title, text in commands if text
    )
    yield section("Machine", f"Measured {first.started_at}.", facts(list(first.machine.items())))
    yield section("Commands", "" if shown else "Not recorded.", shown)
    yield folded("Workload settings", f"<pre>{escape(json.dumps(dict(first.config), indent=1))}</pre>")
