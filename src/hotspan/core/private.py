"""Directories of this user alone, locks on files, and names that outlast a loss of power."""

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from hotspan.core.deadline import Deadline
from hotspan.core.errors import ConfigError

SHARED, EXCLUSIVE = fcntl.LOCK_SH, fcntl.LOCK_EX
LIST = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags that open a directory, and no link to one."""

_OTHERS = 0o077
_POLL_S = 0.005


def is_private(found: os.stat_result, forbidden: int = _OTHERS) -> bool:
    """Whether it is a directory of this user's that gives others none of the `forbidden` permissions."""
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & forbidden


def is_private_directory(path: Path, forbidden: int = _OTHERS) -> bool:
    """The same of a path; a link to a directory is none."""
    try:
        return is_private(path.lstat(), forbidden)
    except OSError:
        return False


def private_directory(path: Path, what: str, remedy: str) -> Path:
    """A directory that only this user can look into, made if it is not there.

    what, remedy: what it is to hold ("the model"), and what else the user can give.
    Raises: ConfigError if it can't be made, or is open to others.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{what} can't be kept in {path} ({error.strerror}): {remedy}") from error
    if not is_private_directory(path):
        raise ConfigError(
            f"{what} can't be kept in {path}, which is open to other users: if it is yours, chmod 700 it; or {remedy}"
        )
    return path


def close_to_others(path: Path) -> bool:
    """Give a directory of this user's mode 0700; whether others have no permissions then. Raises: OSError."""
    found = os.stat(path)
    if found.st_uid != os.geteuid():
        return not found.st_mode & _OTHERS
    if found.st_mode & 0o777 != 0o700:
        os.chmod(path, 0o700)
    return True


_locked_by: dict[int, int] = {}
"""The process that locked a descriptor: a child of a fork has the descriptor, too, and may not unlock it."""


def lock(fd: int, kind: int = EXCLUSIVE, timeout_s: float | None = 0.0) -> bool:
    """Lock an open file or directory until `let_go`; False if others held it against that.

    timeout_s: how long to wait for them; None for as long as it takes. Raises: OSError.
    """
    if timeout_s is None:
        fcntl.flock(fd, kind)
        _locked_by[fd] = os.getpid()
        return True
    deadline = Deadline(timeout_s)
    while True:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
            _locked_by[fd] = os.getpid()
            return True
        except BlockingIOError:
            if not deadline.rest_s():
                return False
            time.sleep(_POLL_S)


def let_go(fd: int) -> None:
    """Close a descriptor that may be locked, and end its lock.

    A lock belongs to the open file: to close it is not enough while a child of a fork has it open. In such a child this
    closes only. Raises: OSError.
    """
    try:
        if _locked_by.pop(fd, None) == os.getpid():
            fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)


def open_lock(path: Path) -> int:
    """A descriptor of a file that is there to be locked; made if it is not there. Raises: OSError."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


@contextlib.contextmanager
def locked(path: Path, timeout_s: float | None = None) -> Iterator[None]:
    """Inside, no other process and no other thread is inside.

    The file is opened each time: a lock belongs to the open file, so threads exclude each other, too.
    Raises: TimeoutError after `timeout_s`; OSError.
    """
    fd = open_lock(path)
    try:
        if not lock(fd, timeout_s=timeout_s):
            raise TimeoutError(f"{path} has been locked by another process for {timeout_s:g} s")
        yield
    finally:
        let_go(fd)


def write_new(path: Path, content: bytes) -> None:
    """Write a file that only this user can read; its bytes are on disk before this returns, its name may not be.

    Its time of modification is exact: a kernel's own times may tick only each 4 ms, in which a file could be replaced
    under the same one.
    Raises: FileExistsError, OSError.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(content)
        file.flush()
        now_ns = time.time_ns()
        os.utime(fd, ns=(now_ns, now_ns))
        os.fsync(fd)


def write_whole(path: Path, content: bytes) -> None:
    """The same in the place of what has that name: whole or not at all. One process at a time. Raises: OSError."""
    draft = path.with_name(path.name + ".new")
    draft.unlink(missing_ok=True)
    write_new(draft, content)
    draft.replace(path)


def sync_directory(directory: Path | int) -> None:
    """Make the names in a directory durable: its path, or a descriptor (O_PATH will do). Raises: OSError."""
    if isinstance(directory, int):
        fd = os.open(".", LIST, dir_fd=directory)
    else:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
