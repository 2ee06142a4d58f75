"""HTTP/1.1 as the daemon serves it: bodies go from the socket straight to where they belong, nothing takes for ever.

    socket --recv_into--> head, 16 KiB at most --> a body: a place in shared memory, or one to throw away
           --recv_into--> that place, until Content-Length is reached --> response

httptools (llhttp) reads the head, strictly: what two readers could take for different requests is refused.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import NamedTuple, Protocol

import httptools

from hotspan.core.clock import Clock
from hotspan.core.head import HeadError, check_head, origin_form
from hotspan.core.types import MIB

logger = logging.getLogger(__name__)

MOST_HEAD_BYTES = 16384
MOST_WASTE_BYTES = 256 * MIB
"""A body that nobody wants is read before the answer, so that any client hears it; a larger one is answered at once."""

_END = b"\r\n\r\n"
_DEAF, _FULL = "the client reads no answers", "the head's buffer is full"
_WASTE = memoryview(bytearray(256 * 1024))


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What a connection may take before the daemon hangs up.

    head_s:      for a request's head, from its first byte on.
    stall_s:     without a byte of a body.
    least_rate:  of a body, on average, in bytes/s; `stall_s` more is allowed.
    idle_s:      between two requests.
    connections: at a time; more are answered 503.
    """

    head_s: float = 10.0
    stall_s: float = 10.0
    least_rate: float = 1e6
    idle_s: float = 300.0
    connections: int = 4096


class Request(NamedTuple):
    """The head of a request.

    target: its path and query, as they were sent. size: of the body in bytes, None where none was announced.
    """

    method: str
    target: bytes
    size: int | None


class Response(NamedTuple):
    """What is answered."""

    status: int
    body: bytes = b""
    content_type: str = "application/json"


Answer = Response | Awaitable[Response]


class Body(Protocol):
    """Where a request's body goes.

    left:    bytes that are still to come.
    refusal: the answer, if it is known before the body is there.
    """

    left: int
    refusal: Response | None

    def buffer(self) -> memoryview:
        """Where the next of them go; not empty while some are left."""
        ...

    def received(self, size: int) -> None:
        """So many were written there."""
        ...

    def ended(self) -> Answer:
        """All are there."""
        ...

    def lost(self) -> None:
        """No more will come, and nobody waits for an answer."""
        ...


class Waste:
    """A body that nobody wants. answer: what is answered when it is over, or finds that out then."""

    def __init__(self, size: int, answer: Response | Callable[[], Answer]) -> None:
        self.left = size
        self.refusal = answer if isinstance(answer, Response) else None
        self._answer = answer

    def buffer(self) -> memoryview:
        return _WASTE[: self.left]

    def received(self, size: int) -> None:
        self.left -= size

    def ended(self) -> Answer:
        return self._answer if isinstance(self._answer, Response) else self._answer()

    def lost(self) -> None:
        return


class HttpConnection(asyncio.BufferedProtocol):
    """One client's connection. One request is in work at a time; what comes meanwhile waits in the head's buffer.

    answer: says where a request's body goes. all: the connections there are; this one keeps itself in it.
    """

    def __init__(
        self, answer: Callable[[Request], Body], limits: HttpLimits, clock: Clock, all: set["HttpConnection"]
    ) -> None:
        self._answer = answer
        self._limits = limits
        self._clock = clock
        self._all = all
        self._head = memoryview(bytearray(MOST_HEAD_BYTES))
        self._filled = 0
        self._body: Body | None = None
        self._body_until_s = 0.0
        self._waiting: asyncio.Future[None] | None = None
        self._keeps = True
        self._is_answered = False
        self._deadline_s = clock.monotonic() + limits.idle_s
        self._pauses: set[str] = set()
        self._transport: asyncio.Transport

    def sweep(self, now_s: float) -> None:
        """Hang up on a client that takes too long."""
        if self._waiting is None and now_s >= self._deadline_s:
            self._transport.abort()

    def close(self) -> None:
        """Hang up."""
        self._transport.abort()

    # -- what asyncio calls --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # of a stream socket
        self._all.add(self)
        if len(self._all) > self._limits.connections:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._head[self._filled :] if self._body is None else self._body.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        if self._body is not None:
            self._took(self._body, nbytes)
        else:
            if not self._filled:
                self._deadline_s = self._clock.monotonic() + self._limits.head_s
            self._filled += nbytes
        self._go_on()

    def connection_lost(self, error: Exception | None) -> None:
        self._all.discard(self)
        if self._body is not None:
            self._body.lost()
            self._body = None
        if self._waiting is not None:
            self._waiting.cancel()

    def pause_writing(self) -> None:
        self._pause(_DEAF)

    def resume_writing(self) -> None:
        self._resume(_DEAF)
        self._go_on()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Do what can be done with what has come."""
        while not self._transport.is_closing() and self._waiting is None and _DEAF not in self._pauses:
            if self._body is not None:
                if self._body.left:
                    return
                self._end_body(self._body)
            elif not self._begin_request():
                break
        if self._filled == MOST_HEAD_BYTES:
            self._pause(_FULL)

    def _begin_request(self) -> bool:
        """Take up a request, and give to its body what came behind its head; False if there is no whole head."""
        end = bytes(self._head[: self._filled]).find(_END) + len(_END)
        if end < len(_END):
            if self._filled == MOST_HEAD_BYTES:
                self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
            return False
        head = _Head()
        refusal = head.read(self._head[:end])
        if refusal is not None:
            self._refuse(refusal)
            return False
        self._keeps = head.keeps
        body = self._answer(Request(head.method, head.target, head.size))
        self._begin_body(body, expects_continue=head.expects_continue)
        while end < self._filled and body.left:
            into = body.buffer()
            part = self._head[end : min(self._filled, end + len(into))]
            into[: len(part)] = part
            self._took(body, len(part))
            end += len(part)
        rest = bytes(self._head[end : self._filled])
        self._head[: len(rest)] = rest
        self._filled = len(rest)
        self._resume(_FULL)
        return True

    def _begin_body(self, body: Body, *, expects_continue: bool) -> None:
        now, limits = self._clock.monotonic(), self._limits
        self._body = body
        self._body_until_s = now + limits.stall_s + body.left / limits.least_rate
        self._deadline_s = min(now + limits.stall_s, self._body_until_s)
        self._is_answered = False
        if not body.left:
            return
        if body.refusal is not None and (expects_continue or body.left > MOST_WASTE_BYTES):
            self._is_answered, self._keeps = True, False
            self._write(body.refusal)
        elif expects_continue:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _took(self, body: Body, size: int) -> None:
        body.received(size)
        self._deadline_s = min(self._clock.monotonic() + self._limits.stall_s, self._body_until_s)

    def _end_body(self, body: Body) -> None:
        self._body = None
        answer = body.ended()
        if self._is_answered:
            self._transport.close()
        elif isinstance(answer, Response):
            self._end_request(answer)
        else:
            self._waiting = asyncio.ensure_future(self._answer_later(answer))

    async def _answer_later(self, answer: Awaitable[Response]) -> None:
        try:
            response = await answer
        except Exception:
            logger.exception("request_failed")  # else its client would wait for ever
            response = Response(HTTPStatus.INTERNAL_SERVER_ERROR)
        self._waiting = None
        self._end_request(response)
        self._go_on()

    def _end_request(self, response: Response) -> None:
        limits = self._limits
        self._deadline_s = self._clock.monotonic() + (limits.head_s if self._filled else limits.idle_s)
        self._write(response)
        if not self._keeps:
            self._transport.close()

    def _refuse(self, status: HTTPStatus) -> None:
        """Answer what is no request, and hang up."""
        self._keeps = False
        self._write(Response(status))
        self._transport.close()

    def _write(self, response: Response) -> None:
        """In one piece: a head and a body in two would cost 40 ms without TCP_NODELAY."""
        head = (
            f"HTTP/1.1 {response.status} {HTTPStatus(response.status).phrase}\r\ncontent-type: {response.content_type}"
            f"\r\ncontent-length: {len(response.body)}\r\n"
        )
        if not self._keeps:
            head += "connection: close\r\n"
        self._transport.write(head.encode("ascii") + b"\r\n" + response.body)

    def _pause(self, why: str) -> None:
        self._pauses.add(why)
        self._transport.pause_reading()

    def _resume(self, why: str) -> None:
        self._pauses.discard(why)
        if not self._pauses:
            self._transport.resume_reading()


class _Head:
    """What a request's head says. size: its Content-Length, None if there is none."""

    def __init__(self) -> None:
        self.method = ""
        self.target = b""
        self.size: int | None = None
        self.keeps = self.expects_continue = False
        self._headers: list[tuple[bytes, bytes]] = []
        self._is_encoded = False
        self._parser: httptools.HttpRequestParser | None = None

    def read(self, data: memoryview) -> HTTPStatus | None:
        """Read all of it; why it is refused, if it is."""
        self._parser = parser = httptools.HttpRequestParser(self)
        try:
            parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade, ValueError):
            return HTTPStatus.BAD_REQUEST
        finally:
            self._parser = None  # they would keep each other
        version = parser.get_http_version()
        if version not in ("1.0", "1.1"):
            return HTTPStatus.HTTP_VERSION_NOT_SUPPORTED
        try:
            self.target = origin_form(self.target)
            check_head(self.target, self._headers, version=version)
        except HeadError as error:
            return HTTPStatus(error.status)
        self.method = parser.get_method().decode("ascii")
        return HTTPStatus.LENGTH_REQUIRED if self._is_encoded else None

    # -- what httptools calls ------------------------------------------------------------------------------------------

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self._headers.append((name, value))
        if name == b"content-length":
            self.size = int(value)
        elif name == b"transfer-encoding":
            self._is_encoded = True
        elif name == b"expect":
            self.expects_continue = value.lower() == b"100-continue"

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self.keeps = self._parser.should_keep_alive()  # once a request without a body is over, it is forgotten
