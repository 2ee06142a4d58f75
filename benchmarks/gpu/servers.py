"""One server at a time over one model, measured: what the parts that go through HTTP share."""

import asyncio
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.gpu.models import Shape
from benchmarks.gpu.record import Deadline, OutOfTime, Result, say
from hotspan.bench.config import BenchConfig
from hotspan.bench.records import BenchResult, RoundName, RoundResult
from hotspan.bench.runner import Progress, play_rounds
from hotspan.bench.workloads.base import WorkloadOptions
from hotspan.core.aftermath import Aftermath
from hotspan.core.errors import HotspanError
from hotspan.core.types import GIB
from hotspan.demo.plan import EngineSettings, usable_threads
from hotspan.demo.server import ServerProcess, serve_command

_READY_EVERY_S: Final = 15.0
_MIN_S: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all servers of a part share. has_graphs: CUDA graphs and compilation, which cost a minute a start."""

    model: Path
    shape: Shape
    is_cpu: bool
    has_graphs: bool
    work: Path
    deadline: Deadline
    repetition: int = 1

    @property
    def block_tokens(self) -> int:
        return 128 if self.is_cpu else 16

    def engine(self, port: int, max_tokens: int, pool_tokens: float) -> tuple[str, ...]:
        """The engine's options, the same in every mode."""
        step = 1024 if self.is_cpu else 8192
        options = (
            *("--port", str(port), "--dtype", "bfloat16", "--load-format", "dummy"),
            *("--block-size", str(self.block_tokens), "--max-model-len", str(self.blocks(max_tokens))),
            *("--num-gpu-blocks-override", str(self.blocks(pool_tokens) // self.block_tokens)),
            *("--max-num-batched-tokens", str(step), "--served-model-name", "model"),
        )
        return options if self.has_graphs else (*options, "--enforce-eager")

    def blocks(self, tokens: float) -> int:
        """So many tokens, in whole chunks of 256."""
        return math.ceil(tokens / 256) * 256

    def environment(self) -> dict[str, str]:
        common = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        cpu = EngineSettings(max_model_len=0, threads=usable_threads()).environment() if self.is_cpu else {}
        return common | dict(cpu)

    @contextmanager
    def served(self, name: str, arguments: Sequence[str]) -> Iterator[tuple[ServerProcess, float]]:
        """A server that is ready, and how many seconds it took; it is stopped in the end.

        Raises: EngineError with the end of its log, OutOfTime.
        """
        port = int(arguments[arguments.index("--port") + 1])
        command = serve_command(self.model, arguments)
        log = self.work / f"{name}-{self.repetition}.log"
        said = [0.0]

        def waiting(waited_s: float, line: str) -> None:
            if waited_s - said[0] >= _READY_EVERY_S:
                said[0] = waited_s
                say(f"{name}: starting for {waited_s:.0f} s: {line[:100]}")

        started = time.monotonic()
        with Aftermath() as aftermath, ServerProcess(command, self.environment(), port, log, aftermath, 20.0) as server:
            server.wait_until_ready(max(1.0, self.deadline.left_s), waiting)
            ready_s = time.monotonic() - started
            say(f"{name}: ready after {ready_s:.1f} s")
            yield server, ready_s


class Spoken(Progress):
    """Progress in lines, one a round."""

    def __init__(self, title: str) -> None:
        self._title = title

    def preparing(self, what: str) -> None:
        say(f"{self._title}: {what}")

    def round_started(self, name: RoundName, expected: int) -> None:
        say(f"{self._title}: {name}, {expected} requests")

    def round_finished(self, result: RoundResult) -> None:
        s = result.summary
        ttft = f"mean TTFT {s.ttft_s.mean:.3f} s" if s.ttft_s else "no TTFT"
        hits = ", ".join(f"{tier} {rate:.0%}" for tier, rate in s.hit_rates.items()) or "-"
        say(f"{self._title}: {result.name} took {s.elapsed_s:.1f} s, {ttft}, {s.failed} failed, hits {hits}")


def play(setting: Setting, title: str, server: ServerProcess, options: WorkloadOptions) -> BenchResult:
    """The timed rounds of a workload against a server. Raises: OutOfTime."""
    config = BenchConfig(options=options, engine_url=server.url, engine_pid=server.pid, model="model", ignore_eos=True)

    async def within() -> BenchResult:
        return await asyncio.wait_for(play_rounds(config, Spoken(title)), max(1.0, setting.deadline.left_s))

    try:
        result = asyncio.run(within())
    except TimeoutError as error:
        raise OutOfTime(f"{title} was cut off") from error
    server.check_alive()
    return result


def in_turn(setting: Setting, result: Result, jobs: Mapping[str, Callable[[], Any]]) -> None:
    """Do each job and put what it gives into the result; the first one changes with the repetition.

    One that fails is written down and the next one goes on; one for which too little time is left is left out.
    """
    names = list(jobs)
    first = (setting.repetition - 1) % len(names)
    longest_s = _MIN_S
    for name in (*names[first:], *names[:first]):
        if setting.deadline.left_s < longest_s:
            result.leave_out(name, f"{setting.deadline.left_s:.0f} s were left, one like it took {longest_s:.0f} s")
            continue
        started = time.monotonic()
        try:
            result.put(name, jobs[name]())
        except (OutOfTime, HotspanError, OSError) as error:
            result.leave_out(name, f"{type(error).__name__}: {error}")
        longest_s = max(longest_s, time.monotonic() - started)


def summaries(result: BenchResult) -> dict[str, Any]:
    """Each round's figures, no text and no single request."""
    return {r.name.value: {"loop": r.loop.value} | r.summary.to_json() for r in result.rounds}


def native_offloading(ram_bytes: int) -> tuple[str, ...]:
    """vLLM's own offloading to RAM, behind the same server; decode blocks are kept as hotspan keeps them."""
    extra = {"cpu_bytes_to_use": ram_bytes, "offload_prompt_only": False}
    config = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return ("--no-cache", "--kv-transfer-config", json.dumps(config))


def room_for(request_bytes: int, directory: Path) -> dict[str, int]:
    """How many requests' KV fit into /dev/shm, RAM and the disk, something left to spare."""
    free = {
        "/dev/shm": shutil.disk_usage("/dev/shm").free - GIB,
        "RAM": psutil.virtual_memory().available - 8 * GIB,
        "disk": shutil.disk_usage(directory).free - 4 * GIB,
    }
    return {name: max(0, size) // request_bytes for name, size in free.items()}


def memory_of(pid: int) -> dict[str, float]:
    """GB that a process tree holds (proportional set size, the slab included), and all that lies in /dev/shm."""
    total = 0
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        try:
            total += process.memory_full_info().pss
        except psutil.Error:  # it has just ended
            continue
    return {"pss_gb": round(total / 1e9, 3), "dev_shm_gb": round(shutil.disk_usage("/dev/shm").used / 1e9, 3)}


def failed_requests(measured: Mapping[str, Any]) -> int:
    """Requests that were not answered, over all modes and rounds."""
    modes = [mode for mode in measured.values() if isinstance(mode, dict)]
    return sum(
        each["failed"] for mode in modes for each in mode.values() if isinstance(each, dict) and "failed" in each
    )


def fresh(directory: Path) -> Path:
    """That directory, empty."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    os.chmod(directory, 0o700)
    return directory
