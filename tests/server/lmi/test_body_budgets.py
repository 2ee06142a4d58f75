"""Slow and unwanted bodies over real sockets, in simulated time: whose memory and whose connections they take."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from kit.waiting import until_async
from tests.bench.simulated import in_simulated_time
from tests.server.test_principal import ADMIN_TOKEN

from .fake_engine import FakeEngine
from .serving import post, serving_a_file
from .test_gate import gated

KEY_A, KEY_B, KEY_ADMIN = "key-a", "key-b", ADMIN_TOKEN
BODY = {"inputs": "a" * 100}
HELD = 16_000
PRINCIPALS = 4


def signed(request: bytes, key: str) -> bytes:
    return request.replace(b"\r\n", f"\r\nauthorization: Bearer {key}\r\n".encode(), 1)


async def status(path: str, request: bytes) -> int:
    """Of the answer to a whole request."""
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        writer.write(request)
        return int((await reader.readuntil(b"\r\n\r\n")).split()[1])
    finally:
        writer.close()


def upload(start: bytes, size: int) -> bytes:
    """A body of 100,000 bytes, of which so many are sent."""
    head = start + b"host: h\r\ncontent-type: application/json\r\ncontent-length: 100000\r\n"
    return head + b"\r\n" + b" " * size


@contextlib.asynccontextmanager
async def uploads(path: str, count: int, request: bytes) -> AsyncIterator[list[asyncio.StreamReader]]:
    """So many connections that never send the rest of their bodies."""
    opened = [await asyncio.open_unix_connection(path) for _ in range(count)]
    try:
        for _, writer in opened:
            writer.write(request)
        yield [reader for reader, _ in opened]
    finally:
        for _, writer in opened:
            writer.close()


@in_simulated_time
async def test_slow_uploads_of_one_tenant_stop_nobody_else() -> None:
    """A tenant that fills all the memory that it can is refused; another tenant and the administrator are answered."""
    app = gated(FakeEngine(), held_bytes=HELD, principals=PRINCIPALS, stall_s=1000)
    bodies = app._app.admission._bodies  # type: ignore[attr-defined]
    async with serving_a_file(app) as path:
        slow = signed(upload(b"POST /invocations HTTP/1.1\r\n", 900), KEY_A)
        async with uploads(path, 20, slow):
            await until_async(lambda: bodies._held.used == 9900)
            full = signed(upload(b"POST /invocations HTTP/1.1\r\n", 200), KEY_A)
            assert await status(path, full) == 429
            assert await status(path, signed(post(BODY), KEY_B)) == 200
            assert await status(path, signed(post(BODY), KEY_ADMIN)) == 200
        await until_async(lambda: bodies._held.used == 0)
        assert await status(path, signed(post(BODY), KEY_A)) == 200


@in_simulated_time
async def test_uploads_of_one_tenant_are_bounded_in_number() -> None:
    """Bodies that hardly begin take no memory, but connections: others still have theirs."""
    app = gated(FakeEngine(), connections=32, principals=PRINCIPALS, stall_s=1000)
    bodies = app._app.admission._bodies  # type: ignore[attr-defined]
    async with serving_a_file(app) as path:
        slow = signed(upload(b"POST /invocations HTTP/1.1\r\n", 1), KEY_A)
        async with uploads(path, 20, slow):
            await until_async(lambda: bodies._uploads.used == 10)
            assert await status(path, signed(post(BODY), KEY_A)) == 429
            assert await status(path, signed(post(BODY), KEY_B)) == 200
            assert await status(path, signed(post(BODY), KEY_ADMIN)) == 200
        await until_async(lambda: bodies._uploads.used == 0)


@pytest.mark.parametrize(
    "start",
    [
        b"GET /ping HTTP/1.1\r\n",
        b"POST /health HTTP/1.1\r\n",
        b"GET /health HTTP/1.1\r\n",
        b"OPTIONS /v1/completions HTTP/1.1\r\norigin: http://o\r\naccess-control-request-method: POST\r\n",
    ],
)
@in_simulated_time
async def test_bodies_of_public_routes_are_not_read(start: bytes) -> None:
    """Who has no key takes no memory: the answer does not wait for the body, and the connection is closed soon."""
    app = gated(FakeEngine(), held_bytes=HELD, principals=PRINCIPALS)
    bodies = app._app.admission._bodies  # type: ignore[attr-defined]
    async with serving_a_file(app) as path, uploads(path, 40, upload(start, 900)) as readers:
        for reader in readers:
            assert (await reader.readuntil(b"\r\n\r\n")).split()[1] not in (b"408", b"503")
        assert bodies._held.used == bodies._uploads.used == 0
        assert await status(path, signed(post(BODY), KEY_A)) == 200
        for reader in readers:
            await reader.read()  # until the server hangs up
