"""The log of invalidations in the daemon's memory."""

import json
from pathlib import Path

import pytest

from hotspan.core.terms import Scope
from hotspan.daemon.log import MAX_NAME, MAX_REPLICAS, InvalidationLog
from hotspan.testing.clock import SimulatedClock
from hotspan.tiers.files import Files
from hotspan.tiers.log import LogFile


@pytest.fixture
def clock() -> SimulatedClock:
    """The log's."""
    return SimulatedClock()


def tenants(log: InvalidationLog, after: int, most_bytes: int = 1 << 20) -> list[int]:
    """What was invalidated after a generation."""
    return [json.loads(entry.text)["scope"]["tenant"] for entry in log.read(after, most_bytes).entries]


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


def test_what_is_written_is_the_log(clock: SimulatedClock, tmp_path: Path) -> None:
    """A log that goes on from its file is what it was, also after the oldest made room, or it began anew."""
    path = tmp_path / "log"
    log = InvalidationLog(clock, max_entries=3, file=LogFile(Files(), path))
    assert log.is_lost, "a new file is no log"
    for n in range(8):
        log.append([Scope(tenant=n)], "me")
        if n == 5:
            log.begin(log.generation + 9)
        log.write()
        after = InvalidationLog(clock, max_entries=3, file=LogFile(Files(), path))
        assert not after.is_lost
        assert (after.epoch, after.floor, after.generation) == (log.epoch, log.floor, log.generation)
        assert after.read(0, 1 << 20) == log.read(0, 1 << 20) and after._bytes == log._bytes
    assert tenants(after, 0) == [6, 7]


@pytest.mark.parametrize("cut", [1, 40])
def test_a_damaged_file_is_no_log(cut: int, clock: SimulatedClock, tmp_path: Path) -> None:
    """Where an entry can't be read, nobody can tell what was invalidated: the log begins anew, above it."""
    path = tmp_path / "log"
    log = InvalidationLog(clock, file=LogFile(Files(), path))
    log.append([Scope(tenant=1)], "me")
    log.write()
    path.write_bytes(path.read_bytes()[:-cut])
    after = InvalidationLog(clock, file=LogFile(Files(), path))
    assert after.is_lost and after.epoch != log.epoch and len(after) == 0


def test_the_file_does_not_grow_without_end(
    clock: SimulatedClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is written anew once it is much larger than what the log has."""
    monkeypatch.setattr("hotspan.daemon.log._SLACK_BYTES", 4096)
    file = LogFile(Files(), tmp_path / "log")
    log = InvalidationLog(clock, max_entries=2, file=file)
    sizes = []
    for n in range(40):
        log.append([Scope(labels=frozenset(range(n, n + 50)))], "me")
        log.write()
        sizes.append(file.bytes)
    assert max(sizes) < 16384 and sizes != sorted(sizes)
    assert InvalidationLog(clock, max_entries=2, file=LogFile(Files(), tmp_path / "log")).read(0, 1) == log.read(0, 1)


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
