"""What the router's index and its choice cost: time, and memory, with up to a million pieces of text known.

usage: python -m benchmarks.router_index [--entries 10000 100000 1000000] [--repetitions 7] [--output FILE]

Eight replicas hold prompts of 430 pieces (220 KB), each at two of them, that all begin with the same 20 pieces. Keys
are made anew for every question, as a request's are, so that no object is met twice. Memory is the growth of the
process, in a process of its own for each size. The choice is one `choose` with `dispatch`, first byte and end, of a
prompt of one piece (600 B) and of one of 430.
"""

import gc
import random
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context

import psutil

from benchmarks.harness import arguments
from hotspan.bench.machine import write_results
from hotspan.core.types import MIB
from hotspan.router.fleet import Fleet
from hotspan.router.index import PrefixIndex
from hotspan.router.types import Ask, Medium

REPLICAS = 8
PIECES = 430
COMMON = 20
GOALS_US = {"match, 430 pieces": 300.0, "choice, 1 piece": 60.0, "choice, 430 pieces": 400.0}


@dataclass(frozen=True, slots=True)
class Figure:
    """One thing, in microseconds of CPU time: the median of the rounds. goal_us: what it may take; None: only shown."""

    name: str
    entries: int
    rounds_us: list[float]
    goal_us: float | None

    @property
    def median_us(self) -> float:
        return statistics.median(self.rounds_us)


@dataclass(frozen=True, slots=True)
class Memory:
    """bytes_grown: of the process. bytes_told: by the index. largest_add_ms: CPU time of the longest `add`."""

    entries: int
    bytes_grown: int
    bytes_told: int
    largest_add_ms: float
    evicted: int


def prompts(entries: int) -> list[int]:
    """The seeds of as many prompts as it takes."""
    return list(range(entries // (PIECES - COMMON)))


def keys_of(seed: int) -> list[int]:
    """A prompt's; made anew each time."""
    common, own = random.Random(-1), random.Random(seed)
    return [common.getrandbits(64) for _ in range(COMMON)] + [own.getrandbits(64) for _ in range(PIECES - COMMON)]


def rounds_us(
    job: Callable[[list[int]], object], count: int, repetitions: int, pieces: int, entries: int
) -> list[float]:
    """Of one call, with the keys of some prompt that is known."""
    rng, seeds, taken = random.Random(5), prompts(entries), []
    for _ in range(repetitions):
        asked = [keys_of(rng.choice(seeds))[:pieces] for _ in range(count)]
        began_s = time.process_time()
        for keys in asked:
            job(keys)
        taken.append((time.process_time() - began_s) / count * 1e6)
    return taken


def measure(entries: int, repetitions: int) -> tuple[Memory, list[Figure]]:
    """With so many pieces known."""
    process = psutil.Process()
    gc.collect()
    before = process.memory_info().rss
    fleet = Fleet(index=PrefixIndex(256 * MIB), rng=random.Random(0))
    for n in range(REPLICAS):
        fleet.add(f"http://replica-{n}:8000", exact=True)
    longest_s = 0.0
    for seed in prompts(entries):
        keys = keys_of(seed)
        for replica in {seed % REPLICAS, seed // REPLICAS % REPLICAS}:
            began_s = time.process_time()
            fleet.index.add(replica, Medium.GPU, keys)
            longest_s = max(longest_s, time.process_time() - began_s)
    gc.collect()
    index = fleet.index
    grown = process.memory_info().rss - before
    memory = Memory(len(index), grown, index.bytes, longest_s * 1000, index.evicted)

    def choose(keys: list[int]) -> None:
        ask = Ask(keys, 128 * len(keys), 128.0, 100, b"s" * 16)
        ticket = fleet.dispatch(ask, fleet.choose(ask))
        ticket.first_byte()
        ticket.end()

    figures = []
    jobs: list[tuple[str, Callable[[list[int]], object], int]] = [
        ("match, 430 pieces", index.match, PIECES),
        ("match, 1 piece", index.match, 1),
        ("choice, 430 pieces", choose, PIECES),
        ("choice, 1 piece", choose, 1),
    ]
    for name, job, pieces in jobs:
        taken = rounds_us(job, 300, repetitions, pieces, entries)
        figures.append(Figure(name, len(index), taken, GOALS_US.get(name)))
    index.check()
    return memory, figures


def main() -> int:
    options = arguments(__doc__, entries=[10_000, 100_000, 1_000_000], repetitions=7)
    memories: list[Memory] = []
    figures: list[Figure] = []
    for entries in options.entries:
        with ProcessPoolExecutor(1, get_context("spawn")) as alone:
            memory, measured = alone.submit(measure, entries, options.repetitions).result()
        memories.append(memory)
        figures += measured
        mib = memory.bytes_grown / MIB
        print(
            f"{memory.entries:9,} pieces: {mib:6.1f} MiB ({memory.bytes_grown / memory.entries:.0f} bytes each, "
            f"told {memory.bytes_told / MIB:.1f} MiB), longest add {memory.largest_add_ms:.1f} ms"
        )
        for figure in measured:
            goal = "" if figure.goal_us is None else f"  of at most {figure.goal_us:.0f}"
            print(f"          {figure.name:20} {figure.median_us:7.1f} us{goal}", flush=True)
    is_met = all(figure.goal_us is None or figure.median_us <= figure.goal_us for figure in figures)
    print(f"all within their goals: {'yes' if is_met else 'NO'}")
    if options.output is not None:
        write_results(
            *(options.output, "router-index", "python -m benchmarks.router_index"),
            memory=[asdict(memory) for memory in memories],
            figures=[asdict(figure) | {"median_us": figure.median_us} for figure in figures],
        )
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
