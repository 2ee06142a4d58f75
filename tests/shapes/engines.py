"""An engine of a shape, as its own processes: started, asked, told to forget, stopped."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from hotspan.cli.admin_client import Admin
from hotspan.config.control import engine_sockets
from kit.ports import free_port
from kit.preloaded import MODULES, Preloaded
from kit.spawning import is_program
from tests.own_vllm import VLLM, a_strangers

from .table import Shape

TOKENS = 8
POOL_BLOCKS, BLOCK = 7, 128
START_S = 600.0
PATIENCE_S = 60.0
"""A request waits so long for what the tiers have: what is loaded is no matter of how slow this machine is."""

_TOKEN = "shapes-admin-token-0123"
_ROOT = Path(__file__).parents[2]
_VARIABLES = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_NO_USAGE_STATS": "1",
    "HOTSPAN_ADMIN_TOKEN": _TOKEN,
    "RAY_DEDUP_LOGS": "0",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # the sampler's few functions are else compiled at each start
    "OMP_WAIT_POLICY": "PASSIVE",  # two ranks on a busy machine would spend their time waiting for each other
}
_MODEL = {
    "dtype": "float32",
    "max_model_len": 768,
    "enforce_eager": True,
    "block_size": BLOCK,
    "num_gpu_blocks_override": POOL_BLOCKS,
    "kv_cache_memory_bytes": 1 << 26,
}


_ENVIRONMENT = a_strangers() | _VARIABLES | {"PYTHONPATH": f"{_ROOT / 'src'}:{_ROOT}"}


def preloaded() -> Preloaded:
    """What starts engines: each is forked from an interpreter with the imports."""
    return Preloaded(_ENVIRONMENT, (*MODULES, "vllm.entrypoints.cli.serve", "vllm.entrypoints.llm"), is_program)


class Refused(Exception):
    """The engine did not start; what all of its processes logged."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one request. chances: log-probabilities of the tokens."""

    text: str
    chances: list[float]
    cached: int


@dataclass
class Engine:
    """A running engine. runtime: where its cores have their sockets. seen: its processes since it started."""

    shape: Shape
    model: Path
    directory: Path
    runtime: Path
    processes: list[subprocess.Popen[str]] = field(default_factory=list)
    logs: list[Path] = field(default_factory=list)
    port: int = 0
    seen: set[psutil.Process] = field(default_factory=set)

    def ask(self, text: list[int], replica: int = 0) -> Answer:
        """replica: of several, which answers."""
        if "LLM" in self.shape.start:
            return Answer(*self._told(text))
        body = {"model": str(self.model), "prompt": text, "max_tokens": TOKENS, "temperature": 0, "logprobs": 1}
        body |= {"ignore_eos": True}
        said = json.loads(self._post("/v1/completions", body, self._at(replica)))
        usage, (choice,) = said["usage"]["prompt_tokens_details"] or {}, said["choices"]
        return Answer(choice["text"], choice["logprobs"]["token_logprobs"], usage.get("cached_tokens") or 0)

    def reload(self, weights: Path) -> None:
        """Have all ranks load other weights."""
        if "LLM" in self.shape.start:
            assert self._told(str(weights))
        else:
            self._post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(weights)}})

    def forget(self) -> None:
        """Invalidate all that the model has, on all tiers."""
        if "LLM" in self.shape.start:
            assert self._told(None)
        elif self.shape.start == "hotspan":
            self._post("/hotspan/cache/invalidate", {"model": True})
        else:
            own = [each for each in engine_sockets(self.variables) if str(self.runtime) in each.url]
            assert own, self.said()[-3000:]
            for engine in own:
                Admin(server=engine.url).post("/hotspan/cache/invalidate", {"model": True})

    @property
    def variables(self) -> dict[str, str]:
        """The environment of its processes."""
        return _ENVIRONMENT | {"XDG_RUNTIME_DIR": str(self.runtime)}

    def stop(self) -> None:
        """In order: the head first."""
        for process in self.processes:
            if process.stdin is not None:
                process.stdin.close()
            elif process.poll() is None:
                process.send_signal(signal.SIGTERM)
            try:
                process.wait(90)
            except subprocess.TimeoutExpired as error:
                said = "\n".join([*map(_state, self.processes), self.said()[-6000:]])
                self.kill()
                raise AssertionError(said) from error

    def kill(self) -> None:
        """SIGKILL to all of its processes."""
        self.look()
        for each in self.seen:  # also what lives on without a parent, such as a cluster of Ray's
            with contextlib.suppress(psutil.Error):
                each.kill()
        for process in self.processes:
            process.wait(60)

    def kill_node(self, node: int) -> None:
        """SIGKILL to all processes of one host."""
        for each in _tree(self.processes[node].pid):
            with contextlib.suppress(psutil.Error):
                each.kill()

    def look(self) -> None:
        """Note which processes there are."""
        for process in self.processes:
            if process.poll() is None:
                self.seen.update(_tree(process.pid))

    def said(self) -> str:
        return "\n".join(log.read_text(errors="replace") for log in self.logs)

    def _at(self, replica: int) -> dict[str, str]:
        return {"x-data-parallel-rank": str(replica)} if self.shape.replicas > 1 else {}

    def _told(self, asked: list[int] | str | None) -> Any:
        (process,) = self.processes
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(asked) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        assert line, self.said()[-3000:]
        return json.loads(line)

    def _post(self, path: str, body: Any, more: dict[str, str] | None = None) -> bytes:
        headers = {"content-type": "application/json", "authorization": f"Bearer {_TOKEN}"} | (more or {})
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=300) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: {error.code} {error.read()[:500]!r}") from error


@contextlib.contextmanager
def running(
    shape: Shape,
    model: Path,
    directory: Path,
    shared: Path | None = None,
    *,
    is_cached: bool = True,
    own: Path | None = None,
    source: Preloaded,
) -> Iterator[Engine]:
    """An engine that answers.

    shared: the /dev/shm of a further host. own: that of the first; None for this machine's. source: starts it.

    Raises: Refused if it ends before it answers.
    """
    runtime = Path(tempfile.mkdtemp(prefix="shape", dir="/tmp"))  # the paths of sockets must be short
    engine = Engine(shape, model, directory, runtime, port=free_port())
    ports = free_port(), free_port()
    try:
        for node in range(shape.nodes):
            log = directory / f"{len(list(directory.glob('*.log')))}-node{node}.log"
            engine.logs.append(log)
            place = shared if node else own
            engine.processes.append(_started(source, engine, node, ports, log, place, is_cached=is_cached))
        _await(engine)
        yield engine
        engine.stop()
    finally:
        engine.kill()
        shutil.rmtree(runtime)


def _started(
    source: Preloaded,
    engine: Engine,
    node: int,
    ports: tuple[int, int],
    log: Path,
    shared: Path | None,
    *,
    is_cached: bool,
) -> subprocess.Popen[str]:
    shape, disk, (master, calls) = engine.shape, engine.directory / "disk", ports
    tiers: dict[str, Any] = {"ram_gib": 0.125}
    tiers |= {"disk": str(disk), "disk_gib": 1, "patience_s": PATIENCE_S} if shape.has_disk else {}
    extra = {f"hotspan.{name}": value for name, value in tiers.items()}
    transfer = {"kv_connector": "HotspanConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    if "LLM" in shape.start:
        options: dict[str, Any] = {"model": str(engine.model)} | _MODEL | _offline(shape.options)
        options |= {"kv_transfer_config": transfer} if is_cached else {}
        settings = {"options": options, "forked": shape.start == "forked LLM", "tokens": TOKENS}
        words = ["-m", "tests.shapes.offline", json.dumps(settings)]
        return _forked(source, words, log, shared, engine.variables, has_pipes=True)
    words = ["serve", str(engine.model), *_words(_MODEL), *shape.options.split(), "--enable-prompt-tokens-details"]
    words += ["--port", str(engine.port), "--shutdown-timeout", "30"]
    if shape.nodes > 1:
        words += ["--nnodes", str(shape.nodes), "--node-rank", str(node)]
        words += ["--master-addr", "127.0.0.1", "--master-port", str(master), *(["--headless"] if node else [])]
        words += ["--data-parallel-rpc-port", str(calls)] if shape.replicas > 1 else []
    if shape.start == "hotspan":
        words = ["-m", "hotspan", *words, *(_words(tiers) if is_cached else ["--no-cache"])]
        return _forked(source, words, log, shared, engine.variables)
    script = engine.directory / "own.py"
    script.write_text(VLLM)
    words += ["--kv-transfer-config", json.dumps(transfer)] if is_cached else []
    return _forked(source, [str(script), *words], log, shared, engine.variables)


def _forked(
    source: Preloaded,
    words: list[str],
    log: Path,
    shared: Path | None,
    variables: dict[str, str],
    *,
    has_pipes: bool = False,
) -> subprocess.Popen[str]:
    """`python WORDS`. has_pipes: its stdin and stdout are pipes; else `log` has what it prints."""
    pipe = subprocess.PIPE
    with log.open("ab") as out:
        process: subprocess.Popen[str] = source.popen(
            [sys.executable, *words],
            shared=shared,
            stdin=pipe if has_pipes else subprocess.DEVNULL,
            stdout=pipe if has_pipes else out,
            stderr=out,
            env=variables,
            cwd=_ROOT,
            start_new_session=True,
            text=True,
        )
    return process


def _await(engine: Engine) -> None:
    """Wait until it answers. Raises: Refused if its first process ends."""
    head, until = engine.processes[0], time.monotonic() + START_S
    if head.stdout is not None:
        if not head.stdout.readline():
            raise Refused(engine.said())
        return
    url = f"http://127.0.0.1:{engine.port}/health"
    while True:
        engine.look()
        if head.poll() is not None:
            raise Refused(engine.said())
        assert time.monotonic() < until, engine.said()[-5000:]
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(0.3)


def _tree(pid: int) -> list[psutil.Process]:
    """A process and all below it, as far as they live."""
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(pid)
        return [*parent.children(recursive=True), parent]
    return []


def _state(process: subprocess.Popen[str]) -> str:
    """What there is of a node."""
    try:
        return str([f"{each.pid} {each.name()} {each.status()}" for each in _tree(process.pid)])
    except psutil.Error as error:
        return str(error)


def _words(options: dict[str, Any]) -> list[str]:
    words: list[str] = []
    for name, value in options.items():
        words.append("--" + name.replace("_", "-"))
        words += [] if value is True else [str(value)]
    return words


def _offline(options: str) -> dict[str, Any]:
    words = options.split()
    pairs = zip(words[::2], words[1::2], strict=True)
    return {re.sub("-", "_", name[2:]): int(value) if value.isdigit() else value for name, value in pairs}


def slabs(directory: Path) -> list[str]:
    """Files of hotspan's in a /dev/shm."""
    return [name for name in os.listdir(directory) if name.startswith("hotspan-slab-")]
