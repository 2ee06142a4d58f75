"""Segments: what an index says is what was put, and what waits is bounded and found again."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotspan.core.terms import Terms
from hotspan.core.types import PAGE_BYTES, Chunk
from hotspan.l2.segments import INDEX_BYTES, MOST_CHUNKS, Cut, Part, Pending, packed, read_index
from hotspan.testing.chunks import chain, content
from hotspan.tiers.record import Record


def part(chunk: Chunk, size: int = 100) -> Part:
    """A chunk as it waits."""
    record = Record(chunk.key, chunk.parent, bytes(32), size, Terms(tenant=7), chunk.index, chunk.index)
    return Part(record, bytes([chunk.index]) * 16, content(chunk.key, size))


def test_an_index_says_where_every_frame_is() -> None:
    """Of as many chunks as fit, each record, life and frame is found where the index says, on a page of its own."""
    parts = [part(chunk, 5000 * chunk.index + 1) for chunk in chain("a", MOST_CHUNKS)]
    buffers, entries = packed(parts)
    data = b"".join(buffers)
    assert read_index(data[:INDEX_BYTES], len(data)) == entries
    for one, entry in zip(parts, entries, strict=True):
        assert (entry.record, entry.life) == (one.record, one.life) and entry.at % PAGE_BYTES == 0
        assert data[entry.at : entry.at + entry.size] == one.frame


@settings(max_examples=300, deadline=None)
@given(at=st.integers(0, INDEX_BYTES - 1), flip=st.integers(1, 255))
def test_a_damaged_index_says_nothing(at: int, flip: int) -> None:
    """With any byte of it changed an index is none, but for eight that nobody reads."""
    buffers, entries = packed([part(chunk) for chunk in chain("a", 3)])
    data = bytearray(b"".join(buffers))
    data[at] ^= flip
    found = read_index(bytes(data[:INDEX_BYTES]), len(data))
    assert found is None or (8 <= at < 16 and found == entries)


def test_an_object_that_is_cut_is_none() -> None:
    """An index of an object that has fewer or more bytes than its frames is none."""
    buffers, _ = packed([part(chunk) for chunk in chain("a", 3)])
    data = b"".join(buffers)
    for size in (0, INDEX_BYTES, len(data) - 1, len(data) + 1):
        assert read_index(data[:INDEX_BYTES], size) is None
    assert read_index(data[: INDEX_BYTES - 1], len(data)) is None


@pytest.mark.parametrize("order", [(1, 0, 2), (0, 2), (0, 1, 1), (2, 1, 0)])
def test_chunks_that_do_not_follow_each_other_are_no_segment(order: tuple[int, ...]) -> None:
    """An index with whole records in another order than the chain's, or with a gap, is none."""
    parts = [part(chunk) for chunk in chain("a", 3)]
    buffers, _ = packed([parts[n] for n in order])
    data = b"".join(buffers)
    assert read_index(data[:INDEX_BYTES], len(data)) is None


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_what_waits_is_what_was_added_last(seed: int) -> None:
    """Whatever is added and removed: the bound holds, parents stay as long as what stands on them, ends are found."""
    rng = random.Random(seed)
    pending = Pending(Cut(4), 1500)
    texts = [chain("a", 8), chain("a", 2) + [Chunk(c.key, c.parent, c.index) for c in chain("b", 8)[2:]], chain("c", 8)]
    texts[1][2] = Chunk(texts[1][2].key, texts[1][1].key, 2)  # parts from the first text behind two chunks
    for _ in range(40):
        chunk = rng.choice(rng.choice(texts))
        if pending.get(chunk.key) is not None:
            pending.remove([chunk.key])
            assert pending.get(chunk.key) is None
        else:
            added = part(chunk, rng.randint(100, 400))
            pending.add(added)
            assert pending.get(chunk.key) is added
            ends = [end.record.key for end in pending.ends_after(added)]
            assert set(ends) == {
                text[last].key
                for text in texts
                for last in (3, 7)
                if chunk in text[last - 3 : last + 1]
                and all(pending.get(one.key) for one in text[text.index(chunk) : last + 1])
            }
        pending.check()


def test_the_segment_that_was_extended_longest_ago_goes_first() -> None:
    """For want of room a whole line of chunks goes, parents with what stands on them, and others stay."""
    pending = Pending(Cut(4), 500)
    old, new = chain("old", 3), chain("new", 3)
    for chunk in (old[0], old[1], new[0], old[2], new[1]):
        pending.add(part(chunk))
    pending.add(part(new[2]))
    assert [pending.get(chunk.key) is None for chunk in old + new] == [True] * 3 + [False] * 3
    assert pending.dropped == 3
    pending.check()


def test_a_chunk_that_is_larger_than_all_room_does_not_wait() -> None:
    """A chunk over the bound is dropped at once, with all else."""
    pending = Pending(Cut(4), 500)
    pending.add(part(chain("a", 1)[0]))
    pending.add(part(chain("b", 1)[0], 501))
    assert (pending.bytes, pending.dropped) == (0, 2)
    pending.check()
