"""Directories that several processes use at once: each holds them by a lock, and who lets go last removes them.

ROOT/                                 of one user alone; locked while names in it change
ROOT/<64 hex digits>/, ROOT/part-*/   locked by each who uses it
"""

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from hotspan.core.private import EXCLUSIVE, LIST, SHARED, is_private, let_go, lock

PART = "part-"
_OURS = re.compile(rf"[0-9a-f]{{64}}|{PART}[a-z0-9_]+")


def hold(path: Path, kind: int = SHARED) -> int:
    """A descriptor that holds a directory until `let_go`. Raises: OSError if another holds it against that."""
    fd = os.open(path, LIST)
    try:
        if not lock(fd, kind):
            raise BlockingIOError(errno.EAGAIN, "is held by another process", str(path))
    except OSError:
        let_go(fd)
        raise
    return fd


def remove_unheld(path: Path) -> None:
    """Remove a directory with all that is in it, unless somebody holds it. Never raises OSError."""
    with contextlib.suppress(OSError):  # held by another, or not ours: it stays
        mine = hold(path, EXCLUSIVE)
        shutil.rmtree(path, ignore_errors=True)
        let_go(mine)


@contextlib.contextmanager
def changing(root: Path, *, make: bool = True) -> Iterator[None]:
    """Nobody else makes, renames or removes what is in `root` meanwhile.

    make:   the directory is made if it is not there: who used it last removed it.
    Blocks: while another does. Raises: OSError, also if the directory is not this user's alone.
    """
    while True:
        if make:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            fd = os.open(root, LIST)
        except FileNotFoundError:
            if make:
                continue  # it went in between
            raise
        try:
            lock(fd, timeout_s=None)
            found = os.fstat(fd)
            if not is_private(found):
                raise PermissionError(errno.EPERM, "is not a directory of this user's alone (mode 0700)", str(root))
            if _is_at(root, found):  # else it was removed while this waited for the lock
                yield
                return
        finally:
            let_go(fd)


def _is_at(root: Path, found: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.lstat(root), found)
    except FileNotFoundError:
        return False


def sweep(root: Path, *, is_whole: bool) -> None:
    """Remove what nobody holds; is_whole: `root`, too, if nothing is left in it. Never raises OSError."""
    with contextlib.suppress(OSError), changing(root, make=False):
        for path in root.iterdir():
            if _OURS.fullmatch(path.name):  # all else is somebody's
                remove_unheld(path)
        if is_whole:
            root.rmdir()
