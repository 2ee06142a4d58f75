"""The daemon's HTTP server: whatever a client does, nobody else notices, and nothing takes for ever."""

import asyncio
import contextlib
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

import pytest
from uvicorn.server import ServerState

from hotspan.core.types import MIB
from hotspan.daemon.pool import Pool
from hotspan.daemon.routes import MAX_UNWANTED_BYTES, Routes
from hotspan.daemon.stored import Writing, object_key
from hotspan.http.connections import MAX_PIPELINED, HttpLimits
from hotspan.http.serving import listen
from hotspan.testing.clock import SimulatedClock
from tests.bench.simulated import in_simulated_time, in_stepped_time, pass_time

LIMITS = HttpLimits(stall_s=0.5, least_rate=1e5, idle_s=300.0, deaf_s=1.0, head_bytes=16384)
SIZE = 8 * MIB
PATIENCE_S = 60.0
"""What the machine may need for anything."""


@dataclass(frozen=True, slots=True)
class Server:
    """The routes over memory of its own."""

    pool: Pool
    routes: Routes
    state: ServerState
    port: int

    async def client(self) -> "Client":
        """Another connection."""
        return Client(*await asyncio.open_connection("127.0.0.1", self.port))


class Client:
    """A connection that says what a test wants, and reads one response after the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, *parts: bytes) -> None:
        """Each part in a packet of its own."""
        for part in parts:
            self._writer.write(part)
            await self._writer.drain()

    async def receive(self) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the next response."""
        async with asyncio.timeout(PATIENCE_S):
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(line.lower().split(": ") for line in head[1:] if line)
            body = await self._reader.readexactly(int(headers.get("content-length", 0)))
            return int(head[0].split()[1]), headers, body

    async def ask(self, *parts: bytes) -> int:
        """The status."""
        await self.send(*parts)
        return (await self.receive())[0]

    async def ended(self) -> bool:
        """Whether the daemon hung up, within some seconds, and said nothing more."""
        async with asyncio.timeout(PATIENCE_S):
            try:
                return await self._reader.read(1) == b""
            except ConnectionResetError:
                return True

    async def close(self) -> None:
        """Hang up."""
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


@contextlib.asynccontextmanager
async def serving(limits: HttpLimits = LIMITS) -> AsyncIterator[Server]:
    """A server on this event loop."""
    pool = Pool(memoryview(bytearray(SIZE)), 4096, SimulatedClock())
    routes = Routes(pool, b"12345678", "/socket", dict, lambda: b"x" * MIB, limits=limits)
    listener, state = socket.socket(), ServerState()
    listener.bind(("127.0.0.1", 0))
    listening = await listen(routes, limits, listener, state)
    try:
        yield Server(pool, routes, state, listener.getsockname()[1])
    finally:
        listening.close()
        for connection in list(state.connections):
            connection.transport.abort()
        if state.tasks:
            await asyncio.wait(state.tasks)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    """One that waits as long as this machine may need: what ends by a limit is tested in simulated time."""
    async with serving(replace(LIMITS, stall_s=PATIENCE_S, deaf_s=PATIENCE_S)) as found:
        yield found


def put(name: str, size: int, *headers: str) -> bytes:
    """The head of a put."""
    more = "".join(f"{header}\r\n" for header in headers)
    return f"PUT /v1/kv/b/{name} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n{more}\r\n".encode()


HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def until(holds: Callable[[], bool]) -> None:
    """Wait for what the server does, also where no time passes."""
    for _ in range(1_000_000):
        if holds():
            return
        await asyncio.sleep(0)
    raise TimeoutError("it never came")


async def test_a_body_in_pieces_is_one_value(server: Server) -> None:
    """However head and body are cut into packets, what is stored is the body."""
    value = secrets.token_bytes(100_000)
    request = put("k", len(value)) + value
    client = await server.client()
    pieces = [request[:1], request[1:40], request[40:90], request[90:200], request[200:70_000], request[70_000:]]
    for piece in pieces[:-1]:
        await client.send(piece)
        await asyncio.sleep(0.01)
    assert await client.ask(pieces[-1]) == 200
    (place,) = server.pool._objects.values()
    ((offset, size),) = place.extents
    assert server.pool.memory[offset : offset + size] == value
    await client.close()


@pytest.mark.parametrize("begun", [0, 1, 70_000, 3 * MIB - 1])
async def test_what_follows_a_large_body_is_another_request(server: Server, begun: int) -> None:
    """A body that goes from the socket into memory ends where its length says; the connection serves on."""
    client = await server.client()
    for name in ("a", "b"):
        value = secrets.token_bytes(3 * MIB)
        await client.send(put(name, len(value)) + value[:begun])
        await until(lambda: server.pool.pinned_bytes > 0)
        await client.send(value[begun:] + HEALTH + put(name, 3) + b"new" + HEALTH)
        assert [(await client.receive())[0] for _ in range(4)] == [200, 200, 409, 200]
        stored = server.pool.find([object_key("b", name)])[0]
        assert stored is not None
        assert b"".join(bytes(server.pool.memory[at : at + size]) for at, size in stored.extents) == value
    await client.close()


async def test_requests_that_come_at_once_are_answered_in_order(server: Server) -> None:
    """Pipelined requests, bodies among them and a held one, are each answered, one after the other."""
    client, writer = await server.client(), await server.client()
    await writer.send(put("held", 10), b"12345")
    await until(lambda: server.pool.pinned_bytes > 0)
    lease = b"POST /v1/kv/b/held/leases?timeout_ms=60000&ttl_s=30.0 HTTP/1.1\r\nHost: localhost\r\n\r\n"
    await client.send(
        put("k", 5) + b"value" + put("k", 5) + b"again" + HEALTH + lease + HEALTH * 1000 + put("l", 1) + b"x"
    )
    assert [(await client.receive())[0] for _ in range(3)] == [200, 409, 200]
    assert await writer.ask(b"67890") == 200
    assert [(await client.receive())[0] for _ in range(1002)] == [200] * 1002
    assert len(server.pool) == 3
    await client.close()
    await writer.close()


async def test_a_head_without_end_is_refused(server: Server) -> None:
    """Headers beyond 16 KiB are 431, and the connection ends."""
    client = await server.client()
    assert await client.ask(b"GET /health HTTP/1.1\r\nX: " + b"y" * LIMITS.head_bytes) == 431
    assert await client.ended()
    await client.close()


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"PUT /v1/kv/b/k HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", 400),
        (b"PUT /v1/kv/b/k HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n", 400),
        (b"GET /v1/kv/b/k HTTP/1.1\r\nHost: a\r\nhost: b\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\n\r\n", 400),
        (b"GET /v1/kv/b/k HTTP/1.1\r\nHost: localhost\r\nAuthorization: a\r\nAuthorization: a\r\n\r\n", 400),
        (b"GET *x HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"PUT /v1/kv/b/k HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999999999999\r\n\r\n", 400),
        (b"PUT /v1/kv/b/k HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"PUT /v1/kv/b/k HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n", 411),
        (b"PUT /v1/kv/b/k HTTP/1.1\r\nHost: localhost\r\n\r\n", 411),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n", 400),
        (b"CONNECT x:1 HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"GET /health\r\n\r\n", 505),
    ],
)
async def test_what_is_no_request_is_refused(server: Server, request_: bytes, status: int) -> None:
    """What two readers could take for different requests, or is none, is never taken for one."""
    client = await server.client()
    assert await client.ask(request_) == status
    assert len(server.pool) == 0 and server.pool.pinned_bytes == 0
    await client.close()


async def test_a_whole_url_is_its_path(server: Server) -> None:
    """A target with a host is answered as its path, whoever the host is (RFC 9112, 3.2.2)."""
    client = await server.client()
    assert await client.ask(b"GET http://somewhere:1/health HTTP/1.1\r\nHost: localhost\r\n\r\n") == 200
    await client.close()


async def test_a_client_that_asks_first_is_told(server: Server) -> None:
    """Expect: 100-continue hears 100 for a body that is wanted, and the refusal at once for one that is not."""
    client = await server.client()
    await client.send(put("k", 5, "Expect: 100-continue"))
    assert (await client.receive())[0] == 100
    assert await client.ask(b"value") == 200
    await client.send(put("k", 5, "Expect: 100-continue"))
    status, headers, _ = await client.receive()
    assert status == 409 and headers["connection"] == "close"
    await client.close()


async def test_a_refused_body_is_heard_of_by_who_sends_it(server: Server) -> None:
    """Who sends all of a body before it reads hears 409 or 413, and the connection goes on."""
    client = await server.client()
    assert await client.ask(put("k", 3) + b"old") == 200
    for name, size, status in (("k", 6 * MIB, 409), ("large", SIZE + MIB, 413)):
        assert await client.ask(put(name, size) + bytes(size)) == status
    assert await client.ask(HEALTH) == 200
    await client.close()


async def test_a_body_where_none_belongs(server: Server) -> None:
    """Small ones are read and ignored, large ones refused."""
    client = await server.client()
    head = b"POST /v1/leases/x/release HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    assert await client.ask(head % 5 + b"12345") == 200
    assert await client.ask(head % MIB + bytes(MIB)) == 413
    assert await client.ask(HEALTH) == 200
    await client.close()


async def test_old_clients_and_polite_ones_are_hung_up_on(server: Server) -> None:
    """HTTP/1.0, or Connection: close, is answered and ended."""
    for request in (
        b"GET /health HTTP/1.0\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    ):
        client = await server.client()
        assert await client.ask(request) == 200 and await client.ended()
        await client.close()


@in_stepped_time
async def test_half_a_body_leaves_nothing() -> None:
    """A client that stops in the middle of a body, or hangs up there, is forgotten with what it reserved."""
    async with serving() as server:
        stops, leaves = await server.client(), await server.client()
        for client, name in ((stops, "stops"), (leaves, "leaves")):
            await client.send(put(name, 2 * MIB), bytes(MIB))
        await until(lambda: server.pool.pinned_bytes == 4 * MIB)
        await leaves.close()
        await until(lambda: server.pool.counts.aborted == 1)
        await pass_time(0.9 * LIMITS.stall_s)
        assert server.pool.counts.aborted == 1
        await pass_time(10 + LIMITS.stall_s)  # at least as long as 1 MiB takes
        assert (await stops.receive())[0] == 408 and await stops.ended()
        await until(lambda: not server.pool.pinned_bytes)
        assert server.pool.free_bytes == server.pool.capacity_bytes and server.pool.counts.aborted == 2
        await stops.close()


@in_stepped_time
async def test_a_body_that_trickles_is_not_waited_for() -> None:
    """A byte now and then does not keep a reservation for ever."""
    async with serving() as server:
        client = await server.client()
        size = int(LIMITS.least_rate)  # 1 s at the least rate
        await client.send(put("k", size))
        await until(lambda: server.pool.pinned_bytes > 0)
        waits = 0
        while server.pool.pinned_bytes and waits < 100:
            await client.send(b"x")
            await pass_time(0.05)
            for _ in range(20):
                await asyncio.sleep(0)
            waits += 1
        assert 0.4 < 0.05 * waits < 2
        assert (await client.receive())[0] == 408
        await client.close()


@in_stepped_time
async def test_a_monstrous_body_is_answered_before_it_comes() -> None:
    """What would take too long to read is refused at once; what of it still comes is not kept, nor waited for."""
    async with serving() as server:
        client = await server.client()
        await client.send(put("k", MAX_UNWANTED_BYTES + 1), bytes(MIB))
        assert (await client.receive())[0] == 413 and server.pool.pinned_bytes == 0
        await pass_time(1.1 * LIMITS.stall_s)
        assert await client.ended()
        await client.close()


@in_stepped_time
async def test_an_idle_connection_is_kept_and_closed_in_time() -> None:
    """Clients keep connections for later: one is closed after `idle_s`, and no earlier."""
    async with serving() as server:
        client = await server.client()
        assert await client.ask(HEALTH) == 200
        await pass_time(0.9 * LIMITS.idle_s)
        assert await client.ask(HEALTH) == 200
        await pass_time(1.1 * LIMITS.idle_s)
        assert await client.ended()
        await client.close()


@in_stepped_time
async def test_a_client_that_reads_nothing_is_not_read() -> None:
    """Answers that nobody takes do not pile up: requests wait, others are served, and in the end it is hung up on."""
    async with serving() as server:
        deaf = socket.create_connection(("127.0.0.1", server.port))
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.setblocking(False)
        asked = 0
        with contextlib.suppress(BlockingIOError):
            while asked < 10_000:
                asked += deaf.send(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100)
                await asyncio.sleep(0)
        client = await server.client()
        assert await client.ask(HEALTH) == 200
        (connection,) = [each for each in server.state.connections if each.flow.write_paused]
        assert connection.transport.get_write_buffer_size() < 8 * MIB
        assert len(connection.pipeline) <= MAX_PIPELINED
        await pass_time(1.1 * LIMITS.deaf_s)
        await until(lambda: connection not in server.state.connections)
        deaf.close()
        await client.close()


async def test_pipelined_requests_are_bounded(server: Server) -> None:
    """Who sends more requests at once than may wait is hung up on; what was answered before stays answered."""
    writer, client = await server.client(), await server.client()
    await writer.send(put("held", 10), b"12345")
    await until(lambda: server.pool.pinned_bytes > 0)
    lease = b"POST /v1/kv/b/held/leases?timeout_ms=60000 HTTP/1.1\r\nHost: localhost\r\n\r\n"
    await client.send(lease + HEALTH * (MAX_PIPELINED + 1))
    assert (await client.receive())[0] == 400 and await client.ended()
    await client.close()
    await writer.close()


async def test_a_writer_that_ends_as_the_hold_begins(server: Server) -> None:
    """A hold ends although the writer does as soon as the hold has begun."""
    for ends, status in ((server.pool.abort, 404), (server.pool.commit, 200)):
        writing = server.pool.reserve(object_key("b", "k"), 10, is_own=False)
        assert isinstance(writing, Writing)
        held = asyncio.create_task(server.routes.lease(object_key("b", "k"), b"timeout_ms=60000"))
        await asyncio.sleep(0)
        ends(writing)
        async with asyncio.timeout(PATIENCE_S / 2):  # less than the hold
            assert (await held).status == status


@in_simulated_time
async def test_a_hold_ends_a_little_early() -> None:
    """A client that waits just as long as it lets the daemon hold gets 504, and does not reach its own timeout."""
    pool = Pool(memoryview(bytearray(SIZE)), 4096, SimulatedClock())
    routes = Routes(pool, b"12345678", "/socket", dict, bytes)
    assert isinstance(pool.reserve(object_key("b", "k"), 10, is_own=False), Writing)
    for timeout_ms, max_s in ((0, 0.0), (200, 0.15), (600, 0.5), (60_000, 59.9)):
        began_s = asyncio.get_running_loop().time()
        held = await routes.lease(object_key("b", "k"), b"timeout_ms=%d" % timeout_ms)
        assert held.status == 504
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(max_s)
    began_s = asyncio.get_running_loop().time()
    for timeout_ms in (0, 60_000):
        assert (await routes.lease(object_key("b", "absent"), b"timeout_ms=%d" % timeout_ms)).status == 404
    assert asyncio.get_running_loop().time() == began_s


async def test_a_client_that_leaves_while_it_is_held(server: Server) -> None:
    """Who hangs up during a hold gets no lease that nobody would release."""
    writer, client = await server.client(), await server.client()
    await writer.send(put("k", 10), b"12345")
    await until(lambda: server.pool.pinned_bytes > 0)
    await client.send(b"POST /v1/kv/b/k/leases?timeout_ms=60000&ttl_s=30.0 HTTP/1.1\r\nHost: localhost\r\n\r\n")
    writing = server.pool.writing(object_key("b", "k"))
    assert writing is not None
    await until(lambda: len(writing.on_end) > 0)
    await client.close()
    await until(lambda: len(server.state.connections) == 1 and len(server.state.tasks) == 1)
    assert await writer.ask(b"67890") == 200
    assert server.pool.leases == 0 and len(server.pool) == 1
    await writer.close()
