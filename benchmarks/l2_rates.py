"""Chunks between memory and an L2, timed against the same bytes without hotspan."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotspan.bench.machine import write_results
from hotspan.bench.storage import Figure
from hotspan.core.frame import HEADER_BYTES
from hotspan.core.types import MIB, PAGE_BYTES, round_up

GOAL = 0.6
"""Of the limit, for one connection."""


@dataclass(frozen=True, slots=True)
class Settings:
    """On how much. connections: at once."""

    chunks: int
    chunk_mib: float
    repetitions: int
    connections: int = 1

    @property
    def payload_bytes(self) -> int:
        return round_up(int(self.chunk_mib * MIB), PAGE_BYTES)

    @property
    def frame_bytes(self) -> int:
        return HEADER_BYTES + self.payload_bytes


def print_rates(figures: Sequence[Figure]) -> None:
    for figure in figures:
        print(f"{figure.name:62} {figure.rate:5.2f} of {figure.limit:5.2f} GB/s: {figure.ratio:.2f}", flush=True)


def finish(kind: str, settings: Any, figures: Sequence[Figure], output: Path | None) -> int:
    """Say whether the goals are met, write the figures, and return the exit status."""
    is_met = all(figure.goal is None or (figure.ratio or 0) >= figure.goal for figure in figures)
    print(f"all at least {GOAL}: {'yes' if is_met else 'NO'}")
    if output is not None:
        program = f"python -m benchmarks.{kind.replace('-', '_')}"
        write_results(output, kind, program, settings=settings, figures=[figure.to_json() for figure in figures])
    return 0 if is_met else 1
