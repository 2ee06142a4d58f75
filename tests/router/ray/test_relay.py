"""What a replica's actor does with a request: hands it on as it is, and reports how it goes."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from hotspan.router.ray.relay import Relay
from hotspan.router.ray.reports import HEADER, Assignment, Kind, Report, parse_report
from kit.waiting import until_async


class Heard(asyncio.DatagramProtocol):
    """What was reported."""

    def __init__(self) -> None:
        self.reports: list[Report] = []

    def datagram_received(self, data: bytes, addr: object) -> None:
        report = parse_report(data)
        assert report is not None
        self.reports.append(report)


class Behind:
    """A server, and what it got."""

    def __init__(self) -> None:
        self.got: list[tuple[str, dict[str, str], bytes]] = []
        self.go_on = asyncio.Event()
        self.is_cut_off = asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.got.append((request.path_qs, dict(request.headers), await request.read()))
        if request.path == "/health":
            return web.Response()
        if request.path == "/refuse":
            return web.json_response({"error": "no"}, status=429, headers={"Retry-After": "3"})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        if request.path == "/break":
            assert request.transport is not None
            request.transport.abort()
            return response
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.is_cut_off.set()
            raise
        await response.write(b"data: [DONE]\n\n")
        return response


@pytest.fixture
async def behind() -> Behind:
    return Behind()


@pytest.fixture
async def relay(behind: Behind) -> AsyncIterator[Relay]:
    from hotspan.router.ray.reports import Reporter

    server = web.Application()
    server.router.add_route("*", "/{path:.*}", behind.answer)
    runner = web.AppRunner(server, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made = Relay(f"http://127.0.0.1:{runner.addresses[0][1]}", Reporter("me", lambda: {"127.0.0.1"}))
    asked: asyncio.Queue[Any] = asyncio.Queue()
    said: asyncio.Queue[Any] = asyncio.Queue()
    life = asyncio.create_task(made({"type": "lifespan"}, asked.get, said.put))
    await asked.put({"type": "lifespan.startup"})
    assert (await said.get())["type"] == "lifespan.startup.complete"
    yield made
    await asked.put({"type": "lifespan.shutdown"})
    await life
    await runner.cleanup()


@pytest.fixture
async def heard() -> AsyncIterator[tuple[Heard, int]]:
    transport, protocol = await asyncio.get_running_loop().create_datagram_endpoint(Heard, local_addr=("0.0.0.0", 0))
    yield protocol, transport.get_extra_info("sockname")[1]
    transport.close()


class Client:
    """One request in raw ASGI."""

    def __init__(self, path: str, assignment: Assignment | None, body: bytes = b"{}") -> None:
        headers = [(b"host", b"ray"), (b"content-length", b"%d" % len(body)), (b"authorization", b"Bearer k")]
        if assignment is not None:
            headers.append((HEADER.encode(), str(assignment).encode()))
        self.scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"a=1",
            "headers": headers,
            "client": ("10.0.0.9", 1),
            "scheme": "http",
        }
        self.gone = asyncio.Event()
        self.sent: asyncio.Queue[Any] = asyncio.Queue()
        self._body: bytes | None = body

    async def receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    def run(self, relay: Relay) -> "asyncio.Task[None]":
        return asyncio.create_task(relay(self.scope, self.receive, self.sent.put))


@pytest.mark.parametrize("path", ["/v1/completions", "/refuse"])
async def test_the_end_is_reported_before_the_client_has_it(relay: Relay, behind: Behind, path: str) -> None:
    """Else the replica would still count as busy when the client's next request is routed."""
    order: list[Any] = []
    relay._reporter.tell = lambda _, kind: order.append(kind)  # type: ignore[method-assign]
    client = Client(path, Assignment("127.0.0.1", 1, 7, 2.0))

    async def send(message: dict[str, Any]) -> None:
        order.append(message.get("more_body", True))

    behind.go_on.set()
    await relay(client.scope, client.receive, send)
    assert order.index(Kind.END) < order.index(False)
    assert order.count(Kind.END) == 1 and Kind.FAILED not in order


async def test_a_stream_goes_by(relay: Relay, behind: Behind, heard: tuple[Heard, int]) -> None:
    """Its first part reaches the client while the server still works; both its first byte and its end are reported."""
    protocol, port = heard
    client = Client("/v1/completions", Assignment("127.0.0.1", port, 7, 2.0))
    task = client.run(relay)
    assert (await client.sent.get())["status"] == 200
    assert (await client.sent.get())["body"] == b"data: 1\n\n"
    begun = [Report(7, Kind.RECEIVED, "me"), Report(7, Kind.FIRST, "me")]
    await until_async(lambda: protocol.reports == begun)
    assert relay.waiting.seconds == 0
    behind.go_on.set()
    await task
    await until_async(lambda: protocol.reports == [*begun, Report(7, Kind.END, "me")])
    [(path, headers, body)] = behind.got
    assert (path, body) == ("/v1/completions?a=1", b"{}")
    headers = {name.lower(): value for name, value in headers.items()}
    assert headers["authorization"] == "Bearer k" and HEADER not in headers
    assert "10.0.0.9" in headers["x-forwarded-for"]


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("*@127.0.0.1:1/x", ()),
        ("*", ()),
        ("/no/host", ()),
        ("/x", (b"host",)),
        ("/x", (b"authorization",)),
        ("/x", (HEADER.encode(),)),
    ],
)
async def test_heads_that_lead_elsewhere_are_refused(
    relay: Relay, behind: Behind, heard: tuple[Heard, int], path: str, more: tuple[bytes, ...]
) -> None:
    """A target that is no path, a decisive header that came twice, or no Host, is a 400; the end is reported."""
    protocol, port = heard
    behind.go_on.set()
    client = Client(path, Assignment("127.0.0.1", port, 7, 2.0))
    client.scope["headers"] += [(name, b"again") for name in more]
    if path == "/no/host":
        client.scope["headers"] = [pair for pair in client.scope["headers"] if pair[0] != b"host"]
    await client.run(relay)
    assert (await client.sent.get())["status"] == 400 and not behind.got
    if HEADER.encode() not in more:  # of two neither is believed
        await until_async(lambda: protocol.reports == [Report(7, Kind.RECEIVED, "me"), Report(7, Kind.FAILED, "me")])


async def test_answers_keep_their_status(relay: Relay, heard: tuple[Heard, int]) -> None:
    """A refusal of the server's is the client's, headers included, and ends the request."""
    protocol, port = heard
    client = Client("/refuse", Assignment("127.0.0.1", port, 7, 2.0))
    await client.run(relay)
    head = await client.sent.get()
    assert head["status"] == 429 and (b"Retry-After", b"3") in head["headers"]
    await until_async(lambda: protocol.reports[-1:] == [Report(7, Kind.END, "me")])


async def test_a_client_that_hangs_up(relay: Relay, behind: Behind, heard: tuple[Heard, int]) -> None:
    """The server's request ends with the client's, and counts as failed."""
    protocol, port = heard
    client = Client("/v1/completions", Assignment("127.0.0.1", port, 7, 2.0))
    task = client.run(relay)
    await client.sent.get()
    await client.sent.get()
    client.gone.set()
    await asyncio.wait_for(task, 60)
    await asyncio.wait_for(behind.is_cut_off.wait(), 60)
    await until_async(lambda: protocol.reports[-1:] == [Report(7, Kind.FAILED, "me")])


async def test_an_answer_that_breaks_off(relay: Relay, heard: tuple[Heard, int]) -> None:
    """What the server cut off is cut off for the client too, and not ended as if it were whole."""
    protocol, port = heard
    client = Client("/break", Assignment("127.0.0.1", port, 7, 2.0))
    with pytest.raises(RuntimeError):
        await client.run(relay)
    sent = [client.sent.get_nowait() for _ in range(client.sent.qsize())]
    assert all(message.get("more_body", True) for message in sent)
    await until_async(lambda: protocol.reports[-1:] == [Report(7, Kind.FAILED, "me")])


async def test_only_nodes_are_told(relay: Relay, behind: Behind, heard: tuple[Heard, int]) -> None:
    """An assignment that names somebody else than a node makes no datagram, and the request is served all the same."""
    protocol, port = heard
    behind.go_on.set()
    client = Client("/v1/completions", Assignment("127.0.0.2", port, 7, 2.0))
    await client.run(relay)
    assert (await client.sent.get())["status"] == 200
    await Client("/refuse", Assignment("127.0.0.1", port, 8, 2.0)).run(relay)
    await until_async(lambda: Report(8, Kind.END, "me") in protocol.reports)
    assert {report.number for report in protocol.reports} == {8}


async def test_it_is_well_as_long_as_the_server_is(relay: Relay) -> None:
    """Health is the server's own answer; one that can't be reached is not well."""
    assert await relay.is_well(60.0)
    relay._url = "http://127.0.0.1:9"
    assert not await relay.is_well(0.5)
