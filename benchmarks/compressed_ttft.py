"""Time to first token from an L2 behind a slow link: texts that lie there compressed against plain ones.

usage: python -m benchmarks.compressed_ttft [--requests 12] [--mb-s 200] [--output FILE]

One engine; a Llama shape with random weights in bfloat16 and 32 KiB of KV per token, since the trained model that is
kept here has 1 KiB. Its ratio is shown beside that of the trained one in compression.json. The L2 is a directory whose
reads share a link of the given rate. Half of the texts are stored plain, half compressed; they are asked in turns, with
nothing in RAM and the engine's own prefix cache empty. Every block is digested when it is stored and when it is loaded.
"""

import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.beside_alone import ask
from benchmarks.compression import Wire
from benchmarks.harness import arguments
from hotspan.bench.machine import write_results
from hotspan.config.settings import L2Settings
from hotspan.demo.model import make_demo_model
from hotspan.l2.base import Found, Landed
from hotspan.l2.file import FileStore
from tests.engine.families.make import make_family
from tests.engine.families.table import SIZES, Family
from tests.engine.rig import Rig, rig

SHAPE = {"num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128}
TOKENS, TEXTS = 3600, 2
MODES = ("never", "always")


def store(engine: Rig) -> dict[str, list[list[int]]]:
    """Texts that lie in the L2 alone, by how they were stored."""
    compressing = engine.cache._lower.tiers[0].storage._jobs._packer._compressing
    texts: dict[str, list[list[int]]] = {mode: [] for mode in MODES}
    for number, mode in enumerate(MODES * TEXTS):
        compressing._is_on = mode == "always"
        texts[mode].append(engine.text(number, TOKENS))
        engine.ask(texts[mode][-1], 1)
        engine.evict_ram()
    return texts


def main() -> int:
    options = arguments(__doc__, requests=12, mb_s=200)
    wire, get = Wire(0), FileStore.get

    def throttled(self: FileStore, found: Found, into: Sequence[memoryview], landed: Landed | None = None) -> bool:
        is_there = get(self, found, into, landed)
        wire.carry(sum(map(len, into)))
        return is_there

    FileStore.get = throttled  # type: ignore[method-assign]
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    carried: dict[str, int] = dict.fromkeys(MODES, 0)
    with tempfile.TemporaryDirectory(dir=".") as scratch:
        tiny = make_demo_model(Path(scratch) / "tiny", "tiny").path
        family = Family(name="Llama", config="LlamaConfig", fields={**SIZES, **SHAPE})
        model = make_family(family, Path(scratch) / "model", tiny)
        l2 = L2Settings((Path(scratch).resolve() / "l2").as_uri(), {"timeout_s": "30"}, compress="never")
        with rig(model, ram_gib=0.5, cache={"l2": l2}, dtype="bfloat16") as engine:
            texts = store(engine)
            wire.bytes_per_s = options.mb_s * 1e6
            for number in range(options.requests + 1):
                for mode in MODES:
                    before = wire.carried_bytes
                    taken = ask(engine, texts[mode][number % TEXTS])
                    if number:
                        seconds[mode].append(taken)
                        carried[mode] += wire.carried_bytes - before
                    engine.evict_ram()
            wrong, loaded = engine.digests.wrong, engine.digests.loaded
    medians = {mode: statistics.median(each) for mode, each in seconds.items()}
    figures: dict[str, Any] = {
        "speedup": statistics.median(a / b for a, b in zip(*seconds.values(), strict=True)),
        "ttft_plain_s": medians["never"],
        "ttft_compressed_s": medians["always"],
        "bytes": carried,
        "ratio": carried["never"] / carried["always"],
        "blocks_loaded": loaded,
        "blocks_wrong": wrong,
    }
    print(figures)
    if options.output is not None:
        facts = {"requests": options.requests, "mb_s": options.mb_s, "tokens": TOKENS}
        command = f"python -m benchmarks.compressed_ttft --requests {options.requests} --mb-s {options.mb_s}"
        write_results(options.output, "compressed-ttft", command=command, settings=facts, figures=figures)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
