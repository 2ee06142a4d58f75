"""What a sick disk costs requests: time to first token over a disk that is slow, hung or failing, against no cache.

usage: python -m benchmarks.slow_disk [--requests 100] [--output benchmarks/results/slow-disk.json]

Two engines over one model, each in a process of its own: hotspan with RAM for one text only and everything else on
disk, and the same engine without hotspan. They are asked in turns, a text each that lies on disk; the engine's own
prefix cache is emptied before each request. Once the disk is filled, every read, write and sync of its slab takes so
long, or never ends, or fails; then the disk is well again, until the tier is back.
Bound: p99 at most 1.05 x that without a cache + 50 ms.
"""

import contextlib
import errno
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.beside_alone import CHUNK_GIB, HEALS_S, TEXTS, TOKENS, Alone, compare, fill, recovery
from benchmarks.harness import arguments
from hotspan.demo.model import make_demo_model
from hotspan.tiers.files import Files
from kit.engine import rig
from kit.proof import Proof, write_proof


class Sickness:
    """What happens to reads and writes of the slab from now on."""

    def __init__(self) -> None:
        self.before: Callable[[], None] = lambda: None

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """In the place of the tiers' own calls."""
        reads, writes, syncs = Files.preadv, Files.pwritev, Files.sync

        def wrapped(call: Any) -> Any:
            def run(files: Files, *arguments: Any) -> Any:
                self.before()
                return call(files, *arguments)

            return run

        Files.preadv, Files.pwritev, Files.sync = wrapped(reads), wrapped(writes), wrapped(syncs)
        try:
            yield
        finally:
            Files.preadv, Files.pwritev, Files.sync = reads, writes, syncs


def hang(released: threading.Event) -> None:
    """The disk answers when the test is over."""
    released.wait(600)


def fail() -> None:
    """The disk is broken."""
    raise OSError(errno.EIO, "injected")


def main() -> int:
    options = arguments(__doc__, requests=100)
    sickness, released = Sickness(), threading.Event()
    sicknesses: dict[str, Callable[[], None]] = {
        "healthy": lambda: None,
        "50 ms": lambda: time.sleep(0.05),
        "500 ms": lambda: time.sleep(0.5),
        "5 s": lambda: time.sleep(5),
        "failing (EIO)": fail,
        "hung": lambda: hang(released),
    }
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=".") as scratch, sickness.installed():
        model = make_demo_model(Path(scratch) / "tiny", "tiny").path
        ram = 16 * CHUNK_GIB
        with (
            contextlib.closing(Alone(model)) as alone,
            rig(model, ram_gib=ram, disk=Path(scratch) / "kv", cache={"patience_s": None, "drain_s": 1.0}) as engine,
        ):
            texts = fill(engine, alone)
            for name, before in sicknesses.items():
                released.clear()
                sickness.before = before
                found[name] = compare(engine, alone, texts, options.requests)
                sickness.before = lambda: None
                released.set()
                found[name] |= recovery(engine, texts[0])
                print(f"{name:14} {json.dumps(found[name])}", flush=True)
    passed = all(each["is_met"] and each["read_after_s"] <= HEALS_S for each in found.values())
    print(f"all met, and read again within {HEALS_S} s: {'yes' if passed else 'NO'}")
    proof = Proof(
        "slow",
        "over a slow, hung or failing disk p99 TTFT is at most 1.05 x that without a cache + 50 ms",
        found,
        passed,
    )
    if options.output is not None:
        write_proof(
            options.output,
            proof,
            {"requests": options.requests, "texts": TEXTS, "tokens": TOKENS},
            f"python -m benchmarks.slow_disk --requests {options.requests}",
        )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
