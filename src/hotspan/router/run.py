"""The router's process: opened, bound, served, drained."""

import contextlib
import ctypes
import gc
import logging
import random
import socket
import sys
from collections.abc import AsyncIterator

import uvicorn

from hotspan.config.environment import environment
from hotspan.core.clock import Clock
from hotspan.http.serving import BACKLOG, DrainingServer, bind, uvicorn_config
from hotspan.http.upstream import Upstream
from hotspan.router.gateway import Gateway
from hotspan.router.parts import http_limits
from hotspan.router.settings import RouterSettings
from hotspan.router.tracing import Tracer, endpoint_of, no_tracer, open_tracer

_MMAP_THRESHOLD = -3
"""M_MMAP_THRESHOLD of glibc's mallopt(3)."""

_LARGE_BYTES = 1 << 20


@contextlib.asynccontextmanager
async def opened(
    settings: RouterSettings,
    *,
    clock: Clock | None = None,
    rng: random.Random | None = None,
    tracer: Tracer = no_tracer,
) -> AsyncIterator[Gateway]:
    """A gateway that runs, and has checked its replicas once. Raises: ConfigError, as Gateway."""
    async with Upstream(
        connect_timeout_s=settings.connect_timeout_s, read_timeout_s=settings.read_timeout_s
    ) as upstream:
        gateway = Gateway(settings, upstream, clock=clock, rng=rng, tracer=tracer)
        async with gateway.running():
            yield gateway


def run_router(settings: RouterSettings) -> None:
    """Serve until a signal to stop, then let requests in flight end.

    Raises: ConfigError with what to do, before the port answers.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    with contextlib.closing(bind(settings.host, settings.port)) as listener:
        import uvloop

        uvloop.run(_serve(settings, listener))


async def _serve(settings: RouterSettings, listener: socket.socket) -> None:
    with contextlib.ExitStack() as stack:
        tracer: Tracer = no_tracer
        variables = environment()
        if endpoint := endpoint_of(settings.otlp_endpoint, variables):
            tracer, end = open_tracer(endpoint, variables)
            stack.callback(end)
        async with opened(settings, tracer=tracer) as gateway:
            settle_memory()
            config = served(gateway, settings)
            server = DrainingServer(config, gateway, settings.drain_s, lambda: _ready_line(settings, listener))
            await server.serve(sockets=[listener])


def _ready_line(settings: RouterSettings, listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"hotspan routes to {len(settings.replicas)} replicas at http://{shown}:{port}"


def served(app: Gateway, settings: RouterSettings) -> uvicorn.Config:
    """How uvicorn serves the router's app."""
    return uvicorn_config(
        app,
        http_limits(settings),
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        date_header=False,
        backlog=BACKLOG,
    )


def settle_memory() -> None:
    """Collect garbage seldom, and give the pages of large tables back when they are made anew. Once, when all is open.

    Requests leave hardly any cycles, and what lives as long as the process none. glibc takes memory from 128 KiB on
    from the kernel, but raises that to the size of whatever is freed, up to 32 MiB: then each dict that is made anew
    leaves a hole in the heap of its own size.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl and macOS have none
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)
