"""Free space of the segment: nothing is given out twice, nothing is lost."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotspan.core.types import PAGE_BYTES
from hotspan.daemon.space import MAX_EXTENTS, Extent, FreeSpace

START, PAGES = 3 * PAGE_BYTES, 40
SIZES = st.integers(1, PAGES * PAGE_BYTES + 1)


def space(pages: int = PAGES) -> FreeSpace:
    """Pages that do not begin at 0."""
    return FreeSpace(START, START + pages * PAGE_BYTES)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.booleans(), SIZES, st.integers(0, 100)), max_size=60))
def test_nothing_overlaps_and_all_comes_back(steps: list[tuple[bool, int, int]]) -> None:
    """Whatever is taken and given back in whatever order, extents never overlap, and in the end all is one piece."""
    free = space()
    taken: list[tuple[Extent, ...]] = []
    for takes, size, which in steps:
        if takes:
            could, extents = free.can_take(size), free.take(size)
            assert could == (extents is not None)
            if extents is not None:
                assert sum(extent.size for extent in extents) == size
                assert all(extent.offset % PAGE_BYTES == 0 for extent in extents)
                taken.append(extents)
        elif taken:
            free.give(taken.pop(which % len(taken)))
        free.check(extent for extents in taken for extent in extents)
    for extents in taken:
        free.give(extents)
    free.check([])
    assert free.take(PAGES * PAGE_BYTES) == (Extent(START, PAGES * PAGE_BYTES),)


def test_all_of_it_can_be_taken() -> None:
    """Values of one size leave no byte unused, and one more finds no room."""
    free = space(30)
    for _ in range(10):
        extents = free.take(3 * PAGE_BYTES)
        assert extents is not None and len(extents) == 1
    assert free.bytes == 0 and not free.can_take(1) and free.take(1) is None


def test_a_value_goes_where_it_fits_best() -> None:
    """The smallest extent that has room is used before a larger one is cut."""
    free = space()
    pieces = [free.take(pages * PAGE_BYTES) for pages in (5, 1, 3, 1, 30)]
    for piece in (pieces[0], pieces[2]):
        assert piece is not None
        free.give(piece)
    assert free.take(3 * PAGE_BYTES) == pieces[2]


def test_a_value_may_lie_in_fragments() -> None:
    """Where no extent has room for all of it, it is put into the largest ones, in as few as can be."""
    free = space()
    pieces = [free.take(pages * PAGE_BYTES) for pages in (5, 1, 3, 1, 7, 1, 22)]
    for piece in pieces[0:6:2]:
        assert piece is not None
        free.give(piece)
    extents = free.take(11 * PAGE_BYTES + 5)
    assert extents is not None and [extent.size // PAGE_BYTES for extent in extents] == [7, 4]
    assert sum(extent.size for extent in extents) == 11 * PAGE_BYTES + 5


def test_a_value_is_never_in_too_many_fragments() -> None:
    """Room in more pieces than a value may have counts as no room."""
    free = space(2 * (MAX_EXTENTS + 1))
    pages = [free.take(PAGE_BYTES) for _ in range(2 * (MAX_EXTENTS + 1))]
    for page in pages[::2]:
        assert page is not None
        free.give(page)
    assert not free.can_take((MAX_EXTENTS + 1) * PAGE_BYTES) and free.take((MAX_EXTENTS + 1) * PAGE_BYTES) is None
    extents = free.take(MAX_EXTENTS * PAGE_BYTES)
    assert extents is not None and len(extents) == MAX_EXTENTS


def test_what_was_not_taken_is_not_given_back() -> None:
    """Extents outside, not on pages, or free already are refused."""
    free = space()
    for extent in (Extent(0, 10), Extent(START + 1, 10), Extent(START, 10), Extent(START, 1 << 40)):
        with pytest.raises(ValueError):
            free.give([extent])
    with pytest.raises(ValueError):
        free.take(0)
    free.check([])
