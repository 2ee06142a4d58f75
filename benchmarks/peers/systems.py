"""The systems that are compared: how each is started over the same model with the same engine arguments."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from hotspan.core.addresses import free_port
from hotspan.core.aftermath import Aftermath
from hotspan.demo.plan import DemoSizes, EngineSettings

READY_S: Final = 300.0
_POLL_S: Final = 0.25
# The pool's blocks are given: the engine needn't have most of the memory. Hashes of texts are equal in all systems.
_ALONE: Final = {"VLLM_CPU_KVCACHE_SPACE": "2", "PYTHONHASHSEED": "0"}
_PYTHON: Final = (sys.executable, "-m")


class Child:
    """A process group that serves a port; its output goes to a log. Leaving the context ends it."""

    def __init__(
        self, command: Sequence[str], port: int, log: Path, aftermath: Aftermath, environment: Mapping[str, str]
    ) -> None:
        self.port = port
        self._log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        aftermath.end(self._process.pid, is_group=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(signal.SIGTERM)

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, page: str) -> None:
        """Until the port is open, and `page` answers 200 if there is one."""
        deadline = time.monotonic() + READY_S
        while not self._answers(page):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"not ready: {' '.join(map(str, self._process.args))}\nIts log is {self._log}")
            time.sleep(_POLL_S)

    def end(self, how: signal.Signals) -> None:
        """SIGTERM goes to the process and is waited for; SIGKILL goes to its group."""
        if self._process.poll() is None:
            if how is signal.SIGTERM:
                self._process.terminate()
                try:
                    self._process.wait(60)
                except subprocess.TimeoutExpired:
                    how = signal.SIGKILL
            if how is signal.SIGKILL:
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _answers(self, page: str) -> bool:
        try:
            if not page:
                socket.create_connection(("127.0.0.1", self.port), timeout=2).close()
                return True
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{page}", timeout=2) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much every system gets. In GiB: `everything` holds all documents, `in_flight` one and a half requests."""

    demo: DemoSizes
    everything: float
    in_flight: float

    @classmethod
    def of(cls, demo: DemoSizes, kv_bytes_per_token: int) -> Self:
        request = demo.request_tokens * kv_bytes_per_token / (1 << 30)
        return cls(demo, round(2.5 * (demo.documents + 1) * request, 3), round(1.5 * request, 3))


@dataclass(frozen=True, slots=True)
class Place:
    """Where one run of a system lives."""

    model: Path
    work: Path
    sizes: Sizes
    ports: Mapping[str, int]

    @property
    def store(self) -> Path:
        return self.work / "store"


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One way to serve.

    arguments:   of the engine's server, beside those that all have
    environment: the server's
    beside:      another process that must run first: its command and the page that tells when it is ready
    has_store:   whether it keeps KV in files below `Place.store`, which a restart may find
    by_hotspan:  `hotspan serve`, else vLLM's server
    whole_pool:  the engine's own pool holds all documents
    """

    title: str
    arguments: Callable[[Place], tuple[str, ...]] = lambda place: ()
    environment: Callable[[Place], Mapping[str, str]] = lambda place: {}
    beside: Callable[[Place], tuple[tuple[str, ...], str]] | None = None
    has_store: bool = False
    by_hotspan: bool = False
    whole_pool: bool = False


@dataclass
class Running:
    """A started system."""

    server: Child
    beside: Child | None
    stack: ExitStack = field(repr=False)

    @property
    def pids(self) -> list[int]:
        return [child.pid for child in (self.server, self.beside) if child is not None]

    def end(self, how: signal.Signals) -> None:
        """The engine's server first, then what stands beside it, each by that signal."""
        self.server.end(how)
        if self.beside is not None:
            self.beside.end(how)
        self.stack.close()


def start(system: System, place: Place, engine: EngineSettings, aftermath: Aftermath) -> Running:
    """Start a system and wait until it serves."""
    with ExitStack() as stack:
        beside = None
        place.store.mkdir(parents=True, exist_ok=True)
        if system.beside is not None:
            command, page = system.beside(place)
            beside = stack.enter_context(
                Child(command, place.ports["beside"], place.work / "beside.log", aftermath, system.environment(place))
            )
            beside.port = place.ports["beside page"] if page else beside.port
            beside.wait(page)
        demo = place.sizes.demo
        blocks = demo.whole_pool_blocks if system.whole_pool else demo.small_pool_blocks
        port = free_port()
        program = ("hotspan", "serve") if system.by_hotspan else ("vllm.entrypoints.openai.api_server", "--model")
        command = (*_PYTHON, *program, str(place.model), *engine.arguments(port, blocks), *system.arguments(place))
        environment = {**engine.environment(), **_ALONE, **system.environment(place)}
        server = stack.enter_context(Child(command, port, place.work / "server.log", aftermath, environment))
        server.wait("/health")
        return Running(server, beside, stack.pop_all())


def _connector(name: str, module: str = "", **extra: Any) -> tuple[str, ...]:
    chosen = {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    if module:
        chosen["kv_connector_module_path"] = module
    return ("--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(chosen))


def _native(place: Place, *tiers: dict[str, Any]) -> tuple[str, ...]:
    gib = place.sizes.in_flight if tiers else place.sizes.everything
    return _connector(
        "OffloadingConnector",
        spec_name="NativeOnCpu",
        spec_module_path="benchmarks.peers.native",
        cpu_bytes_to_use=int(gib * (1 << 30)),
        secondary_tiers=list(tiers),
    )


def _lmcache(place: Place, ram_gib: float, **more: Any) -> Mapping[str, str]:
    settings = {"local_cpu": True, "max_local_cpu_size": ram_gib, **more}
    return {"LMCACHE_TRACK_USAGE": "false"} | {
        f"LMCACHE_{key.upper()}": value if isinstance(value, str) else json.dumps(value)
        for key, value in settings.items()
    }


def _lmcache_server(place: Place, ram_gib: float, *more: str) -> tuple[tuple[str, ...], str]:
    command = (
        *(*_PYTHON, "lmcache.cli.main", "server", "--port", str(place.ports["beside"])),
        *("--http-port", str(place.ports["beside page"]), "--eviction-policy", "LRU"),
        *("--l1-size-gb", str(ram_gib), "--l1-init-size-gb", "1", "--supported-transfer-mode", "auto"),
        *("--shm-name", f"peers-{place.ports['beside']}", *more),
    )
    return command, "/healthcheck"


def _lmcache_files(directory: Path) -> str:
    return json.dumps({"type": "fs", "base_path": str(directory), "use_odirect": True})


def _lmcache_client(place: Place) -> tuple[str, ...]:
    return _connector(
        "LMCacheMPConnector",
        **{"lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": place.ports["beside"]},
    )


def _redis(place: Place) -> tuple[tuple[str, ...], str]:
    return ("redis-server", "--port", str(place.ports["beside"]), "--save", "", "--bind", "127.0.0.1"), ""


def _daemon(place: Place) -> tuple[tuple[str, ...], str]:
    port = str(place.ports["beside"])
    name = ("--shared-memory-name", f"peers-{port}")
    return (
        (*_PYTHON, "hotspan", "daemon", "--port", port, "--size-gib", str(place.sizes.everything), *name),
        "",
    )


def _gib(gib: float) -> tuple[str, str]:
    return "--ram-gib", str(gib)


SYSTEMS: Final[Mapping[str, System]] = {
    "none": System(title="vLLM alone, pool of 2.5 documents", arguments=lambda p: ("--enable-prompt-tokens-details",)),
    "bound": System(
        title="vLLM alone, pool for every document",
        arguments=lambda p: ("--enable-prompt-tokens-details",),
        whole_pool=True,
    ),
    "hotspan-ram": System(title="hotspan, RAM", by_hotspan=True, arguments=lambda p: _gib(p.sizes.everything)),
    "hotspan-disk": System(
        title="hotspan, disk",
        by_hotspan=True,
        has_store=True,
        arguments=lambda p: (
            *_gib(p.sizes.in_flight),
            *("--disk", str(p.store), "--disk-gib", str(2 * p.sizes.everything)),
        ),
    ),
    "hotspan-redis": System(
        title="hotspan, Redis",
        by_hotspan=True,
        beside=_redis,
        arguments=lambda p: (*_gib(p.sizes.in_flight), "--l2", f"redis://127.0.0.1:{p.ports['beside']}"),
    ),
    "hotspan-daemon": System(
        title="hotspan, node daemon",
        by_hotspan=True,
        beside=_daemon,
        arguments=lambda p: (
            *_gib(p.sizes.in_flight),
            *("--l2", f"sagemaker-hyperpod://127.0.0.1:{p.ports['beside']}"),
            *("--l2-option", f"shared_memory_name=peers-{p.ports['beside']}"),
        ),
    ),
    "vllm-ram": System(title="vLLM's offloading, RAM", arguments=_native),
    "vllm-fs": System(
        title="vLLM's offloading, files",
        has_store=True,
        arguments=lambda p: _native(p, {"type": "fs", "root_dir": str(p.store)}),
    ),
    "lmcache-ram": System(
        title="LMCache in process, RAM",
        arguments=lambda p: _connector("LMCacheOnCpu", "benchmarks.peers.lmcache_on_cpu"),
        environment=lambda p: _lmcache(p, p.sizes.everything),
    ),
    "lmcache-disk": System(
        title="LMCache in process, disk",
        has_store=True,
        arguments=lambda p: _connector("LMCacheOnCpu", "benchmarks.peers.lmcache_on_cpu"),
        environment=lambda p: _lmcache(
            p,
            p.sizes.in_flight,
            local_disk=f"file://{p.store}/",
            max_local_disk_size=2 * p.sizes.everything,
            extra_config={"use_odirect": True},
        ),
    ),
    "lmcache-redis": System(
        title="LMCache in process, Redis",
        beside=_redis,
        arguments=lambda p: _connector("LMCacheOnCpu", "benchmarks.peers.lmcache_on_cpu"),
        environment=lambda p: _lmcache(
            p, p.sizes.in_flight, remote_url=f"redis://127.0.0.1:{p.ports['beside']}", remote_serde="naive"
        ),
    ),
    "lmcache-mp-ram": System(
        title="LMCache multi-process, RAM",
        beside=lambda p: _lmcache_server(p, p.sizes.everything),
        arguments=_lmcache_client,
    ),
    "lmcache-mp-disk": System(
        title="LMCache multi-process, files",
        has_store=True,
        beside=lambda p: _lmcache_server(
            # With less room the LMCache server's prefetches find no place and nothing is a hit.
            *(
                p,
                2 * p.sizes.in_flight,
                "--l2-adapter",
                _lmcache_files(p.store),
            ),
        ),
        arguments=_lmcache_client,
    ),
}
