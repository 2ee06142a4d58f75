"""One request of a client and its answer, as raw ASGI: the body read in time, errors in one shape."""

import asyncio
import random
import re
from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from types import TracebackType
from typing import Any

import orjson

from hotspan.core.budget import Budget
from hotspan.core.errors import HotspanError
from hotspan.core.head import DECISIVE, HeadError, check_head
from hotspan.core.types import MIB

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
RawHeaders = list[tuple[bytes, bytes]]

JSON = "application/json"
REQUEST_ID, INFERENCE_ID = "x-request-id", "x-amzn-sagemaker-inference-id"

STALL_S = 10.0
"""Without a byte of a body."""

LEAST_RATE = 1e5
"""Of a body, on average, in bytes/s; STALL_S more is allowed."""

MOST_HEAD_BYTES = 60 * 1024
"""Of a request. hotspan's servers take 64 KiB, and some is added on the way to them."""

_ID = re.compile(r"[!-~]{1,128}")


class ClientGone(Exception):
    """The client hung up: nobody waits for an answer."""


class Refusal(HotspanError):
    """What the router answers itself instead of a replica. retry_s: after how many seconds to try again."""

    def __init__(self, status: int, message: str, *, retry_s: int | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_s = retry_s
        self._code = code

    @property
    def body(self) -> bytes:
        """Its JSON, in the shape that OpenAI's clients know."""
        kind = HTTPStatus(self.status).phrase.replace(" ", "").replace("-", "")
        kind = "RateLimitError" if self.status == 429 else kind if kind.endswith("Error") else f"{kind}Error"
        error = {"message": str(self), "type": kind, "param": None, "code": self._code or self.status}
        return orjson.dumps({"error": error})


class Exchange:
    """A request, and what has been answered to it.

    headers:    the request's, by lower-case name; of one that came twice, the last. None that `check` names did.
    raw_headers: the same, as they came with the head: a server adds to its own list what follows a chunked body.
    request_id: the client's if it gave one that can be used.
    is_begun:   the answer's head is sent. status: of it; 0 before. is_over: so is its end.
    is_gone:    the client hung up.
    """

    __slots__ = (
        "_receive",
        "_send",
        "headers",
        "is_begun",
        "is_gone",
        "is_over",
        "raw_headers",
        "request_id",
        "scope",
        "status",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.raw_headers: RawHeaders = list(scope["headers"])
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in self.raw_headers}
        self.request_id = _request_id(self.headers)
        self.is_begun = self.is_over = self.is_gone = False
        self.status = 0
        self._receive = receive
        self._send = send

    def check(self, decisive: frozenset[bytes] = DECISIVE) -> None:
        """Raise Refusal 400 or 431 for a head that replicas could read differently, or could refuse for its size."""
        target = self.scope.get("raw_path") or self.path.encode()
        if self.method == "CONNECT":
            raise Refusal(400, "CONNECT is not served: send the request itself")
        try:
            check_head(target, self.raw_headers, decisive, version=self.scope["http_version"])
        except HeadError as error:
            raise Refusal(error.status, str(error)) from error
        size = len(self.target) + sum(len(name) + len(value) + 4 for name, value in self.raw_headers)
        if size > MOST_HEAD_BYTES:
            raise Refusal(431, f"the head has {size} bytes: send at most {MOST_HEAD_BYTES}")

    @property
    def path(self) -> str:
        """Without the query."""
        path: str = self.scope["path"]
        return path

    @property
    def target(self) -> str:
        """The path as it came, and the query."""
        raw: bytes = self.scope.get("raw_path") or self.path.encode()
        query: bytes = self.scope["query_string"]
        return (b"%b?%b" % (raw, query) if query else raw).decode("latin-1")

    @property
    def method(self) -> str:
        """In capitals."""
        method: str = self.scope["method"]
        return method

    async def part(self) -> tuple[bytes, bool]:
        """The next bytes of the body, and whether more come. Raises: ClientGone."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.is_gone = True
            raise ClientGone
        return message.get("body", b""), message.get("more_body", False)

    def watched(self) -> "Watched":
        """Inside, this task is cancelled when the client hangs up; that ends as ClientGone. The body must be read."""
        return Watched(self)

    async def gone(self) -> None:
        """Return once the client has hung up, or its answer is over."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def begin(self, status: int, headers: RawHeaders) -> None:
        """Send an answer's head."""
        self.is_begun, self.status = True, status
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, content: bytes, *, is_last: bool = False) -> None:
        """Go on with the answer; waits while the client does not read."""
        self.is_over = is_last
        await self._send({"type": "http.response.body", "body": content, "more_body": not is_last})

    async def respond(self, status: int, content: bytes, kind: str = JSON, *more: tuple[bytes, bytes]) -> None:
        """Answer in one piece."""
        head = [(b"content-type", kind.encode()), (b"content-length", b"%d" % len(content))]
        await self.begin(status, [*head, (REQUEST_ID.encode(), self.request_id.encode()), *more])
        await self.write(content, is_last=True)

    async def refuse(self, refusal: Refusal) -> None:
        """Answer with an error; one that has begun stays cut off, so that nobody takes it for whole."""
        if self.is_begun:
            return
        more = [] if refusal.retry_s is None else [(b"retry-after", b"%d" % refusal.retry_s)]
        if refusal.status == HTTPStatus.UNAUTHORIZED:
            more.append((b"www-authenticate", b'Bearer realm="hotspan"'))
        await self.respond(refusal.status, refusal.body, JSON, *more)


class Watched:
    """What `Exchange.watched` gives; a class, since every request has one."""

    __slots__ = ("_exchange", "_task", "_watch")

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a client is watched from within a task")
        self._task = task
        self._watch = asyncio.create_task(self._exchange.gone())
        self._watch.add_done_callback(self._hung_up)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.remove_done_callback(self._hung_up)
        self._watch.cancel()
        if kind is asyncio.CancelledError and self._exchange.is_gone and not self._task.uncancel():
            raise ClientGone from None

    def _hung_up(self, done: "asyncio.Task[None]") -> None:
        if not done.cancelled() and not self._exchange.is_over:
            self._exchange.is_gone = True
            self._task.cancel()


class Bodies:
    """Reads bodies, and counts the bytes that are held of each owner's: half of the memory is divided between them.

    most: of one body. most_held: of all together. owners: how many there are; API keys, where clients need one.
    """

    def __init__(self, most: int, most_held: int, owners: int = 1) -> None:
        self._most = most
        self._held = Budget(most_held, owners)

    async def read(self, exchange: Exchange, owner: bytes = b"") -> bytes:
        """The whole body, which is held until `let_go`.

        Raises: Refusal 408, 413 or 503; ClientGone.
        """
        length = exchange.headers.get("content-length", "0")
        self._check(int(length) if length.isdigit() else 0)
        now = asyncio.get_running_loop().time
        began_s, size, parts, more = now(), 0, [], True
        try:
            async with asyncio.timeout_at(began_s + STALL_S) as limit:
                while more:
                    part, more = await exchange.part()
                    size += len(part)
                    self._check(size)
                    if not self._held.take(owner, len(part)):
                        raise Refusal(503, "your requests hold as much memory as they may: try again", retry_s=1)
                    parts.append(part)
                    if more:
                        limit.reschedule(min(now() + STALL_S, began_s + STALL_S + size / LEAST_RATE))
        except BaseException as error:
            self._held.give(owner, sum(map(len, parts)))
            if isinstance(error, TimeoutError):
                raise Refusal(
                    408,
                    f"the body came too slowly ({size} bytes in {now() - began_s:.0f} s): send it at once, at least "
                    f"{LEAST_RATE / 1000:g} kB/s, and close it",
                ) from error
            raise
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def let_go(self, body: bytes, owner: bytes = b"") -> None:
        """A body is not needed any more."""
        self._held.give(owner, len(body))

    def _check(self, size: int) -> None:
        if size > self._most:
            raise Refusal(
                413, f"the body is larger than {self._most / MIB:g} MiB: send less, or raise max_request_bytes"
            )


def _request_id(headers: dict[str, str]) -> str:
    for name in (REQUEST_ID, INFERENCE_ID):
        given = headers.get(name)
        if given is not None and _ID.fullmatch(given):
            return given
    return f"{random.getrandbits(128):032x}"
