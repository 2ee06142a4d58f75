"""Sockets that hold on to a server: what each of them may take, and what a healthy client notices of a thousand."""

import asyncio
import contextlib
import gc
import resource
import weakref
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
import uvloop

from hotspan.http.connections import HttpLimits, connection_class
from hotspan.http.exchange import ClientGone, Exchange
from kit.waiting import until_async
from tests.bench.simulated import in_simulated_time, run_simulated
from tests.operations import counted

from .serving import serving_a_file

GET = b"GET / HTTP/1.1\r\nhost: h\r\n\r\n"
HALF_A_BODY = b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 100\r\n\r\n{"
REFUSED_S = 5.0


async def plain(scope: Any, receive: Any, send: Any) -> None:
    """Reads the body and answers; /big answers more than a socket takes, /slow takes its time."""
    while (await receive()).get("more_body"):
        pass
    if scope["path"] == "/slow":
        await asyncio.sleep(0.4)
    body = b"x" * (64 << 20 if scope["path"] == "/big" else 2)
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def connected(path: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        yield reader, writer
    finally:
        writer.close()


async def is_hung_up(reader: asyncio.StreamReader, within_s: float) -> bool:
    try:
        async with asyncio.timeout(within_s):
            return await reader.read() == b""
    except ConnectionError:
        return True
    except TimeoutError:
        return False


async def answered(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(REFUSED_S):
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]))
    return head.partition(b"\r\n")[0]


@pytest.mark.parametrize("begun", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nhost: h\r\n", b"\r\n"])
@in_simulated_time
async def test_a_head_that_does_not_end(begun: bytes) -> None:
    """A connection that begins no request, or never ends its head, is closed in time."""
    now = asyncio.get_running_loop().time
    async with serving_a_file(plain, HttpLimits(head_s=0.2)) as path, connected(path) as (reader, writer):
        writer.write(begun)
        began_s = now()
        assert await is_hung_up(reader, 3) and now() - began_s == pytest.approx(0.2)


@in_simulated_time
async def test_a_head_that_drips() -> None:
    """Bytes that come now and then give no more time: the deadline is the whole head's."""
    async with serving_a_file(plain, HttpLimits(head_s=0.3)) as path, connected(path) as (reader, writer):
        gone = asyncio.create_task(is_hung_up(reader, 3))
        writer.write(GET[:-2] + b"x-drip: ")
        for _ in range(50):
            writer.write(b"a")
            await asyncio.sleep(0.02)
        assert gone.done() and await gone


@in_simulated_time
async def test_the_second_head_has_its_own_time() -> None:
    """On a connection that is kept, each head has the same time, and so has the pause between two."""
    async with serving_a_file(plain, HttpLimits(head_s=0.3, idle_s=0.5)) as path, connected(path) as (reader, writer):
        for _ in range(3):
            writer.write(GET[:5])
            await asyncio.sleep(0.15)
            writer.write(GET[5:])
            assert await answered(reader) == b"HTTP/1.1 200 OK"
            await asyncio.sleep(0.35)
        writer.write(GET[:5])
        assert await is_hung_up(reader, 1)


@in_simulated_time
async def test_an_idle_connection() -> None:
    """A connection that is kept for nothing is closed."""
    async with serving_a_file(plain, HttpLimits(idle_s=0.2)) as path, connected(path) as (reader, writer):
        writer.write(GET)
        await answered(reader)
        assert await is_hung_up(reader, 2)


@in_simulated_time
async def test_a_request_in_work_has_time() -> None:
    """No deadline of the connection's touches a request that is in work, whatever else came with it."""
    limits = HttpLimits(head_s=0.1, idle_s=0.1, stall_s=0.1)
    async with serving_a_file(plain, limits) as path, connected(path) as (reader, writer):
        writer.write(GET.replace(b"/ ", b"/slow "))
        await asyncio.sleep(0.05)
        writer.write(GET[:5])
        assert await answered(reader) == b"HTTP/1.1 200 OK"
        assert await is_hung_up(reader, 1)  # by the head that was begun behind it


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize(("size", "is_early"), [(0, False), (100, False), (300_000, False), (100, True)])
def test_a_client_that_is_gone_ends_its_request(size: int, is_early: bool, loop: Any) -> None:
    """Also behind a body so large that reading had stopped, and if the client went before anybody watched."""
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(client_that_goes(size, is_early=is_early))


async def client_that_goes(size: int, *, is_early: bool) -> None:
    """A request with a body of `size` bytes, whose client closes its connection before the answer, or even earlier."""
    is_read, is_watched, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        exchange = Exchange(scope, receive, send)
        while (await exchange.part())[1]:
            pass
        is_read.set()
        if is_early:
            await until_async(lambda: receive.__self__.disconnected)
        with pytest.raises(ClientGone):
            async with exchange.watched(is_cancelled=True):
                is_watched.set()
                await asyncio.Event().wait()
        assert exchange.gone.is_set()
        ended.set()

    async with serving_a_file(app) as path, connected(path) as (_, writer), asyncio.timeout(60):
        writer.write(b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n" % size + b"x" * size)
        await (is_read if is_early else is_watched).wait()
        writer.close()
        await ended.wait()


async def test_a_client_that_goes_after_its_answer_ends_nothing() -> None:
    """Whoever watched a request is told nothing once its block is over."""
    is_closed = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        exchange = Exchange(scope, receive, send)
        await exchange.part()
        async with exchange.watched(is_cancelled=True):
            await exchange.respond(200, b"{}")
        await until_async(lambda: receive.__self__.transport.is_closing())
        is_closed.set()

    async with serving_a_file(app) as path, asyncio.timeout(60):
        async with connected(path) as (reader, writer):
            writer.write(GET)
            await answered(reader)
        await is_closed.wait()


async def test_a_connection_that_is_kept_keeps_no_request() -> None:
    """Once it is answered, with its body and what watched it, though the client may send nothing for long."""
    exchanges: list[weakref.ref[Exchange]] = []
    tasks: list[asyncio.Task[Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        exchange = Exchange(scope, receive, send)
        exchanges.append(weakref.ref(exchange))
        tasks.append(cast(asyncio.Task[Any], asyncio.current_task()))
        await exchange.part()
        async with exchange.watched(is_cancelled=True):
            await exchange.respond(200, b"{}")

    async with serving_a_file(app) as path, connected(path) as (reader, writer), asyncio.timeout(60):
        writer.write(GET)
        await answered(reader)
        await asyncio.wait(tasks)
        gc.collect()
        assert exchanges[0]() is None


@in_simulated_time
async def test_a_head_too_large() -> None:
    """A head without an end is refused before it fills the memory."""
    async with serving_a_file(plain, HttpLimits()) as path, connected(path) as (reader, writer):
        writer.write(GET[:-2] + b"".join(b"x-%d: %b\r\n" % (number, b"a" * 1000) for number in range(70)))
        assert await answered(reader) == b"HTTP/1.1 431 Request Header Fields Too Large"


@in_simulated_time
async def test_a_client_that_reads_nothing() -> None:
    """A client that leaves its answer where it is loses it."""
    async with serving_a_file(plain, HttpLimits(deaf_s=0.2)) as path, connected(path) as (reader, writer):
        writer.write(GET.replace(b"/ ", b"/big "))
        await asyncio.sleep(1.0)
        read = 0
        with contextlib.suppress(ConnectionError):
            while part := await reader.read(1 << 20):
                read += len(part)
        assert 0 < read < 64 << 20


@in_simulated_time
async def test_room_for_newcomers() -> None:
    """When there are as many connections as may be, the one that waits longest goes; those in work stay."""
    async with serving_a_file(plain, HttpLimits(connections=3)) as path, contextlib.AsyncExitStack() as stack:
        busy, oldest, younger = [await stack.enter_async_context(connected(path)) for _ in range(3)]
        busy[1].write(GET.replace(b"/ ", b"/slow "))
        await asyncio.sleep(0.05)
        newest = await stack.enter_async_context(connected(path))
        newest[1].write(GET)
        assert await answered(newest[0]) == b"HTTP/1.1 200 OK"
        assert await is_hung_up(oldest[0], 1)
        younger[1].write(GET)
        assert await answered(younger[0]) == await answered(busy[0]) == b"HTTP/1.1 200 OK"


@in_simulated_time
async def test_no_room_beside_work() -> None:
    """Where all connections are at work, a new one is told so, and they go on."""
    async with serving_a_file(plain, HttpLimits(connections=2)) as path, contextlib.AsyncExitStack() as stack:
        busy = [await stack.enter_async_context(connected(path)) for _ in range(2)]
        for _, writer in busy:
            writer.write(GET.replace(b"/ ", b"/slow "))
        await asyncio.sleep(0.05)
        late = await stack.enter_async_context(connected(path))
        assert await answered(late[0]) == b"HTTP/1.1 503 Service Unavailable"
        assert [await answered(reader) for reader, _ in busy] == [b"HTTP/1.1 200 OK"] * 2


def test_a_request_costs_the_same_beside_slow_sockets() -> None:
    """Beside 400 sockets with half a head or half a body a request takes as many operations as beside 40."""

    def cost(sockets: int) -> int:
        counts: list[int] = []

        async def main(now: object) -> None:
            settings = HttpLimits(head_s=600, stall_s=600, connections=1000)
            async with serving_a_file(plain, settings) as path, contextlib.AsyncExitStack() as stack:
                slow = [await stack.enter_async_context(connected(path)) for _ in range(sockets)]
                for number, (_, writer) in enumerate(slow):
                    writer.write(HALF_A_BODY if number % 2 else GET[:-2])
                reader, writer = await stack.enter_async_context(connected(path))
                for _ in range(3):
                    await asyncio.sleep(0.05)
                    with counted() as found:
                        writer.write(GET)
                        assert await answered(reader) == b"HTTP/1.1 200 OK"
                    counts.append(found.count)
                assert not any(reader.at_eof() for reader, _ in slow), "they are still held"

        run_simulated(main)
        return min(counts)

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    assert cost(400) < 1.1 * cost(40)


def test_files_are_left_for_others() -> None:
    """However many connections are allowed, half of the files that the process may open are not theirs."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert connection_class(HttpLimits(connections=10**9)).max_connections == files // 2  # type: ignore[attr-defined]
    assert connection_class(HttpLimits(connections=7)).max_connections == 7  # type: ignore[attr-defined]
