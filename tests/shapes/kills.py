"""Kills of either node of an engine over two hosts with RAM, while it answers: no wrong answer, nothing left behind.

    python -m tests.shapes.kills 200 [--seed N] [--start vllm] [--output FILE]

Needs root: the second host is a process with a /dev/shm of its own. A kill is SIGKILL to all processes of a node, at a
random moment after a random number of answers; the other node has to end by itself, and the engine starts again.

Kills add up: what FILE has is gone on with, until there were as many as are asked for. It passes with the last of them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

from hotspan.bench.machine import machine_facts
from hotspan.core.shared_memory import SHARED_MEMORY
from hotspan.demo.model import make_demo_model
from kit.preloaded import Preloaded
from kit.proof import MAX_FAILURES, Failure, Proof, print_proof, rng_of, write_proof
from tests.tiers.mounts import mounted

from .engines import Answer, preloaded, running, slabs
from .table import TP2, Shape
from .test_shapes import CLOSE, TEXTS, WHOLE, text_of

CLAIM = "an engine over two hosts, of which either is killed while it answers, gives no wrong answer and leaves no slab"
COUNTED = ("answers", "hits", "kills_of_node_0", "kills_of_node_1", "ended_by_themselves")
END_S = 120.0
"""Within this the other node ends by itself."""


class Wrong(Exception):
    """An answer, or what was left behind."""


def same(have: Answer, want: Answer) -> bool:
    chances = zip(have.chances, want.chances, strict=True)
    return have.text == want.text and all(abs(one - other) < CLOSE for one, other in chances)


def turn(
    shape: Shape,
    model: Path,
    directory: Path,
    shared: Path,
    truth: list[Answer],
    chance: random.Random,
    source: Preloaded,
    counts: Counter[str],
) -> None:
    """One start, requests and a kill in the middle of them, all counted in `counts`. Raises: Wrong."""
    node = chance.randrange(2)
    with running(shape, model, directory, shared, source=source) as engine:
        timer, asked_s = None, 1.0
        answers = chance.randrange(9)  # before the kill, which falls into the next one
        with contextlib.suppress(OSError, HTTPException, AssertionError, ValueError):  # the server is gone
            while True:
                if counts["answers"] == answers:
                    timer = threading.Timer(chance.uniform(0.0, asked_s), engine.kill_node, (node,))
                    timer.start()
                seed, began_s = chance.randrange(TEXTS), time.monotonic()
                answer = engine.ask(text_of(seed))
                asked_s = time.monotonic() - began_s
                counts["answers"] += 1
                counts["hits"] += answer.cached >= WHOLE
                if not same(answer, truth[seed]):
                    raise Wrong(f"text {seed}: {answer} is not {truth[seed]}")
        if timer is None:
            raise Wrong(f"it ended by itself: {engine.said()[-3000:]}")
        timer.join()
        counts[f"kills_of_node_{node}"] += 1
        other, until = engine.processes[1 - node], time.monotonic() + END_S
        while other.poll() is None and time.monotonic() < until:
            time.sleep(0.1)
        counts["ended_by_themselves"] += other.poll() is not None
        engine.kill()
    left = slabs(SHARED_MEMORY), slabs(shared)
    until = time.monotonic() + END_S
    while any(left) and time.monotonic() < until:  # the process that cleans up takes a moment
        time.sleep(0.1)
        left = slabs(SHARED_MEMORY), slabs(shared)
    if any(left):
        raise Wrong(f"slabs are left: {left}")


@dataclass
class Record:
    """All kills so far, of one run or of several.

    runs: those in a row of one commit, start and seed, with how many. failures: by number of the kill.
    """

    kills: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    runs: list[dict[str, Any]] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path | None) -> Record:
        """What a result file has; none if there is no such file."""
        if path is None or not path.exists():
            return cls()
        kept = json.loads(path.read_text())
        figures: dict[str, Any] = kept["figures"]
        counts = Counter({name: figures[name] for name in COUNTED if name in figures})
        return cls(figures["kills"], counts, figures["runs"], [Failure(**each) for each in kept["failures"]])

    def add(self, run: dict[str, Any], counts: Counter[str], failure: str = "") -> None:
        """One more kill, with what it came to."""
        if not self.runs or {**self.runs[-1], "kills": 0} != {**run, "kills": 0}:
            self.runs.append({**run, "kills": 0})
        self.runs[-1]["kills"] += 1
        if failure:
            self.failures.append(Failure(self.kills, failure))
        self.kills += 1
        self.counts += counts

    def proof(self, of: int) -> Proof:
        """It passes if there were as many as were asked for, none with a wrong answer or with a slab left."""
        counted = {name: self.counts[name] for name in COUNTED}
        figures = {"kills": self.kills, **counted, "failures": len(self.failures), "runs": self.runs}
        is_whole = of <= self.kills == self.counts["ended_by_themselves"] and not self.failures
        passed = is_whole and self.counts["answers"] > self.kills
        return Proof("kills_over_hosts", CLAIM, figures, passed, tuple(self.failures[:MAX_FAILURES]))


def options(words: list[str]) -> argparse.Namespace:
    """From the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kills", type=int, help="how many in all, with those that the file has")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", choices=("hotspan", "vllm"), default="hotspan")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no kill after so many")
    parser.add_argument("--output", type=Path, help="add the result to this JSON file, after each kill")
    return parser.parse_args(words)


def main() -> None:
    """Exit status 1: something was wrong, and the file has it."""
    given, begun_s = options(sys.argv[1:]), time.monotonic()
    shape = Shape(given.start, "TP 2 over two nodes", TP2, nodes=2, has_disk=False)
    command = "python -m tests.shapes.kills " + " ".join(sys.argv[1:])
    record = Record.read(given.output)
    run = {"commit": machine_facts().get("Commit", ""), "start": given.start, "seed": given.seed}
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(tempfile.TemporaryDirectory())
        shared = stack.enter_context(mounted(Path(place) / "shm", "tmpfs", "size=2g"))
        model = make_demo_model(Path(place) / "model", "tiny").path
        alone = Path(place) / "alone"
        alone.mkdir()
        source = stack.enter_context(preloaded())
        with running(Shape("LLM", "one rank"), model, alone, is_cached=False, source=source) as engine:
            truth = [engine.ask(text_of(seed)) for seed in range(TEXTS)]
        while record.kills < given.kills and time.monotonic() - begun_s < given.seconds:
            directory = Path(place) / str(record.kills)
            directory.mkdir()
            counts, wrong = Counter[str](), ""
            try:
                turn(shape, model, directory, shared, truth, rng_of("kills", given.seed, record.kills), source, counts)
            except Wrong as error:
                wrong = str(error)
            record.add(run, counts, wrong)
            print(
                f"{record.kills} kills, {time.monotonic() - begun_s:.0f} s: {dict(record.counts)} {wrong}", flush=True
            )
            if given.output is not None:
                write_proof(given.output, record.proof(given.kills), vars(given), command)
            if wrong:
                break
    print_proof(record.proof(given.kills), given.seed)
    sys.exit(bool(record.failures))


if __name__ == "__main__":
    main()
