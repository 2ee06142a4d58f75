"""The pages of a mapping, there before anybody needs them: running out of memory later would be a SIGBUS."""

import ctypes
import errno
import mmap
import os
import threading

from hotspan.core.types import PAGE_BYTES

_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python 3.11's mmap does not name it


def populate(memory: mmap.mmap, start: int = 0, size: int | None = None, threads: int = 2) -> None:
    """Have the pages of `[start, start + size)` there, written but not changed; a kernel gives out 1-2 GB/s a thread.

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

    helpers = [
        threading.Thread(target=touch, args=(first,), name="hotspan-populate")
        for first in range(start + step, stop, step)
    ]
    for helper in helpers:
        helper.start()
    touch(start)
    for helper in helpers:
        helper.join()
    if failed:
        raise OSError(failed[0], f"no memory for {stop - start} bytes: {os.strerror(failed[0])}")
