"""`hotspan bench`: measure a server."""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from hotspan.bench.config import OPTIONS, BenchConfig, read_config_file, write_config_file
from hotspan.bench.records import BenchResult, failures
from hotspan.bench.workloads import WORKLOADS
from hotspan.cli.options import givens_of, takes
from hotspan.cli.output import explained, stdout_console
from hotspan.core.errors import ConfigError

app = typer.Typer(no_args_is_help=True, help="Measure servers, storage and memory.")


@dataclass(frozen=True, slots=True)
class Output:
    """What a run writes, and where."""

    directory: Path
    csv: bool
    json: bool
    report: Path | None
    quiet: bool


@app.command()
@takes(OPTIONS)
def engine(
    context: typer.Context,
    workload: Annotated[
        str | None,
        typer.Option(
            help=f"Workload to run. Required unless --config names one: {', '.join(WORKLOADS)}.", show_default=False
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="JSON file with settings. Flags override it.")] = None,
    export_config: Annotated[
        Path | None, typer.Option(help="Write the resolved settings to this JSON file and exit.")
    ] = None,
    output_dir: Annotated[Path, typer.Option(help="Directory for result files.")] = Path("."),
    no_csv: Annotated[bool, typer.Option("--no-csv", help="Do not write a CSV file.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Write the summary and the full result as JSON files.")] = False,
    report: Annotated[Path | None, typer.Option(help="Write a report to this HTML file.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not show progress.")] = False,
    no_interactive: Annotated[
        bool,
        typer.Option("--no-interactive", help="Accepted for compatibility with LMCache; the command never prompts."),
    ] = False,
    api_key: Annotated[
        str, typer.Option(envvar="OPENAI_API_KEY", help="API key to send as a bearer token.", show_default=False)
    ] = "",
    **_flags: Any,
) -> None:
    """Run a workload against an OpenAI-compatible server.

    With --check N, N requests are sent again, one at a time, and their answers are compared with answers that the
    server computes without a cache. The server must support `cache_salt`, as vLLM and hotspan do. Exit status 1 means
    that a request or the check failed.
    """
    output = Output(output_dir, not no_csv, json, report, quiet)
    with explained():
        flat = read_config_file(config) if config else {}
        flat |= {} if workload is None else {"workload": workload}
        flat |= {given.key: given.value for given in givens_of(context, OPTIONS)}
        bench = BenchConfig.from_flat(flat, api_key=api_key)
        if not bench.engine_url:
            raise ConfigError("no server to measure: pass --engine-url, such as --engine-url http://localhost:8080")
        if export_config:
            _export(bench, export_config)
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
    command = _command_line(sys.argv[1:])
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


def _command_line(arguments: list[str]) -> str:
    """The command as it goes into result files, without the API key."""
    shown = list(arguments)
    for i, argument in enumerate(arguments):
        if argument.startswith("--api-key="):
            shown[i] = "--api-key=..."
        elif argument == "--api-key" and i + 1 < len(arguments):
            shown[i + 1] = "..."
    return shlex.join(["hotspan", *shown])


def _write(result: BenchResult, output: Output) -> list[Path]:
    from hotspan.bench import export
    from hotspan.bench.compare import NamedRun
    from hotspan.bench.report import ReportContext, write_report

    written = []
    if output.csv:
        written.append(output.directory / export.CSV_NAME)
        export.write_csv(written[-1], result.query)
    if output.json:
        written.append(output.directory / export.SUMMARY_NAME)
        export.write_summary(written[-1], result)
        written.append(output.directory / export.RESULT_NAME)
        result.save(written[-1])
    if output.report:
        written.append(output.report)
        run = NamedRun("run", str(result.config["model"]), (result,), result.command)
        write_report(output.report, f"{result.config['workload']} on {result.config['model']}", [run], ReportContext())
    return written


@app.command()
def report(
    output: Annotated[Path, typer.Argument(help="HTML file to write.")],
    results: Annotated[
        list[Path], typer.Argument(help="Result files of `bench engine --json`. The first one is the baseline.")
    ],
    title: Annotated[str, typer.Option(help="Title of the report.")] = "Benchmark",
) -> None:
    """Compare runs of the same workload in one HTML file."""
    from hotspan.bench.compare import NamedRun
    from hotspan.bench.report import ReportContext, write_report

    names = _names(results)
    with explained():
        loaded = [BenchResult.load(path) for path in results]
        runs = [NamedRun(name, name, (one,), one.command) for name, one in zip(names, loaded, strict=True)]
        write_report(output, title, runs, ReportContext(answer_reference=names[0] if len(names) > 1 else ""))
    typer.echo(f"written: {output}")


def _names(paths: list[Path]) -> list[str]:
    """A short name for each file: its own, its directory's where `--json` gave them all the same, or a number."""
    for names in ([p.stem for p in paths], [p.resolve().parent.name for p in paths]):
        if len(set(names)) == len(paths):
            return names
    return [f"run {i + 1}" for i in range(len(paths))]


@app.command()
def storage(
    directory: Annotated[
        Path, typer.Option(help="Directory to measure. A temporary directory is created in it.")
    ] = Path("."),
    size_gib: Annotated[float, typer.Option(min=0.01, help="Size of the slab and of fio's file, in GiB.")] = 1.0,
    chunk_mib: Annotated[float, typer.Option(min=0.02, help="Chunk size, in MiB.")] = 14.0,
    threads: Annotated[int, typer.Option(min=1, help="Number of I/O threads and of fio jobs.")] = 4,
    repetitions: Annotated[int, typer.Option(min=1, help="Number of rounds. Medians are reported.")] = 3,
    output: Annotated[Path | None, typer.Option(help="Write results and machine data to this JSON file.")] = None,
    require_fio: Annotated[
        bool,
        typer.Option(
            "--require-fio", help="Fail with exit status 2 if fio is not installed. Default: measure without fio."
        ),
    ] = False,
) -> None:
    """Compare copies with memcpy and the disk tier with fio, in one run."""
    from hotspan.bench.storage import StorageBench, print_figures, write_figures

    with explained():
        bench = StorageBench(directory, size_gib, chunk_mib, threads, repetitions, require_fio)
        figures = bench.run()
    print_figures(bench, figures)
    if output is not None:
        write_figures(output, bench, figures)
        typer.echo(f"written: {output}")
