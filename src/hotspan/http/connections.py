"""Connections that nobody can hold for nothing: deadlines for heads and for reading answers, and room for newcomers.

    connected -> head, within head_s -> request in work -> answer, read within deaf_s -> idle_s -> closed
        waiting                                                                          waiting

What waits without a request is closed first when there are too many, the oldest before all others. Bodies have their
deadlines where they are read (bodies.py).
"""

import asyncio
import resource
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from hotspan.core.types import GIB, MIB
from hotspan.http.exchange import ON_LOST

Divert = Callable[[int, Callable[[], memoryview], Callable[[int], None]], None]
DIVERT = "hotspan.divert"
"""In a scope: the connection's `divert`."""

WHOLE = "hotspan.whole"
"""In a scope once all of the request's body has come."""

MAX_PIPELINED = 1024
"""Requests of a connection that wait for the one in work."""

_FILES = 65_536
"""That a server may open, where the system lets it: many systems begin with 1,024, and connections are files."""

_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_FULL = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nretry-after: 1\r\nconnection: close\r\n\r\n"


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What clients may take of a server.

    max_request_bytes: of one body.
    held_bytes:        of all bodies in memory; half of it is divided between the principals.
    principals:        how many there are: tenants, the administrator, and clients without a key.
    stall_s:           without a byte of a body.
    least_rate:        of a body, on average, in bytes/s; `stall_s` more is allowed.
    head_s:            for a request's head, from its first byte (or the connection) on.
    head_bytes:        of a request's head.
    deaf_s:            without a byte of the response being read.
    idle_s:            between two requests of a connection.
    connections:       at a time; the one that waits longest without a request makes room for a new one. Bodies may
                       arrive on half of them, which is divided as `held_bytes` is.
    """

    max_request_bytes: int = 64 * MIB
    held_bytes: int = GIB
    principals: int = 2
    stall_s: float = 10.0
    least_rate: float = 1e5
    head_s: float = 10.0
    head_bytes: int = 64 * 1024
    deaf_s: float = 60.0
    idle_s: float = 5.0
    connections: int = 4096


class _Flow(FlowControl):
    """Reads no further while requests wait that have been read."""

    def __init__(self, connection: "BoundedConnection") -> None:
        super().__init__(connection.transport)
        self._connection = connection

    def resume_reading(self) -> None:
        if not self._connection.pipeline:
            super().resume_reading()


class BoundedConnection(HttpToolsProtocol):
    """uvicorn's connection, with limits."""

    limits: ClassVar[HttpLimits]
    max_connections: ClassVar[int]
    waiting: ClassVar[OrderedDict["BoundedConnection", None]]
    """Those without a request in work, the one that has waited longest first."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._deadline: asyncio.TimerHandle | None = None
        self._deaf: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._is_in_body = False
        self._is_diverted = False
        self._is_lost = False
        self._told: Callable[[], None] | None = None

    # -- what asyncio calls --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(self)
        if hasattr(transport, "max_size"):  # asyncio's: larger reads are allocated anew, page by page
            transport.max_size = HIGH_WATER_LIMIT
        self._wait(self.limits.head_s)
        if len(self.connections) > self.max_connections:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        is_first = not self._is_in_body and not self._head_bytes and self._is_free()
        if not self._is_in_body:
            self._head_bytes += len(data)
        super().data_received(data)
        if is_first and self._head_bytes and not self._is_in_body and self._is_free():
            self._wait(self.limits.head_s)  # for the rest of a head, which seldom comes in parts
        if self._head_bytes > self.limits.head_bytes and not self._is_in_body and not self.transport.is_closing():
            self.transport.write(_TOO_LARGE)
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._work()
        self.resume_writing()
        super().connection_lost(exc)
        self._is_lost = True
        if self._told is not None:
            self._told()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._deaf = self.loop.call_later(self.limits.deaf_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._deaf is not None:
            self._deaf.cancel()
            self._deaf = None

    # -- what uvicorn calls --------------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        # uvicorn would add what follows a chunked body to the headers that the app has, also where it has checked them.
        if not self._is_in_body:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError(f"{MAX_PIPELINED} requests wait on one connection")  # uvicorn answers 400, and closes
        self._work()
        self._is_in_body = True
        cast(dict[str, Any], self.scope).update({DIVERT: self.divert, ON_LOST: self.on_lost})
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        cast(dict[str, Any], self.scope)[WHOLE] = True
        self._is_in_body = False
        self._head_bytes = 0
        if self._is_free():  # it was answered before its end
            self._wait(self.limits.idle_s)

    def on_response_complete(self) -> None:
        self._told = None  # a connection that is kept would keep the request, too
        super().on_response_complete()
        if not self.transport.is_closing() and self._is_free():
            # For the next head, or for the rest of a body that was answered before its end.
            self._wait(self.limits.stall_s if self._is_in_body else self.limits.idle_s)

    # -- what an application calls -------------------------------------------------------------------------------------

    def divert(self, left: int, buffer: Callable[[], memoryview], received: Callable[[int], None]) -> None:
        """Receive the other `left` bytes of the body into `buffer`; with 0 stop that, and close after the response.

        received: called with how many were written to the buffer that was asked for last.
        """
        if left:
            self._is_diverted = True
            self.transport.set_protocol(_Diverted(self, left, buffer, received))
        elif self._is_diverted:
            self._is_diverted = self.cycle.keep_alive = False  # the parser does not know where the next request begins
            self.transport.set_protocol(self)

    def on_lost(self, told: Callable[[], None]) -> None:
        """Have `told` called once the client has closed its connection; at once if it has.

        For the request in work, whose body has been read. The next one's takes its place.
        """
        self._told = told
        self.flow.resume_reading()  # the end of a large body leaves it paused
        if self._is_lost:
            self.loop.call_soon(told)

    def body_received(self) -> None:
        """All of a diverted body has come."""
        self._is_diverted = False
        self.transport.set_protocol(self)
        self.parser = httptools.HttpRequestParser(self)  # the last one waits for the body
        self.on_message_complete()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _is_free(self) -> bool:
        """Whether no request is in work."""
        return self.cycle is None or self.cycle.response_complete

    def _wait(self, seconds: float) -> None:
        """Hang up unless a request begins in time."""
        self._work()
        self._deadline = self.loop.call_later(seconds, self.transport.abort)
        self.waiting[self] = None

    def _work(self) -> None:
        """Nothing is waited for."""
        self.waiting.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _make_room(self) -> None:
        oldest = next(iter(self.waiting))
        oldest._work()
        if oldest is self:  # all others are in work
            self.transport.write(_FULL)
            self.transport.close()
        else:
            oldest.transport.abort()


class _Diverted(asyncio.BufferedProtocol):
    """In a connection's place while a body is received into memory."""

    def __init__(
        self,
        connection: BoundedConnection,
        left: int,
        buffer: Callable[[], memoryview],
        received: Callable[[int], None],
    ) -> None:
        self._left = left
        self._buffer = buffer
        self._received = received
        self._connection = connection
        self.connection_lost = connection.connection_lost  # type: ignore[method-assign]
        self.pause_writing = connection.pause_writing  # type: ignore[method-assign]
        self.resume_writing = connection.resume_writing  # type: ignore[method-assign]

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer()[: self._left]

    def buffer_updated(self, nbytes: int) -> None:
        self._left -= nbytes
        self._received(nbytes)
        if not self._left:
            self._connection.body_received()


def connection_class(settings: HttpLimits) -> type[asyncio.Protocol]:
    """What uvicorn makes a connection of (`uvicorn.Config(http=...)`).

    There are never more than half of the files that this process may open.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)

    class Connection(BoundedConnection):
        limits = settings
        max_connections = min(settings.connections, files // 2)
        waiting: ClassVar[OrderedDict[BoundedConnection, None]] = OrderedDict()

    return Connection


def raise_file_limit() -> None:
    """Raise this process's limit of open files to what a server can use."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
