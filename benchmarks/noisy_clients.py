"""The clients of a tenant that does the worst its limits allow: entries, routes and sizes by lot, without a pause.

usage: python -m benchmarks.noisy_clients --urls URL,URL --model MODEL --key KEY [--clients 8] [--seed 0]

A process of its own, whose requests are made before it prints `ready`: what it takes of the machine is what sending
takes. It sends after a line `go` of its input, and nothing after `stop`, which it answers with `stopped` once nothing
of its own is in work. At the end of its input it prints what it was answered and its seconds of CPU time, and ends.
"""

import json
import os
import random
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.harness import arguments
from hotspan.core.types import MIB
from hotspan.http.paths import INVOCATIONS, PIN, PREFETCH, STATELESS, WARM, WORK

BODY_BYTES = 8 * MIB
SIZES = (0, 100, 10_000, 1_000_000, BODY_BYTES - 4096)
ROUTES = (*WORK, *STATELESS, INVOCATIONS, PREFETCH, PIN, WARM, "/hotspan/cache/invalidate", "/adapters", "/v1/models")
IDLE_S = 0.05
"""Between two looks of a client whether it may send."""

MADE = 200
"""Requests of all clients together, in any order and over and over; about 350 MB."""


@dataclass(frozen=True, slots=True)
class Request:
    """One that was drawn."""

    method: str
    url: str
    body: bytes


def body(rng: random.Random, model: str) -> bytes:
    """A body by lot: of a shape that many routes take, with a text, a list or names of some size."""
    size = rng.choice(SIZES)
    text = rng.choice(("a ", "word ", "\u0316", "{document}", "\x00", "9")) * size
    text = text[:size]
    many = max(1, size // 64)
    shape = rng.randrange(7)
    said: dict[str, Any] = {"model": model, "max_tokens": rng.choice((1, 16, 512)), "stream": rng.random() < 0.3}
    said |= {"n": rng.choice((1, 1, 1, 8)), "ignore_eos": True, "tags": ["noise"]}
    if shape == 0:
        said["prompt"] = text
    elif shape == 1:
        said["messages"] = [{"role": "user", "content": text}]
    elif shape == 2:
        said["messages"] = [{"role": "user", "content": ""}] * many
    elif shape == 3:
        said |= {"prompt": "noise", "cache_salt": text}
    elif shape == 4:
        said |= {"texts": [{"text": "a"}] * min(many, 1000), "template": text + "{document}"}
    elif shape == 5:
        said |= {"prompt": [rng.randrange(3, 200)] * many, "hold_s": 60, "gib": 0.01}
    else:
        said |= {"inputs": text, "parameters": {"max_new_tokens": 64}, "name": text[:200]}
    return json.dumps(said).encode()[:BODY_BYTES]


def drawn(rng: random.Random, urls: Sequence[str], model: str) -> Request:
    """A request by lot."""
    url, route = rng.choice(urls), rng.choice(ROUTES)
    method = "GET" if route == "/v1/models" else "POST"
    query = "?q=" + "q" * rng.choice((0, 0, 4000))
    return Request(method, url + route + query, body(rng, model))


class Clients:
    """All clients of the tenant: they send between `go` and `stop`."""

    def __init__(self, requests: Sequence[Request], key: str, clients: int, seed: int) -> None:
        self._requests = requests
        self._headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        self._seed = seed
        self._may_send, self._is_over = threading.Event(), threading.Event()
        self._in_work = [threading.Lock() for _ in range(clients)]
        self.statuses = Counter[str]()

    def go(self) -> None:
        """Send."""
        self._may_send.set()

    def stop(self) -> None:
        """Send nothing more, and return when all is answered."""
        self._may_send.clear()
        for lock in self._in_work:
            with lock:
                pass

    def end(self) -> None:
        """The clients go."""
        self._is_over.set()

    def run(self, number: int) -> None:
        """One client."""
        rng = random.Random(self._seed + number)
        with httpx.Client(headers=self._headers, timeout=10.0) as http:
            while not self._is_over.is_set():
                with self._in_work[number]:
                    if self._may_send.is_set():
                        self._send(http, rng.choice(self._requests))
                        continue
                self._may_send.wait(IDLE_S)

    def _send(self, http: httpx.Client, request: Request) -> None:
        try:
            answer = http.request(request.method, request.url, content=request.body)
            self.statuses[str(answer.status_code)] += 1
        except httpx.TransportError as error:
            self.statuses[type(error).__name__] += 1


def main() -> int:
    given = arguments(__doc__, urls="", model="", key="", clients=8, seed=0)
    rng = random.Random(given.seed)
    requests = [drawn(rng, given.urls.split(","), given.model) for _ in range(MADE)]
    clients = Clients(requests, given.key, given.clients, given.seed)
    print("ready", flush=True)
    before_s = sum(os.times()[:2])
    with ThreadPoolExecutor(given.clients) as pool:
        running = [pool.submit(clients.run, number) for number in range(given.clients)]
        for line in sys.stdin:
            if line.strip() == "go":
                clients.go()
            else:
                clients.stop()
                print("stopped", flush=True)
        clients.stop()
        clients.end()
    for each in running:
        each.result()
    print(json.dumps({"statuses": dict(clients.statuses), "cpu_s": sum(os.times()[:2]) - before_s}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
