"""A front over a fake engine: asked in process, or over a real socket."""

import asyncio
import contextlib
import json
import tempfile
from collections.abc import AsyncIterator
from dataclasses import fields
from typing import Any

import httpx
import uvicorn

from hotspan.config.server_settings import ServerSettings
from hotspan.http.connections import HttpLimits, connection_class
from hotspan.server.front import Front

from .fake_engine import FakeEngine


def split(**given: Any) -> tuple[ServerSettings, HttpLimits]:
    """Settings and limits of a server, from fields of both."""
    limits = {field.name: given.pop(field.name) for field in fields(HttpLimits) if field.name in given}
    given.setdefault("no_sessions", "sessions_path" not in given)
    return ServerSettings(**given), HttpLimits(**limits)


def front(engine: FakeEngine, *, alive: bool = True, plugs: dict[str, Any] | None = None, **settings: Any) -> Front:
    return Front(engine.app(), *split(**settings), is_alive=lambda: alive, **(plugs or {}))


def client(app: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://hotspan", timeout=60)


async def invoke(app: Any, body: Any, path: str = "/invocations", **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with client(app) as http:
        return await http.post(path, json=body, headers=named)


def rows(response: httpx.Response) -> list[Any]:
    return [json.loads(line) for line in response.content.splitlines()]


def sse(response: httpx.Response) -> list[str]:
    events = response.text.split("\n\n")
    assert events.pop() == ""
    return [event.removeprefix("data: ") for event in events]


@contextlib.asynccontextmanager
async def serving(app: Any, settings: HttpLimits | None = None) -> AsyncIterator[int]:
    """The app on a real socket of this event loop; its port."""
    async with _served(app, settings, port=0) as server:
        yield int(server.servers[0].sockets[0].getsockname()[1])


@contextlib.asynccontextmanager
async def serving_a_file(app: Any, settings: HttpLimits | None = None) -> AsyncIterator[str]:
    """The same on a Unix socket, over which nothing takes time; its path."""
    with tempfile.TemporaryDirectory(prefix="hs-") as directory:
        path = f"{directory}/socket"
        async with _served(app, settings, uds=path):
            yield path


@contextlib.asynccontextmanager
async def _served(app: Any, settings: HttpLimits | None, **place: Any) -> AsyncIterator[uvicorn.Server]:
    config = uvicorn.Config(
        app,
        lifespan="off",
        log_level="critical",
        http=connection_class(settings or HttpLimits()),
        timeout_graceful_shutdown=1,
        **place,
    )
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield server
    finally:
        server.should_exit = True
        await task


def post(body: Any, path: str = "/invocations") -> bytes:
    """A POST as bytes."""
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content
