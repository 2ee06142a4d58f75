"""The search for an order of CUDA copies in which a byte is wrong: random worlds on a simulated runtime (kit/cuda).

usage: python -m tests.engine.cuda.orders [--worlds N] [--first SEED] [--copies N] [--limit-s S] [--output FILE]
"""

from __future__ import annotations

import logging
import math
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kit.environment import prepare_environment
from kit.proof import Findings, Proof, print_proof, write_proof

if TYPE_CHECKING:
    from .faults import Fault

NAME = "cuda-orders"
CLAIM = "in no order of copies that CUDA allows is a byte of KV another's, an access unordered, or a failed copy a hit"
_EVERY_S = 10.0
_SEEDS = 24
"""Worlds in which a planted fault has to show."""


def search(model: Path, first: int, worlds: int, copies: int = 0, limit_s: float = math.inf) -> Proof:
    """Worlds from one seed on: as many as asked for, and then until so many copies were made.

    limit_s: after which no world begins.
    """
    from .plan import Totals, drawn
    from .world import run

    totals, findings = Totals(), Findings()
    began_s = said_s = time.monotonic()
    seed = first
    while (seed < first + worlds or totals.copies < copies) and time.monotonic() - began_s < limit_s:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            try:
                done, found = run(model, drawn(seed), Path(folder))
            except Exception as error:
                findings.add(seed, f"{type(error).__name__}: {error}")
            else:
                totals.add(done)
                for what in found:
                    findings.add(seed, what)
        seed += 1
        if time.monotonic() - said_s > _EVERY_S:
            said_s = time.monotonic()
            typer.echo(
                f"{NAME}: {seed - first:,} worlds, {totals.copies:,} copies, {findings.count} failures", err=True
            )
    figures: dict[str, Any] = asdict(totals) | {
        "failures": findings.count,
        "seconds": round(time.monotonic() - began_s),
    }
    is_passed = not findings.count and not totals.failures and totals.cached > 0
    return Proof(NAME, CLAIM, figures, is_passed, tuple(findings.kept))


def shows(model: Path, fault: Fault) -> bool:
    """Whether a planted fault is found within a few small worlds in which it can show; that of `found_by` is first."""
    from .plan import drawn
    from .world import run

    plan: dict[str, Any] = {"actions": 40, "fails": False, "lives": 1, "ranks": 1, "depth": 1, "mistakes": 0.0}
    plan |= dict(fault.plan)
    kind = plan.pop("kind", None)
    with fault.planted():
        for seed in (fault.found_by, *range(_SEEDS)):
            with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
                try:
                    _, found = run(model, drawn(seed, kind, **plan), Path(folder))
                except (AssertionError, KeyError):  # the cache's own books, or a part of a slot that is another's
                    return True
            if found:
                return True
    return False


def main(
    worlds: Annotated[int, typer.Option(min=1, help="Number of worlds.")] = 2000,
    first: Annotated[int, typer.Option(help="Seed of the first; each has the next one.")] = 0,
    copies: Annotated[int, typer.Option(help="Go on until so many copies were made.")] = 0,
    limit_s: Annotated[float, typer.Option(help="No world begins after so many seconds.")] = math.inf,
    output: Annotated[Path | None, typer.Option(help="Write the result to this JSON file.")] = None,
) -> None:
    """Search. Exit status 1 means that something is wrong: each world is named by its seed."""
    prepare_environment()
    from hotspan.demo.model import make_demo_model

    logging.disable(logging.CRITICAL)  # devices fail by design, and vLLM's log tells of each
    with tempfile.TemporaryDirectory() as folder:
        proof = search(make_demo_model(Path(folder) / "tiny", "tiny").path, first, worlds, copies, limit_s)
    print_proof(proof, 0)
    command = f"python -m tests.engine.cuda.orders --worlds {worlds} --first {first} --copies {copies}"
    command += f" --limit-s {limit_s:g}" if limit_s < math.inf else ""
    for failure in proof.failures:
        typer.echo(f"again: python -m tests.engine.cuda.orders --worlds 1 --first {failure.case}", err=True)
    if output is not None:
        write_proof(output, proof, {"first": first, "worlds": worlds, "copies": copies}, command)
        typer.echo(f"written: {output}")
    if not proof.passed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
