"""A server's process: its address, its readiness, and how it stops."""

import asyncio
import contextlib
import errno
import math
import signal
import socket
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import uvicorn
from uvicorn.server import ServerState

from hotspan.core.errors import ConfigError
from hotspan.http.connections import HttpLimits, connection_class

BACKLOG = 4096
"""Connections that the kernel holds until they are accepted."""

CUT_S = 3
"""Of the time to drain: for the errors of those that did not end, and for their connections."""


class _Unlogged(uvicorn.Config):
    """Leaves the loggers of uvicorn as they are: those of the program, which may serve an application by it as well."""

    def configure_logging(self) -> None:
        pass


def uvicorn_config(
    app: Any, limits: HttpLimits, kind: type[uvicorn.Config] = uvicorn.Config, **options: Any
) -> uvicorn.Config:
    """How uvicorn serves an app within limits. options: further ones of uvicorn's."""
    return kind(
        app,
        http=connection_class(limits),
        proxy_headers=False,
        timeout_keep_alive=math.ceil(limits.idle_s),
        timeout_graceful_shutdown=CUT_S,
        **options,
    )


async def listen(
    app: Any,
    limits: HttpLimits,
    listener: socket.socket,
    state: ServerState,
    *,
    backlog: int = BACKLOG,
    accepted: Iterable[socket.socket] = (),
) -> asyncio.Server:
    """Serve an app in a program with a life of its own.

    state:    where its connections and tasks are.
    backlog:  connections that the kernel holds, and that are accepted at once.
    accepted: connections of this listener that there are already.
    """
    config = uvicorn_config(app, limits, _Unlogged, interface="asgi3", lifespan="off", ws="none")
    config.load()
    connection: Any = config.http_protocol_class

    def connected() -> asyncio.Protocol:
        made = connection(config=config, server_state=state, app_state={})
        made.access_log = False
        return made  # type: ignore[no-any-return]

    loop = asyncio.get_running_loop()
    for each in accepted:
        await loop.connect_accepted_socket(connected, each)
    return await loop.create_server(connected, sock=listener, backlog=backlog)


class Drainable(Protocol):
    """Who knows which requests are in work."""

    def drain(self) -> None:
        """Admit nobody from now on."""

    async def drained(self, within_s: float) -> object:
        """Return when the last request has ended, or is to be cut off because it has not by then."""


class DrainingServer(uvicorn.Server):
    """uvicorn that drains on the first signal and cuts off on the second.

    The port stays open while requests in flight go on to their end, so that whoever comes is told to go elsewhere.
    """

    def __init__(
        self, config: uvicorn.Config, requests: Drainable, drain_s: float, ready_line: Callable[[], str]
    ) -> None:
        super().__init__(config)
        self._requests = requests
        self._drain_s = drain_s
        self._ready_line = ready_line
        self._draining: asyncio.Task[None] | None = None

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
        if self._draining is not None:
            self.should_exit = self.force_exit = True
            return
        print(f"hotspan stops on {signal.Signals(number).name}: requests in flight go on to their end", flush=True)
        self._requests.drain()
        self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        try:
            await self._requests.drained(max(self._drain_s - CUT_S, 0))
        finally:
            self.should_exit = True


def bind(host: str, port: int, role: str = "") -> socket.socket:
    """A socket of that address, not yet listening, so that a taken port is an error at once.

    role:   what the names of its options begin with.
    Raises: ConfigError if the address can't be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named, or asyncio leaves TCP_NODELAY off: what follows a head would wait for the client's delayed acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with address_errors(host, port, role):
            listener.bind((host, port))
    except BaseException:
        listener.close()
        raise
    return listener


@contextlib.contextmanager
def address_errors(host: str, port: int, role: str = "") -> Iterator[None]:
    """Turn what the kernel says of an address into a ConfigError."""
    try:
        yield
    except OverflowError as error:
        raise ConfigError(f"--{role}port {port} is no port: give one from 1 to 65535") from error
    except OSError as error:
        reason = {
            errno.EADDRINUSE: f"is taken by another process: stop it, or give another --{role}port",
            errno.EACCES: f"needs privileges: give a --{role}port above 1023",
            errno.EADDRNOTAVAIL: f"is no address of this machine: give another --{role}host",
        }.get(error.errno or 0, f"can't be had ({error.strerror}): give another --{role}host or --{role}port")
        raise ConfigError(f"{host}:{port} {reason}") from error
