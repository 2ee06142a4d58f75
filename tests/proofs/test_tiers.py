"""R16 small: RAM, disk and L2 together; and it fails when any of what it guards is taken away."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hotspan.cache.ram import RamTier
from hotspan.cache.waits import Waits
from hotspan.l2.position import PositionKeeper, write_position
from hotspan.l2.remote import RemoteTier
from hotspan.l2.view import LogView
from hotspan.tiers.base import Durable
from hotspan.tiers.lower import LowerTier
from proofs import tiers

from .test_proofs import forget_nothing, keep_in_ram, passed, silent


def test_tiers() -> None:
    """Forty simulations: every tier was hit and given up, all that can fail did, and all was right."""
    found = passed(tiers.run(tiers.Options(seeds=40), silent))
    assert found["failures"] == 0
    assert min(found[name] for name in ("hits", "disk_hits", "l2_hits", "read", "invalidations")) > 100
    assert min(found[name] for name in ("crashes", "stops", "resets", "power_losses", "disk_faults", "faults")) > 20
    assert min(found[name] for name in ("damaged_slabs", "damaged_objects", "trips_disk", "trips_l2")) > 5


def take_any_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a disk gives back is not verified."""
    for name in ("verify_header", "verify_part"):
        monkeypatch.setattr(f"hotspan.tiers.io.{name}", lambda *a, **k: None)


def heed_no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects of the L2 are not held against its log."""
    monkeypatch.setattr(LogView, "matched_at", lambda *a: 0)


def trust_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a disk has is found before it is known what others invalidated."""
    monkeypatch.setattr(LowerTier, "distrust", LowerTier.trust)


def note_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """How far the log was followed is written before the disk has forgotten what it said."""

    def follow(keeper: PositionKeeper, position: object, scopes: int) -> Durable:
        write_position(keeper._directory, position)  # type: ignore[arg-type]
        return lambda done: None

    monkeypatch.setattr(PositionKeeper, "follow", follow)


def wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """No request is ever late."""
    monkeypatch.setattr(Waits, "is_late", lambda self, reader: False)


def reuse_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a reset, slots into which the engine still copies are given to others."""

    def hold(ram: RamTier) -> None:
        for entry in list(ram.forgotten.values()):
            ram._free.append(entry.slot)
        ram.forgotten.clear()

    monkeypatch.setattr(RamTier, "hold", hold)


def raise_in_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier raises where it must not."""

    def discard(tier: RemoteTier, key: object) -> None:
        raise OSError("the store is away")

    monkeypatch.setattr(RemoteTier, "touch", discard)


PLANTED: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "ram": (keep_in_ram, "is the least it may be"),
    "disk log": (forget_nothing, "is the least it may be"),
    "l2 log": (heed_no_log, "is the least it may be"),
    "trust": (trust_at_once, "is the least it may be"),
    "position": (note_too_early, "is the least it may be"),
    "frames": (take_any_frame, "wrong bytes"),
    "slots": (reuse_slots, "slot"),
    "waits": (wait_for_ever, "waits since"),
    "calls": (raise_in_a_call, "OSError: the store is away"),
}


FOUND_BY = {"disk log": 189, "frames": 18, "trust": 10, "position": 5, "slots": 5}
"""The first case that finds a fault, if that is a late one: it is tried before all others."""


@pytest.mark.parametrize("planted", PLANTED)
def test_tiers_can_fail(monkeypatch: pytest.MonkeyPatch, planted: str) -> None:
    """Each planted fault is found, as what it is."""
    plant, words = PLANTED[planted]
    plant(monkeypatch)
    for case in (FOUND_BY.get(planted, 0), *range(600)):
        failures = tiers.run(tiers.Options(only=case), silent).failures
        if any(words in failure.what for failure in failures):
            return
    pytest.fail(f"{planted}: nothing was found")


def test_a_case_is_the_same_in_another_process() -> None:
    """A case is repeated by its number, whatever the hashes of the process that found it."""
    command = [sys.executable, "-m", "proofs", "tiers", "--seeds", "2", "--seed", "3"]
    root = Path(__file__).parents[2]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    environment["PYTHONPATH"] = f"{root / 'src'}{os.pathsep}{root}"
    said = [
        subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=300).stdout
        for _ in range(2)
    ]
    assert "passed" in said[0] and said[0] == said[1]
