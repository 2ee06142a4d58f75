"""The search: nothing is wrong in worlds of every kind, and each fault that is planted is found."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .faults import FAULTS, Fault
from .kinds import KINDS
from .world import Totals, drawn, run

pytestmark = pytest.mark.engine

SEEDS = 24
"""Worlds in which a planted fault has to show; most do in the first."""
SMALL: dict[str, Any] = {"actions": 40, "fails": False, "lives": 1, "ranks": 1}


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        yield Path(path)


def searched(model: Path, folder: Path, seed: int, kind: str | None, plan: dict[str, Any]) -> tuple[Totals, list[str]]:
    where = folder / str(seed)
    where.mkdir()
    return run(model, drawn(seed, kind, **plan), where)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("is_async", "ranks"), [(False, 2), (True, 1)])
def test_no_byte_is_wrong_in_any_order(tiny_model: Path, folder: Path, kind: str, is_async: bool, ranks: int) -> None:
    """Whatever the layers, with steps in flight or ranks that lag: all KV that is read is the text's, no access races,
    and slots hold nothing besides."""
    plan = {"actions": 45, "ranks": ranks, "is_async": is_async, "fails": False}
    totals, found = searched(tiny_model, folder, 40 + ranks, kind, plan)
    assert found == [] and totals.failures == 0
    assert totals.copies and totals.compared
    assert totals.cached or (kind == "states" and is_async)  # a state is found at the end of a text alone


@pytest.mark.parametrize("ranks", [(2, 1), (1, 2), (8, 2)], ids=str)
def test_latents_are_stored_once(tiny_model: Path, folder: Path, ranks: tuple[int, int]) -> None:
    """One rank stores for all; an engine with other ranks finds on disk what the first one left, and reads it right."""
    first, later = ranks
    plan = {"ranks": first, "later_ranks": later, "lives": 2, "has_disk": True, "fails": False, "settles": True}
    totals, found = searched(tiny_model, folder, 5, "latents", plan | {"actions": 30, "slots": 20})
    assert found == [] and totals.failures == 0
    assert totals.engines == 2 and totals.found_on_start


def test_eight_ranks_that_end_in_any_order(tiny_model: Path, folder: Path) -> None:
    """A slot is a hit when the last of eight ranks has stored its part, and free when the last one has loaded it."""
    totals, found = searched(tiny_model, folder, 3, "full", {"actions": 15, "ranks": 8, "fails": False, "slots": 12})
    assert found == [] and totals.failures == 0 and totals.cached


@pytest.mark.parametrize("seed", range(3))
def test_a_device_that_fails_leaves_nothing_wrong(tiny_model: Path, folder: Path, seed: int) -> None:
    """A sticky error at any operation stops the engine; the next one finds on disk nothing that is not right."""
    totals, found = searched(tiny_model, folder, seed, "full", {"actions": 40, "ranks": 1 + seed % 2, "fails": True})
    assert found == [] and totals.failures == 0
    assert totals.engines == 2 and totals.device_errors


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(tiny_model: Path, folder: Path, fault: Fault) -> None:
    """The search finds each of these within a few worlds: one that does not proves nothing."""
    plan = SMALL | dict(fault.plan)
    kind = plan.pop("kind", None)
    with fault.planted():
        for seed in range(SEEDS):
            try:
                _, found = searched(tiny_model, folder, seed, kind, plan)
            except (AssertionError, KeyError) as error:  # the cache's own books, or a part of a slot that is another's
                found = [str(error)]
            if found:
                return
    pytest.fail(f"{fault.name}: not found in {SEEDS} worlds")
