"""Cutting buffers: every byte once, in order, by its place."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotspan.core.buffers import parts_of, placed


@given(st.lists(st.integers(0, 3000), max_size=6), st.integers(1, 2500))
@settings(derandomize=True)
def test_parts_are_the_whole(sizes: list[int], size: int) -> None:
    """Buffers cut into parts of a size are the same bytes in the same order, and all parts but the last are full."""
    data = bytes(n % 251 for n in range(sum(sizes)))
    ends = list(itertools.accumulate(sizes))
    parts = list(parts_of([memoryview(data)[end - n : end] for n, end in zip(sizes, ends, strict=True)], size))
    assert b"".join(bytes(view) for part in parts for view in part) == data
    assert all(sum(map(len, part)) == size for part in parts[:-1])


def test_a_part_is_one_system_calls() -> None:
    """A part has at most as many buffers as one preadv takes."""
    parts = list(parts_of([b"x"] * 2500, 1 << 20))
    assert [len(part) for part in parts] == [1024, 1024, 452]


@settings(deadline=None, derandomize=True)
@given(data=st.data())
def test_pieces_are_where_their_bytes_belong(data: st.DataObject) -> None:
    """For any extents, beginning, buffers and limit, the pieces name each byte's place, in order."""
    extents = data.draw(st.lists(st.tuples(st.integers(0, 900), st.integers(1, 50)), min_size=1))
    places = [offset + at for offset, size in extents for at in range(size)]
    start = data.draw(st.integers(0, len(places)))
    cuts = sorted(data.draw(st.lists(st.integers(start, len(places)), min_size=1)))
    into = [memoryview(bytearray(b - a)) for a, b in zip([start, *cuts], cuts, strict=False)]
    max_bytes = data.draw(st.integers(1, 60))
    pieces = list(placed(into, extents, start, max_bytes))
    assert [offset + at for offset, part in pieces for at in range(len(part))] == places[start : cuts[-1]]
    assert all(0 < len(part) <= max_bytes for _, part in pieces)


def test_too_small_extents_are_refused() -> None:
    """Buffers that the extents have no room for are a bug of the caller, and not cut off."""
    with pytest.raises(RuntimeError):
        list(placed([memoryview(bytes(9))], [(0, 8)]))
