"""A directory that one process owns, with a preallocated file of which it reads and writes with O_DIRECT.

    DIR/lock    held by the owner, with its process id
    DIR/slab    allocated at the start, so that a full disk is an error then and never one later

Everything is 0600 in a 0700 directory. What else lies there is its owner's, a disk tier's or the
node's daemon's (tiers/directory.py); `whose` names it in every message.
"""

import errno
import logging
import mmap
import os
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from hotspan.core.errors import DirectoryError
from hotspan.core.private import close_to_others
from hotspan.core.types import GIB, PAGE_BYTES
from hotspan.tiers.files import Files, whole

logger = logging.getLogger(__name__)


class SlabFile(NamedTuple):
    """An open slab, and whether it does direct I/O."""

    fd: int
    direct: bool


def open_file(files: Files, path: Path, flags: int = 0) -> int:
    """The descriptor of a file that is made if it is not there. Raises: OSError."""
    return files.open(path, os.O_RDWR | os.O_CREAT | flags)


def make_directory(path: Path, own_files: Collection[str], whose: str, *, known_by: str | None = None) -> None:
    """Make it, if it is not there.

    known_by: a file by which it is known for one of ours, whatever else lies there.
    Raises:   OSError; DirectoryError if it holds files of others.
    """
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "not a directory", str(path))
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    foreign = sorted(each.name for each in path.iterdir() if each.name not in own_files)
    if foreign and not (known_by is not None and (path / known_by).exists()):
        raise DirectoryError(
            f"{whose}'s directory {path} holds other files ({', '.join(foreign[:3])}): give --disk an empty directory"
        )
    close_to_others(path)


def lock_directory(files: Files, path: Path, whose: str) -> int:
    """The descriptor that holds the lock. Raises: OSError; DirectoryError if another process has it."""
    fd = open_file(files, path / "lock")
    try:
        if not files.lock(fd):
            owner = _signed(files, fd)
            raise DirectoryError(
                f"{whose}'s directory {path} is in use by process {owner}: "
                "each server needs a directory of its own, give --disk another one or stop that server"
            )
        _sign(files, fd, path)
    except BaseException:
        files.close(fd)
        raise
    return fd


def _sign(files: Files, fd: int, path: Path) -> None:
    """Write who holds the lock, for the messages of others; it is held without that, also where its place is bad."""
    name = f"{os.getpid()}\n".encode()
    try:
        files.truncate(fd, 0)
        whole(files.pwrite(fd, name, 0), len(name))
    except OSError as error:
        logger.warning("disk_lock_not_signed path=%s error=%s", path, str(error))


def _signed(files: Files, fd: int) -> str:
    """The process that holds the lock, as far as it can be read."""
    try:
        return files.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
    except OSError:
        return "unknown"


def check_space(path: Path, need: int, whose: str, reserve_bytes: int = 0) -> None:
    """Raise DirectoryError if there is no room for `need` bytes more.

    reserve_bytes: to stay free besides, or a twentieth of the file system if it is less.
    """
    room = os.statvfs(path)
    free = room.f_bavail * room.f_frsize
    reserve = min(reserve_bytes, room.f_blocks * room.f_frsize // 20)
    if need + reserve > free and room.f_blocks:  # some file systems know no sizes and say 0 of 0
        stays = f", and {reserve / GIB:.2f} GiB must stay free" if reserve else ""
        raise DirectoryError(
            f"{whose}'s directory {path} has {free / GIB:.2f} GiB free and needs {need / GIB:.2f} GiB more{stays}: "
            "lower --disk-gib, or free some"
        )


def reserve_slab(files: Files, path: Path, size: int, whose: str, *, besides: int = 0) -> None:
    """Allocate the slab in `path`. besides: bytes that other files will take. Raises: OSError, DirectoryError."""
    fd = open_file(files, path / "slab")
    try:
        before = files.stat(fd)
        check_space(path, size + besides - before.st_blocks * 512, whose)
        files.truncate(fd, size)
        try:
            files.allocate(fd, size)
        except OSError:
            files.truncate(fd, min(before.st_size, size))  # what was allocated is of no use
            raise
    finally:
        files.close(fd)


def open_slab(files: Files, path: Path, *, allow_direct: bool) -> SlabFile:
    """The slab in `path`. Raises: OSError."""
    slab = path / "slab"
    if allow_direct:
        try:
            fd = open_file(files, slab, os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        else:
            if _reads_directly(files, fd):
                return SlabFile(fd, True)
        logger.warning(
            "disk_not_direct path=%s: the file system has no O_DIRECT; buffered I/O takes page cache and is slower",
            slab,
        )
    return SlabFile(open_file(files, slab), False)


def explained(path: Path, error: OSError, whose: str) -> DirectoryError:
    """What to tell of a system call that failed on a directory, and what to do."""
    reason = {
        errno.EROFS: "is on a read-only file system: give --disk a directory that can be written",
        errno.EACCES: "can't be written by this user: change its owner, or give --disk another directory",
        errno.EPERM: "can't be written by this user: change its owner, or give --disk another directory",
        errno.ENOTDIR: "is not a directory: give --disk another path",
        errno.ENOSPC: "ran out of space: lower --disk-gib, or free some",
        errno.EDQUOT: "is over its quota: lower --disk-gib, or free some",
    }.get(error.errno or 0, f"can't be used ({error.strerror}): give --disk another directory")
    return DirectoryError(f"{whose}'s directory {path} {reason}")


def _reads_directly(files: Files, fd: int) -> bool:
    """Some file systems take the flag and refuse the read. Closes `fd` unless they read.

    A page that can't be read says nothing about that: it may be a bad place, and reads of others find out more.
    """
    with mmap.mmap(-1, PAGE_BYTES) as page, memoryview(page) as view:
        try:
            files.preadv(fd, [view], 0)
        except OSError as error:
            if error.errno == errno.EINVAL:
                files.close(fd)
                return False
    return True
