"""What hotspan costs in CPU-seconds, told apart from a noisy machine: side by side, request by request.

usage: python -m benchmarks.paired [--documents 12] [--document-tokens 8192] [--output benchmarks/results/paired.json]

Four servers run at once over the demo's model: the engine alone, hotspan with RAM, hotspan with disk, and the engine
alone with a pool for everything ("bound"). One request runs at a time; a server's CPU-seconds are read before and after
it, once the server has come to rest. Ratios are taken between requests seconds apart; the median of them is reported.

    cold     the server with RAM, and the one with disk, each with itself: a new document that it stores against one
             that it does not (no_store), per token. (Two processes with the same work differ by more: where
             their memory lies decides.)
    query    a question about each document, the documents in turn, so that the small pools have lost it: ram / bound,
             disk / bound in CPU-seconds; none / ram and none / disk in TTFT
"""

import asyncio
import tempfile
import time
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.harness import arguments
from hotspan.bench.client import OpenAIClient
from hotspan.bench.counters import ProcessTreeCpu, settled_seconds
from hotspan.bench.machine import write_results
from hotspan.bench.prose import prose
from hotspan.bench.workloads.base import Prompt
from hotspan.bench.workloads.texts import fitted_prose
from hotspan.core.addresses import free_port
from hotspan.core.aftermath import Aftermath
from hotspan.demo.model import make_demo_model
from hotspan.demo.plan import DemoSizes, EngineSettings, plan_modes, usable_threads
from hotspan.demo.server import ServerProcess, serve_command
from kit.measure import paired_ratio

Rounds = dict[str, list[dict[str, Any]]]

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

    async def prefill(self, text: str, *, is_stored: bool) -> dict[str, float]:
        """One document computed: CPU-seconds of the server's whole tree until it rests again, per 1,000 tokens."""
        body: dict[str, Any] = {"model": self.model, "messages": [{"role": "user", "content": text}], "max_tokens": 1}
        if not is_stored:
            body["kv_transfer_params"] = {"no_store": True}
        before = await settled_seconds(self.cpu.seconds)
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{self.server.url}/v1/chat/completions", json=body) as answer,
        ):
            answer.raise_for_status()
            tokens = (await answer.json())["usage"]["prompt_tokens"]
        after = await settled_seconds(self.cpu.seconds)
        if before is None or after is None:
            raise SystemExit(f"{self.name}: the server ended (see {self.server.log})")
        return {"cpu_s": (after - before) * 1000 / tokens, "tokens": tokens}

    async def ask(self, prompt: Prompt) -> dict[str, float]:
        """One request: CPU-seconds of the server's whole tree until it rests again, TTFT in seconds, cached tokens."""
        before = await settled_seconds(self.cpu.seconds)
        record = await self.client.chat(prompt, 0, self.model, ignore_eos=True)
        after = await settled_seconds(self.cpu.seconds)
        if not record.successful or before is None or after is None:
            raise SystemExit(f"{self.name}: {record.error or 'the server ended'} (see {self.server.log})")
        return {"cpu_s": after - before, "ttft_s": record.ttft, "cached_tokens": record.cached_tokens or 0}


async def measure(served: dict[str, Served], documents: int, tokens: int, output_tokens: int) -> Rounds:
    """New documents, stored and not, then a question about each stored document to every server."""
    rounds: Rounds = {"cold": [], "query": []}
    async with AsyncExitStack() as stack:
        for one in served.values():
            await stack.enter_async_context(one.client)
            one.model = (await one.client.models())[0].name
            for n in range(2):
                await one.ask(Prompt("warm", f"Warm-up {n}: {prose(n, 300)}", 4))

        async def document(number: int) -> str:
            one = served["none"]
            opening = f"Document {number}: "
            return await fitted_prose(opening, number, tokens, lambda t: one.client.count_tokens(one.model, t))

        texts = [await document(n) for n in range(documents)]
        for n, text in enumerate(texts):
            other = await document(1000 + n)
            await served["bound"].ask(Prompt("fill", text, 1))
            row: dict[str, Any] = {"document": n}
            for name in ("ram", "disk"):
                for is_stored in (True, False) if n % 2 else (False, True):
                    row[f"{name} {'stored' if is_stored else 'not stored'}"] = await served[name].prefill(
                        text if is_stored else other, is_stored=is_stored
                    )
            rounds["cold"].append(row)
            print("cold", n, {k: f"{v['cpu_s']:.2f} s" for k, v in row.items() if k != "document"}, flush=True)
        for n, text in enumerate(texts):
            row = {"document": n}
            for name in (*MODES[n % 4 :], *MODES[: n % 4]):
                row[name] = await served[name].ask(Prompt(f"query{n}", text + QUESTION, output_tokens))
            rounds["query"].append(row)
            print("query", n, {m: f"{row[m]['cpu_s']:.2f} s" for m in MODES}, flush=True)
    return rounds


def summarize(rounds: Rounds) -> dict[str, dict[str, float]]:
    """Medians with quartiles of the ratios within one row."""
    wanted = {
        "cold CPU, RAM: stored / not stored": ("cold", "cpu_s", "ram stored", "ram not stored"),
        "cold CPU, disk: stored / not stored": ("cold", "cpu_s", "disk stored", "disk not stored"),
        "query CPU, RAM / bound": ("query", "cpu_s", "ram", "bound"),
        "query CPU, disk / bound": ("query", "cpu_s", "disk", "bound"),
        "query TTFT, none / RAM": ("query", "ttft_s", "none", "ram"),
        "query TTFT, none / disk": ("query", "ttft_s", "none", "disk"),
        "query TTFT, none / bound": ("query", "ttft_s", "none", "bound"),
    }
    found = {}
    for title, (name, figure, over, under) in wanted.items():
        ours, theirs = ([row[mode][figure] for row in rounds[name]] for mode in (over, under))
        found[title] = paired_ratio(ours, theirs).quartiles()
    return found


def main() -> None:
    options = arguments(__doc__, documents=12, document_tokens=8192)
    sizes = DemoSizes(
        documents=options.documents, document_tokens=options.document_tokens, queries_per_document=1, in_flight=1
    )
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hotspan-paired-")))
        model = make_demo_model(work / "model", "demo")
        engine = EngineSettings(max_model_len=sizes.request_tokens, threads=usable_threads())
        served: dict[str, Served] = {}
        aftermath = stack.enter_context(Aftermath())
        for mode in plan_modes(sizes, model.kv_bytes_per_token, work / "kv"):
            if mode.name in MODES:
                port = free_port()
                command = serve_command(model.path, (*engine.arguments(port, mode.pool_blocks), *mode.arguments))
                server = ServerProcess(command, engine.environment(), port, work / f"{mode.name}.log", aftermath)
                stack.enter_context(server).wait_until_ready(300, lambda waited, line: None)
                served[mode.name] = Served(mode.name, server)
        rounds = asyncio.run(measure(served, sizes.documents, sizes.document_tokens, sizes.output_tokens))
    summary = summarize(rounds)
    for title, figures in summary.items():
        print(f"{title:70} {figures['median']:.3f}  [{figures['quartile_1']:.3f}, {figures['quartile_3']:.3f}]")
    if options.output:
        command = f"python -m benchmarks.paired --documents {sizes.documents} --document-tokens {sizes.document_tokens}"
        write_results(options.output, "paired", command=command, summary=summary, rounds=rounds)


if __name__ == "__main__":
    main()
