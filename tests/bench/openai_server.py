"""A small OpenAI-shaped server over real HTTP, with delays, counters and failures that a test decides on."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import exp, log
from types import TracebackType
from typing import Any, Self

import pytest
from aiohttp import web

HOLD_S = 30.0
"""What is held for longer is let go: the test will see that it should not have been."""


@dataclass
class Behaviour:
    """What the server does. `fails` gives an HTTP status for the first message's content, or 0; so does `refuses`
    for the whole request. `waits` adds seconds before the first token of a request, and as long as it `holds` one it
    says nothing at all.
    """

    first_token_s: float = 0.0
    between_tokens_s: float = 0.0
    answer: tuple[str, ...] = ("An", " answer", ".")
    answers: Callable[[dict[str, Any]], tuple[str, ...] | None] = lambda body: None  # instead of `answer`
    cached: Callable[["Served", dict[str, Any]], int | None] = lambda served, body: 60
    reasoning_first: bool = False
    fails: Callable[[str], int] = lambda content: 0
    refuses: Callable[[dict[str, Any]], int] = lambda body: 0
    waits: Callable[[dict[str, Any]], float] = lambda body: 0.0
    holds: Callable[["Served", dict[str, Any]], bool] = lambda served, body: False
    breaks_off: bool = False  # the stream ends with an error event
    cuts: bool = False  # the stream ends without a finish_reason
    no_text: bool = False  # tokens, but none that shows
    has_metrics: bool = True
    tokens_per_word: int = 0  # 0: no /tokenize
    root: str = ""
    max_tokens: int | None = None  # of a request; None: the list of models does not tell
    admin_token: str = ""  # that the metrics ask for
    token_bytes: int = 0  # 0: the metrics don't tell
    status: Any = None  # an LMCache server's page at /status; None: there is none
    labels: str = 'tier="ram"'
    logprob: Callable[[dict[str, Any], int], float] = lambda body, at: -0.25  # of each token, where they are asked for


@dataclass
class Served:
    """What the server saw."""

    bodies: list[dict[str, Any]] = field(default_factory=list)
    running: int = 0
    max_running: int = 0
    headers: list[dict[str, str]] = field(default_factory=list)
    metrics_headers: list[dict[str, str]] = field(default_factory=list)

    @property
    def contents(self) -> list[str]:
        return [body["messages"][0]["content"] for body in self.bodies]


class OpenAIServer:
    """Serves on its own thread and event loop; use it as a context manager."""

    def __init__(self, behaviour: Behaviour | None = None) -> None:
        self.behaviour = behaviour or Behaviour()
        self.served = Served()

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,))
        self._thread.start()
        assert started.wait(60)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)

    def app(self) -> web.Application:
        """What answers, for a loop of the test's own."""
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/status", self._status)
        app.router.add_post("/tokenize", self._tokenize)
        return app

    def _run(self, started: threading.Event) -> None:
        runner = web.AppRunner(self.app())
        self._loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        self._loop.run_until_complete(site.start())
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        started.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    async def _models(self, request: web.Request) -> web.Response:
        most = self.behaviour.max_tokens
        told = {} if most is None else {"max_model_len": most}
        return web.json_response({"data": [{"id": "small", "root": self.behaviour.root} | told]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        if not self.behaviour.tokens_per_word:
            raise web.HTTPNotFound
        body = await request.json()
        return web.json_response({"count": self.behaviour.tokens_per_word * len(body["prompt"].split())})

    async def _status(self, request: web.Request) -> web.Response:
        if self.behaviour.status is None:
            raise web.HTTPNotFound
        return web.json_response(self.behaviour.status)

    async def _metrics(self, request: web.Request) -> web.Response:
        if not self.behaviour.has_metrics:
            raise web.HTTPNotFound
        self.served.metrics_headers.append(dict(request.headers))
        token = self.behaviour.admin_token
        if token and request.headers.get("Authorization") != f"Bearer {token}":
            raise web.HTTPUnauthorized
        served = len(self.served.bodies)
        token_bytes = self.behaviour.token_bytes
        size = f'hotspan_cache_token_bytes{{engine="0"}} {token_bytes:.1f}\n' if token_bytes else ""
        return web.Response(
            text=size
            + f"""# HELP vllm:prefix_cache_queries_total Prefix cache queries, in tokens.
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{{engine="0",model_name="small"}} {100 * served}
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{{engine="0",model_name="small"}} {10 * served}
# TYPE hotspan_cache_hit_tokens_total counter
hotspan_cache_hit_tokens_total{{{self.behaviour.labels}}} {40 * served}
hotspan_cache_hit_tokens_total{{tier="disk"}} {25 * served}
# TYPE hotspan_cache_lookup_tokens_total counter
hotspan_cache_lookup_tokens_total {90 * served}
vllm:time_to_first_token_seconds_bucket{{le="0.1"}} 3
"""
        )

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.served.bodies.append(body)
        self.served.headers.append(dict(request.headers))
        status = self.behaviour.fails(body["messages"][0]["content"]) or self.behaviour.refuses(body)
        if status:
            return web.json_response({"error": {"message": "no luck"}}, status=status)
        self.served.running += 1
        self.served.max_running = max(self.served.max_running, self.served.running)
        try:
            until = time.monotonic() + HOLD_S
            while self.behaviour.holds(self.served, body) and time.monotonic() < until:
                await asyncio.sleep(0.005)
            return await self._stream(request, body)
        finally:
            self.served.running -= 1

    def _logprobs(self, body: dict[str, Any], at: int, token: str) -> dict[str, Any]:
        """The log probabilities of a token: its own, and the rest of the probability at another one."""
        if not body.get("logprobs"):
            return {}
        own = self.behaviour.logprob(body, at)
        top = [{"token": token, "logprob": own}, {"token": "~", "logprob": log(1 - exp(own))}]
        return {"logprobs": {"content": [{"token": token, "logprob": own, "top_logprobs": top}]}}

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        how = self.behaviour
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def send(event: dict[str, Any]) -> None:
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")

        # Servers open with a delta that has a role and no text: it isn't a token.
        await send({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        tokens = (how.answers(body) or how.answer)[: body["max_tokens"]]
        for i, token in enumerate(() if how.no_text else tokens):
            await asyncio.sleep(how.between_tokens_s if i else how.first_token_s + how.waits(body))
            key = "reasoning" if how.reasoning_first and i == 0 else "content"
            await send({"choices": [{"delta": {key: token}, **self._logprobs(body, i, token)}]})
        if how.breaks_off:
            await send({"error": {"message": "out of memory"}})
        if how.breaks_off or how.cuts:
            await response.write_eof()
            return response
        await send({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        cached = how.cached(self.served, body)
        details = None if cached is None else {"cached_tokens": cached}
        usage = {"prompt_tokens": 100, "completion_tokens": len(tokens), "prompt_tokens_details": details}
        await send({"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


StartServer = Callable[..., OpenAIServer]


@pytest.fixture
def serve() -> Iterator[StartServer]:
    """Starts servers of a given behaviour and stops them after the test."""
    with ExitStack() as stack:

        def start(**behaviour: Any) -> OpenAIServer:
            return stack.enter_context(OpenAIServer(Behaviour(**behaviour)))

        yield start
