"""Requests to replicas over connections that stay open: heads without what belongs to one hop, bodies as they come."""

import ssl
from collections.abc import Iterable
from types import TracebackType
from typing import Self

import aiohttp
from yarl import URL

from hotspan.router.exchange import REQUEST_ID, Exchange, RawHeaders

IDLE_S = 3.0
"""That a connection may wait for the next request: less than hotspan's servers and uvicorn's wait (5 s)."""

_MOST_HEAD_LINE = 64 * 1024
_MOST_URLS = 4096
_HOP = frozenset(
    (
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection"),
        *(b"te", b"trailer", b"transfer-encoding", b"upgrade"),
    )
)
"""Headers that hold for one connection (RFC 9110, 7.6.1)."""

_OWN = _HOP | {b"host", b"content-length", b"expect"}
"""And those that the client here writes itself."""

_AUTOMATIC = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
_FORWARDED = "x-forwarded-for"


class UnreachedError(Exception):
    """A replica gave no head of an answer. is_overdue: it had the request, and took too long."""

    def __init__(self, why: str, *, is_overdue: bool = False) -> None:
        super().__init__(why)
        self.is_overdue = is_overdue


class BrokenError(Exception):
    """An answer broke off. is_overdue: nothing came of it for too long."""

    def __init__(self, why: str, *, is_overdue: bool = False) -> None:
        super().__init__(why)
        self.is_overdue = is_overdue


class Answer:
    """A replica's answer, its body not yet read. `close` lets the connection go, in whatever state."""

    __slots__ = ("_response", "status")

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status

    @property
    def headers(self) -> RawHeaders:
        """As the client is to get them."""
        raw = self._response.raw_headers
        named = _named(value for name, value in raw if name.lower() == b"connection")
        return [(name, value) for name, value in raw if (low := name.lower()) not in _HOP and low not in named]

    def header(self, name: str) -> str:
        """One header; "" if it is not there."""
        return self._response.headers.get(name, "")

    async def part(self) -> bytes:
        """What has come of the body since, at least a byte; b"" at its end. Raises: BrokenError."""
        try:
            return await self._response.content.readany()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise BrokenError(_said(error), is_overdue=isinstance(error, TimeoutError)) from error

    async def whole(self, most: int) -> bytes:
        """The whole body. Raises: BrokenError, also where it is larger than `most`."""
        parts, size = [], 0
        while part := await self.part():
            parts.append(part)
            if (size := size + len(part)) > most:
                raise BrokenError(f"the answer is larger than {most} bytes")
        return b"".join(parts)

    def close(self) -> None:
        """Let it go: a connection whose answer was read to its end is used again, any other is closed."""
        self._response.close()


class Upstream:
    """Connections to all replicas. One event loop's."""

    def __init__(self, *, connect_timeout_s: float, read_timeout_s: float, tls: ssl.SSLContext | bool = True) -> None:
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s, sock_read=read_timeout_s)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S, ssl=tls, ttl_dns_cache=10),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=self._timeout,
            auto_decompress=False,
            skip_auto_headers=_AUTOMATIC,
            max_line_size=_MOST_HEAD_LINE,
            max_field_size=_MOST_HEAD_LINE,
        )
        self._urls: dict[tuple[str, str], URL] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def ask(
        self,
        replica: str,
        method: str,
        target: str,
        headers: list[tuple[str, str]],
        body: bytes = b"",
        *,
        within_s: float | None = None,
    ) -> Answer:
        """The head of a replica's answer. Raises: UnreachedError."""
        timeout = self._timeout if within_s is None else aiohttp.ClientTimeout(total=within_s)
        try:
            response = await self._session.request(
                method,
                self._url(replica, target),
                headers=headers,
                data=body or None,
                allow_redirects=False,
                timeout=timeout,
            )
        except aiohttp.ConnectionTimeoutError as error:
            raise UnreachedError(_said(error)) from error
        except (TimeoutError, aiohttp.ServerTimeoutError) as error:
            raise UnreachedError(_said(error), is_overdue=True) from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise UnreachedError(_said(error)) from error
        return Answer(response)

    def _url(self, replica: str, target: str) -> URL:
        url = self._urls.get((replica, target))
        if url is None:
            url = URL(replica + target, encoded=True)
            if len(self._urls) < _MOST_URLS:  # paths are few; whoever makes them up gains nothing here
                self._urls[replica, target] = url
        return url


def forwarded(exchange: Exchange, traceparent: str | None = None) -> list[tuple[str, str]]:
    """A request's headers as replicas get them: the client's own, and where it came from."""
    headers = exchange.headers
    connection = headers.get("connection")
    named = _named([connection.encode("latin-1")]) if connection and connection != "keep-alive" else ()
    result = [
        (name.decode("latin-1"), value.decode("latin-1"))
        for name, value in exchange.raw_headers
        if name not in _OWN and name not in named and name not in _REWRITTEN
    ]
    client = exchange.scope.get("client")
    chain = [each for each in (headers.get(_FORWARDED), client[0] if client else None) if each]
    if chain:
        result.append((_FORWARDED, ", ".join(chain)))
    result.append(("x-forwarded-proto", headers.get("x-forwarded-proto") or exchange.scope.get("scheme", "http")))
    if host := headers.get("x-forwarded-host") or headers.get("host"):
        result.append(("x-forwarded-host", host))
    result.append((REQUEST_ID, exchange.request_id))
    if given := traceparent or headers.get("traceparent"):
        result.append(("traceparent", given))
    return result


_REWRITTEN = frozenset(
    (_FORWARDED.encode(), b"x-forwarded-proto", b"x-forwarded-host", REQUEST_ID.encode(), b"traceparent")
)


def _named(values: Iterable[bytes]) -> frozenset[bytes]:
    """The headers that `Connection` names: they hold for one hop too."""
    return frozenset(name.strip().lower() for value in values for name in value.split(b","))


def _said(error: BaseException) -> str:
    """What went wrong, for the log: never the request."""
    text = str(error)[:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
