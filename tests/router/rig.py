"""A router on a real socket, before small replicas that do as they are told."""

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import uvicorn
from aiohttp import web

from hotspan.router.gateway import Gateway
from hotspan.router.run import opened, served
from hotspan.router.settings import HealthSettings, Replica, RouterSettings
from hotspan.router.tracing import no_tracer

Answering = Callable[[web.Request, bytes], Awaitable[web.StreamResponse]]

QUICK = HealthSettings(interval_s=0.05, timeout_s=10.0, downs=1, open_s=0.1)
"""Of all but its patience: on a busy machine everybody answers late at times, and nobody is ill for that."""


async def say_ok(request: web.Request, body: bytes) -> web.StreamResponse:
    """A short answer, with usage."""
    usage = {"prompt_tokens": max(len(body) // 4, 1), "completion_tokens": 7}
    return web.json_response({"bytes": len(body), "usage": usage})


async def hang(request: web.Request, body: bytes) -> web.StreamResponse:
    """Answer nothing."""
    await asyncio.Event().wait()
    return web.Response()


class Held:
    """Answers once it is let go."""

    def __init__(self) -> None:
        self.go = asyncio.Event()

    async def __call__(self, request: web.Request, body: bytes) -> web.StreamResponse:
        await self.go.wait()
        return await say_ok(request, body)


async def die(request: web.Request, body: bytes) -> web.StreamResponse:
    """Hang up before the head of an answer."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def say(status: int, text: str = "no") -> Answering:
    """Always the same."""

    async def answer(request: web.Request, body: bytes) -> web.StreamResponse:
        return web.Response(status=status, text=text)

    return answer


@dataclass
class Fake:
    """A replica.

    asked:   method, path, headers and body of each request but health checks and those for metrics.
    ping_s:  what health checks take. metrics: the page, or what makes it. models: those that it lists to the router.
    """

    url: str = ""
    answer: Answering = say_ok
    ping: tuple[int, dict[str, Any]] = (200, {"status": "Healthy"})
    asked: list[tuple[str, str, dict[str, str], bytes]] = field(default_factory=list)
    ping_s: float = 0.0
    metrics: str | Callable[[], str] = ""
    models: list[str] | None = None
    open: int = 0
    hung_up: int = 0

    @property
    def works(self) -> int:
        """Requests that it got."""
        return len(self.asked)

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/ping":
            await asyncio.sleep(self.ping_s)
            return web.json_response(self.ping[1], status=self.ping[0])
        if request.path == "/metrics":
            page = self.metrics if isinstance(self.metrics, str) else self.metrics()
            return web.Response(status=200 if page else 404, text=page)
        if request.path == "/v1/models" and "x-forwarded-proto" not in request.headers:
            rows = [{"id": name} for name in self.models or ()]
            return web.json_response({"data": rows}, status=404 if self.models is None else 200)
        body = await request.content.read()
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.asked.append((request.method, request.raw_path, headers, body))
        self.open += 1
        try:
            return await self.answer(request, body)
        except (asyncio.CancelledError, ConnectionError):
            self.hung_up += 1
            raise
        finally:
            self.open -= 1


@contextlib.asynccontextmanager
async def replicas(*answers: Answering) -> AsyncIterator[list[Fake]]:
    """Replicas on ports of their own."""
    async with contextlib.AsyncExitStack() as stack:
        found = []
        for answer in answers:
            fake = Fake(answer=answer)
            heads = {"max_line_size": 1 << 17, "max_field_size": 1 << 17}
            server = web.Server(fake, handler_cancellation=True, access_log=None, **heads)
            runner = web.ServerRunner(server, shutdown_timeout=0.1)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            found.append(fake)
        yield found


@dataclass
class Routed:
    """A router that runs, and a client of it."""

    url: str
    router: Gateway
    client: aiohttp.ClientSession
    server: uvicorn.Server

    def post(self, body: Any = None, path: str = "/v1/completions", **more: Any) -> Any:
        """A request; a context manager of aiohttp's."""
        return self.client.post(self.url + path, json={"prompt": "hello"} if body is None else body, **more)

    @property
    def in_flight(self) -> int:
        """Requests at replicas, as the router counts them."""
        return sum(replica.load.in_flight for replica in self.router.fleet.replicas.values())

    async def status(self, body: Any = None, path: str = "/v1/completions", **more: Any) -> int:
        """The status of an answer that is read to its end."""
        async with self.post(body, path, **more) as answer:
            await answer.read()
            return int(answer.status)

    async def metric(self, name: str, **labels: str) -> float:
        """A metric's value; 0 if it is not there. Several add up."""
        async with self.client.get(self.url + "/metrics") as answer:
            lines = (await answer.text()).splitlines()
        total = 0.0
        for line in lines:
            plain, _, value = line.rpartition(" ")
            known = plain.partition("{")[0] == f"hotspan_router_{name}"
            if known and all(f'{key}="{wanted}"' in plain for key, wanted in labels.items()):
                total += float(value)
        return total


@contextlib.asynccontextmanager
async def routed(fakes: list[Fake], groups: dict[str, str] | None = None, **options: Any) -> AsyncIterator[Routed]:
    """A router before them; `groups` by URL. A `tracer` among the options is its tracer, a `clock` its clock."""
    named = groups or {}
    tracer, clock = options.pop("tracer", no_tracer), options.pop("clock", None)
    behind = options.pop("behind", None) or tuple(Replica(fake.url, named.get(fake.url, "")) for fake in fakes)
    usual = {"replicas": behind, "health": QUICK, "retry_reserve": 50, "connect_timeout_s": 30.0}
    settings = RouterSettings(**{**usual, **options})
    async with opened(settings, clock=clock, rng=random.Random(1), tracer=tracer) as router:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            server = uvicorn.Server(served(router, settings))
            server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
            task = asyncio.create_task(server.serve(sockets=[listener]))
            while not server.started:
                await asyncio.sleep(0.005)
            url, known = f"http://127.0.0.1:{listener.getsockname()[1]}", labels(router)
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False) as client:
                yield Routed(url, router, client, server)
            assert labels(router) == known, "a label of a counter was not there from the start"
            server.should_exit = server.force_exit = True
            await task


def labels(router: Gateway) -> list[tuple[str, ...]]:
    """Of all counters that are counted where something happens."""
    metrics = router._metrics
    return [*metrics.requests, *metrics.decisions, *metrics.retries, *metrics.fan_outs]
