"""Requests to replicas over connections that stay open: heads without what belongs to one hop, bodies as they come."""

import ssl
from types import TracebackType
from typing import Self

import aiohttp
from yarl import URL

from hotspan.core.head import HeadError, end_to_end, header_text
from hotspan.router.exchange import REQUEST_ID, Exchange, RawHeaders, Refusal

IDLE_S = 3.0
"""That a connection may wait for the next request: less than hotspan's servers and uvicorn's wait (5 s)."""

_MOST_HEAD_LINE = 64 * 1024
_MOST_URLS = 4096
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
        return end_to_end(self._response.raw_headers)

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
        """The head of a replica's answer.

        Raises: UnreachedError; Refusal 400 for what can't be sent to any replica, before it is.
        """
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
        except (ValueError, aiohttp.InvalidURL) as error:  # the client wrote it; no replica was asked
            raise Refusal(400, "the request's head can't be sent on: send plain targets and headers") from error
        except aiohttp.ConnectionTimeoutError as error:
            raise UnreachedError(_said(error)) from error
        except (TimeoutError, aiohttp.ServerTimeoutError) as error:
            raise UnreachedError(_said(error), is_overdue=True) from error
        except (aiohttp.ClientError, OSError) as error:
            raise UnreachedError(_said(error)) from error
        return Answer(response)

    def _url(self, replica: str, target: str) -> URL:
        """Raises: Refusal 400 for a target that would lead elsewhere than to the replica's path."""
        url = self._urls.get((replica, target))
        if url is None:
            base, (path, _, query) = URL(replica), target.partition("?")
            if not path.startswith("/") or not target.isascii():
                raise Refusal(400, "the target is no path: send one that begins with /, in ASCII")
            url = URL.build(
                scheme=base.scheme,
                host=base.raw_host or "",
                port=base.port,
                path=path,
                query_string=query,
                encoded=True,
            )
            if url.origin() != base.origin() or url.raw_path_qs != target:
                raise Refusal(400, "the target is no plain path: send one without a fragment")
            if len(self._urls) < _MOST_URLS:  # paths are few; whoever makes them up gains nothing here
                self._urls[replica, target] = url
        return url


def forwarded(exchange: Exchange, traceparent: str | None = None) -> list[tuple[str, str]]:
    """A request's headers as replicas get them: the client's own, and where it came from. Raises: Refusal 400."""
    try:
        result = [
            (name.decode("ascii"), header_text(value))
            for name, value in end_to_end(exchange.raw_headers)
            if name not in _REPLACED
        ]
        result += _about(exchange, traceparent)
    except HeadError as error:
        raise Refusal(error.status, str(error)) from error
    return result


def _about(exchange: Exchange, traceparent: str | None) -> list[tuple[str, str]]:
    """Where a request came from, and its ids."""
    given = [(name.decode(), header_text(value)) for name, value in exchange.raw_headers if name in _REWRITTEN]
    headers = dict(given)
    result = []
    chain = [value for name, value in given if name == _FORWARDED and value]
    if client := exchange.scope.get("client"):
        chain.append(client[0])
    if chain:
        result.append((_FORWARDED, ", ".join(chain)))
    result.append(("x-forwarded-proto", headers.get("x-forwarded-proto") or exchange.scope.get("scheme", "http")))
    if host := headers.get("x-forwarded-host") or headers.get("host"):
        result.append(("x-forwarded-host", host))
    result.append((REQUEST_ID, exchange.request_id))
    if trace := traceparent or headers.get("traceparent"):
        result.append(("traceparent", trace))
    return result


_REWRITTEN = frozenset((_FORWARDED.encode(), b"x-forwarded-proto", b"x-forwarded-host", b"host", b"traceparent"))
"""Headers that say where a request came from, and are said anew."""

_REPLACED = _REWRITTEN | {REQUEST_ID.encode(), b"content-length", b"expect"}


def _said(error: BaseException) -> str:
    """What went wrong, for the log: never the request."""
    text = str(error)[:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
