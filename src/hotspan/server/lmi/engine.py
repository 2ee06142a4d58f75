"""Requests that hotspan's routes make to the engine's app in process, and its responses part by part."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Scope

from hotspan.http.exchange import JSON, ClientGone, Exchange
from hotspan.server.exchange import ended
from hotspan.server.lmi.request import ADAPTER_HEADER
from hotspan.server.lmi.sessions import HEADER as SESSION_HEADER

_END_S = 1.0
"""How long the app may take to end a generation that nobody waits for, before its task is cancelled."""

_CONTENT = ("content-type", "content-length", "transfer-encoding", "expect")
_DONE_HERE = (ADAPTER_HEADER, SESSION_HEADER)
"""Headers that the app would act upon a second time."""


class _Pipe:
    """The app's messages, one at a time; after `shut`, further messages are dropped without waiting."""

    def __init__(self) -> None:
        self._messages: asyncio.Queue[Message | None] = asyncio.Queue()
        self._room = asyncio.Event()
        self._room.set()
        self._is_shut = False

    async def put(self, message: Message) -> None:
        await self._room.wait()
        if not self._is_shut:
            self._room.clear()
            self._messages.put_nowait(message)

    async def get(self) -> Message | None:
        """The next message; None after the last."""
        message = await self._messages.get()
        self._room.set()
        return message

    def end(self) -> None:
        """End the messages."""
        self._messages.put_nowait(None)

    def shut(self) -> None:
        """Drop all further messages."""
        self._is_shut = True
        self._room.set()


class AppResponse:
    """A response of the app."""

    def __init__(self, head: Message, pipe: _Pipe) -> None:
        self.status: int = head["status"]
        self.headers = Headers(raw=head["headers"])
        self._pipe = pipe

    async def parts(self) -> AsyncIterator[bytes]:
        """The body, as it comes. Raises: ClientGone if the app ended it early."""
        is_last = False
        while not is_last:
            message = await self._pipe.get()
            if message is None:
                raise ClientGone
            is_last = not message.get("more_body", False)
            yield message.get("body", b"")

    async def whole(self) -> bytes:
        """All of the body."""
        return b"".join([part async for part in self.parts()])


def request_scope(exchange: Exchange, path: str, body: bytes) -> Scope:
    """The scope of a POST to `path` with a JSON body, for the client and with the headers of this exchange."""
    content = {"content-type": JSON, "content-length": str(len(body))}
    root: str = exchange.scope.get("root_path", "")
    where = {"method": "POST", "path": root + path, "raw_path": (root + path).encode()}
    return {**exchange.scope, **where, "headers": _headers(exchange, (*_CONTENT, *_DONE_HERE), content)}


def forwarded_scope(exchange: Exchange) -> Scope:
    """The scope of the request as it came, with the id that it has here."""
    return {**exchange.scope, "headers": _headers(exchange, (), {})}


def _headers(exchange: Exchange, dropped: tuple[str, ...], added: dict[str, str]) -> list[tuple[bytes, bytes]]:
    gone = {name.encode() for name in (*dropped, "x-request-id")}
    kept = [(name, value) for name, value in exchange.scope["headers"] if name.lower() not in gone]
    own = {"x-request-id": exchange.request_id, **added}
    return [*kept, *((name.encode(), value.encode()) for name, value in own.items())]


@contextlib.asynccontextmanager
async def asked(app: ASGIApp, exchange: Exchange, path: str, body: bytes) -> AsyncIterator[AppResponse]:
    """The app's response. Leaving the block ends the generation if it still runs.

    Raises: ClientGone if the app gives none, since nobody waits.
    """
    pipe, bodies = _Pipe(), [body]

    async def receive() -> Message:
        if bodies:
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}
        await exchange.gone.wait()
        # An app that waits for us goes on to wait for the engine. Cancelled there, a generator ends at once; where it
        # has just said something, only when it is collected.
        pipe.shut()
        await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    async def work() -> None:
        try:
            await app(request_scope(exchange, path, body), receive, pipe.put)
        finally:
            pipe.end()

    task = asyncio.create_task(work())
    try:
        head = await pipe.get()
        if head is None:
            await task
            raise ClientGone
        yield AppResponse(head, pipe)
    finally:
        exchange.gone.set()
        pipe.shut()
        await ended(task, _END_S)
