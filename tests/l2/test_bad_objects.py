"""Single objects of a store that are bad cost their chunks, are made anew, and give up no tier."""

import errno
import os
from collections.abc import Callable, Iterator

import pytest

from hotspan.core.terms import Terms
from hotspan.core.types import Chunk
from hotspan.testing.chunks import aligned, chain, content
from hotspan.testing.clock import SimulatedClock
from hotspan.tiers.base import Fault
from kit.simulated.lower import SettledTier
from kit.simulated.memory_store import BadObjects
from tests.l2.test_remote import SIZE, Replica

BAD = 2
"""The place of the bad chunk in its text."""


@pytest.fixture
def server() -> BadObjects:
    clock = SimulatedClock()
    return BadObjects(clock, wait=clock.advance)


@pytest.fixture(params=[False, True], ids=["plain", "sealed"])
def make(request: pytest.FixtureRequest, server: BadObjects) -> Iterator[Callable[[], Replica]]:
    """Makes replicas over one server; their books are checked at the end."""
    made: list[Replica] = []

    def replica() -> Replica:
        made.append(Replica(server, f"r{len(made)}", is_sealed=request.param))
        return made[-1]

    yield replica
    for one in made:
        one.turn()
        one.tier.check()
        one.tier.close(1.0)


def pause(replica: Replica) -> None:
    """Longer than what failed is left alone for."""
    assert isinstance(replica.clock, SimulatedClock)
    replica.clock.advance(11.0)
    replica.poll()


def test_an_object_that_can_not_be_told_hides_no_other(make: Callable[[], Replica], server: BadObjects) -> None:
    """Where the store can't tell of one object of a text, what comes before it is found, and it is asked once in ten
    seconds; of chunks that do not build on each other, all others are found.
    """
    a, b, c = make(), make(), make()
    chunks = chain("text", 8)
    a.store(chunks)
    server.bad[chunks[BAD].key] = "head"
    assert b.ask(chunks) == [n < BAD for n in range(8)]
    asked = server.met["head"]
    assert b.ask(chunks) == [n < BAD for n in range(8)] and server.met["head"] == asked
    loose = [Chunk(chunk.key, None, chunk.index) for chunk in chain("windows", 8)]
    a.store(loose)
    server.bad[loose[BAD].key] = "head"
    assert c.ask(loose) == [n != BAD for n in range(8)]
    pause(b)
    del server.bad[chunks[BAD].key]
    assert all(b.ask(chunks))


@pytest.mark.parametrize("kind", ["head", "read"])
def test_an_object_that_can_not_be_read_is_made_anew(
    make: Callable[[], Replica], server: BadObjects, kind: str
) -> None:
    """Who computed its chunk meanwhile stores it in the object's place, where it is a hit for all."""
    a, b = make(), make()
    chunks = chain("text", 3)
    a.store(chunks)
    server.bad, server.moves = {chunks[BAD].key: kind}, True
    b.ask(chunks)
    assert b.load(chunks[BAD].key) == (Fault.IO if kind == "read" else None)
    pause(b)  # to compute it takes a while
    assert b.store(chunks[BAD:]) == [None]
    pause(b)
    assert all(b.ask(chunks)) and b.load(chunks[BAD].key) == content(chunks[BAD].key, SIZE)


def test_an_object_that_can_not_be_written_gives_up_no_tier(make: Callable[[], Replica], server: BadObjects) -> None:
    """However often its chunk is offered, it is tried once in ten seconds, and nobody judges the store by it."""
    a = make()
    (chunk,) = chain("text", 1)
    server.bad[chunk.key] = "write"
    lower = SettledTier(lambda again: a.tier, a.clock)
    for turn in range(1, 7):
        for _ in range(5):
            lower.submit_store(chunk, Terms(), aligned(SIZE, content(chunk.key, SIZE)))
            a.queues.run()
            assert not any(transfer.fault is None for transfer in lower.finished())
        assert server.met["write"] == turn and lower.trips == 0 and lower.is_up
        pause(a)
    del server.bad[chunk.key]
    assert a.store([chunk]) == [None] and a.load(chunk.key) == content(chunk.key, SIZE)


def test_a_store_that_is_away_is_asked_once(make: Callable[[], Replica], server: BadObjects) -> None:
    """Where not one object is at fault but the store, its chunks are not asked for one by one."""
    a = make()
    calls: list[str] = []

    def away(call: str) -> None:
        if call == "read objects":
            calls.append(call)
            raise ConnectionResetError("gone")

    server.before = away
    assert a.ask(chain("text", 4)) == [False] * 4
    assert calls == ["read objects"]


def test_a_store_that_fails_for_all_is_not_asked_for_each(make: Callable[[], Replica], server: BadObjects) -> None:
    """An error that may be of one object, for every object of many that do not build on each other: it is given up."""
    a = make()
    calls: list[str] = []

    def fail(call: str) -> None:
        if call == "read objects":
            calls.append(call)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    server.before = fail
    loose = [Chunk(chunk.key, None, chunk.index) for chunk in chain("windows", 100)]
    assert a.ask(loose) == [False] * 100
    assert 2 < len(calls) < 20
