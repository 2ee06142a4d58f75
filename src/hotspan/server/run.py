"""The life of one replica: check, bind, load, warm, serve, drain."""

import asyncio
import contextlib
import dataclasses
import gc
import logging
import os
import shlex
import socket
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
from starlette.types import ASGIApp

from hotspan.config.environment import environment
from hotspan.config.server_settings import ServerSettings
from hotspan.config.settings import DiskSettings
from hotspan.core.aftermath import Aftermath
from hotspan.core.errors import ConfigError, EngineError, HotspanError
from hotspan.core.fair import FairOrder
from hotspan.core.system_lines import SystemLines
from hotspan.core.threads import go_on
from hotspan.core.types import GIB
from hotspan.formatters import Formatters, load_formatters
from hotspan.http.connections import HttpLimits, raise_file_limit
from hotspan.http.options import check_tls, leave_out, tls_options, with_cors
from hotspan.http.serving import DrainingServer, uvicorn_config
from hotspan.plan.tiers import Extent
from hotspan.plan.weights import is_remote
from hotspan.server.adapters.opening import copies_directory, copies_swept, open_adapters
from hotspan.server.adapters.registry import AdapterRegistry
from hotspan.server.adapters.routes import adapter_router
from hotspan.server.adapters.snapshots import pinned_adapters
from hotspan.server.admin import CacheAdmin, admin_router
from hotspan.server.entrance import Entrance, open_entrance
from hotspan.server.faults import name_faults
from hotspan.server.forgetting import forget_sessions
from hotspan.server.front import Front
from hotspan.server.hardening import (
    REDIRECTS,
    check_draft,
    check_engine_keys,
    check_engine_variables,
    check_files,
    hardened,
)
from hotspan.server.liveness import Liveness, ProcessorTime
from hotspan.server.loading import answering_while_loading, loading_within
from hotspan.server.options import (
    ServeOptions,
    check_tiers,
    fetched,
    fetched_model,
)
from hotspan.server.principal import Link, current_held_since_s, current_tenant
from hotspan.server.sizes import BodyLimit, TextLimit
from hotspan.server.warming import Warming, warming_router

if TYPE_CHECKING:
    from hotspan.engine.launch import Engine

logger = logging.getLogger(__name__)

_WATCH_S = 1.0
_SOCKETS = "VLLM_RPC_BASE_PATH"
_SEQUENCES = "128"
"""That one request may ask for, as OpenAI has it. vLLM's 16,384 would hold all others up for minutes."""


def run_server(options: ServeOptions, own_options: tuple[str, ...] = (), link: Link | None = None) -> None:
    """Serve until a signal to stop, then let requests in flight end.

    link:   to the front of a store that this serves one model of; nobody else can use it then.
    Raises: ConfigError or EngineError with what to do, before the port answers.
    """
    show_log()
    raise_file_limit()
    surroundings = environment()
    options = hardened(options, surroundings)
    check_tls(options.engine_values)
    with contextlib.ExitStack() as stack:
        entrance = stack.enter_context(open_entrance(options, surroundings, link))
        aftermath = stack.enter_context(Aftermath())
        error_file = stack.enter_context(error_file_for(aftermath))
        stack.enter_context(copies_swept(options.server, aftermath))
        if options.cache is not None:
            if options.extent is None:
                check_tiers(options.cache, surroundings)
            options = dataclasses.replace(options, cache=dataclasses.replace(options.cache, error_file=str(error_file)))
        prepare_environment(error_file.parent, stack)
        if is_remote(options.model):
            with answering_while_loading(entrance.listeners[0], tls_options(options.engine_values)):
                options = fetched(options, surroundings)
        check_files(options, surroundings)
        try:
            asyncio.run(_serve(options, entrance, own_options, error_file, aftermath))
        except HotspanError as error:
            if error_file.exists() and (reason := error_file.read_text()):
                raise ConfigError(reason) from error  # what an engine process said is nearer to the cause
            raise
        finally:
            gc.collect()  # the engine's client is in cycles, and says so loudly if Python's own end finds it


async def _serve(
    options: ServeOptions, entrance: Entrance, own_options: tuple[str, ...], error_file: Path, aftermath: Aftermath
) -> None:
    from hotspan.engine.arguments import add_cache, check_hosts, check_replicas
    from hotspan.engine.guard import RequestGuard
    from hotspan.engine.launch import launch

    started = time.monotonic()
    arguments = _arguments(options, entrance, own_options)
    options = _without_useless_tiers(options, arguments, entrance)
    check_replicas(arguments)
    if check_hosts(arguments, options.cache) > 1:
        options = dataclasses.replace(options, extent=None)
    elif options.extent is not None and options.cache is not None:
        options = _planned(options, arguments, options.extent)
    add_cache(arguments, options.cache)
    order = FairOrder() if use_fair_queueing(arguments, options) else None
    guard = RequestGuard(
        current_tenant,
        current_held_since_s,
        is_isolated=options.is_isolated,
        is_cached=options.cache is not None,
        order=order,
        lines=SystemLines(options.server.drop_system_line, options.server.move_system_line),
    )
    formatters = _formatters(options.server, has_lora=bool(arguments.enable_lora))
    registry: AdapterRegistry | None = None
    try:
        async with contextlib.AsyncExitStack() as stack:
            startup_s, tls = options.server.startup_timeout_s, tls_options(vars(arguments))
            with answering_while_loading(entrance.listeners[0], tls), loading_within(startup_s, error_file):
                stack.enter_context(pinned_adapters(arguments, copies_directory(options.server)))
                engine = await stack.enter_async_context(launch(arguments, guard, aftermath))
                registry = await open_adapters(engine, options, formatters)
                warming, admin = await _warmed(engine, options, registry)
            if formatters is not None:
                formatters.tokenizer = engine.tokenizer
            computes = ProcessorTime() if engine.steps.computes_on_cpu else None
            liveness = Liveness(engine.steps, options.server.step_timeout_s, computes)
            front = _front(engine, options, registry, formatters, liveness, admin)
            warming.attach(front, front.admission)
            stack.push_async_callback(warming.close)
            ready = partial(_ready_line, options, entrance.listeners[0], started)
            await _answer(front, engine, liveness, arguments, options, entrance, ready)
    finally:
        if registry is not None:
            await registry.close()  # only now: the engine reads an adapter's copy whenever it needs it again


def _arguments(options: ServeOptions, entrance: Entrance, own_options: tuple[str, ...]) -> Namespace:
    """The engine's arguments, checked; a draft model that was remote is here then."""
    from hotspan.engine.arguments import parse_engine_arguments

    arguments = parse_engine_arguments(options.model, options.engine, own_options)
    _fetch_draft(arguments, options, entrance)
    check_draft(options, arguments, environment())
    check_engine_keys(arguments.api_key, environment())
    check_engine_variables(environment())
    arguments.host, arguments.port = options.server.host, options.server.port
    arguments.shutdown_timeout = arguments.shutdown_timeout or options.drain_s
    return arguments


def use_fair_queueing(arguments: Namespace, options: ServeOptions) -> bool:
    """Whether the engine begins tenants' prompts in fair turns. Mutates: `arguments`, whose queue is by priority then.

    That is so where there are several tenants, unless the operator chose how its queue is served.
    """
    if len(options.tenants.tenants) < 2 or "scheduling_policy" in options.engine_values:
        return False
    if arguments.scheduling_policy != "fcfs":  # as a file of vLLM's options has it
        return False
    arguments.scheduling_policy = "priority"
    return True


async def _warmed(
    engine: "Engine", options: ServeOptions, registry: AdapterRegistry | None
) -> tuple[Warming, CacheAdmin]:
    """Add hotspan's routes to the engine's, and compute a first text.

    Returns: what computes texts before their first request (routed where there is a cache), what administers the cache.
    """
    name_faults(engine.app)
    engine.app.include_router(
        adapter_router(registry, engine.names, is_open=options.server.client_adapters is not None)
    )
    admin = CacheAdmin(engine, options.cache, options.tenants, registry)
    engine.app.include_router(admin_router(admin))
    warming = Warming(
        has_keys=options.has_keys, retention=options.tenants.retention, tenants=len(options.tenants.tenants) + 1
    )
    admin.holders.append(warming.forget)
    if engine.is_embedding:
        return warming, admin
    if options.cache is not None:
        engine.app.include_router(warming_router(warming))
    chunk_tokens = options.cache.chunk_tokens if options.cache is not None else 0
    # A task of its own: what it leaves in its context is in none of the requests that this task's children serve.
    loaded = await asyncio.create_task(engine.warm(chunk_tokens))
    logger.info("load_path_warmed tokens=%d", loaded)
    return warming, admin


def _front(
    engine: "Engine",
    options: ServeOptions,
    registry: AdapterRegistry | None,
    formatters: Formatters | None,
    liveness: Liveness,
    admin: CacheAdmin,
) -> Front:
    return Front(
        engine.app,
        options.server,
        options.limits,
        names=engine.names,
        is_embedding=engine.is_embedding,
        is_alive=lambda: not engine.is_dead,
        illness=lambda: liveness.reason,
        adapters=registry,
        formatters=formatters,
        forget=forget_sessions(admin) if options.cache is not None else None,
        text_limit=TextLimit(engine.max_tokens, engine.max_chars),
        body_limit=_body_limit(engine, options.server.max_text_bytes),
        log=admin.log,
    )


def _body_limit(engine: "Engine", max_text_bytes: int | None) -> BodyLimit:
    """What bodies that are a prompt may have. max_text_bytes: as the operator gives it."""
    limit = TextLimit(engine.max_tokens, engine.max_chars).of_bodies() if engine.takes_one_text else BodyLimit()
    return limit if max_text_bytes is None else dataclasses.replace(limit, bytes=max_text_bytes)


async def _answer(
    front: Front,
    engine: "Engine",
    liveness: Liveness,
    arguments: Namespace,
    options: ServeOptions,
    entrance: Entrance,
    ready: Callable[[], str],
) -> None:
    """Serve until a signal to stop. Raises: EngineError if the engine died meanwhile."""
    app = with_cors(entrance.gate(front), vars(arguments))
    config = _uvicorn(app, arguments, options.limits)
    server = engine.app.state.server = DrainingServer(config, front.admission, arguments.shutdown_timeout, ready)
    watch = asyncio.create_task(go_on("watch", lambda: _watch(server, engine)))
    live = asyncio.create_task(go_on("liveness", liveness.watch))
    try:
        await server.serve(sockets=entrance.listeners)
    finally:
        watch.cancel()
        live.cancel()
    if engine.is_dead:
        raise EngineError("the engine died: the log above says why. Start the server again")
    if options.cache is not None and options.cache.disk is not None:
        print(f"hotspan ended: its KV is in {_kept(options.cache.disk)}", flush=True)


def _without_useless_tiers(options: ServeOptions, arguments: Namespace, entrance: Entrance) -> ServeOptions:
    """The options, without a cache if no tier can serve the model. Requests get 503 while its configuration is read."""
    from hotspan.engine.arguments import why_no_tiers

    if options.cache is None:
        return options
    with answering_while_loading(entrance.listeners[0], tls_options(vars(arguments))):
        reason = why_no_tiers(arguments)
    if reason is None:
        return options
    logger.warning("served_without_tiers reason=%s (--no-cache disables the tiers without this warning)", reason)
    return dataclasses.replace(options, cache=None)


def _fetch_draft(arguments: Namespace, options: ServeOptions, entrance: Entrance) -> None:
    """Replace a draft model in S3 by its local copy; requests get 503 meanwhile. Mutates: `arguments`."""
    from hotspan.engine.arguments import draft_model, with_draft_model

    draft = draft_model(arguments)
    if draft is not None and is_remote(draft):
        with answering_while_loading(entrance.listeners[0], tls_options(vars(arguments))):
            with_draft_model(arguments, fetched_model(draft, options, environment()))


def _uvicorn(app: ASGIApp, arguments: Namespace, limits: HttpLimits) -> uvicorn.Config:
    leave_out(vars(arguments))
    return uvicorn_config(
        app,
        limits,
        log_level=arguments.uvicorn_log_level,
        access_log=not arguments.disable_uvicorn_access_log,
        **tls_options(vars(arguments)),
    )


def _formatters(server: ServerSettings, *, has_lora: bool) -> Formatters | None:
    """The user's formatters; None if neither the model nor adapters can have some. Raises: ConfigError."""
    if server.formatters is None and not has_lora:
        return None
    return load_formatters(server.formatters, {}, is_secure=server.secure, timeout_s=server.formatter_timeout_s)


def _planned(options: ServeOptions, arguments: Namespace, extent: Extent) -> ServeOptions:
    """The same with the tiers that fit this machine and this model, which are printed.

    Mutates: `arguments`, as `plan_engine` does. Raises: ConfigError if a tier can't be had.
    """
    from hotspan.config.planned import planned_settings
    from hotspan.engine.arguments import plan_engine
    from hotspan.plan.advice import print_plan
    from hotspan.plan.host import Host

    surroundings = environment()
    host = Host.probe(surroundings, () if extent is Extent.MODEST else None)
    plan = plan_engine(arguments, host, options.cache, extent)
    print_plan(plan)
    cache = None if options.cache is None else planned_settings(options.cache, plan)
    if cache is not None:
        check_tiers(cache, surroundings)
    return dataclasses.replace(options, cache=cache)


async def _watch(server: uvicorn.Server, engine: "object") -> None:
    """Stop serving when the engine has died, so that a supervisor can restart the server."""
    while not getattr(engine, "is_dead", False):
        await asyncio.sleep(_WATCH_S)
    logger.error("engine_died: the server stops")
    server.should_exit = True


def _ready_line(options: ServeOptions, listener: socket.socket, started_s: float) -> str:
    tiers = "no cache but the engine's own"
    if options.cache is not None:
        tiers = f"{options.cache.ram_bytes / GIB:g} GiB of RAM"
        if options.cache.disk is not None:
            tiers += f", up to {options.cache.disk.bytes / GIB:g} GiB in {_kept(options.cache.disk)}"
    scheme = "https" if tls_options(options.engine_values) else "http"
    ready = f"hotspan is ready on {scheme}://{options.server.host}:{options.server.port}"
    if listener.family is socket.AF_UNIX:
        ready = "this model is ready"  # the front of its store says where
    return f"{ready} after {time.monotonic() - started_s:.0f} s: {options.model}, {tiers}"


def _kept(disk: DiskSettings) -> str:
    """The directory of a disk tier, and the command that removes it."""
    return f"{disk.directory}, which stays for the next start (hotspan cache remove {shlex.quote(disk.directory)})"


@contextlib.contextmanager
def error_file_for(aftermath: Aftermath) -> Iterator[Path]:
    """The file in which an engine process leaves the reason why it did not start."""
    with tempfile.TemporaryDirectory(prefix="hotspan-") as directory:
        aftermath.remove(Path(directory))
        yield Path(directory) / "reason"


def show_log() -> None:
    """Log hotspan's lines to stderr, unless logging is configured (VLLM_LOGGING_CONFIG_PATH)."""
    own = logging.getLogger("hotspan")
    if not own.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s %(name)s %(message)s"))
        own.addHandler(handler)
        own.setLevel(logging.INFO)


def prepare_environment(temporary: Path, stack: contextlib.ExitStack) -> None:
    """Set what vLLM reads from the environment only. No other place writes to it.

    temporary: where the engine's sockets go until `stack` ends, which also removes them.
    """
    if _SOCKETS not in os.environ:
        os.environ[_SOCKETS] = str(temporary)
        stack.callback(os.environ.pop, _SOCKETS, None)
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault(REDIRECTS, "0")
    os.environ.setdefault("VLLM_MAX_N_SEQUENCES", _SEQUENCES)
