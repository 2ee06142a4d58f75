"""The log of invalidations in the daemon's memory."""

import json

import pytest

from hotspan.core.terms import Scope
from hotspan.daemon.log import MAX_NAME, MAX_REPLICAS, InvalidationLog
from hotspan.l2.base import read_entry
from hotspan.testing.clock import SimulatedClock


class MemoryNotes:
    """Notes of a daemon that are there for the next one."""

    def __init__(self) -> None:
        self.found: dict[bytes, bytes] = {}

    def put(self, name: bytes, data: bytes | None) -> None:
        if data is None:
            self.found.pop(name, None)
        else:
            self.found[name] = data


@pytest.fixture
def clock() -> SimulatedClock:
    """The log's."""
    return SimulatedClock()


def tenants(log: InvalidationLog, after: int, most_bytes: int = 1 << 20) -> list[int]:
    """What was invalidated after a generation."""
    return [json.loads(entry.text)["scope"]["tenant"] for entry in log.read(after, most_bytes).entries]


@pytest.mark.parametrize("damage", [b"", b"{}", b"[]", b'{"generation": 5}', b"\xff", b"[" * 100_000])
def test_an_entry_that_was_noted_and_is_none_takes_everything(damage: bytes, clock: SimulatedClock) -> None:
    """What a daemon finds on its disk does not keep the replicas from reading on."""
    notes = MemoryNotes()
    log = InvalidationLog(clock, notes=notes)
    first, second, third = (log.append([Scope(tenant=n)], "me") for n in range(3))
    for name in list(notes.found):
        if name.endswith(second.to_bytes(8, "big")):
            notes.found[name] = damage
    entries = InvalidationLog(clock, notes=notes).read(0, 1 << 20).entries
    read = [read_entry(entry.generation, json.loads(entry.text)) for entry in entries]
    assert [(entry.generation, entry.scopes) for entry in read] == [
        (first, (Scope(tenant=0),)),
        (second, (Scope(),)),
        (third, (Scope(tenant=2),)),
    ]


def test_generations_are_of_the_time_and_never_repeat(clock: SimulatedClock) -> None:
    """A generation is the time in milliseconds, or one above the last; also above all of an earlier daemon's."""
    log = InvalidationLog(clock)
    assert log.generation == log.floor == clock.unix() * 1000
    first = [log.append([Scope()], "me") for _ in range(3)]
    assert first == [log.floor + n for n in (1, 2, 3)]
    clock.advance(60)
    assert log.append([Scope()], "me") == clock.unix() * 1000
    clock.advance(1)
    assert InvalidationLog(clock).floor > log.generation


def test_the_oldest_entries_make_room(clock: SimulatedClock) -> None:
    """Beyond its entries or bytes the oldest go, and the floor says up to where."""
    log = InvalidationLog(clock, max_entries=3)
    generations = [log.append([Scope(tenant=n)], "me") for n in range(5)]
    assert tenants(log, 0) == [2, 3, 4] and log.floor == generations[1] and len(log) == 3
    small = InvalidationLog(clock, most_bytes=300)
    for n in range(9):
        small.append([Scope(tenant=n)], "me")
    assert tenants(small, 0) == [7, 8]


def test_a_long_log_is_read_in_parts(clock: SimulatedClock) -> None:
    """A part has as many entries as were allowed, at least one, and says whether there are more."""
    log = InvalidationLog(clock)
    for n in range(4):
        log.append([Scope(tenant=n)], "me")
    read: list[int] = []
    after, has_more = 0, True
    while has_more:
        part = log.read(after, 250)
        assert 1 <= len(part.entries) <= 2
        read += [json.loads(entry.text)["scope"]["tenant"] for entry in part.entries]
        after, has_more = part.entries[-1].generation, part.has_more
    assert read == [0, 1, 2, 3] and len(log.read(0, 1).entries) == 1


def test_beginning_anew_is_another_epoch_above_all_before(clock: SimulatedClock) -> None:
    """After `begin` there is no entry, and the floor is above the generation that was named, whatever the time."""
    log = InvalidationLog(clock)
    log.append([Scope()], "me")
    epoch, above = log.epoch, log.generation + 10**6
    log.begin(above)
    assert log.epoch != epoch and log.floor == log.generation > above and len(log) == 0
    assert log.append([Scope()], "me") > log.floor


class Noted:
    """Notes in a dict."""

    def __init__(self) -> None:
        self.found: dict[bytes, bytes] = {}

    def put(self, name: bytes, data: bytes | None) -> None:
        self.found.pop(name, None)
        if data is not None:
            self.found[name] = data


def test_what_is_noted_is_the_log(clock: SimulatedClock) -> None:
    """A log that goes on from its notes says what it said, also after the oldest made room, or it began anew."""
    notes = Noted()
    log = InvalidationLog(clock, max_entries=3, notes=notes)
    for n in range(8):
        log.append([Scope(tenant=n)], "me")
        if n == 5:
            log.begin(log.generation + 9)
        after = InvalidationLog(clock, max_entries=3, notes=notes)
        assert (after.epoch, after.floor, after.generation) == (log.epoch, log.floor, log.generation)
        assert after.read(0, 1 << 20) == log.read(0, 1 << 20) and after._bytes == log._bytes
        assert len(notes.found) == 1 + len(log)
    assert tenants(after, 0) == [6, 7]


def test_replicas_are_bounded_and_die(clock: SimulatedClock) -> None:
    """A replica is there while its last report holds; too many, or names without measure, are refused."""
    log = InvalidationLog(clock)
    for n in range(MAX_REPLICAS):
        log.report(str(n), n, 5.0)
    with pytest.raises(ValueError):
        log.report("one more", 0, 5.0)
    log.report("0", 9, 50.0)
    assert log.replicas()["0"] == 9
    clock.advance(5)
    assert log.replicas() == {"0": 9}
    for name, ttl_s in (("", 1.0), ("x" * (MAX_NAME + 1), 1.0), ("x", 0.0), ("x", float("nan")), ("x", float("inf"))):
        with pytest.raises(ValueError):
            log.report(name, 0, ttl_s)
