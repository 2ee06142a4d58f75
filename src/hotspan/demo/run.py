"""The demo: the same questions about the same long texts, with and without hotspan, measured and shown."""

import json
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rich.console import Console

from hotspan.bench.compare import NamedRun
from hotspan.bench.config import BenchConfig
from hotspan.bench.records import BenchResult
from hotspan.bench.report import ReportContext, write_report
from hotspan.bench.runner import run_rounds
from hotspan.bench.terminal import TerminalProgress, failures
from hotspan.bench.workloads.long_doc_qa import LongDocQaOptions
from hotspan.core.errors import ConfigError, EngineError
from hotspan.demo.model import DemoModel, make_demo_model
from hotspan.demo.plan import DemoSizes, EngineSettings, Mode, choose_modes, plan_modes
from hotspan.demo.results import DemoResult, compact_text
from hotspan.demo.server import ServerProcess, free_port, serve_command
from hotspan.demo.tables import cache_table, earlier_rounds_table, latency_table

REPORT_NAME: Final = "report.html"
RESULT_NAME: Final = "demo.json"

_ANSWER_NOTE: Final = (
    "Asked again, one at a time: requests that run together are computed in other shapes, whose bf16 sums round "
    "otherwise, and random weights make near-ties."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRequest:
    """What to run and where; `mode_names` empty means all, `port` 0 any free one.

    `results` is where the compact figures go besides, if anywhere.
    """

    output: Path
    sizes: DemoSizes
    threads: int
    model_size: str = "demo"
    mode_names: tuple[str, ...] = ()
    repetitions: int = 1
    results: Path | None = None
    port: int = 0
    start_timeout_s: float = 600.0
    command: str = "hotspan demo"

    def __post_init__(self) -> None:
        if self.repetitions < 1:
            raise ConfigError(f"--repetitions must be at least 1, not {self.repetitions}")


def run_demo(request: DemoRequest, console: Console) -> DemoResult:
    """Run the modes one after the other, all of them in each repetition; write and print what they measured.

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
    demo = _Demo(request, model, console)
    for repetition in range(1, request.repetitions + 1):
        with _emptied(request.output) as disk:
            modes = plan_modes(request.sizes, model.kv_bytes_per_token, disk)
            for mode in choose_modes(modes, request.mode_names):
                demo.play(mode, repetition)
                _write(request, demo.result())
    _show(request, demo.result(), console)
    return demo.result()


@contextmanager
def _emptied(output: Path) -> Iterator[Path]:
    """A directory for the disk tier that holds nothing at first and is gone afterwards."""
    disk = Path(tempfile.mkdtemp(prefix="kv-", dir=output))
    try:
        yield disk
    finally:
        shutil.rmtree(disk, ignore_errors=True)


@dataclass(slots=True)
class _Demo:
    """The modes as they are played, repetition by repetition."""

    request: DemoRequest
    model: DemoModel
    console: Console
    modes: dict[str, Mode] = field(default_factory=dict)
    commands: dict[str, str] = field(default_factory=dict)
    serve: dict[str, list[str]] = field(default_factory=dict)
    results: defaultdict[str, list[BenchResult]] = field(default_factory=lambda: defaultdict(list))

    def play(self, mode: Mode, repetition: int) -> None:
        """Start the mode's server, measure it and stop it."""
        request, console = self.request, self.console
        repeated = request.repetitions > 1
        title = f"{mode.title} ({repetition}/{request.repetitions})" if repeated else mode.title
        log = request.output / f"server-{mode.name}{f'-{repetition}' if repeated else ''}.log"
        port = request.port or free_port()
        engine = EngineSettings(max_model_len=request.sizes.request_tokens, threads=request.threads)
        arguments = (*engine.arguments(port, mode.pool_blocks), *mode.arguments)
        with ServerProcess(serve_command(self.model.path, arguments), engine.environment(), port, log) as server:
            with console.status(f"{title}: starting the server") as status:
                server.wait_until_ready(
                    request.start_timeout_s,
                    lambda waited, line: status.update(_waiting(title, waited, line, console.width)),
                )
            with TerminalProgress(console, title) as progress:
                result = run_rounds(_workload(request.sizes, mode, server), progress, request.command)
            for line in failures(result.rounds):
                console.print(line, style="red", markup=False)
            # A server that died under load shows as failed requests; say why.
            server.check_alive()
            with console.status(f"{title}: stopping the server"):
                server.stop()
        if result.query.summary.failed == result.query.summary.requests:
            raise EngineError(f"every request failed in mode {mode.name!r}; see {log}")
        self.modes[mode.name] = mode
        self.commands.setdefault(mode.name, server.command)
        self.serve.setdefault(mode.name, _portable(arguments))
        self.results[mode.name].append(result)

    def result(self) -> DemoResult:
        """What is measured so far."""
        runs = [
            NamedRun(name, mode.title, tuple(self.results[name]), self.commands[name], mode.note)
            for name, mode in self.modes.items()
        ]
        return DemoResult(
            command=self.request.command,
            sizes=self.request.sizes,
            threads=self.request.threads,
            repetitions=self.request.repetitions,
            model=self.model,
            runs=runs,
            serve=self.serve,
        )


def _portable(arguments: tuple[str, ...]) -> list[str]:
    """The server's arguments as they would be elsewhere: no port, and the name of the disk tier's directory only."""
    kept = list(arguments)
    at = kept.index("--port")
    del kept[at : at + 2]
    if "--disk" in kept:
        kept[kept.index("--disk") + 1] = "DIRECTORY"
    return ["hotspan", "serve", "MODEL", *kept]


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


def _write(request: DemoRequest, demo: DemoResult) -> None:
    (request.output / RESULT_NAME).write_text(json.dumps(demo.to_json(), indent=1) + "\n")
    if request.results:
        request.results.parent.mkdir(parents=True, exist_ok=True)
        request.results.write_text(compact_text(demo.to_compact_json()) + "\n")


def _show(request: DemoRequest, demo: DemoResult, console: Console) -> None:
    names = [run.name for run in demo.runs]
    bound = demo.bound.name if demo.bound else ""
    context = ReportContext(
        lead=request.sizes.describe(),
        command=request.command,
        headline="ram" if "ram" in names else "",
        bound=bound,
        answer_reference=bound,
        answer_label="as the engine's own hit",
        answer_note=_ANSWER_NOTE,
    )
    report = request.output / REPORT_NAME
    write_report(report, "Long texts, computed once", demo.runs, context)
    if demo.repetitions > 1:
        console.print(f"Medians of {demo.repetitions} repetitions.", style="dim")
    for table in (latency_table(demo), earlier_rounds_table(demo.runs), cache_table(demo)):
        console.print(table)
        console.print()
    written = {"report": report, "result": request.output / RESULT_NAME, "figures": request.results}
    for what, path in written.items():
        if path:
            console.print(f"{what}: {path}", highlight=False, soft_wrap=True)
