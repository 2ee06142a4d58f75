"""The listening sockets of an engine core that somebody calls, and who is let in there.

    Unix socket --------------------> WhenAsked --> Apps.own
    TCP ------------> ForToken -----> WhenAsked --> Apps.by_tcp

Apps, with FastAPI and the engine's tokenizer, are made for the first request that is let in.
"""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

from uvicorn.server import ServerState

from hotspan.config.admin_token import HOW_TO_GIVE
from hotspan.config.control import MAX_CONNECTIONS, ByTcp
from hotspan.config.tenants import Tenants
from hotspan.core.types import MIB
from hotspan.http.connections import HttpLimits
from hotspan.http.errors import HttpError
from hotspan.http.exchange import Exchange, Receive, Scope, Send
from hotspan.http.serving import listen
from hotspan.server.principal import Credentials

App = Callable[[Scope, Receive, Send], Awaitable[None]]

LIMITS = HttpLimits(held_bytes=256 * MIB, principals=1, connections=MAX_CONNECTIONS)
"""Of each listener; the memory is that of both."""


class Apps(NamedTuple):
    """hotspan's routes over one engine, for the administrator. own: with what its cores ask each other."""

    own: App
    by_tcp: App


class WhenAsked:
    """An app that is made for the first request."""

    def __init__(self, made: Callable[[], App]) -> None:
        self._made = made

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        async with exchange.answered("engine"):
            app = self._made()
        if not exchange.is_over:
            await app(scope, receive, send)


class ForToken:
    """An app for who sends the admin token, in the head of each request. Nobody else's connection is kept."""

    def __init__(self, app: App, token: str) -> None:
        self._app = app
        self._credentials = Credentials(Tenants(), token)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        principal = self._credentials.identify(exchange.headers)
        if principal is not None and principal.is_admin:
            await self._app(scope, receive, send)
            return
        error = HttpError(401, f"this is for the administrator: {HOW_TO_GIVE}", code="invalid_api_key")
        await exchange.respond(401, error.content(), headers={**error.headers, "connection": "close"})


def serve(
    make: Callable[[], Apps],
    listener: socket.socket,
    by_tcp: ByTcp | None,
    connections: Mapping[socket.socket, socket.socket],
    ends: socket.socket,
) -> None:
    """Answer on listening sockets until something can be read from `ends`. connections: which there are, by listener's.

    make: called once, unless it fails.
    """
    made: list[Apps] = []

    def apps() -> Apps:
        if not made:
            made.append(make())
        return made[0]

    served: list[tuple[App, socket.socket]] = [(WhenAsked(lambda: apps().own), listener)]
    if by_tcp is not None:
        served.append((ForToken(WhenAsked(lambda: apps().by_tcp), by_tcp.token), by_tcp.listener))
    asyncio.run(_serve(served, connections, ends))


async def _serve(
    served: Sequence[tuple[App, socket.socket]],
    connections: Mapping[socket.socket, socket.socket],
    ends: socket.socket,
) -> None:
    ends.setblocking(False)
    with contextlib.ExitStack() as opened:
        for app, listener in served:
            accepted = [each for each, its in connections.items() if its is listener]
            opened.callback(_cut_off, state := ServerState())
            server = await listen(app, LIMITS, listener, state, backlog=LIMITS.connections, accepted=accepted)
            opened.callback(server.close)
        await asyncio.get_running_loop().sock_recv(ends, 1)
    await asyncio.sleep(0)  # in which connections are closed


def _cut_off(state: ServerState) -> None:
    for connection in tuple(state.connections):
        connection.transport.abort()
