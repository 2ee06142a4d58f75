"""Heads that an attacker writes: only replicas are reached, and nothing that a client sends is a replica's fault."""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web

from hotspan.core.credentials import key_digest, shown_keys
from hotspan.router.access import Access
from hotspan.router.settings import HealthSettings
from hotspan.server.principal import Credentials, Principal
from hotspan.testing.clock import SimulatedClock
from kit.waiting import until_async
from tests.server.test_principal import ADMIN_TOKEN, known

from .rig import Fake, Routed, die, replicas, routed, say, say_ok

STRICT = HealthSettings(interval_s=60.0, failures=1, open_s=600.0)
"""One failure opens a breaker until the end of the test."""

BODY = b'{"prompt": "x"}'


async def raw(at: Routed, head: bytes, body: bytes = b"", *, method: bytes = b"POST") -> tuple[int, bytes]:
    """The status and the rest of what is answered to these bytes; `head` goes from the target to the last header."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(at.url.rpartition(":")[2]))
    try:
        writer.write(method + b" " + head + b"\r\nConnection: close\r\n\r\n" + body)
        async with asyncio.timeout(60):
            answer = await reader.read()
    finally:
        writer.close()
    return int(answer.split(b" ", 2)[1]), answer


def asking(*lines: bytes, target: bytes = b"/v1/completions") -> bytes:
    """A head for `raw` around these lines."""
    own = [target + b" HTTP/1.1", b"Host: localhost"] if not any(line.lower()[:5] == b"host:" for line in lines) else []
    return b"\r\n".join([*(own or [target + b" HTTP/1.1"]), *lines])


@contextlib.asynccontextmanager
async def attackers_host() -> AsyncIterator[tuple[bytes, list[bytes]]]:
    """A host that the router has no business with: its address, and the first bytes of each connection."""
    came: list[bytes] = []

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.append(await reader.read(64))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\nconnection: close\r\n\r\nsecret")
        writer.close()

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}".encode(), came


async def untouched(at: Routed, fake: Fake) -> None:
    """The replica is in use as before."""
    assert await at.metric("breaker_opened_total", replica=fake.url) == 0
    works = fake.works
    assert await at.status() == 200 and fake.works == works + 1


TARGETS = [b"*@%b/x", b"*:x@%b/x", b"*@%b", b"*x", b"*", b"*:99999/x", b"*#@%b/", b"*?@%b/", b"*\\@%b/x"]
PATHS = [b"//%b/x", b"/@%b/x", b"/..//@%b/x?y=/../#@%b", b"/%%2e%%2e/\\@%b/;x"]


async def test_only_replicas_are_reached() -> None:
    """A target that is no path is a 400; a path arrives as it was written, and one with a host as its path (RFC 9112,
    3.2.2); CONNECT is no tunnel. Whoever a target names is not asked, and no replica is to blame."""
    async with attackers_host() as (host, came), replicas(say_ok) as (fake,), routed([fake], health=STRICT) as at:
        refused = [
            (method, target.replace(b"%b", host))
            for method in (b"GET", b"POST", b"PUT", b"DELETE", b"OPTIONS", b"HEAD")
            for target in TARGETS
        ]
        refused += [(b"CONNECT", target) for target in (host, b"*@" + host, b"/v1/models", b"http://" + host + b"/x")]
        for method, target in refused:
            status, _ = await raw(at, asking(b"Content-Length: 0", target=target), method=method)
            assert status == 400 and not fake.works, (method, target)
        await untouched(at, fake)
        passed = [(path % tuple([host] * path.count(b"%b")), None) for path in PATHS]
        absolute = (b"http://%b/v1/models?a=1", b"HTTPS://u:p@%b/v1/models?a=1")
        for target, path in [*passed, *((each % host, "/v1/models?a=1") for each in absolute)]:
            status, _ = await raw(at, asking(target=target), method=b"GET")
            assert status == 200 and fake.asked[-1][1] == (path or target.partition(b"#")[0].decode()), target
        assert not came


DECISIVE = [
    (b"Authorization: Bearer a", b"authorization: Bearer b"),
    (b"X-Api-Key: a", b"x-api-key: a"),
    (b"Host: a", b"Host: b"),
    (b"Content-Type: application/json", b"Content-Type: text/plain"),
    (b"Content-Length: 15", b"Content-Length: 15"),
    (b"Content-Length: 15", b"Content-Length: 1"),
    (b"Content-Length: 15", b"Transfer-Encoding: chunked"),
    (b"Transfer-Encoding: chunked", b"Transfer-Encoding: identity"),
    (b"Transfer-Encoding: identity", b"Content-Length: 15"),
    (b"Transfer-Encoding: chunked, identity",),
    (b"Transfer-Encoding: xchunked",),
    (b"X-Amzn-SageMaker-Session-Id: a", b"X-Amzn-SageMaker-Session-Id: b"),
    (b"X-Session-Id: a", b"X-Session-Id: b"),
    (b"X-Team: a", b"X-Team: b"),
    (b"X-Chat: a", b"X-Chat: b"),
    (b"X-Amzn-SageMaker-Adapter-Identifier: a", b"X-Amzn-SageMaker-Adapter-Identifier: b"),
    (b"X-A: a", b" folded: b"),
    (b"X-A : a",),
    (b"X-A\x0b: a",),
    (b"X-A: a\x00b",),
    (b"X-A: a\rX-B: b",),
    (b"Content-Length: +15",),
    (b"Content-Length: 0x0f",),
    (b"Content-Length: 15, 15",),
]


async def test_what_two_readers_could_take_for_two_requests_is_refused() -> None:
    """Headers that decide come once, none is folded, and lengths are plain: 400, which is no replica's fault."""
    options = {"tenant_header": "X-Team", "session_key": "x-chat"}
    async with replicas(say_ok) as (fake,), routed([fake], health=STRICT, **options) as at:
        for lines in DECISIVE:
            sized = any(line.lower().startswith((b"content-length", b"transfer")) for line in lines)
            status, _ = await raw(at, asking(*lines, *(() if sized else (b"Content-Length: 15",))), BODY)
            assert status == 400 and not fake.works, lines
        status, _ = await raw(at, b"/v1/completions HTTP/1.1\r\nContent-Length: 15", BODY)
        assert status == 400 and not fake.works  # HTTP/1.1 has a Host
        await untouched(at, fake)


async def test_trailers_are_no_headers() -> None:
    """What follows a chunked body reaches no replica: keys and limits were checked before it came."""
    async with replicas(say_ok) as (fake,), routed([fake], health=STRICT) as at:
        chunks = (
            b'f;x="y"\r\n'
            + BODY
            + b"\r\n0\r\nX-Late: 1\r\nAuthorization: Bearer late\r\nX-Forwarded-For: 1.1.1.1\r\n\r\n"
        )
        status, _ = await raw(at, asking(b"Transfer-Encoding: chunked", b"Trailer: X-Late"), chunks)
        assert status == 200
        ((_, _, got, body),) = fake.asked
        assert body == BODY and got["content-length"] == "15"
        assert not {"x-late", "authorization", "transfer-encoding", "trailer"} & got.keys()
        assert got["x-forwarded-for"] == "127.0.0.1"


async def test_headers_of_the_connection_end_here() -> None:
    """Hop-by-hop headers, and those that any `Connection` names, go no further; those that name the client stay."""
    async with replicas(say_ok) as (fake,), routed([fake], health=STRICT) as at:
        lines = (b"Content-Length: 15", b"Connection: X-Hop, keep-alive", b"X-Hop: 1", b"X-Hop-2: 1", b"TE: trailers")
        more = (
            b"Connection: x-hop-2",
            b"Upgrade: h2c",
            b"Proxy-Authorization: Basic x",
            b"Keep-Alive: 1",
            b"X-Kept: 1",
        )
        status, _ = await raw(at, asking(*lines, *more), BODY)
        assert status == 200
        got = fake.asked[0][2]
        gone = {"x-hop", "x-hop-2", "te", "upgrade", "proxy-authorization", "keep-alive"}
        assert not gone & got.keys() and got["x-kept"] == "1"


async def test_no_byte_of_a_header_is_a_replicas_fault() -> None:
    """Each byte there is, in a value and in a name: handed on, or a 400; what is no ASCII arrives as it was sent."""
    async with replicas(say_ok) as (fake,), routed([fake], health=STRICT) as at:
        for value in ("grün", "名前", "😀", "plain"):
            status, _ = await raw(at, asking(b"Content-Length: 15", b"X-Name: " + value.encode()), BODY)
            assert status == 200 and fake.asked[-1][2]["x-name"] == value
        for byte in range(256):
            for line in (b"X-A: a%cb" % byte, b"X-%cA: a" % byte, b"X-A: \xc3\xa9%cb" % byte):
                status, _ = await raw(at, asking(b"Content-Length: 15", line), BODY)
                assert status in (200, 400), line
        await untouched(at, fake)


async def test_long_heads_are_refused_before_a_replica_does() -> None:
    """A head that a replica could refuse, with what is added here, is a 431 or goes through; nobody hangs up.

    A name that is not this machine's is a 421, however long it is, where no keys are asked for.
    """
    async with replicas(say_ok) as (first,), routed([first], health=STRICT) as behind:
        inner = Fake(url=behind.url)
        async with routed([inner], health=STRICT) as at:
            for line in (b"X-Long: %b", b"Host: %b", b"X-Forwarded-Host: %b", b"X-Forwarded-For: %b"):
                statuses = set()
                for size in (1000, 50_000, 59_000, *range(61_000, 65_600, 1500)):
                    status, _ = await raw(at, asking(b"Content-Length: 15", line % (b"a" * size)), BODY)
                    statuses.add(status)
                assert statuses == {421 if line.startswith(b"Host") else 200, 431}, line
            assert await at.metric("breaker_opened_total", replica=inner.url) == 0
            assert await at.status() == 200


async def test_bodies_larger_than_a_replica_takes() -> None:
    """A replica's 413 goes to the client, however much of the body was not sent, and is not held against it."""
    async with (
        replicas(say_ok) as (last,),
        routed([last], max_request_bytes=100_000) as behind,
        routed([Fake(url=behind.url)], health=STRICT) as at,
    ):
        for size in (200_000, 5_000_000, 30_000_000):
            async with at.client.post(at.url + "/v1/completions", data=b"x" * size) as answer:
                assert answer.status == 413
        assert await at.metric("breaker_opened_total", replica=behind.url) == 0
        assert await at.status() == 200


async def test_half_closed_clients_and_half_bodies_are_nobodys_fault() -> None:
    """A client that stops in its head, in its body or before its answer leaves replicas as they were."""

    async def forever(request: web.Request, body: bytes) -> web.StreamResponse:
        if b"hang" in body:
            await asyncio.Event().wait()
        return await say_ok(request, body)

    async with replicas(forever) as (fake,), routed([fake], health=STRICT) as at:
        port = int(at.url.rpartition(":")[2])
        head = b"POST " + asking(b"Content-Length: 15") + b"\r\n\r\n"
        for data in (head[:20], head + BODY[:5], head + b'{"hang": "hang"'):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(data)
            if data.endswith(b'hang"'):
                await until_async(lambda: fake.open == 1)
            writer.write_eof()
            writer.transport.abort()
        await until_async(lambda: fake.open == 0 and not at.router.active)
        await untouched(at, fake)


async def test_an_answer_that_takes_too_long_is_held_against_silent_replicas_only() -> None:
    """504 to one request while others are answered is that request's; from a replica that answers nobody it counts."""
    asked = asyncio.Event()

    async def slow(request: web.Request, body: bytes) -> web.StreamResponse:
        if b"long" not in body:
            return await say_ok(request, body)
        await asked.wait()
        return await say(504)(request, body)

    async with replicas(slow) as (fake,), routed([fake], health=STRICT) as at:
        long = asyncio.create_task(at.status({"prompt": "long"}))
        await until_async(lambda: fake.open == 1)
        assert await at.status() == 200
        asked.set()
        assert await long == 504
        await untouched(at, fake)
        assert await at.status({"prompt": "long"}) == 504
        assert await at.metric("breaker_opened_total", replica=fake.url) == 1


async def test_a_client_that_does_not_read_is_not_a_replicas_fault() -> None:
    """A replica that hangs up on an answer while its client does not read stays in use."""
    clock, cut = SimulatedClock(), asyncio.Event()

    async def large(request: web.Request, body: bytes) -> web.StreamResponse:
        if b"large" not in body:
            return await say_ok(request, body)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        with contextlib.suppress(TimeoutError):
            while True:  # until nobody takes more
                async with asyncio.timeout(0.5):
                    await response.write(b"x" * 1_000_000)
        cut.set()
        return await die(request, body)

    async with replicas(large) as (fake,), routed([fake], health=STRICT, clock=clock) as at:
        async with at.post({"prompt": "large"}) as answer:
            await cut.wait()
            clock.advance(2.0)
            with pytest.raises(aiohttp.ClientError):
                await answer.read()
        await until_async(lambda: not at.router.active)
        await untouched(at, fake)


async def test_shares_of_the_queue_follow_the_key() -> None:
    """Two keys in one request buy no second share: who shows two that differ is one client with all who do."""
    names = Access()
    same = {names.tenant({"authorization": f"Bearer {n}", "x-api-key": "mine"}) for n in range(3)}
    same |= {names.tenant({"authorization": "Bearer mine", "x-api-key": f"{n}"}) for n in range(3)}
    assert len(same) == 1
    assert (
        names.tenant({"authorization": "Bearer mine", "x-api-key": "mine"})
        == names.tenant({"x-api-key": "mine"})
        not in same
    )


@pytest.mark.parametrize("key", ["plain", "schlüssel"])
async def test_a_key_is_its_bytes_wherever_it_is_read(key: str) -> None:
    """A key's digest is that of its bytes in UTF-8, here, in configuration and at replicas."""
    digest = hashlib.sha256(key.encode()).digest()
    assert key_digest(key) == key_digest(key.encode()) == digest
    as_read = {"x-api-key": key.encode().decode("latin-1")}
    assert [key_digest(shown) for shown in shown_keys(as_read)] == [digest]
    assert Credentials(known(acme=key), ADMIN_TOKEN).identify(as_read) == Principal("acme", has_key=True)
    async with replicas(say_ok) as (fake,), routed([fake], health=STRICT, keys={digest: "acme"}) as at:
        status, _ = await raw(at, asking(b"Content-Length: 15", b"X-Api-Key: " + key.encode()), BODY)
        assert status == 200
