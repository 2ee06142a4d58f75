"""The search: nothing is wrong in worlds of every kind, and each fault that is planted is found."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .faults import FAULTS, Fault
from .kinds import KINDS
from .orders import shows
from .plan import Totals, drawn
from .world import run

pytestmark = pytest.mark.engine


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
    totals, found = searched(tiny_model, folder, 42, kind, plan)
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


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_drafts_are_accepted_and_rejected(tiny_model: Path, folder: Path, is_async: bool) -> None:
    """Steps have drafts, right ones and wrong ones, with steps in flight too; what was drafted in vain is no hit."""
    plan = {"actions": 30, "ranks": 2, "is_async": is_async, "drafts": 3, "fails": False, "lives": 1}
    totals, found = searched(tiny_model, folder, 7, "full", plan)
    assert found == [] and totals.failures == 0 and totals.cached
    assert totals.accepted and totals.rejected


def test_adapters_full_disks_and_full_l2s(tiny_model: Path, folder: Path) -> None:
    """Requests with adapters that are trained anew meanwhile, over a disk and an L2 that have no space at times; a
    second engine finds what was stored all the same."""
    plan = {"has_disk": True, "has_l2": True, "disk_fills": True, "l2_fills": True, "disk_slots": 16, "slots": 8}
    plan |= {"actions": 60, "ranks": 1, "adapters": 2, "fails": False, "lives": 2, "settles": True}
    totals, found = searched(tiny_model, folder, 15, "full", plan)
    assert found == [] and totals.failures == 0
    assert totals.engines == 2 and totals.found_on_start
    assert totals.adapted and totals.full


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
def test_a_planted_fault_is_found(tiny_model: Path, fault: Fault) -> None:
    """The search finds each of these within a few worlds: one that does not proves nothing."""
    assert shows(tiny_model, fault)
