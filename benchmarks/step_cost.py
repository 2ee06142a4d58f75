"""What hotspan costs on the engine core's thread, per step: CPU time in the connector's calls.

usage: python -m benchmarks.step_cost [--steps 600] [--output benchmarks/results/step-cost.json]

vLLM's engine core and scheduler run with hotspan's connector and a model runner that computes nothing
(tests/engine/harness). The RAM tier is full. Two phases are measured:

decode:    every request computes one token per step; a chunk is stored whenever a request completes one.
turnover:  besides, one request per step ends, and one arrives whose text is half in RAM.

Beside them: what one chunk costs that a full disk stores, plain and compressed.

"hotspan" is our own part, "vllm" that of vLLM's offloading connector, which ours extends. Both are CPU time of the
scheduler's thread. Each point runs in a process of its own. Bound: the mean of hotspan in "decode" is at most 0.3 ms.
"""

import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.harness import arguments
from kit.environment import prepare_environment

prepare_environment()

from vllm.v1.core.sched.output import SchedulerOutput  # noqa: E402
from vllm.v1.kv_offload.base import OffloadingManager  # noqa: E402

from hotspan.bench.machine import write_results  # noqa: E402
from hotspan.core import shared_memory  # noqa: E402
from hotspan.core.frame import HEADER_BYTES  # noqa: E402
from hotspan.core.terms import Terms  # noqa: E402
from hotspan.core.types import GIB, PAGE_BYTES, Chunk, ChunkKey  # noqa: E402
from hotspan.demo.model import make_demo_model  # noqa: E402
from hotspan.testing.chunks import aligned, content, key_of  # noqa: E402
from hotspan.testing.clock import SimulatedClock  # noqa: E402
from hotspan.tiers import slab  # noqa: E402
from hotspan.tiers.disk import DiskOptions, DiskTier  # noqa: E402
from hotspan.tiers.packer import Packer  # noqa: E402
from kit.simulated.inline import InlineQueues  # noqa: E402
from tests.engine.harness.core import CHUNK, Core, core  # noqa: E402
from tests.engine.harness.runner import KnownBytes  # noqa: E402

BOUND_MS = 0.3
BLOCK = 16
SLOT_BYTES = 64 * CHUNK
"""Of a chunk in the harness: 64 bytes a token."""

_SETTLE_STEPS, _ANSWER = 100, 8 * CHUNK

CALLS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "get_external_cache_hit_sources",
    "get_loaded_kv_cache_group_ids",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
    "get_kv_connector_stats",
    "take_events",
    "has_pending_push_work",
)


@dataclass(frozen=True, slots=True)
class Point:
    """What is measured: running requests, tokens of each, chunks in RAM, and whether a disk tier is below."""

    requests: int = 256
    tokens: int = 32_768
    chunks: int = 1_000_000
    disk: bool = True


POINTS = (
    Point(),
    Point(requests=64),
    Point(tokens=8_192),
    Point(chunks=100_000),
    Point(disk=False),
)


class NoModel(KnownBytes):
    """Computes nothing: every request that has its text gets a token."""

    def _compute(self, output: SchedulerOutput) -> dict[str, list[int]]:
        for new in output.scheduled_new_reqs:
            self._rows[new.req_id] = len(new.prompt_token_ids or ())  # type: ignore[assignment]
        for name in output.finished_req_ids:
            self._rows.pop(name, None)
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        return {
            name: [7] if starts[name] + count >= self._rows[name] else []  # type: ignore[operator]
            for name, count in output.num_scheduled_tokens.items()
        }


class Meter:
    """CPU time of this thread by section; a call within another is counted once, as its own section.

    What reading the clock takes (a system call: 1 to 3 us) is not counted.
    """

    def __init__(self) -> None:
        self._clock_ns = clock_ns()
        self.calls: defaultdict[str, int] = defaultdict(int)
        self.sections: defaultdict[str, int] = defaultdict(int)
        self._stack: list[tuple[str, str]] = []
        self._since_ns = 0

    def watch(self, target: Any, name: str, section: str) -> None:
        """Count a method of `target` as `section`."""
        method = getattr(target, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            self._enter(section, name)
            try:
                return method(*arguments, **options)
            finally:
                self._leave()

        setattr(target, name, timed)

    def take(self) -> tuple[dict[str, float], dict[str, float]]:
        """Milliseconds by section and, of hotspan, by call; both begin anew."""
        taken = tuple({name: ns / 1e6 for name, ns in each.items()} for each in (self.sections, self.calls))
        self.sections.clear()
        self.calls.clear()
        return taken  # type: ignore[return-value]

    def _enter(self, section: str, name: str) -> None:
        self._charge()
        self._stack.append((section, name if not self._stack else self._stack[0][1]))

    def _leave(self) -> None:
        self._charge()
        self._stack.pop()

    def _charge(self) -> None:
        now_ns = time.thread_time_ns()
        if self._stack:
            section, call = self._stack[-1]
            spent_ns = now_ns - self._since_ns - self._clock_ns
            self.sections[section] += spent_ns
            if section == "hotspan":
                self.calls[call] += spent_ns
        self._since_ns = now_ns


def clock_ns() -> int:
    """What reading the thread's CPU time takes of it: the median."""
    times = [time.thread_time_ns() for _ in range(10_001)]
    return int(statistics.median(later - earlier for earlier, later in itertools.pairwise(times)))


def metered(engine: Core) -> Meter:
    """A meter on all that the scheduler calls in the connector."""
    meter = Meter()
    scheduler = engine.connector.connector_scheduler
    for name in CALLS:
        meter.watch(engine.connector, name, "hotspan")
        if hasattr(scheduler, name):
            meter.watch(scheduler, name, "vllm")
    for name in vars(OffloadingManager):
        if not name.startswith("_"):
            meter.watch(engine.manager, name, "hotspan")
    return meter


class Load:
    """Requests of an engine, all running."""

    def __init__(self, engine: Core, point: Point) -> None:
        self.engine = engine
        self.point = point
        self._chance = np.random.default_rng(1)
        self._texts: list[list[int]] = []
        self._started = 0

    def text(self, tokens: int) -> list[int]:
        """`tokens` tokens that nobody has asked before."""
        return self._chance.integers(3, 700, tokens).tolist()  # type: ignore[no-any-return]

    def start(self, known: int = 0) -> None:
        """One more request; the first `known` tokens are those of an earlier one."""
        spread = self._started % CHUNK  # so that they do not all complete a chunk in the same step
        prompt = self._texts[self._started % len(self._texts)][:known] if known else []
        prompt = prompt + self.text(self.point.tokens - spread - len(prompt))
        self._texts.append(prompt)
        self.engine.start(f"r{self._started}", prompt, tokens=_ANSWER)
        self._started += 1

    def fill(self) -> None:
        """Run all requests until each decodes."""
        for _ in range(self.point.requests):
            self.start()
        self.engine.until(lambda: len(self.engine.answers) == self.point.requests, self.engine.step)
        for _ in range(_SETTLE_STEPS):  # until what was stored last has reached the disk
            self.engine.step()
            time.sleep(0.002)


def fill_ram(engine: Core, chunks: int) -> None:
    """Store texts of 128 chunks until RAM is full."""
    left = chunks - len(engine.cache.ram.entries)
    for _ in range(0, left, 128):
        parent, text = None, []
        for index in range(128):
            text.append(Chunk(ChunkKey(os.urandom(32)), parent, index))
            parent = text[-1].key
        engine.cache.end_store([placement.chunk for placement in engine.cache.begin_store(text)])


def measured(load: Load, meter: Meter, steps: int, between: Callable[[], None]) -> dict[str, Any]:
    """Milliseconds per step, of each section; the mean of each call."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    calls: defaultdict[str, float] = defaultdict(float)
    meter.take()
    for _ in range(steps):
        between()
        load.engine.step()
        sections, by_call = meter.take()
        for name in ("hotspan", "vllm"):
            found[name].append(sections.get(name, 0.0))
        for name, spent_ms in by_call.items():
            calls[name] += spent_ms / steps
    figures = {name: _figures(values) for name, values in found.items()}
    return figures | {"calls_mean_ms": {name: round(spent, 4) for name, spent in sorted(calls.items())}}


def _figures(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "mean_ms": round(statistics.fmean(ordered), 4),
        "median_ms": round(statistics.median(ordered), 4),
        "p99_ms": round(ordered[int(0.99 * len(ordered))], 4),
        "max_ms": round(ordered[-1], 4),
    }


@contextmanager
def running(point: Point, scratch: Path) -> Iterator[tuple[Load, Meter]]:
    """An engine with full RAM whose requests all decode."""
    model = make_demo_model(scratch / "tiny", "tiny").path
    with ExitStack() as stack:
        # The slab's bytes are not what is measured: its pages are made when they are written.
        stack.enter_context(patch.object(shared_memory, "populate", lambda *pages: None))
        stack.enter_context(patch.object(slab, "check_room", lambda size, directory=None: None))
        engine = stack.enter_context(
            core(
                model,
                runner=NoModel,
                ram_gib=point.chunks * SLOT_BYTES / GIB,
                disk=scratch / "disk" if point.disk else None,
                cache={"patience_s": None, "drain_s": 0.0},
                max_model_len=2 * point.tokens,
                hf_overrides={"max_position_embeddings": 2 * point.tokens},
                block_size=BLOCK,
                num_gpu_blocks_override=point.requests * (point.tokens + _ANSWER) // BLOCK + 64,
                max_num_seqs=point.requests,
                max_num_batched_tokens=8 * point.tokens,
            )
        )
        gc.freeze()  # as vLLM does when it has started
        load = Load(engine, point)
        fill_ram(engine, point.chunks)
        load.fill()
        yield load, metered(engine)


def full_collection() -> dict[str, float]:
    """What Python's garbage collector visits of all that came since the engine started, and how long that takes it.

    The requests' tokens are a part of it that vLLM has without hotspan, too.
    """
    objects, began_ns = len(gc.get_objects()), time.thread_time_ns()
    gc.collect()
    return {"objects": objects, "ms": round((time.thread_time_ns() - began_ns) / 1e6, 1)}


def measure(point: Point, steps: int) -> dict[str, Any]:
    """Both phases."""
    with tempfile.TemporaryDirectory(prefix="hotspan-step-") as scratch, running(point, Path(scratch)) as found:
        load, meter = found
        decode = measured(load, meter, steps, lambda: None)
        oldest = iter(range(1 << 30))

        def turn() -> None:
            load.engine.core.abort_requests([f"r{next(oldest)}"])
            load.start(known=load.point.tokens // 2)

        turnover = measured(load, meter, min(steps, load.point.requests // 2), turn)
        full = len(load.engine.cache.ram.entries)
        collector = full_collection()
        busy = round(os.getloadavg()[0], 1)  # who else runs on the machine slows memory down, and with it each step
        return (
            asdict(point)
            | {"chunks_held": full, "load_average": busy, "decode": decode, "turnover": turnover}
            | {"full_collection": collector}
        )


def stored_chunk(scratch: Path, *, is_compressed: bool) -> dict[str, float]:
    """CPU time of the scheduler's thread for one chunk that a full disk stores; that of I/O threads is not counted.

    Compressed, a chunk of 16 slots keeps 9 of them; plain, it lies in one.
    """
    chunk_bytes, clock, queues = 15 * PAGE_BYTES, SimulatedClock(), InlineQueues(seed=1)
    options = DiskOptions(scratch, 300 * (chunk_bytes + HEADER_BYTES), allow_direct=False, queue=queues.queue)
    if is_compressed:
        options = replace(options, packer=Packer("always", 4, clock), slot_bytes=PAGE_BYTES)
    tier = DiskTier(options, bytes(32), chunk_bytes, clock)
    payload, spent_ms = aligned(chunk_bytes, content(key_of("any"), chunk_bytes)), list[float]()
    for number in range(1500):
        chunk, spent_ns, is_stored = Chunk(key_of(f"{number}"), None), 0, False
        while not is_stored:  # a full disk gives a chunk's slots back before they are another's
            began_ns = time.thread_time_ns()
            is_stored = tier.submit_store(chunk, Terms(), payload)
            spent_ns += time.thread_time_ns() - began_ns
            queues.run()
            began_ns = time.thread_time_ns()
            tier.finished()
            spent_ns += time.thread_time_ns() - began_ns
            queues.run()
        spent_ms.append(spent_ns / 1e6)
    tier.close(5.0)
    return _figures(spent_ms[-500:])


def main() -> int:
    options = arguments(__doc__, steps=600, point=int)
    if options.point is not None:
        print(json.dumps(measure(POINTS[options.point], options.steps)))
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        stored = {
            name: stored_chunk(Path(scratch) / name, is_compressed=name == "compressed")
            for name in ("plain", "compressed")
        }
    print(json.dumps(stored), flush=True)
    found = []
    for number in range(len(POINTS)):
        command = [sys.executable, "-m", "benchmarks.step_cost", "--point", str(number), "--steps", str(options.steps)]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        found.append(json.loads(output.splitlines()[-1]))
        print(json.dumps(found[-1]), flush=True)
    passed = found[0]["decode"]["hotspan"]["mean_ms"] <= BOUND_MS
    print(f"at most {BOUND_MS} ms per step: {'yes' if passed else 'NO'}")
    if options.output is not None:
        figures = {"bound_ms": BOUND_MS, "steps": options.steps, "points": found, "stored_chunk": stored}
        write_results(options.output, "step-cost", command="python -m benchmarks.step_cost", **figures)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
