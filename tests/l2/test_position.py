"""How far the shared log was followed: written when it is true, and believed only if it is whole."""

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hotspan.core.private import write_whole
from hotspan.l2 import position
from hotspan.l2.base import LogPosition
from hotspan.l2.position import PositionKeeper, read_position, write_position
from hotspan.tiers.directory import POSITION_FILE

ONE, TWO, THREE = (LogPosition(bytes(16), generation, b"%d" % generation) for generation in (1, 2, 3))


def at_once(job: Callable[[], object]) -> None:
    job()


def test_what_was_written_is_read(tmp_path: Path) -> None:
    """The newest position comes back; without one nobody knows."""
    assert read_position(tmp_path) is None
    assert write_position(tmp_path, ONE) and write_position(tmp_path, TWO)
    assert read_position(tmp_path) == TWO
    assert (tmp_path / POSITION_FILE).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"{", b"[]", b"[" * 100_000, b'{"epoch": "xy", "generation": 1}', b'{"epoch": "00"}'),
        b'{"epoch": "00", "generation": 1e999}',
    ],
)
def test_what_is_not_whole_is_not_believed(tmp_path: Path, data: bytes) -> None:
    """A torn or foreign file says nothing."""
    (tmp_path / POSITION_FILE).write_bytes(data)
    assert read_position(tmp_path) is None


def test_a_disk_that_does_not_take_it_is_no_fault(tmp_path: Path) -> None:
    """Where it can't be written, that is said, and nothing is raised."""
    assert not write_position(tmp_path / "missing", ONE)


def test_a_position_waits_for_what_leads_up_to_it(tmp_path: Path) -> None:
    """A later position is not written before the invalidations of an earlier one are durable."""
    keeper = PositionKeeper(tmp_path, at_once)
    first = keeper.follow(ONE, 2)
    keeper.follow(TWO, 0)
    first(True)
    assert read_position(tmp_path) is None
    first(True)
    assert read_position(tmp_path) == TWO


def test_what_could_not_be_made_durable_is_not_passed_over(tmp_path: Path) -> None:
    """After an invalidation that the disk did not log, no later position is written: the next start does it again."""
    keeper = PositionKeeper(tmp_path, at_once)
    keeper.follow(ONE, 0)
    keeper.follow(TWO, 1)(False)
    keeper.follow(THREE, 1)(True)
    assert read_position(tmp_path) == ONE


def test_an_older_position_never_replaces_a_newer_one(tmp_path: Path) -> None:
    """Whichever of the threads that write comes last."""
    jobs: list[Callable[[], object]] = []
    keeper = PositionKeeper(tmp_path, jobs.append)
    for each in (ONE, TWO):
        keeper.follow(each, 0)
    for job in reversed(jobs):
        job()
    assert read_position(tmp_path) == TWO


def test_threads_that_write_at_a_time_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One writes after the other, none fails for the other's draft, and in the end the newest is there."""
    writing, failed = threading.Semaphore(), list[str]()

    def watched(path: Path, content: bytes) -> None:
        if not writing.acquire(blocking=False):
            failed.append("two at a time")
        try:
            write_whole(path, content)
        except OSError as error:
            failed.append(str(error))
            raise
        finally:
            writing.release()

    monkeypatch.setattr(position, "write_whole", watched)
    numbers, following = itertools.count(1), threading.Lock()
    newest = [0]
    keeper = PositionKeeper(tmp_path, at_once)

    def follow() -> None:
        for _ in range(100):
            with following:  # one thread follows the log; those that make it durable are many
                newest[0] = next(numbers)
                durable = keeper.follow(LogPosition(bytes(16), newest[0], b"x"), 1)
            durable(True)

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(follow) for _ in range(4)]:
            done.result()
    assert not failed
    assert read_position(tmp_path) == LogPosition(bytes(16), newest[0], b"x")
