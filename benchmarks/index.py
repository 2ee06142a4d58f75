"""What the index costs: opening it again, looking a text up, naming its chunks, finding what an invalidation takes.

usage: python -m benchmarks.index [--chunks 100000] [--repetitions 5] [--output FILE]
"""

import statistics
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from hotspan.bench.machine import write_results
from hotspan.cache.entry import Reader
from hotspan.cache.tiered import TieredCache
from hotspan.core.frame import HEADER_BYTES
from hotspan.core.namespace import ChunkKeyer
from hotspan.core.progress import Progress
from hotspan.core.terms import Scope, Terms
from hotspan.core.types import PAGE_BYTES, Chunk, ChunkKey, Lookup
from hotspan.tiers.directory import open_directory
from hotspan.tiers.disk import DiskOptions, DiskTier
from hotspan.tiers.record import Record
from hotspan.tiers.slab import SharedSlab

NAMESPACE = bytes(32)
TEXT = 400
"""Chunks of a text: 100k tokens of 256."""


@dataclass(frozen=True, slots=True)
class Duration:
    """One duration, its rounds in seconds, and the most it may be."""

    name: str
    rounds: list[float]
    goal_s: float | None = None

    @property
    def median_s(self) -> float:
        return statistics.median(self.rounds)

    @property
    def is_met(self) -> bool:
        return self.goal_s is None or self.median_s <= self.goal_s


@dataclass(frozen=True, slots=True)
class IndexBench:
    """What to measure: an index of so many chunks."""

    chunks: int = 100_000
    repetitions: int = 5

    def run(self) -> list[Duration]:
        """All durations."""
        durations: list[Duration] = []
        with (
            Progress("measuring", 3, "parts") as progress,
            tempfile.TemporaryDirectory(prefix="hotspan-index-") as scratch,
        ):
            parts: dict[str, Callable[[], list[Duration]]] = {
                f"a directory of {self.chunks:,} chunks": lambda: self._disk(Path(scratch) / "disk"),
                f"RAM of {self.chunks:,} chunks": self._ram,
                "names of chunks": lambda: [self._keys()],
            }
            for name, measured in parts.items():
                progress.doing(f"measuring {name}")
                durations += measured()
                progress.advance()
        return durations

    def _disk(self, path: Path) -> list[Duration]:
        """A directory full of records, opened as a server does."""
        fill(path, self.chunks)
        opened: list[float] = []
        for _ in range(self.repetitions):
            started = time.perf_counter()
            tier = open_tier(path, self.chunks)
            opened.append(time.perf_counter() - started)
            tier.close(30)
        tier = open_tier(path, self.chunks)
        keys = [key_of(n) for n in range(TEXT)]
        asked = rounds(self.repetitions, lambda: [tier.lookup(key) for key in keys])
        taken = rounds(self.repetitions, lambda: tier.invalidate([Scope(labels=frozenset({7}))], lambda done: None))
        tier.close(30)
        per = f"{self.chunks // 1000}k chunks"
        return [
            Duration(f"opening a directory of {per}", opened, 0.5 * self.chunks / 100_000),
            Duration(f"looking up {TEXT} chunks on disk", asked, 300e-6),
            Duration(f"finding what an invalidation takes, of {per} on disk", taken),
        ]

    def _ram(self) -> list[Duration]:
        """A text in RAM, looked up as the engine does; and what an invalidation costs beside many others."""
        slots = self.chunks // 2
        with SharedSlab(f"index-{uuid.uuid4().hex}", slots, PAGE_BYTES) as slab:
            cache = TieredCache(slab)
            for start in range(0, slots, TEXT):
                chunks = text_of(start, min(TEXT, slots - start))
                cache.begin_store(chunks, Reader(terms=Terms(tenant=1, labels=frozenset({start + 1}))))
                cache.end_store(chunks)
            chunks = text_of(0, TEXT)

            def look_up() -> None:
                reader = Reader()
                if any(cache.lookup(chunk, reader) is not Lookup.HIT for chunk in chunks):
                    raise RuntimeError("a chunk that was stored is not here")
                cache.release(reader)

            asked = rounds(self.repetitions, look_up)
            taken = rounds(
                self.repetitions, lambda: cache.invalidate([Scope(labels=frozenset({7}))], lambda done: None)
            )
            cache.close(1.0)
        return [
            Duration(f"looking up {TEXT} chunks in RAM, pinned and released", asked, 300e-6),
            Duration(f"finding what an invalidation takes, of {slots // 1000}k chunks in RAM", taken),
        ]

    def _keys(self) -> Duration:
        """Names of a text's chunks, from the engine's hashes."""
        hashes = [key_of(n) for n in range(TEXT)]

        def derive() -> None:
            keyer = ChunkKeyer(NAMESPACE)
            parent: ChunkKey | None = None
            for index, name in enumerate(hashes):
                key = keyer.key(name, 0)
                Chunk(key, parent, index)
                parent = key

        return Duration(f"naming the {TEXT} chunks of 100k tokens", rounds(self.repetitions, derive), 2e-3)


def rounds(repetitions: int, job: Callable[[], object]) -> list[float]:
    """Seconds of each call, after one that warms up; each round is the best of five, since the machine is shared."""
    job()
    found: list[float] = []
    for _ in range(repetitions):
        best = float("inf")
        for _ in range(5):
            started = time.perf_counter()
            job()
            best = min(best, time.perf_counter() - started)
        found.append(best)
    return found


def key_of(number: int) -> ChunkKey:
    """32 bytes that differ."""
    return ChunkKey(number.to_bytes(8, "little") * 4)


def text_of(start: int, length: int) -> list[Chunk]:
    """The chunks of one text."""
    return [Chunk(key_of(start + n), key_of(start + n - 1) if n else None, n) for n in range(length)]


def open_tier(path: Path, chunks: int) -> DiskTier:
    """The tier that a server would open."""
    slot = HEADER_BYTES + PAGE_BYTES
    return DiskTier(DiskOptions(path, chunks * slot), NAMESPACE, PAGE_BYTES)


def fill(path: Path, chunks: int) -> None:
    """A directory whose table is full; the frames are left out, since opening reads none."""
    slot = HEADER_BYTES + PAGE_BYTES
    directory = open_directory(path, slot, chunks * slot)
    for start in range(0, chunks, TEXT):
        for chunk in text_of(start, min(TEXT, chunks - start)):
            terms = Terms(tenant=1 + start % 3, labels=frozenset({start + 1, start + 2}))
            directory.table.put(start + chunk.index, Record(chunk.key, chunk.parent, NAMESPACE, PAGE_BYTES, terms))
            directory.table.write(start + chunk.index)
    directory.close()


def print_durations(durations: list[Duration]) -> None:
    """A table; red where a goal was missed."""
    table = Table(title="index, medians")
    table.add_column("what")
    for column in ("ms", "at most"):
        table.add_column(column, justify="right")
    for each in durations:
        goal = "" if each.goal_s is None else f"{each.goal_s * 1e3:g}"
        table.add_row(each.name, f"{each.median_s * 1e3:.3f}", goal, style=None if each.is_met else "red")
    Console().print(table)


def write_durations(path: Path, bench: IndexBench, durations: list[Duration]) -> None:
    """The durations as JSON, with the machine, the command and every round."""
    figures = [asdict(each) | {"median_s": each.median_s, "is_met": each.is_met} for each in durations]
    write_results(path, "index", "python -m benchmarks.index", settings=asdict(bench), figures=figures)


def main(
    chunks: Annotated[int, typer.Option(min=400, help="Chunks in the index.")] = 100_000,
    repetitions: Annotated[int, typer.Option(min=1, help="Rounds; the medians are reported.")] = 5,
    output: Annotated[Path | None, typer.Option(help="Write the figures and the machine's facts as JSON.")] = None,
) -> None:
    """Measure the index: opening it again, looking a text up, naming its chunks, invalidating."""
    bench = IndexBench(chunks, repetitions)
    durations = bench.run()
    print_durations(durations)
    if output is not None:
        write_durations(output, bench, durations)
        print(f"written: {output}")


if __name__ == "__main__":
    typer.run(main)
