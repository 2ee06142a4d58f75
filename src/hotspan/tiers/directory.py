"""A disk tier's directory: who owns it, what it was made for, and whether it can do direct I/O.

    DIR/lock    held by the one process that owns the directory
    DIR/table   one record a slot (tiers/table.py)
    DIR/slab    equal slots, each one frame; preallocated

Everything is 0600 in a 0700 directory.
"""

import errno
import fcntl
import logging
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

from hotspan.core.errors import DirectoryError
from hotspan.core.types import GIB, PAGE_BYTES
from hotspan.tiers.table import DiskTable, Geometry, Record, read_geometry

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OpenDirectory:
    """A directory that this process owns until `close`.

    records: what a former owner left, by slot.
    """

    path: Path
    geometry: Geometry
    table: DiskTable
    records: dict[int, Record]
    slab_fd: int
    direct: bool
    _fds: tuple[int, ...]

    def close(self) -> None:
        """Give the directory back."""
        for fd in self._fds:
            os.close(fd)


def open_directory(path: Path, slot_bytes: int, disk_bytes: int, *, allow_direct: bool = True) -> OpenDirectory:
    """Own `path` as a slab of slots that hold at least `slot_bytes`, `disk_bytes` in all; what it holds stays.

    A directory made for larger slots is taken as it is; a changed `disk_bytes` grows or shrinks it.
    Blocks:  for the allocation of the files; not for writing them.
    Raises:  DirectoryError with what to do: in use, full, read-only, not a directory, made for smaller slots.
    """
    fds: list[int] = []
    try:
        _make_directory(path)
        fds.append(_lock(path))
        table_fd = _open_file(path / "table")
        fds.append(table_fd)
        geometry = _geometry(path, read_geometry(table_fd), slot_bytes, disk_bytes)
        _reserve(path, geometry)
        table = DiskTable(table_fd, geometry)
        table.format()
        slab_fd, direct = _open_slab(path / "slab", allow_direct)
        fds.append(slab_fd)
        return OpenDirectory(path, geometry, table, table.read_all(), slab_fd, direct, tuple(fds))
    except BaseException as error:
        for fd in fds:
            os.close(fd)
        if isinstance(error, OSError):
            raise _explained(path, error) from error
        raise


def check_directory(path: Path, disk_bytes: int) -> None:
    """Raise DirectoryError if `path` could not be opened with `disk_bytes`, as far as can be told without a model."""
    try:
        _make_directory(path)
        lock = _lock(path)
        try:
            slab = path / "slab"
            have = os.stat(slab).st_blocks * 512 if slab.exists() else 0
            _check_space(path, disk_bytes - have)
        finally:
            os.close(lock)
    except OSError as error:
        raise _explained(path, error) from error


def _check_space(path: Path, need: int) -> None:
    stat = os.statvfs(path)
    free = stat.f_bavail * stat.f_frsize
    if need > free and stat.f_blocks:  # some file systems know no sizes and say 0 of 0
        raise DirectoryError(
            f"the disk tier's directory {path} has {free / GIB:.2f} GiB free and needs {need / GIB:.2f} GiB more: "
            "lower --disk-gib, or free some"
        )


def _explained(path: Path, error: OSError) -> DirectoryError:
    reason = {
        errno.EROFS: "is on a read-only file system: give --disk a directory that can be written",
        errno.EACCES: "can't be written by this user: change its owner, or give --disk another directory",
        errno.EPERM: "can't be written by this user: change its owner, or give --disk another directory",
        errno.ENOTDIR: "is not a directory: give --disk another path",
        errno.ENOSPC: "ran out of space: lower --disk-gib, or free some",
        errno.EDQUOT: "is over its quota: lower --disk-gib, or free some",
    }.get(error.errno or 0, f"can't be used ({error.strerror}): give --disk another directory")
    return DirectoryError(f"the disk tier's directory {path} {reason}")


def _make_directory(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "not a directory", str(path))
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    foreign = sorted(p.name for p in path.iterdir() if p.name not in ("lock", "table", "slab", "lost+found"))
    if foreign and not (path / "table").exists():
        raise DirectoryError(
            f"the disk tier's directory {path} holds other files ({', '.join(foreign[:3])}): "
            "give --disk an empty directory"
        )
    if os.stat(path).st_uid == os.geteuid():
        os.chmod(path, 0o700)


def _lock(path: Path) -> int:
    fd = _open_file(path / "lock")
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
            raise DirectoryError(
                f"the disk tier's directory {path} is in use by process {owner}: "
                "each server needs a directory of its own, give --disk another one or stop that server"
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _open_file(path: Path, flags: int = 0) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)


def _geometry(path: Path, found: Geometry | None, slot_bytes: int, disk_bytes: int) -> Geometry:
    if found is not None and found.slot_bytes > 0:
        if found.slot_bytes < slot_bytes:
            raise DirectoryError(
                f"the disk tier's directory {path} was made for slots of {found.slot_bytes} bytes and this model's "
                f"chunks need {slot_bytes}: give --disk another directory, or delete this one to lose what it holds"
            )
        slot_bytes = found.slot_bytes
    slots = disk_bytes // slot_bytes
    if slots < 1:
        raise DirectoryError(
            f"--disk-gib {disk_bytes / GIB:g} holds not one chunk of this model ({slot_bytes / GIB:.3f} GiB): raise it"
        )
    return Geometry(slot_bytes, slots)


def _reserve(path: Path, geometry: Geometry) -> None:
    """Allocate the slab now, so that a full disk is an error at the start and never one in the middle."""
    slab = path / "slab"
    fd = _open_file(slab)
    try:
        before = os.fstat(fd)
        _check_space(path, geometry.slab_bytes + geometry.table_bytes - before.st_blocks * 512)
        os.ftruncate(fd, geometry.slab_bytes)
        try:
            os.posix_fallocate(fd, 0, geometry.slab_bytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                os.ftruncate(fd, min(before.st_size, geometry.slab_bytes))  # what was allocated is of no use
                raise
    finally:
        os.close(fd)


def _open_slab(path: Path, allow_direct: bool) -> tuple[int, bool]:
    """The slab's descriptor, and whether it does direct I/O."""
    if allow_direct:
        try:
            fd = _open_file(path, os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        else:
            if _reads_directly(fd):
                return fd, True
        logger.warning(
            "disk_not_direct path=%s: the file system has no O_DIRECT; buffered I/O takes page cache and is slower",
            path,
        )
    return _open_file(path), False


def _reads_directly(fd: int) -> bool:
    """Some file systems take the flag and refuse the read. Closes `fd` unless they read."""
    with mmap.mmap(-1, PAGE_BYTES) as page:
        try:
            os.preadv(fd, [page], 0)
        except OSError as error:
            os.close(fd)
            if error.errno == errno.EINVAL:
                return False
            raise
    return True
