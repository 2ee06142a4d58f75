"""What tiers that move data at full rate cost other requests: time between their tokens, beside an equal memcpy.

usage: python -m benchmarks.interference [--rounds 8] [--seconds 6] [--output benchmarks/results/interference.json]

One engine decodes one long answer. Round by round, in turns: nothing else happens; a tier in the engine's process
loads chunks as fast as it can, or stores them (the disk tier with O_DIRECT, and the L2 over `hotspan daemon`; where
both wait, loads go first); another process copies as many bytes a second with numpy, on as many threads, and as the
tiers do out of more memory than the CPU's caches keep (between the same 8 MiB again and again a copy costs half). The
figure is the p99 of the time between tokens beside a tier over that beside the copies. Bound: 1.1. A tier also looks at
each byte it moves, to verify it; what that alone costs others is told by a third process, which copies and hashes.
"""

import contextlib
import itertools
import json
import mmap
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from benchmarks.harness import arguments
from kit.environment import prepare_environment
from kit.measure import quantile

prepare_environment()

from hotspan.bench.machine import write_results  # noqa: E402
from hotspan.core.terms import Terms  # noqa: E402
from hotspan.core.types import GIB, MIB, Chunk, ChunkKey  # noqa: E402
from hotspan.demo.model import make_demo_model  # noqa: E402
from hotspan.l2.follower import LogFollower  # noqa: E402
from hotspan.l2.open import open_store  # noqa: E402
from hotspan.l2.remote import RemoteOptions, RemoteTier  # noqa: E402
from hotspan.tiers.base import StorageTier  # noqa: E402
from hotspan.tiers.disk import DiskOptions, DiskTier  # noqa: E402
from kit.engine import Rig, rig  # noqa: E402
from tests.daemon.rig import DaemonProcess  # noqa: E402

GOAL = 1.1
CHUNK_BYTES = 8 * MIB
CHUNKS, LOADS, STORES, THREADS = 32, 8, 2, 4
NAMESPACE = bytes(32)


class Traffic:
    """A tier in this process that is kept at work: `LOADS` loads, or `STORES` stores, are always on their way."""

    def __init__(self, tier: StorageTier) -> None:
        self.tier = tier
        self.moved = 0
        self._memory = mmap.mmap(-1, LOADS * CHUNK_BYTES)
        view = memoryview(self._memory)
        self._buffers = [view[at : at + CHUNK_BYTES] for at in range(0, len(view), CHUNK_BYTES)]
        self._numbers = itertools.count()
        self._in_flight: dict[ChunkKey, memoryview] = {}
        self._kept = [self._store() for _ in range(CHUNKS)]
        self._turn = itertools.cycle(self._kept)

    def load(self) -> None:
        """Take note of what ended, and load more."""
        self._note()
        while self._buffers and (key := next(self._turn)) not in self._in_flight:
            if not self.tier.submit_load(key, self._buffers[-1]):
                self.tier.ask([Chunk(each, None) for each in self._kept], 0)  # an L2 must be asked now and then
                break
            self._in_flight[key] = self._buffers.pop()

    def store(self) -> None:
        """Take note of what ended, drop it, and store more."""
        self._note()
        while len(self._in_flight) < STORES and self.tier.can_store() and self._submit() is not None:
            pass

    def _note(self) -> None:
        for transfer in self.tier.finished():
            if transfer.fault is not None:
                raise SystemExit(f"a transfer failed: {transfer.fault}")
            self.moved += transfer.bytes
            self._buffers.append(self._in_flight.pop(transfer.key))
            if not transfer.is_load and transfer.key not in self._kept:
                self.tier.discard(transfer.key)

    def drain(self) -> None:
        """Let everything end."""
        while self._in_flight:
            self.tier.wait(0.1)
            for transfer in self.tier.finished():
                self._buffers.append(self._in_flight.pop(transfer.key))

    def _store(self) -> ChunkKey:
        """Fill it with one chunk."""
        key = self._submit()
        if key is None:
            raise SystemExit("the tier takes no chunk: is there room?")
        self.drain()
        return key

    def _submit(self) -> ChunkKey | None:
        """Store a chunk; None if the tier has no room for it at the moment."""
        key = ChunkKey(next(self._numbers).to_bytes(4, "big") + os.urandom(28))
        if not self.tier.submit_store(Chunk(key, None), Terms(), self._buffers[-1]):
            return None
        self._in_flight[key] = self._buffers.pop()
        return key


@dataclass
class Copies:
    """A process that copies so many bytes a second."""

    pipe: Any

    def run(self, bytes_per_s: float, *, is_verified: bool = False) -> None:
        """From now on; 0 stops it. is_verified: what was copied is hashed, too."""
        self.pipe.send((bytes_per_s, is_verified))


@contextlib.contextmanager
def copies() -> Iterator[Copies]:
    """That process, idle."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=copy_for_ever, args=(theirs,), daemon=True)
    process.start()
    ours.recv()
    try:
        yield Copies(ours)
    finally:
        process.terminate()
        process.join()


def copy_for_ever(pipe: Any) -> None:
    """In the other process: as many threads as a tier has, each with its share of the rate and of the memory."""
    order = (0.0, False)

    def work() -> None:
        sources = np.ones((CHUNKS // THREADS, CHUNK_BYTES), np.uint8)
        targets = np.zeros((LOADS // THREADS, CHUNK_BYTES), np.uint8)
        pairs = zip(itertools.cycle(targets), itertools.cycle(sources), strict=False)
        due = time.monotonic()
        while True:
            asked, is_verified = order
            if not asked:
                time.sleep(0.005)
                due = time.monotonic()
                continue
            target, source = next(pairs)
            if is_verified:  # part by part, as tiers do
                for at in range(0, CHUNK_BYTES, MIB):
                    np.copyto(target[at : at + MIB], source[at : at + MIB])
                    xxhash.xxh3_128_digest(target[at : at + MIB])
            else:
                np.copyto(target, source)
            due = max(due + CHUNK_BYTES * THREADS / asked, time.monotonic() - 0.1)
            time.sleep(max(0.0, due - time.monotonic()))

    for _ in range(THREADS):
        threading.Thread(target=work, daemon=True).start()
    pipe.send("ready")
    while True:
        order = pipe.recv()


class Decoding:
    """An engine with one answer in the making."""

    def __init__(self, engine: Rig, prompt_tokens: int, answer_tokens: int) -> None:
        self._engine = engine
        self._prompt = engine.text(1, prompt_tokens)
        self._tokens = answer_tokens
        self._names = itertools.count()

    def times(self, seconds: float, between: Callable[[], None]) -> list[float]:
        """Seconds between tokens for so long; `between` runs in the engine's thread after each."""
        found: list[float] = []
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if not self._engine.llm.llm_engine.has_unfinished_requests():
                self._engine.start(f"answer-{next(self._names)}", self._prompt, self._tokens, no_store=True)
                for _ in range(4):
                    self._engine.step()
            started = time.perf_counter()
            between()
            self._engine.step()
            found.append(time.perf_counter() - started)
        return found


@contextlib.contextmanager
def tiers(scratch: Path) -> Iterator[dict[str, Traffic]]:
    """The disk tier and the L2 over a daemon, filled."""
    room = (CHUNKS + 8) * (CHUNK_BYTES + MIB)
    disk = DiskTier(DiskOptions(scratch / "kv", room, THREADS), NAMESPACE, CHUNK_BYTES)
    daemon = DaemonProcess(size_gib=2 * room / GIB)
    daemon.start()
    options = {"sagemaker_hyperpod_shared_memory_name": daemon.name}
    url = f"sagemaker-hyperpod://127.0.0.1:{daemon.port}"
    log_store = open_store("--l2", url, options)
    assert log_store.log is not None
    follower = LogFollower(log_store.log, "bench", store=log_store)
    follower.start()
    follower.foreign()  # as an engine does before each request: what is stored from now on is newer than the log
    l2 = RemoteTier(RemoteOptions(open_store("--l2", url, options), follower, THREADS), NAMESPACE, CHUNK_BYTES)
    try:
        yield {"disk": Traffic(disk), "daemon": Traffic(l2)}
    finally:
        disk.close(5)
        l2.close(5)
        follower.close()
        daemon.close()


def measure(decoding: Decoding, traffics: dict[str, Traffic], other: Copies, rounds: int, seconds: float) -> Any:
    """Times between tokens, and rates, by what happens beside them; the first round is not counted."""
    times: dict[str, list[list[float]]] = {}
    rates: dict[str, list[float]] = {}
    work = {
        f"{name} {step.__name__}s": (each, step) for name, each in traffics.items() for step in (each.load, each.store)
    }
    for number in range(-1, rounds):
        names = list(work) if number % 2 else list(reversed(work))
        kept: dict[str, list[float]] = {"nothing": decoding.times(seconds, lambda: None)}
        for name in names:
            traffic, step = work[name]
            traffic.moved, started = 0, time.monotonic()
            kept[name] = decoding.times(seconds, step)
            rate = traffic.moved / (time.monotonic() - started)
            if not rate:
                raise SystemExit(f"{name}: nothing moved, and the figures would mean nothing")
            traffic.drain()
            other.run(rate)
            kept[f"memcpy as fast as {name}"] = decoding.times(seconds, lambda: None)
            other.run(rate, is_verified=True)
            kept[f"verified memcpy as fast as {name}"] = decoding.times(seconds, lambda: None)
            other.run(0.0)
            rates.setdefault(name, []).append(rate / 1e9)
        if number < 0:
            rates.clear()
            continue
        for name, found in kept.items():
            times.setdefault(name, []).append(found)
    return times, rates


def report(times: dict[str, list[list[float]]], rates: dict[str, list[float]]) -> dict[str, Any]:
    """All figures, over all rounds together."""
    pooled = {name: [each for found in rounds for each in found] for name, rounds in times.items()}
    figures: dict[str, Any] = {
        name: {"tokens": len(values), "p50_ms": 1e3 * float(np.median(values)), "p99_ms": 1e3 * quantile(values, 0.99)}
        for name, values in pooled.items()
    }
    for name, found in rates.items():
        figures[name]["gb_per_s"] = float(np.median(found))
        for kind in ("memcpy", "verified memcpy"):
            beside = f"{kind} as fast as {name}"
            over = f"over_{kind.replace(' ', '_')}"
            figures[name][f"p99_{over}"] = quantile(pooled[name], 0.99) / quantile(pooled[beside], 0.99)
            figures[name][f"p50_{over}"] = figures[name]["p50_ms"] / figures[beside]["p50_ms"]
    return figures


def main() -> int:
    options = arguments(__doc__, rounds=8, seconds=6.0, model_size=("demo", "tiny"))
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=".")))
        model = make_demo_model(scratch / "model", options.model_size).path
        other = stack.enter_context(copies())
        traffics = stack.enter_context(tiers(scratch))
        engine = stack.enter_context(rig(model, ram_gib=0.1))
        times, rates = measure(Decoding(engine, 512, 3000), traffics, other, options.rounds, options.seconds)
    figures = report(times, rates)
    is_met = all(figures[name]["p99_over_memcpy"] <= GOAL for name in rates)
    for name, figure in figures.items():
        print(f"{name:28} {json.dumps(figure)}", flush=True)
    if options.output is not None:
        settings = {"rounds": options.rounds, "seconds": options.seconds, "model": options.model_size}
        found = {"settings": settings, "goal": GOAL, "is_met": is_met, "figures": figures}
        write_results(options.output, "interference", "python -m benchmarks.interference", **found)
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
