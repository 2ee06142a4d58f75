"""What hotspan's server adds to vLLM's own app: time to first token, time between tokens, and CPU.

usage: python -m benchmarks.server_overhead [--rounds 150] [--output benchmarks/results/server-overhead.json]

One engine, and in one process two servers over it on two ports: vLLM's app as `vllm serve` has it, and hotspan's
around another of the same: gate, front, guard, and connections with deadlines. In each round a client in a process of
its own streams a new text from each of three routes, one after the other, in an order by lot: vLLM's /v1/completions,
hotspan's, and hotspan's /invocations in LMI's schema. The figures are medians over the rounds of what hotspan takes
more in a round, as a share of vLLM's median, with the interval that holds 95 % of such medians of rounds drawn again.
Goals, for /v1/completions: 3 % of the time to first token, 1 % of the time between tokens.

Before that the CPU-microseconds of gate and front alone, a request and a token, over an app that says at once what
vLLM's says.
"""

import asyncio
import contextlib
import copy
import http.client
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kit.measure import interval, quantile

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0-1")

import numpy as np
import uvicorn
from starlette.routing import Route

from benchmarks.harness import arguments
from hotspan.bench.machine import write_results
from hotspan.config.server_settings import ServerSettings
from hotspan.config.settings import CacheOptions
from hotspan.config.tenants import Tenants
from hotspan.core.aftermath import Aftermath
from hotspan.demo.model import make_demo_model
from hotspan.http.connections import HttpLimits, connection_class
from hotspan.http.serving import bind
from hotspan.server.front import Front
from hotspan.server.policy import Gate, access_table
from hotspan.server.principal import Credentials, current_tenant

TTFT_GOAL, ITL_GOAL = 0.03, 0.01
PROMPT_TOKENS, ANSWER_TOKENS = 256, 48
MODEL = "lmi"
ENGINE = (
    *("--dtype", "float32", "--block-size", "128", "--max-model-len", "2048", "--num-gpu-blocks-override", "64"),
    *("--gpu-memory-utilization", "0.2", "--enforce-eager", "--served-model-name", MODEL),
    "--disable-uvicorn-access-log",
)
DRAWS = 2000
FAKE_TOKENS, FAKE_REQUESTS, REPETITIONS = 200, 60, 5


# -- the servers -------------------------------------------------------------------------------------------------------


def gated(app: Any) -> Gate:
    """An app behind hotspan's layers."""
    front = Front(app, ServerSettings(no_sessions=True), HttpLimits(), names=[MODEL], is_alive=lambda: True)
    access = access_table(has_keys=False, has_given_token=False)
    return Gate(front, access, Credentials(Tenants(), "nobody-has-this-token"))


@contextlib.asynccontextmanager
async def listening(app: Any, **options: Any) -> AsyncIterator[int]:
    """An app on a port of this event loop."""
    with contextlib.closing(bind("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", **options))
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
        task = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            await task


async def serve(model: Path, tell: Callable[[dict[str, int]], None], until_done: Callable[[], None]) -> None:
    """Both, over one engine, until the client is done."""
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app

    from hotspan.engine.arguments import add_cache, parse_engine_arguments
    from hotspan.engine.guard import RequestGuard
    from hotspan.engine.launch import launch

    arguments = parse_engine_arguments(str(model), ENGINE)
    add_cache(arguments, CacheOptions(ram_gib=0.25).settings())
    async with contextlib.AsyncExitStack() as stack:
        aftermath = stack.enter_context(Aftermath())
        engine = await stack.enter_async_context(launch(arguments, RequestGuard(current_tenant), aftermath))
        # The same engine without the guard: what it put upon these two objects is not on their copies.
        bare = copy.copy(engine.client)
        bare.engine_core = copy.copy(engine.client.engine_core)
        del bare.__dict__["generate"], bare.engine_core.__dict__["add_request_async"]
        tasks = await engine.client.get_supported_tasks()
        app = build_app(arguments, tasks, bare.model_config)
        await init_app_state(bare, app.state, arguments, tasks)
        theirs = await stack.enter_async_context(listening(app))
        ours = await stack.enter_async_context(listening(gated(engine.app), http=connection_class(HttpLimits())))
        tell({"vllm": theirs, "hotspan": ours})
        await asyncio.to_thread(until_done)


def server_process(model: str, pipe: Any) -> None:
    """In the other process: says the ports, and ends when it hears anything."""
    asyncio.run(serve(Path(model), pipe.send, pipe.recv))


@contextlib.contextmanager
def servers(model: Path) -> Iterator[dict[str, int]]:
    """Their ports."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=server_process, args=(str(model), theirs))
    process.start()
    try:
        while not ours.poll(1):
            if not process.is_alive():
                raise SystemExit("the servers did not come up: the log above says why")
        yield ours.recv()
    finally:
        ours.send("done")
        process.join(60)
        process.kill()


# -- the client --------------------------------------------------------------------------------------------------------


class Client:
    """Streams answers over one connection to each server."""

    def __init__(self, ports: dict[str, int], seed: int) -> None:
        self._connections = {name: http.client.HTTPConnection("127.0.0.1", port) for name, port in ports.items()}
        self._rng = random.Random(seed)
        self.routes: dict[str, Callable[[], tuple[float, float]]] = {
            "vllm": lambda: self._ask("vllm", "/v1/completions", self._openai(), b"data: {"),
            "hotspan": lambda: self._ask("hotspan", "/v1/completions", self._openai(), b"data: {"),
            "hotspan_lmi": lambda: self._ask("hotspan", "/invocations", self._lmi(), b"{"),
        }

    def round(self) -> dict[str, tuple[float, float]]:
        """Seconds to the first token, and between tokens, of each route, in an order by lot."""
        order = self._rng.sample(list(self.routes), len(self.routes))
        return {name: self.routes[name]() for name in order}

    def _openai(self) -> dict[str, Any]:
        body = {"model": MODEL, "prompt": self._text(), "max_tokens": ANSWER_TOKENS}
        return body | {"temperature": 0, "ignore_eos": True, "stream": True}

    def _lmi(self) -> dict[str, Any]:
        parameters = {"max_new_tokens": ANSWER_TOKENS, "do_sample": False, "ignore_eos_token": True}
        return {"inputs": self._text(), "parameters": parameters, "stream": True}

    def _text(self) -> str:
        """A text that nobody asked before, of about as many tokens each time: most words of the prose are one."""
        return " ".join(self._rng.choice(_WORDS) for _ in range(PROMPT_TOKENS))

    def _ask(self, server: str, path: str, body: dict[str, Any], mark: bytes) -> tuple[float, float]:
        connection = self._connections[server]
        began = time.perf_counter()
        try:
            connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        except ConnectionError:  # the other routes' first answers took longer than a server keeps a connection
            connection.close()
            return self._ask(server, path, body, mark)
        reply = connection.getresponse()
        arrivals = [time.perf_counter() for line in reply if line.startswith(mark)]
        # Tokens that wait for each other, or for the rest of a character, come as one event.
        if reply.status != 200 or not 0.8 * ANSWER_TOKENS < len(arrivals) <= ANSWER_TOKENS:
            raise SystemExit(
                f"{server} {path}: status {reply.status}, {len(arrivals)} events for {ANSWER_TOKENS} tokens"
            )
        return arrivals[0] - began, (arrivals[-1] - arrivals[0]) / (ANSWER_TOKENS - 1)


_WORDS = ("the", "of", "and", "to", "in", "a", "is", "that", "it", "was", "for", "on", "with", "as", "they", "be", "at")


def overhead(theirs: Sequence[float], ours: Sequence[float], seed: int = 1) -> dict[str, float]:
    """What hotspan takes more, as a share of vLLM's median, by pairs of one round; and its 95 % interval."""
    base = np.median(theirs)
    more = interval(np.asarray(ours) - np.asarray(theirs), seed, DRAWS)
    return {
        "vllm_p50_ms": 1e3 * float(base),
        "hotspan_p50_ms": 1e3 * float(np.median(ours)),
        "more_us": 1e6 * more.median,
        "overhead": float(more.median / base),
        "low": float(more.low / base),
        "high": float(more.high / base),
        "p99_ratio": quantile(ours, 0.99) / quantile(theirs, 0.99),
    }


def measure(ports: dict[str, int], rounds: int) -> dict[str, Any]:
    """Figures of both of hotspan's routes beside vLLM's."""
    client = Client(ports, seed=1)
    for _ in range(10):
        client.round()
    found = [client.round() for _ in range(rounds)]
    figures: dict[str, Any] = {}
    for route in ("hotspan", "hotspan_lmi"):
        for at, what in enumerate(("ttft", "itl")):
            theirs, ours = ([row[name][at] for row in found] for name in ("vllm", route))
            figures[f"{route}_{what}"] = overhead(theirs, ours)
    return figures


# -- the layers alone --------------------------------------------------------------------------------------------------


def event(text: str, **more: Any) -> bytes:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": None, "stop_reason": None} | more
    chunk = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": MODEL, "choices": [choice]}
    return b"data: %b\n\n" % json.dumps(chunk).encode()


class FakeApp:
    """Says at once what vLLM's completions say, so many tokens."""

    def __init__(self, tokens: int) -> None:
        paths = access_table(has_keys=False, has_given_token=False)
        self.routes = [Route(path, self, methods=["POST"]) for path in sorted(paths) if path.startswith("/")]
        told = {"tokens": [" word"], "token_logprobs": [-1.5], "top_logprobs": [{" word": -1.5}], "text_offset": [0]}
        one = event(" word", logprobs=told, token_ids=[7])
        last = event("", finish_reason="length", token_ids=[])
        self._parts = [*[one] * (tokens - 1), last, b"data: [DONE]\n\n"]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for part in self._parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def cpu_us(app: Any, path: str, body: dict[str, Any]) -> float:
    """CPU-microseconds of one request."""
    content = json.dumps(body).encode()
    headers = [(b"host", b"h"), (b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
    scope |= {"headers": headers, "root_path": "", "http_version": "1.1", "scheme": "http", "client": ("::1", 9)}

    async def ask() -> None:
        coming = [{"type": "http.request", "body": content, "more_body": False}]

        async def receive() -> Any:
            return coming.pop() if coming else await asyncio.get_running_loop().create_future()

        async def send(message: Any) -> None:
            if message.get("status", 200) != 200:
                raise RuntimeError(f"answered {message['status']}")

        await app(dict(scope), receive, send)

    began = time.process_time()
    for _ in range(FAKE_REQUESTS):
        await ask()
    return 1e6 * (time.process_time() - began) / FAKE_REQUESTS


async def layers() -> dict[str, dict[str, float]]:
    """What gate and front cost a request of one token, and each token more: the best of a few."""
    openai: Any = {"model": MODEL, "prompt": "word", "stream": True}
    asked: dict[str, Any] = {
        "openai": ("/v1/completions", openai),
        "lmi": ("/invocations", {"inputs": "word", "stream": True}),
    }
    found = {}
    for name, (path, body) in asked.items():
        costs = []
        for tokens in (1, 1 + FAKE_TOKENS):
            app = FakeApp(tokens)
            runs = [
                await cpu_us(gated(app), path, body) - await cpu_us(app, "/v1/completions", openai)
                for _ in range(REPETITIONS)
            ]
            costs.append(min(runs))
        found[name] = {"request_us": costs[0], "token_us": (costs[1] - costs[0]) / FAKE_TOKENS}
    return found


def main() -> int:
    options = arguments(__doc__, rounds=150, model_size=("demo", "tiny"))
    alone = asyncio.run(layers())
    with tempfile.TemporaryDirectory() as scratch:
        model = make_demo_model(Path(scratch) / "model", options.model_size).path
        with servers(model) as ports:
            figures = measure(ports, options.rounds)
    is_met = figures["hotspan_ttft"]["overhead"] <= TTFT_GOAL and figures["hotspan_itl"]["overhead"] <= ITL_GOAL
    for name, figure in {**figures, **{f"cpu of {name}": one for name, one in alone.items()}}.items():
        print(f"{name:18} {json.dumps({key: round(value, 4) for key, value in figure.items()})}", flush=True)
    print(f"within {TTFT_GOAL:.0%} of TTFT and {ITL_GOAL:.0%} of ITL: {'yes' if is_met else 'NO'}")
    if options.output is not None:
        settings = {"rounds": options.rounds, "model": options.model_size, "prompt_tokens": PROMPT_TOKENS}
        settings |= {"answer_tokens": ANSWER_TOKENS}
        goals = {"ttft": TTFT_GOAL, "itl": ITL_GOAL}
        found = {"settings": settings, "goals": goals, "is_met": is_met, "figures": figures, "cpu_alone": alone}
        write_results(options.output, "server-overhead", "python -m benchmarks.server_overhead", **found)
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
