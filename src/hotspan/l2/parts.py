"""Buffers cut as a store moves them."""

from collections.abc import Iterable, Iterator


def parts_of(buffers: Iterable[memoryview], size: int) -> Iterator[list[memoryview]]:
    """The buffers as one run of bytes, cut into parts of `size`, the last one shorter."""
    part: list[memoryview] = []
    room = size
    for buffer in buffers:
        at = 0
        while at < len(buffer):
            piece = buffer[at : at + room]
            part.append(piece)
            at, room = at + len(piece), room - len(piece)
            if not room:
                yield part
                part, room = [], size
    if part:
        yield part
