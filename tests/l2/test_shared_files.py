"""Calls that may hang, and names that one writer gets."""

import contextlib
import errno
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hotspan.core.types import MIB
from hotspan.l2.shared_files import Calls, FileCall, SharedFiles
from hotspan.testing.clock import SimulatedClock
from hotspan.tiers.io import IO_BYTES
from kit.waiting import PATIENCE_S, at_last, until


@pytest.fixture
def calls() -> Iterator[Calls]:
    calls = Calls("the directory", 0.2)
    yield calls
    calls.close()


@pytest.fixture
def patient() -> Iterator[Calls]:
    """For what does not hang."""
    calls = Calls("the directory", PATIENCE_S)
    yield calls
    calls.close()


@pytest.fixture
def files(tmp_path: Path) -> SharedFiles:
    return SharedFiles(tmp_path)


# -- calls ---------------------------------------------------------------------------------------------------------


def test_an_error_holds_nothing_of_its_job(patient: Calls) -> None:
    """When a failed call is over, the caller's buffers are free at once, without the garbage collector."""

    class Payload:
        pass

    def fail(call: FileCall, payload: Payload) -> None:
        raise OSError(errno.EIO, "broken")

    def ask(payload: Payload) -> None:
        with contextlib.suppress(OSError):
            patient.run(lambda call: fail(call, payload))

    payload = Payload()
    held = weakref.ref(payload)
    gc.disable()
    try:
        ask(payload)
        del payload
        patient.run(lambda call: None)  # its thread is done with the call before
        assert held() is None
    finally:
        gc.enable()


def test_a_call_returns_or_raises_what_its_job_does(patient: Calls) -> None:
    """Results and errors pass through, and a thread is used again."""
    threads = {patient.run(lambda call: threading.get_ident()) for _ in range(20)}
    assert len(threads) <= 2 and threading.get_ident() not in threads
    with pytest.raises(FileNotFoundError, match="/nowhere"):
        patient.run(lambda call: os.stat("/nowhere"))
    assert patient.run(lambda call: len(call.staging)) == IO_BYTES


def leave(calls: Calls, job: Callable[[FileCall], object], has_begun: threading.Event) -> None:
    """Call until a job that hangs is left in the middle: on a slow machine it may be left before it begins."""
    while not has_begun.is_set():
        with pytest.raises(TimeoutError, match="the directory did not answer"):
            calls.run(job)


def test_a_job_that_hangs_is_left(calls: Calls) -> None:
    """The caller gets TimeoutError in time; the job learns of it at its next step, and its thread serves again."""
    begun, released, ended = threading.Event(), threading.Event(), threading.Event()
    later: list[object] = []

    def hang(call: FileCall) -> None:
        begun.set()
        released.wait(PATIENCE_S)
        try:
            call.step()
        except TimeoutError:
            later.append(threading.get_ident())
            raise
        finally:
            ended.set()

    leave(calls, hang, begun)
    assert at_last(lambda: calls.run(lambda call: 5)) == 5
    released.set()
    assert ended.wait(PATIENCE_S) and later
    deadline = time.monotonic() + PATIENCE_S
    while at_last(lambda: calls.run(lambda call: threading.get_ident())) not in later:
        assert time.monotonic() < deadline


class Ending:
    """An event that is set after so many steps of a call, 0.15 s apart, or never."""

    def __init__(self, clock: SimulatedClock, call: FileCall, steps: float) -> None:
        self._clock, self._turn, self._left = clock, call, steps

    def wait(self, timeout_s: float) -> bool:
        if not self._left:
            self._clock.advance(timeout_s)
            return False
        self._clock.advance(0.15)
        self._turn.step()
        self._left -= 1
        return not self._left


def test_a_job_that_gets_on_may_take_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of many steps may take longer than the timeout in all; one that stops is left after the timeout."""
    monkeypatch.setattr("hotspan.l2.shared_files.time", clock := SimulatedClock())
    for steps, lasts_s in ((20, 3.0), (0, 0.2)):
        call, began_s = FileCall(lambda call: None), clock.monotonic()
        call.ended = Ending(clock, call, steps)  # type: ignore[assignment]
        assert call.wait(0.2) == bool(steps)
        assert clock.monotonic() - began_s == pytest.approx(lasts_s)


def test_nothing_is_copied_once_the_caller_has_left(calls: Calls) -> None:
    """What a read that hung brings at last does not reach a buffer that the caller has given to another use."""
    begun, released, ended = threading.Event(), threading.Event(), threading.Event()
    into = memoryview(bytearray(8))

    def read(call: FileCall) -> None:
        call.staging[:8] = b"12345678"
        call.copy(call.staging[:4], [into[:1], into[1:4]])
        begun.set()
        released.wait(PATIENCE_S)
        try:
            call.copy(call.staging[:8], [into])
        finally:
            ended.set()

    leave(calls, read, begun)
    assert into == b"1234\0\0\0\0"
    released.set()
    assert ended.wait(PATIENCE_S) and into == b"1234\0\0\0\0"


def test_threads_that_hang_are_limited(calls: Calls) -> None:
    """However often a hanging place is called there are no more than some threads, and then calls fail at once."""
    calls = Calls("the directory", 0.05)
    begun: list[int] = []
    released = threading.Event()
    before = threading.active_count()

    def hang(call: FileCall) -> None:
        begun.append(1)
        released.wait(PATIENCE_S)

    def fail(_: int) -> None:
        with pytest.raises(TimeoutError):
            calls.run(hang)

    with ThreadPoolExecutor(16) as threads:
        for _ in range(50):
            list(threads.map(fail, range(80)))
            if len(begun) == 64:  # else some were left before they began
                break
    assert threading.active_count() - before <= 64
    with pytest.raises(TimeoutError, match="hangs: 64 calls wait for it"):  # it has not waited itself
        calls.run(lambda call: None)
    released.set()
    assert at_last(lambda: calls.run(lambda call: 1)) == 1
    calls.close()
    deadline = time.monotonic() + PATIENCE_S
    while threading.active_count() > before:
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_after_close_nothing_runs(patient: Calls) -> None:
    """A closed place raises OSError."""
    patient.run(lambda call: None)
    patient.close()
    with pytest.raises(OSError, match="closed"):
        patient.run(lambda call: None)


# -- names ---------------------------------------------------------------------------------------------------------


def no_links(*arguments: object, **options: object) -> None:
    raise OSError(errno.EPERM, "this file system has no links")


@pytest.fixture(params=["links", "claims"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With links, and as where there are none."""
    if request.param == "claims":
        monkeypatch.setattr(os, "link", no_links)
    return str(request.param)


def publish(files: SharedFiles, calls: Calls, path: Path, *data: bytes) -> bool:
    return calls.run(lambda call: files.publish(path.relative_to(files.root), data, call))


@pytest.mark.usefixtures("way")
def test_the_first_of_a_name_stays(files: SharedFiles, patient: Calls, tmp_path: Path) -> None:
    """A file is published once, in directories that are made for it, and nothing temporary is left."""
    path = tmp_path / "a" / "b" / "file"
    large = [os.urandom(3 * MIB), b"", os.urandom(9 * MIB), *[b"x"] * 2000]
    assert publish(files, patient, path, *large)
    assert not publish(files, patient, path, b"second")
    assert path.read_bytes() == b"".join(large)
    assert os.listdir(path.parent) == ["file"] and os.listdir(tmp_path / "tmp") == []


@pytest.mark.usefixtures("way")
def test_of_many_writers_one_gets_a_name(tmp_path: Path) -> None:
    """Whoever publishes a name at the same time, one does, and the file is that one's."""
    for round in range(5):
        path = tmp_path / f"{round}"

        def race(number: int, path: Path = path) -> bool:
            calls = Calls("here", PATIENCE_S)
            try:
                return publish(SharedFiles(tmp_path), calls, path, b"%d" % number * 1000)
            finally:
                calls.close()

        with ThreadPoolExecutor(8) as threads:
            won = [number for number, is_ours in enumerate(threads.map(race, range(8))) if is_ours]
        assert len(won) == 1 and path.read_bytes() == b"%d" % won[0] * 1000
    assert sorted(os.listdir(tmp_path)) == ["0", "1", "2", "3", "4", "tmp"]


def test_a_link_that_meets_itself_is_ours(
    files: SharedFiles, patient: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the answer to a link was lost and the request was sent again, the file is still this writer's."""
    link = os.link

    def twice(source: str, target: str, **directories: Any) -> None:
        link(source, target, **directories)
        link(source, target, **directories)

    monkeypatch.setattr(os, "link", twice)
    assert publish(files, patient, tmp_path / "file", b"ours")
    monkeypatch.undo()
    assert not publish(files, patient, tmp_path / "file", b"theirs")


def test_a_claim_is_waited_for(
    files: SharedFiles, calls: Calls, patient: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who finds a claim waits for its owner: for his file, or for the claim to go; not beyond the deadline."""
    monkeypatch.setattr(os, "link", no_links)
    claim = tmp_path / "file.claim"
    claim.touch()
    with pytest.raises(TimeoutError):
        publish(files, calls, tmp_path / "file", b"late")
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(publish, files, patient, tmp_path / "file", b"next")
        time.sleep(0.02)
        claim.unlink()
        assert waiting.result(PATIENCE_S) and (tmp_path / "file").read_bytes() == b"next"
    claim.touch()
    assert not publish(files, patient, tmp_path / "file", b"third")


def test_a_dead_writers_claim_goes(
    files: SharedFiles, patient: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim of more than a minute ago keeps nobody."""
    monkeypatch.setattr(os, "link", no_links)
    claim = tmp_path / "file.claim"
    claim.touch()
    os.utime(claim, (time.time() - 100, time.time() - 100))
    assert publish(files, patient, tmp_path / "file", b"next") and not claim.exists()


@pytest.mark.parametrize("name", ["pwritev", "fsync", "link"])
def test_a_failed_publication_leaves_nothing(
    files: SharedFiles, patient: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Whatever fails while a file is published is an OSError, and no file is left, whole or in parts."""

    def fail(*arguments: object, **options: object) -> None:
        raise OSError(errno.EIO, "injected")

    monkeypatch.setattr(os, name, fail)
    with pytest.raises(OSError, match="injected"):
        publish(files, patient, tmp_path / "file", b"data")
    assert os.listdir(tmp_path / "tmp") == [] and not (tmp_path / "file").exists()


@pytest.mark.parametrize("most", [1, 2, 3, 100])
def test_a_disk_that_takes_little_gets_all(
    files: SharedFiles, patient: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Writes that end early go on where they ended; one that takes nothing is an OSError."""
    write: Callable[..., int] = os.pwritev
    taken = [most] * 20 + [0]
    monkeypatch.setattr(
        os, "pwritev", lambda fd, buffers, at: write(fd, [b"".join(buffers)[: taken.pop(0)]], at) if taken[0] else 0
    )
    assert publish(files, patient, tmp_path / "file", b"da", b"", b"ta!", b"x")
    assert (tmp_path / "file").read_bytes() == b"data!x"
    del taken[:-1]
    with pytest.raises(OSError, match="takes nothing"):
        publish(files, patient, tmp_path / "other", b"data")
    assert not (tmp_path / "other").exists()


def test_who_has_been_left_publishes_nothing(
    files: SharedFiles, calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer that hung until its caller left does not publish what may have changed under it."""
    begun, released, ended = threading.Event(), threading.Event(), threading.Event()
    sync = os.fsync

    def hang(fd: int) -> None:
        begun.set()
        released.wait(PATIENCE_S)
        sync(fd)

    def publish(call: FileCall) -> None:
        try:
            files.publish(tmp_path / "file", [b"data"], call)
        finally:
            ended.set()

    monkeypatch.setattr(os, "fsync", hang)
    leave(calls, publish, begun)
    released.set()
    assert ended.wait(PATIENCE_S) and not (tmp_path / "file").exists() and os.listdir(tmp_path / "tmp") == []


def test_a_directory_goes_at_once(files: SharedFiles, patient: Calls, tmp_path: Path) -> None:
    """A directory that is removed is gone under its name, and what is removed twice is no error."""
    (tmp_path / "d").mkdir()
    for name in "abc":
        (tmp_path / "d" / name).touch()
    for _ in range(2):
        patient.run(lambda call: files.remove(Path("d"), call))
    assert os.listdir(tmp_path) == ["tmp"] and os.listdir(tmp_path / "tmp") == []


def test_a_write_that_was_left_has_the_bytes_that_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that hangs goes on, once its caller has left, with what it was given: the buffer has gone to another."""
    calls, files, written = Calls("the directory", 0.05), SharedFiles(tmp_path), os.pwritev
    begun, released, ended = threading.Event(), threading.Event(), threading.Event()
    data, wrote = bytearray(b"a" * 5000), []

    def hang(fd: int, buffers: Sequence[memoryview], at: int) -> int:
        begun.set()
        assert released.wait(PATIENCE_S)
        wrote.append(b"".join(buffers))
        ended.set()
        return written(fd, buffers, at)

    monkeypatch.setattr(os, "pwritev", hang)
    leave(calls, lambda call: files.publish(Path("objects/x"), [memoryview(data)], call), begun)
    data[:] = b"b" * 5000
    released.set()
    assert ended.wait(PATIENCE_S) and set(wrote) == {b"a" * 5000}
    until(lambda: files.listed(Path("tmp"), 9) == [])
    assert files.listed(Path("objects"), 9) == []
