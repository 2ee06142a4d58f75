"""Receipts of invalidations: who has read them, asked once for all that wait."""

import threading
from typing import Any

import pytest

from hotspan.engine.receipts import Receipts
from hotspan.l2.base import LogPosition
from hotspan.l2.follower import WITNESS_S
from hotspan.testing.clock import SimulatedClock


class FakeFollower:
    """What a log says of its readers."""

    def __init__(self) -> None:
        self.appended = self.generation = 0
        self.read: dict[str, int] = {}
        self.asked = 0
        self.fails = False
        self.is_shared = True
        self.position = LogPosition(b"\xab" * 8, 0)

    def readers(self) -> dict[str, int]:
        self.asked += 1
        if self.fails:
            raise OSError("the log is away")
        return self.read | {"own": self.generation}


class Rig:
    """Receipts whose thread does nothing by itself."""

    def __init__(self) -> None:
        self.clock, self.follower = SimulatedClock(), FakeFollower()
        self.receipts = Receipts("own", self.follower, self.clock)  # type: ignore[arg-type]
        self.receipts._thread = threading.current_thread()
        self.told: dict[int, dict[str, Any]] = {}

    def ends(self, generation: int) -> None:
        self.follower.appended = self.follower.generation = generation
        self.receipts.ended(True, lambda told: self.told.__setitem__(generation, told))

    def step(self) -> None:
        self.receipts.step(self.follower)  # type: ignore[arg-type]


def said(generation: int, replicas: list[str], missing: list[str] | None = None) -> dict[str, Any]:
    """What a receipt has of the log."""
    log = {"epoch": "ab" * 8, "generation": generation}
    return {"is_durable": True, "replicas": replicas, "replicas_missing": missing or [], "log": log}


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_many_receipts_are_one_question(rig: Rig) -> None:
    """A hundred wait; when all replicas have read on, one look at the log answers them all."""
    rig.follower.read = {"other": 0}
    for generation in range(1, 101):
        rig.ends(generation)
    rig.step()
    assert not rig.told and rig.follower.asked == 1
    rig.follower.read = {"other": 100}
    rig.step()
    assert rig.follower.asked == 2 and len(rig.told) == 100
    assert rig.told[1] == said(1, ["other", "own"])


def test_each_is_answered_when_its_own_entry_was_read(rig: Rig) -> None:
    """What a replica has read up to answers the receipts up to there."""
    rig.ends(5)
    rig.ends(9)
    rig.follower.read = {"other": 6}
    rig.step()
    assert set(rig.told) == {5}


def test_who_does_not_read_is_named_after_a_while(rig: Rig) -> None:
    """A replica that is cut off holds a receipt up for two seconds at most, and is named in it."""
    rig.follower.read = {"other": 0, "third": 7}
    rig.ends(7)
    rig.clock.advance(WITNESS_S - 0.1)
    rig.step()
    assert not rig.told
    rig.clock.advance(0.2)
    rig.step()
    assert rig.told[7] == said(7, ["own", "third"], ["other"])


def test_an_entry_that_another_replica_wrote_is_waited_for(rig: Rig) -> None:
    """Who was told of an entry in the log has read it, too, when the receipt comes."""
    told: list[dict[str, Any]] = []
    rig.receipts.ended(True, told.append, logged=4)
    rig.step()
    assert not told
    rig.follower.generation = 4
    rig.step()
    assert told == [said(4, ["own"])]


def test_a_log_that_does_not_answer_holds_nobody_up(rig: Rig) -> None:
    """What is durable is said to be, with this replica as the only one that is known to have read it."""
    rig.ends(3)
    rig.follower.fails = True
    rig.step()
    assert rig.told[3]["replicas"] == ["own"] and rig.told[3]["replicas_missing"] == []


def test_what_is_not_durable_is_told_at_once(rig: Rig) -> None:
    """Nobody can have read it."""
    told: list[dict[str, Any]] = []
    rig.receipts.ended(False, told.append)
    assert told == [{"is_durable": False, "replicas": ["own"]}]


def test_a_fault_of_ours_holds_nobody_up_for_ever(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """What no log should raise is as if the log did not answer, and the thread that answers goes on."""

    def fails() -> dict[str, int]:
        raise OverflowError("cannot convert float infinity to integer")

    monkeypatch.setattr(rig.follower, "readers", fails)
    rig.ends(7)
    rig.step()
    assert rig.told[7]["is_durable"] and rig.told[7]["replicas"] == ["own"]
