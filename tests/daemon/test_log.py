"""The entries of the shared log in the daemon's memory and in its file; what they mean is in tests/l2."""

from itertools import pairwise
from pathlib import Path

import pytest

from hotspan.core.terms import Scope
from hotspan.daemon.log import MAX_NAME, MAX_REPLICAS, NodeLog
from hotspan.l2.blobs import Entry, Stretch
from hotspan.l2.follower import LogFollower
from hotspan.l2.log import SharedInvalidationLog
from hotspan.testing.clock import SimulatedClock
from hotspan.tiers.files import Files
from hotspan.tiers.log import LogFile

EPOCH, OTHER = b"\1" * 16, b"\2" * 16


def filled(log: NodeLog, count: int, size: int = 10, first: int = 100) -> NodeLog:
    """A log that begins at a number, with so many entries behind that."""
    log.begin(b"", Entry(first, EPOCH, b""))
    for n in range(count):
        assert log.append(Entry(first + 1 + n, EPOCH, b"%d" % n + bytes(size)))
    return log


def numbers(stretch: Stretch | None) -> list[int]:
    """Of the entries."""
    assert stretch is not None
    return [entry.number for entry in stretch.entries]


def test_entries_are_in_order_without_a_gap() -> None:
    """An entry is added behind the newest one of its epoch and nowhere else; a log is replaced over its epoch only."""
    log = NodeLog()
    assert log.read(0) is None and not log.append(Entry(1, EPOCH, b"x"))
    filled(log, 3)
    for number, epoch in ((103, EPOCH), (105, EPOCH), (104, OTHER)):
        assert not log.append(Entry(number, epoch, b"x"))
    assert numbers(log.read(0)) == [100, 101, 102, 103] and numbers(log.read(102)) == [102, 103]
    assert numbers(log.read(500)) == [] and len(log) == 3
    for over in (b"", OTHER):
        log.begin(over, Entry(900, OTHER, b""))
        assert numbers(log.read(0))[0] == 100
    log.begin(EPOCH, Entry(900, OTHER, b""))
    assert log.read(0) == Stretch(Entry(900, OTHER, b""), [Entry(900, OTHER, b"")]) and len(log) == 0


def test_the_oldest_entries_make_room(clock: SimulatedClock) -> None:
    """Beyond its entries or bytes the oldest go, and readers learn up to where."""
    log = filled(NodeLog(max_entries=3), 5)
    assert numbers(log.read(0)) == [102, 103, 104, 105] and len(log) == 4
    assert len(filled(NodeLog(max_bytes=300), 9, size=100)) == 2
    shared = SharedInvalidationLog(NodeLog(clock, max_entries=3), 100, clock)
    generations = [shared.append([Scope(tenant=n)], "me") for n in range(6)]
    page = shared.read(generations[1])
    assert page.floor == generations[1] and [entry.generation for entry in page.entries] == generations[2:]


@pytest.fixture
def clock() -> SimulatedClock:
    """The log's."""
    return SimulatedClock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of the file."""
    return tmp_path / "log"


def reopened(path: Path, log: NodeLog) -> NodeLog:
    """What a daemon that starts again finds."""
    log.write()
    return NodeLog(max_entries=log._max_entries, file=LogFile(Files(), path))


def test_what_is_written_is_the_log(path: Path) -> None:
    """A log that goes on from its file is what it was, also after the oldest made room, or it began anew."""
    log = NodeLog(max_entries=3, file=LogFile(Files(), path))
    assert log.oldest is None, "a new file is no log"
    filled(log, 1)
    for n in range(8):
        assert log.append(Entry(102 + n, EPOCH, bytes(range(256)) + b"%d" % n))
        after = reopened(path, log)
        assert after.read(0) == log.read(0) and after._bytes == log._bytes
    log.begin(EPOCH, Entry(900, OTHER, b""))
    assert reopened(path, log).read(0) == log.read(0)


@pytest.mark.parametrize("cut", [1, 60])
def test_a_damaged_file_is_no_log(path: Path, cut: int) -> None:
    """Where an entry can't be read, nobody can tell what was invalidated: there is no log."""
    filled(NodeLog(file=LogFile(Files(), path)), 2).write()
    path.write_bytes(path.read_bytes()[:-cut])
    assert NodeLog(file=LogFile(Files(), path)).oldest is None


def test_a_torn_tail_is_dropped(path: Path) -> None:
    """A last write that a power loss cut, or of which it lost a sector, was not acknowledged: the rest is the log."""
    log = filled(NodeLog(file=LogFile(Files(), path)), 2)
    log.write()
    before, acknowledged = log.read(0), path.stat().st_size
    assert log.append(Entry(103, EPOCH, b"x" * 1500))
    log.write()
    data = path.read_bytes()
    torn = [
        data[:cut] for cut in (*range(acknowledged + 1, acknowledged + 40), *range(acknowledged + 40, len(data), 97))
    ]
    torn.append(data[:-1])
    edges = [acknowledged, *range(512, len(data), 512), len(data)]
    torn += [data[:start] + bytes(stop - start) + data[stop:] for start, stop in pairwise(edges)]
    assert len(torn) > 50
    for image in torn:
        path.write_bytes(image)
        after = NodeLog(file=LogFile(Files(), path))
        assert after.read(0) == before and path.stat().st_size == acknowledged
    assert after.append(Entry(103, EPOCH, b"y"))
    assert numbers(reopened(path, after).read(0)) == [100, 101, 102, 103]


@pytest.mark.parametrize("is_torn", [True, False])
def test_who_read_an_entry_that_was_lost_does_not_take_another_for_it(path: Path, *, is_torn: bool) -> None:
    """A power loss before an entry was durable, and one of its number: a replica that read the first did not do it."""
    log = NodeLog(file=LogFile(Files(), path))
    shared, before = SharedInvalidationLog(log, 100), LogFollower(SharedInvalidationLog(log, 100), "a")
    shared.append([Scope(tenant=1)], "b")
    log.write()
    acknowledged = path.stat().st_size
    for scopes in ([Scope()], [Scope(tenant=2)]):  # all that it finds at first, then what is not durable yet
        assert before.poll() and before.foreign() == scopes
        if scopes == [Scope()]:
            same = LogFollower(SharedInvalidationLog(log, 100), "a", since=before.position)
            assert same.poll() and same.foreign() == [], "it goes on where it was"
            lost = shared.append([Scope(tenant=2)], "b")
    if is_torn:
        log.write()
        path.write_bytes(path.read_bytes()[: acknowledged + 20])
    log = NodeLog(file=LogFile(Files(), path))
    assert SharedInvalidationLog(log, 100).append([Scope(tenant=3)], "c") == lost
    after = LogFollower(SharedInvalidationLog(log, 100), "a", since=before.position)
    assert after.poll() and Scope() in after.foreign()


def test_any_damage_to_what_was_acknowledged_leaves_no_log(path: Path) -> None:
    """A changed byte anywhere, the last entry included, or a lost sector that is not in the last entry."""
    log = filled(NodeLog(file=LogFile(Files(), path)), 2)
    log.write()
    first = path.stat().st_size
    assert log.append(Entry(103, EPOCH, b"x" * 1500))
    log.write()
    assert log.append(Entry(104, EPOCH, b"z"))
    log.write()
    data = path.read_bytes()
    damaged = [
        data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in (*range(first + 32), *range(first, len(data), 7))
    ]
    damaged += [data[:first] + bytes([data[first] ^ change]) + data[first + 1 :] for change in (8, 255)]
    damaged += [data[:at] + bytes(512) + data[at + 512 :] for at in (512, 1024)]
    for image in damaged:
        path.write_bytes(image)
        assert NodeLog(file=LogFile(Files(), path)).oldest is None


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"entries": [], "metadata": "x"},
        {"entries": [["x", EPOCH.hex(), ""]], "metadata": ""},
        {"entries": [[9, EPOCH.hex(), ""]], "metadata": ""},
        {"entries": [[1, 2, 3]], "metadata": ""},
        {"entries": 1, "metadata": ""},
    ],
)
def test_a_file_of_something_else_is_no_log(path: Path, body: dict[str, object]) -> None:
    """Entries that are none, or do not follow each other, are no log."""
    filled(NodeLog(file=LogFile(Files(), path)), 2).write()
    file = LogFile(Files(), path)
    file.bodies()
    file.add([body])
    assert NodeLog(file=LogFile(Files(), path)).oldest is None


def test_the_file_does_not_grow_without_end(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written anew once it is much larger than what the log has."""
    monkeypatch.setattr("hotspan.daemon.log._SLACK_BYTES", 4096)
    file = LogFile(Files(), path)
    log = filled(NodeLog(max_entries=2, file=file), 1)
    sizes = []
    for n in range(60):
        assert log.append(Entry(102 + n, EPOCH, b"x" * 500))
        log.write()
        sizes.append(file.bytes)
    assert max(sizes) < 16384 and sizes != sorted(sizes)
    assert reopened(path, log).read(0) == log.read(0)


def test_reports_are_bounded() -> None:
    """Of too many replicas those that reported longest ago are forgotten; names without measure are refused."""
    log = NodeLog()
    for n in range(MAX_REPLICAS + 1):
        log.write_report(str(n), b"{}")
    assert "0" not in log.read_reports() and len(log.read_reports()) == MAX_REPLICAS
    log.write_report("1", b"again")
    log.write_report("one more", b"{}")
    assert log.read_reports()["1"] == b"again" and "2" not in log.read_reports()
    log.write_report("1", None)
    assert "1" not in log.read_reports()
    for name, data in (("", b""), ("x" * (MAX_NAME + 1), b""), ("x", bytes(2000))):
        with pytest.raises(ValueError):
            log.write_report(name, data)
