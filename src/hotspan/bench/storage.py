"""The tiers against their limits, in one run: copies against memcpy, the disk tier against fio.

Both sides move the same bytes, in turns, round by round; the figure is the ratio of the medians.
"""

import json
import mmap
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from rich.console import Console
from rich.table import Table

from hotspan.bench.machine import machine_facts
from hotspan.core.errors import ConfigError
from hotspan.core.frame import HEADER_BYTES
from hotspan.core.types import GIB, MIB, PAGE_BYTES, Chunk, ChunkKey, round_up
from hotspan.tiers.directory import open_directory
from hotspan.tiers.disk import DiskOptions, DiskTier
from hotspan.tiers.io import IO_BYTES, read_frame, write_frame
from hotspan.tiers.slab import SharedSlab

LAYERS = 10
"""Of the engine-like array: its block is one page in each of so many layers."""

INSTALL_FIO = "fio is not installed, so there is nothing to compare the disk with: apt-get install fio (or dnf, brew)"


@dataclass(frozen=True, slots=True)
class Figure:
    """One measurement beside its limit.

    rates:  GB/s, one a round. limits: the same for the limit, empty where there was none to measure.
    goal:   the least ratio that the design aims at; None for figures that only explain others.
    """

    name: str
    against: str
    rates: list[float]
    limits: list[float]
    goal: float | None = None

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)

    @property
    def limit(self) -> float | None:
        return statistics.median(self.limits) if self.limits else None

    @property
    def ratio(self) -> float | None:
        return self.rate / self.limit if self.limit else None


@dataclass(frozen=True, slots=True)
class StorageBench:
    """What to measure, and on how much."""

    directory: Path
    size_gib: float = 1.0
    chunk_mib: float = 14.0
    threads: int = 4
    repetitions: int = 3
    require_fio: bool = False

    @property
    def payload_bytes(self) -> int:
        return round_up(int(self.chunk_mib * MIB), PAGE_BYTES)

    def run(self) -> list[Figure]:
        """All figures. Raises: ConfigError if fio is required and missing, or the directory can't be used."""
        if self.require_fio and shutil.which("fio") is None:
            raise ConfigError(INSTALL_FIO)
        self.directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="hotspan-bench-", dir=self.directory) as scratch:
            return [*copy_figures(self), *disk_figures(self, Path(scratch))]


def rate(moved: int, job: Callable[[], object]) -> float:
    """GB/s of one call of `job`, which moves so many bytes."""
    started = time.perf_counter()
    job()
    return moved / (time.perf_counter() - started) / 1e9


# -- copies --------------------------------------------------------------------------------------------------------


def copy_figures(bench: StorageBench) -> list[Figure]:
    """Blocks between an engine-like KV cache and the slab, as engine/worker.py copies them, against memcpy.

    The engine's array is int8[layers, blocks, page]; a slot holds int8[layers, blocks of a chunk, page]. A block is
    copied in one call, a page a layer. Both arrays are larger than the caches of the CPU, and blocks lie scattered.
    The limit is memcpy of a chunk; one call for everything is shown too, because libc then writes past the caches.
    """
    blocks_per_chunk = 16
    page = round_up(max(PAGE_BYTES, bench.payload_bytes // (LAYERS * blocks_per_chunk)), PAGE_BYTES)
    slot = LAYERS * blocks_per_chunk * page
    slots = max(4, min(64, 512 * MIB // slot))
    blocks = slots * blocks_per_chunk
    with SharedSlab(f"bench-{uuid.uuid4().hex}", slots, slot) as slab:
        slab.unlink()
        memory = np.frombuffer(slab.view, np.int8)
        engine = np.ones((LAYERS, blocks, page), np.int8)
        in_slots = as_strided(memory, (slots, LAYERS, blocks_per_chunk, page), (slot, blocks_per_chunk * page, page, 1))
        order = np.random.default_rng(0).permutation(blocks).tolist()
        flat = engine.reshape(-1)

        def store() -> None:
            for nth, block in enumerate(order):
                np.copyto(in_slots[nth // blocks_per_chunk, :, nth % blocks_per_chunk], engine[:, block])

        def load() -> None:
            for nth, block in enumerate(order):
                np.copyto(engine[:, block], in_slots[nth // blocks_per_chunk, :, nth % blocks_per_chunk])

        def memcpy(into: Any, source: Any, piece: int) -> None:
            for start in range(0, slab.bytes, piece):
                np.copyto(into[start : start + piece], source[start : start + piece])

        jobs = {
            "store": store,
            "memcpy down": lambda: memcpy(memory, flat, slot),
            "bulk down": lambda: memcpy(memory, flat, slab.bytes),
            "load": load,
            "memcpy up": lambda: memcpy(flat, memory, slot),
            "bulk up": lambda: memcpy(flat, memory, slab.bytes),
        }
        rates = in_turns(jobs, slab.bytes, bench.repetitions)
    shape = f"{LAYERS} x {page // 1024} KiB a block"
    down, up = f"engine to slab, {shape}", f"slab to engine, {shape}"
    one, bulk = "memcpy, a chunk a call", f"memcpy, {slots * slot // MIB} MiB a call"
    return [
        Figure(down, one, rates["store"], rates["memcpy down"], 0.85),
        Figure(down, bulk, rates["store"], rates["bulk down"]),
        Figure(up, one, rates["load"], rates["memcpy up"], 0.85),
        Figure(up, bulk, rates["load"], rates["bulk up"]),
    ]


def in_turns(jobs: Mapping[str, Callable[[], object]], moved: int, repetitions: int) -> dict[str, list[float]]:
    """GB/s of each job in each round; odd rounds run them in the other order, and one round before warms up."""
    rates: dict[str, list[float]] = {name: [] for name in jobs}
    for round in range(-1, repetitions):
        for name in reversed(list(jobs)) if round % 2 else jobs:
            found = rate(moved, jobs[name])
            if round >= 0:
                rates[name].append(found)
    return rates


# -- disk ----------------------------------------------------------------------------------------------------------


def disk_figures(bench: StorageBench, scratch: Path) -> list[Figure]:
    """The disk tier (sealed and verified), its bare I/O, and fio over the same file, with the same block and depth.

    The tier has a slab of its own, of the same size, beside that file.
    """
    chunks = max(bench.threads, int(bench.size_gib * GIB) // (bench.payload_bytes + HEADER_BYTES))
    moved = chunks * bench.payload_bytes
    block = min(IO_BYTES, round_up(bench.payload_bytes, PAGE_BYTES))
    fio = Fio(scratch / "bare" / "slab", chunks * (bench.payload_bytes + HEADER_BYTES), block, bench.threads)
    with BareFrames(bench, scratch / "bare", chunks) as bare, TierFrames(bench, scratch / "tier", chunks) as tier:
        bare.write()  # lays the file out
        first = [rate(moved, tier.write)]
        rates: dict[str, list[float]] = {
            name: [] for name in ("tier write", "bare write", "tier read", "bare read", "fio write", "fio read")
        }
        jobs: dict[str, Callable[[], float]] = {
            "tier write": lambda: tier.rewrite(moved),
            "bare write": lambda: rate(moved, bare.write),
            "tier read": lambda: rate(moved, tier.read),
            "bare read": lambda: rate(moved, bare.read),
        }
        if shutil.which("fio") is not None:
            jobs["fio write"] = lambda: fio.rate("write")
            jobs["fio read"] = lambda: fio.rate("read")
        for round in range(bench.repetitions):
            names = sorted(jobs, key=lambda name: (name.endswith("read"), name))
            for name in reversed(names) if round % 2 else names:
                rates[name].append(jobs[name]())
    against = f"fio, {bench.threads} x {block / MIB:g} MiB"
    return [
        Figure("disk read, verified", against, rates["tier read"], rates["fio read"], 0.9),
        Figure("disk read, bare frames", against, rates["bare read"], rates["fio read"]),
        Figure("disk write, sealed", against, rates["tier write"], rates["fio write"], 0.8),
        Figure("disk write, bare frames", against, rates["bare write"], rates["fio write"]),
        Figure("disk write, sealed, first over a fresh slab", against, first, rates["fio write"]),
    ]


def page_buffers(count: int, size: int) -> list[memoryview]:
    """Page-aligned buffers with bytes that no disk can compress."""
    noise = np.random.default_rng(1).bytes(size)
    buffers = [memoryview(mmap.mmap(-1, size)) for _ in range(count)]
    for buffer in buffers:
        buffer[:] = noise
    return buffers


class BareFrames:
    """Frames through write_frame and read_frame on as many threads, without checksums and without a table."""

    def __init__(self, bench: StorageBench, path: Path, chunks: int) -> None:
        self._slot = bench.payload_bytes + HEADER_BYTES
        self._chunks, self._threads = chunks, bench.threads
        self._directory = open_directory(path, self._slot, chunks * self._slot)
        self._headers = page_buffers(bench.threads, HEADER_BYTES)
        self._payloads = page_buffers(bench.threads, bench.payload_bytes)
        self._pool = ThreadPoolExecutor(bench.threads)

    def __enter__(self) -> "BareFrames":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        self._directory.close()

    def write(self) -> None:
        """Every slot once."""
        self._all(write_frame)

    def read(self) -> None:
        """Every slot once."""
        self._all(read_frame)

    def _all(self, move: Callable[[int, int, memoryview, memoryview], None]) -> None:
        def run(thread: int) -> None:
            for slot in range(thread, self._chunks, self._threads):
                move(self._directory.slab_fd, slot * self._slot, self._headers[thread], self._payloads[thread])

        list(self._pool.map(run, range(self._threads)))


class TierFrames:
    """Chunks through a real DiskTier: sealed, recorded, verified."""

    def __init__(self, bench: StorageBench, path: Path, chunks: int) -> None:
        self._chunks = [Chunk(ChunkKey(uuid.uuid4().bytes * 2), None) for _ in range(chunks)]
        slot = bench.payload_bytes + HEADER_BYTES
        options = DiskOptions(path, chunks * slot, threads=bench.threads, store_depth=2 * bench.threads)
        self._tier = DiskTier(options, bytes(32), bench.payload_bytes)
        self._buffers = page_buffers(2 * bench.threads, bench.payload_bytes)

    def __enter__(self) -> "TierFrames":
        return self

    def __exit__(self, *_: object) -> None:
        self._tier.close(30.0)

    def write(self) -> None:
        """Store every chunk."""
        self._all(self._tier.submit_store)

    def read(self) -> None:
        """Load every chunk."""
        self._all(lambda chunk, buffer: self._tier.submit_load(chunk.key, buffer))

    def rewrite(self, moved: int) -> float:
        """GB/s of storing every chunk into slots that were written before; making them free is not counted."""
        self._tier.clear()
        while self._tier.usage().chunks:
            self._tier.wait(0.1)
            self._tier.finished()
        return rate(moved, self.write)

    def _all(self, submit: Callable[[Chunk, memoryview], bool]) -> None:
        free = list(self._buffers)
        in_flight: dict[ChunkKey, memoryview] = {}
        todo = list(self._chunks)
        while todo or in_flight:
            while todo and free:
                chunk, buffer = todo.pop(), free.pop()
                if not submit(chunk, buffer):
                    raise ConfigError("the disk tier refused a chunk: the figures would mean nothing")
                in_flight[chunk.key] = buffer
            self._tier.wait(1.0)
            for transfer in self._tier.finished():
                if transfer.fault is not None:
                    raise ConfigError(f"the disk failed while it was measured ({transfer.fault.value}): see the log")
                free.append(in_flight.pop(transfer.key))


@dataclass(frozen=True, slots=True)
class Fio:
    """fio over a file that is laid out: as many jobs as we have threads, each with one direct I/O in flight.

    The jobs take turns over the file, as our threads do: a disk that reads ahead likes that better than distant jobs.
    """

    path: Path
    bytes: int
    block: int
    jobs: int

    def rate(self, direction: str) -> float:
        """GB/s of one pass of all jobs together over the file. Raises: ConfigError if fio fails."""
        others = (self.jobs - 1) * self.block
        part = max(1, self.bytes // self.jobs // self.block) * self.block
        command = [
            "fio", f"--name={direction}", f"--filename={self.path}", f"--bs={self.block}", f"--numjobs={self.jobs}",
            f"--rw={direction}:{others}" if others else f"--rw={direction}", f"--offset_increment={self.block}",
            f"--size={self.bytes // self.block * self.block - others}", f"--io_size={part}", "--thread", "--direct=1",
            "--ioengine=pvsync", "--iodepth=1", "--invalidate=0", "--fallocate=none", "--group_reporting",
            "--output-format=json",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise ConfigError(
                f"fio failed ({done.stderr.strip()[:300]}): give --directory a disk that takes direct I/O"
            )
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0][direction]
        return float(job["io_bytes"]) / (float(job["runtime"]) / 1000) / 1e9


# -- what is shown -------------------------------------------------------------------------------------------------


def print_figures(bench: StorageBench, figures: Sequence[Figure]) -> None:
    """A table of rates, limits and ratios; red where a goal was missed."""
    console = Console()
    table = Table(title=f"storage: chunks of {bench.payload_bytes / MIB:g} MiB, {bench.threads} threads, medians")
    table.add_column("what")
    for column in ("GB/s", "limit GB/s", "ratio", "goal"):
        table.add_column(column, justify="right")
    table.add_column("limit")
    for figure in figures:
        missed = figure.goal is not None and figure.ratio is not None and figure.ratio < figure.goal
        table.add_row(
            figure.name,
            f"{figure.rate:.2f}",
            "-" if figure.limit is None else f"{figure.limit:.2f}",
            "-" if figure.ratio is None else f"{figure.ratio:.2f}",
            "" if figure.goal is None else f"{figure.goal:.2f}",
            figure.against if figure.limits else "not measured",
            style="red" if missed else None,
        )
    console.print(table)
    if any(not figure.limits for figure in figures):
        console.print(INSTALL_FIO, style="yellow", soft_wrap=True)


def write_figures(path: Path, bench: StorageBench, figures: Sequence[Figure]) -> None:
    """The figures as JSON, with the machine, the command and every round."""
    settings: dict[str, Any] = asdict(bench) | {"directory": str(bench.directory)}
    data = {
        "kind": "storage",
        "machine": machine_facts(),
        "command": " ".join(["hotspan", *sys.argv[1:]]),
        "settings": settings,
        "figures": [
            asdict(figure) | {"median": figure.rate, "limit_median": figure.limit, "ratio": figure.ratio}
            for figure in figures
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=2) + "\n")
