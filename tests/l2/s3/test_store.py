"""The S3 store against a real server: what is found is whole, everybody's and alive; the rest is a miss."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from hotspan.core.terms import Terms
from hotspan.core.types import Chunk
from hotspan.l2.base import Found, marks_of
from hotspan.testing.chunks import aligned, chain, content
from hotspan.tiers.record import Record
from tests.l2.s3.rig import (
    FRAME_BYTES,
    TENANT,
    Place,
    Replicas,
    X,
    Y,
    find,
    parting,
    places,
    put_all,
    read,
    record_of,
)


def test_a_segment_is_found_by_all_once_it_is_whole(replica: Replicas) -> None:
    """Chunks are found, byte for byte and with their records, from the last one of their segment on and not before."""
    writer, reader = replica(), replica()
    text = chain("a", 8)
    for nth, chunk in enumerate(text):
        assert put_all(writer, [chunk]) == [True]
        assert places(find(reader, text)) == list(range((nth + 1) // 4 * 4))
    for chunk, found in zip(text, find(reader, text), strict=True):
        assert found == Found(record_of(chunk), Terms(tenant=TENANT))
        assert read(reader, found) == content(chunk.key, FRAME_BYTES, 1)


def test_one_object_holds_a_tenants_segment(replica: Replicas, place: Place) -> None:
    """There is an object for each whole segment, under the tenant's label and the last chunk's key; none for a tail."""
    text = chain("a", 10)
    put_all(replica(), text)
    assert [path.split("/")[2:] for path in place.paths("chunks")] == sorted(
        [f"{TENANT:016x}", text[last].key.hex()] for last in (3, 7)
    )


def test_what_waits_is_read_from_memory(replica: Replicas) -> None:
    """Who put a chunk reads it also while its segment is not whole; a stranger's record does not read it."""
    store = replica()
    (chunk,) = chain("a", 1)
    put_all(store, [chunk])
    assert read(store, Found(record_of(chunk), Terms())) == content(chunk.key, FRAME_BYTES, 1)
    assert read(store, Found(record_of(chunk, stamp=2), Terms())) is None
    assert not store.get(Found(record_of(chunk), Terms()), [aligned(4096)])


def test_chunks_may_come_in_any_order(replica: Replicas) -> None:
    """A segment is stored by whichever of its chunks comes last."""
    writer, reader = replica(), replica()
    for name, order in (("a", (3, 2, 1, 0)), ("b", (1, 3, 0, 2))):
        text = chain(name, 4)
        put_all(writer, [text[n] for n in order[:3]])
        assert places(find(reader, text)) == []
        put_all(writer, [text[order[3]]])
        assert places(find(reader, text)) == [0, 1, 2, 3]


def test_a_chunk_is_put_once(replica: Replicas) -> None:
    """A second put is told so while the chunk waits and when it is stored; with the object gone it counts again."""
    store = replica()
    text = chain("a", 4)
    assert put_all(store, text[:2]) == [True, True]
    assert put_all(store, text[:2], stamp=2) == [False, False]
    put_all(store, text[2:])
    assert put_all(store, text, stamp=2) == [False] * 4
    assert [one and one.record.stamp for one in find(store, text)] == [1] * 4
    replica().delete([text[3].key], TENANT)
    assert put_all(store, text, stamp=2) == [True] * 4
    assert [one and one.record.stamp for one in find(replica(), text)] == [2] * 4


@pytest.mark.parametrize("at", [1, 3, 5])
def test_texts_that_part_inside_a_segment_are_both_found(replica: Replicas, at: int) -> None:
    """A text whose first chunks were put as another's, and are not put again, has whole segments of its own."""
    writer, reader = replica(), replica()
    one = chain("a", 8)
    other = parting("b", one, at)
    put_all(writer, one)
    put_all(writer, other[at:])
    for text in (one, other):
        found = find(reader, text)
        assert places(found) == list(range(8))
        assert [read(reader, each) for each in found] == [content(chunk.key, FRAME_BYTES, 1) for chunk in text]


def test_texts_that_part_while_they_wait_are_both_found(replica: Replicas) -> None:
    """Chunks that wait serve every text that stands on them."""
    writer, reader = replica(), replica()
    one = chain("a", 4)
    other = parting("b", one, 2)
    put_all(writer, [*one[:3], *other[2:], one[3]])
    assert places(find(reader, one)) == places(find(reader, other)) == [0, 1, 2, 3]


def test_a_beginning_that_nobody_knows_is_put_again(replica: Replicas) -> None:
    """A store that does not know where a segment's beginning lies stores the rest once the beginning is put, too."""
    one = chain("a", 4)
    other = parting("b", one, 2)
    put_all(replica(), one)
    late = replica()
    put_all(late, other[2:])
    assert places(find(late, other)) == []
    put_all(late, other[:2])
    assert places(find(late, other)) == [0, 1, 2, 3]


def test_of_two_replicas_that_store_a_text_the_first_one_counts(replica: Replicas, place: Place) -> None:
    """The second is told at the segment's last chunk, its bytes change nothing, and it knows where the chunks are."""
    first, second = replica(), replica()
    text = chain("a", 4)
    put_all(second, text[:3], stamp=2)
    put_all(first, text, stamp=1)
    assert put_all(second, text[3:], stamp=2) == [False]
    assert len(place.paths("chunks")) == 1
    other = parting("b", text, 2)
    put_all(second, other[2:], stamp=2)
    assert [one and one.record.stamp for one in find(second, text)] == [1] * 4
    assert [one and one.record.stamp for one in find(first, other)] == [1, 1, 2, 2]


def test_many_replicas_store_a_text_at_once(replica: Replicas, place: Place) -> None:
    """Exactly one of many puts of a segment's last chunk is new, and what is found is one replica's, all of it."""
    stores = [replica() for _ in range(6)]
    text = chain("a", 4)
    for stamp, store in enumerate(stores):
        put_all(store, text[:3], stamp=stamp)
    with ThreadPoolExecutor(6) as pool:
        said = list(pool.map(lambda at: put_all(stores[at], text[3:], stamp=at), range(6)))
    assert said.count([True]) == 1 and len(place.paths("chunks")) == 1
    assert [one and one.record.stamp for one in find(replica(), text)] == [said.index([True])] * 4


def test_terms_of_all_who_put_a_chunk_add_up(replica: Replicas) -> None:
    """Labels and expiry of a text that shares chunks with one that is stored hold for those chunks in both."""
    first, second = replica(), replica()
    one = chain("a", 4)
    other = parting("b", one, 2)
    put_all(first, one, Terms(TENANT, labels=X))
    put_all(second, other, Terms(TENANT, labels=Y, expires_s=2_000_000_000))
    found = find(replica(), one)
    assert [each and each.terms.labels for each in found] == [X | Y, X | Y, X, X]
    assert [each and each.terms.expires_s for each in found] == [2_000_000_000] * 2 + [0, 0]
    assert [each and each.terms.labels for each in find(replica(), other)] == [X | Y, X | Y, Y, Y]


def test_the_last_chunks_terms_count_although_another_chunk_came_last(replica: Replicas) -> None:
    """Where a segment turns out to be stored, nobody's labels are lost, whichever put finds that out."""
    first, second = replica(), replica()
    text = chain("a", 4)
    put_all(second, [text[0], text[1], text[3]], Terms(TENANT, labels=Y))
    put_all(first, text, Terms(TENANT, labels=X))
    assert put_all(second, [text[2]], Terms(TENANT, labels=Y)) == [False]
    assert [each and each.terms.labels for each in find(first, text)] == [X | Y] * 4


def test_tenants_have_objects_of_their_own(replica: Replicas) -> None:
    """Chunks under one tenant's terms are not found under another's label, and make no segment with another's."""
    store = replica()
    text = chain("a", 4)
    put_all(store, text[:2], Terms(tenant=1))
    put_all(store, text[2:], Terms(tenant=2))
    assert places(find(store, text, 1)) == places(find(store, text, 2)) == []
    shared = replica(is_per_tenant=False)
    put_all(shared, text[:2], Terms(tenant=1))
    put_all(shared, text[2:], Terms(tenant=2))
    assert places(find(shared, text, 1)) == places(shared.find([chunk.key for chunk in text])) == [0, 1, 2, 3]


def test_a_chunk_of_no_chain_stands_alone(replica: Replicas) -> None:
    """A chunk without a parent inside a text is stored at once, and found where it is said that it stands alone."""
    writer, reader = replica(), replica()
    alone = [Chunk(chunk.key, None, chunk.index) for chunk in chain("window", 9)]
    put_all(writer, [alone[5], alone[8]])
    keys = [chunk.key for chunk in alone]
    assert places(reader.find(keys, TENANT, is_chain=False)) == [5, 8]
    assert places(reader.find(keys, TENANT)) == []
    assert read(reader, reader.find(keys, TENANT, is_chain=False)[8]) == content(keys[8], FRAME_BYTES, 1)


def test_a_long_text_is_found_up_to_its_first_gap(replica: Replicas) -> None:
    """Of a text of many segments all are found in one call; behind one that is missing nothing is."""
    store = replica()
    text = chain("a", 100)
    put_all(store, text)
    assert places(find(replica(), text)) == list(range(100))
    store.delete([text[61].key], TENANT)
    assert places(find(replica(), text)) == list(range(60))


def test_places_that_a_record_can_not_tell_are_not_stored(replica: Replicas, place: Place) -> None:
    """Chunks beyond place 65535 are taken and forgotten: no object, and no memory."""
    store = replica()
    far = [Chunk(chunk.key, chunk.parent, chunk.index + 65_536) for chunk in chain("a", 4)]
    assert put_all(store, far) == [True] * 4
    assert place.paths("chunks") == [] and read(store, Found(record_of(far[0]), Terms())) is None


def test_what_waits_is_bounded(replica: Replicas) -> None:
    """With more texts than there is room for, those that were not extended for longest are not stored; others are."""
    store = replica(pending_bytes=8 * FRAME_BYTES)
    old, *new = (chain(name, 4) for name in "abcd")
    put_all(store, old[:3])
    for text in new:
        put_all(store, text[:2])
        store.check()
    for text in (*(text[2:] for text in new), old[3:]):
        put_all(store, text)
    assert [len(places(find(store, text))) for text in (old, *new)] == [0, 4, 4, 4]


def test_marks_add_up_whoever_adds_them(replica: Replicas) -> None:
    """Marks of several replicas at once, before and after the chunk is stored, all count; each any number of times."""
    text = chain("a", 4)
    stores = [replica() for _ in range(4)]
    marks = [marks_of(Terms(labels=frozenset([label])), 5) for label in range(1, 9)]
    keys = [chunk.key for chunk in text[1:3]]
    stores[0].mark(dict.fromkeys(keys, marks[0]))
    put_all(stores[0], text)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda nth: stores[nth % 4].mark(dict.fromkeys(keys, marks[nth % 8])), range(16)))
    found = find(replica(), text)
    assert [each and len(each.terms.labels) for each in found] == [0, 8, 8, 0]
    assert [each and each.terms.generation for each in found] == [0, 5, 5, 0]


def test_a_deleted_chunk_is_dead_in_every_object(replica: Replicas, place: Place) -> None:
    """Whoever deletes a chunk: no copy of it is found, nor what was marked on it, and it can be stored anew."""
    writer = replica()
    one = chain("a", 4)
    other = parting("b", one, 2)
    put_all(writer, one, Terms(TENANT, labels=X))
    put_all(writer, other[2:])
    writer.mark({one[1].key: marks_of(Terms(labels=Y), 1)})
    found = find(writer, other)
    stranger = replica()
    stranger.delete([one[1].key], TENANT)
    assert places(find(stranger, one)) == places(find(stranger, other)) == [0, 2, 3]
    writer.delete([one[1].key], TENANT)
    assert read(writer, found[1]) is None
    assert put_all(writer, one, stamp=2) == [True] * 4
    again = find(replica(), one)
    assert [each and each.record.stamp for each in again] == [2] * 4
    assert again[1] is not None and again[1].terms.labels == frozenset()
    assert places(find(replica(), other)) == []  # the writer knew the chunk in this text's object


def test_what_stands_before_a_deleted_chunk_stays(replica: Replicas) -> None:
    """After others deleted a chunk, it and those behind it are put again, and not those before it."""
    writer = replica()
    text = chain("a", 4)
    put_all(writer, text)
    replica().delete([text[2].key])
    assert put_all(writer, text[:2], stamp=2) == [False, False]
    assert put_all(writer, text[2:], stamp=2) == [True, True]
    assert [each and each.record.stamp for each in find(replica(), text)] == [1, 1, 2, 2]


def test_a_dead_chunk_is_not_copied(replica: Replicas) -> None:
    """A text that shares a deleted chunk waits until that is put again."""
    store = replica()
    one = chain("a", 4)
    other = parting("b", one, 2)
    put_all(replica(), one)
    replica().delete([one[1].key])
    assert places(find(store, one)) == [0, 2, 3]
    assert put_all(store, other[2:]) == [True, True]
    assert places(find(store, other)) == []
    assert put_all(store, other[:2]) == [False, True]
    assert places(find(store, other)) == [0, 1, 2, 3]


def test_chunks_that_stand_on_each_other_in_a_circle_are_not_stored(replica: Replicas, place: Place) -> None:
    """Records that can be of no text are taken, make no object and hold nobody up."""
    store = replica()
    one, two = chain("a", 2)
    put_all(store, [Chunk(one.key, two.key, 2), Chunk(two.key, one.key, 3)])
    assert place.paths("chunks") == []


def test_deleting_takes_the_whole_object(replica: Replicas, place: Place) -> None:
    """Who knows in which object a chunk is deletes its bytes; what waits goes, too; what is not there is no error."""
    store = replica()
    text = chain("a", 6)
    put_all(store, text)
    store.delete([text[1].key, text[4].key, chain("nobody", 1)[0].key], TENANT)
    assert place.paths("chunks") == []
    assert read(store, Found(record_of(text[4]), Terms())) is None
    store.delete([], TENANT)


def test_a_chunk_that_was_deleted_while_it_waited_stays_dead(replica: Replicas) -> None:
    """A segment that is completed later does not bring back what another replica deleted meanwhile."""
    writer, other = replica(), replica()
    text = chain("a", 4)
    put_all(writer, text[:3])
    other.delete([text[1].key], TENANT)
    put_all(writer, text[3:])
    assert places(find(other, text)) == [0, 2, 3]
    assert put_all(replica(), text, stamp=2)[3]
    assert [each and each.record.stamp for each in find(other, text)] == [2] * 4


def test_frames_of_any_size_come_back(replica: Replicas) -> None:
    """Frames need not be whole pages, nor of one size, nor end where the buffers do."""
    store = replica()
    text = chain("a", 4)
    sizes = (1, 4095, 4097, 100_000)
    for chunk, size in zip(text, sizes, strict=True):
        record = Record(chunk.key, chunk.parent, bytes(32), size, Terms(TENANT), 1, chunk.index)
        store.put(record, [memoryview(content(chunk.key, size))])
    for found, chunk, size in zip(find(replica(), text), text, sizes, strict=True):
        assert found is not None
        into = aligned(size)
        assert store.get(found, [into[: size // 3], into[size // 3 :]])
        assert into == content(chunk.key, size)
        assert not store.get(found, [aligned(size + 1)])
