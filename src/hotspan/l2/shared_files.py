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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hotspan.core.buffers import parts_of
from hotspan.core.private import sync_directory
from hotspan.core.threads import start
from hotspan.l2.tree import Tree, delete_in
from hotspan.tiers.files import Buffer
from hotspan.tiers.io import IO_BYTES, copy

TEMPORARY = "tmp"
_TEMPORARY = Path(TEMPORARY)
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC

_T = TypeVar("_T")
_NO_LINKS = frozenset([errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS])
_TRIES = 3
_MAX_THREADS = 64
_CLAIM_S = 60.0
"""After which a claim is that of a writer who died."""


class FileCall:
    """One call, on a thread that its caller may leave behind."""

    def __init__(self, job: Callable[["FileCall"], Any]) -> None:
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

    def taken(self, buffers: Sequence[memoryview]) -> list[memoryview]:
        """The caller's bytes, in the thread's own memory: what hangs while it writes them may outlast the caller."""
        into = self.staging[: sum(map(len, buffers))]
        with self._lock:
            self.step()
            gather(buffers, into)
        return [into]

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
        self._idle: list[queue.SimpleQueue[FileCall | None]] = []
        self._threads = 0
        self._closed = False

    def run(self, job: Callable[[FileCall], _T]) -> _T:
        """What `job` returns or raises. Raises: TimeoutError if it does not get on; it may still do so later."""
        call = FileCall(job)
        self._free_thread().put(call)
        if not call.wait(self._timeout_s):
            raise TimeoutError(f"{self._name} did not answer in {self._timeout_s:g} s")
        error, call.error = call.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame, and what the caller gave
        result: _T = call.result
        return result

    def close(self) -> None:
        """End the threads; those that hang, when they no longer do."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for waiting in idle:
            waiting.put(None)

    def _free_thread(self) -> "queue.SimpleQueue[FileCall | None]":
        with self._lock:
            if self._closed:
                raise ConnectionError("the store is closed")
            if self._idle:
                return self._idle.pop()
            if self._threads >= _MAX_THREADS:
                raise TimeoutError(f"{self._name} hangs: {self._threads} calls wait for it")
            self._threads += 1
        waiting: queue.SimpleQueue[FileCall | None] = queue.SimpleQueue()
        start("l2-files", lambda: self._serve(waiting), failed=lambda error: self._lost(waiting))
        return waiting

    def _lost(self, waiting: "queue.SimpleQueue[FileCall | None]") -> None:
        """A thread ended before its time, for example without memory: its call is not answered, and others start."""
        with self._lock:
            self._threads -= 1
            if waiting in self._idle:
                self._idle.remove(waiting)

    def _serve(self, waiting: "queue.SimpleQueue[FileCall | None]") -> None:
        staging = memoryview(mmap.mmap(-1, IO_BYTES))  # closed with the last view of it
        while (call := waiting.get()) is not None:
            call.run(staging)
            with self._lock:
                is_over = self._closed
                if not is_over:
                    self._idle.append(waiting)
            call.ended.set()
            del call  # it holds the caller's buffers
            if is_over:
                break
        with self._lock:
            self._threads -= 1


class SharedFiles(Tree):
    """Publishing in a tree that others write, too. Methods raise OSError."""

    def publish(self, path: Path, buffers: Sequence[Buffer], call: FileCall, *, is_durable: bool = False) -> bool:
        """Make a file, and the directories on the way; False if there is one of that name.

        is_durable: the name, too, outlasts a loss of power.
        """

        def name(parent: int) -> bool:
            is_ours = fresh.link(parent, path.name, call)
            try:
                self.check_place(path.parent, parent)
            except FileNotFoundError:
                if is_ours:
                    os.unlink(path.name, dir_fd=parent)
                raise
            if is_ours and is_durable:
                sync_directory(parent)
            return is_ours

        with self.entered(_TEMPORARY, make=True) as temporary:
            fresh = _Fresh(temporary, secrets.token_hex(16))
            fresh.write(buffers, call)
            try:
                return self._in_directory(path.parent, name, call)
            finally:
                fresh.unlink()

    def replace(self, path: Path, data: bytes, call: FileCall) -> None:
        """Make a file, in the place of one of that name if there is one."""
        with self.entered(_TEMPORARY, make=True) as temporary, self.entered(path.parent, make=True) as parent:
            fresh = _Fresh(temporary, secrets.token_hex(16))
            fresh.write([data], call, is_synced=False)
            os.replace(fresh.name, path.name, src_dir_fd=temporary, dst_dir_fd=parent)

    def create(self, path: Path, call: FileCall) -> None:
        """Make an empty file, and the directories on the way, if there is none."""

        def make(parent: int) -> None:
            _created(path.name, parent)
            self.check_place(path.parent, parent)

        self._in_directory(path.parent, make, call)

    def remove(self, directory: Path, call: FileCall) -> bool:
        """Delete a directory of files: all of it at once, as far as anybody sees. False if it is not there.

        Of several who delete it at a time, one is told True, or raises after it.
        """
        call.step()
        gone = secrets.token_hex(16)
        with self.entered(_TEMPORARY, make=True) as temporary:
            try:
                with self.entered(directory.parent) as parent:
                    os.rename(directory.name, gone, src_dir_fd=parent, dst_dir_fd=temporary)
            except FileNotFoundError:
                return False
            delete_in(temporary, gone, call.step)
        return True

    def _in_directory(self, directory: Path, do: Callable[[int], _T], call: FileCall) -> _T:
        """Do something in a directory, which is made if need be, also if it is removed at this moment."""
        for tries in range(_TRIES):
            call.step()
            try:
                with self.entered(directory, make=True) as fd:
                    return do(fd)
            except FileNotFoundError:
                if tries == _TRIES - 1:
                    raise
        raise AssertionError("unreachable")


@dataclass(frozen=True, slots=True)
class _Fresh:
    """A file under a name of its own, in an open directory."""

    directory: int
    name: str

    def write(self, buffers: Sequence[Buffer], call: FileCall, *, is_synced: bool = True) -> None:
        call.step()
        fd = os.open(self.name, _CREATE, 0o600, dir_fd=self.directory)
        try:
            at = 0
            for some in parts_of(buffers, IO_BYTES):
                at += _write(fd, call.taken(some), at)
                call.step()
            if is_synced:
                os.fsync(fd)
        except BaseException:
            with contextlib.suppress(OSError):
                self.unlink()
            raise
        finally:
            os.close(fd)

    def unlink(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.name, dir_fd=self.directory)

    def link(self, parent: int, name: str, call: FileCall) -> bool:
        """Give it its name in another directory; False if there is one of that name."""
        try:
            os.link(self.name, name, src_dir_fd=self.directory, dst_dir_fd=parent, follow_symlinks=False)
        except FileExistsError:
            # Over NFS, a request that was sent twice meets itself.
            return os.stat(self.name, dir_fd=self.directory, follow_symlinks=False).st_nlink > 1
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            return self._claim(parent, name, call)
        return True

    def _claim(self, parent: int, name: str, call: FileCall) -> bool:
        claim = f"{name}.claim"
        while not _created(claim, parent):
            if _is_there(name, parent):
                return False
            call.check()
            with contextlib.suppress(FileNotFoundError):
                if time.time() - os.stat(claim, dir_fd=parent, follow_symlinks=False).st_mtime > _CLAIM_S:
                    os.unlink(claim, dir_fd=parent)
            time.sleep(0.005)
        try:
            if _is_there(name, parent):
                return False
            os.rename(self.name, name, src_dir_fd=self.directory, dst_dir_fd=parent)
            return True
        finally:
            os.unlink(claim, dir_fd=parent)


def gather(buffers: Sequence[Buffer], into: memoryview) -> None:
    """Copy buffers one after the other, with the GIL released. Shape: into has all their bytes."""
    at = 0
    for buffer in buffers:
        copy(buffer, [into[at : at + len(buffer)]])
        at += len(buffer)


def _is_there(name: str, parent: int) -> bool:
    try:
        os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _created(name: str, parent: int) -> bool:
    try:
        os.close(os.open(name, _CREATE, 0o600, dir_fd=parent))
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
