"""Shared memory: files in /dev/shm, of which every page is there before it is used.

Running out of memory later would be a SIGBUS in the middle of a request.
"""

import contextlib
import ctypes
import errno
import functools
import mmap
import os
from pathlib import Path

from hotspan.core.errors import ConfigError
from hotspan.core.threads import start as begin
from hotspan.core.types import GIB, PAGE_BYTES

SHARED_MEMORY = Path("/dev/shm")

_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python 3.11's mmap does not name it


def populate(memory: mmap.mmap, start: int = 0, size: int | None = None, threads: int = 2) -> None:
    """Make the pages of `[start, start + size)` exist, without changing them, at 1-2 GB/s per thread.

    Raises: OSError if there is no memory for them.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    stop = len(memory) if size is None else start + size
    step = -(-(stop - start) // threads // PAGE_BYTES) * PAGE_BYTES or PAGE_BYTES
    failed: list[int] = []

    def touch(first: int) -> None:
        last = min(first + step, stop)
        if libc.madvise(base + first, last - first, _MADV_POPULATE_WRITE) == 0:
            return
        if (error := ctypes.get_errno()) != errno.EINVAL:
            failed.append(error)
            return
        for at in range(first, last, PAGE_BYTES):  # an older kernel
            memory[at] = memory[at]

    def failed_at(error: Exception) -> None:
        failed.append(errno.ENOMEM)

    helpers = [
        begin("populate", functools.partial(touch, first), failed=failed_at, daemon=False)
        for first in range(start + step, stop, step)
    ]
    touch(start)
    for helper in helpers:
        helper.join()
    if failed:
        raise OSError(failed[0], f"no memory for {stop - start} bytes: {os.strerror(failed[0])}")


def check_room(
    size: int, directory: Path = SHARED_MEMORY, *, what: str = "the RAM tier", option: str = "--ram-gib"
) -> None:
    """Raise ConfigError if `what`, `size` bytes that `option` sets, finds no room in `directory`."""
    room = os.statvfs(directory)
    free = room.f_bavail * room.f_frsize
    if free < size:
        raise ConfigError(
            f"{directory} has {free / GIB:.2f} GiB free and {what} needs {size / GIB:.2f} GiB: lower {option}, "
            f"or enlarge {directory} (docker run --shm-size, or an emptyDir with medium: Memory)"
        )


class Mapping:
    """A file of shared memory, mapped in huge pages where /dev/shm is mounted with huge=advise. `fd` stays open."""

    def __init__(self, fd: int, size: int) -> None:
        self._map = mmap.mmap(fd, size)
        with contextlib.suppress(OSError):  # this kernel has none
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self._map)

    def populate(self, start: int = 0, size: int | None = None, threads: int = 2) -> None:
        """Make pages exist, as `populate` does. Raises: OSError if there is no memory for them."""
        populate(self._map, start, size, threads)

    def close(self) -> None:
        """Unmap, unless somebody has a view of it, such as a tensor: then it is unmapped when that goes."""
        self.view.release()
        with contextlib.suppress(BufferError):
            self._map.close()
