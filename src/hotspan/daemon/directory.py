"""The directory of the daemon's disk (tiers/owned.py): the file that holds values, and I/O on that.

    DIR/lock      held by the one daemon that owns the directory
    DIR/slab      values, in extents of whole pages; preallocated
    DIR/journal   where they are, and what was taken back (daemon/journal.py)

Everything is 0600 in a 0700 directory.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import xxhash

from hotspan.core.buffers import placed
from hotspan.core.errors import DirectoryError
from hotspan.core.types import GIB, PAGE_BYTES, round_up
from hotspan.daemon.space import Extent
from hotspan.tiers.files import Files, whole
from hotspan.tiers.io import IO_BYTES
from hotspan.tiers.owned import explained, lock_directory, make_directory, open_slab, reserve_slab

WHOSE = "the daemon"
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
            make_directory(path, _OWN_FILES, WHOSE)
            self._fds.append(lock_directory(self.files, path, WHOSE))
            reserve_slab(self.files, path, self.bytes, WHOSE)
            self._slab_fd = open_slab(self.files, path, allow_direct=allow_direct).fd
            self._fds.append(self._slab_fd)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise explained(path, error, WHOSE) from error
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
        for at, piece in placed(parts, _pages(to), max_bytes=IO_BYTES):
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
        for at, piece in placed(parts, _pages(of), max_bytes=IO_BYTES):
            whole(self.files.preadv(self._slab_fd, [piece], at), len(piece))
            found.update(piece[:size])
            size -= min(size, len(piece))
            moved()
        return found.digest() == check

    def close(self) -> None:
        """Give the directory back."""
        while self._fds:
            self.files.close(self._fds.pop())


def _pages(extents: Sequence[Extent]) -> Iterator[tuple[int, int]]:
    return ((offset, round_up(size, PAGE_BYTES)) for offset, size in extents)
