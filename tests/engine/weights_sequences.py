"""Random sequences of requests, changes of weights, resets, sleep, restarts and edits of files, against known bytes.

    python -m tests.engine.weights_sequences 10000 [--seed N] [--worlds N] [--output FILE]

Two engines of real schedulers, caches and tiers (harness/core.py) share an L2; one of them has a disk. Each token's KV
is a number that only its text and the weights it was computed with give: whatever is read in a step is compared with
that of the weights that the engine has. The engines live on from sequence to sequence, until one is restarted. The L2
evicts what is old. In worlds of even seeds, weights that were reloaded from files have those files' name, as on no
device yet; in the others a random one, as is shipped.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import psutil

from kit.environment import prepare_environment

prepare_environment()

from hotspan.demo.model import make_demo_model  # noqa: E402
from hotspan.engine import identity  # noqa: E402
from hotspan.testing.clock import SimulatedClock  # noqa: E402
from kit.proof import Proof, print_proof, write_proof  # noqa: E402
from kit.simulated.memory_store import MemoryServer  # noqa: E402

from .harness.core import Core, core  # noqa: E402
from .harness.runner import KnownBytes  # noqa: E402

OPERATIONS = 10
"""Of one sequence."""

CLAIM = "in no order of requests, changes of weights, resets, sleep, restarts and edits is KV of other weights read"
L2_CHUNKS = 3000
"""The L2 keeps these at most: in memory, and every name that weights ever had has its own."""

_REPORT_EVERY = 100
_TEXTS, _TOKENS = 6, 1300
_CHANGES = ("reload", "reload_own", "edit_and_reload", "function", "update", "fails", "sleep")


class Failed(Exception):
    """An engine read KV of other weights, or cached nothing where it should."""


def write_weights(directory: Path, number: int) -> None:
    """Give a directory other weights of the same shape, under another inode: no two edits look alike."""
    file = directory / "model.safetensors"
    data = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    data[start : start + 64 * 997 : 997] = number.to_bytes(8, "little") * 8
    fresh = file.with_suffix(".part")
    fresh.write_bytes(data)
    os.replace(fresh, file)


_edits = itertools.count(1 << 40)


class Late(KnownBytes):
    """Its files are replaced when the workers have read them, and the engine is not ready yet."""

    def _initialize_from_config(self, configs: Any) -> None:
        write_weights(self._directory, next(_edits))
        super()._initialize_from_config(configs)


class World:
    """Two engines, what they share, and the checkpoints that they may load.

    counts: what was done. hits: tokens that were cached. sequences: how many have ended.
    """

    def __init__(self, directory: Path, seed: int) -> None:
        self.chance = random.Random(f"weights:{seed}")
        self.counts: Counter[str] = Counter()
        self.hits = self.sequences = 0
        self._names_reloaded = seed % 2 == 0
        self._numbers = 0
        self._server = MemoryServer()
        self._disk = directory / "disk"
        first = make_demo_model(directory / "w0", "tiny").path
        self.models = [first, directory / "w1", directory / "w2", directory / "own"]
        for number, model in enumerate(self.models[1:], 1):
            shutil.copytree(first, model)
            write_weights(model, number)
        self._stacks = [ExitStack(), ExitStack()]
        self.engines: list[Core] = []
        for at in range(2):
            self.engines.append(self._started(at, self.models[0]))
        self.texts = [self.engines[0].text(n, _TOKENS) for n in range(_TEXTS)]
        for n in range(1, _TEXTS, 2):  # with a beginning in common
            self.texts[n][:600] = self.texts[n - 1][:600]

    def close(self) -> None:
        for at in range(2):
            self._check(at)
            self._stacks[at].close()

    def sequence(self) -> None:
        """Do a few things. Raises: Failed."""
        for _ in range(OPERATIONS):
            at = self.chance.randrange(2)
            names = (
                "ask",
                "start",
                "settle",
                "evict",
                "reset",
                "step",
                "edit",
                "change",
                "restart",
                "restart_and_edit",
            )
            (name,) = self.chance.choices(names, (10, 4, 3, 3, 1, 3, 1, 5, 0.3, 0.2))
            if name == "change":
                name = self.chance.choice(_CHANGES)
            self.counts[name] += 1
            operation: Callable[[int], None] = getattr(self, f"_{name}")
            operation(at)
            self._check(at)
        self._audit(self.chance.randrange(2))
        self._server.evict(L2_CHUNKS)
        self.sequences += 1

    # -- operations ------------------------------------------------------------------------------------------------

    def _ask(self, at: int) -> None:
        text = self.chance.choice(self.texts)
        self.hits += self.engines[at].ask(text[: self.chance.choice((700, len(text)))], self.chance.choice((1, 3)))

    def _start(self, at: int) -> None:
        self._numbers += 1
        self.engines[at].start(f"running-{self._numbers}", self.chance.choice(self.texts), self.chance.choice((1, 40)))
        self.engines[at].step(self.chance.randrange(3))

    def _step(self, at: int) -> None:
        self.engines[at].step(self.chance.randrange(1, 5))

    def _settle(self, at: int) -> None:
        self.engines[at].settle()

    def _evict(self, at: int) -> None:
        engine = self.engines[at]
        engine.finish()
        engine.forget_gpu()
        engine.forget_ram()

    def _reset(self, at: int) -> None:
        self.engines[at].core.reset_prefix_cache(self.chance.random() < 0.5, self.chance.random() < 0.2)

    def _edit(self, at: int) -> None:
        self._numbers += 1
        write_weights(self.models[3], 10_000 + self._numbers)

    def _reload(self, at: int) -> None:
        self.engines[at].rpc("reload_weights", weights_path=str(self.chance.choice(self.models)))

    def _reload_own(self, at: int) -> None:
        self.engines[at].rpc("reload_weights")

    def _edit_and_reload(self, at: int) -> None:
        self._edit(at)
        self.engines[at].rpc("reload_weights", weights_path=str(self.models[3]))
        if self.chance.random() < 0.3:
            self._edit(at)  # while its digest is taken

    def _function(self, at: int) -> None:
        weights = self.chance.getrandbits(64)
        self.engines[at].rpc(lambda worker: setattr(worker, "weights", weights))

    def _update(self, at: int) -> None:
        engine = self.engines[at]
        if self.chance.random() < 0.7:
            engine.rpc("start_weight_update")
        for _ in range(self.chance.randrange(1, 3)):
            engine.rpc("update_weights", update_info=self.chance.getrandbits(64))
            if self.chance.random() < 0.3:
                self._ask(at)
        engine.rpc("finish_weight_update")

    def _fails(self, at: int) -> None:
        def change(worker: Any) -> None:
            worker.weights = 1 + self.chance.getrandbits(60)
            raise ValueError("half-way")

        try:
            self.engines[at].rpc(change)
        except ValueError:
            return
        raise Failed("who asked was not told that the call failed")

    def _sleep(self, at: int) -> None:
        engine = self.engines[at]
        level = self.chance.choice((1, 2))
        engine.core.sleep(level)
        if level == 2 and self.chance.random() < 0.7:
            engine.core.wake_up(["weights"])
            engine.rpc("reload_weights", weights_path=str(self.chance.choice(self.models)))
            engine.core.wake_up(["kv_cache"])
        else:
            engine.core.wake_up()

    def _restart(self, at: int, runner: type[KnownBytes] = KnownBytes) -> None:
        self.engines[at].finish()
        self._check(at)
        self._stacks[at].close()
        self._stacks[at] = ExitStack()
        model = self.models[3] if runner is Late else self.chance.choice(self.models)
        self.engines[at] = self._started(at, model, runner)

    def _restart_and_edit(self, at: int) -> None:
        self._restart(at, Late)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _started(self, at: int, model: Path, runner: type[KnownBytes] = KnownBytes) -> Core:
        clock = SimulatedClock(unix_s=time.time() + 1e6)
        disk = self._disk if at == 0 else None
        if self._names_reloaded:
            self._stacks[at].enter_context(patch.object(identity, "RELOADS_AS_A_START", {"cpu"}))
        return self._stacks[at].enter_context(core(model, disk=disk, l2=self._server, clock=clock, runner=runner))

    def _check(self, at: int) -> None:
        engine = self.engines[at]
        if engine.runner.wrong:
            raise Failed(f"engine {at} read {engine.runner.wrong} tokens' KV of other weights")

    def _audit(self, at: int) -> None:
        """Every text is right from every tier, and found again where the weights have a name."""
        engine = self.engines[at]
        engine.finish()
        engine.until_named()
        text = self.chance.choice(self.texts)
        engine.ask(text)
        found = engine.ask(text)
        self.hits += found
        if not found:
            raise Failed(f"engine {at} does not find what it has just computed")
        self._check(at)


def run(
    sequences: int,
    seed: int,
    *,
    report: Callable[[int, World], None] = lambda done, world: None,
    is_over: Callable[[], bool] = lambda: False,
) -> World:
    """Do so many sequences, or fewer once it is over. Raises: Failed, with the sequence's number."""
    with tempfile.TemporaryDirectory() as directory:
        world = World(Path(directory), seed)
        try:
            for number in range(sequences):
                if is_over():
                    break
                try:
                    world.sequence()
                except (Failed, AssertionError) as error:
                    raise Failed(f"sequence {number} of seed {seed}: {error}") from error
                if (number + 1) % _REPORT_EVERY == 0:
                    report(number + 1, world)
        finally:
            world.close()
        return world


class Outcome(NamedTuple):
    """Of one world that ran to its end. rss_bytes: after each hundred of sequences."""

    sequences: int
    counts: Counter[str]
    hits: int
    rss_bytes: list[int]


def outcome(sequences: int, seconds: float, seed: int) -> Outcome:
    """What came of so many sequences, or of those that were begun in time; told as it goes. Raises: Failed."""
    logging.disable(logging.WARNING)
    rss_bytes, begun_s = [], time.monotonic()

    def tell(done: int, world: World) -> None:
        rss_bytes.append(psutil.Process().memory_info().rss)
        found = f"{world.hits} tokens found, RSS {rss_bytes[-1] >> 20} MiB"
        print(f"seed {seed}: {done} sequences, {found}, {time.monotonic() - begun_s:.0f} s", flush=True)

    world = run(sequences, seed, report=tell, is_over=lambda: time.monotonic() - begun_s > seconds)
    return Outcome(world.sequences, world.counts, world.hits, rss_bytes)


def proof(of: int, outcomes: list[Outcome]) -> Proof:
    """What came of all worlds, each of which was to do so many sequences: none of them failed."""
    counts: Counter[str] = sum((each.counts for each in outcomes), Counter())
    rss_mib = [[bytes_ >> 20 for bytes_ in each.rss_bytes] for each in outcomes if each.rss_bytes]
    figures = {
        "sequences": sum(each.sequences for each in outcomes),
        "worlds": len(outcomes),
        "operations": counts.total(),
        "tokens_found": sum(each.hits for each in outcomes),
        "tokens_of_other_weights": 0,
        "rss_mib_first": max((each[0] for each in rss_mib), default=0),
        "rss_mib_last": max((each[-1] for each in rss_mib), default=0),
        **{f"operations_{name}": count for name, count in sorted(counts.items())},
    }
    return Proof("weights_sequences", CLAIM, figures, passed=all(each.sequences == of for each in outcomes))


def main() -> None:
    """From the command line. A failure ends it with the sequence's number and the seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sequences", type=int, help="in each world")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worlds", type=int, default=1, help="with this seed and the next ones, a process each")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no sequence after so many")
    parser.add_argument("--output", type=Path, help="write the result to this JSON file")
    given = parser.parse_args()
    seeds = range(given.seed, given.seed + given.worlds)
    with ProcessPoolExecutor(given.worlds, get_context("fork")) as processes:
        done = proof(given.sequences, list(processes.map(partial(outcome, given.sequences, given.seconds), seeds)))
    print_proof(done, given.seed)
    if given.output is not None:
        write_proof(
            given.output, done, vars(given), "python -m tests.engine.weights_sequences " + " ".join(sys.argv[1:])
        )


if __name__ == "__main__":
    main()
