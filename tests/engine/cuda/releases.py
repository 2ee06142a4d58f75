"""The search with other releases of vLLM than the one in .venv: their Python sources over the simulated runtime.

usage: python -m tests.engine.cuda.releases [--release 0.33.0 ...] [--worlds 4] [--first 0] [--output FILE]

vLLM's transfer worker, scheduler and engine core need no compiled code there. Each release has a process of its own,
which finds the release's sources before the installed vLLM (`python -m tests.engine.vllm_range sources` fetches them).
It runs worlds, and then plants each of `PLANTED` until one world shows it. A line of JSON tells the result of each, and
the file has all of them.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from hotspan.engine.contract import SEARCHED
from hotspan.engine.contract import release as numbers_of
from kit.proof import Failure, Proof, write_proof

from ..vllm_range import RELEASES, SOURCES

CLAIM = "the search over the simulated CUDA runtime passes with the Python sources of each release that hotspan takes"
PLANTED = (
    "the end of a copy is recorded on another stream",
    "a copy is told as finished before it is",
    "stores do not wait for the forward pass",
    "a slot is free when its load begins",
    "a rank's report is taken for all ranks'",
)
"""Faults of faults.py that a few worlds show in every release."""

_LIMIT_S = 3600.0


def searched(release: str, worlds: int, first: int) -> dict[str, Any]:
    """What the search found with a release's sources, from a process of its own. An engine of a release that has not
    passed does not start on GPUs.
    """
    if numbers_of(release) not in SEARCHED:
        return {"release": release, "refused": True}
    with tempfile.TemporaryDirectory() as folder:
        information = Path(folder) / f"vllm-{release}.dist-info"
        information.mkdir()
        # The version of the CPU build, by which vLLM knows its platform.
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}+cpu\n")
        paths = [folder, str(SOURCES / release), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        command = [sys.executable, "-m", "tests.engine.cuda.releases", "--here", "--worlds", str(worlds)]
        done = subprocess.run(
            [*command, "--first", str(first)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            stdout=subprocess.PIPE,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
    lines = done.stdout.splitlines()
    try:
        found = json.loads(lines[-1])
    except (IndexError, ValueError):
        found = {"passed": False, "failures": [f"exit status {done.returncode}"]}
    return {"release": release} | found


def search_here(worlds: int, first: int) -> dict[str, Any]:
    """The search with the vLLM that this process finds: worlds, and which planted faults they show."""
    from kit.environment import prepare_environment

    prepare_environment()
    from hotspan.demo.model import make_demo_model

    from .faults import FAULTS
    from .orders import search, shows

    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder:
        model = make_demo_model(Path(folder) / "tiny", "tiny").path
        proof = search(model, first, worlds)
        faults = {fault.name: fault for fault in FAULTS if fault.name in PLANTED}
        shown = [name for name in PLANTED if shows(model, faults[name])]
    figures = {name: proof.figures[name] for name in ("worlds", "copies", "compared", "accepted", "wrong", "races")}
    return {
        "passed": proof.passed and len(shown) == len(PLANTED),
        **figures,
        "failures": [asdict(failure) for failure in proof.failures],
        "planted": len(PLANTED),
        "shown": len(shown),
    }


def main(
    release: Annotated[list[str] | None, typer.Option(help="Those of vllm_range.py if none is named.")] = None,
    worlds: Annotated[int, typer.Option(min=1, help="Number of worlds of each.")] = 4,
    first: Annotated[int, typer.Option(help="Seed of the first.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Releases that are searched beside each other.")] = 2,
    output: Annotated[Path | None, typer.Option(help="Write the results to this JSON file, as each is known.")] = None,
    here: Annotated[bool, typer.Option("--here", hidden=True)] = False,
) -> None:
    """Search. Exit status 1 means that a release did not pass, of those that are not refused at the start."""
    if here:
        print(json.dumps(search_here(worlds, first)), flush=True)
        return
    failed, rows, asked = False, list[dict[str, Any]](), release or list(RELEASES)
    pool = ThreadPoolExecutor(jobs)
    for found in pool.map(lambda name: searched(name, worlds, first), asked):
        failed = failed or not (found.get("passed") or found.get("refused"))
        print(json.dumps(found), flush=True)
        rows.append(found)
        if output is not None:
            command = f"python -m tests.engine.cuda.releases --worlds {worlds} --first {first}"
            run = [row for row in rows if "passed" in row]
            figures = {
                "releases": len(rows),
                "refused": len(rows) - len(run),
                "passed": sum(row["passed"] for row in run),
            }
            failures = tuple(Failure(n, str(row["failures"])) for n, row in enumerate(run) if not row["passed"])
            proof = Proof("cuda-releases", CLAIM, figures, not failures, failures)
            write_proof(output, proof, {"worlds": worlds, "first": first, "releases": rows}, command)
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
