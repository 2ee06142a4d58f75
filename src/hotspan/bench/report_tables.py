"""The tables of a report: latency, CPU time, cache and answers by run, every figure by round, machine and commands."""

import json
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

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
from hotspan.bench.records import TIMED_ROUNDS, Quantiles, RoundName, RoundResult
from hotspan.bench.report_figures import TIER_TITLES, colour_of
from hotspan.bench.terminal import tiers_of


class Cell(NamedTuple):
    """A cell of a table: HTML, and the names of its styles."""

    html: str
    style: str = ""


class Group(NamedTuple):
    """Columns under one heading."""

    title: str
    columns: Sequence[str]


def latency_section(runs: Sequence[NamedRun]) -> str:
    """TTFT and total latency by round with the speed-up of the query round, a line for each run."""
    rounds = _timed_rounds(runs)
    compared = len(runs) > 1
    names = [name.value for name in rounds]
    groups = [Group("Mean TTFT (s)", names), Group("Total latency (s)", names)]
    groups += [Group("Speed-up, query round", ["TTFT", "total"])] if compared else []
    lines = []
    for run in runs:
        line = [
            [_round_cell(over_repetitions(run, ttft_s(name)), name, 3) for name in rounds],
            [_round_cell(over_repetitions(run, total_s(name)), name, 2) for name in rounds],
        ]
        if compared:
            faster = speed_up(run, runs[0])
            line.append([_ratio_cell(faster.ttft, "strong"), _ratio_cell(faster.total, "strong")])
        lines.append(line)
    note = "Total latency is the time that the whole round took."
    note += f" Speed-ups are against {escape(runs[0].title)}." if compared else ""
    return _section("Latency", note + _median_note(runs), _table(runs, groups, lines) + _notes(runs))


def cpu_section(runs: Sequence[NamedRun], bound: NamedRun | None) -> str:
    """CPU-seconds by round and what they cost against the first run and the bound; "" where none were measured."""
    rounds = [name for name in _timed_rounds(runs) if any(over_repetitions(run, cpu_s(name)) for run in runs)]
    if not rounds:
        return ""
    first, last = runs[0], bound or runs[0]
    compared = len(runs) > 1
    groups = [Group("CPU-seconds of the server", [name.value for name in rounds])]
    ratios = [f"warm-up, against {first.title}", f"query, against {last.title}"]
    groups += [Group("Ratio of CPU-seconds", ratios)] if compared else []
    lines = []
    for run in runs:
        line = [[_round_cell(over_repetitions(run, cpu_s(name)), name, 1) for name in rounds]]
        if compared:
            pairs = ((first, RoundName.WARM_UP), (last, RoundName.QUERY))
            line.append([_ratio_cell(ratio(run, other, cpu_s(name)), "strong") for other, name in pairs])
        lines.append(line)
    note = "User and system time of the server's processes, with what they still did in the background"
    note += " after the round. The ratio of the warm-up round is what caching adds to new texts" if compared else ""
    return _section("CPU time", note + "." + _median_note(runs), _table(runs, groups, lines))


def cache_section(runs: Sequence[NamedRun], reference: NamedRun | None, label: str, why: str) -> str:
    """Hit rate by tier and identical answers, a line for each run; "" if neither is known.

    `label` heads the column of answers as the reference's, and `why` says what comparing them is worth.
    """
    tiers = tiers_of(result.query for run in runs for result in run.results)
    groups = [Group("Hit rate, query round", [TIER_TITLES.get(t, t) for t in tiers])] if tiers else []
    groups += [Group("Same answers", [label])] if reference else []
    lines = []
    for run in runs:
        line = [[_percent_cell(over_repetitions(run, hit_rate(tier))) for tier in tiers]] if tiers else []
        if reference:
            line.append([_answers_cell(run, reference)])
        lines.append(line)
    note = "Hit rate is a tier's hit tokens over all prompt tokens." if tiers else ""
    note += f" Answers are compared byte for byte, request by request.<br>{escape(why)}" if reference else ""
    title = "Cache and answers" if tiers and reference else "Cache" if tiers else "Answers"
    return _section(title, note, _table(runs, groups, lines)) if groups else ""


def _answers_cell(run: NamedRun, reference: NamedRun) -> Cell:
    if run.name == reference.name:
        return Cell("itself", "soft")
    match = answers_as(run, reference)
    if match is None or not match.compared:
        return Cell("-", "soft")
    return Cell(str(match), "good" if match.all_same else "poor")


def _timed_rounds(runs: Sequence[NamedRun]) -> list[RoundName]:
    return [name for name in TIMED_ROUNDS if any(result.round(name) for run in runs for result in run.results)]


def _median_note(runs: Sequence[NamedRun]) -> str:
    repetitions = max(len(run.results) for run in runs)
    return f" Medians of {repetitions} repetitions; point at one for its range." if repetitions > 1 else ""


def _section(title: str, note: str, body: str) -> str:
    return f'<section><h2>{escape(title)}</h2><p class="note">{note}</p>{body}</section>'


def _table(runs: Sequence[NamedRun], groups: Sequence[Group], lines: Sequence[Sequence[Sequence[Cell]]]) -> str:
    """A line for each run and a block of cells for each group."""
    over = "".join(f'<th class="begin" colspan="{len(g.columns)}">{escape(g.title)}</th>' for g in groups)
    under = "".join(_block([Cell(escape(column)) for column in g.columns], "th") for g in groups)
    rows = "".join(
        f"<tr><td>{_dot(i)}{escape(run.title)}</td>{''.join(map(_block, line))}</tr>"
        for i, (run, line) in enumerate(zip(runs, lines, strict=True))
    )
    return (
        f'<div class="scroll"><table><thead><tr class="groups"><th></th>{over}</tr>'
        f"<tr><th>Mode</th>{under}</tr></thead>"
        f"<tbody>{rows}</tbody></table></div>"
    )


def _dot(index: int) -> str:
    return f'<span class="dot" style="background:{colour_of(index)}"></span>'


def rounds_section(runs: Sequence[NamedRun]) -> str:
    """Every figure of every round, folded away."""
    head = "".join(
        f"<th>{cell}</th>"
        for cell in (
            *("Mode", "Round", "Requests", "Failed", "TTFT p50", "p90", "p99", "Latency mean", "p99"),
            *("From due p50", "p99", "ITL mean (ms)", "p50", "p90", "p99", "TPOT p50 (ms)", "p90", "p99"),
            *("tok/s in", "tok/s out", "Good/s", "Prompt tokens", "Cached (usage)"),
        )
    )
    lines = "".join(
        _round_line(i, run.title + (f", {number}" if len(run.results) > 1 else ""), played)
        for i, run in enumerate(runs)
        for number, result in enumerate(run.results, start=1)
        for played in result.rounds
    )
    return (
        "<section><details><summary>Every round in figures</summary>"
        '<p class="note">Seconds unless said otherwise. "From due" is TTFT with the wait for being sent. ITL is the '
        "time between two pieces of an answer, TPOT the mean over its tokens; good are the requests within the "
        "objective; cached tokens are those that the server's usage reports.</p>"
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div>"
        "</details></section>"
    )


def _round_line(index: int, title: str, result: RoundResult) -> str:
    s = result.summary

    def quantile(values: Quantiles | None, name: str, factor: float = 1.0) -> str:
        return _number(getattr(values, name) * factor if values else None)

    cells = [
        result.name.value,
        str(s.requests),
        f'<span class="bad">{s.failed}</span>' if s.failed else "0",
        *(quantile(s.ttft_s, name) for name in ("p50", "p90", "p99")),
        *(quantile(s.request_latency_s, name) for name in ("mean", "p99")),
        *(quantile(s.ttft_from_due_s, name) for name in ("p50", "p99")),
        *(quantile(s.inter_token_s, name, 1e3) for name in ("mean", "p50", "p90", "p99")),
        *(quantile(s.tpot_s, name, 1e3) for name in ("p50", "p90", "p99")),
        f"{s.input_throughput:,.0f}",
        f"{s.output_throughput:,.1f}",
        _number(s.goodput),
        f"{s.prompt_tokens:,}",
        "-" if s.cached_rate is None else f"{s.cached_rate:.1%}",
    ]
    return f"<tr><td>{_dot(index)}{escape(title)}</td>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def environment_section(runs: Sequence[NamedRun], command: str) -> str:
    """Machine, settings and the exact commands."""
    first = runs[0].results[0]
    facts = first.machine
    machine = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts.items())
    commands = _command("This report", command) if command else ""
    commands += "".join(_command(run.title, run.command) for run in runs if run.command)
    settings = escape(json.dumps(dict(first.config), indent=1))
    measured = f"Measured {escape(first.started_at)}."
    return (
        f'<section><h2>Machine</h2><p class="note">{measured}</p><dl>{machine}</dl></section>'
        f"<section><h2>Commands</h2>{commands or '<p class=note>Not recorded.</p>'}"
        f'<details><summary style="font-size:15px">Workload settings</summary><pre>{settings}</pre></details></section>'
    )


def _command(title: str, command: str) -> str:
    return f'<div class="soft">{escape(title)}</div><pre>{escape(command)}</pre>'


def _notes(runs: Sequence[NamedRun]) -> str:
    notes = "".join(f"<dt>{escape(run.title)}</dt><dd>{escape(run.note)}</dd>" for run in runs if run.note)
    return f'<dl style="margin-top:14px">{notes}</dl>' if notes else ""


def _block(cells: Sequence[Cell], tag: str = "td") -> str:
    """Cells that belong together, the first with a line on its left."""
    styles = [f"{cell.style} begin".strip() if i == 0 else cell.style for i, cell in enumerate(cells)]
    return "".join(
        f'<{tag} class="{style}">{cell.html}</{tag}>' if style else f"<{tag}>{cell.html}</{tag}>"
        for cell, style in zip(cells, styles, strict=True)
    )


def _round_cell(value: Spread | None, name: RoundName, digits: int) -> Cell:
    style = "strong" if name is RoundName.QUERY else "soft"
    return _spread_cell(value, lambda number: f"{number:,.{digits}f}", style)


def _ratio_cell(value: Spread | None, style: str = "") -> Cell:
    return _spread_cell(value, lambda number: f"{number:.2f}{TIMES}", style)


def _percent_cell(value: Spread | None) -> Cell:
    return _spread_cell(value, lambda number: f"{number:.1%}", "")


def _spread_cell(value: Spread | None, shown: Callable[[float], str], style: str) -> Cell:
    """The median, with the range as what a pointer over it shows."""
    if value is None:
        return Cell("-", "soft")
    if value.min == value.max:
        return Cell(shown(value.median), style)
    between = f"{shown(value.min)} to {shown(value.max)}"
    return Cell(f'<span title="{between}">{shown(value.median)}</span>', style)


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
