"""What a tenant that does the worst its limits allow costs another one, with every route of the server and the router.

usage: python -m benchmarks.noisy_tenant [--seconds 60] [--clients 8] [--seed 0] [--output FILE]

A server with two tenants and a router in front, a tiny model on the CPU. The quiet tenant streams a short answer
through the router every half second: first alone, then while the other one's clients draw an entry (server or
router), a route and a size by lot, from nothing to the largest body that is taken, without a pause. TTFT is that of the
quiet tenant. Clients, server and router share this machine, so the figures contain what the clients themselves take.

Goals: each of the quiet tenant's requests is answered; its p99 TTFT is at most twice that alone; no process takes more
than it took alone and the memory for all bodies (1 GiB).
"""

import contextlib
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.harness import arguments
from hotspan.bench.machine import write_results
from hotspan.core.types import MIB
from hotspan.demo.model import make_demo_model
from hotspan.http.connections import HttpLimits
from hotspan.http.paths import INVOCATIONS, PIN, PREFETCH, STATELESS, WARM, WORK
from kit.measure import quantile
from kit.ports import free_port
from tests.server.conftest import serving, started

KEYS = {"quiet": "sk-quiet-0123456789", "noisy": "sk-noisy-0123456789"}
TENANTS = "tenants:\n" + "".join(f'  {name}: {{keys: ["{key}"]}}\n' for name, key in KEYS.items())
BODY_BYTES = 8 * MIB
PAUSE_S, SAMPLE_S = 0.5, 0.25
SIZES = (0, 100, 10_000, 1_000_000, BODY_BYTES - 4096)
ROUTES = (*WORK, *STATELESS, INVOCATIONS, PREFETCH, PIN, WARM, "/hotspan/cache/invalidate", "/adapters", "/v1/models")
P99_GOAL = 2.0


@dataclass(slots=True)
class Quiet:
    """The quiet tenant's requests: seconds to the first token, and what was not answered."""

    ttft_s: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)

    @property
    def figures(self) -> dict[str, Any]:
        ms = [1000 * each for each in self.ttft_s]
        return {
            "answered": len(ms),
            "failures": dict(self.failures),
            "ttft_p50_ms": round(quantile(ms, 0.5), 1),
            "ttft_p99_ms": round(quantile(ms, 0.99), 1),
        }


@dataclass(frozen=True, slots=True)
class House:
    """A server and the router in front of it."""

    model: str
    urls: dict[str, str]
    processes: dict[str, psutil.Process]

    def resident(self) -> dict[str, int]:
        """Bytes of each process, with those below it."""
        found: dict[str, int] = {}
        for name, process in self.processes.items():
            for each in (process, *process.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    kind = "engine" if "EngineCore" in " ".join(each.cmdline()) else name
                    found[kind] = max(found.get(kind, 0), each.memory_info().rss)
        return found


def bodies(rng: random.Random, model: str) -> bytes:
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


def noise(house: House, seed: int, until: threading.Event, statuses: "Counter[str]") -> None:
    """One client of the noisy tenant."""
    rng = random.Random(seed)
    headers = {"authorization": f"Bearer {KEYS['noisy']}", "content-type": "application/json"}
    with httpx.Client(headers=headers, timeout=10.0) as client:
        while not until.is_set():
            url, route = house.urls[rng.choice(sorted(house.urls))], rng.choice(ROUTES)
            method = "GET" if route == "/v1/models" else "POST"
            query = "?q=" + "q" * rng.choice((0, 0, 4000))
            try:
                answer = client.request(method, url + route + query, content=bodies(rng, house.model))
                statuses[str(answer.status_code)] += 1
            except httpx.TransportError as error:
                statuses[type(error).__name__] += 1


def ask(house: House, client: httpx.Client, quiet: Quiet, number: int) -> None:
    """One request of the quiet tenant, through the router."""
    body = {"model": house.model, "prompt": f"question {number}", "max_tokens": 4, "stream": True, "ignore_eos": True}
    began_s = time.monotonic()
    try:
        with client.stream("POST", house.urls["router"] + "/v1/completions", json=body) as answer:
            lines = [(time.monotonic(), line) for line in answer.iter_lines() if line.startswith("data: ")]
        if answer.status_code == 200 and lines and lines[-1][1] == "data: [DONE]":
            quiet.ttft_s.append(lines[0][0] - began_s)
        else:
            quiet.failures[str(answer.status_code)] += 1
    except httpx.TransportError as error:
        quiet.failures[type(error).__name__] += 1


def measured(house: House, seconds: float) -> tuple[Quiet, dict[str, int]]:
    """The quiet tenant's requests for so long, and the most memory that each process took meanwhile."""
    quiet, most, over = Quiet(), dict[str, int](), threading.Event()

    def sample() -> None:
        while not over.wait(SAMPLE_S):
            for name, size in house.resident().items():
                most[name] = max(most.get(name, 0), size)

    with ThreadPoolExecutor(1) as pool, httpx.Client(headers={"x-api-key": KEYS["quiet"]}, timeout=120) as client:
        pool.submit(sample)
        ends_s, number = time.monotonic() + seconds, 0
        while time.monotonic() < ends_s:
            ask(house, client, quiet, number)
            number += 1
            time.sleep(PAUSE_S)
        over.set()
    return quiet, most


@contextlib.contextmanager
def opened(directory: Path) -> Iterator[House]:
    """The house, ready."""
    model = make_demo_model(directory / "model", "tiny").path
    for name, text in {"tenants.yaml": TENANTS, "keys.txt": "\n".join(KEYS.values())}.items():
        (directory / name).write_text(text)
        (directory / name).chmod(0o600)
    options = ("--ram-gib", "0.1", "--tenants", str(directory / "tenants.yaml"))
    options += ("--max-request-bytes", str(BODY_BYTES), "--sessions-path", str(directory / "sessions"))
    with serving(model, directory / "server.log", *options) as server:
        port = free_port()
        command = (sys.executable, "-m", "hotspan", "route", "--replica", server.url, "--port", str(port))
        command += ("--api-keys-file", str(directory / "keys.txt"), "--max-request-bytes", str(BODY_BYTES))
        with started(directory / "router.log", *command, variables={}) as router:
            url = f"http://127.0.0.1:{port}"
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if httpx.get(url + "/ping").status_code == 200:
                        break
                if router.poll() is not None:
                    raise RuntimeError((directory / "router.log").read_text()[-3000:])
                time.sleep(0.2)
            processes = {"server": psutil.Process(server.process.pid), "router": psutil.Process(router.pid)}
            yield House(str(model), {"server": server.url, "router": url}, processes)


def main() -> int:
    given = arguments(__doc__, seconds=60.0, clients=8, seed=0)
    load = [round(os.getloadavg()[0], 1)]
    with tempfile.TemporaryDirectory(prefix="noisy-") as place, opened(Path(place)) as house:
        measured(house, 5.0)  # what is made at the first requests
        alone, before = measured(house, given.seconds)
        over, statuses = threading.Event(), Counter[str]()
        with ThreadPoolExecutor(given.clients) as pool:
            clients = [pool.submit(noise, house, given.seed + n, over, statuses) for n in range(given.clients)]
            beside, during = measured(house, given.seconds)
            over.set()
        for client in clients:
            client.result()
    load.append(round(os.getloadavg()[0], 1))
    pot = HttpLimits().held_bytes
    memory = {
        name: {"alone_mib": before[name] // MIB, "most_mib": most // MIB, "bound_mib": (before[name] + pot) // MIB}
        for name, most in sorted(during.items())
    }
    ratio = quantile(beside.ttft_s, 0.99) / quantile(alone.ttft_s, 0.99)
    is_reached = {
        "all answered": not beside.failures,
        "p99 at most twice": ratio <= P99_GOAL,
        "memory": all(each["most_mib"] <= each["bound_mib"] for each in memory.values()),
    }
    figures = {"alone": alone.figures, "beside": beside.figures, "ttft_p99_ratio": round(ratio, 2), "memory": memory}
    figures |= {"noise": dict(statuses), "load_average": load, "reached": is_reached}
    print(json.dumps(figures, indent=1))
    if given.output is not None:
        command = f"python -m benchmarks.noisy_tenant --seconds {given.seconds:g} --clients {given.clients}"
        settings = {"seconds": given.seconds, "clients": given.clients, "seed": given.seed, "body_bytes": BODY_BYTES}
        write_results(given.output, "noisy-tenant", command=command, settings=settings, **figures)
    return 0 if all(is_reached.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
