"""What a proof hands back, how it is shown, and how it is written down."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hotspan.bench.machine import write_results

MAX_FAILURES = 10
"""How many failures are kept with their words; all are counted."""

Progress = Callable[[int, int], None]
"""Told how much of how much is done."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong in one case. The same seed with `--only CASE` runs that case again, alone."""

    case: int
    what: str


@dataclass(frozen=True, slots=True)
class Proof:
    """How a proof ended.

    claim:   what it tried to break. figures: what it did and found, of JSON types.
    """

    name: str
    claim: str
    figures: dict[str, Any]
    passed: bool
    failures: tuple[Failure, ...] = ()


class Findings:
    """Failures as they come: the first few are kept, all are counted."""

    def __init__(self) -> None:
        self.count = 0
        self.kept: list[Failure] = []

    def add(self, case: int, what: str) -> None:
        """Something went wrong in a case."""
        self.count += 1
        if len(self.kept) < MAX_FAILURES:
            self.kept.append(Failure(case, what))


def rng_of(name: str, seed: int, case: int) -> random.Random:
    """The randomness of one case of a proof."""
    return random.Random(f"hotspan-{name}:{seed}:{case}")


def print_proof(proof: Proof, seed: int, console: Console | None = None) -> None:
    """A table of the figures, whether it passed, and how to run again what did not."""
    console = console or Console()
    table = Table(title=f"{proof.name}: {proof.claim}")
    table.add_column("what")
    table.add_column("figure", justify="right")
    for name, value in proof.figures.items():
        table.add_row(name.replace("_", " "), f"{value:,.4g}" if isinstance(value, float) else f"{value}")
    console.print(table)
    console.print("passed" if proof.passed else "NOT PASSED", style="green" if proof.passed else "bold red")
    for failure in proof.failures:
        again = f"python -m proofs {proof.name} --seed {seed} --only {failure.case}"
        console.print(f"  {failure.what}\n    again: {again}", style="red", soft_wrap=True, markup=False)


def write_proof(path: Path, proof: Proof, settings: Mapping[str, Any], command: str | None = None) -> None:
    """The proof as JSON, with its settings, the machine and the command (None: the one that runs)."""
    write_results(
        *(path, "proof", "python -m proofs"),
        command=command or "",
        name=proof.name,
        claim=proof.claim,
        passed=proof.passed,
        figures=proof.figures,
        failures=[{"case": failure.case, "what": failure.what} for failure in proof.failures],
        settings=settings,
    )
