"""A disk tier's directory: who owns it, what it was made for, and whether it can do direct I/O.

    DIR/lock    held by the one process that owns the directory
    DIR/table   one record a slot (tiers/table.py)
    DIR/slab    equal slots, each one frame; preallocated
    DIR/log     what was invalidated (tiers/log.py)

Everything is 0600 in a 0700 directory.
"""

import errno
import logging
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

from hotspan.core.errors import DirectoryError
from hotspan.core.types import GIB, PAGE_BYTES
from hotspan.tiers.files import Files, whole
from hotspan.tiers.log import GenerationLog
from hotspan.tiers.table import DiskTable, Geometry, read_geometry

logger = logging.getLogger(__name__)


_OWN_FILES = ("lock", "table", "slab", "log", "log.new", "lost+found")


@dataclass(frozen=True, slots=True)
class OpenDirectory:
    """A directory that this process owns until `close`.

    table: what a former owner left, less what was invalidated.
    """

    path: Path
    files: Files
    geometry: Geometry
    table: DiskTable
    log: GenerationLog
    generation: int
    slab_fd: int
    direct: bool
    _fds: tuple[int, ...]

    def close(self) -> None:
        """Give the directory back."""
        self.log.close()
        for fd in self._fds:
            self.files.close(fd)


def open_directory(
    path: Path,
    slot_bytes: int,
    disk_bytes: int,
    *,
    allow_direct: bool = True,
    is_new: bool = True,
    files: Files | None = None,
) -> OpenDirectory:
    """Own `path` as a slab of slots that hold at least `slot_bytes`, `disk_bytes` in all; what it holds stays.

    A directory made for larger slots is taken as it is; a changed `disk_bytes` grows or shrinks it.
    is_new:  whether it may have to be made; if not, an empty one is a mount that went away.
    Blocks:  for the allocation of the files and one read of the table; not for writing the slab.
    Raises:  DirectoryError with what to do: in use, full, read-only, not a directory, made for smaller slots.
    """
    files = files or Files()
    fds: list[int] = []
    log: GenerationLog | None = None
    try:
        if not is_new and not (path / "table").exists():
            raise DirectoryError(f"the disk tier's directory {path} is gone: mount it again")
        _make_directory(path)
        fds.append(_lock(files, path))
        table_fd = _open_file(files, path / "table")
        fds.append(table_fd)
        geometry = _geometry(path, read_geometry(files, table_fd), slot_bytes, disk_bytes)
        _reserve(files, path, geometry)
        table = DiskTable(files, table_fd, geometry)
        table.format()
        table.read()
        log = GenerationLog(files, path / "log")
        generation = _settle(path, table, log)
        slab_fd, direct = _open_slab(files, path / "slab", allow_direct)
        fds.append(slab_fd)
        return OpenDirectory(path, files, geometry, table, log, generation, slab_fd, direct, tuple(fds))
    except BaseException as error:
        if log is not None:
            log.close()
        for fd in fds:
            files.close(fd)
        if isinstance(error, OSError):
            raise explained(path, error) from error
        raise


def _settle(path: Path, table: DiskTable, log: GenerationLog) -> int:
    """Take out of the table what the log says was invalidated, and begin the log anew; returns the generation."""
    said = log.read()
    newest = table.newest_generation()
    if not said.is_whole or newest > said.generation:
        if table.slots():
            logger.warning("disk_log_lost path=%s: what was invalidated is not known, all chunks are forgotten", path)
            table.clear()
        generation = max(newest, said.generation) + 1
    else:
        generation = said.generation
        if not said.entries:
            return generation
        for scope, at in {entry.scope: entry.generation for entry in said.entries}.items():
            for slot in table.fallen(scope, at):
                table.put(slot, None)
                table.write(slot)
        table.sync()
    log.begin(generation)
    return generation


def check_directory(path: Path, disk_bytes: int) -> None:
    """Raise DirectoryError if `path` could not be opened with `disk_bytes`, as far as can be told without a model."""
    try:
        _make_directory(path)
        files = Files()
        lock = _lock(files, path)
        try:
            slab = path / "slab"
            have = os.stat(slab).st_blocks * 512 if slab.exists() else 0
            _check_space(path, disk_bytes - have)
        finally:
            files.close(lock)
    except OSError as error:
        raise explained(path, error) from error


def _check_space(path: Path, need: int) -> None:
    stat = os.statvfs(path)
    free = stat.f_bavail * stat.f_frsize
    if need > free and stat.f_blocks:  # some file systems know no sizes and say 0 of 0
        raise DirectoryError(
            f"the disk tier's directory {path} has {free / GIB:.2f} GiB free and needs {need / GIB:.2f} GiB more: "
            "lower --disk-gib, or free some"
        )


def explained(path: Path, error: OSError) -> DirectoryError:
    """What to tell of a system call that failed on a directory, and what to do."""
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
    foreign = sorted(p.name for p in path.iterdir() if p.name not in _OWN_FILES)
    if foreign and not (path / "table").exists():
        raise DirectoryError(
            f"the disk tier's directory {path} holds other files ({', '.join(foreign[:3])}): "
            "give --disk an empty directory"
        )
    if os.stat(path).st_uid == os.geteuid():
        os.chmod(path, 0o700)


def _lock(files: Files, path: Path) -> int:
    fd = _open_file(files, path / "lock")
    try:
        if not files.lock(fd):
            owner = files.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
            raise DirectoryError(
                f"the disk tier's directory {path} is in use by process {owner}: "
                "each server needs a directory of its own, give --disk another one or stop that server"
            )
        files.truncate(fd, 0)
        name = f"{os.getpid()}\n".encode()
        whole(files.pwrite(fd, name, 0), len(name))
    except BaseException:
        files.close(fd)
        raise
    return fd


def _open_file(files: Files, path: Path, flags: int = 0) -> int:
    return files.open(path, os.O_RDWR | os.O_CREAT | flags)


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


def _reserve(files: Files, path: Path, geometry: Geometry) -> None:
    """Allocate the slab now, so that a full disk is an error at the start and never one in the middle."""
    slab = path / "slab"
    fd = _open_file(files, slab)
    try:
        before = files.stat(fd)
        _check_space(path, geometry.slab_bytes + geometry.table_bytes - before.st_blocks * 512)
        files.truncate(fd, geometry.slab_bytes)
        try:
            files.allocate(fd, geometry.slab_bytes)
        except OSError:
            files.truncate(fd, min(before.st_size, geometry.slab_bytes))  # what was allocated is of no use
            raise
    finally:
        files.close(fd)


def _open_slab(files: Files, path: Path, allow_direct: bool) -> tuple[int, bool]:
    """The slab's descriptor, and whether it does direct I/O."""
    if allow_direct:
        try:
            fd = _open_file(files, path, os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        else:
            if _reads_directly(files, fd):
                return fd, True
        logger.warning(
            "disk_not_direct path=%s: the file system has no O_DIRECT; buffered I/O takes page cache and is slower",
            path,
        )
    return _open_file(files, path), False


def _reads_directly(files: Files, fd: int) -> bool:
    """Some file systems take the flag and refuse the read. Closes `fd` unless they read."""
    with mmap.mmap(-1, PAGE_BYTES) as page, memoryview(page) as view:
        try:
            files.preadv(fd, [view], 0)
        except OSError as error:
            files.close(fd)
            if error.errno == errno.EINVAL:
                return False
            raise
    return True
