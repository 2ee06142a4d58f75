"""The log in a bucket: generations are given once and in order, and what it does not know it says."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import xxhash

from hotspan.core.terms import Scope
from hotspan.l2 import s3_log
from hotspan.l2.base import LogPage, SharedInvalidation, SharedLog
from hotspan.testing.clock import SimulatedClock
from tests.l2.s3.rig import Place, Replicas

Logs = Callable[..., SharedLog]


@pytest.fixture
def clock() -> SimulatedClock:
    """Of all replicas."""
    return SimulatedClock()


@pytest.fixture
def opened(replica: Replicas, clock: SimulatedClock) -> Logs:
    """Makes logs of one place, each with a connection of its own."""

    def made(**settings: Any) -> SharedLog:
        log = replica(clock, **settings).log
        assert log is not None
        return log

    return made


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three entries a page."""
    monkeypatch.setattr(s3_log, "_PAGE_ENTRIES", 3)


def numbers(page: LogPage) -> list[int | None]:
    """The tenants that its entries are about: tests count them."""
    return [entry.scopes[0].tenant for entry in page.entries]


def append(log: SharedLog, *tenants: int) -> list[int]:
    """Append an entry for each."""
    return [log.append([Scope(tenant=tenant)], "w") for tenant in tenants]


@pytest.mark.usefixtures("small_pages")
def test_generations_are_given_once(opened: Logs) -> None:
    """Appends of many replicas at once, over many pages, get generations without a gap, each its own."""
    four = [opened() for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        given = list(pool.map(lambda nth: (append(four[nth % 4], nth)[0], nth), range(24)))
    page = opened().read(0)
    assert sorted(generation for generation, _ in given) == list(range(page.floor + 1, page.floor + 25))
    assert [(entry.generation, entry.scopes[0].tenant) for entry in page.entries] == sorted(given)


@pytest.mark.usefixtures("small_pages")
def test_any_generation_can_be_read_from(opened: Logs) -> None:
    """From whichever generation a replica reads, new or not, it gets all that follow, over the pages' borders."""
    writer, reader = opened(), opened()
    floor = reader.read(0).floor
    for last in range(1, 10):
        append(writer, last)
        for after in range(last + 1):
            for log in (reader, opened()):
                page = log.read(floor + after)
                assert (numbers(page), page.generation) == (list(range(after + 1, last + 1)), floor + last)


@pytest.mark.usefixtures("small_pages")
def test_a_long_log_forgets_its_beginning_and_says_so(opened: Logs, place: Place) -> None:
    """Old pages go; who has not read them is told up to where nothing is known, who has loses nothing."""
    writer, reader, late = (opened(log_entries=6) for _ in range(3))
    floor = reader.read(0).floor
    for last in range(1, 17):
        append(writer, last)
        if last <= 12:
            reader.read(floor + last - 1)
    page = late.read(0)
    kept = numbers(page)
    assert kept[-6:] == list(range(11, 17)) and len(kept) <= 12 and page.floor == floor + 16 - len(kept)
    page = reader.read(floor + 12)
    assert numbers(page) == [13, 14, 15, 16] and page.floor <= floor + 12
    page = reader.read(floor + 3)
    assert numbers(page) == kept and page.floor == floor + 16 - len(kept)
    assert len(pages(place)) <= 12


@pytest.mark.usefixtures("small_pages")
def test_a_page_that_is_missing_raises_the_floor(opened: Logs, place: Place) -> None:
    """Behind a page that somebody deleted nothing is known."""
    writer = opened()
    generations = append(writer, *range(1, 9))
    place.delete(pages(place)[1])
    page = opened().read(0)
    assert (numbers(page), page.floor) == ([7, 8], generations[5])


def pages(place: Place) -> list[str]:
    """The paths of a log's pages, in order."""
    return [path for path in place.paths("log") if "/pages/" in path]


@pytest.mark.parametrize(
    ("scope", "taken"), [({"tenant": 7}, Scope(tenant=7)), ({"tenant": "7"}, Scope()), (5, Scope())]
)
def test_an_entry_of_another_form_takes_its_tenant(opened: Logs, place: Place, scope: object, taken: Scope) -> None:
    """In a page that is whole: all of its tenant goes, or everything if that can't be read; the log goes on behind."""
    generations = append(opened(), 1, 2)
    (path,) = pages(place)
    said = json.dumps([{"by": "w", "scope": scope}, {"by": "w", "scope": Scope(tenant=2).to_json()}]).encode()
    place.write(path, xxhash.xxh3_64_digest(said) + said)
    page = opened().read(0)
    assert page.entries[0] == SharedInvalidation(generations[0], (taken,), "w", is_whole=False)
    assert page.entries[1].is_whole and append(opened(), 3) == [generations[1] + 1]


def test_a_damaged_page_is_an_error(opened: Logs, place: Place) -> None:
    """A page that somebody changed is no log: it is not read past, and nothing is appended to it."""
    append(opened(), 7)
    (path,) = pages(place)
    whole = place.read(path)
    for damaged in (b"", b"something else", whole[:-1], whole.replace(b":7", b":8")):
        place.write(path, damaged)
        with pytest.raises(OSError, match="damaged"):
            opened().read(0)
        with pytest.raises(OSError, match="damaged"):
            append(opened(), 8)
    place.write("log/epoch", b"something else")
    with pytest.raises(OSError, match="damaged"):
        opened().read(0)


@pytest.mark.parametrize("lost", ["all", "epoch", "pages"])
def test_a_lost_log_begins_anew_with_another_epoch(opened: Logs, place: Place, lost: str) -> None:
    """All replicas see one new epoch, above all generations of the old one, and read all that it says."""
    logs = [opened() for _ in range(3)]
    *_, last = append(logs[0], 1, 2, 3)
    before = {log.read(0).epoch for log in logs}
    for path in place.paths("log"):
        if lost == "all" or (lost == "epoch") == path.endswith("epoch"):
            place.delete(path)
    (generation,) = append(logs[1], 4)
    assert generation > last + 1
    found = [log.read(last) for log in logs]
    assert [numbers(page) for page in found] == [[4]] * 3
    assert len({page.epoch for page in found} | before) == 2 and {page.floor for page in found} == {generation - 1}
    assert append(logs[0], 5) == [generation + 1]
    assert [numbers(log.read(generation)) for log in logs] == [[5]] * 3


@pytest.mark.parametrize("who", ["writer", "reader"])
def test_a_log_that_went_back_begins_anew(opened: Logs, place: Place, who: str) -> None:
    """A page as it was before an entry that was read makes another log, above that entry, whoever notices."""
    writer, reader = opened(), opened()
    append(writer, 1)
    (path,) = pages(place)
    old = place.read(path)
    append(writer, 2)
    before = reader.read(0)
    place.write(path, old)
    if who == "writer":
        append(writer, 3)
    page = reader.read(before.generation)
    assert page.epoch != before.epoch and page.floor > before.generation
    assert numbers(page) == ([3] if who == "writer" else [])
    assert page.generation == page.floor + len(page.entries)


def test_an_entry_that_nobody_would_read_is_written_again(opened: Logs, place: Place) -> None:
    """An append to a log that somebody replaced meanwhile goes to the new one."""
    writer, other = opened(), opened()
    append(writer, 1)
    place.delete("log/epoch")
    append(other, 2)
    assert numbers(other.read(0)) == [2]
    append(writer, 3)
    assert numbers(other.read(0)) == numbers(writer.read(0)) == [2, 3]


def test_what_was_just_said_is_not_written_again(opened: Logs, place: Place, clock: SimulatedClock) -> None:
    """A report that changes nothing costs no request, until a third of its time has passed; after `forget` it does."""
    log = opened()
    log.report("a", 1, 9.0)
    (path,) = (path for path in place.paths("log") if "/replicas/" in path)
    place.delete(path)
    clock.advance(2)
    log.report("a", 1, 9.0)
    assert log.replicas() == {}
    clock.advance(1)
    log.report("a", 1, 9.0)
    assert log.replicas() == {"a": 1}
    log.forget("a")
    log.report("a", 1, 9.0)
    assert log.replicas() == {"a": 1}


def test_a_replica_says_it_again_to_a_new_log(opened: Logs, place: Place) -> None:
    """Once a replica has read that the log began anew, its next report is written there."""
    log = opened()
    log.read(0)
    log.report("a", 1, 60.0)
    place.delete("log/epoch")
    log.read(0)
    log.report("a", 1, 60.0)
    assert log.replicas() == {"a": 1}


def test_replicas_that_are_long_dead_leave_nothing(opened: Logs, place: Place, clock: SimulatedClock) -> None:
    """What a replica left is deleted an hour after its time was over, and a file that no replica wrote is ignored."""
    log = opened()
    log.report("a", 1, 9.0)
    (path,) = (path for path in place.paths("log") if "/replicas/" in path)
    place.write(path.rpartition("/")[0] + "/stray", b"something else")
    clock.advance(3700)
    assert log.replicas() == {}
    assert path not in place.paths("log")


@pytest.mark.parametrize("number", ["1e999", "1" + "0" * 400, "NaN", '"x"', "null", "[]", "[" * 100_000])
def test_a_report_with_a_number_beyond_all_bounds_is_ignored(opened: Logs, place: Place, number: str) -> None:
    """A foreign file among the reports costs no other replica its report, whatever number or depth is in it."""
    log = opened()
    log.report("a", 1, 9.0)
    (path,) = (path for path in place.paths("log") if "/replicas/" in path)
    for name, body in (
        ("generation", f'{{"replica": "r", "generation": {number}, "until_s": 9e12}}'),
        ("until", f'{{"replica": "s", "generation": 1, "until_s": {number}}}'),
    ):
        place.write(f"{path}-{name}", body.encode())
    assert log.replicas().items() >= {"a": 1}.items()
