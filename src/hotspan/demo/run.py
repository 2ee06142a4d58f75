"""The demo: the same questions about the same long texts, with and without hotspan, measured and shown."""

import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from rich.console import Console

from hotspan.bench.compare import NamedRun
from hotspan.bench.config import BenchConfig
from hotspan.bench.failures import failures
from hotspan.bench.report import ReportContext, comparison_tables, write_report
from hotspan.bench.runner import run_rounds
from hotspan.bench.terminal import TerminalProgress
from hotspan.bench.workloads.long_doc_qa import LongDocQaOptions
from hotspan.config.configuration import visible_gpus
from hotspan.config.environment import environment
from hotspan.core.addresses import free_port
from hotspan.core.aftermath import Aftermath
from hotspan.core.errors import ConfigError, EngineError
from hotspan.core.progress import waiting
from hotspan.demo.disturbed import Disturbance, disturbances
from hotspan.demo.fit import BUDGET_S, Costs, fit, largest, measure
from hotspan.demo.model import DemoModel, make_demo_model
from hotspan.demo.plan import BOUND, MODE_NAMES, DemoRequest, DemoSizes, EngineSettings, Mode, choose_modes, plan_modes
from hotspan.demo.results import DemoResult, compact_text
from hotspan.demo.server import ServerProcess, serve_command
from hotspan.demo.shown import ANSWER_TOKENS, Shown, ask, lines, page_section
from hotspan.demo.trained import CACHE, NAME, trained_model
from hotspan.plan.host import NativeType, native_type
from hotspan.plan.shape import ModelShape

REPORT_NAME: Final = "report.html"
RESULT_NAME: Final = "demo.json"

_REPEAT_BEFORE_S: Final = 330.0
"""A disturbed mode is played again in the first minutes only: the demo is to end in seven."""

_ANSWER_NOTE: Final = (
    "Asked again, one at a time: requests that run together are computed in other shapes, whose sums round "
    "otherwise, which shows at near-ties between two tokens."
)


def run_demo(request: DemoRequest, console: Console) -> DemoResult:
    """Run the modes one after the other, all of them in each repetition; write and print what they measured.

    Takes minutes. What is measured so far is on disk after each mode.
    Raises: ConfigError if the sizes can't work, EngineError with the end of its log if a server fails.
    """
    began_s = time.monotonic()
    request.output.mkdir(parents=True, exist_ok=True)
    request, model = _modelled(request, console)
    if not request.is_fitted and request.sizes.request_tokens > model.max_tokens:
        raise ConfigError(
            f"the demo model reads {model.max_tokens:,} tokens, a request may have {request.sizes.request_tokens:,}: "
            "lower --document-tokens"
        )
    native = served_type(request.dtype, environment())
    request = replace(request, dtype=native.dtype)
    console.print(f"The model is served in {native.dtype}: {native.why}.", style="dim")
    with Aftermath() as aftermath:
        if request.is_fitted:
            request = replace(request, sizes=_fitted(request, model, console, aftermath))
        console.print(request.sizes.describe(), style="dim")
        demo = _Demo(request, model, console, aftermath, began_s)
        for repetition in range(1, request.repetitions + 1):
            demo.repeat(repetition)
    _show(request, demo.result(), console)
    return demo.result()


def _modelled(request: DemoRequest, console: Console) -> tuple[DemoRequest, DemoModel]:
    """The model that was asked for; one that is made where the trained one can't be had."""
    if request.is_trained:
        try:
            with waiting(console, f"looking for {NAME} in {CACHE}, or fetching it (93 MB)"):
                return request, trained_model()
        except ConfigError as error:
            console.print(f"A model with random weights is made: {error}", style="yellow", markup=False)
    with waiting(console, "making the demo model"):
        return replace(request, model="made"), make_demo_model(request.output / "model", size=request.model_size)


def _fitted(request: DemoRequest, model: DemoModel, console: Console, aftermath: Aftermath) -> DemoSizes:
    """The sizes that this machine can afford, from a server that is started to measure its prefill rate."""
    title = "measuring the prefill rate"
    request = replace(request, sizes=largest(request.sizes, model.max_tokens))
    mode = plan_modes(request.sizes, model.kv_bytes_per_token, request.output)[0]
    began_s = time.monotonic()
    with _serving(request, model, mode, title, "server-measure.log", console, aftermath) as (server, _):
        start_s = time.monotonic() - began_s
        with waiting(console, title):
            samples = measure(server.url, request.sizes.document_tokens)
    costs, modes = Costs.of(start_s, samples), request.mode or MODE_NAMES
    sizes = fit(request.sizes, costs, modes, request.repetitions, model.max_tokens)
    last = samples[-1]
    console.print(
        f"Measured: {last.tokens / last.prefill_s:,.0f} tokens per second over {last.tokens:,} tokens; a server starts "
        f"in {start_s:.0f} s. Therefore documents of {sizes.document_tokens:,} tokens, for about "
        f"{BUDGET_S / 60:.0f} minutes in all.",
        style="dim",
    )
    return sizes


def served_type(given: str, surroundings: Mapping[str, str]) -> NativeType:
    """What the model is served in: as given, else what the GPU or the CPU computes natively."""
    if given:
        return NativeType(given, "as given")
    if visible_gpus(surroundings):
        return NativeType("bfloat16", "the GPU computes it natively")
    return native_type(surroundings)


@contextmanager
def _serving(
    request: DemoRequest, model: DemoModel, mode: Mode, title: str, log: str, console: Console, aftermath: Aftermath
) -> Iterator[tuple[ServerProcess, tuple[str, ...]]]:
    """A server of that mode that is ready, with its arguments."""
    port = request.port or free_port()
    engine = EngineSettings(
        max_model_len=request.sizes.request_tokens, threads=request.engine_threads, dtype=request.dtype
    )
    arguments = (*engine.arguments(port, mode.pool_blocks), *mode.arguments)
    command = serve_command(model.path, arguments)
    with ServerProcess(command, engine.environment(), port, request.output / log, aftermath) as server:
        with waiting(console, f"{title}: starting the server") as change:
            server.wait_until_ready(
                request.start_timeout_s, lambda waited, line: change(_waiting(title, waited, line, console))
            )
        yield server, arguments


@contextmanager
def _emptied(output: Path, aftermath: Aftermath) -> Iterator[Path]:
    """A directory for the disk tier that holds nothing at first and is gone afterwards."""
    disk = Path(tempfile.mkdtemp(prefix="kv-", dir=output))
    aftermath.remove(disk)
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
    aftermath: Aftermath
    began_s: float
    runs: dict[str, NamedRun] = field(default_factory=dict)
    serve: dict[str, list[str]] = field(default_factory=dict)
    shown: dict[str, Shown] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def repeat(self, number: int) -> None:
        """Play all modes once; then those once more that were disturbed, if there is time."""
        before = dict(self.runs)
        self._play_all(self.request.mode or MODE_NAMES, number, before)
        found = self._disturbances(number)
        if found and time.monotonic() - self.began_s < _REPEAT_BEFORE_S * self.request.repetitions:
            again = {each.mode for each in found}
            # Each needs the other: the disk's directory, which a restarted server finds.
            again |= {"disk", "restart"} & self.runs.keys() if again & {"disk", "restart"} else set()
            for each in found:
                self.console.print(f"Disturbed, and played again: {each.why}.", style="yellow", markup=False)
            self._play_all([name for name in MODE_NAMES if name in again], number, before)
            found = self._disturbances(number)
        self.warnings += [f"This machine had other work: {each.why}." for each in found]
        _write(self.request, self.result())

    def _play_all(self, names: Sequence[str], number: int, before: Mapping[str, NamedRun]) -> None:
        kv_bytes = ModelShape.from_config(self.model.path, dtype=self.request.dtype).kv_bytes_per_token
        with _emptied(self.request.output, self.aftermath) as disk:
            for mode in choose_modes(plan_modes(self.request.sizes, kv_bytes, disk), tuple(names)):
                self._play(mode, number, before.get(mode.name))
                _write(self.request, self.result())

    def _disturbances(self, number: int) -> list[Disturbance]:
        titles = {name: run.title for name, run in self.runs.items()}
        return disturbances({name: run.results[number - 1] for name, run in self.runs.items()}, titles)

    def _play(self, mode: Mode, repetition: int, before: NamedRun | None) -> None:
        """Start the mode's server, measure it and stop it; `before` are the repetitions before this one."""
        request, console = self.request, self.console
        repeated = request.repetitions > 1
        title = f"{mode.title} ({repetition}/{request.repetitions})" if repeated else mode.title
        log = f"server-{mode.name}{f'-{repetition}' if repeated else ''}.log"
        with _serving(request, self.model, mode, title, log, console, self.aftermath) as (server, arguments):
            # A restarted server has the document on disk only before the rounds. The others are asked behind them about
            # what they were given before; out of the pool of the one that has only that, the rounds would push it.
            is_restarted, is_pool = mode.name == "restart", mode.name == BOUND
            shown = None
            if request.is_trained and not is_pool:
                shown = self._ask(mode, title, server, ANSWER_TOKENS if is_restarted else 1)
            with TerminalProgress(console, title) as progress:
                result = run_rounds(_workload(request, mode, server), progress, request.command)
            for line in failures(result.rounds):
                console.print(line, style="red", markup=False)
            # A server that died under load shows as failed requests; say why.
            server.check_alive()
            if request.is_trained and not result.failed:
                if is_pool:
                    self._ask(mode, title, server, 1)
                if shown is None or not is_restarted:
                    shown = self._ask(mode, title, server, ANSWER_TOKENS)
                self.shown[mode.name] = shown
            with waiting(console, f"{title}: stopping the server"):
                server.stop()
        if result.query.summary.failed == result.query.summary.requests:
            raise EngineError(f"every request failed in mode {mode.name!r}; see {request.output / log}")
        self.serve.setdefault(mode.name, portable(arguments))
        self.runs[mode.name] = (
            replace(before, results=(*before.results, result))
            if before
            else NamedRun(mode.name, mode.title, (result,), server.command, mode.note)
        )

    def _ask(self, mode: Mode, title: str, server: ServerProcess, tokens: int) -> Shown:
        config, options = _workload(self.request, mode, server), _options(self.request)
        with waiting(self.console, f"{title}: one question, its answer in words"):
            return ask(config, options, mode.name, mode.title, is_computed=mode.name == "none", tokens=tokens)

    def result(self) -> DemoResult:
        """What is measured so far."""
        shown = [self.shown[name] for name in MODE_NAMES if name in self.shown]
        runs = [self.runs[name] for name in MODE_NAMES if name in self.runs]
        return DemoResult(
            request=self.request, model=self.model, runs=runs, serve=self.serve, shown=shown, warnings=self.warnings
        )


def portable(arguments: tuple[str, ...]) -> list[str]:
    """The server's arguments as they would be elsewhere: no port, and the name of the disk tier's directory only."""
    kept = list(arguments)
    at = kept.index("--port")
    del kept[at : at + 2]
    if "--disk" in kept:
        kept[kept.index("--disk") + 1] = "DIRECTORY"
    return ["hotspan", "serve", "MODEL", *kept]


def _waiting(title: str, waited_s: float, line: str, console: Console) -> str:
    said = f"{title}: starting the server ({waited_s:.0f} s)"
    if not console.is_terminal:
        return said
    # Log lines may hold what looks like markup.
    shown = line[: max(20, console.width - len(title) - 40)].replace("[", "\\[")
    return f"{said} [dim]{shown}[/dim]"


def _options(request: DemoRequest) -> LongDocQaOptions:
    sizes = request.sizes
    return LongDocQaOptions(
        document_length=sizes.document_tokens,
        query_per_document=sizes.queries_per_document,
        num_inflight_requests=sizes.in_flight,
        max_output_length=sizes.output_tokens,
        text="manual" if request.is_trained else "prose",
        num_documents=sizes.documents,
    )


def _workload(request: DemoRequest, mode: Mode, server: ServerProcess) -> BenchConfig:
    # Without ignore_eos, answers would differ in length; those of random weights would end at random.
    return BenchConfig(
        options=_options(request),
        engine_url=server.url,
        engine_pid=server.pid,
        seed=request.sizes.seed,
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
        opening=[page_section(demo.shown)],
        warnings=demo.warnings,
    )
    report = request.output / REPORT_NAME
    write_report(report, "Long texts, computed once", demo.runs, context)
    for line in lines(demo.shown):
        console.print(line, highlight=False, markup=False)
    for warning in demo.warnings:
        console.print(warning, style="yellow", markup=False)
    if request.repetitions > 1:
        console.print(f"Medians of {request.repetitions} repetitions.", style="dim")
    for table in comparison_tables(demo.runs, context):
        console.print(table.terminal())
        console.print()
    written = {"report": report, "result": request.output / RESULT_NAME, "figures": request.results}
    for what, path in written.items():
        if path:
            console.print(f"{what}: {path}", highlight=False, soft_wrap=True)
