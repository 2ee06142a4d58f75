"""The tables of a report: results by mode, every figure by round, machine and commands."""

import json
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from hotspan.bench.compare import TIMES, NamedRun, match_answers, speed_up
from hotspan.bench.records import Quantiles, RoundName, RoundResult
from hotspan.bench.report_figures import TIER_TITLES, colour_of, match_colour
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
    rounds = _rounds_of(runs)
    compared = len(runs) > 1
    names = [name.value for name in rounds]
    groups = [Group("Mean TTFT (s)", names), Group("Total latency (s)", names)]
    groups += [Group("Speed-up, query round", ["TTFT", "total"])] if compared else []
    lines = []
    for run in runs:
        played = [run.result.round(name) for name in rounds]
        line = [
            [_cell(_number(r.summary.ttft_s.mean if r and r.summary.ttft_s else None), r) for r in played],
            [_cell(_number(r.summary.elapsed_s if r else None, 2), r) for r in played],
        ]
        if compared:
            faster = speed_up(run.result, runs[0].result)
            line.append([Cell(_times(faster.ttft), "strong"), Cell(_times(faster.total), "strong")])
        lines.append(line)
    note = "Total latency is the time that the whole round took."
    note += f" Speed-ups are against {escape(runs[0].title)}." if compared else ""
    return _section("Latency", note, _table(runs, groups, lines) + _notes(runs))


def cache_section(runs: Sequence[NamedRun], references: Sequence[str]) -> str:
    """Hit rate by tier, CPU-seconds by round and identical answers, a line for each run; "" if none is known."""
    rounds = _rounds_of(runs)
    tiers = tiers_of(run.result.query for run in runs)
    others = [run for name in references for run in runs if run.name == name]
    has_cpu = any(r.summary.cpu_s is not None for run in runs for r in run.result.rounds)
    groups = [Group("Hit rate, query round", [TIER_TITLES.get(t, t) for t in tiers])] if tiers else []
    groups += [Group("CPU-seconds of the server", [name.value for name in rounds])] if has_cpu else []
    groups += [Group("Same answers as", [other.title for other in others])] if others else []
    lines = []
    for run in runs:
        rates = run.result.query.summary.hit_rates
        line = [[Cell(f"{rates[t]:.1%}" if t in rates else "-") for t in tiers]] if tiers else []
        if has_cpu:
            played = [run.result.round(name) for name in rounds]
            line.append([_cell(_number(r.summary.cpu_s if r else None, 1), r) for r in played])
        if others:
            line.append([_match_cell(run, other) for other in others])
        lines.append(line)
    note = "Hit rate is a tier's hit tokens over all prompt tokens."
    note += " Answers are compared byte for byte, request by request, in the query round." if others else ""
    return _section("Cache, CPU and answers", note, _table(runs, groups, lines)) if groups else ""


def _match_cell(run: NamedRun, other: NamedRun) -> Cell:
    if run.name == other.name:
        return Cell("itself", "soft")
    match = match_answers(run.result, other.result)
    return Cell(str(match), match_colour(match))


def _rounds_of(runs: Sequence[NamedRun]) -> list[RoundName]:
    return [name for name in RoundName if any(run.result.round(name) for run in runs)]


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
            *("ITL mean (ms)", "p99 (ms)", "tok/s in", "tok/s out", "Prompt tokens", "Cached (usage)"),
        )
    )
    lines = "".join(_round_line(i, run.title, r) for i, run in enumerate(runs) for r in run.result.rounds)
    return (
        "<section><details><summary>Every round in figures</summary>"
        '<p class="note">Seconds unless said otherwise. ITL is the time between two pieces of an answer; '
        "cached tokens are those that the server's usage reports.</p>"
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
        *(quantile(s.inter_token_s, name, 1e3) for name in ("mean", "p99")),
        f"{s.input_throughput:,.0f}",
        f"{s.output_throughput:,.1f}",
        f"{s.prompt_tokens:,}",
        "-" if s.cached_rate is None else f"{s.cached_rate:.1%}",
    ]
    return f"<tr><td>{_dot(index)}{escape(title)}</td>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def environment_section(runs: Sequence[NamedRun], command: str) -> str:
    """Machine, settings and the exact commands."""
    facts = runs[0].result.machine
    machine = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts.items())
    commands = _command("This report", command) if command else ""
    commands += "".join(_command(run.title, run.command) for run in runs if run.command)
    settings = escape(json.dumps(dict(runs[0].result.config), indent=1))
    measured = f"Measured {escape(runs[0].result.started_at)}."
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


def _cell(text: str, result: RoundResult | None) -> Cell:
    query = result is not None and result.name is RoundName.QUERY
    return Cell(text, "strong" if query else "soft")


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}{TIMES}"
