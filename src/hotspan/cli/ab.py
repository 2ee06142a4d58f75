"""`hotspan ab`: whether one server answers as another one does, or as it did itself."""

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from hotspan.ab.settings import AbSettings
from hotspan.cli.options import runs
from hotspan.cli.output import check_writable, command_line, print_json, print_written, stdout_console
from hotspan.config.environment import environment

if TYPE_CHECKING:
    from rich.console import Console

    from hotspan.ab.result import AbResult, SameResult
    from hotspan.core.progress import Progress


@runs(AbSettings)
def ab(settings: AbSettings) -> None:
    """Compare the answers of two servers: the same prompts, interleaved, with a verdict for CI.

    Sides: --a and --b (running servers), --a-serve and --b-serve (started here), or --router and --canary (a split of
    `hotspan route`). --same checks that one server repeats its answers. Exit status: 0 the drift is within --max-drift,
    1 it is above, 2 can't tell, or an error. docs/ab.md describes the design and every figure.
    """
    from hotspan.ab.report import verdict_line, verdict_style, write_ab_report
    from hotspan.ab.result import save

    key = settings.api_key or environment().get("OPENAI_API_KEY", "")
    settings = replace(settings, api_key=key, command=command_line(sys.argv[1:]))
    for path in (settings.output, settings.report, settings.review):
        if path is not None:
            check_writable(path)
    console = stdout_console(is_json=settings.json)
    result = _run_same(settings, console) if settings.is_same else _run_ab(settings, console)
    for line in result.failures:
        console.print(line, style="red", markup=False, highlight=False, soft_wrap=True)
    console.print(verdict_line(result), style=verdict_style(result), markup=False, highlight=False, soft_wrap=True)
    if settings.json:
        print_json(result.to_json())
    if settings.output is not None:
        save(settings.output, result)
    if settings.report is not None:
        write_ab_report(settings.report, result)
    for path in (settings.output, settings.report, settings.review):
        if path is not None:
            print_written(path, is_json=settings.json)
    raise typer.Exit(result.verdict.status)


def _run_ab(settings: AbSettings, console: "Console") -> "AbResult":
    from hotspan.ab.report import ab_tables
    from hotspan.ab.run import run_ab

    result = run_ab(settings, console, _Shown(console, is_quiet=settings.quiet))
    for table in ab_tables(result):
        console.print(table.terminal())
    return result


def _run_same(settings: AbSettings, console: "Console") -> "SameResult":
    from hotspan.ab.report import same_table
    from hotspan.ab.same import run_same

    result = run_same(settings, console, _Shown(console, is_quiet=settings.quiet))
    console.print(same_table(result).terminal())
    return result


class _Shown:
    """A run in the terminal, as `asking.Watcher`: a bar while requests are sent."""

    def __init__(self, console: "Console", *, is_quiet: bool) -> None:
        self._console = console
        self._is_quiet = is_quiet
        self._bar: Progress | None = None

    def begins(self, what: str, requests: int) -> None:
        if self._is_quiet:
            return
        if self._bar is None:
            from hotspan.core.progress import Progress

            self._bar = Progress(what, unit="requests", console=self._console)
            self._bar.__enter__()
        self._bar.begin(what, requests)

    def answered(self) -> None:
        if self._bar is not None:
            self._bar.advance()

    def ends(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.__exit__(None, None, None)

    def says(self, line: str) -> None:
        self._console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)
