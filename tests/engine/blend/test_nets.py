"""Faults in blending's orders and reports, in a real engine core: answers are right, and nothing stays held.

A worker without a model does what it is ordered: it writes into each window's slot which window it is, and into the
blocks of a blended request what computing would give. So a slot that has another window is seen, as is a wrong block.
"""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from hotspan.cache.stats import CacheStats
from hotspan.cache.tiered import TieredCache
from hotspan.config.settings import BlendSettings
from hotspan.core.types import ChunkKey
from hotspan.engine.blend.admission import Blending
from hotspan.engine.blend.agreement import Checks
from hotspan.engine.blend.orders import BlendJob, Checked, Orders, Report, Speed
from hotspan.engine.blend.planner import Planner
from hotspan.engine.blend.store import WindowStore
from hotspan.engine.connector import HotspanConnector
from hotspan.engine.net import LEFT_OUT
from kit.engine import CHUNK
from tests.engine.harness.core import Core, core
from tests.engine.harness.runner import kv_of
from tests.engine.test_net import half_failing, is_alive

DOCUMENT = 2 * CHUNK
FAULTS = ("lost", "repeated", "late", "wrong")


class Worker:
    """The worker's half, as engine/blend/steps.py has it.

    faults: what becomes of a report, by name. wrong: slots that had another window than the scheduler said.
    """

    def __init__(self, engine: Core) -> None:
        self._runner = engine.runner
        self._slot: Callable[[int], memoryview] = engine.runner.connector.connector_worker.worker.slot
        self._rng = random.Random(0)
        self._report = Report(speed=Speed(token_s=1e-3, move_s=1e-6))
        self._late: list[Report] = []
        self._finished: set[str] = set()
        self.faults: tuple[str, ...] = ()
        self.wrong = self.blends = self.hurt = 0

    def run(self, orders: Orders) -> None:
        for store in orders.stores:
            tokens = self._runner._rows[store.request_id].tokens[store.start : store.start + CHUNK]
            self._slot(store.slot)[:32] = _name(tokens)
            self._report.stored.append(store.key)
        for job in orders.blends:
            self._blend(job)
            self.blends += 1
            self._report.ended.append(job.number)
            self._finished.add(job.request_id)
        for check in orders.checks:
            self._report.checked[check.number] = Checked(True, 0.0)
        self._report.done = orders.number  # nothing runs on

    def _blend(self, job: BlendJob) -> None:
        tokens = job.tokens.tolist()
        for piece in job.pieces:
            start = piece.run.start - piece.skip
            self.wrong += bytes(self._slot(piece.slot)[:32]) != _name(tokens[start : start + CHUNK])
        kv, size = kv_of(tokens, None, self._runner.weights), self._runner._block
        for run in [*(piece.run for piece in job.pieces), *job.computed]:
            for place in range(run.start, run.stop):
                self._runner._kv[job.blocks[place // size], place % size, 0] = np.uint64(kv[place])

    def take_finished(self) -> set[str]:
        taken, self._finished = self._finished, set()
        return taken

    def take_failed(self) -> set[str]:
        return set()

    def take_report(self) -> Report:
        """What there is to report, after its faults."""
        report, self._report = self._report, Report()
        if self._late and (not report or self._rng.random() < 0.5):
            late = self._late.pop(0)
            report, self._report = late, report
        if not report or not self.faults or self._rng.random() < 0.3:
            return report
        self.hurt += 1
        match self._rng.choice(self.faults):
            case "lost":
                return Report(speed=report.speed)
            case "repeated":
                self._late.append(copy.deepcopy(report))
            case "late":
                self._late.append(report)
                return Report()
            case "wrong":
                report = copy.deepcopy(report)
                report.ended.insert(0, 1000 + self._rng.randrange(1000))
                report.failed.append(report.ended[0])
                report.selected[2000] = 5
                report.checked[self._rng.randrange(3000, 4000)] = Checked(False, 9.0)
                report.stored.insert(0, ChunkKey(self._rng.randbytes(32)))
                report.unstored.append(ChunkKey(self._rng.randbytes(32)))
        return report


def _name(tokens: list[int]) -> bytes:
    return sha256(np.asarray(tokens, np.int64).tobytes()).digest()


@contextmanager
def blending(model: Path) -> Iterator[tuple[Core, Worker]]:
    """An engine core that blends, with little room."""
    settings = BlendSettings(min_tokens=CHUNK, first_k=4, check_every=2)
    with core(model, cache={"blend": settings}) as engine:
        worker = Worker(engine)
        engine.runner.connector._blends = worker
        engine.ask(engine.text(0, 8))  # its report says that it can blend
        yield engine, worker


def prompt_of(engine: Core, number: int, *documents: int) -> list[int]:
    """A text of its own, then documents that others have."""
    return engine.text(10_000 + number, 40) + [token for each in documents for token in engine.text(each, DOCUMENT)]


def turns(engine: Core, first: int, count: int, rng: random.Random) -> None:
    """Requests over five documents, some of them cut off; all others have the answers of computing."""
    known: dict[str, list[int]] = {}
    for number in range(first, first + count):
        prompt = prompt_of(engine, number, *rng.sample(range(1, 6), 2))
        name = f"blended-{number}"
        known[name] = prompt
        engine.start(name, prompt, 2)
        engine.step(rng.randrange(3))
        if rng.random() < 0.15 and name in engine.scheduler.requests:
            engine.core.abort_requests([name])
            del known[name]
        if number % 4 == 3:
            engine.finish()
    engine.finish()
    for name, prompt in known.items():
        kv = kv_of(prompt, None, engine.runner.weights)
        assert engine.answers[name][0] == 3 + kv[-1] % 700, name


def is_free(engine: Core, worker: Worker) -> None:
    """Nothing is held, nobody waits, and what comes next is blended."""
    worker.faults = ()
    manager = engine.manager
    for number in range(4):  # what is left to do is done
        engine.ask(engine.text(500 + number, CHUNK + 8))
    engine.settle()
    found = manager.blending
    assert not found._loading and not found._store._storing and not found.checks._blocks
    assert not any(entry.pins or entry.is_used for entry in engine.cache.ram.entries.values())
    assert engine.cache._loading == engine.cache._storing == 0 and worker.wrong == 0 and engine.runner.wrong == 0
    before = worker.blends
    for number in range(10):  # late reports may still come
        engine.ask(prompt_of(engine, 600 + number, 77))
    assert worker.blends > before and found.off is None
    is_alive(engine, 9)


def test_blends_without_faults(tiny_model: Path) -> None:
    """The base of the others: prompts are blended, and checked."""
    with blending(tiny_model) as (engine, worker):
        turns(engine, 0, 40, random.Random(1))
        assert worker.blends > 10
        is_free(engine, worker)


@pytest.mark.parametrize("faults", [*((fault,) for fault in FAULTS), FAULTS], ids="-".join)
@pytest.mark.parametrize("seed", range(3))
def test_a_report_that_is_not_as_it_should_be(tiny_model: Path, faults: tuple[str, ...], seed: int) -> None:
    """Most reports are lost, come twice or late, or name what nobody asked for."""
    with blending(tiny_model) as (engine, worker):
        worker.faults = faults
        turns(engine, 0, 60, random.Random(seed))
        assert worker.hurt > 10 and worker.blends > 0
        is_free(engine, worker)


FAILING: list[tuple[type, str]] = [
    *((Blending, name) for name in ("ask", "match", "begin", "withdraw", "end", "orders", "bare_orders", "note")),
    *((Blending, name) for name in ("_arrive", "_end_job", "_give_up", "_handed", "_begin_stores", "_count")),
    *((Planner, name) for name in ("plan", "release")),
    *((WindowStore, name) for name in ("ask", "look_up", "begin_load", "begin_store", "end_store", "give_up")),
    *((Checks, name) for name in ("is_due", "allow", "drop", "begin", "take_cancelled", "end")),
    *((TieredCache, name) for name in ("begin_load", "end_load", "release", "begin_store", "end_store")),
    *((HotspanConnector, name) for name in ("_blend", "_report", "_bare_orders")),
    (CacheStats, "loaded"),
]
"""Each entry of blending, and what they are made of. A method with a net fails inside it."""

NOT_CALLED = {"bare_orders", "_bare_orders", "withdraw", "drop", "loaded"}
"""Without another failure."""

OF_THE_ENGINE = {"clear", "forget_all"}
"""Entries that a failure must pass through: a reset, and the end of a namespace (tests/engine/test_net.py)."""


def test_each_entry_of_blending_is_in_the_list() -> None:
    """What the connector and the manager may call of the scheduler's half."""
    entries = {name for name, each in vars(Blending).items() if inspect.isfunction(each) and name[0] != "_"}
    assert entries - OF_THE_ENGINE == {
        name for owner, name in FAILING if owner is Blending and not name.startswith("_")
    }


@pytest.mark.parametrize(("owner", "name"), FAILING, ids=[f"{owner.__name__}.{name}" for owner, name in FAILING])
def test_a_mistake_in_blending_leaves_nothing_held(tiny_model: Path, owner: type, name: str) -> None:
    """Any of these raises half of the time, and each of `orders` besides: the engine goes on."""
    is_failing, raised = True, [0]
    with blending(tiny_model) as (engine, worker):
        before = LEFT_OUT.counts["error"]
        with patch.object(owner, name, half_failing(getattr(owner, name), lambda: is_failing, raised)):
            turns(engine, 0, 40, random.Random(1))
            is_failing = False
            assert (raised[0] > 0) or name in NOT_CALLED
            assert LEFT_OUT.counts["error"] - before >= (raised[0] > 0)
        is_free(engine, worker)
