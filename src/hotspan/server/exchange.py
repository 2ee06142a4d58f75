"""An exchange whose response an application sends: errors get the common shape and LMI's statuses.

    client --received--> the application --send--> AppExchange --> client

The head of a response is held until its first byte, so that a stream that fails before has its true status.
"""

import asyncio
import logging
import re
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from hotspan.core.errors import HotspanError
from hotspan.http.errors import HttpError
from hotspan.http.exchange import INFERENCE_ID, JSON, Exchange, RawHeaders, raw
from hotspan.http.sse import SSE, event, first_error

logger = logging.getLogger(__name__)

JSONLINES = "application/jsonlines"
CUSTOM_ATTRIBUTES = "x-amzn-sagemaker-custom-attributes"
FAILED_DEPENDENCY = 424

_LAST_EVENT_S = 1.0
"""How long a client may take to make room for the last event of a response that is cut off."""

_ATTRIBUTES = re.compile(r"[ -~]{1,1024}")
_LMI_STATUSES = frozenset({401, 403, 405, 408, 413, 503, 504})
"""Statuses that LMI's front end gives itself, before or around the model; all others become 424."""


class AppExchange(Exchange):
    """An exchange whose response an application sends.

    answer_headers: further headers of the response.
    is_lmi:         errors have the statuses that LMI gives.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, *, is_lmi: bool) -> None:
        super().__init__(scope, receive, send)
        self.answer_headers: dict[str, str] = {}
        self._is_lmi = is_lmi
        self._lock = asyncio.Lock()
        self._head: Message | None = None
        self._failure: bytearray | None = None
        self._kind = ""

    @property
    def named_headers(self) -> Mapping[str, str]:
        """The request's headers, with the id that it has here."""
        return {**self.headers, "x-request-id": self.request_id}

    def received(self, body: bytes) -> Receive:
        """The application's `receive`: `body`, then a disconnect when the client is gone."""
        parts = [body]

        async def receive() -> Message:
            if parts:
                return {"type": "http.request", "body": parts.pop(), "more_body": False}
            await self.gone.wait()
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
        return {**super().own_headers(), **kept, **self.answer_headers}

    # -- inside --------------------------------------------------------------------------------------------------------

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


class OwnRoute(APIRoute):
    """A route of hotspan's in the engine's app: an HttpError of its handler becomes the response."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handle(request)
            except HttpError as error:
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
