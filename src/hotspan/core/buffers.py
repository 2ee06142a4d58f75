"""Buffers taken as one run of bytes, and cut as a store moves them. Pieces are views: nothing is copied."""

import sys
from collections.abc import Iterable, Iterator

_MAX_VIEWS = 1024
"""Of one system call (IOV_MAX)."""


def parts_of(buffers: Iterable[bytes | bytearray | memoryview], size: int) -> Iterator[list[memoryview]]:
    """The buffers cut into parts of `size` bytes, the last one shorter; of shorter ones if they have many buffers."""
    part: list[memoryview] = []
    room = size
    for buffer in buffers:
        rest = memoryview(buffer).cast("B")
        while rest:
            part.append(rest[:room])
            room -= len(part[-1])
            rest = rest[len(part[-1]) :]
            if not room or len(part) == _MAX_VIEWS:
                yield part
                part, room = [], size
    if part:
        yield part


def placed(
    buffers: Iterable[memoryview], extents: Iterable[tuple[int, int]], skip: int = 0, max_bytes: int = sys.maxsize
) -> Iterator[tuple[int, memoryview]]:
    """Pieces of the buffers in order, each with its offset in `extents`, which are (offset, size).

    skip:      bytes at the beginning of the extents that the buffers do not have.
    max_bytes: of a piece.
    Raises:    RuntimeError if the extents are too small: a bug of the caller.
    """
    left = iter(extents)
    at = end = 0
    for buffer in buffers:
        rest = buffer
        while rest:
            while at == end:
                at, size = next(left)
                skipped = min(skip, size)
                at, end, skip = at + skipped, at + size, skip - skipped
            piece = rest[: min(end - at, max_bytes)]
            yield at, piece
            at, rest = at + len(piece), rest[len(piece) :]
