"""Metadata of chunks that the daemon does not have: kept as it is, or covered by what takes the chunk sooner."""

import pytest

from hotspan.core.terms import MAX_LABELS, Terms
from hotspan.core.types import ChunkKey
from hotspan.daemon.metadata import AbsentMetadata
from hotspan.daemon.stored import StoredObject
from hotspan.l2.base import updated, updates_of
from hotspan.testing.chunks import key_of
from hotspan.testing.clock import SimulatedClock

A, B, C = map(key_of, "abc")
BESIDE_A = ChunkKey(A[:4] + bytes(28))
"""A chunk with the slot of A."""


@pytest.fixture
def clock() -> SimulatedClock:
    """Of the daemon."""
    return SimulatedClock()


@pytest.fixture
def metadata(clock: SimulatedClock) -> AbsentMetadata:
    """That keeps the updates of two chunks."""
    return AbsentMetadata(clock, is_kept=True, max_chunks=2)


def tagged(label: int, expires_s: float = 0, generation: int = 5) -> list[bytes]:
    """Updates of a hit."""
    return updates_of(Terms(labels=frozenset([label]), expires_s=int(expires_s)), generation)


def taken(metadata: AbsentMetadata, key: ChunkKey) -> Terms:
    """What a chunk that is stored now is kept on besides its own terms."""
    return updated(Terms(), metadata.take(key))


def restarted(metadata: AbsentMetadata, clock: SimulatedClock, *, whole: bool) -> AbsentMetadata:
    """What the next daemon knows of it."""
    after = AbsentMetadata(clock, is_kept=True)
    after.load(metadata.all() if whole else metadata.changes())
    return after


def test_updates_are_joined_and_taken_once(metadata: AbsentMetadata, clock: SimulatedClock) -> None:
    """All updates of a chunk are on what is stored under its name; another chunk has none of them."""
    metadata.add(A, tagged(1))
    metadata.add(A, tagged(2, clock.unix() + 60))
    assert taken(metadata, A) == Terms(labels=frozenset([1, 2]), expires_s=int(clock.unix() + 60))
    assert taken(metadata, B) == Terms()


def test_updates_do_not_make_a_chunk_younger(metadata: AbsentMetadata) -> None:
    """A chunk that was computed before an invalidation, and is stored after a later hit of that text, is taken."""
    metadata.add(A, tagged(1, generation=9))
    assert updated(Terms(labels=frozenset([2]), generation=3), metadata.take(A)).generation == 3


def test_too_many_chunks_lose_no_update(metadata: AbsentMetadata, clock: SimulatedClock) -> None:
    """A chunk whose updates were dropped is taken by any tag, and expires no later; one that had none is as it was."""
    until_s = int(clock.unix()) + 60
    metadata.add(A, tagged(1, until_s))
    for key in (B, C, key_of("d")):
        metadata.add(key, tagged(2))
    assert taken(metadata, A) == Terms(is_wild=True, expires_s=until_s)
    assert taken(metadata, B) == Terms(is_wild=True) and taken(metadata, C) == Terms(labels=frozenset([2]))
    assert taken(metadata, key_of("never")) == Terms()


@pytest.mark.parametrize("whole", [False, True])
def test_a_restart_loses_no_update(metadata: AbsentMetadata, clock: SimulatedClock, whole: bool) -> None:
    """What was updated, on chunks that were there, too, is known to the next daemon; what is added there is joined."""
    until_s = int(clock.unix()) + 60
    metadata.add(A, tagged(1))
    metadata.note(B, tagged(1, until_s))
    after = restarted(metadata, clock, whole=whole)
    assert after.packed_bytes == metadata.packed_bytes == 32
    after.add(A, tagged(3, until_s + 1))
    assert taken(after, A) == Terms(is_wild=True, expires_s=until_s + 1)
    assert taken(after, B) == Terms(is_wild=True, expires_s=until_s) and taken(after, C) == Terms()
    assert not metadata.changes()


def test_chunks_of_one_slot_are_bound_by_both(metadata: AbsentMetadata, clock: SimulatedClock) -> None:
    """The earlier expiry binds until it is over, then nothing is found until the later one is over, too."""
    now_s = int(clock.unix())
    metadata.note(A, tagged(1, now_s + 60))
    metadata.note(BESIDE_A, tagged(1, now_s + 90))
    for after_s in (0, 61):
        clock.advance(after_s)
        assert taken(metadata, A) == Terms(is_wild=True, expires_s=now_s + 60)
    clock.advance(30)
    assert taken(metadata, A) == Terms(is_wild=True)
    metadata.note(A, tagged(1, now_s + 200))
    assert taken(metadata, BESIDE_A).expires_s == now_s + 200


def test_a_delete_ends_updates(metadata: AbsentMetadata, clock: SimulatedClock) -> None:
    """A chunk that is stored after a delete has no updates; that nothing is known of it any more is no such delete."""
    for key in (A, B, C):
        metadata.add(key, tagged(1))
        metadata.deleted(key)
    assert [taken(metadata, key) for key in (B, C)] == [Terms(), Terms()]
    assert taken(metadata, A) == Terms(is_wild=True)
    metadata.clear()
    assert taken(metadata, A) == Terms() and taken(restarted(metadata, clock, whole=True), A) == Terms()


def test_an_evicted_chunk_keeps_its_updates(metadata: AbsentMetadata) -> None:
    """Those that it had, however many: also as any tag."""
    stored = StoredObject(A, 1, (), updates=set(tagged(1)))
    metadata.note(A, tagged(1))
    metadata.evicted(stored)
    assert taken(metadata, A) == Terms(labels=frozenset([1]))
    for label in range(MAX_LABELS + 1):
        metadata.add(B, tagged(label + 1))
    assert taken(metadata, B) == Terms(is_wild=True)


@pytest.mark.parametrize("data", ["x", "AAAA", "/////wEAAAABAAAA", "é"])
def test_a_damaged_table_is_an_error(metadata: AbsentMetadata, data: str) -> None:
    """What is no slot raises ValueError, so that the log that says it is not believed."""
    with pytest.raises(ValueError):
        metadata.load(data)
