"""Time to first token from a slow L2 or a disk: texts that lie there compressed against plain ones.

usage: python -m benchmarks.compressed_ttft [--medium l2] [--requests 12] [--mb-s 200] [--output FILE]

One engine; a Llama shape with random weights in bfloat16 and 32 KiB of KV per token. Its ratio is shown beside that of
a trained model in compression.json. The L2 is a directory, the disk a disk tier with O_DIRECT; reads share a link of
the given rate (0: as fast as they are). A part of the texts is stored plain, compressed, and as `auto` chooses; they
are asked in turns, with nothing in RAM and the engine's own prefix cache empty. Every block is digested when it is
stored and when it is loaded.
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
from hotspan.config.settings import DiskSettings, L2Settings
from hotspan.core.types import GIB
from hotspan.demo.model import make_demo_model
from hotspan.l2.base import Found, Landed
from hotspan.l2.file import FileStore
from hotspan.tiers.files import Files
from kit.engine import Rig, rig
from kit.families.make import make_family
from kit.families.table import SIZES, Family
from kit.measure import paired_ratio

SHAPE = {"num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128}
TOKENS, TEXTS = 3600, 2
MODES = ("never", "always", "auto")


def throttle(wire: Wire) -> None:
    """Have what is read from the medium cross the wire."""
    get, preadv = FileStore.get, Files.preadv

    def throttled_get(self: FileStore, found: Found, into: Sequence[memoryview], landed: Landed | None = None) -> bool:
        is_there = get(self, found, into, landed)
        wire.carry(sum(map(len, into)))
        return is_there

    def throttled_preadv(self: Files, fd: int, buffers: Sequence[memoryview], at: int) -> int:
        moved = preadv(self, fd, buffers, at)
        wire.carry(moved)
        return moved

    FileStore.get = throttled_get  # type: ignore[method-assign]
    Files.preadv = throttled_preadv  # type: ignore[method-assign]


def store(engine: Rig) -> tuple[dict[str, list[list[int]]], str]:
    """Texts that lie in the lower tier alone, by how they were stored; and what `auto` chose."""
    tier = engine.cache._lower.tiers[0].storage
    compressing = tier._transfers._jobs._packer._compressing
    texts: dict[str, list[list[int]]] = {mode: [] for mode in MODES}
    for number, mode in enumerate(MODES * TEXTS):
        compressing._mode, compressing._is_on = ("auto" if mode == "auto" else "never"), mode == "always"
        texts[mode].append(engine.text(number, TOKENS))
        engine.ask(texts[mode][-1], 1)
        engine.evict_ram()
        if mode == "always":
            ask(engine, texts["never"][-1])  # so that `auto` has seen what loads take
            ask(engine, texts["always"][-1])
            engine.evict_ram()
    return texts, "compressed" if compressing.wants() else "plain"


def measure(engine: Rig, wire: Wire, requests: int) -> dict[str, Any]:
    """Medians of the time to first token, and ratios within a turn."""
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    carried: dict[str, int] = dict.fromkeys(MODES, 0)
    texts, chosen = store(engine)
    for number in range(requests + 1):
        for mode in MODES:
            before = wire.carried_bytes
            taken = ask(engine, texts[mode][number % TEXTS])
            if number:
                seconds[mode].append(taken)
                carried[mode] += wire.carried_bytes - before
            engine.evict_ram()

    def over(one: str, other: str) -> float:
        return paired_ratio(seconds[one], seconds[other]).median

    return {
        "speedup": over("never", "always"),
        "auto_over_plain": over("auto", "never"),
        "auto_chose": chosen,
        "ttft_plain_s": statistics.median(seconds["never"]),
        "ttft_compressed_s": statistics.median(seconds["always"]),
        "bytes": carried,
        "ratio": carried["never"] / carried["always"] if carried["always"] else None,
        "blocks_loaded": engine.digests.loaded,
        "blocks_wrong": engine.digests.wrong,
    }


def main() -> int:
    options = arguments(__doc__, requests=12, mb_s=200, medium=("l2", "disk"))
    wire = Wire(options.mb_s * 1e6)
    throttle(wire)
    with tempfile.TemporaryDirectory(dir=".") as scratch:
        root = Path(scratch).resolve()
        tiny = make_demo_model(root / "tiny", "tiny").path
        model = make_family(Family(name="Llama", config="LlamaConfig", fields={**SIZES, **SHAPE}), root / "model", tiny)
        if options.medium == "l2":
            tier: dict[str, Any] = {"l2": L2Settings((root / "l2").as_uri(), {"timeout_s": "30"}, compress="auto")}
        else:
            tier = {"disk": DiskSettings(str(root / "disk"), 2 * GIB, compress="auto")}
        with rig(model, ram_gib=0.5, cache=tier, dtype="bfloat16") as engine:
            figures = measure(engine, wire, options.requests)
    print(figures)
    if options.output is not None:
        facts = {"medium": options.medium, "requests": options.requests, "mb_s": options.mb_s, "tokens": TOKENS}
        given = f"--medium {options.medium} --requests {options.requests} --mb-s {options.mb_s}"
        command = f"python -m benchmarks.compressed_ttft {given}"
        write_results(options.output, "compressed-ttft", command=command, settings=facts, figures=figures)
    return 1 if figures["blocks_wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
