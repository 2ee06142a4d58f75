"""`hotspan bench`: measure a server."""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from hotspan.bench.config import OPTIONS, BenchConfig, StorageBench, read_config_file, write_config_file
from hotspan.bench.failures import failures
from hotspan.bench.records import BenchResult
from hotspan.bench.workloads import WORKLOADS
from hotspan.cli.options import givens_of, runs, takes
from hotspan.cli.output import check_writable, command_line, explained, print_json, print_written, stdout_console
from hotspan.config.admin_token import AdminToken
from hotspan.config.environment import environment
from hotspan.config.kinds import COUNT
from hotspan.config.options import build, json_option, option, options_of
from hotspan.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(no_args_is_help=True, help="Measure servers, storage and memory.")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Output:
    """Where a run's settings come from, and what it writes where."""

    workload: str = option("", f"Workload to run. Required unless --config names one: {', '.join(WORKLOADS)}.")
    config: Path | None = option(None, "JSON file with settings. Flags override it.")
    export_config: Path | None = option(None, "Write the resolved settings to this JSON file and exit.")
    output: Path | None = option(
        None, "Directory for result files: CSV, summary and full result. Default: CSV to '.'.", also="--output-dir"
    )
    no_csv: bool = option(False, "Do not write a CSV file.")
    json: bool = json_option()
    report: Path | None = option(None, "Write a report to this HTML file.")
    repetitions: int = option(
        1,
        "Number of runs, for means with 95 % intervals. From the second on, each has a cache_salt of its own, and "
        "thus finds nothing of the earlier ones.",
        kind=COUNT,
    )
    fail_if: tuple[str, ...] = option(
        (),
        "Exit with status 1 if this holds, such as 'p99_ttft_ms > 800'. Names as in bench_summary.json. "
        "May be repeated.",
    )
    quiet: bool = option(False, "Do not show progress.", also="-q")
    no_interactive: bool = option(False, "Accepted for compatibility with LMCache; the command never prompts.")
    api_key: str = option("", "API key to send as a bearer token. Default: OPENAI_API_KEY.")
    admin: AdminToken = field(default_factory=AdminToken)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """How runs are compared."""

    title: str = option("Benchmark", "Title of the report.")
    ab: Path | None = option(None, "Result of `hotspan ab --output FILE`, for a section of the report.")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CompareOptions:
    """How two runs are compared, and how two servers are measured for it."""

    workload: str = option("", f"For servers: workload to run, one of {', '.join(WORKLOADS)}.")
    config: Path | None = option(None, "For servers: JSON file with settings. Flags override it.")
    repetitions: int = option(3, "For servers: number of runs of each, in turn: A, B, A, B.", kind=COUNT)
    fail_if: tuple[str, ...] = option(
        (),
        "Exit with status 1 if this holds for B, such as 'p99_ttft_ms > 800', or for B / A: 'p99_ttft_ms > 1.1x'. "
        "May be repeated.",
    )
    json: bool = json_option()
    output: Path | None = option(None, "Write the figures of both, and their ratios, to this JSON file.")
    report: Path | None = option(None, "Write a report to this HTML file.")
    api_key: str = option("", "For servers: API key to send as a bearer token. Default: OPENAI_API_KEY.")
    admin: AdminToken = field(default_factory=AdminToken)


_OF_ONE_SERVER = {"engine_url", "engine_pid"}
_COMPARE_FLAGS = (*options_of(CompareOptions), *(each for each in OPTIONS if each.name not in _OF_ONE_SERVER))


@app.command()
@takes((*options_of(Output), *OPTIONS))
def engine(context: typer.Context, **_flags: Any) -> None:
    """Run a workload against an OpenAI-compatible server.

    With --check N, N requests are sent again, one at a time, and their answers are compared with those that the server
    computes without a cache, or from the engine's own prefix cache. The server must support `cache_salt`, as vLLM and
    hotspan do. Exit status 1 means that a request or the check failed. --json also writes the files of --output, as
    LMCache's bench does.
    """
    from hotspan.bench.figures import Condition, broken

    with explained():
        given = {each.key: each.value for each in givens_of(context, (*options_of(Output), *OPTIONS))}
        output = build(Output, given)
        bench = _bench(given, output.config, output.api_key)
        if not bench.engine_url:
            raise ConfigError("no server to measure: pass --engine-url, such as --engine-url http://localhost:8080")
        bench = _administered(bench, output.admin)
        conditions = [Condition.parse(text) for text in output.fail_if]
        if output.export_config:
            _export(bench, output.export_config)
            return
        results = _run(bench, output)
    _end(results, broken(conditions, results), is_json=output.json)


@app.command()
@takes(_COMPARE_FLAGS)
def compare(
    context: typer.Context,
    a: Annotated[str, typer.Argument(help="Result file, directory of repetitions, or URL of a server. The baseline.")],
    b: Annotated[str, typer.Argument(help="The same of what is compared with it.")],
    **_flags: Any,
) -> None:
    """Compare two runs, or run a workload against two servers in turn, and say what differs.

    A difference is a ratio B / A whose 95 % interval leaves out 1. Exit status 1 means that a request, a check or a
    condition of --fail-if failed.
    """
    from hotspan.bench.compare import NamedRun
    from hotspan.bench.export import results_at
    from hotspan.bench.figures import Condition, broken, comparison_table, over, ratios
    from hotspan.bench.report import ReportContext, write_report

    with explained():
        given = {each.key: each.value for each in givens_of(context, _COMPARE_FLAGS)}
        options = build(CompareOptions, given)
        console = stdout_console(is_json=options.json)
        conditions = [Condition.parse(text, has_reference=True) for text in options.fail_if]
        are_servers = {each.startswith(("http://", "https://")) for each in (a, b)}
        if len(are_servers) == 2:
            raise ConfigError("give two servers or two results: a run of before can't take turns with a server")
        if are_servers == {True}:
            bench = _bench(given, options.config, options.api_key)
            if bench.to_flat().get("rag_output"):
                raise ConfigError("--rag-output is for `bench engine`, whose answers are one server's: leave it out")
            bench = replace(bench, engine_pid=0)  # a file's would be of one server
            sides = [_administered(replace(bench, engine_url=url), options.admin) for url in (a, b)]
            ours, theirs = _interleaved(sides[0], sides[1], options.repetitions, console)
        else:
            ours, theirs = results_at(Path(a)), results_at(Path(b))
            for name, found in ((a, ours), (b, theirs)):
                _check_answered(found, name, "nothing is compared")
        console.print(comparison_table(ours, theirs).terminal())
        figures = {"a": over(ours), "b": over(theirs), "ratios": ratios(ours, theirs)}
        named = {side: {name: each._asdict() for name, each in found.items()} for side, found in figures.items()}
        if options.json:
            print_json({"a_is": a, "b_is": b, **named})
        if options.output is not None:
            options.output.write_text(json.dumps({"a_is": a, "b_is": b, **named}, indent=2) + "\n")
            print_written(options.output, is_json=options.json)
        if options.report is not None:
            runs = [NamedRun(n, n, found, found[0].command) for n, found in (("A", ours), ("B", theirs))]
            write_report(options.report, f"{b} beside {a}", runs, ReportContext(answer_reference="A"))
            print_written(options.report, is_json=options.json)
    _end((*ours, *theirs), broken(conditions, theirs, ours), is_json=options.json)


def _bench(given: Mapping[str, Any], file: Path | None, api_key: str) -> BenchConfig:
    """The benchmark of the flags, over those of a file."""
    flat = {**(read_config_file(file) if file else {}), **given}
    return replace(BenchConfig.from_flat(flat), api_key=api_key or environment().get("OPENAI_API_KEY", ""))


def _administered(bench: BenchConfig, token: AdminToken) -> BenchConfig:
    """The benchmark with the admin token of its server, as far as one is known, for the page of metrics."""
    return replace(bench, admin_token=token.of(urlsplit(bench.base_url), environment()) or "")


def _check_answered(results: Iterable[BenchResult], server: str, therefore: str) -> None:
    """Exit with status 1, and say why, if a run has no answer at all: it measured nothing."""
    for result in results:
        if (asked := result.query.summary.requests) and result.query.summary.failed == asked:
            first = next(record.error for record in result.query.records if not record.successful)
            what = f"hotspan: all {asked:,} requests to {server} failed, {therefore}: {first}"
            typer.secho(what, fg=typer.colors.RED, err=True)
            raise typer.Exit(1)


def _end(results: Sequence[BenchResult], failures: Sequence[str], *, is_json: bool) -> None:
    """Exit status 1 if a request, a check or a condition failed."""
    for line in failures:
        typer.secho(line, fg=typer.colors.RED, err=is_json)
    if failures or any(each.failed or not (each.check is None or each.check.is_passed) for each in results):
        raise typer.Exit(1)


def _interleaved(
    a: BenchConfig, b: BenchConfig, repetitions: int, console: "Console"
) -> tuple[tuple[BenchResult, ...], tuple[BenchResult, ...]]:
    """The workload on both servers in turn; within a repetition both get the same requests."""
    from hotspan.bench.runner import repetition, run_rounds
    from hotspan.bench.terminal import TerminalProgress

    command = command_line(sys.argv[1:])
    found: tuple[list[BenchResult], list[BenchResult]] = ([], [])
    for number in range(repetitions):
        salt = repetition(a, number).salt
        for name, bench, results in (("A", a, found[0]), ("B", b, found[1])):
            with TerminalProgress(console, f"{name}, repetition {number + 1} of {repetitions}") as progress:
                results.append(run_rounds(replace(bench, salt=salt), progress, command))
            _check_answered(results[-1:], bench.engine_url, "nothing is compared")
    return tuple(found[0]), tuple(found[1])


def _export(config: BenchConfig, path: Path) -> None:
    from hotspan.bench.runner import resolve_now

    write_config_file(path, resolve_now(config))
    typer.echo(f"settings written to {path}")


def _run(config: BenchConfig, output: Output) -> tuple[BenchResult, ...]:
    from hotspan.bench.export import summary_of
    from hotspan.bench.figures import over, repetitions_table
    from hotspan.bench.report import rounds_table
    from hotspan.bench.runner import repetition, run_rounds
    from hotspan.bench.terminal import TerminalProgress

    console = stdout_console(is_json=output.json)
    command = command_line(sys.argv[1:])
    results = []
    for number in range(output.repetitions):
        bench = repetition(config, number)
        if output.quiet:
            results.append(run_rounds(bench, command=command))
        else:
            title = f"repetition {number + 1} of {output.repetitions}" if output.repetitions > 1 else ""
            with TerminalProgress(console, title) as progress:
                results.append(run_rounds(bench, progress, command))
        _check_answered(results[-1:], config.engine_url, "nothing is written")
        _show(results[-1], console)
    console.print(rounds_table(results[0].rounds).terminal())
    if len(results) > 1:
        console.print(repetitions_table(results).terminal())
    intervals = {name: each._asdict() for name, each in over(results).items()}
    more = {"repetitions": {"count": len(results), "intervals": intervals}} if len(results) > 1 else {}
    summary = summary_of(results[0], **more)
    if output.json:
        print_json(summary)
    for path in _write(tuple(results), summary, output):
        console.print(f"written: {path}", style="dim", highlight=False, soft_wrap=True)
    return tuple(results)


def _show(result: BenchResult, console: "Console") -> None:
    """What a reader of the figures has to know of one run."""
    if note := result.query.pacing:
        console.print(note, style="dim", highlight=False)
    if result.check is not None:
        style = "green" if result.check.is_passed else "red"
        console.print(str(result.check), style=style, markup=False, highlight=False, soft_wrap=True)
    for line in failures(result.rounds):
        console.print(line, style="red", markup=False)


def _write(results: tuple[BenchResult, ...], summary: dict[str, Any], output: Output) -> list[Path]:
    from hotspan.bench import export
    from hotspan.bench.compare import NamedRun
    from hotspan.bench.quality import quality_path, write_quality
    from hotspan.bench.report import ReportContext, write_report

    written, first, directory = [], results[0], output.output or Path(".")
    if not output.no_csv:
        written.append(directory / export.CSV_NAME)
        export.write_csv(written[-1], first.query)
    if output.json or output.output is not None:
        written.append(directory / export.SUMMARY_NAME)
        export.write_summary(written[-1], summary)
        for number, result in enumerate(results):
            written.append(export.result_path(directory, number))
            result.save(written[-1])
    if (path := quality_path(first, directory)) is not None:
        written.append(path)
        write_quality(path, first)
    if output.report:
        written.append(output.report)
        run = NamedRun("run", str(first.config["model"]), results, first.command)
        write_report(output.report, f"{first.config['workload']} on {first.config['model']}", [run], ReportContext())
    return written


@app.command()
@runs(ReportOptions)
def report(
    options: ReportOptions,
    output: Annotated[Path, typer.Argument(help="HTML file to write.")],
    results: Annotated[
        list[Path], typer.Argument(help="Result files of `bench engine --output DIR`. The first one is the baseline.")
    ],
) -> None:
    """Compare runs of the same workload in one HTML file."""
    from hotspan.bench.compare import NamedRun
    from hotspan.bench.report import ReportContext, write_report

    names = _names(results)
    loaded = [BenchResult.load(path) for path in results]
    runs = [NamedRun(name, name, (one,), one.command) for name, one in zip(names, loaded, strict=True)]
    more = _ab_sections(options.ab) if options.ab else ()
    context = ReportContext(answer_reference=names[0] if len(names) > 1 else "", sections=more)
    write_report(output, options.title, runs, context)
    print_written(output)


def _ab_sections(path: Path) -> tuple[str, ...]:
    from hotspan.ab.report import ab_sections
    from hotspan.ab.result import AbResult

    return tuple(ab_sections(AbResult.load(path)))


def _names(paths: list[Path]) -> list[str]:
    """A short name for each file: its own, its directory's where `--output` gave them all the same, or a number."""
    for names in ([p.stem for p in paths], [p.resolve().parent.name for p in paths]):
        if len(set(names)) == len(paths):
            return names
    return [f"run {i + 1}" for i in range(len(paths))]


@app.command()
@runs(StorageBench)
def storage(bench: StorageBench) -> None:
    """Compare copies with memcpy and the disk tier with fio, in one run."""
    from hotspan.bench.storage import measure, print_figures, write_figures

    if bench.output is not None:
        check_writable(bench.output)
    figures = measure(bench)
    print_figures(bench, figures)
    if bench.output is not None:
        write_figures(bench.output, bench, figures)
        print_written(bench.output)
