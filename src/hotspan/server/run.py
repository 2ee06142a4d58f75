"""The life of one replica: check, bind, load, warm, serve, drain."""

import asyncio
import contextlib
import dataclasses
import gc
import logging
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn

from hotspan.core.errors import ConfigError, HotspanError
from hotspan.core.types import GIB
from hotspan.server.options import ServeOptions, bind, check_tiers

logger = logging.getLogger(__name__)

_WATCH_S = 1.0


def run_server(options: ServeOptions, own_options: tuple[str, ...] = ()) -> None:
    """Serve until a signal to stop, then let requests in flight end.

    Raises: ConfigError or EngineError with what to do, before the port answers.
    """
    listener = bind(options.host, options.port)
    with contextlib.closing(listener), _error_file() as error_file:
        if options.cache is not None:
            check_tiers(options.cache)
            options = dataclasses.replace(options, cache=dataclasses.replace(options.cache, error_file=str(error_file)))
        _prepare_environment()
        try:
            asyncio.run(_serve(options, listener, own_options))
        except HotspanError as error:
            if error_file.exists() and (reason := error_file.read_text()):
                raise ConfigError(reason) from error  # what an engine process said is nearer to the cause
            raise
        finally:
            gc.collect()  # the engine's client is in cycles, and says so loudly if Python's own end finds it


async def _serve(options: ServeOptions, listener: socket.socket, own_options: tuple[str, ...]) -> None:
    from hotspan.engine.arguments import add_cache, parse_engine_arguments
    from hotspan.engine.launch import launch

    started = time.monotonic()
    arguments = parse_engine_arguments(options.model, options.engine, own_options)
    arguments.host, arguments.port = options.host, options.port
    arguments.shutdown_timeout = arguments.shutdown_timeout or options.drain_s
    add_cache(arguments, options.cache)
    async with launch(arguments) as engine:
        if options.cache is not None:
            loaded = await engine.warm(options.cache.chunk_tokens)
            logger.info("load_path_warmed tokens=%d", loaded)
        server = _Server(
            uvicorn.Config(
                engine.app,
                log_level=arguments.uvicorn_log_level,
                access_log=not arguments.disable_uvicorn_access_log,
                timeout_graceful_shutdown=arguments.shutdown_timeout,
                ssl_keyfile=arguments.ssl_keyfile,
                ssl_certfile=arguments.ssl_certfile,
                ssl_ca_certs=arguments.ssl_ca_certs,
                ssl_cert_reqs=arguments.ssl_cert_reqs,
            ),
            lambda: _ready_line(options, time.monotonic() - started),
        )
        watch = asyncio.create_task(_watch(server, engine))
        try:
            await server.serve(sockets=[listener])
        finally:
            watch.cancel()


class _Server(uvicorn.Server):
    """uvicorn that says when it is ready, drains on the first signal and cuts off on the second."""

    def __init__(self, config: uvicorn.Config, ready_line: Callable[[], str]) -> None:
        super().__init__(config)
        self._ready_line = ready_line

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            print(self._ready_line(), flush=True)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop, number)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def _stop(self, number: signal.Signals) -> None:
        if self.should_exit:
            self.force_exit = True
            return
        print(f"hotspan stops on {signal.Signals(number).name}: requests in flight go on to their end", flush=True)
        self.should_exit = True


async def _watch(server: uvicorn.Server, engine: "object") -> None:
    """Stop serving when the engine has died: whoever runs us starts us again."""
    while not getattr(engine, "is_dead", False):
        await asyncio.sleep(_WATCH_S)
    logger.error("engine_died: the server stops")
    server.should_exit = True


def _ready_line(options: ServeOptions, seconds: float) -> str:
    tiers = "no cache but the engine's own"
    if options.cache is not None:
        tiers = f"{options.cache.ram_bytes / GIB:g} GiB of RAM"
        if options.cache.disk is not None:
            tiers += f", {options.cache.disk.bytes / GIB:g} GiB in {options.cache.disk.directory}"
    return f"hotspan is ready on http://{options.host}:{options.port} after {seconds:.0f} s: {options.model}, {tiers}"


@contextlib.contextmanager
def _error_file() -> Iterator[Path]:
    """Where an engine process leaves the reason why it did not start."""
    with tempfile.TemporaryDirectory(prefix="hotspan-") as directory:
        yield Path(directory) / "reason"


def _prepare_environment() -> None:
    """The only place that writes to the environment: what vLLM reads nowhere else."""
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
