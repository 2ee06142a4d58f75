"""A recorded server beside its simulation without any flag: hits and mean time to first token (TTFT).

usage: python -m benchmarks.recorded [--requests 120] [--ways alone clients arrivals] [--dtype bfloat16] [--seed 42]
           [--output FILE]

A trained model, 60 real texts of 880 tokens; the engine's pool holds 17 of them, RAM 12, a disk all. For each way one
server with empty caches, recorded by `hotspan trace record` from its first question on: `alone` one request after the
other; `clients` four that each wait for their answer, each a session; `arrivals` at random times, half as many as the
engine alone answers. Then `hotspan simulate FILE --json`. The engine leaves one core to the clients, if there are two.
"""

import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import httpx

from benchmarks.harness import arguments
from benchmarks.load.workloads import ANSWER_TOKENS, question
from benchmarks.real_model import KV_BYTES_PER_TOKEN, real_model
from benchmarks.real_texts import documents
from benchmarks.under_load import BLOCK_TOKENS, POOL_TOKENS, RAM_GIB, wide
from hotspan.bench.machine import write_results
from hotspan.core.addresses import free_port
from hotspan.core.aftermath import Aftermath
from hotspan.core.errors import ConfigError
from hotspan.core.trace import read
from hotspan.core.types import GIB
from hotspan.demo.plan import EngineSettings, usable_threads
from hotspan.demo.server import ServerProcess, serve_command
from hotspan.plan.host import native_type
from kit.child import Child

TEXTS, TEXT_TOKENS, REQUEST_TOKENS = 60, 880, 1024
CLIENTS, BUSY = 4, 0.5
WAYS: Final = ("alone", "clients", "arrivals")


class Asking:
    """Questions about the texts to one server, at random."""

    def __init__(self, url: str, model: str, texts: Sequence[str], seed: int) -> None:
        self._url, self._model, self._texts = url, model, texts
        self._chance = random.Random(seed)

    async def ask(self, client: httpx.AsyncClient, session: str | None = None) -> float:
        """One question; seconds until the whole answer."""
        text = question(self._chance.choice(self._texts), self._chance.randrange(8))
        body: dict[str, Any] = {"model": self._model, "messages": [{"role": "user", "content": text}]}
        body |= {"max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
        body |= {"kv_transfer_params": {"session": session}} if session else {}
        began_s = time.perf_counter()
        (await client.post(f"{self._url}/v1/chat/completions", json=body)).raise_for_status()
        return time.perf_counter() - began_s

    async def run(self, way: str, requests: int, alone_s: float) -> None:
        """All questions. alone_s: seconds of one whose text is computed."""
        async with httpx.AsyncClient(timeout=600) as client:
            if way == "arrivals":
                async with asyncio.TaskGroup() as tasks:
                    for _ in range(requests):
                        tasks.create_task(self.ask(client))
                        await asyncio.sleep(self._chance.expovariate(BUSY / alone_s))
                return
            clients = CLIENTS if way == "clients" else 1

            async def one(number: int) -> None:
                for _ in range(requests // clients):
                    await self.ask(client, f"client-{number}" if clients > 1 else None)

            await asyncio.gather(*(one(number) for number in range(clients)))

    async def alone_s(self, texts: Sequence[str]) -> float:
        """Seconds of a question about a text that was never asked about, the middle one."""
        seconds = []
        async with httpx.AsyncClient(timeout=600) as client:
            for text in texts:
                self._texts, before = [text], self._texts
                seconds.append(await self.ask(client))
                self._texts = before
        return sorted(seconds)[len(seconds) // 2]


def measure(way: str, model: Path, texts: Sequence[str], work: Path, options: Any) -> dict[str, Any]:
    """The figures of one way, of the server and of its simulation."""
    threads = max(1, usable_threads() - 1)
    engine = EngineSettings(max_model_len=REQUEST_TOKENS, threads=threads, dtype=options.dtype)
    port, directory = free_port(), work / way
    directory.mkdir()
    kv_bytes = KV_BYTES_PER_TOKEN * wide(options.dtype)
    disk_gib = 2 * (TEXTS + 8) * REQUEST_TOKENS * kv_bytes / GIB
    tiers = ("--ram-gib", f"{RAM_GIB * wide(options.dtype)}", "--disk", str(directory / "kv"))
    tiers += ("--disk-gib", f"{disk_gib:.3f}")
    command = serve_command(model, (*engine.arguments(port, POOL_TOKENS // BLOCK_TOKENS), *tiers))
    file = directory / "own.jsonl"
    with Aftermath() as aftermath:
        process = ServerProcess(command, engine.environment(), port, directory / "server.log", aftermath)
        with process:
            process.wait_until_ready(300, lambda waited, line: None)
            asking = Asking(process.url, str(model), texts[8:], options.seed)
            alone_s = asyncio.run(asking.alone_s(texts[:5]))
            record = (sys.executable, "-m", "hotspan", "trace", "record", str(file), "--server", process.url)
            with Child((*record, "--seconds", "3600"), log=directory / "record.log"):
                time.sleep(5)  # until its first fetch
                asyncio.run(asking.run(way, options.requests, alone_s))
                time.sleep(2)
    simulate = (sys.executable, "-m", "hotspan", "simulate", str(file), "--json")
    said = json.loads(subprocess.run(simulate, check=True, capture_output=True, text=True).stdout)
    (row,) = said["results"]
    facts = read(file).facts()
    assert facts.recorded_hit_rate is not None and facts.recorded_ttft_s is not None
    ttft_s = float(row["ttft_s"]["mean"])
    return {
        "way": way,
        "requests": facts.requests,
        "alone_s": alone_s,
        "hit_rate": {"server": facts.recorded_hit_rate, "simulated": row["hit_rate"]},
        "points": 100 * abs(facts.recorded_hit_rate - row["hit_rate"]),
        "ttft_s": {"server": facts.recorded_ttft_s, "simulated": ttft_s},
        "ttft_error": abs(ttft_s / facts.recorded_ttft_s - 1),
    }


def main() -> int:
    options = arguments(__doc__, requests=120, ways=list(WAYS), dtype="", seed=42, cache="~/.cache/hotspan/real-model")
    options.dtype = options.dtype or native_type({}).dtype
    try:
        model = real_model(Path(options.cache))
        texts = documents(Path(options.cache), model, TEXTS + 8, TEXT_TOKENS)
    except ConfigError as error:
        raise SystemExit(str(error)) from None
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="hotspan-recorded-") as scratch:
        for way in options.ways:
            found.append(measure(way, model, texts, Path(scratch), options))
            print(json.dumps(found[-1]), flush=True)
    worst = {name: max(each[name] for each in found) for name in ("points", "ttft_error")}
    if options.output is not None:
        settings = {"pool_tokens": POOL_TOKENS, "dtype": options.dtype, "busy": BUSY, "clients": CLIENTS}
        command = f"python -m benchmarks.recorded --requests {options.requests}"
        write_results(options.output, "recorded", command=command, settings=settings, figures={"ways": found} | worst)
    return 0 if worst["points"] <= 3 and worst["ttft_error"] <= 0.3 else 1


if __name__ == "__main__":
    sys.exit(main())
