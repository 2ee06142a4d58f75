"""The directory of the daemon's disk: who owns it, the file that holds values, and I/O on that.

    DIR/lock      held by the one daemon that owns the directory
    DIR/slab      values, in extents of whole pages; preallocated
    DIR/journal   where they are, and what was taken back (daemon/journal.py)

Everything is 0600 in a 0700 directory.
"""

import errno
import logging
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import xxhash

from hotspan.core.errors import DirectoryError
from hotspan.core.types import GIB, PAGE_BYTES, round_up
from hotspan.daemon.space import Extent
from hotspan.tiers.directory import explained
from hotspan.tiers.files import Files, whole
from hotspan.tiers.io import IO_BYTES

logger = logging.getLogger(__name__)

_OWN_FILES = ("lock", "slab", "journal", "journal.new", "lost+found")


class SlabDirectory:
    """A directory that this process owns until `close`, with a slab of `size` bytes, rounded down to pages.

    What is there stays, as far as it fits.
    Blocks: for the allocation of the slab.
    Raises: DirectoryError with what to do: in use, full, read-only, not a directory, somebody else's.
    """

    def __init__(self, path: Path, size: int, *, files: Files | None = None, allow_direct: bool = True) -> None:
        self.path = path
        self.bytes = size // PAGE_BYTES * PAGE_BYTES
        self.files = files or Files()
        self._fds: list[int] = []
        if not self.bytes:
            raise DirectoryError(
                f"--disk-gib {size / GIB:g} holds nothing: give how much of {path} the daemon may take"
            )
        try:
            self._make()
            self._lock()
            self._reserve()
            self._slab_fd = self._open_slab(allow_direct)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise explained(path, error) from error
            raise

    @property
    def journal(self) -> Path:
        """Where its journal is."""
        return self.path / "journal"

    def write(self, parts: Sequence[memoryview], size: int, to: Sequence[Extent], moved: Callable[[], None]) -> bytes:
        """Write a value of `size` bytes, the first of `parts`, which are whole pages; its checksum. Raises: OSError.

        moved: called after each I/O.
        """
        check = xxhash.xxh3_128()
        for at, piece in _pieces(parts, to):
            check.update(piece[:size])
            size -= min(size, len(piece))
            whole(self.files.pwritev(self._slab_fd, [piece], at), len(piece))
            moved()
        return check.digest()

    def read(
        self, parts: Sequence[memoryview], size: int, of: Sequence[Extent], check: bytes, moved: Callable[[], None]
    ) -> bool:
        """Read a value; whether it is the one of that checksum. Raises: OSError."""
        found = xxhash.xxh3_128()
        for at, piece in _pieces(parts, of):
            whole(self.files.preadv(self._slab_fd, [piece], at), len(piece))
            found.update(piece[:size])
            size -= min(size, len(piece))
            moved()
        return found.digest() == check

    def close(self) -> None:
        """Give the directory back."""
        while self._fds:
            self.files.close(self._fds.pop())

    # -- inside ----------------------------------------------------------------------------------------------------

    def _open(self, path: Path, flags: int = 0) -> int:
        self._fds.append(self.files.open(path, os.O_RDWR | os.O_CREAT | flags))
        return self._fds[-1]

    def _make(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "not a directory", str(self.path))
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        foreign = sorted(each.name for each in self.path.iterdir() if each.name not in _OWN_FILES)
        if foreign:
            raise DirectoryError(
                f"the daemon's directory {self.path} holds other files ({', '.join(foreign[:3])}): "
                "give --disk an empty directory"
            )
        if os.stat(self.path).st_uid == os.geteuid():
            os.chmod(self.path, 0o700)

    def _lock(self) -> None:
        fd = self._open(self.path / "lock")
        if not self.files.lock(fd):
            owner = self.files.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
            raise DirectoryError(
                f"the daemon's directory {self.path} is in use by process {owner}: "
                "give --disk another one, or stop that daemon"
            )
        self.files.truncate(fd, 0)
        name = f"{os.getpid()}\n".encode()
        whole(self.files.pwrite(fd, name, 0), len(name))

    def _reserve(self) -> None:
        """Allocate the slab now, so that a full disk is an error at the start and never one later."""
        fd = self._open(self.path / "slab")
        room = os.statvfs(self.path)
        free, need = room.f_bavail * room.f_frsize, self.bytes - self.files.stat(fd).st_blocks * 512
        if need > free and room.f_blocks:  # some file systems know no sizes and say 0 of 0
            raise DirectoryError(
                f"the daemon's directory {self.path} has {free / GIB:.2f} GiB free and needs {need / GIB:.2f} GiB "
                "more: lower --disk-gib, or free some"
            )
        self.files.truncate(fd, self.bytes)
        self.files.allocate(fd, self.bytes)

    def _open_slab(self, allow_direct: bool) -> int:
        path = self.path / "slab"
        try:
            fd = self._open(path, os.O_DIRECT if allow_direct else 0)
            with mmap.mmap(-1, PAGE_BYTES) as page, memoryview(page) as view:
                self.files.preadv(fd, [view], 0)  # some file systems take the flag and refuse the read
            return fd
        except OSError as error:
            if error.errno != errno.EINVAL or not allow_direct:
                raise
        logger.warning(
            "daemon_disk_not_direct path=%s: the file system has no O_DIRECT; buffered I/O takes page cache and is "
            "slower",
            path,
        )
        return self._open(path)


def _pieces(parts: Sequence[memoryview], extents: Sequence[Extent]) -> Iterator[tuple[int, memoryview]]:
    """Where on disk each piece of memory belongs: pieces that lie in one run in both, of 4 MiB at most."""
    left = iter(extents)
    at = end = 0
    for part in parts:
        while part:
            if at == end:
                at, size = next(left)
                end = at + round_up(size, PAGE_BYTES)
            piece = part[: min(end - at, IO_BYTES)]
            yield at, piece
            at, part = at + len(piece), part[len(piece) :]
