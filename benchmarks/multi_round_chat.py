"""What an L2 is worth to conversations that RAM can't hold: RAM alone against RAM and L2, the same turns, in turn.

usage: python -m benchmarks.multi_round_chat --output benchmarks/results/multi-round-chat.json [--repetitions 3]

Each repetition serves the demo's model twice, the second first in every other one: with a RAM tier for a fraction of
the sessions, and with that and an L2 that starts empty (`--l2 daemon`, our daemon, or `--l2 redis`, a Redis server).
Every session is sent once to fill what there is; then they come back in turn, faster than the machine can compute
them anew. The engine's own pool holds six: as many as decode while the next one's prompt is computed, so that both
sides are as busy as a server of many sessions is. Ratios are taken within a repetition; the median of them is held
against the goal.
"""

import argparse
import contextlib
import math
import shlex
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from hotspan.bench.compare import Figure, NamedRun, Spread, over_repetitions, ratio
from hotspan.bench.config import BenchConfig
from hotspan.bench.failures import failures
from hotspan.bench.records import BenchResult, Quantiles, RoundSummary
from hotspan.bench.runner import run_rounds
from hotspan.bench.workloads.multi_round_chat import MultiRoundChatOptions
from hotspan.core.addresses import free_port
from hotspan.core.aftermath import Aftermath
from hotspan.core.errors import ConfigError, EngineError, HotspanError
from hotspan.demo.model import DemoModel, make_demo_model
from hotspan.demo.plan import BLOCK_TOKENS, GIB, EngineSettings, gib, usable_threads
from hotspan.demo.results import compact_text
from hotspan.demo.run import portable
from hotspan.demo.server import ServerProcess, serve_command

MODES: Final = {"ram": "RAM only", "l2": "RAM + L2"}
START_S: Final = 600.0
L2_START_S: Final = 30.0

# A message's role and the marks around it in the demo model's chat template, with room to spare.
_MESSAGE_TOKENS: Final = 16
# An answer of random tokens is more of them once it is text again: in 300 of 48 tokens at most 67.
_SAID_AGAIN: Final = 1.5
# What L2 keeps beside the KV, and turns that are told apart by their last chunk only.
_L2_ROOM: Final = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSizes:
    """The sessions, and how many of them the engine's own pool and the RAM tier hold."""

    sessions: int = 20
    shared_prompt_tokens: int = 1024
    history_tokens: int = 6144
    input_tokens: int = 50
    output_tokens: int = 48
    qps: float = 1.0
    requests: int = 60
    pool_sessions: float = 6.0
    ram_sessions: float = 7.0
    loop: str = "closed"
    seed: int = 42

    def __post_init__(self) -> None:
        if not 1 <= self.pool_sessions <= self.ram_sessions <= self.sessions / 2:
            raise ConfigError(
                f"pool ({self.pool_sessions:g} sessions), RAM ({self.ram_sessions:g}) and all ({self.sessions}) must "
                "each hold more than the one before, and RAM at most half of all: there is nothing to measure else"
            )

    @property
    def request_tokens(self) -> int:
        """The most tokens that a turn may have with all before it and its answer, in whole blocks."""
        turns = math.ceil(self.requests / self.sessions)
        # The marks of three messages, and the assistant's own words in the last of them.
        opening = self.shared_prompt_tokens + self.history_tokens + 6 * _MESSAGE_TOKENS
        tokens = opening + turns * (self.input_tokens + _SAID_AGAIN * self.output_tokens + 2 * _MESSAGE_TOKENS)
        return math.ceil(tokens / BLOCK_TOKENS) * BLOCK_TOKENS

    @property
    def pool_blocks(self) -> int:
        return math.ceil(self.pool_sessions * self.request_tokens / BLOCK_TOKENS)

    def ram_gib(self, kv_bytes_per_token: int) -> str:
        return gib(self.ram_sessions * self.request_tokens * kv_bytes_per_token)

    def l2_gib(self, kv_bytes_per_token: int) -> str:
        """Room for every session with all its turns."""
        return gib(_L2_ROOM * self.sessions * self.request_tokens * kv_bytes_per_token)

    @property
    def options(self) -> MultiRoundChatOptions:
        """The workload: as many turns for both modes, however long they take."""
        return MultiRoundChatOptions(
            shared_prompt_length=self.shared_prompt_tokens,
            chat_history_length=self.history_tokens,
            user_input_length=self.input_tokens,
            output_length=self.output_tokens,
            qps=self.qps,
            loop=self.loop,  # type: ignore[arg-type]  # checked there
            text="prose",
            num_sessions=self.sessions,
            num_requests=self.requests,
        )


@dataclass(frozen=True, slots=True)
class L2:
    """An L2 that can be started: its command, the port it answers on, and what a server is told about it."""

    command: tuple[str, ...]
    port: int
    serve: tuple[str, ...]


def plan_l2(kind: str, size_gib: str, shared_memory_name: str) -> L2:
    """Our daemon, or a Redis server that writes nothing to disk, on a free port.

    Raises: ConfigError if there is no Redis server on this machine.
    """
    port = free_port()
    if kind == "daemon":
        flags = ("--host", "127.0.0.1", "--port", str(port), "--shared-memory-name", shared_memory_name)
        command = (sys.executable, "-m", "hotspan", "daemon", *flags, "--size-gib", size_gib)
        told = ("--l2", f"sagemaker-hyperpod://127.0.0.1:{port}", "--l2-option")
        return L2(command, port, (*told, f"shared_memory_name={shared_memory_name}"))
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None:
        raise ConfigError("there is no redis-server or valkey-server here: install one, or use --l2 daemon")
    limits = ("--maxmemory", str(math.ceil(float(size_gib) * GIB)), "--maxmemory-policy", "allkeys-lru")
    bare = ("--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no")
    return L2((binary, *bare, *limits), port, ("--l2", f"redis://127.0.0.1:{port}"))


@contextlib.contextmanager
def started(l2: L2, log: Path) -> Iterator[None]:
    """The L2 as a process of ours, empty, for as long as the block runs.

    Raises: EngineError if it ends, or nobody answers on its port within 30 s.
    """
    with Aftermath() as aftermath, ServerProcess(l2.command, {}, l2.port, log, aftermath) as process:
        deadline = time.monotonic() + L2_START_S
        while not _accepts(l2.port):
            process.check_alive()
            if time.monotonic() > deadline:
                raise EngineError(f"nobody answered on port {l2.port} in {L2_START_S:.0f} s; see {log}")
            time.sleep(0.05)
        yield
        process.check_alive()


def _accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all runs share."""

    sizes: ChatSizes
    model: DemoModel
    l2: str
    shared_memory_name: str
    work: Path
    threads: int

    @property
    def engine(self) -> EngineSettings:
        return EngineSettings(max_model_len=self.sizes.request_tokens, threads=self.threads)

    def arguments(self, port: int, l2: tuple[str, ...] = ()) -> tuple[str, ...]:
        """The server's options; the two modes differ in those that tell it of the L2."""
        engine = self.engine.arguments(port, self.sizes.pool_blocks)
        return (*engine, "--ram-gib", self.sizes.ram_gib(self.model.kv_bytes_per_token), *l2)

    def play(self, mode: str, repetition: int, command: str) -> BenchResult:
        """Start one mode's server, and its L2 before it, measure and stop both."""
        name = f"{mode}-{repetition}"
        with contextlib.ExitStack() as stack:
            told: tuple[str, ...] = ()
            if mode == "l2":
                l2 = plan_l2(self.l2, self.sizes.l2_gib(self.model.kv_bytes_per_token), self.shared_memory_name)
                stack.enter_context(started(l2, self.work / f"l2-{repetition}.log"))
                told = l2.serve
            port = free_port()
            served = serve_command(self.model.path, self.arguments(port, told))
            log, aftermath = self.work / f"server-{name}.log", stack.enter_context(Aftermath())
            server = ServerProcess(served, self.engine.environment(), port, log, aftermath)
            stack.enter_context(server).wait_until_ready(START_S, lambda waited, line: None)
            result = run_rounds(self._workload(server), command=command)
            for line in failures(result.rounds):
                print(f"  {line}", flush=True)
            server.check_alive()
        return result

    def _workload(self, server: ServerProcess) -> BenchConfig:
        # The model's weights are random: without ignore_eos, answers would end at random and differ in length.
        return BenchConfig(
            options=self.sizes.options,
            engine_url=server.url,
            engine_pid=server.pid,
            seed=self.sizes.seed,
            ignore_eos=True,
        )


def order_of(repetition: int) -> tuple[str, ...]:
    """The modes of a repetition, which begin in turn, so that a machine that slows down favours neither."""
    return tuple(MODES) if repetition % 2 else tuple(reversed(MODES))


@dataclass(frozen=True, slots=True)
class Verdict:
    """A ratio that was asked for, its bound, and what was found."""

    title: str
    bound: str
    found: Spread | None
    is_met: bool

    def __str__(self) -> str:
        found = self.found
        shown = f"{found.median:.3f} [{found.min:.3f}, {found.max:.3f}]" if found else "not measured"
        return f"{self.title:42} {shown:28} {self.bound:16} {'met' if self.is_met else 'NOT MET'}"


def _quantile(figure: str, which: str) -> Figure:
    def found(result: BenchResult) -> float | None:
        values: Quantiles | None = getattr(result.query.summary, figure)
        return getattr(values, which) if values else None

    return found


def of_query(figure: Callable[[RoundSummary], float | None]) -> Figure:
    """A figure of the query round: `of_query(lambda summary: summary.output_throughput)`."""
    return lambda result: figure(result.query.summary)


THROUGHPUT: Final = of_query(lambda summary: summary.output_throughput)


def success(result: BenchResult) -> float:
    """Share of all requests that were answered, in every round."""
    return 1 - result.failed / sum(played.summary.requests for played in result.rounds)


def verdicts(ram: NamedRun, l2: NamedRun) -> list[Verdict]:
    """The ratios of the goals, within each repetition, and the success rate of all runs."""
    slower, faster = "RAM + L2 / RAM only", "RAM only / RAM + L2"
    ttft_p50 = ratio(l2, ram, _quantile("ttft_s", "p50"))
    found = [Verdict(f"TTFT P50, {slower}", "at most 1.02", ttft_p50, ttft_p50 is not None and ttft_p50.median <= 1.02)]
    for title, spread, least in (
        (f"TTFT P90, {faster}", ratio(ram, l2, _quantile("ttft_s", "p90")), 1.3),
        (f"ITL P50, {faster}", ratio(ram, l2, _quantile("inter_token_s", "p50")), 1.3),
        (f"output throughput, {slower}", ratio(l2, ram, THROUGHPUT), 1.27),
    ):
        found.append(Verdict(title, f"at least {least}", spread, spread is not None and spread.median >= least))
    both = NamedRun("both", "both", (*ram.results, *l2.results))
    answered = over_repetitions(both, success)
    return [*found, Verdict("success", "all answered", answered, answered is not None and answered.min == 1.0)]


def besides(ram: NamedRun, l2: NamedRun) -> dict[str, dict[str, float] | None]:
    """Ratios that no goal names, RAM only over RAM + L2."""
    figures = {
        "TTFT P99": _quantile("ttft_s", "p99"),
        "TTFT from due P50": _quantile("ttft_from_due_s", "p50"),
        "TTFT from due P90": _quantile("ttft_from_due_s", "p90"),
        "ITL P90": _quantile("inter_token_s", "p90"),
        "ITL P99": _quantile("inter_token_s", "p99"),
        "TPOT P50": _quantile("tpot_s", "p50"),
        "TPOT P90": _quantile("tpot_s", "p90"),
        "CPU-seconds": of_query(lambda summary: summary.cpu_s),
    }
    found = {title: ratio(ram, l2, figure) for title, figure in figures.items()}
    return {f"{title}, RAM only / RAM + L2": asdict(spread) if spread else None for title, spread in found.items()}


def line_of(title: str, result: BenchResult) -> str:
    """One run in one line."""
    s = result.query.summary
    ttft, itl = s.ttft_s, s.inter_token_s
    shown = f"TTFT P50 {ttft.p50:.3f} s, P90 {ttft.p90:.3f} s; " if ttft else ""
    shown += f"ITL P50 {itl.p50 * 1e3:.1f} ms, P90 {itl.p90 * 1e3:.1f} ms; " if itl else ""
    hits = ", ".join(f"{tier} {rate:.1%}" for tier, rate in s.hit_rates.items())
    return f"{title}: {shown}{s.output_throughput:.1f} tok/s; {s.failed} of {s.requests} failed; hits {hits or '-'}"


def record(setting: Setting, runs: Mapping[str, Sequence[BenchResult]], command: str) -> dict[str, Any]:
    """What goes into the result file: every round's figures, no text and no single request."""
    ram, l2 = (NamedRun(mode, title, tuple(runs[mode])) for mode, title in MODES.items())
    first = runs["ram"][0]
    return {
        "command": command,
        "started_at": first.started_at,
        "machine": dict(first.machine),
        "model": {"size": setting.model.size, "kv_bytes_per_token": setting.model.kv_bytes_per_token},
        "sizes": asdict(setting.sizes),
        "threads": setting.threads,
        "l2": setting.l2,
        "serve": {
            mode: shlex.join(portable(setting.arguments(0, ("--l2", "URL") if mode == "l2" else ()))) for mode in MODES
        },
        "goals": [asdict(verdict) for verdict in verdicts(ram, l2)],
        "besides": besides(ram, l2),
        "repetitions": [
            {mode: _rounds(result) for mode, result in zip(MODES, pair, strict=True)}
            for pair in zip(*(runs[mode] for mode in MODES), strict=True)
        ],
    }


def _rounds(result: BenchResult) -> dict[str, Any]:
    return {r.name.value: {"loop": r.loop.value} | r.summary.to_json() for r in result.rounds}


def measure(setting: Setting, repetitions: int, command: str, output: Path | None) -> list[Verdict]:
    """All runs, in turn; what is measured so far is in the file after each repetition."""
    runs: dict[str, list[BenchResult]] = {mode: [] for mode in MODES}
    for repetition in range(1, repetitions + 1):
        for mode in order_of(repetition):
            runs[mode].append(setting.play(mode, repetition, command))
            print(line_of(f"{MODES[mode]} {repetition}/{repetitions}", runs[mode][-1]), flush=True)
            print(f"  {runs[mode][-1].query.pacing}", flush=True)
        if output:
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(compact_text(record(setting, runs, command)) + "\n")
    ram, l2 = (NamedRun(mode, title, tuple(runs[mode])) for mode, title in MODES.items())
    return verdicts(ram, l2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 1 if a goal is not met, 2 if it can't be measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = asdict(ChatSizes())
    parser.add_argument("--output", type=Path)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--l2", choices=("daemon", "redis"), default="daemon")
    parser.add_argument("--shared-memory-name", default="ai_toolkit_cache", help="of the daemon's segment")
    parser.add_argument("--model-size", choices=("demo", "tiny"), default="demo")
    parser.add_argument("--work", type=Path, help="keep the model and the logs here")
    for name, value in default.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = parser.parse_args(given)
    if options.repetitions < 1:
        parser.error(f"--repetitions must be at least 1, not {options.repetitions}")
    command = shlex.join(["python", "-m", "benchmarks.multi_round_chat", *given])
    try:
        with contextlib.ExitStack() as stack:
            work = options.work or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hotspan-chat-")))
            setting = Setting(
                sizes=ChatSizes(**{name: getattr(options, name) for name in default}),
                model=make_demo_model(work / "model", options.model_size),
                l2=options.l2,
                shared_memory_name=options.shared_memory_name,
                work=work,
                threads=usable_threads(),
            )
            found = measure(setting, options.repetitions, command, options.output)
    except HotspanError as error:
        print(f"hotspan: {error}", file=sys.stderr)
        return 2
    for verdict in found:
        print(verdict)
    return 0 if all(verdict.is_met for verdict in found) else 1


if __name__ == "__main__":
    sys.exit(main())
