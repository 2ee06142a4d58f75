"""What a tenant that does the worst its limits allow costs another one, with every route of the server and the router.

usage: python -m benchmarks.noisy_tenant [--seconds 60] [--rounds 6] [--clients 8] [--seed 0] [--noise-nice 19]
                                         [--output FILE]

A server with two tenants and a router in front, a tiny model on the CPU. The quiet tenant streams a short answer
through the router every half second, `--seconds` alone, and as long while the other one's clients (noisy_clients.py)
draw an entry (server or router), a route and a size by lot, from nothing to the largest body that is taken, without a
pause. Both come in turns, so that what else this machine does is beside both. TTFT is that of the quiet tenant.

Everything shares this machine. The noisy clients are a process of their own with `--noise-nice`, since they stand for
other machines: with 19 they have what the others leave; with 0 the figures contain what they take. The CPU-seconds of
each process are in the result.

Goals: each of the quiet tenant's requests is answered; its p99 TTFT is at most twice that alone; no process takes more
than it took alone and the memory for all bodies (1 GiB).
"""

import contextlib
import json
import os
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
from benchmarks.noisy_clients import BODY_BYTES
from hotspan.bench.machine import write_results
from hotspan.core.types import MIB
from hotspan.demo.model import make_demo_model
from hotspan.http.connections import HttpLimits
from kit.child import Child
from kit.measure import quantile
from kit.ports import free_port
from tests.server.conftest import serving, started

KEYS = {"quiet": "sk-quiet-0123456789", "noisy": "sk-noisy-0123456789"}
TENANTS = "tenants:\n" + "".join(f'  {name}: {{keys: ["{key}"]}}\n' for name, key in KEYS.items())
PAUSE_S, SAMPLE_S = 0.5, 0.25
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

    def cpu_s(self) -> dict[str, float]:
        """CPU-seconds of each process so far, with those below it; `machine`: of all that runs here."""
        found: dict[str, float] = {}
        for name, process in self.processes.items():
            for each in (process, *process.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    kind = "engine" if "EngineCore" in " ".join(each.cmdline()) else name
                    times = each.cpu_times()
                    found[kind] = found.get(kind, 0.0) + times.user + times.system
        machine = psutil.cpu_times()
        return found | {"machine": sum(machine) - machine.idle - machine.iowait}


class Noise(Child):
    """The noisy tenant's clients, which send inside `sending`."""

    def __init__(self, house: House, clients: int, seed: int, nice: int) -> None:
        command = ["nice", "-n", str(nice), sys.executable, "-m", "benchmarks.noisy_clients", "--model", house.model]
        command += ["--urls", ",".join(sorted(house.urls.values())), "--key", KEYS["noisy"]]
        super().__init__([*command, "--clients", str(clients), "--seed", str(seed)], is_read=True, is_told=True)
        self._expect("ready")

    @contextlib.contextmanager
    def sending(self) -> Iterator[None]:
        """They send in the block; after it nothing of theirs is in work."""
        self.tell("go")
        yield
        self.tell("stop")
        self._expect("stopped")

    def report(self) -> dict[str, Any]:
        """What they were answered, and their seconds of CPU time. They end."""
        self.tell(None)
        said: dict[str, Any] = json.loads(self.line())
        return said

    def _expect(self, word: str) -> None:
        if self.line().strip() != word:
            raise RuntimeError("the noisy clients have ended")


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


@dataclass(slots=True)
class Measured:
    """The quiet tenant's requests; the most memory and the CPU-seconds that each process took meanwhile."""

    quiet: Quiet = field(default_factory=Quiet)
    most: dict[str, int] = field(default_factory=dict)
    cpu_s: Counter[str] = field(default_factory=Counter)
    asked: int = 0

    def measure(self, house: House, client: httpx.Client, seconds: float) -> None:
        """Ask for so long."""
        over = threading.Event()

        def sample() -> None:
            while not over.wait(SAMPLE_S):
                for name, size in house.resident().items():
                    self.most[name] = max(self.most.get(name, 0), size)

        with ThreadPoolExecutor(1) as pool:
            sampled = pool.submit(sample)
            before, ends_s = house.cpu_s(), time.monotonic() + seconds
            while time.monotonic() < ends_s:
                ask(house, client, self.quiet, self.asked)
                self.asked += 1
                time.sleep(PAUSE_S)
            over.set()
            sampled.result()
        self.cpu_s.update({name: each - before.get(name, 0.0) for name, each in house.cpu_s().items()})


@contextlib.contextmanager
def opened(directory: Path) -> Iterator[House]:
    """The house, ready."""
    model = make_demo_model(directory / "model", "tiny").path
    for name, text in {"tenants.yaml": TENANTS, "keys.txt": "\n".join(KEYS.values())}.items():
        (directory / name).write_text(text)
        (directory / name).chmod(0o600)
    options = ["--ram-gib", "0.1", "--tenants", str(directory / "tenants.yaml")]
    options += ["--max-request-bytes", str(BODY_BYTES), "--sessions-path", str(directory / "sessions")]
    with serving(model, directory / "server.log", *options) as server:
        port = free_port()
        command = [sys.executable, "-m", "hotspan", "route", "--replica", server.url, "--port", str(port)]
        command += ["--api-keys-file", str(directory / "keys.txt"), "--max-request-bytes", str(BODY_BYTES)]
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
    given = arguments(__doc__, seconds=60.0, rounds=6, clients=8, seed=0, noise_nice=19)
    load = [round(os.getloadavg()[0], 1)]
    alone, beside, first = Measured(), Measured(), dict[str, int]()
    with (
        tempfile.TemporaryDirectory(prefix="noisy-") as place,
        opened(Path(place)) as house,
        httpx.Client(headers={"x-api-key": KEYS["quiet"]}, timeout=120) as client,
        Noise(house, given.clients, given.seed, given.noise_nice) as noisy,
    ):
        Measured().measure(house, client, 5.0)  # what is made at the first requests
        for _ in range(given.rounds):
            alone.measure(house, client, given.seconds / given.rounds)
            first = first or dict(alone.most)  # before any noise
            with noisy.sending():
                beside.measure(house, client, given.seconds / given.rounds)
        said = noisy.report()
    load.append(round(os.getloadavg()[0], 1))
    pot = HttpLimits().held_bytes
    memory = {
        name: {"alone_mib": first[name] // MIB, "most_mib": most // MIB, "bound_mib": (first[name] + pot) // MIB}
        for name, most in sorted(beside.most.items())
    }
    ratio = quantile(beside.quiet.ttft_s, 0.99) / quantile(alone.quiet.ttft_s, 0.99)
    is_reached = {
        "all answered": not beside.quiet.failures,
        "p99 at most twice": ratio <= P99_GOAL,
        "memory": all(each["most_mib"] <= each["bound_mib"] for each in memory.values()),
    }
    figures: dict[str, Any] = {"alone": alone.quiet.figures, "beside": beside.quiet.figures}
    figures |= {"ttft_p99_ratio": round(ratio, 2), "memory": memory}
    cpu_s = {"alone": alone.cpu_s, "beside": beside.cpu_s, "noisy clients": {"all": said["cpu_s"]}}
    figures |= {"cpu_s": {name: {each: round(s, 1) for each, s in took.items()} for name, took in cpu_s.items()}}
    figures |= {"noise": said["statuses"], "load_average": load, "reached": is_reached}
    print(json.dumps(figures, indent=1))
    if given.output is not None:
        settings = {name: value for name, value in vars(given).items() if name != "output"}
        command = "python -m benchmarks.noisy_tenant " + " ".join(
            f"--{name.replace('_', '-')} {value:g}" for name, value in settings.items()
        )
        write_results(given.output, "noisy-tenant", command=command, settings=settings, **figures)
    return 0 if all(is_reached.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
