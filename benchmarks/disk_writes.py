"""What bounds the writes of the disk tier: fio, and threads that do nothing but write, beside it.

usage: python -m benchmarks.disk_writes [--size-gib 1] [--chunk-mib 14] [--threads 4] [--rounds 9] [--output FILE]

All write the same number of bytes with O_DIRECT, in parts of 4 MiB, over files that were written before, in turns:

    fio            one buffer per thread, written again and again
    few buffers    the same by threads of this process
    new memory     each part from memory of its own, as a RAM tier has it
    new, hashed    the same, each part hashed before it is written
    tier           the disk tier: hashed, and a record per chunk
    tier, sealed   the disk tier, encrypted: each part is copied into one buffer per thread

Figures: GB/s, one a round, and the medians of each round's ratio to fio. Wants fio and a quiet machine.
"""

import mmap
import os
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import numpy as np
import xxhash

from benchmarks.harness import arguments
from hotspan.bench.config import StorageBench
from hotspan.bench.machine import write_results
from hotspan.bench.storage import BenchKeys, Fio, TierFrames, lay_out, rate
from hotspan.core.frame import HEADER_BYTES
from hotspan.core.types import GIB
from hotspan.tiers.io import IO_BYTES


def write_all(fd: int, memory: memoryview, parts: int, threads: int, *, is_hashed: bool) -> None:
    """Write so many parts of a file, each thread its own in turn with the others, from a ring of parts in memory."""

    def write(thread: int) -> None:
        for at in range(thread, parts, threads):
            source = at * IO_BYTES % len(memory)
            part = memory[source : source + IO_BYTES]
            if is_hashed:
                xxhash.xxh3_128_digest(part)
            if os.pwrite(fd, part, at * IO_BYTES) != IO_BYTES:
                raise OSError(f"a part of {fd} was written in part")

    writers = [threading.Thread(target=write, args=(thread,)) for thread in range(threads)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()


def noise(size: int) -> memoryview:
    """Pages with bytes that no disk can compress."""
    memory, one = memoryview(mmap.mmap(-1, size)), np.random.default_rng(1).bytes(IO_BYTES)
    for at in range(0, size, IO_BYTES):
        memory[at : at + IO_BYTES] = one
    return memory


def main() -> int:
    options = arguments(__doc__, size_gib=1.0, chunk_mib=14.0, threads=4, rounds=9)
    with tempfile.TemporaryDirectory(dir=".") as scratch, ExitStack() as stack:
        sizes = {"size_gib": options.size_gib, "chunk_mib": options.chunk_mib, "threads": options.threads}
        bench = StorageBench(directory=Path(scratch), **sizes)
        chunks = int(options.size_gib * GIB) // (bench.payload_bytes + HEADER_BYTES)
        moved, parts = chunks * bench.payload_bytes, chunks * bench.payload_bytes // IO_BYTES
        fio = Fio(Path(scratch) / "fio", parts * IO_BYTES, IO_BYTES, options.threads)
        lay_out(fio.path, parts * IO_BYTES)
        fd = os.open(fio.path, os.O_RDWR | os.O_DIRECT)
        stack.callback(os.close, fd)
        few, new = noise(options.threads * IO_BYTES), noise(parts * IO_BYTES)
        plain, sealed = (
            stack.enter_context(closing(TierFrames(bench, Path(scratch) / name, chunks, keys)))
            for name, keys in (("plain", None), ("sealed", BenchKeys()))
        )
        plain.write()
        sealed.write()
        threads = {
            "few buffers": partial(write_all, fd, few, parts, options.threads, is_hashed=False),
            "new memory": partial(write_all, fd, new, parts, options.threads, is_hashed=False),
            "new, hashed": partial(write_all, fd, new, parts, options.threads, is_hashed=True),
        }
        jobs: dict[str, Callable[[], float]] = {
            "fio": lambda: fio.rate("write"),
            **{name: partial(rate, parts * IO_BYTES, job) for name, job in threads.items()},
            "tier": lambda: plain.rewrite(moved),
            "tier, sealed": lambda: sealed.rewrite(moved),
        }
        rates: dict[str, list[float]] = {name: [] for name in jobs}
        for round in range(options.rounds):
            for name in reversed(jobs) if round % 2 else jobs:
                rates[name].append(jobs[name]())
    figures = {
        name: {"gb_per_s": each, "of_fio": statistics.median(a / b for a, b in zip(each, rates["fio"], strict=True))}
        for name, each in rates.items()
    }
    for name, each in figures.items():
        print(f"{name:14} {statistics.median(rates[name]):.2f} GB/s, {each['of_fio']:.2f} of fio")
    if options.output:
        settings = {name: value for name, value in vars(options).items() if name != "output"}
        write_results(
            options.output, "disk-writes", "python -m benchmarks.disk_writes", settings=settings, figures=figures
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
