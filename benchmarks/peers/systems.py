"""The systems that are compared: how each is started over the same model with the same engine arguments."""

import json
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from benchmarks.peers.stores import BUCKET, Files, Opened, redis_server, s3_server
from hotspan.core.addresses import free_port
from hotspan.core.aftermath import Aftermath
from hotspan.demo.plan import DemoSizes, EngineSettings
from kit.child import Child
from kit.s3_server import CLIENT

# The pool's blocks are given: the engine needn't have most of the memory. Hashes of texts are equal in all systems.
_ALONE: Final = {"VLLM_CPU_KVCACHE_SPACE": "2", "PYTHONHASHSEED": "0"}


VLLM: Final = ("vllm.entrypoints.openai.api_server", "--model")
HOTSPAN: Final = ("hotspan", "serve")


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much every system gets: the engine's own pool, in blocks, and its tiers, in GiB.

    everything: holds all texts. in_flight: RAM of systems that have a lower tier.
    """

    small_pool_blocks: int
    whole_pool_blocks: int
    everything: float
    in_flight: float

    @classmethod
    def of(cls, demo: DemoSizes, kv_bytes_per_token: int) -> Self:
        """RAM for one and a half requests where there is a lower tier."""
        request = demo.request_tokens * kv_bytes_per_token / (1 << 30)
        everything = round(2.5 * (demo.documents + 1) * request, 3)
        return cls(demo.small_pool_blocks, demo.whole_pool_blocks, everything, round(1.5 * request, 3))


@dataclass(frozen=True, slots=True)
class Place:
    """Where one run of a system lives. python: of the environment that its processes run in."""

    model: Path
    work: Path
    sizes: Sizes
    ports: Mapping[str, int]
    python: str = sys.executable

    @classmethod
    def below(cls, work: Path, name: str, model: Path, sizes: Sizes, python: str = sys.executable) -> Self:
        """A directory of that name in `work`, and free ports."""
        (work / name / "store").mkdir(parents=True)
        ports = {port: free_port() for port in ("beside", "beside page", "redis", "s3")}
        return cls(model, work / name, sizes, ports, python)

    @property
    def redis(self) -> str:
        return f"redis://127.0.0.1:{self.ports['redis']}"

    @property
    def store(self) -> Path:
        return self.work / "store"


def in_files(place: Place, aftermath: Aftermath) -> Opened:
    return nullcontext(Files(place.store))


def in_redis(place: Place, aftermath: Aftermath) -> Opened:
    return redis_server(place.ports["redis"], place.work / "redis.log", aftermath)


def in_s3(place: Place, aftermath: Aftermath) -> Opened:
    return s3_server(place.ports["s3"])


def in_memory(place: Place, aftermath: Aftermath) -> Opened:
    return nullcontext()


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One way to serve.

    arguments:   of the engine's server, beside those that all have
    environment: the server's
    beside:      another process of the system that must run first: its command and the page that tells when it is ready
    store:       opens where it keeps KV that a restart may find: files below `Place.store`, a Redis server, or nothing
    program:     the module and its words before the model: vLLM's server, or `hotspan serve`
    whole_pool:  the engine's own pool holds all documents
    """

    title: str
    arguments: Callable[[Place], tuple[str, ...]] = lambda place: ()
    environment: Callable[[Place], Mapping[str, str]] = lambda place: {}
    beside: Callable[[Place], tuple[tuple[str, ...], str]] | None = None
    store: Callable[[Place, Aftermath], Opened] = in_memory
    program: tuple[str, ...] = VLLM
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
        if system.beside is not None:
            command, page = system.beside(place)
            beside = stack.enter_context(
                Child(command, place.ports["beside"], place.work / "beside.log", aftermath, system.environment(place))
            )
            beside.port = place.ports["beside page"] if page else beside.port
            beside.wait(page)
        blocks = place.sizes.whole_pool_blocks if system.whole_pool else place.sizes.small_pool_blocks
        port = free_port()
        words = (str(place.model), *engine.arguments(port, blocks), *system.arguments(place))
        command = (place.python, "-m", *system.program, *words)
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
        *(place.python, "-m", "lmcache.cli.main", "server", "--port", str(place.ports["beside"])),
        *("--http-port", str(place.ports["beside page"]), "--eviction-policy", "LRU"),
        *("--l1-size-gb", str(ram_gib), "--l1-init-size-gb", "1", "--supported-transfer-mode", "auto"),
        *("--shm-name", f"peers-{place.ports['beside']}", *more),
    )
    return command, "/healthcheck"


def _lmcache_l2(place: Place, kind: str, **adapter: Any) -> tuple[tuple[str, ...], str]:
    # A prefetch evicts nothing: with less than a whole request free it fails, and nothing is a hit. The server keeps
    # half of its RAM free, instead of LMCache's default of a fifth.
    room = ("--eviction-trigger-watermark", "0.5")
    l2 = ("--l2-adapter", json.dumps({"type": kind, **adapter}))
    return _lmcache_server(place, 2 * place.sizes.in_flight, *room, *l2)


def _lmcache_client(place: Place) -> tuple[str, ...]:
    return _connector(
        "LMCacheMPConnector",
        **{"lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": place.ports["beside"]},
    )


def _daemon(place: Place) -> tuple[tuple[str, ...], str]:
    port = str(place.ports["beside"])
    name = ("--shared-memory-name", f"peers-{port}")
    return (
        (place.python, "-m", "hotspan", "daemon", "--port", port, "--size-gib", str(place.sizes.everything), *name),
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
    "hotspan-ram": System(title="hotspan, RAM", program=HOTSPAN, arguments=lambda p: _gib(p.sizes.everything)),
    "hotspan-disk": System(
        title="hotspan, disk",
        program=HOTSPAN,
        store=in_files,
        arguments=lambda p: (
            *_gib(p.sizes.in_flight),
            *("--disk", str(p.store), "--disk-gib", str(2 * p.sizes.everything)),
        ),
    ),
    "hotspan-redis": System(
        title="hotspan, Redis",
        program=HOTSPAN,
        store=in_redis,
        arguments=lambda p: (*_gib(p.sizes.in_flight), "--l2", p.redis),
    ),
    "hotspan-file": System(
        title="hotspan, shared directory",
        program=HOTSPAN,
        store=in_files,
        arguments=lambda p: (*_gib(p.sizes.in_flight), "--l2", p.store.as_uri()),
    ),
    "hotspan-s3": System(
        title="hotspan, S3",
        program=HOTSPAN,
        store=in_s3,
        arguments=lambda p: (*_gib(p.sizes.in_flight), "--l2", f"s3://{BUCKET}"),
        environment=lambda p: {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{p.ports['s3']}",
            **{f"AWS_{name.upper()}": CLIENT[name] for name in ("region", "access_key_id", "secret_access_key")},
        },
    ),
    "hotspan-daemon": System(
        title="hotspan, node daemon",
        program=HOTSPAN,
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
        store=in_files,
        arguments=lambda p: _native(p, {"type": "fs", "root_dir": str(p.store)}),
    ),
    "lmcache-ram": System(
        title="LMCache in process, RAM",
        arguments=lambda p: _connector("LMCacheOnCpu", "benchmarks.peers.lmcache_on_cpu"),
        environment=lambda p: _lmcache(p, p.sizes.everything),
    ),
    "lmcache-disk": System(
        title="LMCache in process, disk",
        store=in_files,
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
        store=in_redis,
        arguments=lambda p: _connector("LMCacheOnCpu", "benchmarks.peers.lmcache_on_cpu"),
        environment=lambda p: _lmcache(p, p.sizes.in_flight, remote_url=p.redis, remote_serde="naive"),
    ),
    "lmcache-mp-ram": System(
        title="LMCache multi-process, RAM",
        beside=lambda p: _lmcache_server(p, p.sizes.everything),
        arguments=_lmcache_client,
    ),
    "lmcache-mp-disk": System(
        title="LMCache multi-process, files",
        store=in_files,
        beside=lambda p: _lmcache_l2(p, "fs", base_path=str(p.store), use_odirect=True),
        arguments=_lmcache_client,
    ),
    "lmcache-mp-redis": System(
        title="LMCache multi-process, Redis",
        store=in_redis,
        beside=lambda p: _lmcache_l2(p, "resp", host="127.0.0.1", port=p.ports["redis"]),
        arguments=_lmcache_client,
    ),
}
