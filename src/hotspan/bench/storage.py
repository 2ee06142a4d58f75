"""The tiers against their limits, in one run: copies against memcpy, the disk tier against fio.

Both sides move the same bytes, in turns, round by round; the figure is the ratio of the medians.
"""

import itertools
import json
import mmap
import os
import shutil
import statistics
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from numpy.lib.stride_tricks import as_strided
from rich.console import Console

from hotspan.bench.config import StorageBench
from hotspan.bench.machine import write_results
from hotspan.bench.tables import Cell, Group, Table
from hotspan.core.errors import ConfigError
from hotspan.core.frame import HEADER_BYTES, FrameIdentity, FrameSealing
from hotspan.core.progress import Progress
from hotspan.core.terms import Scope, Terms
from hotspan.core.types import GIB, MIB, PAGE_BYTES, Chunk, ChunkKey, round_up
from hotspan.tiers.disk import DiskOptions, DiskTier
from hotspan.tiers.files import Files
from hotspan.tiers.io import IO_BYTES, FrameFile, staging_bytes
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

    def to_json(self) -> dict[str, Any]:
        """Every round, and what follows from them."""
        return asdict(self) | {"median": self.rate, "limit_median": self.limit, "ratio": self.ratio}


def measure(bench: StorageBench) -> list[Figure]:
    """All figures. Raises: ConfigError if fio is required and missing, or the directory can't be used."""
    if bench.require_fio and shutil.which("fio") is None:
        raise ConfigError(INSTALL_FIO)
    if not bench.directory.is_dir():
        raise ConfigError(f"--directory {bench.directory} is no directory: give one on the disk that is to be measured")
    parts: dict[str, Callable[[Path], list[Figure]]] = {
        "copies, against memcpy": lambda scratch: copy_figures(bench),
        "frames, hashed and encrypted": lambda scratch: seal_figures(bench),
        "the disk tier, against fio": lambda scratch: disk_figures(bench, scratch),
    }
    figures: list[Figure] = []
    with (
        Progress("measuring", len(parts), "parts") as progress,
        tempfile.TemporaryDirectory(prefix="hotspan-bench-", dir=bench.directory) as scratch,
    ):
        for name, measured in parts.items():
            progress.doing(f"measuring {name}")
            figures += measured(Path(scratch))
            progress.advance()
    return figures


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
    """The disk tier, plain and encrypted, and fio over a file of the same size, with the same block and depth."""
    chunks = max(bench.threads, int(bench.size_gib * GIB) // (bench.payload_bytes + HEADER_BYTES))
    moved = chunks * bench.payload_bytes
    block = min(IO_BYTES, round_up(bench.payload_bytes, PAGE_BYTES))
    size = chunks * (bench.payload_bytes + HEADER_BYTES)
    fio = Fio(scratch / "fio", size, block, bench.threads)
    lay_out(fio.path, size)
    plain, sealed = (
        TierFrames(bench, scratch / name, chunks, keys) for name, keys in (("plain", None), ("sealed", BenchKeys()))
    )
    with closing(plain), closing(sealed):
        first = [rate(moved, plain.write)]
        sealed.write()
        jobs: dict[str, Callable[[], float]] = {
            "plain write": lambda: plain.rewrite(moved),
            "sealed write": lambda: sealed.rewrite(moved),
            "plain read": lambda: rate(moved, plain.read),
            "sealed read": lambda: rate(moved, sealed.read),
        }
        if shutil.which("fio") is not None:
            jobs["fio write"] = lambda: fio.rate("write")
            jobs["fio read"] = lambda: fio.rate("read")
        rates: dict[str, list[float]] = {name: [] for name in ("fio write", "fio read", *jobs)}
        for round in range(bench.repetitions):
            names = sorted(jobs, key=lambda name: (name.endswith("read"), name))
            for name in reversed(names) if round % 2 else names:
                rates[name].append(jobs[name]())
    against = f"fio, {bench.threads} x {block / MIB:g} MiB"
    return [
        Figure("disk read, verified", against, rates["plain read"], rates["fio read"], 0.9),
        Figure("disk read, encrypted", against, rates["sealed read"], rates["fio read"], 0.7),
        Figure("disk write, hashed", against, rates["plain write"], rates["fio write"], 0.8),
        Figure("disk write, encrypted", against, rates["sealed write"], rates["fio write"]),
        Figure("disk write, hashed, first over a fresh slab", against, first, rates["fio write"]),
    ]


def lay_out(path: Path, size: int) -> None:
    """Write a file once from end to end, so that nothing measured on it pays for fresh extents."""
    with path.open("wb") as file:
        for at in range(0, size, 16 * MIB):
            file.write(bytes(min(16 * MIB, size - at)))
        os.fsync(file.fileno())


def seal_figures(bench: StorageBench) -> list[Figure]:
    """What it costs a store to hash and to encrypt a chunk, in memory, against one memcpy of it."""
    source, target = page_buffers(2, bench.payload_bytes)
    scratch = memoryview(mmap.mmap(-1, HEADER_BYTES + staging_bytes(bench.payload_bytes)))
    identity, keys = FrameIdentity(ChunkKey(bytes(32)), bytes(32)), BenchKeys()
    sink = FrameFile(NoFiles(), -1, HEADER_BYTES + bench.payload_bytes)
    jobs = {
        "hash": lambda: sink.write([0], scratch[:HEADER_BYTES], source, identity),
        "encrypt": lambda: sink.write_sealed([0], scratch, source, identity, keys),
        "memcpy": lambda: np.copyto(np.frombuffer(target, np.int8), np.frombuffer(source, np.int8)),
    }
    turns = max(1, int(256 * MIB // bench.payload_bytes))
    repeated = {name: partial(_times, job, turns) for name, job in jobs.items()}
    rates = in_turns(repeated, turns * bench.payload_bytes, bench.repetitions)
    added = [1 / max(1 / slow - 1 / fast, 1e-9) for slow, fast in zip(rates["encrypt"], rates["hash"], strict=True)]
    return [
        Figure("frame, hashed", "memcpy of the chunk", rates["hash"], rates["memcpy"]),
        Figure("frame, encrypted", "memcpy of the chunk", rates["encrypt"], rates["memcpy"]),
        Figure("what encryption adds to a store", "memcpy of the chunk", added, rates["memcpy"], 1.0),
    ]


def _times(job: Callable[[], object], turns: int) -> None:
    for _ in range(turns):
        job()


class NoFiles(Files):
    """Writes that go nowhere."""

    def pwritev(self, fd: int, buffers: Sequence[memoryview], at: int) -> int:
        return sum(map(len, buffers))


class BenchKeys:
    """One key for everything: FrameKeys and FrameSealing in one."""

    def __init__(self) -> None:
        self.key_id, self.writer = bytes(16), os.urandom(16)
        self.aead = AESGCM(AESGCM.generate_key(256))
        self._count = itertools.count()

    def next_nonce(self) -> bytes:
        return next(self._count).to_bytes(8, "little")

    def sealing(self, tenant: int) -> FrameSealing | None:
        return self

    def opening(self, key_id: bytes, writer: bytes) -> AESGCM | None:
        return self.aead


def page_buffers(count: int, size: int) -> list[memoryview]:
    """Page-aligned buffers with bytes that no disk can compress."""
    noise = np.random.default_rng(1).bytes(size)
    buffers = [memoryview(mmap.mmap(-1, size)) for _ in range(count)]
    for buffer in buffers:
        buffer[:] = noise
    return buffers


class TierFrames:
    """Chunks through a real DiskTier: written with their records, verified when read."""

    def __init__(self, bench: StorageBench, path: Path, chunks: int, keys: BenchKeys | None) -> None:
        self._chunks = [Chunk(ChunkKey(uuid.uuid4().bytes * 2), None) for _ in range(chunks)]
        slot = bench.payload_bytes + HEADER_BYTES
        options = DiskOptions(path, chunks * slot, threads=bench.threads, store_depth=2 * bench.threads, keys=keys)
        self._tier = DiskTier(options, bytes(32), bench.payload_bytes)
        self._buffers = page_buffers(2 * bench.threads, bench.payload_bytes)

    def close(self) -> None:
        self._tier.close(30.0)

    def write(self) -> None:
        """Store every chunk."""
        self._all(lambda chunk, buffer: self._tier.submit_store(chunk, Terms(), buffer))

    def read(self) -> None:
        """Load every chunk."""
        self._all(lambda chunk, buffer: self._tier.submit_load(chunk.key, buffer))

    def rewrite(self, moved: int) -> float:
        """GB/s of storing every chunk into slots that were written before; making them free is not counted."""
        self._tier.invalidate([Scope()], lambda done: None)
        first = self._chunks[0].key
        while self._tier.usage().chunks or not self._tier.can_store() or self._tier.holds_back(first, Terms()):
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
    rows = []
    for figure in figures:
        is_missed = figure.goal is not None and figure.ratio is not None and figure.ratio < figure.goal
        numbers = (figure.rate, figure.limit, figure.ratio, figure.goal)
        cells = [Cell("-" if value is None else f"{value:.2f}", "bad" if is_missed else "") for value in numbers]
        rows.append((figure.name, [*cells, Cell(figure.against if figure.limits else "not measured")]))
    title = f"storage: chunks of {bench.payload_bytes / MIB:g} MiB, {bench.threads} threads, medians"
    console = Console()
    console.print(Table(title, [Group("", ("GB/s", "limit GB/s", "ratio", "goal", "limit"))], rows, "what").terminal())
    if any(not figure.limits for figure in figures):
        console.print(INSTALL_FIO, style="yellow", soft_wrap=True)


def write_figures(path: Path, bench: StorageBench, figures: Sequence[Figure]) -> None:
    """The figures as JSON, with the machine, the command and every round."""
    write_results(path, "storage", settings=asdict(bench), figures=[figure.to_json() for figure in figures])
