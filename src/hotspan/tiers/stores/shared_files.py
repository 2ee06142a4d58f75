"""Files in a directory that several machines mount: they appear whole or not at all, and one writer of a name wins.

A file is written under a name of its own, synced, and then linked to its name, which the file system (NFS, too) does
for one of several at once. Where there are no links, who creates NAME.claim exclusively may rename its file to NAME.

A mount that hangs, hangs every thread that touches it, for as long as it likes: calls run on threads that can be left
behind, and only those touch what they read into.
"""

import contextlib
import errno
import mmap
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hotspan.tiers.files import Buffer
from hotspan.tiers.io import IO_BYTES, copy

TEMPORARY = "tmp"

_T = TypeVar("_T")
_NO_LINKS = frozenset([errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS])
_MOST_BUFFERS = 512
_TRIES = 3
_MOST_THREADS = 64
_CLAIM_S = 60.0
"""After which a claim is that of a writer who died."""


class Turn:
    """One call, on a thread that its caller may leave behind."""

    def __init__(self, job: Callable[["Turn"], Any]) -> None:
        self._job = job
        self._lock = threading.Lock()
        self._is_left = False
        self._stepped_s = time.monotonic()
        self.ended = threading.Event()
        self.result: Any = None
        self.error: Exception | None = None
        self.staging = memoryview(b"")

    def step(self) -> None:
        """The call gets on. Raises: TimeoutError if its caller has left."""
        self.check()
        self._stepped_s = time.monotonic()

    def check(self) -> None:
        """Raises: TimeoutError if the caller has left: nothing it would have to know of may happen any more."""
        if self._is_left:
            raise TimeoutError("the caller has left")

    def copy(self, source: memoryview, into: Sequence[memoryview]) -> None:
        """Copy into the caller's buffers, which are its own again once it has left."""
        with self._lock:
            self.step()
            copy(source, into)

    def run(self, staging: memoryview) -> None:
        """On the thread."""
        try:
            self.staging = staging
            self.step()
            self.result = self._job(self)
        except Exception as error:  # whatever it is, it is the caller's, if that still waits
            self.error = None if self._is_left else error

    def wait(self, timeout_s: float) -> bool:
        """Until it ended; False, and it is left, once it has not got on for `timeout_s`."""
        while not self.ended.wait(max(0.0, self._stepped_s + timeout_s - time.monotonic())):
            with self._lock:
                if time.monotonic() >= self._stepped_s + timeout_s:
                    self._is_left = True
                    return False
        return True


class Calls:
    """Threads for calls that may hang. `run` may be called from several threads.

    name:      of the place, for messages.
    timeout_s: how long a call may not get on.
    """

    def __init__(self, name: str, timeout_s: float) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[Turn | None]] = []
        self._threads = 0
        self._closed = False

    def run(self, job: Callable[[Turn], _T]) -> _T:
        """What `job` returns or raises. Raises: TimeoutError if it does not get on; it may still do so later."""
        turn = Turn(job)
        self._free_thread().put(turn)
        if not turn.wait(self._timeout_s):
            raise TimeoutError(f"{self._name} did not answer in {self._timeout_s:g} s")
        error, turn.error = turn.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame, and what the caller gave
        result: _T = turn.result
        return result

    def close(self) -> None:
        """End the threads; those that hang, when they no longer do."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for turns in idle:
            turns.put(None)

    def _free_thread(self) -> "queue.SimpleQueue[Turn | None]":
        with self._lock:
            if self._closed:
                raise ConnectionError("the store is closed")
            if self._idle:
                return self._idle.pop()
            if self._threads >= _MOST_THREADS:
                raise TimeoutError(f"{self._name} hangs: {self._threads} calls wait for it")
            self._threads += 1
        turns: queue.SimpleQueue[Turn | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, args=(turns,), name="hotspan-l2-files", daemon=True).start()
        return turns

    def _serve(self, turns: "queue.SimpleQueue[Turn | None]") -> None:
        staging = memoryview(mmap.mmap(-1, IO_BYTES))  # closed with the last view of it
        while (turn := turns.get()) is not None:
            turn.run(staging)
            with self._lock:
                is_over = self._closed
                if not is_over:
                    self._idle.append(turns)
            turn.ended.set()
            del turn  # it holds the caller's buffers
            if is_over:
                break
        with self._lock:
            self._threads -= 1


class SharedFiles:
    """Publishing under one root. Methods raise OSError."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def publish(self, path: Path, buffers: Sequence[Buffer], turn: Turn, *, is_durable: bool = False) -> bool:
        """Make a file; False if there is one of that name. is_durable: the name, too, outlasts a loss of power."""
        return self.publish_one([path], buffers, turn, is_durable=is_durable) is not None

    def publish_one(
        self, paths: Iterable[Path], buffers: Sequence[Buffer], turn: Turn, *, is_durable: bool = False
    ) -> Path | None:
        """The same under the first name that is free, which it returns; it is written once, however many are taken."""
        fresh = self._written(buffers, turn)
        try:
            for path in paths:
                if self._named_somewhere(fresh, path, turn):
                    if is_durable:
                        sync_directory(path.parent)
                    return path
            return None
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(fresh)

    def replace(self, path: Path, data: bytes, turn: Turn) -> None:
        """Make a file, in the place of one of that name if there is one."""
        fresh = self._written([data], turn, is_synced=False)
        path.parent.mkdir(0o700, parents=True, exist_ok=True)
        os.replace(fresh, path)

    def remove(self, directory: Path, turn: Turn) -> None:
        """Delete a directory of files, if it is there: all of it at once, as far as anybody sees."""
        turn.step()
        gone = self._temporary()
        try:
            gone.parent.mkdir(0o700, parents=True, exist_ok=True)
            os.rename(directory, gone)
        except FileNotFoundError:
            return
        for name in listed(gone):
            turn.step()
            os.unlink(gone / name)
        with contextlib.suppress(OSError):  # NFS keeps what is still open under another name
            os.rmdir(gone)

    def _temporary(self) -> Path:
        return self.root / TEMPORARY / secrets.token_hex(16)

    def _written(self, buffers: Sequence[Buffer], turn: Turn, *, is_synced: bool = True) -> Path:
        """A file under a name of its own."""
        fresh = self._temporary()
        fresh.parent.mkdir(0o700, parents=True, exist_ok=True)
        turn.step()
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            at = 0
            for some in _runs(buffers):
                at += _write(fd, some, at)
                turn.step()
            if is_synced:
                os.fsync(fd)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(fresh)
            raise
        finally:
            os.close(fd)
        return fresh

    def _named_somewhere(self, fresh: Path, path: Path, turn: Turn) -> bool:
        """Also if the directory of `path` is not there, or is removed at this moment."""
        for tries in range(_TRIES):
            turn.step()
            try:
                path.parent.mkdir(0o700, parents=True, exist_ok=True)
                return self._named(fresh, path, turn)
            except FileNotFoundError:
                if tries == _TRIES - 1:
                    raise
        return False

    def _named(self, fresh: Path, path: Path, turn: Turn) -> bool:
        try:
            os.link(fresh, path)
        except FileExistsError:
            return os.stat(fresh).st_nlink > 1  # over NFS, a request that was sent twice meets itself
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            return self._named_by_claim(fresh, path, turn)
        return True

    def _named_by_claim(self, fresh: Path, path: Path, turn: Turn) -> bool:
        claim = path.with_name(path.name + ".claim")
        while not _created(claim):
            if os.path.lexists(path):
                return False
            turn.check()
            with contextlib.suppress(FileNotFoundError):
                if time.time() - os.stat(claim).st_mtime > _CLAIM_S:
                    os.unlink(claim)
            time.sleep(0.005)
        try:
            if os.path.lexists(path):
                return False
            os.rename(fresh, path)
            return True
        finally:
            os.unlink(claim)


def sync_directory(path: Path) -> None:
    """The names in it outlast a loss of power."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def listed(path: Path) -> list[str]:
    """The names in a directory; none if there is no directory."""
    try:
        return os.listdir(path)
    except FileNotFoundError:
        return []


def is_gone(error: OSError) -> bool:
    """Whether it says that a file is no longer there; ESTALE says so of one on NFS that was open."""
    return error.errno in (errno.ENOENT, errno.ESTALE)


def _created(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        return False
    return True


def _write(fd: int, buffers: list[memoryview], at: int) -> int:
    """Write all of them, however little the disk takes at once, and empty the list; how many bytes they were."""
    start = at
    while buffers:
        count = os.pwritev(fd, buffers, at)
        if not count:
            raise OSError(errno.EIO, "the disk takes nothing")
        at += count
        while buffers and count >= len(buffers[0]):
            count -= len(buffers.pop(0))
        if count:
            buffers[0] = buffers[0][count:]
    return at - start


def _runs(buffers: Sequence[Buffer]) -> Iterator[list[memoryview]]:
    """The buffers for one write each: of about IO_BYTES, and not too many."""
    run: list[memoryview] = []
    size = 0
    for buffer in buffers:
        view = memoryview(buffer)
        for at in range(0, len(view), IO_BYTES):
            run.append(view[at : at + IO_BYTES])
            size += len(run[-1])
            if size >= IO_BYTES or len(run) == _MOST_BUFFERS:
                yield run
                run, size = [], 0
    if run:
        yield run
