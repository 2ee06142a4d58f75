"""What the digest of a model's weights costs at a start: the first one, a later one, and `--model-digest sampled`.

usage: python -m benchmarks.model_digest DIRECTORY [--gib 2] [--output benchmarks/results/model-digest.json]

A file of random bytes is written to DIRECTORY and removed at the end. It is read through the page cache, which may hold
it still, as after the engine has read it.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hotspan.bench.machine import write_results
from hotspan.core.types import GIB, MIB
from hotspan.engine.fingerprint import FileDigests, model_digest
from hotspan.testing.clock import SimulatedClock


def timed(run: Callable[[], Any]) -> float:
    """Seconds that `run` takes."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.model_digest")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--gib", type=float, default=2)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(words)
    size = int(options.gib * GIB)
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        model = Path(name) / "model"
        model.mkdir()
        (model / "config.json").write_text("{}")
        with (model / "model.safetensors").open("wb") as file:
            file.write((16).to_bytes(8, "little") + b"{}".ljust(16))
            for _ in range(size // (16 * MIB)):
                file.write(os.urandom(16 * MIB))
        settled = SimulatedClock(unix_s=4e9)

        def start(**how: Any) -> float:
            return timed(lambda: model_digest(model, FileDigests(Path(name) / "digests", clock=settled), **how))

        seconds = {"first": start(), "later": start(), "sampled": start(full=False)}
    figures = {f"{kind}_s": round(took, 4) for kind, took in seconds.items()}
    figures["first_gb_per_s"] = round(size / seconds["first"] / 1e9, 2)
    print(json.dumps(figures))
    if options.output is not None:
        command = f"python -m benchmarks.model_digest DIRECTORY --gib {options.gib:g}"
        settings = {"gib": options.gib}
        write_results(options.output, "model-digest", command=command, settings=settings, figures=figures)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
