"""One request of a client and its response, as raw ASGI: errors in one shape, responses that are sent once."""

import asyncio
import contextlib
import logging
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import chain
from types import TracebackType
from typing import Any

from hotspan.core.errors import HotspanError
from hotspan.http.errors import HttpError
from hotspan.http.head import DECISIVE, HeadError, check_head

logger = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
RawHeaders = list[tuple[bytes, bytes]]

JSON = "application/json"
ON_LOST = "hotspan.on_lost"
"""In a scope, where hotspan serves: has a function called once the client has closed its connection."""

REQUEST_ID, INFERENCE_ID = "x-request-id", "x-amzn-sagemaker-inference-id"
BLEND = "x-hotspan-blend"


@dataclass(slots=True, eq=False)
class Counted:
    """What an engine in this process counts while it answers one request of a client.

    blended: tokens that were blended, of all prompts, by kind. answer: the engine's own counts of the last answer that
             was begun.
    """

    blended: dict[str, int] = field(default_factory=dict)
    answer: Any = None


COUNTED: ContextVar[Counted | None] = ContextVar("hotspan_counted", default=None)
"""Of the request that the current task works for; the same object for all of its tasks. None outside a request."""

ON_READ: ContextVar[Callable[[], None] | None] = ContextVar("hotspan_on_read", default=None)
"""What `note_read` calls for the current task's request."""

_ID = re.compile(r"[!-~]{1,128}")


class ClientGone(Exception):
    """The client closed its connection: nobody waits for a response."""


class Exchange:
    """A request, and what has been sent in response.

    headers:     the request's, by lower-case name; the last of several. `check` refuses several where it matters.
    raw_headers: the same, as they came with the head: a server adds trailers to the list in `scope`.
    request_id:  the client's, if it sent a usable one.
    gone:        set once the client closed its connection, or nobody waits for the response any more.
    is_begun:    the response's head is sent, with `status`. is_over: its end is sent, too.
    on_begin:    called before that.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.raw_headers: RawHeaders = list(scope["headers"])
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in self.raw_headers}
        self.request_id = _request_id(self.headers)
        self.gone = asyncio.Event()
        self.is_begun = self.is_over = False
        self.on_begin: Callable[[], None] = _nothing
        self.status = 0
        self._receive = receive
        self._send = send

    def check(self, decisive: frozenset[bytes] = DECISIVE, max_head_bytes: int | None = None) -> None:
        """Raise HttpError 400 for a head that two programs could read differently, 431 for its size."""
        if self.method == "CONNECT":
            raise HttpError(400, "CONNECT is not served: send the request itself")
        try:
            check_head(self.raw_path, self.raw_headers, decisive, version=self.scope["http_version"])
        except HeadError as error:
            raise HttpError(error.status, str(error)) from error
        if max_head_bytes is None:
            return
        size = len(self.target) + 4 * len(self.raw_headers) + sum(map(len, chain.from_iterable(self.raw_headers)))
        if size > max_head_bytes:
            raise HttpError(431, f"the head has {size} bytes: send at most {max_head_bytes}")

    @property
    def path(self) -> str:
        """Without the query, decoded."""
        path: str = self.scope["path"]
        return path

    @property
    def raw_path(self) -> bytes:
        """The path as it was sent."""
        found: bytes = self.scope.get("raw_path") or self.path.encode()
        return found

    @property
    def target(self) -> str:
        """Path and query as they were sent."""
        query: bytes = self.scope["query_string"]
        return (b"%b?%b" % (self.raw_path, query) if query else self.raw_path).decode("latin-1")

    @property
    def method(self) -> str:
        """In capitals."""
        method: str = self.scope["method"]
        return method

    # -- from the client -----------------------------------------------------------------------------------------------

    async def part(self) -> tuple[bytes, bool]:
        """The next bytes of the body, and whether more come. Raises: ClientGone."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.gone.set()
            raise ClientGone
        return message.get("body", b""), message.get("more_body", False)

    def watched(self, *, is_cancelled: bool = False) -> "Watched":
        """A context manager in which `gone` is set as soon as the client closes its connection, and at the end.

        The body must have been read.

        is_cancelled: the task in the block is cancelled then, and the block raises ClientGone.
        """
        return Watched(self, is_cancelled=is_cancelled)

    # -- to the client -------------------------------------------------------------------------------------------------

    async def begin(self, status: int, headers: RawHeaders) -> None:
        """Send the head of a response, with `own_headers` that it does not have yet."""
        names = {name.lower() for name, _ in headers}
        own = [(name, value) for name, value in raw(self.own_headers()) if name not in names]
        self.is_begun, self.status = True, status
        self.on_begin()
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *own]})

    async def write(self, content: bytes, *, is_last: bool = False) -> None:
        """Send a part of the body; waits while the client does not read."""
        self.is_over = is_last
        await self._send({"type": "http.response.body", "body": content, "more_body": not is_last})

    async def respond(
        self, status: int, content: bytes, kind: str = JSON, headers: Mapping[str, str] | None = None
    ) -> None:
        """Send a whole response."""
        head = {"content-type": kind, "content-length": str(len(content)), **(headers or {})}
        await self.begin(status, raw(head))
        await self.write(content, is_last=True)

    async def fail(self, error: HotspanError) -> None:
        """Send an error; a response that has begun stays cut off, so that no client takes it for complete."""
        if not self.is_begun:
            refused = HttpError.of(error)
            await self.respond(refused.status, refused.content(), JSON, refused.headers)

    @contextlib.asynccontextmanager
    async def answered(self, who: str = "server") -> AsyncIterator[None]:
        """A block whose exceptions become the response; there is none for a client that is gone."""
        try:
            yield
        except ClientGone:
            pass
        except HotspanError as error:
            await self.fail(error)
        except Exception:  # the boundary of every request
            await self.crashed(who)

    async def crashed(self, who: str) -> None:
        """Log the exception that is being handled, and send 500."""
        logger.exception("request_failed request=%s path=%s", self.request_id, self.path)
        message = f"the {who} failed on this request: its log has the reason, under {self.request_id}"
        await self.fail(HttpError(500, message))

    def own_headers(self) -> dict[str, str]:
        """Headers that every response has."""
        return {REQUEST_ID: self.request_id}

    async def wait_gone(self) -> None:
        """Return once the client has closed its connection, or the response is over."""
        while (await self._receive())["type"] != "http.disconnect":
            pass


class Watched:
    """What `Exchange.watched` gives; a class, since every request has one."""

    __slots__ = ("_exchange", "_is_cancelled", "_task", "_watch")

    def __init__(self, exchange: Exchange, *, is_cancelled: bool) -> None:
        self._exchange = exchange
        self._is_cancelled = is_cancelled
        self._watch: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        self._task = asyncio.current_task()
        on_lost = self._exchange.scope.get(ON_LOST)
        if on_lost is not None and self._is_cancelled:  # saves a task, which would notice the response's end, too
            on_lost(self._lost)
            return
        self._watch = asyncio.create_task(self._exchange.wait_gone())
        self._watch.add_done_callback(self._disconnected)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        if self._watch is not None:
            self._watch.remove_done_callback(self._disconnected)
            self._watch.cancel()
        was_gone = self._exchange.gone.is_set()
        self._exchange.gone.set()
        if not self._is_cancelled or kind is not asyncio.CancelledError or not was_gone or task is None:
            return
        if not task.uncancel():
            raise ClientGone from None

    def _disconnected(self, done: "asyncio.Task[None]") -> None:
        if not done.cancelled():
            self._lost()

    def _lost(self) -> None:
        if self._is_cancelled and not self._exchange.is_over and self._task is not None:
            self._exchange.gone.set()
            self._task.cancel()
        elif not self._is_cancelled:
            self._exchange.gone.set()


def _nothing() -> None:
    pass


def note_read() -> None:
    """The text of the current task's request is parsed, rendered and tokenised: others may have their turn of that."""
    if (tell := ON_READ.get()) is not None:
        tell()


def raw(headers: Mapping[str, str]) -> RawHeaders:
    """Headers as ASGI has them."""
    return [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]


def _request_id(headers: Mapping[str, str]) -> str:
    for name in (REQUEST_ID, INFERENCE_ID):
        given = headers.get(name)
        if given is not None and _ID.fullmatch(given):
            return given
    return f"{random.getrandbits(128):032x}"
