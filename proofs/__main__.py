"""Run a proof: try to break one promise of the cache.

usage: python -m proofs NAME [--seed N] [--only CASE] [options of the proof] [--output FILE]
"""

import contextlib
import dataclasses
import importlib
import logging
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from hotspan.cli.output import explained
from hotspan.core.errors import ConfigError
from kit.proof import print_proof, write_proof

NAMES = (
    "kill",
    "power",
    "flip",
    "fault",
    "model",
    "simulate",
    "tiers",
    "replicas",
    "l2",
    "soak",
    "fuzz",
    "compression",
    "load",
    "bad_places",
)


def main(
    name: Annotated[str, typer.Argument(help=f"Proof to run: {', '.join(NAMES)}.")],
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    only: Annotated[int | None, typer.Option(help="Number of the only case to run. Default: all cases.")] = None,
    cycles: Annotated[int | None, typer.Option(min=1, help="kill: number of times that the process is killed.")] = None,
    images: Annotated[int | None, typer.Option(min=1, help="power: number of power losses.")] = None,
    flips: Annotated[int | None, typer.Option(min=1, help="flip, l2: number of flipped bits.")] = None,
    points: Annotated[int | None, typer.Option(min=1, help="load: number of set-ups.")] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="load: requests at each.")] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="model: number of calls. simulate, tiers, replicas, l2: steps of each."),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="simulate, tiers, replicas: number of simulations. bad_places: of disks.")
    ] = None,
    every: Annotated[int | None, typer.Option(min=1, help="fault, l2: N runs every Nth fault only.")] = None,
    cases: Annotated[int | None, typer.Option(min=1, help="fuzz, compression: number of inputs.")] = None,
    hours: Annotated[
        float | None, typer.Option(help="soak, l2: duration, in hours. bad_places: simulated hours.")
    ] = None,
    duty: Annotated[float | None, typer.Option(help="soak: fraction of one core to use.")] = None,
    directory: Annotated[Path | None, typer.Option(help="kill, soak: directory on a real disk for the tier.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write the result to this JSON file.")] = None,
) -> None:
    """Run one proof. Exit status 1 means that it failed: the case and the command that repeats it are shown."""
    sizes: dict[str, Any] = {
        "cycles": cycles,
        "images": images,
        "flips": flips,
        "points": points,
        "requests": requests,
        "steps": steps,
        "seeds": seeds,
        "every": every,
        "cases": cases,
        "hours": hours,
        "duty": duty,
        "directory": directory,
        "only": only,
    }
    with explained(), _quiet():
        options, run = _proof(name, {"seed": seed} | {key: value for key, value in sizes.items() if value is not None})
        proof = run(options, _Lines(name))
    print_proof(proof, seed)
    if output is not None:
        write_proof(output, proof, dataclasses.asdict(options))
        typer.echo(f"written: {output}")
    if not proof.passed:
        raise typer.Exit(1)


def _proof(name: str, given: dict[str, Any]) -> tuple[Any, Any]:
    """A proof's options and its `run`. Raises: ConfigError for a name or an option that does not exist."""
    if name not in NAMES:
        raise ConfigError(f"there is no proof {name!r}: it may be {', '.join(NAMES)}")
    module = importlib.import_module(f"proofs.{name}")
    known = {field.name for field in dataclasses.fields(module.Options)}
    if foreign := given.keys() - known:
        raise ConfigError(f"the proof {name} has no --{min(foreign)}: it takes {', '.join(sorted(known))}")
    return module.Options(**given), module.run


class _Lines:
    """A line on stderr now and then."""

    def __init__(self, name: str, every_s: float = 10.0) -> None:
        self._name, self._every_s = name, every_s
        self._started_s = self._said_s = time.monotonic()

    def __call__(self, done: int, of: int) -> None:
        now = time.monotonic()
        if now - self._said_s >= self._every_s:
            self._said_s = now
            typer.echo(f"{self._name}: {done:,} of {of:,} after {now - self._started_s:.0f} s", err=True)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No warnings meanwhile: faults by the thousand are what it is about."""
    logger = logging.getLogger("hotspan")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


if __name__ == "__main__":
    if "PYTHONHASHSEED" not in os.environ:  # orders of sets are part of a case: it has to be the same in each process
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | {"PYTHONHASHSEED": "0"})
    typer.run(main)
