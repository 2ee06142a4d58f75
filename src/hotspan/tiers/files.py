"""The system calls that the disk tier makes, in one place, so that a test can make any one of them fail.

    production: Files          tests: kit.simulated.faults (the n-th call fails, or is slow, or the power goes)

All raise OSError; whether a transfer was whole is the caller's to check (`whole`).
"""

import ctypes
import errno
import os
from collections.abc import Sequence
from pathlib import Path

from hotspan.core.private import let_go, lock, sync_directory
from hotspan.core.types import PAGE_BYTES

Buffer = bytes | bytearray | memoryview

_MAX_BAD_PAGES = 64
"""Of one file: with more, it is the disk that fails."""

_PUNCH_HOLE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE (linux/falloc.h); Python has no fallocate


class Files:
    """The machine's own system calls."""

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        """A descriptor; O_CLOEXEC and O_NOFOLLOW are added."""
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode)

    def close(self, fd: int) -> None:
        let_go(fd)

    def pread(self, fd: int, size: int, at: int) -> bytes:
        return os.pread(fd, size, at)

    def pwrite(self, fd: int, data: Buffer, at: int) -> int:
        return os.pwrite(fd, data, at)

    def preadv(self, fd: int, buffers: Sequence[memoryview], at: int) -> int:
        return os.preadv(fd, buffers, at)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], at: int) -> int:
        return os.pwritev(fd, buffers, at)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def allocate(self, fd: int, size: int, at: int = 0) -> None:
        """Reserve `size` bytes, where the file system can."""
        try:
            os.posix_fallocate(fd, at, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise

    def punch(self, fd: int, size: int, at: int) -> None:
        """Take the space of `size` bytes: they read as zeros. Raises: OSError also where the file system can't."""
        libc = ctypes.CDLL(None, use_errno=True)
        libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong)
        if libc.fallocate(fd, _PUNCH_HOLE, at, size):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def space(self, fd: int) -> os.statvfs_result:
        """What is free on its file system."""
        return os.fstatvfs(fd)

    def sync(self, fd: int) -> None:
        """What was written is on the disk when this returns."""
        os.fdatasync(fd)

    def stat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def redirect(self, fd: int, to: int) -> None:
        """Let a descriptor lead to the file of another, which is closed."""
        os.dup2(to, fd, inheritable=False)
        self.close(to)

    def replace(self, source: Path, target: Path) -> None:
        """Rename over `target`, durably."""
        os.replace(source, target)
        sync_directory(target.parent)

    def lock(self, fd: int) -> bool:
        """Take the exclusive lock of a file; False if another process has it."""
        return lock(fd)


def whole(moved: int, wanted: int) -> None:
    """Raise OSError unless a transfer moved all it should."""
    if moved != wanted:
        raise OSError(errno.EIO, f"short transfer: {moved} of {wanted} bytes")


def read_sound(files: Files, fd: int, at: int, size: int) -> bytes:
    """The same; pages that can't be read, also the second time, are zeros. Raises: OSError if too many can't."""
    try:
        return read_all(files, fd, at, size)
    except OSError:
        parts: list[bytes] = []
        lost = 0
        for start in range(at, at + size, PAGE_BYTES):
            try:
                parts.append(read_all(files, fd, start, min(PAGE_BYTES, at + size - start)))
            except OSError:
                lost += 1
                if lost > _MAX_BAD_PAGES:
                    raise
                parts.append(bytes(min(PAGE_BYTES, at + size - start)))
        if lost == len(parts) > 0:
            raise
        return b"".join(parts)


def read_all(files: Files, fd: int, at: int, size: int) -> bytes:
    """`size` bytes from `at`, fewer only where the file ends."""
    parts: list[bytes] = []
    while size:
        part = files.pread(fd, min(size, 1 << 24), at)
        if not part:
            break
        parts.append(part)
        at, size = at + len(part), size - len(part)
    return b"".join(parts)
