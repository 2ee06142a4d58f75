"""A run in the terminal: live progress, and the table at its end."""

import sys
from collections.abc import Iterable
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from hotspan.bench.records import Loop, Quantiles, RequestRecord, RoundName, RoundResult
from hotspan.core.progress import Lines

_WIDTH_OF_FILES: Final = 100
_SHOWN: Final = ("mean", "p50", "p90", "p99")


def stdout_console() -> Console:
    """A console as wide as the terminal, or of 100 columns where stdout is a file or a pipe."""
    return Console(width=None if sys.stdout.isatty() else _WIDTH_OF_FILES)


class TerminalProgress:
    """A bar for each round; in a log, a line every ten seconds too. Use it as a context manager.

    It implements `runner.Progress`.
    """

    def __init__(self, console: Console, title: str = "") -> None:
        self._title = f"{title}: " if title else ""
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[note]}"),
            console=console,
        )
        self._lines = None if console.is_terminal else Lines(console, self._line)
        self._ttfts: list[float] = []
        self._failed = 0

    def __enter__(self) -> Self:
        self._bars.start()
        if self._lines is not None:
            self._lines.__enter__()
        self._current = self._bars.add_task(self._title + "connecting", total=None, note="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lines is not None:
            self._lines.__exit__(kind, error, trace)
        self._bars.stop()

    def preparing(self, what: str) -> None:
        self._bars.update(self._current, description=self._title + what)

    def round_started(self, name: RoundName, expected: int) -> None:
        self._ttfts, self._failed = [], 0
        # The line that said what was being prepared becomes the first round's.
        if self._bars.tasks[-1].total is None:
            self._bars.reset(self._current, total=expected, description=self._title + name.value)
        else:
            self._current = self._bars.add_task(self._title + name.value, total=expected, note="")

    def request_finished(self, name: RoundName, record: RequestRecord) -> None:
        if record.successful:
            self._ttfts.append(record.ttft)
        else:
            self._failed += 1
        mean = f"mean TTFT {sum(self._ttfts) / len(self._ttfts):.3f} s" if self._ttfts else ""
        failed = f"  {self._failed} failed" if self._failed else ""
        self._bars.update(self._current, advance=1, note=mean + failed)

    def round_finished(self, result: RoundResult) -> None:
        self._bars.stop_task(self._current)

    def _line(self) -> str:
        task = self._bars.tasks[self._current]
        count = "" if task.total is None else f" {task.completed:.0f} of {task.total:.0f}"
        note = f", {task.fields['note']}" if task.fields["note"] else ""
        return f"{task.description}{count}, {task.elapsed or 0:.0f} s{note}"


def rounds_table(rounds: Iterable[RoundResult]) -> Table:
    """The figures of each round, one column a round."""
    rounds = tuple(rounds)
    table = Table(title="Results by round", title_justify="left")
    table.add_column("")
    for result in rounds:
        table.add_column(result.name.value, justify="right")

    def row(label: str, values: Iterable[str]) -> None:
        cells = list(values)
        if any(cell != "-" for cell in cells):
            table.add_row(label, *cells)

    row("requests", (f"{r.summary.requests}" for r in rounds))
    row("failed", (f"[red]{r.summary.failed}[/red]" if r.summary.failed else "0" for r in rounds))
    row("due, not sent", (f"{r.summary.unsent}" if r.summary.unsent else "-" for r in rounds))
    row("total latency (s)", (f"{r.summary.elapsed_s:.3f}" for r in rounds))
    for name in _SHOWN:
        row(f"TTFT {name} (s)", (_cell(r.summary.ttft_s, name) for r in rounds))
    row("prefill alone (tok/s)", (_prefill_rate(r) for r in rounds))
    for name in _SHOWN:
        row(f"TTFT from due {name} (s)", (_cell(r.summary.ttft_from_due_s, name) for r in rounds))
    row("request latency mean (s)", (_cell(r.summary.request_latency_s, "mean") for r in rounds))
    for name in _SHOWN:
        row(f"inter-token {name} (ms)", (_cell(r.summary.inter_token_s, name, 1e3) for r in rounds))
    for name in _SHOWN:
        row(f"TPOT {name} (ms)", (_cell(r.summary.tpot_s, name, 1e3) for r in rounds))
    row("input (tok/s)", (f"{r.summary.input_throughput:,.0f}" for r in rounds))
    row("output (tok/s)", (f"{r.summary.output_throughput:,.1f}" for r in rounds))
    row("goodput (requests/s)", (_number(r.summary.goodput) for r in rounds))
    row("CPU-seconds", ("-" if r.summary.cpu_s is None else f"{r.summary.cpu_s:.1f}" for r in rounds))
    for tier in tiers_of(rounds):
        row(f"hit rate {tier}", (_percent(r.summary.hit_rates.get(tier)) for r in rounds))
    row("cached (usage)", (_percent(r.summary.cached_rate) for r in rounds))
    return table


def _prefill_rate(result: RoundResult) -> str:
    """Prompt tokens computed per second of TTFT, of the round in which each prompt runs alone."""
    if result.name is not RoundName.WARM_UP:
        return "-"
    good = [record for record in result.records if record.successful]
    tokens, seconds = sum(r.num_input_tokens - (r.cached_tokens or 0) for r in good), sum(r.ttft for r in good)
    return f"{tokens / seconds:,.0f}" if tokens > 0 and seconds > 0 else "-"


def pacing(query: RoundResult) -> str:
    """What kind of loop sent the round's requests, and how far it fell behind; "" where no times were named."""
    late = query.summary.late_s
    if late is None:
        return ""
    behind = f"Requests were sent {late.p50:.3f} s (p50) and {late.p99:.3f} s (p99) after they were due"
    behind += f", and {query.summary.unsent} that were due were not sent at all." if query.summary.unsent else "."
    if query.loop is Loop.OPEN:
        return f"Open loop: a busy session holds back its own turns only. {behind}"
    return (
        f"Closed loop: a busy session holds back all turns after its own. {behind} TTFT leaves that wait out "
        "(coordinated omission); TTFT from due has it, of the turns that were sent."
    )


def failures(rounds: Iterable[RoundResult], limit: int = 5) -> list[str]:
    """One line for each of the first failed requests."""
    lines = [f"{record.request_id}: {record.error}" for r in rounds for record in r.records if not record.successful]
    return lines[:limit] + ([f"... and {len(lines) - limit} more"] if len(lines) > limit else [])


def tiers_of(rounds: Iterable[RoundResult]) -> list[str]:
    """The tiers that any round names, the nearest to the engine first.

    Every engine names "external", which is a tier only where something came from it.
    """
    order = ("gpu", "ram", "disk", "l2", "external")
    rates = [item for r in rounds for item in r.summary.hit_rates.items()]
    found = {tier for tier, rate in rates if tier != "external" or rate > 0}
    return sorted(found, key=lambda tier: (order.index(tier) if tier in order else len(order), tier))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _cell(values: Quantiles | None, name: str, factor: float = 1.0) -> str:
    return "-" if values is None else f"{getattr(values, name) * factor:.3f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
