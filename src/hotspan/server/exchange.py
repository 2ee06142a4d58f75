"""An exchange whose response an application sends: errors get the common shape and LMI's statuses.

    client --received--> the application --send---------------------> AppExchange --> client
                                         --_Converter.send--> send -->

The head of a response is held until its first byte, so that a stream that fails before has its true status.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hotspan.core.errors import HotspanError
from hotspan.http.errors import REQUEST, HttpError
from hotspan.http.exchange import BLEND, COUNTED, INFERENCE_ID, JSON, REQUEST_ID, Counted, Exchange, RawHeaders, raw
from hotspan.http.sse import SSE, Events, event, first_error

logger = logging.getLogger(__name__)

JSONLINES = "application/jsonlines"
CUSTOM_ATTRIBUTES = "x-amzn-sagemaker-custom-attributes"
FAILED_DEPENDENCY = 424

_NO_STEP = (
    "the engine gave no answer in time: this was too much at once, one step takes as long (an LLM() in a program's own "
    "process answers while it generates), or it is stalled, which /ping tells"
)

_LAST_EVENT_S = 1.0
"""How long a client may take to make room for the last event of a response that is cut off."""

_CONTENT = frozenset({"content-type", "content-length", "transfer-encoding", "expect"})

_ATTRIBUTES = re.compile(r"[ -~]{1,1024}")
_LMI_STATUSES = frozenset({401, 403, 405, 408, 413, 503, 504})
"""Statuses that LMI's front end gives itself, before or around the model; all others become 424."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """What becomes of an application's response.

    whole: of a body, with its headers: the body and content type to send.
    rows:  of one event of a stream: any number of rows. row: of one of these: the bytes to send.
    kind:  content type of the converted stream.
    error: of an error that the application answers.
    """

    whole: Callable[[bytes, Headers], Awaitable[tuple[bytes, str]]]
    rows: Callable[[dict[str, Any]], Iterable[dict[str, Any]]]
    row: Callable[[dict[str, Any]], Awaitable[bytes]]
    kind: str = SSE
    error: Callable[[HttpError], HttpError] = lambda error: error


class AppExchange(Exchange):
    """An exchange whose response an application sends.

    The task that makes one, and the tasks that this begins, count in it what the engine tells (`COUNTED`).

    answer_headers: further headers of the response.
    is_lmi:         errors have the statuses that LMI gives.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, *, is_lmi: bool) -> None:
        super().__init__(scope, receive, send)
        self.answer_headers: dict[str, str] = {}
        self._counted = Counted()
        COUNTED.set(self._counted)
        self._is_lmi = is_lmi
        self._lock = asyncio.Lock()
        self._head: Message | None = None
        self._failure: bytearray | None = None
        self._kind = ""

    @property
    def named_headers(self) -> Mapping[str, str]:
        """The request's headers, with the id that it has here."""
        return {**self.headers, "x-request-id": self.request_id}

    async def forward(self, app: ASGIApp, body: bytes) -> None:
        """Let an application answer the request as it came, with the id that it has here."""
        scope = {**self.scope, "headers": self._sent_headers()}
        await app(scope, self.received(body), self.send)

    async def ask(
        self, app: ASGIApp, path: str, body: bytes, dropped: frozenset[str], conversion: Conversion | None = None
    ) -> None:
        """Let an application answer a POST of JSON to `path`, with the headers of this request.

        dropped:    names of headers that it is not sent.
        conversion: of its response; None sends it as it is.
        """
        target = self.scope.get("root_path", "") + path
        headers = self._sent_headers(_CONTENT | dropped, {"content-type": JSON, "content-length": str(len(body))})
        scope = {**self.scope, "method": "POST", "path": target, "raw_path": target.encode(), "headers": headers}
        if conversion is None:
            await app(scope, self.received(body), self.send)
            return
        converter = _Converter(self, conversion)
        await app(scope, self.received(body, converter.is_idle), converter.send)

    def received(self, body: bytes, is_ready: Callable[[], Awaitable[Any]] | None = None) -> Receive:
        """The application's `receive`: `body`, then a disconnect when the client is gone and `is_ready` returns."""
        parts = [body]

        async def receive() -> Message:
            if parts:
                return {"type": "http.request", "body": parts.pop(), "more_body": False}
            await self.gone.wait()
            if is_ready is not None:
                await is_ready()
            return {"type": "http.disconnect"}

        return receive

    async def send(self, message: Message) -> None:
        """Pass on a message of the application; messages after the end are dropped."""
        async with self._lock:
            if self.is_over:
                return
            if message["type"] == "http.response.start":
                self._head = message
                kinds = (value for name, value in message.get("headers", []) if name.lower() == b"content-type")
                self._kind = next(kinds, b"").decode("latin-1").partition(";")[0].strip()
                self._failure = bytearray() if message["status"] >= 400 else None
            elif self._failure is not None:
                self._failure += message.get("body", b"")
                if not message.get("more_body", False):
                    await self._refuse(HttpError.answered(self._head_status, bytes(self._failure)))
            else:
                await self._pass(message)

    async def begin(self, status: int, headers: RawHeaders) -> None:
        """Begin a response whose errors are not rewritten."""
        await self.send({"type": "http.response.start", "status": status, "headers": headers})
        self._failure = None

    async def write(self, content: bytes, *, is_last: bool = False) -> None:
        await self.send({"type": "http.response.body", "body": content, "more_body": not is_last})

    async def fail(self, error: HotspanError) -> None:
        """End the response with an error: as its status, as the last event of a stream, or by hanging up."""
        refused = HttpError.of(error)
        try:
            async with asyncio.timeout(_LAST_EVENT_S), self._lock:
                if self.is_over:
                    return
                if not self.is_begun:
                    await self._refuse(refused)
                elif self._kind in (SSE, JSONLINES):
                    body = refused.content(self.status_of(refused))
                    last = event(body) + event(b"[DONE]") if self._kind == SSE else body + b"\n"
                    await super().write(last, is_last=True)
        except TimeoutError:
            logger.warning("answer_cut_off request=%s: the client reads no answers", self.request_id)
        finally:
            self.is_over = True

    def status_of(self, error: HttpError) -> int:
        """The status that an error has in this exchange."""
        return lmi_status(error.status) if self._is_lmi else error.status

    def own_headers(self) -> dict[str, str]:
        echoed = {name: self.headers[name] for name in (INFERENCE_ID, CUSTOM_ATTRIBUTES) if name in self.headers}
        kept = {name: value for name, value in echoed.items() if _ATTRIBUTES.fullmatch(value)}
        blended = ", ".join(f"{what}={tokens}" for what, tokens in self._counted.blended.items())
        return {**super().own_headers(), **kept, **self.answer_headers, **({BLEND: blended} if blended else {})}

    # -- inside --------------------------------------------------------------------------------------------------------

    def _sent_headers(
        self, dropped: frozenset[str] = frozenset(), added: Mapping[str, str] | None = None
    ) -> RawHeaders:
        """The request's headers for the application."""
        gone = {name.encode() for name in (*dropped, REQUEST_ID)}
        kept = [(name, value) for name, value in self.scope["headers"] if name.lower() not in gone]
        return [*kept, *raw({REQUEST_ID: self.request_id, **(added or {})})]

    @property
    def _head_status(self) -> int:
        return int(self._head["status"]) if self._head is not None else 500

    async def _pass(self, message: Message) -> None:
        is_last = not message.get("more_body", False)
        if not self.is_begun:
            content = message.get("body", b"")
            if self._kind == SSE and not content and not is_last:
                return
            if self._kind == SSE and (error := first_error(content)) is not None:
                await self._refuse(error)
                return
            await super().begin(self._head_status, [] if self._head is None else list(self._head.get("headers", [])))
        self.is_over = is_last
        await self._send(message)

    async def _refuse(self, error: HttpError) -> None:
        """Respond with an error instead of the application's response."""
        status = self.status_of(error)
        body = error.content(status)
        theirs = [] if self._head is None or self._failure is None else _kept(self._head)
        known = {name.lower().decode("latin-1") for name, _ in theirs}
        said = {name: value for name, value in error.headers.items() if name not in known}
        self.is_over = True
        head = raw({"content-type": JSON, "content-length": str(len(body)), **said})
        await super().begin(status, [*theirs, *head])
        await super().write(body, is_last=True)


class _Converter:
    """An application's response on its way to an exchange, converted as it comes."""

    def __init__(self, exchange: AppExchange, conversion: Conversion) -> None:
        self._exchange = exchange
        self._conversion = conversion
        self._status = 500
        self._headers = Headers()
        self._content = bytearray()
        self._events: Events | None = None
        self._busy = asyncio.Lock()

    async def is_idle(self) -> None:
        """Return when no message is being converted.

        Only then is the application told that the client is gone: it waits for the engine, and cancelled there its
        generator ends at once. Where it waits for `send`, the generator would end when it is collected.
        """
        async with self._busy:
            pass
        await asyncio.sleep(0)

    async def send(self, message: Message) -> None:
        """Take a message of the application; an error in its conversion ends the response, and the application."""
        exchange = self._exchange
        async with self._busy:
            if exchange.gone.is_set():
                return
            async with exchange.answered():
                await self._take(message)
            if exchange.is_over and message.get("more_body", False):
                exchange.gone.set()

    async def _take(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status, self._headers = message["status"], Headers(raw=message["headers"])
            if self._status == 200 and self._headers.get("content-type", "").startswith(SSE):
                self._events, kind = Events(), self._conversion.kind
                charset = "; charset=utf-8" if kind == SSE else ""
                await self._exchange.begin(200, raw({"content-type": kind + charset}))
            return
        content, is_last = message.get("body", b""), not message.get("more_body", False)
        if self._events is not None:
            await self._stream(self._events, content, is_last=is_last)
            return
        self._content += content
        if is_last:
            await self._whole(bytes(self._content))

    async def _stream(self, events: Events, content: bytes, *, is_last: bool) -> None:
        conversion = self._conversion
        for found in events.of(content):
            if "error" in found:
                raise conversion.error(HttpError.in_stream(found))
            for row in conversion.rows(found):
                await self._exchange.write(await conversion.row(row))
        if is_last:
            await self._exchange.write(event(b"[DONE]") if conversion.kind == SSE else b"", is_last=True)

    async def _whole(self, content: bytes) -> None:
        if self._status != 200:
            raise self._conversion.error(HttpError.answered(self._status, content))
        content, kind = await self._conversion.whole(content, self._headers)
        await self._exchange.respond(200, content, kind)


class OwnRoute(APIRoute):
    """A route of hotspan's in the engine's app: an HttpError of its handler becomes the response, as an answer of the
    engine that does not come does.

    Such an answer is no sign of the engine's health: what one client asks for may take longer than it is waited for.
    Whether the engine makes steps is watched elsewhere (liveness.py).
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handle(request)
            except TimeoutError:
                error = HttpError(503, _NO_STEP, about=REQUEST)
            except HttpError as refused:
                error = refused
            return JSONResponse(error.body(error.status), error.status, error.headers)

        return answer


def lmi_status(status: int) -> int:
    """LMI's status where the true one is `status`."""
    if status == 429:
        return 503
    return status if status < 400 or status in _LMI_STATUSES else FAILED_DEPENDENCY


def _kept(head: Message) -> RawHeaders:
    """An error's headers, except those about its body."""
    ours = (b"content-type", b"content-length")
    return [(name, value) for name, value in head.get("headers", []) if name.lower() not in ours]


async def ended(task: "asyncio.Task[None]", within_s: float) -> None:
    """Return when an abandoned task has ended: by itself, or cancelled after `within_s`."""
    try:
        await asyncio.wait({task}, timeout=within_s)
    finally:
        task.cancel()
        await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # retrieved: it came too late for its client
