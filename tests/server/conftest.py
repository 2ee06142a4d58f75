"""A real server: `hotspan serve` as users start it, over a tiny model."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import httpx

from hotspan.config.server_settings import ServerSettings
from hotspan.server.options import ServeOptions
from kit.ports import free_port
from kit.preloaded import SERVERS

IN_CORE = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""The engine core computes by itself, as with one GPU. On CPU vLLM starts a worker otherwise: one more import of torch.

tests/server/test_serve.py has the worker."""

ENGINE = (
    *("--dtype", "float32", "--block-size", "128", "--max-model-len", "4096", "--num-gpu-blocks-override", "64"),
    *("--max-num-batched-tokens", "1024", "--gpu-memory-utilization", "0.2", "--enforce-eager"),
    *("--distributed-executor-backend", IN_CORE),
)

ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
"""One thread computes a tiny model sooner than two that wait for each other, most of all beside other tests."""

UNCOMPILED = {"TORCHDYNAMO_DISABLE": "1"}
"""The sampler's few functions are else compiled at a server's start, which takes longer than all that tests ask for."""


@dataclass
class Server:
    """A running server."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path
    model: str

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_until_ready(self, seconds: float = 300) -> str:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            ready = [line for line in self.log.read_text().splitlines() if line.startswith("hotspan is ready")]
            if ready:
                return ready[0]
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            time.sleep(0.1)
        raise AssertionError("not ready: " + self.log.read_text()[-3000:])

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(120)

    def stop_in_a_stream(self, stop: Callable[[], object], key: str = "none") -> None:
        """Stop it while it streams an answer: that comes to its end, and then the server does."""
        body = {"model": self.model, "prompt": "once", "max_tokens": 400, "stream": True, "ignore_eos": True}
        headers = {"authorization": f"Bearer {key}"}
        with httpx.stream("POST", self.url + "/v1/completions", json=body, headers=headers, timeout=60) as answer:
            lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
            first = next(lines)
            stop()
            parts = [json.loads(line.removeprefix("data: "))["choices"][0] for line in (first, *lines)]
        assert len(parts) >= 100 and parts[-1]["finish_reason"] == "length"
        assert self.process.wait(60) == 0


@contextlib.contextmanager
def started(
    log: Path, *command: str, variables: Mapping[str, str], max_files: int | None = None
) -> Iterator["subprocess.Popen[bytes]"]:
    """A command of hotspan's in a process group of its own, gone at the end whatever happens.

    variables: of its environment, besides those of this process that are neither hotspan's nor vLLM's. max_files: a
    limit of its own for open files. In a run of tests a server with the variables of most is forked with its imports.
    """
    usual = {key: value for key, value in os.environ.items() if not key.startswith(("VLLM_", "HOTSPAN_"))}
    usual |= ENVIRONMENT | UNCOMPILED
    how: dict[str, Any] = {"env": usual | dict(variables), "start_new_session": True}
    with log.open("wb") as output:
        process = SERVERS.popen(usual, command, max_files, stdout=output, stderr=subprocess.STDOUT, **how)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(40)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def serving(
    model: Path,
    log: Path,
    *options: str,
    ready: bool = True,
    variables: Mapping[str, str] | None = None,
    within: Sequence[str] = (),
) -> Iterator[Server]:
    """`hotspan serve MODEL`. within: a command that runs it."""
    port = free_port()
    command = [*within, sys.executable, "-m", "hotspan", "serve", str(model), "--port", str(port), *ENGINE, *options]
    with started(log, *command, variables=variables or {}) as process:
        server = Server(process, port, log, str(model))
        if ready:
            server.wait_until_ready()
        yield server


@contextlib.contextmanager
def environment_is_read() -> Iterator[None]:
    """Let vLLM read its environment anew, which an engine of an earlier test in this process has it remember."""
    from vllm import envs

    was_cached = envs._is_envs_cache_enabled()
    envs.disable_envs_cache()
    try:
        yield
    finally:
        if was_cached:
            envs.enable_envs_cache()


def serve_options(**given: Any) -> ServeOptions:
    """What a server is started with, from fields of ServeOptions and of ServerSettings; the model is m, uncached."""
    names = [field.name for field in fields(ServerSettings) if field.name in given]
    server = replace(given.pop("server", ServerSettings()), **{name: given.pop(name) for name in names})
    return ServeOptions(**{"model": "m", "cache": None, "server": server} | given)
