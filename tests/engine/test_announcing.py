"""Announced texts are hashed in turns of tenants, as many as a tenant may have, while somebody waits for them."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from hotspan.core.terms import Scope
from hotspan.engine import announcing
from hotspan.engine.announcing import MAX_NAMED, WAITED_S, Announcer
from hotspan.server.admin import DURABLE_S
from hotspan.testing.clock import SimulatedClock

TURN_S = 0.05
LONG = 1024
"""Slices of a text of 131,072 tokens."""


class Naming:
    """A text of so many slices."""

    def __init__(self, slices: int) -> None:
        self.left = slices
        self.text = SimpleNamespace(all_chunks=list)

    def go_on(self) -> bool:
        self.left -= 1
        return self.left <= 0


@dataclass
class Announced:
    """begun: by the thread that begins texts."""

    begun: Future[Any]
    answer: Future[Any]
    naming: Naming


class Rig:
    """An engine with requests. hashed: the names of announcements whose text was handed on; turns: until then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(announcing, "in_order", lambda chunks: chunks)
        monkeypatch.setattr(announcing, "time", SimpleNamespace(thread_time=lambda: 0.0))  # no rest depends on the CPU
        self.prefetches = SimpleNamespace(is_busy=True, is_moving=False, ends_s=None)
        self.manager: Any = SimpleNamespace(cache=SimpleNamespace(prefetches=self.prefetches), rhythm=None)
        self.clock = SimulatedClock()
        self.announcer = Announcer(self.manager, "replica", lambda: None, self.clock)
        monkeypatch.setattr(self.announcer, "_wake", lambda: None)  # no thread: the test has the turns
        self.hashed: list[str] = []

    def announce(self, tenant: int, name: str, slices: int, *, is_begun: bool = True) -> Announced:
        begun, answer = Future[Any](), Future[Any]()
        naming = Naming(slices)
        if is_begun:
            begun.set_result(naming)
        self.announcer.named(begun, tenant, lambda chunks: self.hashed.append(name), answer)
        return Announced(begun, answer, naming)

    def turns(self, until: Callable[[], object], at_most: int = 10 * LONG) -> int:
        """How many the announcer takes until something is so."""
        for count in range(at_most):
            if until():
                return count
            self.clock.advance(TURN_S)
            self.announcer.turn()
        raise AssertionError(f"it is not so after {at_most} turns")


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


def test_one_tenants_long_texts_delay_anothers_by_a_slice(rig: Rig) -> None:
    """Whether they have begun or not: of 200 texts of 131,072 tokens, one slice comes before a short text."""
    for n in range(200):
        rig.announce(1, f"a{n}", LONG)
    rig.announce(2, "b0", 1)
    assert rig.turns(lambda: rig.hashed) <= 2 and rig.hashed == ["b0"]
    rig.announce(3, "c0", 3)
    assert rig.turns(lambda: "c0" in rig.hashed) <= 6


def test_a_tenant_has_so_many_at_most(rig: Rig) -> None:
    """With one more its oldest is dropped: its asker is told, and the thread that begins texts lets go of it."""
    first = rig.announce(1, "a0", 2, is_begun=False)
    other = rig.announce(2, "b0", 2)
    rest = [rig.announce(1, f"a{n}", 2) for n in range(1, MAX_NAMED + 1)]
    assert first.begun.cancelled() and isinstance(first.answer.exception(), TimeoutError)
    assert not other.answer.done() and not any(each.answer.done() for each in rest)
    assert rig.announcer._namings.count(1) == MAX_NAMED
    rig.turns(lambda: not rig.announcer._namings)
    assert sorted(rig.hashed) == sorted(["b0", *(f"a{n}" for n in range(1, MAX_NAMED + 1))])


def test_what_nobody_waits_for_is_not_hashed(rig: Rig) -> None:
    """Given up by its asker, or older than the server waits: no slice of it is hashed."""
    given_up = [rig.announce(1, f"a{n}", LONG) for n in range(5)]
    for each in given_up:
        each.answer.cancel()
    rig.announce(1, "a5", 1)
    assert rig.turns(lambda: rig.hashed) == 1 and rig.hashed == ["a5"]
    old = [rig.announce(1, f"old {n}", LONG) for n in range(5)]
    rig.clock.advance(WAITED_S + TURN_S)
    rig.announce(1, "a6", 1)
    assert rig.turns(lambda: "a6" in rig.hashed) == 1
    assert all(each.naming.left == LONG for each in given_up + old)
    assert all(isinstance(each.answer.exception(), TimeoutError) for each in old)
    assert not rig.announcer._namings


def test_what_is_being_hashed_goes_on(rig: Rig) -> None:
    """A text that takes longer than the server waits is brought into RAM all the same: its request may come later."""
    rig.announce(1, "long", LONG)
    assert rig.turns(lambda: rig.hashed) * TURN_S > WAITED_S


def test_one_that_has_not_begun_delays_nobody(rig: Rig) -> None:
    """The files of its adapter or the keys of its tenant are waited for: others have their turns meanwhile."""
    late = rig.announce(1, "late", 1, is_begun=False)
    rig.announce(2, "b0", 2)
    assert rig.turns(lambda: rig.hashed) == 2
    late.begun.set_result(late.naming)
    assert rig.turns(lambda: "late" in rig.hashed) == 1


def test_one_that_fails_is_told_and_the_next_is_hashed(rig: Rig) -> None:
    """Whether it could not be begun, or fails in a slice."""
    broken = rig.announce(1, "broken", 1, is_begun=False)
    broken.begun.set_exception(KeyError("a mistake"))
    also = rig.announce(1, "also", 1)
    also.naming.go_on = None  # type: ignore[assignment]
    rig.announce(1, "well", 1)
    assert rig.turns(lambda: rig.hashed) == 3 and rig.hashed == ["well"]
    assert isinstance(broken.answer.exception(), KeyError) and isinstance(also.answer.exception(), TypeError)


def test_labels_are_searched_for_one_between_two_steps(rig: Rig) -> None:
    """However many searches come at once, one is made in each turn, tenants in turn; those that nobody waits for, and
    those that are too many of a tenant, are none.
    """
    searched: list[str] = []
    rig.manager.cache.labelled = lambda scope: [scope]

    def search(tenant: int, name: str) -> Future[Any]:
        answer = Future[Any]()
        rig.announcer.labelled(Scope(tenant=tenant), tenant, lambda chunks: searched.append(name), answer)
        return answer

    answers = [search(1, f"a{n}") for n in range(MAX_NAMED + 3)]
    search(2, "b0")
    assert [answer.done() for answer in answers] == [True] * 3 + [False] * MAX_NAMED
    rig.announcer.turn()
    assert searched == ["a3"]
    answers[4].cancel()
    rig.announcer.turn()
    rig.announcer.turn()
    assert searched == ["a3", "b0", "a5"]
    rig.clock.advance(WAITED_S + TURN_S)
    rig.announcer.turn()
    assert len(searched) == 3 and all(answer.done() for answer in answers[6:]) and not rig.announcer._labelled


def test_a_long_search_is_followed_by_a_rest(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside requests a search that took 10 ms of the scheduler's thread leaves it alone for 20 times as long, at
    least; without requests the next one follows at once.
    """
    cpu_s, searched = [0.0], []
    monkeypatch.setattr(announcing, "time", SimpleNamespace(thread_time=lambda: cpu_s[0]))

    def search(scope: Scope) -> list[Any]:
        cpu_s[0] += 0.01
        searched.append(rig.clock.monotonic())
        return []

    rig.manager.cache.labelled = search
    for _ in range(6):
        rig.announcer.labelled(Scope(tenant=1), 1, lambda chunks: None, Future())
    rig.turns(lambda: len(searched) == 3)
    assert searched[2] - searched[1] >= 0.2 and searched[1] - searched[0] >= 0.2
    rig.prefetches.is_busy = False
    assert rig.turns(lambda: len(searched) == 6) == 3


def test_it_waits_as_long_as_the_server() -> None:
    """The server is not imported by the engine; both have the same time."""
    assert WAITED_S == DURABLE_S
