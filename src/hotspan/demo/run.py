"""The demo: the same questions about the same long texts, with and without hotspan, measured and shown."""

import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from hotspan.bench.compare import TIMES, NamedRun, match_answers, speed_up
from hotspan.bench.config import BenchConfig
from hotspan.bench.records import RoundName
from hotspan.bench.report import ReportContext, write_report
from hotspan.bench.runner import run_rounds
from hotspan.bench.terminal import TerminalProgress, failures, tiers_of
from hotspan.bench.workloads.long_doc_qa import LongDocQaOptions
from hotspan.core.errors import ConfigError, EngineError
from hotspan.demo.model import make_demo_model
from hotspan.demo.plan import ANSWER_REFERENCES, DemoSizes, EngineSettings, Mode, choose_modes, plan_modes
from hotspan.demo.server import ServerProcess, free_port, serve_command

REPORT_NAME: Final = "report.html"
RESULT_NAME: Final = "demo.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRequest:
    """What to run and where; `mode_names` empty means all, `port` 0 any free one."""

    output: Path
    sizes: DemoSizes
    threads: int
    model_size: str = "demo"
    mode_names: tuple[str, ...] = ()
    port: int = 0
    start_timeout_s: float = 600.0
    command: str = "hotspan demo"


def run_demo(request: DemoRequest, console: Console) -> list[NamedRun]:
    """Run the modes one after the other; write and print what they measured.

    Takes minutes. What is measured so far is on disk after each mode.
    Raises: ConfigError if the sizes can't work, EngineError with the end of its log if a server fails.
    """
    request.output.mkdir(parents=True, exist_ok=True)
    with console.status("making the demo model"):
        model = make_demo_model(request.output / "model", size=request.model_size)
    if request.sizes.request_tokens > model.max_tokens:
        raise ConfigError(
            f"the demo model reads {model.max_tokens:,} tokens, a request may have {request.sizes.request_tokens:,}: "
            "lower --document-tokens"
        )
    console.print(request.sizes.describe(), style="dim")
    engine = EngineSettings(max_model_len=request.sizes.request_tokens, threads=request.threads)
    disk = Path(tempfile.mkdtemp(prefix="kv-", dir=request.output))
    runs: list[NamedRun] = []
    try:
        for mode in choose_modes(plan_modes(request.sizes, model.kv_bytes_per_token, disk), request.mode_names):
            runs.append(_run_mode(mode, request, model.path, engine, console))
            _write_result(request.output / RESULT_NAME, request, runs)
    finally:
        shutil.rmtree(disk, ignore_errors=True)
    _show(runs, request, console)
    return runs


def _run_mode(mode: Mode, request: DemoRequest, model: Path, engine: EngineSettings, console: Console) -> NamedRun:
    port = request.port or free_port()
    command = serve_command(model, (*engine.arguments(port, mode.pool_blocks), *mode.arguments))
    log = request.output / f"server-{mode.name}.log"
    with ServerProcess(command, engine.environment(), port, log) as server:
        with console.status(f"{mode.title}: starting the server") as status:
            server.wait_until_ready(
                request.start_timeout_s,
                lambda waited, line: status.update(_waiting(mode.title, waited, line, console.width)),
            )
        config = _workload(request.sizes, mode, server)
        with TerminalProgress(console, mode.title) as progress:
            result = run_rounds(config, progress, request.command)
        for line in failures(result.rounds):
            console.print(line, style="red", markup=False)
        # A server that died under load shows as failed requests; say why.
        server.check_alive()
        with console.status(f"{mode.title}: stopping the server"):
            server.stop()
    if result.query.summary.failed == result.query.summary.requests:
        raise EngineError(f"every request failed in mode {mode.name!r}; see {log}")
    return NamedRun(mode.name, mode.title, result, server.command, mode.note)


def _waiting(title: str, waited_s: float, line: str, width: int) -> str:
    # Log lines may hold what looks like markup.
    shown = line[: max(20, width - len(title) - 40)].replace("[", "\\[")
    return f"{title}: starting the server ({waited_s:.0f} s) [dim]{shown}[/dim]"


def _workload(sizes: DemoSizes, mode: Mode, server: ServerProcess) -> BenchConfig:
    options = LongDocQaOptions(
        document_length=sizes.document_tokens,
        query_per_document=sizes.queries_per_document,
        num_inflight_requests=sizes.in_flight,
        max_output_length=sizes.output_tokens,
        text="prose",
        num_documents=sizes.documents,
    )
    # The model's weights are random: without ignore_eos, answers would end at random and differ in length.
    return BenchConfig(
        options=options,
        engine_url=server.url,
        engine_pid=server.pid,
        seed=sizes.seed,
        ignore_eos=True,
        rounds=mode.rounds,
    )


def _write_result(path: Path, request: DemoRequest, runs: Sequence[NamedRun]) -> None:
    value: dict[str, Any] = {
        "command": request.command,
        "sizes": asdict(request.sizes),
        "threads": request.threads,
        "modes": [
            {
                "name": run.name,
                "title": run.title,
                "note": run.note,
                "server": run.command,
                "speed_up": asdict(speed_up(run.result, runs[0].result)),
                "same_answers": {
                    other.name: asdict(match_answers(run.result, other.result)) for other in _references(runs)
                },
                "result": run.result.to_json(),
            }
            for run in runs
        ],
    }
    path.write_text(json.dumps(value, indent=1) + "\n")


def _references(runs: Sequence[NamedRun]) -> list[NamedRun]:
    return [run for name in ANSWER_REFERENCES for run in runs if run.name == name]


def _show(runs: Sequence[NamedRun], request: DemoRequest, console: Console) -> None:
    names = [run.name for run in runs]
    context = ReportContext(
        lead=request.sizes.describe(),
        command=request.command,
        headline="ram" if "ram" in names else "",
        answer_references=tuple(run.name for run in _references(runs)),
    )
    report = request.output / REPORT_NAME
    write_report(report, "Long texts, computed once", runs, context)
    console.print(latency_table(runs))
    console.print(cache_table(runs))
    console.print(f"report: {report}", highlight=False, soft_wrap=True)
    console.print(f"result: {request.output / RESULT_NAME}", highlight=False, soft_wrap=True)


def latency_table(runs: Sequence[NamedRun]) -> Table:
    """Mean TTFT and total latency by round, and the speed-up of the query round over the first mode."""
    rounds = [name for name in RoundName if any(run.result.round(name) for run in runs)]
    table = Table(title="Latency in seconds: mean TTFT, and total of the round", title_justify="left")
    table.add_column("mode")
    for name in rounds:
        table.add_column(f"TTFT\n{name}", justify="right")
    for name in rounds:
        table.add_column(f"total\n{name}", justify="right")
    table.add_column("speed-up\nTTFT", justify="right")
    table.add_column("speed-up\ntotal", justify="right")
    for run in runs:
        summaries = [found.summary if (found := run.result.round(name)) else None for name in rounds]
        faster = speed_up(run.result, runs[0].result)
        table.add_row(
            run.title,
            *(_number(s.ttft_s.mean if s and s.ttft_s else None, 3) for s in summaries),
            *(_number(s.elapsed_s if s else None, 2) for s in summaries),
            *(_number(factor, 2, TIMES) for factor in (faster.ttft, faster.total)),
        )
    return table


def cache_table(runs: Sequence[NamedRun]) -> Table:
    """Hit rate by tier and CPU-seconds of the query round, and how many answers are the references'."""
    tiers = tiers_of(run.result.query for run in runs)
    table = Table(title="Query round: hit rate by tier, CPU-seconds, identical answers", title_justify="left")
    table.add_column("mode")
    for tier in tiers:
        table.add_column(f"hit rate\n{tier}", justify="right")
    table.add_column("CPU-\nseconds", justify="right")
    references = _references(runs)
    for other in references:
        table.add_column(f"answers as\n{other.title}", justify="right")
    for run in runs:
        summary = run.result.query.summary
        rates = [summary.hit_rates.get(tier) for tier in tiers]
        table.add_row(
            run.title,
            *(_number(None if rate is None else rate * 100, 1, "%") for rate in rates),
            _number(summary.cpu_s, 1),
            *(str(match_answers(run.result, other.result)) for other in references),
        )
    return table


def _number(value: float | None, digits: int, unit: str = "") -> str:
    return "-" if value is None else f"{value:,.{digits}f}{unit}"
