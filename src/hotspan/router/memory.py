"""How a router's process treats its memory: it holds tables of many MiB that live as long as it does."""

import ctypes
import gc

_MMAP_THRESHOLD = -3
"""M_MMAP_THRESHOLD of glibc's mallopt(3)."""

_LARGE_BYTES = 1 << 20


def settle_memory() -> None:
    """Look for garbage seldom, and give the pages of large tables back when they are made anew. Once, when all is open.

    Requests leave hardly any cycles, and what lives as long as the process none. glibc takes memory from 128 KiB on
    from the kernel, but raises that to the size of whatever is freed, up to 32 MiB: then each dict that is made anew
    leaves a hole in the heap of its own size.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl and macOS have none
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)
