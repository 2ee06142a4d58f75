"""Announced requests: time to first token from a disk, from RAM, and from a disk when announced one second ahead; and
inter-token latency of another request while chunks are prefetched, against none being prefetched.

usage: python -m benchmarks.prefetch [--requests 10] [--streams 8] [--output FILE]

One engine; a Llama shape with random weights in bfloat16 and 32 KiB of KV per token. The ways are taken in turns in one
run, each after a second in which the engine is idle, with the engine's own prefix cache empty. Meanwhile its core looks
at prefetches every 2 ms, as in a server. Every block is digested when it is stored and when it is loaded.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.beside_alone import ask
from benchmarks.harness import arguments
from hotspan.bench.machine import write_results
from hotspan.demo.model import make_demo_model
from kit.engine import Rig, rig
from kit.families.make import make_family
from kit.families.table import SIZES, Family
from kit.measure import paired_ratio, quantile

SHAPE = {"num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128}
TOKENS, TEXTS, AHEAD_S, PACE_S = 3600, 3, 1.0, 0.002
STREAM_PROMPT, STREAM_TOKENS, ANNOUNCED_AT = 132, 120, 30
"""Prompt and answer end within one block: the step that begins a block is slow, and would be the 99th percentile."""


def announce(engine: Rig, text: list[int]) -> Any:
    """The answer to an announcement, as a Future."""
    command = {"do": "prefetch", "tenant": "default", "tokens": text, "hold_s": 60.0}
    return engine.connector.administrator.do(command)


def idle(engine: Rig) -> None:
    """One second without a request."""
    until_s = time.perf_counter() + AHEAD_S
    while time.perf_counter() < until_s:
        engine.connector.administrator.run_waiting()
        time.sleep(PACE_S)


def from_disk(engine: Rig, text: list[int]) -> float:
    engine.evict_ram()
    idle(engine)
    return ask(engine, text)


def announced(engine: Rig, text: list[int]) -> float:
    engine.evict_ram()
    answer = announce(engine, text)
    idle(engine)
    assert answer.result()["started"]["chunks"] == TOKENS // 256
    return ask(engine, text)


def from_ram(engine: Rig, text: list[int]) -> float:
    """Runs behind the others: the text is in RAM."""
    idle(engine)
    return ask(engine, text)


WAYS: dict[str, Callable[[Rig, list[int]], float]] = {
    "disk": from_disk,
    "announced": announced,
    "ram": from_ram,
}


def latencies(engine: Rig, number: int, text: list[int] | None) -> list[float]:
    """Times between the tokens of a request, beside which `text` is prefetched if one is given."""
    engine.evict_ram()
    name, found = f"stream-{number}-{text is not None}", list[float]()
    engine.start(name, engine.text(1000 + number, STREAM_PROMPT), STREAM_TOKENS)
    engine.step()
    for step in range(STREAM_TOKENS - 2):
        if step == ANNOUNCED_AT and text is not None:
            announce(engine, text)
        began_s = time.perf_counter()
        engine.step()
        found.append(time.perf_counter() - began_s)
    while name not in engine.step():
        continue
    return found


def main() -> int:
    options = arguments(__doc__, requests=10, streams=8)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    itl: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory(dir=".") as scratch:
        tiny = make_demo_model(Path(scratch) / "tiny", "tiny").path
        family = Family(name="Llama", config="LlamaConfig", fields={**SIZES, **SHAPE})
        model = make_family(family, Path(scratch) / "model", tiny)
        disk = Path(scratch).resolve() / "kv"
        with rig(model, ram_gib=0.75, disk=disk, disk_gib=1.0, dtype="bfloat16") as engine:
            texts = [engine.text(number, TOKENS) for number in range(TEXTS)]
            for text in texts:
                engine.ask(text, 1)
                engine.settle()
            for number in range(options.requests + 1):
                for way, taken in WAYS.items():
                    found = taken(engine, texts[number % TEXTS])
                    if number:
                        seconds[way].append(found)
            for number in range(options.streams + 1):
                for is_beside in (True, False) if number % 2 else (False, True):
                    found_s = latencies(engine, number, texts[number % TEXTS] if is_beside else None)
                    if number:
                        itl[is_beside] += found_s
            wrong, loaded = engine.digests.wrong, engine.digests.loaded
    figures: dict[str, Any] = {
        **{f"ttft_{way}_s": statistics.median(each) for way, each in seconds.items()},
        "announced_to_ram": paired_ratio(seconds["announced"], seconds["ram"]).median,
        **{f"itl_p{q}_beside_s": quantile(itl[True], q / 100) for q in (50, 99)},
        **{f"itl_p{q}_alone_s": quantile(itl[False], q / 100) for q in (50, 99)},
        "blocks_loaded": loaded,
        "blocks_wrong": wrong,
    }
    figures["disk_to_ram"] = figures["ttft_disk_s"] / figures["ttft_ram_s"]
    figures["itl_p99_ratio"] = figures["itl_p99_beside_s"] / figures["itl_p99_alone_s"]
    print(figures)
    if options.output is not None:
        facts = {"requests": options.requests, "streams": options.streams, "tokens": TOKENS, "ahead_s": AHEAD_S}
        command = f"python -m benchmarks.prefetch --requests {options.requests} --streams {options.streams}"
        write_results(options.output, "prefetch", command=command, settings=facts, figures=figures)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
