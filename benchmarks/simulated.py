"""The simulator against a real server: hit rate and mean time to first token (TTFT) of the same requests.

usage: python -m benchmarks.simulated [--requests 200] [--shares 0.15 0.4 1.0] [--output FILE]

For each size of the RAM tier, a share of what the trace asks for, one server: documents with questions are asked in
open loop by `hotspan bench engine --workload trace-replay`, with empty caches. Before and after, requests with texts of
their own, one after the other, give its rates. `hotspan trace record` writes all down. The simulator replays the
recording of the documents with the server's sizes and these rates. The engine leaves one core to the clients: where
they share it, it computes slower beside them than alone, which no replica of its own machine does.
"""

import contextlib
import json
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy

from benchmarks.harness import arguments
from hotspan.bench.machine import write_results
from hotspan.cli.admin_client import Admin
from hotspan.core.addresses import free_port
from hotspan.core.aftermath import Aftermath
from hotspan.core.trace import Request, Trace, read, write
from hotspan.core.types import GIB
from hotspan.demo.model import DemoModel, make_demo_model
from hotspan.demo.plan import EngineSettings, usable_threads
from hotspan.demo.server import ServerProcess, serve_command
from hotspan.simulate.costs import GB, Costs, Setup, Sizes
from hotspan.simulate.simulation import Simulation
from kit.child import Child

BLOCK, STEP_TOKENS, POOL_TOKENS = 256, 512, 8192
DOCUMENTS, DOCUMENT_BLOCKS, QUESTION_TOKENS, ANSWER_TOKENS = 60, (4, 9), (32, 160), 8
BUSY = 0.4
"""Share of the time that an engine without a cache would compute."""

LENGTHS = (300, 600, 1200, 1800, 2400)
ROUNDS = 3


def documents_with_questions(requests: int, rate: float, seed: int = 1) -> Trace:
    """Questions on documents, of which a few are asked about most, at random times."""
    rng = random.Random(seed)
    blocks = [rng.randrange(*DOCUMENT_BLOCKS) for _ in range(DOCUMENTS)]
    weights = [1 / (place + 1) ** 0.8 for place in range(DOCUMENTS)]
    rows, at_s = [], 0.0
    for document in rng.choices(range(DOCUMENTS), weights, k=requests):
        at_s += rng.expovariate(rate)
        keys = tuple(document * 100 + n for n in range(blocks[document]))
        rows.append(Request(at_s, len(keys) * BLOCK + rng.randrange(*QUESTION_TOKENS), ANSWER_TOKENS, keys))
    return Trace.of("documents", rows, BLOCK)


class Server:
    """A real one, of a model in float32."""

    def __init__(self, url: str, model: DemoModel, work: Path) -> None:
        self.url, self.model, self._work = url, model, work

    def ask(self, tokens: Sequence[int], answer_tokens: int = 1) -> float:
        """Seconds until the whole answer."""
        body = {"model": str(self.model.path), "prompt": list(tokens), "max_tokens": answer_tokens, "ignore_eos": True}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        began_s = time.perf_counter()
        with urllib.request.urlopen(request, timeout=120) as answer:
            answer.read()
        return time.perf_counter() - began_s

    @contextlib.contextmanager
    def recorded(self, path: Path) -> Iterator[None]:
        """What is asked in the block is in the file after it."""
        command = (sys.executable, "-m", "hotspan", "trace", "record", str(path), "--server", self.url)
        sized = ("--block-tokens", str(BLOCK), "--seconds", "3600")
        with Child((*command, *sized), log=self._work / "record.log"):
            time.sleep(5)  # until its first fetch
            yield
            time.sleep(2)

    def replay(self, trace: Path) -> None:
        """By the bench, in open loop, and the first requests once more, alone."""
        command = (
            sys.executable,
            "-m",
            "hotspan",
            "bench",
            "engine",
            "--engine-url",
            self.url,
            "--workload",
            "trace-replay",
        )
        subprocess.run((*command, "--trace-file", str(trace), "--output", str(self._work / "bench.json")), check=True)


def alone(server: Server, work: Path, seed: int) -> tuple[list[dict[str, Any]], float]:
    """Rows of requests one at a time: computed ones, found ones and loaded ones. And seconds of a decoding step."""
    rng = random.Random(seed)
    path = work / f"alone-{seed}.jsonl"
    with server.recorded(path):
        for _ in range(ROUNDS):
            texts = [[rng.randrange(300, 2000) for _ in range(length)] for length in LENGTHS]
            for text in texts:
                server.ask(text)
            for text in texts:  # the last ones are in the engine's pool, the first ones in RAM alone
                server.ask(text)
    once, many = [], []
    for _ in range(ROUNDS):
        text = [rng.randrange(300, 2000) for _ in range(200)]
        once.append(server.ask(text, 1))
        many.append(server.ask(text, 33))
    step_s = (min(many) - min(once)) / 32
    return [json.loads(line) for line in path.read_text().splitlines()], step_s


def fitted(rows: Sequence[dict[str, Any]], kv_bytes: int) -> Costs:
    """TTFT = latency + tokens computed / rate + attention x pairs + tokens found / rate of RAM, by relative errors."""
    total = numpy.array([row["input_length"] for row in rows], float)
    found = numpy.array([row["cached_length"] for row in rows], float)
    ttft_s = numpy.array([row["ttft_ms"] / 1000 for row in rows])
    columns = numpy.stack([numpy.ones_like(total), total - found, (total**2 - found**2) / 2, found], 1)
    latency_s, token_s, attention_s, load_s = _not_negative(columns / ttft_s[:, None])
    return Costs(
        prefill_tokens_per_s=1 / token_s,
        attention_s=attention_s,
        latency_s=latency_s,
        ram_gb_per_s=kv_bytes / GB / max(load_s, 1e-9),
        kv_bytes=kv_bytes,
        step_tokens=STEP_TOKENS,
    )


def _not_negative(columns: numpy.ndarray) -> list[float]:
    """The factors of the columns whose sum is nearest to ones; a column that wants a negative one is left out."""
    factors = numpy.zeros(columns.shape[1])
    kept = list(range(columns.shape[1]))
    while True:
        factors[:] = 0
        factors[kept] = numpy.linalg.lstsq(columns[:, kept], numpy.ones(len(columns)))[0]
        if factors.min() >= 0:
            return factors.tolist()
        kept.remove(int(factors.argmin()))


def kv_bytes(model: DemoModel) -> int:
    """Per token, in float32."""
    return 2 * model.kv_bytes_per_token


def measure(model: DemoModel, work: Path, share: float, requests: int) -> dict[str, Any]:
    """One size: the server's figures beside the simulator's."""
    footprint = sum(len(set(each.keys)) for each in _different(documents_with_questions(requests, 1.0))) * BLOCK
    ram_gib = share * footprint * kv_bytes(model) / GIB
    engine = EngineSettings(
        max_model_len=4096, threads=max(1, usable_threads() - 1), dtype="float32", max_num_batched_tokens=STEP_TOKENS
    )
    port = free_port()
    options = (*engine.arguments(port, POOL_TOKENS // engine.block_size), "--ram-gib", f"{ram_gib:.4f}")
    command = serve_command(model.path, options)
    with Aftermath() as aftermath:
        process = ServerProcess(command, engine.environment(), port, work / f"server-{share}.log", aftermath)
        with process:
            process.wait_until_ready(300, lambda waited, line: None)
            server = Server(process.url, model, work)
            server.ask(range(300, 2000))
            before, step_s = alone(server, work, 2)
            costs = fitted(before, kv_bytes(model))
            Admin(server=process.url).post("/hotspan/cache/clear", {})
            alone_s = costs.prefill_s(0, 1700) + costs.latency_s + ANSWER_TOKENS * step_s
            asked, came = work / "asked.jsonl", work / f"came-{share}.jsonl"
            write(asked, documents_with_questions(requests, BUSY / alone_s))
            with server.recorded(came):
                server.replay(asked)
            after, later_step_s = alone(server, work, 3)
    costs, step_s = fitted([*before, *after], kv_bytes(model)), (step_s + later_step_s) / 2
    trace = read(came)
    real = trace.facts()
    sizes = Sizes(gpu_tokens=POOL_TOKENS, ram_gib=ram_gib)
    fields = {name: getattr(costs, name) for name in Costs.__dataclass_fields__}
    made = Setup(1, Costs(**fields | {"step_s": step_s}), sizes, None, BLOCK, engine.block_size)
    outcome = Simulation(made, "roundrobin").run(trace)
    ttft_s = sum(outcome.ttft_s) / len(outcome.ttft_s)
    assert real.recorded_hit_rate is not None and real.recorded_ttft_s is not None
    return {
        "ram_gib": round(ram_gib, 4),
        "share": share,
        "requests": real.requests,
        "hit_rate": {"server": real.recorded_hit_rate, "simulated": outcome.hit_rate},
        "points": 100 * abs(real.recorded_hit_rate - outcome.hit_rate),
        "ttft_s": {"server": real.recorded_ttft_s, "simulated": ttft_s},
        "ttft_error": abs(ttft_s / real.recorded_ttft_s - 1),
        "costs": {name: fields[name] for name in ("prefill_tokens_per_s", "attention_s", "latency_s", "ram_gb_per_s")}
        | {"step_s": step_s},
    }


def _different(trace: Trace) -> list[Request]:
    return list({each.keys: each for each in trace.requests}.values())


def main() -> int:
    options = arguments(__doc__, requests=200, shares=[0.15, 0.4, 1.0])
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        model = make_demo_model(Path(scratch) / "model", "demo")
        for share in options.shares:
            found.append(measure(model, Path(scratch), share, options.requests))
            print(json.dumps(found[-1]), flush=True)
    figures = {
        "sizes": found,
        "worst_points": max(each["points"] for each in found),
        "worst_ttft_error": max(each["ttft_error"] for each in found),
    }
    if options.output is not None:
        command = f"python -m benchmarks.simulated --requests {options.requests}"
        settings = {"pool_tokens": POOL_TOKENS, "step_tokens": STEP_TOKENS, "block_tokens": BLOCK, "busy": BUSY}
        write_results(options.output, "simulated", command=command, settings=settings, figures=figures)
    return 0 if figures["worst_points"] <= 2 and figures["worst_ttft_error"] <= 0.15 else 1


if __name__ == "__main__":
    sys.exit(main())
