"""`hotspan bench`: measure a server."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from hotspan.bench.config import OPTIONS, BenchConfig, StorageBench, read_config_file, write_config_file
from hotspan.bench.records import BenchResult, failures
from hotspan.bench.workloads import WORKLOADS
from hotspan.cli.options import givens_of, runs, takes
from hotspan.cli.output import command_line, explained, print_written, stdout_console
from hotspan.config.environment import environment
from hotspan.config.options import build, option, options_of
from hotspan.core.errors import ConfigError

app = typer.Typer(no_args_is_help=True, help="Measure servers, storage and memory.")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Output:
    """Where a run's settings come from, and what it writes where."""

    workload: str = option("", f"Workload to run. Required unless --config names one: {', '.join(WORKLOADS)}.")
    config: Path | None = option(None, "JSON file with settings. Flags override it.")
    export_config: Path | None = option(None, "Write the resolved settings to this JSON file and exit.")
    output_dir: Path = option(Path("."), "Directory for result files.")
    no_csv: bool = option(False, "Do not write a CSV file.")
    json: bool = option(False, "Write the summary and the full result as JSON files.")
    report: Path | None = option(None, "Write a report to this HTML file.")
    quiet: bool = option(False, "Do not show progress.", also="-q")
    no_interactive: bool = option(False, "Accepted for compatibility with LMCache; the command never prompts.")
    api_key: str = option("", "API key to send as a bearer token. Default: OPENAI_API_KEY.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """How runs are compared."""

    title: str = option("Benchmark", "Title of the report.")
    ab: Path | None = option(None, "Result of `hotspan ab --json`, for a section of the report.")


@app.command()
@takes((*options_of(Output), *OPTIONS))
def engine(context: typer.Context, **_flags: Any) -> None:
    """Run a workload against an OpenAI-compatible server.

    With --check N, N requests are sent again, one at a time, and their answers are compared with answers that the
    server computes without a cache. The server must support `cache_salt`, as vLLM and hotspan do. Exit status 1 means
    that a request or the check failed.
    """
    with explained():
        given = {each.key: each.value for each in givens_of(context, (*options_of(Output), *OPTIONS))}
        output = build(Output, given)
        flat = (read_config_file(output.config) if output.config else {}) | given
        api_key = output.api_key or environment().get("OPENAI_API_KEY", "")
        bench = replace(BenchConfig.from_flat(flat), api_key=api_key)
        if not bench.engine_url:
            raise ConfigError("no server to measure: pass --engine-url, such as --engine-url http://localhost:8080")
        if output.export_config:
            _export(bench, output.export_config)
            return
        result = _run(bench, output)
    if result.failed or not (result.check is None or result.check.is_passed):
        raise typer.Exit(1)


def _export(config: BenchConfig, path: Path) -> None:
    from hotspan.bench.runner import resolve_now

    write_config_file(path, resolve_now(config))
    typer.echo(f"settings written to {path}")


def _run(config: BenchConfig, output: Output) -> BenchResult:
    from hotspan.bench.report import rounds_table
    from hotspan.bench.runner import run_rounds
    from hotspan.bench.terminal import TerminalProgress

    console = stdout_console()
    command = command_line(sys.argv[1:])
    if output.quiet:
        result = run_rounds(config, command=command)
    else:
        with TerminalProgress(console) as progress:
            result = run_rounds(config, progress, command)
    console.print(rounds_table(result.rounds).terminal())
    if note := result.query.pacing:
        console.print(note, style="dim", highlight=False)
    if result.check is not None:
        style = "green" if result.check.is_passed else "red"
        console.print(str(result.check), style=style, markup=False, highlight=False, soft_wrap=True)
    for line in failures(result.rounds):
        console.print(line, style="red", markup=False)
    for path in _write(result, output):
        console.print(f"written: {path}", style="dim", highlight=False, soft_wrap=True)
    return result


def _write(result: BenchResult, output: Output) -> list[Path]:
    from hotspan.bench import export
    from hotspan.bench.compare import NamedRun
    from hotspan.bench.report import ReportContext, write_report

    written = []
    if not output.no_csv:
        written.append(output.output_dir / export.CSV_NAME)
        export.write_csv(written[-1], result.query)
    if output.json:
        written.append(output.output_dir / export.SUMMARY_NAME)
        export.write_summary(written[-1], result)
        written.append(output.output_dir / export.RESULT_NAME)
        result.save(written[-1])
    if output.report:
        written.append(output.report)
        run = NamedRun("run", str(result.config["model"]), (result,), result.command)
        write_report(output.report, f"{result.config['workload']} on {result.config['model']}", [run], ReportContext())
    return written


@app.command()
@runs(ReportOptions)
def report(
    options: ReportOptions,
    output: Annotated[Path, typer.Argument(help="HTML file to write.")],
    results: Annotated[
        list[Path], typer.Argument(help="Result files of `bench engine --json`. The first one is the baseline.")
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
    """A short name for each file: its own, its directory's where `--json` gave them all the same, or a number."""
    for names in ([p.stem for p in paths], [p.resolve().parent.name for p in paths]):
        if len(set(names)) == len(paths):
            return names
    return [f"run {i + 1}" for i in range(len(paths))]


@app.command()
@runs(StorageBench)
def storage(bench: StorageBench) -> None:
    """Compare copies with memcpy and the disk tier with fio, in one run."""
    from hotspan.bench.storage import measure, print_figures, write_figures

    figures = measure(bench)
    print_figures(bench, figures)
    if bench.output is not None:
        write_figures(bench.output, bench, figures)
        print_written(bench.output)
