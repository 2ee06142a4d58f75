"""How long loads wait for their copy with 32 of them queued: the worker's order beside two others, in one run.

usage: python -m benchmarks.load_wait [--loads 600] [--rounds 3] [--output benchmarks/results/load-wait.json]

"stream": 32 loads of 4 chunks wait at any time; when one ends, the next one comes. "burst": 32 loads come at once, one
in ten of 100 chunks, the others of 1 to 4, and the next 32 when all have ended. Each order copies the same loads with
the CPU's worker, in turns: last in, first out (as it was); first in, first out; and engine/copies.py. A load's wait is
from its submission to the end of its copy, in milliseconds and in MiB that were copied meanwhile, which other programs
on the machine don't change. Bounds, in MiB: the p99 of the stream is at most a quarter of last in, first out; p50 of
bursts at most half of first in, first out; and the longest wait of either at most 1.1 of first in, first out.
"""

import json
import random
import sys
import time
import uuid
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.kv_offload.base import GPULoadStoreSpec
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from benchmarks.harness import arguments
from hotspan.bench.machine import write_results
from hotspan.core.types import MIB
from hotspan.engine.copies import Copy, CopyQueue, Place
from hotspan.engine.worker import HostWorker
from hotspan.tiers.slab import SharedSlab
from kit.measure import quantile

QUEUED, LONG, PER_CHUNK, SLOTS = 32, 100, 2, 64
PAGE = 2 * MIB


class LastFirst(CopyQueue):
    """The order until now: whole jobs, the newest load first."""

    def __init__(self, piece: int) -> None:
        super().__init__(1 << 30)

    def _load(self) -> Copy | None:
        return next(reversed(self._loads.values()), None)


class FirstFirst(CopyQueue):
    """Order of arrival."""

    def _load(self) -> Copy | None:
        return next(iter(self._loads.values()), None)


ORDERS: dict[str, type[CopyQueue]] = {"last_first": LastFirst, "first_first": FirstFirst, "fair": CopyQueue}


class Counting(HostWorker):
    """Counts what it copied."""

    total = 0

    def _copy(self, copy: Copy, places: list[Place]) -> int:
        moved = super()._copy(copy, places)
        self.total += moved
        return moved


def measure(order: type[CopyQueue], sizes: Sequence[int], *, is_burst: bool) -> tuple[list[float], list[float], float]:
    """Each load's wait in ms and in MiB, and the seconds that all took."""
    memory = torch.ones((LONG * PER_CHUNK, PAGE), dtype=torch.int8)
    caches: Any = SimpleNamespace(
        tensors=[SimpleNamespace(tensor=memory, page_size_bytes=PAGE)],
        group_data_refs=[[SimpleNamespace(tensor_idx=0, page_size_bytes=PAGE)]],
    )
    slab = SharedSlab(f"load-wait-{uuid.uuid4().hex[:8]}", SLOTS, PAGE * PER_CHUNK)
    slab.unlink()
    worker = Counting(caches, slab, PER_CHUNK, 0)
    worker._queue = order(worker._queue.piece)
    submitted: list[tuple[float, int]] = []
    waits, passed = [0.0] * len(sizes), [0.0] * len(sizes)

    def submit() -> None:
        chunks, job_id = sizes[len(submitted)], len(submitted)
        blocks = list(range(chunks * PER_CHUNK))
        slots = [(job_id + n) % SLOTS for n in range(chunks)]
        submitted.append((time.perf_counter(), worker.total))
        worker.submit_load(
            job_id, CPULoadStoreSpec(slots), GPULoadStoreSpec(blocks, group_sizes=[len(blocks)], block_indices=[0])
        )

    began, ended = time.perf_counter(), 0
    for _ in range(QUEUED):
        submit()
    while ended < len(sizes):
        for result in worker.get_finished():
            at, total = submitted[result.job_id]
            waits[result.job_id] = 1e3 * (time.perf_counter() - at)
            passed[result.job_id] = (worker.total - total) / MIB
            ended += 1
            if not is_burst and len(submitted) < len(sizes):
                submit()
        if is_burst and ended == len(submitted) < len(sizes):
            for _ in range(QUEUED):
                submit()
        time.sleep(0.0005)
    took = time.perf_counter() - began
    worker.shutdown()
    return waits, passed, took


def figures(waits: Sequence[float], passed: Sequence[float]) -> dict[str, float]:
    """Percentiles."""
    return {
        f"p{q}_{unit}": round(quantile(values, q / 100), 1)
        for unit, values in (("ms", waits), ("mib", passed))
        for q in (50, 99, 100)
    }


def loads(kind: str, count: int, seed: int) -> list[int]:
    """Chunks of each load."""
    dice = random.Random(seed)
    return [LONG if kind == "burst" and dice.random() < 0.1 else dice.randint(1, 4) for _ in range(count)]


def main(words: Sequence[str]) -> int:
    options = arguments(__doc__, words, loads=640, rounds=3)
    result: dict[str, Any] = {}
    for kind in ("stream", "burst"):
        found: dict[str, tuple[list[float], list[float], list[float]]] = {name: ([], [], []) for name in ORDERS}
        moved = 0
        for turn in range(options.rounds):
            sizes = loads(kind, options.loads, turn)
            moved += sum(sizes) * PER_CHUNK * PAGE
            for name, order in ORDERS.items():
                in_ms, in_mib, took = measure(order, sizes, is_burst=kind == "burst")
                found[name][0].extend(in_ms)
                found[name][1].extend(in_mib)
                found[name][2].append(took)
        for name, (waits, passed, seconds) in found.items():
            result[f"{kind} {name}"] = figures(waits, passed) | {"gb_per_s": round(moved / sum(seconds) / 1e9, 2)}
            print(kind, name, json.dumps(result[f"{kind} {name}"]))
    is_met = (
        result["stream fair"]["p99_mib"] <= result["stream last_first"]["p99_mib"] / 4
        and result["burst fair"]["p50_mib"] <= result["burst first_first"]["p50_mib"] / 2
        and result["stream fair"]["p100_mib"] <= 1.1 * result["stream first_first"]["p100_mib"]
        and result["burst fair"]["p100_mib"] <= 1.1 * result["burst first_first"]["p100_mib"]
    )
    print("the bounds are met" if is_met else "the bounds are NOT met")
    if options.output is not None:
        settings = {"queued": QUEUED, "loads": options.loads * options.rounds, "chunk_bytes": PER_CHUNK * PAGE}
        command = f"python -m benchmarks.load_wait {' '.join(words)}"
        write_results(options.output, "load-wait", command=command, settings=settings, is_met=is_met, figures=result)
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
