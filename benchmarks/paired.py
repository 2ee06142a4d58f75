"""What hotspan costs in CPU-seconds, told apart from a noisy machine: servers side by side, request by request.

usage: python benchmarks/paired.py [--documents 16] [--document-tokens 8192] [--output benchmarks/results/paired.json]

Four servers run at once over the demo's model: the engine alone, hotspan with RAM, hotspan with disk, and the engine
alone with a pool for everything ("bound"). Each request goes to all of them, one server at a time, the order turning
from request to request; a server's CPU-seconds are read before and after, once it has come to rest. Ratios are taken
within one request, seconds apart, and the median of all of them is reported.

    cold     each document for the first time: ram / none, disk / none
    query    a question about each document, the documents in turn, so that the small pools have lost it: ram / bound,
             disk / bound in CPU-seconds, none / ram and none / disk in TTFT
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hotspan.bench.client import OpenAIClient
from hotspan.bench.cpu import ProcessTreeCpu, settled_seconds
from hotspan.bench.machine import machine_facts
from hotspan.bench.prose import prose
from hotspan.bench.texts import fitted_prose
from hotspan.bench.workloads.base import Prompt
from hotspan.demo.model import make_demo_model
from hotspan.demo.plan import DemoSizes, EngineSettings, plan_modes, usable_threads
from hotspan.demo.server import ServerProcess, free_port, serve_command

MODES = ("none", "ram", "disk", "bound")
QUESTION = "\n\nQuestion 0: What is its main subject, in one sentence?"


class Served:
    """One mode's server, its client and its CPU clock."""

    def __init__(self, name: str, server: ServerProcess) -> None:
        self.name = name
        self.server = server
        self.cpu = ProcessTreeCpu(server.pid)
        self.client = OpenAIClient(server.url, "", 600.0, time.monotonic)
        self.model = ""

    async def ask(self, prompt: Prompt) -> dict[str, float]:
        """One request: CPU-seconds of the server's whole tree until it rests again, TTFT in seconds, cached tokens."""
        before = await settled_seconds(self.cpu.seconds)
        record = await self.client.chat(prompt, 0, self.model, ignore_eos=True)
        after = await settled_seconds(self.cpu.seconds)
        if not record.successful or before is None or after is None:
            raise SystemExit(f"{self.name}: {record.error or 'the server ended'} (see {self.server.log})")
        return {"cpu_s": after - before, "ttft_s": record.ttft, "cached_tokens": record.cached_tokens or 0}


async def measure(
    served: list[Served], documents: int, tokens: int, output_tokens: int
) -> dict[str, list[dict[str, Any]]]:
    """Every document to every server, then a question about every document to every server."""
    rounds: dict[str, list[dict[str, Any]]] = {"cold": [], "query": []}
    async with served[0].client, served[1].client, served[2].client, served[3].client:
        for one in served:
            one.model = (await one.client.models())[0].name
            for n in range(2):
                await one.ask(Prompt("warm", f"Warm-up {n}: {prose(n, 300)}", 4))
        first = served[0]
        texts = [
            await fitted_prose(
                f"Document {n}: ", 7_000 + n, tokens, lambda t: first.client.count_tokens(first.model, t)
            )
            for n in range(documents)
        ]
        for name, suffix, length in (("cold", "", 1), ("query", QUESTION, output_tokens)):
            for n, text in enumerate(texts):
                row: dict[str, Any] = {"document": n}
                for one in served[n % 4 :] + served[: n % 4]:
                    row[one.name] = await one.ask(Prompt(f"{name}{n}", text + suffix, length))
                rounds[name].append(row)
                print(name, n, {m: f"{row[m]['cpu_s']:.2f} s" for m in MODES}, flush=True)
    return rounds


def summarize(rounds: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Medians with quartiles of the ratios within one request."""
    wanted = {
        "cold CPU, ram / none": ("cold", "cpu_s", "ram", "none"),
        "cold CPU, disk / none": ("cold", "cpu_s", "disk", "none"),
        "cold CPU, bound / none (the noise: both are the engine alone)": ("cold", "cpu_s", "bound", "none"),
        "query CPU, ram / bound": ("query", "cpu_s", "ram", "bound"),
        "query CPU, disk / bound": ("query", "cpu_s", "disk", "bound"),
        "query TTFT, none / ram": ("query", "ttft_s", "none", "ram"),
        "query TTFT, none / disk": ("query", "ttft_s", "none", "disk"),
        "query TTFT, none / bound": ("query", "ttft_s", "none", "bound"),
    }
    found = {}
    for title, (name, figure, over, under) in wanted.items():
        ratios = [row[over][figure] / row[under][figure] for row in rounds[name]]
        low, median, high = statistics.quantiles(ratios, n=4)
        found[title] = {"median": round(median, 4), "quartile_1": round(low, 4), "quartile_3": round(high, 4)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--document-tokens", type=int, default=8192)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    sizes = DemoSizes(
        documents=options.documents, document_tokens=options.document_tokens, queries_per_document=1, in_flight=1
    )
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hotspan-paired-")))
        model = make_demo_model(work / "model", "demo")
        engine = EngineSettings(max_model_len=sizes.request_tokens, threads=usable_threads())
        served = []
        for mode in plan_modes(sizes, model.kv_bytes_per_token, work / "kv"):
            if mode.name in MODES:
                port = free_port()
                command = serve_command(model.path, (*engine.arguments(port, mode.pool_blocks), *mode.arguments))
                server = ServerProcess(command, engine.environment(), port, work / f"{mode.name}.log")
                stack.enter_context(server).wait_until_ready(300, lambda waited, line: None)
                served.append(Served(mode.name, server))
        rounds = asyncio.run(measure(served, sizes.documents, sizes.document_tokens, sizes.output_tokens))
    summary = summarize(rounds)
    for title, figures in summary.items():
        print(f"{title:70} {figures['median']:.3f}  [{figures['quartile_1']:.3f}, {figures['quartile_3']:.3f}]")
    if options.output:
        command = f"python benchmarks/paired.py --documents {sizes.documents} --document-tokens {sizes.document_tokens}"
        result = {"command": command, "machine": machine_facts(), "summary": summary, "rounds": rounds}
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
