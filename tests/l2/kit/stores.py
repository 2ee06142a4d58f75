"""What every store of an L2 must do. Derive a test class and give it a `make_store` fixture:

    class TestMyStore(ObjectStoreTests, SharedLogTests):
        @pytest.fixture
        def make_store(self, tmp_path):
            return lambda entries: MyStore(tmp_path, log_entries=entries)

Each call of it opens another replica's store over the same place; the kit closes them. SharedLogTests and
TrimmedLogTests (logs.py) are of a store with a log, and with one whose length can be set; StoreOutageTests (outages.py)
of a store that speaks to a server; StoreNamesTests (names.py) of one that keeps the names it was written under;
SharedStoreTests (races.py) of one that replicas share: all but the outages.
"""

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations

import pytest

from hotspan.core.frame import HEADER_BYTES
from hotspan.core.terms import Terms, adapter_label, tag_labels, tenant_label
from hotspan.core.types import MIB, Chunk, ChunkKey
from hotspan.l2.base import Found, ObjectStore, updated, updates_of
from hotspan.testing.chunks import HANG_S, aligned, chain, content, key_of
from hotspan.tiers.record import Record

NAMESPACE = bytes(range(32))
TENANT = tenant_label("a tenant")
TERMS = Terms(TENANT, adapter_label("an adapter"), tag_labels(["x", "y"]), 7, 4_000_000_000)
MAX_ENTRIES = 4096

MakeStore = Callable[[int], ObjectStore]
"""Opens a store whose log keeps about so many entries."""


def record_of(chunk: Chunk, payload_bytes: int, version: int = 0, terms: Terms = TERMS) -> Record:
    """What the kit puts for a chunk."""
    return Record(chunk.key, chunk.parent, NAMESPACE, payload_bytes, terms, version + 1, chunk.index)


def frame_of(key: ChunkKey, payload_bytes: int, version: int = 0) -> memoryview:
    """Bytes in the place of a frame: stores do not read them."""
    size = HEADER_BYTES + payload_bytes
    return aligned(size, content(key, size, version))


def put(store: ObjectStore, chunk: Chunk, payload_bytes: int, version: int = 0, terms: Terms = TERMS) -> bool:
    """Put what `record_of` and `frame_of` say."""
    frame = frame_of(chunk.key, payload_bytes, version)
    return store.put(record_of(chunk, payload_bytes, version, terms), [frame[:HEADER_BYTES], frame[HEADER_BYTES:]])


def found(store: ObjectStore, chunk: Chunk) -> Found | None:
    """What a store has of one chunk at the root of a text."""
    (one,) = store.find([chunk.key], TENANT)
    return one


def read(store: ObjectStore, one: Found | None) -> memoryview | None:
    """The frame of what was found; None if it is gone."""
    if one is None:
        return None
    into = aligned(HEADER_BYTES + one.record.payload_bytes)
    return into if store.get(one, [into]) else None


def cut(buffer: memoryview, seed: int) -> list[memoryview]:
    """A buffer in pieces of odd sizes, some of one byte."""
    chance = random.Random(seed)
    pieces, at = [], 0
    while at < len(buffer):
        size = min(chance.choice([1, 17, 4095, 65537, MIB - 1, MIB, MIB + 1]), len(buffer) - at)
        pieces.append(buffer[at : at + size])
        at += size
    return pieces


class StoreFixtures:
    """What all parts of the kit use."""

    PAYLOAD_BYTES = 2 * MIB + 3 * 4096
    """Enough that a store moves it in several steps."""

    @pytest.fixture
    def make_store(self) -> MakeStore:
        """Opens a store; see the head of this file."""
        raise NotImplementedError("give the class a `make_store` fixture")

    @pytest.fixture
    def open_store(self, make_store: MakeStore) -> Iterator[MakeStore]:
        """The same; closes what it opened."""
        opened: list[ObjectStore] = []

        def open_store(entries: int) -> ObjectStore:
            opened.append(make_store(entries))
            return opened[-1]

        yield open_store
        for store in opened:
            store.close()

    @pytest.fixture
    def store(self, open_store: MakeStore) -> ObjectStore:
        """One replica's."""
        return open_store(MAX_ENTRIES)

    @pytest.fixture
    def other(self, open_store: MakeStore) -> ObjectStore:
        """Another replica's."""
        return open_store(MAX_ENTRIES)


class ObjectStoreTests(StoreFixtures):
    """Of every store."""

    def test_what_was_never_put_is_not_there(self, store: ObjectStore) -> None:
        """An empty store finds nothing, and what is done to strangers or to nothing is no error."""
        assert store.find([chunk.key for chunk in chain("a", 3)], TENANT) == [None, None, None]
        store.delete([key_of("a")], TENANT)
        store.delete([], TENANT)
        store.add_updates({})
        assert store.find([], TENANT) == []

    @pytest.mark.parametrize("payload_bytes", [4096, MIB - HEADER_BYTES, MIB, 3 * MIB - HEADER_BYTES, 4 * MIB + 4096])
    def test_a_get_returns_what_was_put(self, store: ObjectStore, payload_bytes: int) -> None:
        """Record and terms are found as they were put, and the frame is read byte for byte, time and again."""
        (chunk,) = chain("a", 1)
        assert put(store, chunk, payload_bytes)
        one = found(store, chunk)
        assert one is not None and one.record == record_of(chunk, payload_bytes) and one.terms == TERMS
        for _ in range(3):
            assert read(store, one) == frame_of(chunk.key, payload_bytes)

    @pytest.mark.parametrize("seed", range(3))
    def test_frames_come_and_go_in_pieces(self, store: ObjectStore, seed: int) -> None:
        """However a frame is cut into buffers, for the put and for the get, it is the same; nothing else changes."""
        (chunk,) = chain("a", 1)
        frame = frame_of(chunk.key, self.PAYLOAD_BYTES)
        assert store.put(record_of(chunk, self.PAYLOAD_BYTES), cut(frame, seed))
        one, around = found(store, chunk), memoryview(bytearray(b"\xa5" * (len(frame) + 128)))
        assert one is not None and store.get(one, cut(around[64:-64], seed + 1))
        assert around[64:-64] == frame and {*around[:64], *around[-64:]} == {0xA5}

    @pytest.mark.parametrize("version", [0, 1])
    def test_the_first_put_stays(self, store: ObjectStore, other: ObjectStore, version: int) -> None:
        """A second put, by whomever, says that there is one already, and changes nothing of it."""
        (chunk,) = chain("a", 1)
        assert put(store, chunk, self.PAYLOAD_BYTES)
        for each in (store, other):
            frame = frame_of(chunk.key, self.PAYLOAD_BYTES, version=2)  # version 0: under the same record
            assert not each.put(record_of(chunk, self.PAYLOAD_BYTES, version), [frame])
        one = found(other, chunk)
        assert one is not None and one.record == record_of(chunk, self.PAYLOAD_BYTES)
        assert read(other, one) == frame_of(chunk.key, self.PAYLOAD_BYTES)

    def test_of_several_puts_at_once_one_wins(self, store: ObjectStore, other: ObjectStore) -> None:
        """Of replicas that put the same chunk at once one is told that it did, and what it put is there, unmixed."""
        for chunk in [chain(name, 1)[0] for name in "abc"]:
            replicas = [store, other, store, other]
            barrier = threading.Barrier(len(replicas))

            def race(version: int, chunk: Chunk = chunk, barrier: threading.Barrier = barrier) -> bool:
                barrier.wait(HANG_S)
                return put([store, other][version % 2], chunk, self.PAYLOAD_BYTES, version)

            with ThreadPoolExecutor(len(replicas)) as threads:
                won = [version for version, is_ours in enumerate(threads.map(race, range(len(replicas)))) if is_ours]
            assert len(won) == 1
            one = found(store, chunk)
            assert one is not None and one.record == record_of(chunk, self.PAYLOAD_BYTES, won[0])
            assert read(other, one) == frame_of(chunk.key, self.PAYLOAD_BYTES, won[0])

    def test_nobody_sees_half_an_object(self, store: ObjectStore, other: ObjectStore) -> None:
        """Whoever finds an object while it is being put reads all of it."""
        chunks = [chain(f"{n}", 1)[0] for n in range(8)]
        frames = [frame_of(chunk.key, self.PAYLOAD_BYTES) for chunk in chunks]
        looks = threading.Event()

        def write() -> None:
            looks.wait(HANG_S)
            for chunk, frame in zip(chunks, frames, strict=True):
                assert store.put(record_of(chunk, self.PAYLOAD_BYTES), [frame])

        with ThreadPoolExecutor(1) as thread:
            writing = thread.submit(write)
            for chunk, frame in zip(chunks, frames, strict=True):
                looks.set()
                while (one := found(other, chunk)) is None:
                    assert not (writing.done() and writing.exception())
                assert read(other, one) == frame
            writing.result(HANG_S)

    @pytest.mark.parametrize("difference", [-MIB, -1, 1, MIB])
    def test_buffers_of_another_size_are_a_miss(self, store: ObjectStore, difference: int) -> None:
        """A get into more or fewer bytes than the frame has is False, and does no harm to the next one."""
        (chunk,) = chain("a", 1)
        put(store, chunk, self.PAYLOAD_BYTES)
        one = found(store, chunk)
        assert one is not None
        assert not store.get(one, [aligned(HEADER_BYTES + self.PAYLOAD_BYTES + difference)])
        assert read(store, one) == frame_of(chunk.key, self.PAYLOAD_BYTES)

    def test_a_deleted_object_is_gone(self, store: ObjectStore, other: ObjectStore) -> None:
        """After a delete nobody finds it, nor reads what was found before; others stay; it can be put anew."""
        gone, kept = chain("gone", 1)[0], chain("kept", 1)[0]
        for chunk in (gone, kept):
            put(store, chunk, self.PAYLOAD_BYTES)
        before = [found(each, gone) for each in (store, other)]
        other.delete([gone.key, key_of("never here")], TENANT)
        for each, one in zip((store, other), before, strict=True):
            assert found(each, gone) is None and read(each, one) is None
            assert read(each, found(each, kept)) == frame_of(kept.key, self.PAYLOAD_BYTES)
        assert put(store, gone, self.PAYLOAD_BYTES, version=1)
        assert read(other, found(other, gone)) == frame_of(gone.key, self.PAYLOAD_BYTES, version=1)

    def test_updates_add_up_in_any_order(self, store: ObjectStore, other: ObjectStore) -> None:
        """Updates of all replicas count, in whatever order and however often they come; the record stays as it was."""
        joined = [Terms(labels=tag_labels(["z"])), Terms(expires_s=3_000_000_000), Terms(labels=tag_labels(["x"], "s"))]
        all_updates = [updates_of(terms, 8 + n) for n, terms in enumerate(joined)]
        expected = updated(TERMS, [update for updates in all_updates for update in updates])
        assert expected.labels > TERMS.labels and expected.generation == 10 and expected.expires_s == 3_000_000_000
        for number, order in enumerate(permutations(all_updates)):
            (chunk,) = chain(f"{number}", 1)
            put(store, chunk, 4096)
            for updates in [*order, order[0]]:
                other.add_updates({chunk.key: updates})
                store.add_updates({chunk.key: updates, key_of("never here"): updates})
            for each in (store, other):
                one = found(each, chunk)
                assert one is not None and one.record == record_of(chunk, 4096) and one.terms == expected

    def test_updates_before_the_put_count(self, store: ObjectStore, other: ObjectStore) -> None:
        """What was updated on a chunk that is not there yet makes no object, and is on it once it is there."""
        (chunk,) = chain("a", 1)
        other.add_updates({chunk.key: updates_of(Terms(labels=tag_labels(["early"])), 9)})
        assert found(store, chunk) is None
        assert put(store, chunk, 4096)
        one = found(store, chunk)
        assert one is not None and one.terms.labels == TERMS.labels | tag_labels(["early"])

    def test_updates_go_with_their_object(self, store: ObjectStore, other: ObjectStore) -> None:
        """What is put anew after a delete is on its own terms."""
        (chunk,) = chain("a", 1)
        put(store, chunk, 4096)
        store.add_updates({chunk.key: updates_of(Terms(labels=tag_labels(["old"]), expires_s=1), 9)})
        other.delete([chunk.key], TENANT)
        assert put(store, chunk, 4096, version=1)
        one = found(store, chunk)
        assert one is not None and one.terms == TERMS

    def test_all_of_a_long_text_is_found(self, store: ObjectStore, other: ObjectStore) -> None:
        """400 chunks are found in the order they were asked for; behind one that is missing, none is mistaken."""
        chunks = chain("text", 400)
        for chunk in chunks:
            assert put(store, chunk, 4096)
        keys = [chunk.key for chunk in chunks]
        assert [one.record.key for one in other.find(keys, TENANT) if one is not None] == keys
        store.delete([chunks[250].key], TENANT)
        left = other.find(keys, TENANT)
        assert all(left[:250]) and left[250] is None and len(left) == 400
        assert all(one is None or one.record.key == key for one, key in zip(left, keys, strict=True))

    def test_chunks_that_stand_alone_do_not_hide_each_other(self, store: ObjectStore) -> None:
        """Where keys are no chain each is found or not for itself, wherever others are missing."""
        chunks = [chain(f"{n}", 1)[0] for n in range(8)]
        for chunk in chunks[1::2]:
            assert put(store, chunk, 4096)
        looked = store.find([chunk.key for chunk in chunks], TENANT, is_chain=False)
        keys = [one.record.key if one is not None else None for one in looked]
        assert keys == [chunk.key if n % 2 else None for n, chunk in enumerate(chunks)]

    def test_threads_do_not_disturb_each_other(self, store: ObjectStore) -> None:
        """Puts, finds, updates and gets of different chunks, all at once through one store, each do their own."""

        def work(number: int) -> None:
            for chunk in [chain(f"{number}/{n}", 1)[0] for n in range(3)]:
                assert put(store, chunk, self.PAYLOAD_BYTES)
                store.add_updates({chunk.key: updates_of(Terms(labels=frozenset([number + 1])), 9)})
                one = found(store, chunk)
                assert one is not None and one.terms.labels == TERMS.labels | {number + 1}
                assert read(store, one) == frame_of(chunk.key, self.PAYLOAD_BYTES)
                store.delete([chunk.key], TENANT)
                assert found(store, chunk) is None

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(work, range(8)))

    def test_usage_does_not_exaggerate(self, store: ObjectStore) -> None:
        """What a store says about objects is true, or nothing."""
        for chunk in [chain(name, 1)[0] for name in "abc"]:
            put(store, chunk, self.PAYLOAD_BYTES)
        usage = store.usage()
        assert usage.objects in (0, 3) and (usage.bytes == 0 or usage.bytes >= 3 * self.PAYLOAD_BYTES)
        assert usage.capacity_bytes == 0 or usage.capacity_bytes >= usage.bytes

    def test_closing_twice_is_harmless(self, store: ObjectStore) -> None:
        """The second `close` does nothing."""
        store.find([key_of("a")], TENANT)
        store.close()
        store.close()
