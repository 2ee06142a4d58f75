"""Which bytes of the segment, or of a slab on disk, are free: extents by size, joined with their neighbours.

    take 3 of   [....][..xxx.....]   ->   the smallest extent that has room
    take 9 of   [....][..xxx.....]   ->   the largest ones, until the rest fits into one: a value may lie in fragments

Extents begin and end on pages. A segment of equal values never falls apart; in any other a value is in as few fragments
as can be, and in at most `MAX_EXTENTS`: then more has to be evicted.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import NamedTuple

from hotspan.core.types import PAGE_BYTES, round_up

MAX_EXTENTS = 64
"""Fragments of one value."""


class Extent(NamedTuple):
    """Bytes `[offset, offset + size)` of the segment."""

    offset: int
    size: int

    @property
    def end(self) -> int:
        return self.offset + self.size


class FreeSpace:
    """The free extents of `[start, end)`, both of whole pages.

    taken:  what is not free at the beginning.
    Raises: ValueError from the constructor if those overlap, or lie elsewhere.
    Costs: O(log n) a look-up, and moving n/2 entries of a list a change, for n free extents.
    """

    def __init__(self, start: int, end: int, taken: Iterable[Extent] = ()) -> None:
        self._first, self._last = start, end
        self._size_at: dict[int, int] = {}
        self._start_of_end: dict[int, int] = {}
        self._by_size: list[tuple[int, int]] = []
        self.bytes = 0
        at = start
        for offset, size in (*sorted(taken), Extent(end, 0)):
            if offset < at or offset > end or offset % PAGE_BYTES:
                raise ValueError(f"what begins at {offset} overlaps with another, or lies outside")
            if offset > at:
                self._put(at, offset - at)
            at = offset + round_up(size, PAGE_BYTES)

    def can_take(self, size: int) -> bool:
        """Whether `take` finds room for `size` bytes."""
        size = round_up(size, PAGE_BYTES)
        if self.bytes < size:
            return False
        return self._by_size[-1][0] >= size or sum(length for length, _ in self._by_size[-MAX_EXTENTS:]) >= size

    def take(self, size: int) -> tuple[Extent, ...] | None:
        """Extents of `size` bytes in all, or None. All are of whole pages but for the last: its page is taken whole."""
        if size < 1:
            raise ValueError("a value has at least one byte")
        if not self.can_take(size):
            return None
        taken = []
        while size:
            pages = round_up(size, PAGE_BYTES)
            at = min(bisect_left(self._by_size, (pages, 0)), len(self._by_size) - 1)
            length, start = self._by_size[at]
            used = min(length, pages)
            self._drop(start, length)
            if used < length:
                self._put(start + used, length - used)
            taken.append(Extent(start, min(used, size)))
            size -= taken[-1].size
        return tuple(taken)

    def give(self, extents: Iterable[Extent]) -> None:
        """Take back extents as `take` gave them. Raises: ValueError for what is seen not to be taken."""
        for start, length in extents:
            length = round_up(length, PAGE_BYTES)
            if start < self._first or start + length > self._last or start % PAGE_BYTES or start in self._size_at:
                raise ValueError(f"[{start}, {start + length}) was not taken")
            before = self._start_of_end.get(start)
            if before is not None:
                size = self._size_at[before]
                self._drop(before, size)
                start, length = before, size + length
            after = self._size_at.get(start + length)
            if after is not None:
                self._drop(start + length, after)
                length += after
            self._put(start, length)

    def check(self, taken: Iterable[Extent]) -> None:
        """Raise AssertionError unless `taken` and the free extents cover everything once, and the books agree."""
        free = [Extent(start, size) for start, size in self._size_at.items()]
        at, was_free = self._first, False
        for extent, is_free in sorted([(e, True) for e in free] + [(e, False) for e in taken]):
            if extent.offset != at:
                raise AssertionError(f"bytes are lost, or taken twice, at {min(extent.offset, at)}")
            if is_free and was_free:
                raise AssertionError("two free extents stand side by side")
            at, was_free = extent.offset + round_up(extent.size, PAGE_BYTES), is_free
        if at != self._last or sum(e.size for e in free) != self.bytes:
            raise AssertionError("free bytes are miscounted")
        if self._by_size != sorted((e.size, e.offset) for e in free):
            raise AssertionError("free extents are not in the order of their size")
        if self._start_of_end != {e.end: e.offset for e in free}:
            raise AssertionError("the ends of free extents are wrong")

    def _put(self, start: int, size: int) -> None:
        self._size_at[start] = size
        self._start_of_end[start + size] = start
        insort(self._by_size, (size, start))
        self.bytes += size

    def _drop(self, start: int, size: int) -> None:
        del self._size_at[start]
        del self._start_of_end[start + size]
        del self._by_size[bisect_left(self._by_size, (size, start))]
        self.bytes -= size
