"""The clients of a tenant that does the worst its limits allow: entries, routes and sizes by lot, without a pause.

usage: python -m benchmarks.noisy_clients --urls URL,URL --model MODEL --key KEY [--clients 8] [--seed 0]

A process of its own, whose requests are made before it prints `ready`: what it takes of the machine is what sending
takes. It ends at the end of its input, and prints what it was answered and its seconds of CPU time.
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


def client(requests: Sequence[Request], key: str, seed: int, until: threading.Event, statuses: "Counter[str]") -> None:
    """One client of the tenant."""
    rng = random.Random(seed)
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    with httpx.Client(headers=headers, timeout=10.0) as http:
        while not until.is_set():
            request = rng.choice(requests)
            try:
                answer = http.request(request.method, request.url, content=request.body)
                statuses[str(answer.status_code)] += 1
            except httpx.TransportError as error:
                statuses[type(error).__name__] += 1


def main() -> int:
    given = arguments(__doc__, urls="", model="", key="", clients=8, seed=0)
    rng = random.Random(given.seed)
    requests = [drawn(rng, given.urls.split(","), given.model) for _ in range(MADE)]
    over, statuses = threading.Event(), Counter[str]()
    print("ready", flush=True)
    before_s = sum(os.times()[:2])
    with ThreadPoolExecutor(given.clients) as pool:
        seeds = range(given.seed, given.seed + given.clients)
        clients = [pool.submit(client, requests, given.key, seed, over, statuses) for seed in seeds]
        sys.stdin.read()
        over.set()
    for each in clients:
        each.result()
    print(json.dumps({"statuses": dict(statuses), "cpu_s": sum(os.times()[:2]) - before_s}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
