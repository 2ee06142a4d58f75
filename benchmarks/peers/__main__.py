"""hotspan beside vLLM alone, vLLM's own offloading and LMCache: same model, texts, threads and engine arguments.

usage: python -m benchmarks.peers [--systems hotspan-ram lmcache-ram ...] [--documents 4] [--document-tokens 8192]
                                  [--work DIRECTORY, which keeps the logs] [--output benchmarks/results/peers.json]

`make peers` makes an environment that has all of them, and runs it. Two servers run all the time: the engine alone with
a pool of 2.5 documents, which computes every document anew, and with a pool for all, which no cache can beat. Beside
them runs one system at a time:

    query     each document is stored, then a question about each is asked of the three in turn: CPU-seconds of all
              their processes until they rest, and TTFT, as ratios within the seconds of one question
    restart   of a system with files or a Redis server: all its processes end in order and start anew, Redis runs on;
              how many tokens are hits
    flipped   one bit in each 4 KiB of its files, or of its values in Redis, is flipped while it runs: hits are damaged
              bytes that were served
    killed    all its processes but Redis are killed just after new documents were answered, while they are written:
              after a start, answers that differ from the engine's own were made from torn bytes
"""

import asyncio
import tempfile
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

from benchmarks.harness import arguments
from benchmarks.peers.measure import Asked, compare
from benchmarks.peers.systems import SYSTEMS, Place, Sizes, start
from hotspan.bench.machine import write_results
from hotspan.core.aftermath import Aftermath
from hotspan.demo.model import make_demo_model
from hotspan.demo.plan import DemoSizes, EngineSettings, usable_threads

ALONE = ("none", "bound")
NEW_TEXTS = 2


async def measure(
    names: list[str], model: Path, work: Path, demo: DemoSizes, sizes: Sizes, aftermath: Aftermath
) -> dict[str, Any]:
    """The results of the systems of those names."""
    engine = EngineSettings(max_model_len=demo.request_tokens, threads=usable_threads(), dtype="float32")

    def place(name: str) -> Place:
        return Place.below(work, name, model, sizes)

    results: dict[str, Any] = {}
    async with AsyncExitStack() as stack:
        alone = []
        for name in ALONE:
            running = start(SYSTEMS[name], place(name), engine, aftermath)
            stack.callback(running.stack.close)
            alone.append(await stack.enter_async_context(Asked(running)))
        none, bound = alone
        texts = [await none.fitted(n, demo.document_tokens) for n in range(demo.documents + NEW_TEXTS)]
        for text in texts:
            await bound.ask(text, 1)
        old, new = texts[: demo.documents], texts[demo.documents :]
        for name in names:
            print(f"== {name}", flush=True)
            try:
                results[name] = await compare(SYSTEMS[name], place(name), engine, aftermath, none, bound, old, new)
            except SystemExit as error:
                results[name] = {"title": SYSTEMS[name].title, "error": str(error).splitlines()[0]}
            print({key: value for key, value in results[name].items() if key != "rows"}, flush=True)
    return results


def table(results: dict[str, Any]) -> str:
    """One row a system, in Markdown."""
    heads = (
        "system",
        "CPU-seconds of a question, over the engine's own hit",
        "TTFT, over the engine's own hit",
        "TTFT, times faster than computing",
        "hits after a restart",
        "damaged tokens served",
        "wrong answers after kill -9",
    )
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for row in results.values():
        if "error" in row:
            lines.append(f"| {row['title']} | does not start | | | | | |")
            continue
        query = row["query"]
        cells = [row["title"], query["cpu_over_bound"], query["ttft_over_bound"], query["ttft_none_over"]]
        if "restart" in row:
            restart, flipped, killed = row["restart"], row["flipped"], row["killed"]
            cells.append(f"{restart['cached'] / max(restart['cached_bound'], 1):.0%}")
            cells.append(f"{flipped['cached']:,} ({flipped['wrong_answers']} of {flipped['answers']} answers wrong)")
            cells.append(f"{killed['wrong_answers']} of {killed['answers']}")
        else:
            cells += ["", "", ""]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main() -> None:
    every = [name for name in SYSTEMS if name not in ALONE]
    options = arguments(__doc__, systems=every, documents=4, document_tokens=8192, work=Path)
    demo = DemoSizes(
        documents=options.documents,
        document_tokens=options.document_tokens,
        queries_per_document=5,  # the four questions, and room for the new texts
        in_flight=1,
    )
    with ExitStack() as stack:
        work = options.work or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hotspan-peers-")))
        work.mkdir(parents=True, exist_ok=True)
        aftermath = stack.enter_context(Aftermath())
        model = make_demo_model(work / "model", "demo")
        sizes = Sizes.of(demo, 2 * model.kv_bytes_per_token)  # the engines compute in float32
        results = asyncio.run(measure(options.systems, Path(model.path), work, demo, sizes, aftermath))
    print(table(results))
    if options.output:
        command = f"python -m benchmarks.peers --documents {demo.documents} --document-tokens {demo.document_tokens}"
        if options.systems != every:
            command += f" --systems {' '.join(options.systems)}"
        write_results(options.output, "peers", command=command, systems=results)


if __name__ == "__main__":
    main()
