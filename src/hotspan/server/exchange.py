"""One request and its answer: what is answered once is answered, errors have one shape wherever they come.

    client --receive--> Exchange --receive--> the application
           <---send----          <---send----

The head of an answer is held until its first byte, so that a stream that fails before has its true status.
"""

import asyncio
import contextlib
import json
import logging
import re
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from hotspan.core.errors import HotspanError
from hotspan.server.errors import HttpError, lmi_status

logger = logging.getLogger(__name__)

SSE, JSONLINES, JSON = "text/event-stream", "application/jsonlines", "application/json"
INFERENCE_ID, CUSTOM_ATTRIBUTES = "x-amzn-sagemaker-inference-id", "x-amzn-sagemaker-custom-attributes"

_LAST_WORD_S = 1.0
"""How long a client may take to make room for the last word of an answer that is cut off."""

_DATA = b"data: "
_ID = re.compile(r"[!-~]{1,128}")
_ATTRIBUTES = re.compile(r"[ -~]{1,1024}")


class ClientGone(Exception):
    """The client hung up: nobody waits for an answer."""


class Exchange:
    """A request, and what has been answered to it.

    gone:        nobody waits for the application's answer any more: it stops.
    is_lmi:      errors have the statuses that LMI gives.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, *, is_lmi: bool) -> None:
        self.scope = scope
        self.headers = Headers(scope=scope)
        self.gone = asyncio.Event()
        self.request_id = _request_id(self.headers)
        self.answer_headers: dict[str, str] = {}
        self._receive = receive
        self._send = send
        self._is_lmi = is_lmi
        self._lock = asyncio.Lock()
        self._head: Message | None = None
        self._failure: bytearray | None = None
        self._kind = ""
        self._is_begun = self._is_over = False

    # -- from the client -----------------------------------------------------------------------------------------------

    async def next_part(self) -> tuple[bytes, bool]:
        """The next bytes of the body, and whether more come. Raises: ClientGone."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        return message.get("body", b""), message.get("more_body", False)

    @property
    def named_headers(self) -> Mapping[str, str]:
        """The request's headers, with the id that it has here."""
        return {**self.headers, "x-request-id": self.request_id}

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Inside, `gone` is set as soon as the client hangs up. The body must have been read."""
        watch = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            watch.cancel()
            self.gone.set()

    @contextlib.asynccontextmanager
    async def answered(self, path: str) -> AsyncIterator[None]:
        """Inside, whatever goes wrong is what the client is told, in the one shape; nobody is told who hung up."""
        try:
            yield
        except ClientGone:
            pass
        except HotspanError as error:
            await self.fail(HttpError.of(error))
        except Exception:  # the boundary of every request
            logger.exception("request_failed request=%s path=%s", self.request_id, path)
            message = f"the server failed on this request: its log says why, under {self.request_id}"
            await self.fail(HttpError(500, message))

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone.set()

    def received(self, body: bytes) -> Receive:
        """What an application receives: `body`, and a disconnect once nobody waits for it."""
        parts = [body]

        async def receive() -> Message:
            if parts:
                return {"type": "http.request", "body": parts.pop(), "more_body": False}
            await self.gone.wait()
            return {"type": "http.disconnect"}

        return receive

    # -- to the client -------------------------------------------------------------------------------------------------

    async def send(self, message: Message) -> None:
        """Hand on a part of the application's answer; what comes after the end of it is dropped."""
        async with self._lock:
            if self._is_over:
                return
            if message["type"] == "http.response.start":
                self._head = message
                self._kind = Headers(raw=message.get("headers", [])).get("content-type", "").partition(";")[0].strip()
                self._failure = bytearray() if message["status"] >= 400 else None
            elif self._failure is not None:
                self._failure += message.get("body", b"")
                if not message.get("more_body", False):
                    await self._refuse(HttpError.answered(self._status, bytes(self._failure)))
            else:
                await self._hand_on(message)

    async def respond(
        self, status: int, content: bytes, kind: str = JSON, headers: Mapping[str, str] | None = None
    ) -> None:
        """Answer in one piece."""
        await self.begin(status, kind, {"content-length": str(len(content)), **(headers or {})})
        await self.send({"type": "http.response.body", "body": content})

    async def begin(self, status: int, kind: str, headers: Mapping[str, str] | None = None) -> None:
        """Begin an answer, which is taken as it is."""
        given = {"content-type": kind, **(headers or {})}
        await self.send({"type": "http.response.start", "status": status, "headers": _raw(given)})
        self._failure = None

    async def write(self, content: bytes, *, is_last: bool = False) -> None:
        """Go on with an answer."""
        await self.send({"type": "http.response.body", "body": content, "more_body": not is_last})

    async def fail(self, error: HttpError) -> None:
        """End the answer with an error: as its status, as the last event of a stream, or by hanging up."""
        try:
            async with asyncio.timeout(_LAST_WORD_S), self._lock:
                if self._is_over:
                    return
                if not self._is_begun:
                    await self._refuse(error)
                elif self._kind in (SSE, JSONLINES):
                    self._is_over = True
                    body = self._rendered(error)
                    event = b"data: %b\n\ndata: [DONE]\n\n" % body if self._kind == SSE else body + b"\n"
                    await self._send({"type": "http.response.body", "body": event, "more_body": False})
        except TimeoutError:
            logger.warning("answer_cut_off request=%s: the client reads no answers", self.request_id)
        finally:
            self._is_over = True

    def error_body(self, error: HttpError) -> dict[str, Any]:
        """The JSON of an error in this exchange."""
        return error.body(self.status_of(error))

    def status_of(self, error: HttpError) -> int:
        """The status that an error has in this exchange."""
        return lmi_status(error.status) if self._is_lmi else error.status

    # -- inside --------------------------------------------------------------------------------------------------------

    @property
    def _status(self) -> int:
        return int(self._head["status"]) if self._head is not None else 500

    async def _hand_on(self, message: Message) -> None:
        content, is_last = message.get("body", b""), not message.get("more_body", False)
        if not self._is_begun:
            if self._kind == SSE and not content and not is_last:
                return
            if self._kind == SSE and (error := _first_error(content)) is not None:
                await self._refuse(error)
                return
            await self._send_head()
        self._is_over = is_last
        await self._send(message)

    async def _send_head(self) -> None:
        head = self._head or {"type": "http.response.start", "status": 500, "headers": []}
        names = {name.lower() for name, _ in head.get("headers", [])}
        own = [(name, value) for name, value in _raw(self._own_headers()) if name not in names]
        self._is_begun = True
        await self._send({**head, "headers": [*head.get("headers", []), *own]})

    def _own_headers(self) -> dict[str, str]:
        echoed = {name: self.headers[name] for name in (INFERENCE_ID, CUSTOM_ATTRIBUTES) if name in self.headers}
        kept = {name: value for name, value in echoed.items() if _ATTRIBUTES.fullmatch(value)}
        return {"x-request-id": self.request_id, **kept, **self.answer_headers}

    async def _refuse(self, error: HttpError) -> None:
        """Answer with an error in place of whatever was to come."""
        body = self._rendered(error)
        theirs = [] if self._head is None or self._failure is None else _kept(self._head)
        known = {name.lower().decode("latin-1") for name, _ in theirs}
        said = {name: value for name, value in error.headers.items() if name not in known}
        headers = {"content-type": JSON, "content-length": str(len(body)), **said}
        self._head = {
            "type": "http.response.start",
            "status": self.status_of(error),
            "headers": [*theirs, *_raw(headers)],
        }
        self._is_over = True
        await self._send_head()
        await self._send({"type": "http.response.body", "body": body})

    def _rendered(self, error: HttpError) -> bytes:
        return json.dumps(self.error_body(error)).encode()


def _request_id(headers: Headers) -> str:
    for name in ("x-request-id", INFERENCE_ID):
        if _ID.fullmatch(headers.get(name, "")):
            return headers[name]
    return uuid.uuid4().hex


def _first_error(content: bytes) -> HttpError | None:
    """The error that a stream begins with, if it does."""
    event = content.partition(b"\n")[0]
    if not event.startswith(_DATA + b'{"error"'):
        return None
    try:
        return stream_error(json.loads(event[len(_DATA) :]))
    except ValueError:
        return None  # no whole event: nobody can know yet


def stream_error(event: Mapping[str, Any]) -> HttpError:
    """The error that an event of the engine's stream says."""
    said = event["error"]
    code = said.get("code") if isinstance(said, dict) else None
    return HttpError.answered(code if isinstance(code, int) else 500, json.dumps(event).encode())


def _kept(head: Message) -> list[tuple[bytes, bytes]]:
    """The headers of an error that still hold when its body is another one."""
    ours = (b"content-type", b"content-length")
    return [(name, value) for name, value in head.get("headers", []) if name.lower() not in ours]


def _raw(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]


async def ended(task: "asyncio.Task[None]", within_s: float) -> None:
    """Return when a task that nobody waits for has ended: by itself, or cancelled after `within_s`."""
    try:
        await asyncio.wait({task}, timeout=within_s)
    finally:
        task.cancel()
        await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # seen: it came too late for its client
