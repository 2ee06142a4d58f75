"""Waiting for an engine core in this process: turns are counted, so a machine that others use is no hang."""

import time
from collections.abc import Iterator
from types import SimpleNamespace as Some

import pytest

from kit.engine import HANG_TURNS, Tiers


@pytest.fixture
def tiers() -> Tiers:
    """A core with one request that waits."""
    cache = Some(is_persisting=True, ram=Some(entries={}))
    connector = Some(manager=Some(cache=cache), has_pending_push_work=lambda: False)
    requests = {"asked-7": Some(status=Some(name="WAITING"))}
    return Tiers(Some(scheduler=Some(connector=connector, requests=requests)))


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reading of the clock is an hour after the one before, and no sleep takes time."""
    hours: Iterator[float] = iter(range(0, 10**9, 3600))
    monkeypatch.setattr(time, "monotonic", lambda: next(hours))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)


def test_a_busy_machine_is_no_hang(tiers: Tiers, busy: None) -> None:
    """However long turns take, only their number ends the wait."""
    done: list[int] = []
    tiers.until(lambda: len(done) == 1000, lambda: done.append(1))
    assert len(done) == 1000


def test_a_hang_names_what_is_waited_for(tiers: Tiers, busy: None) -> None:
    """After so many turns it is an AssertionError with the requests, copies and writes that are left."""
    done: list[int] = []
    with pytest.raises(AssertionError, match=r"it hangs: requests \{'asked-7': 'WAITING'\}, copies False, writes True"):
        tiers.until(lambda: False, lambda: done.append(1))
    assert len(done) == HANG_TURNS
