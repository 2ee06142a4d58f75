"""Kills of either node of an engine over two hosts with RAM, while it answers: no wrong answer, nothing left behind.

    python -m tests.shapes.kills 200 [--seed N] [--start vllm] [--output FILE]

Needs root: the second host is a process with a /dev/shm of its own. A kill is SIGKILL to all processes of a node, at a
random moment after a random number of answers; the other node has to end by itself, and the engine starts again.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from http.client import HTTPException
from pathlib import Path

from hotspan.core.shared_memory import SHARED_MEMORY
from hotspan.demo.model import make_demo_model
from kit.preloaded import Preloaded
from kit.proof import Proof, print_proof, write_proof
from tests.tiers.mounts import mounted

from .engines import Answer, preloaded, running, slabs
from .table import TP2, Shape
from .test_shapes import CLOSE, TEXTS, WHOLE, text_of

CLAIM = "an engine over two hosts, of which either is killed while it answers, gives no wrong answer and leaves no slab"
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
) -> Counter[str]:
    """One start, requests and a kill in the middle of them. Raises: Wrong."""
    counts: Counter[str] = Counter()
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
    return counts


def proof(kills: int, of: int, counts: Counter[str]) -> Proof:
    """What came of so many starts of those that were asked for: none gave a wrong answer or left a slab."""
    figures = {"kills": kills, **counts, "wrong_answers": 0, "slabs_left": 0}
    is_whole = kills == of == counts["ended_by_themselves"]
    return Proof("kills_over_hosts", CLAIM, figures, passed=is_whole and counts["answers"] > kills)


def main() -> None:
    """From the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kills", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", choices=("hotspan", "vllm"), default="hotspan")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no kill after so many")
    parser.add_argument("--output", type=Path, help="write the result to this JSON file, after each kill")
    given = parser.parse_args()
    shape = Shape(given.start, "TP 2 over two nodes", TP2, nodes=2, has_disk=False)
    chance, counts, begun_s = random.Random(given.seed), Counter[str](), time.monotonic()
    command = "python -m tests.shapes.kills " + " ".join(sys.argv[1:])
    done = proof(0, given.kills, counts)
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(tempfile.TemporaryDirectory())
        shared = stack.enter_context(mounted(Path(place) / "shm", "tmpfs", "size=2g"))
        model = make_demo_model(Path(place) / "model", "tiny").path
        alone = Path(place) / "alone"
        alone.mkdir()
        source = stack.enter_context(preloaded())
        with running(Shape("LLM", "one rank"), model, alone, is_cached=False, source=source) as engine:
            truth = [engine.ask(text_of(seed)) for seed in range(TEXTS)]
        for number in range(given.kills):
            if time.monotonic() - begun_s > given.seconds:
                break
            directory = Path(place) / str(number)
            directory.mkdir()
            counts += turn(shape, model, directory, shared, truth, chance, source)
            done = proof(number + 1, given.kills, counts)
            print(f"{number + 1} starts in {time.monotonic() - begun_s:.0f} s: {dict(counts)}", flush=True)
            if given.output is not None:
                write_proof(given.output, done, vars(given), command)
    print_proof(done, given.seed)


if __name__ == "__main__":
    main()
