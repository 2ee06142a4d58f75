"""Requests to other servers: connections that stay open, heads without what belongs to one hop, bodies as they come."""

import contextlib
import ssl
from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import Self

import aiohttp
from yarl import URL

from hotspan.http.errors import HttpError
from hotspan.http.exchange import REQUEST_ID, Exchange, RawHeaders
from hotspan.http.head import HeadError, end_to_end, header_text
from hotspan.http.paths import INVOCATIONS, PREFETCH, STATELESS, WORK

IDLE_S = 3.0
"""How long a connection may wait for the next request: less than the 5 s of hotspan's servers and of uvicorn."""

_MAX_HEAD_LINE = 64 * 1024
_AUTOMATIC = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
_FORWARDED = "x-forwarded-for"


class _UpstreamError(Exception):
    """is_overdue: it took too long."""

    def __init__(self, why: str, *, is_overdue: bool = False) -> None:
        super().__init__(why)
        self.is_overdue = is_overdue


class UnreachedError(_UpstreamError):
    """A server sent no head of a response; if it is overdue, it had the request."""


class BrokenError(_UpstreamError):
    """A response broke off, or nothing of it came any more."""


class UpstreamResponse:
    """A response whose body is not yet read. `close` frees the connection, in whatever state."""

    __slots__ = ("_response", "status")

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status

    @property
    def headers(self) -> RawHeaders:
        """As the client is to get them."""
        found = end_to_end(self._response.raw_headers)
        if self.status in (204, 304):
            found = [(name, value) for name, value in found if name.lower() != b"content-length"]
        return found

    def header(self, name: str) -> str:
        """One header; "" if it is not there."""
        return self._response.headers.get(name, "")

    @property
    def length(self) -> int:
        """The announced bytes of the body; -1 if none are."""
        length = self.header("content-length")
        return int(length) if length.isdigit() else -1

    async def part(self) -> bytes:
        """What has come of the body since, at least a byte; b"" at its end. Raises: BrokenError."""
        try:
            return await self._response.content.readany()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise BrokenError(_said(error), is_overdue=isinstance(error, TimeoutError)) from error

    async def whole(self, max_bytes: int) -> bytes:
        """The whole body. Raises: BrokenError, also where it is larger than `max_bytes`."""
        parts, size = [], 0
        while part := await self.part():
            parts.append(part)
            if (size := size + len(part)) > max_bytes:
                raise BrokenError(f"the answer is larger than {max_bytes} bytes")
        return b"".join(parts)

    def close(self) -> None:
        """Use the connection again if the body was read to its end; close it otherwise."""
        self._response.close()


class Upstream:
    """Connections to any number of servers, or to the one at a Unix socket. One event loop's.

    read_timeout_s: between two bytes; None waits for ever.
    unix_path:      every request goes there, over a connection of its own: none that the server is about to close.
    """

    def __init__(
        self,
        *,
        connect_timeout_s: float,
        read_timeout_s: float | None = None,
        tls: ssl.SSLContext | bool = True,
        unix_path: str | None = None,
    ) -> None:
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s, sock_read=read_timeout_s)
        connector: aiohttp.BaseConnector
        if unix_path is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S, ssl=tls, ttl_dns_cache=10)
        else:
            connector = aiohttp.UnixConnector(unix_path, limit=0, force_close=True)
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=self._timeout,
            auto_decompress=False,
            skip_auto_headers=_AUTOMATIC,
            max_line_size=_MAX_HEAD_LINE,
            max_field_size=_MAX_HEAD_LINE,
        )
        self._urls: dict[tuple[str, str], URL] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def ask(
        self,
        server: str,
        method: str,
        target: str,
        headers: list[tuple[str, str]],
        body: bytes = b"",
        *,
        within_s: float | None = None,
    ) -> UpstreamResponse:
        """The response of a server to a request, once its head is there.

        server: scheme, host and port. target: path and query as they are to be sent.
        Raises: UnreachedError; HttpError 400 for what can't be sent to any server, before it is.
        """
        timeout = self._timeout if within_s is None else aiohttp.ClientTimeout(total=within_s)
        try:
            response = await self._session.request(
                method,
                self._url(server, target),
                headers=headers,
                data=body or None,
                allow_redirects=False,
                timeout=timeout,
            )
        except (ValueError, aiohttp.InvalidURL) as error:  # the client wrote it; no server was asked
            raise HttpError(400, "the request's head can't be sent on: send plain targets and headers") from error
        except aiohttp.ConnectionTimeoutError as error:
            raise UnreachedError(_said(error)) from error
        except (TimeoutError, aiohttp.ServerTimeoutError) as error:
            raise UnreachedError(_said(error), is_overdue=True) from error
        except (aiohttp.ClientError, OSError) as error:
            raise UnreachedError(_said(error)) from error
        return UpstreamResponse(response)

    async def fetch(
        self,
        server: str,
        target: str,
        *,
        method: str = "GET",
        headers: Sequence[tuple[str, str]] = (),
        body: bytes = b"",
        within_s: float | None = None,
        max_bytes: int = 4 << 20,
    ) -> tuple[int, bytes]:
        """Status and body of a response. Raises: as `ask`, and BrokenError."""
        response = await self.ask(server, method, target, list(headers), body, within_s=within_s)
        with contextlib.closing(response):
            return response.status, await response.whole(max_bytes)

    def _url(self, server: str, target: str) -> URL:
        """Raises: HttpError 400 for a target that would lead elsewhere than to the server's path."""
        url = self._urls.get((server, target))
        if url is None:
            base, (path, _, query) = URL(server), target.partition("?")
            if not path.startswith("/") or not target.isascii():
                raise HttpError(400, "the target is no path: send one that begins with /, in ASCII")
            url = URL.build(
                scheme=base.scheme,
                host=base.raw_host or "",
                port=base.port,
                path=path,
                query_string=query,
                encoded=True,
            )
            if url.origin() != base.origin() or url.raw_path_qs != target:
                raise HttpError(400, "the target is no plain path: send one without a fragment")
            if target in _KNOWN:  # what clients make up is not kept
                self._urls[server, target] = url
        return url


async def relay(
    exchange: Exchange,
    response: UpstreamResponse,
    headers: RawHeaders,
    part: bytes,
    on_part: Callable[[bytes], None] = lambda part: None,
    on_written: Callable[[], None] = lambda: None,
    on_end: Callable[[], None] = lambda: None,
) -> None:
    """Pass a response on, byte for byte.

    headers: what the client gets of its head. part: the first of its body, which has been read.
    on_part: called with each before it is sent. on_written: after it, once the client has room for more.
    on_end:  called when all has come, before the client can see the end.
    Raises:  BrokenError if it breaks off; the caller ends the exchange so that no client takes it for complete.
    """
    left = response.length
    await exchange.begin(response.status, headers)
    while part:
        left -= len(part)
        on_part(part)
        if left == 0:
            on_end()
        await exchange.write(part, is_last=left == 0)
        on_written()
        if left == 0:
            return
        part = await response.part()
    on_end()
    await exchange.write(b"", is_last=True)


def sendable(exchange: Exchange, without: Collection[bytes]) -> list[tuple[str, str]]:
    """The request's headers but those of one hop and `without`, as another server gets them. Raises: HttpError 400."""
    try:
        return [
            (name.decode("ascii"), header_text(value))
            for name, value in end_to_end(exchange.raw_headers)
            if name not in without
        ]
    except HeadError as error:
        raise HttpError(error.status, str(error)) from error


def forwarded(exchange: Exchange, traced: Mapping[str, str] | None = None) -> list[tuple[str, str]]:
    """A request's headers as replicas get them: the client's own, and where it came from.

    traced: headers in place of the client's that name its trace.
    Raises: HttpError 400.
    """
    try:
        about = [(name.decode(), header_text(value)) for name, value in exchange.raw_headers if name in _REWRITTEN]
    except HeadError as error:
        raise HttpError(error.status, str(error)) from error
    headers, result = dict(about), sendable(exchange, _REPLACED if traced is None else _REPLACED | _TRACE)
    chain = [value for name, value in about if name == _FORWARDED and value]
    if client := exchange.scope.get("client"):
        chain.append(client[0])
    if chain:
        result.append((_FORWARDED, ", ".join(chain)))
    result.append(("x-forwarded-proto", headers.get("x-forwarded-proto") or exchange.scope.get("scheme", "http")))
    if host := headers.get("x-forwarded-host") or headers.get("host"):
        result.append(("x-forwarded-host", host))
    result.append((REQUEST_ID, exchange.request_id))
    return [*result, *(traced or {}).items()]


_KNOWN = frozenset((INVOCATIONS, *WORK, *STATELESS, PREFETCH, "/ping", "/health", "/metrics", "/v1/models"))
"""Targets whose URLs are kept for each server: those that are asked often."""

_REWRITTEN = frozenset((_FORWARDED.encode(), b"x-forwarded-proto", b"x-forwarded-host", b"host"))
"""Headers that name where a request came from, and are written anew."""

_TRACE = frozenset((b"traceparent", b"tracestate"))

_REPLACED = _REWRITTEN | {REQUEST_ID.encode(), b"content-length", b"expect"}


def _said(error: BaseException) -> str:
    """What went wrong, for the log: never the request."""
    text = str(error)[:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
