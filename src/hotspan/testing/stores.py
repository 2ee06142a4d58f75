"""What every store of an L2 must do. Derive a test class and give it a `make_store` fixture:

    class TestMyStore(ObjectStoreTests, SharedLogTests):
        @pytest.fixture
        def make_store(self, tmp_path):
            return lambda entries: MyStore(tmp_path, log_entries=entries)

Each call of it opens another replica's store over the same place; the kit closes them. A store whose `log` is None does
without SharedLogTests, one whose log's limit can't be made small without TrimmedLogTests, one without a server of its
own without StoreOutageTests.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from typing import Any, Protocol

import pytest

from hotspan.core.frame import HEADER_BYTES
from hotspan.core.terms import Scope, Terms, adapter_label, tag_labels, tenant_label
from hotspan.core.types import MIB, Chunk, ChunkKey
from hotspan.l2.base import Found, ObjectStore, SharedInvalidation, SharedLog, marked, marks_of
from hotspan.testing.chunks import aligned, chain, content, key_of
from hotspan.tiers.record import Record

NAMESPACE = bytes(range(32))
TENANT = tenant_label("a tenant")
TERMS = Terms(TENANT, adapter_label("an adapter"), tag_labels(["x", "y"]), 7, 4_000_000_000)
MOST_ENTRIES = 4096

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


def log_of(store: ObjectStore) -> SharedLog:
    """Raises: AssertionError for a store without one: its tests do not derive from those of logs."""
    assert store.log is not None
    return store.log


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
        return open_store(MOST_ENTRIES)

    @pytest.fixture
    def other(self, open_store: MakeStore) -> ObjectStore:
        """Another replica's."""
        return open_store(MOST_ENTRIES)


class ObjectStoreTests(StoreFixtures):
    """Of every store."""

    def test_what_was_never_put_is_not_there(self, store: ObjectStore) -> None:
        """An empty store finds nothing, and what is done to strangers or to nothing is no error."""
        assert store.find([chunk.key for chunk in chain("a", 3)], TENANT) == [None, None, None]
        store.delete([key_of("a")], TENANT)
        store.delete([], TENANT)
        store.mark({})
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
                barrier.wait(10)
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
            looks.wait(10)
            for chunk, frame in zip(chunks, frames, strict=True):
                assert store.put(record_of(chunk, self.PAYLOAD_BYTES), [frame])

        with ThreadPoolExecutor(1) as thread:
            writing = thread.submit(write)
            for chunk, frame in zip(chunks, frames, strict=True):
                looks.set()
                while (one := found(other, chunk)) is None:
                    assert not (writing.done() and writing.exception())
                assert read(other, one) == frame
            writing.result(10)

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

    def test_marks_add_up_in_any_order(self, store: ObjectStore, other: ObjectStore) -> None:
        """Marks of all replicas count, in whatever order and however often they come; the record stays as it was."""
        joined = [Terms(labels=tag_labels(["z"])), Terms(expires_s=3_000_000_000), Terms(labels=tag_labels(["x"], "s"))]
        all_marks = [marks_of(terms, 8 + n) for n, terms in enumerate(joined)]
        expected = marked(TERMS, [mark for marks in all_marks for mark in marks])
        assert expected.labels > TERMS.labels and expected.generation == 10 and expected.expires_s == 3_000_000_000
        for number, order in enumerate(permutations(all_marks)):
            (chunk,) = chain(f"{number}", 1)
            put(store, chunk, 4096)
            for marks in [*order, order[0]]:
                other.mark({chunk.key: marks})
                store.mark({chunk.key: marks, key_of("never here"): marks})
            for each in (store, other):
                one = found(each, chunk)
                assert one is not None and one.record == record_of(chunk, 4096) and one.terms == expected

    def test_marks_before_the_put_count(self, store: ObjectStore, other: ObjectStore) -> None:
        """What was marked on a chunk that is not there yet makes no object, and is on it once it is there."""
        (chunk,) = chain("a", 1)
        other.mark({chunk.key: marks_of(Terms(labels=tag_labels(["early"])), 9)})
        assert found(store, chunk) is None
        assert put(store, chunk, 4096)
        one = found(store, chunk)
        assert one is not None and one.terms.labels == TERMS.labels | tag_labels(["early"])

    def test_marks_go_with_their_object(self, store: ObjectStore, other: ObjectStore) -> None:
        """What is put anew after a delete is on its own terms."""
        (chunk,) = chain("a", 1)
        put(store, chunk, 4096)
        store.mark({chunk.key: marks_of(Terms(labels=tag_labels(["old"]), expires_s=1), 9)})
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
        """Puts, finds, marks and gets of different chunks, all at once through one store, each do their own."""

        def work(number: int) -> None:
            for chunk in [chain(f"{number}/{n}", 1)[0] for n in range(3)]:
                assert put(store, chunk, self.PAYLOAD_BYTES)
                store.mark({chunk.key: marks_of(Terms(labels=frozenset([number + 1])), 9)})
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


class SharedLogTests(StoreFixtures):
    """Of every store with a log."""

    def lose_log(self, store: ObjectStore) -> None:
        """Make the log one that has lost entries which `store` had read: somebody asks for more than there ever was."""
        log_of(store).read(log_of(store).read(0).generation + 1000)

    def test_a_new_log_has_no_entries(self, store: ObjectStore, other: ObjectStore) -> None:
        """A log begins at its floor, a time in milliseconds, in an epoch that all replicas see."""
        before_ms = time.time() * 1000
        pages = [log_of(each).read(after) for each in (store, other) for after in (0, 5)]
        assert len({page.epoch for page in pages}) == 1 and len(pages[0].epoch) == 16
        assert {page.generation for page in pages} == {pages[0].floor} and not any(page.entries for page in pages)
        assert abs(pages[0].floor - before_ms) < 60_000

    @pytest.mark.parametrize(
        "scope",
        [
            Scope(),
            Scope(tenant=tenant_label("t"), adapter=2**64 - 1),
            Scope(labels=frozenset([2**64 - 1, 2**63, 1])),
            Scope(keys=frozenset(chunk.key for chunk in chain("a", 400))),
            Scope(tenant=1, namespace=NAMESPACE, keys=frozenset()),
        ],
        ids=["everything", "tenant", "labels", "keys", "namespace"],
    )
    def test_an_entry_says_what_was_appended(self, store: ObjectStore, other: ObjectStore, scope: Scope) -> None:
        """Every replica reads each scope as it was, twice if it was appended twice, and whose it was."""
        generations = [log_of(store).append([scope], by) for by in ("replica-1", "replica-1", "ä/b c")]
        page = log_of(other).read(0)
        expected = zip(generations, ("replica-1", "replica-1", "ä/b c"), strict=True)
        assert list(page.entries) == [SharedInvalidation(generation, (scope,), by) for generation, by in expected]
        assert page.floor < generations[0] < generations[1] < generations[2] == page.generation

    def test_a_reader_gets_what_comes_after(self, store: ObjectStore, other: ObjectStore) -> None:
        """Entries above a generation, and no others; of the newest on there are none."""
        generations = [log_of(each).append([Scope(tenant=n)], "me") for n, each in enumerate([store, other] * 3)]
        for each in (store, other):
            for number, after in enumerate(generations):
                page = log_of(each).read(after)
                assert [entry.generation for entry in page.entries] == generations[number + 1 :]
                assert page.generation == generations[-1]

    def test_generations_increase_whoever_appends(self, store: ObjectStore, other: ObjectStore) -> None:
        """Replicas that append at once get generations of their own, each above its last, and a reader misses none."""
        logs = [log_of(store), log_of(other), log_of(store), log_of(other)]
        done = threading.Event()
        seen: list[SharedInvalidation] = []

        def append(number: int) -> list[int]:
            return [logs[number].append([Scope(tenant=number * 100 + n)], str(number)) for n in range(20)]

        def follow() -> None:
            after = 0
            while True:
                is_last = done.is_set()
                page = log_of(other).read(after)
                seen.extend(page.entries)
                after = page.generation
                if is_last:
                    return

        with ThreadPoolExecutor(len(logs) + 1) as threads:
            following = threads.submit(follow)
            given = list(threads.map(append, range(len(logs))))
            done.set()
            following.result(10)
        assert all(each == sorted(set(each)) for each in given)
        generations = sorted(at for each in given for at in each)
        assert len(set(generations)) == len(generations)
        assert [entry.generation for entry in seen] == generations
        by_generation = {entry.generation: entry.scopes[0].tenant for entry in seen}
        assert all(by_generation[at] == i * 100 + n for i, each in enumerate(given) for n, at in enumerate(each))

    def test_replicas_are_those_that_reported(self, store: ObjectStore, other: ObjectStore) -> None:
        """Each replica is there with what it said last, whatever its name, until it says that it is gone."""
        names = ["replica-1", "../../etc/x", "ä b:c", "."]
        for n, name in enumerate(names):
            log_of(store).report(name, n, 60)
        log_of(other).report("replica-1", 70, 60)
        assert log_of(other).replicas() == dict(zip(names, [70, 1, 2, 3], strict=True))
        for name in [*names[1:], "never here"]:
            log_of(other).forget(name)
        assert log_of(store).replicas() == {"replica-1": 70}

    def test_a_replica_that_says_nothing_is_not_alive(self, store: ObjectStore, other: ObjectStore) -> None:
        """A report holds for as long as it says, and one that comes before its end prolongs it."""
        log_of(store).report("lives", 1, 60)
        log_of(store).report("dies", 1, 0.3)
        reported_s = time.monotonic()
        while "dies" in log_of(other).replicas():
            assert time.monotonic() - reported_s < 5
            time.sleep(0.01)
        assert time.monotonic() - reported_s > 0.2 and log_of(other).replicas() == {"lives": 1}
        log_of(store).report("dies", 1, 60)
        assert log_of(other).replicas() == {"lives": 1, "dies": 1}

    def test_a_log_that_lost_entries_begins_anew(self, store: ObjectStore, other: ObjectStore) -> None:
        """The loss is a new epoch for all, its floor above every generation of the last, and its entries are kept."""
        last = max(log_of(store).append([Scope(tenant=n)], "me") for n in range(3))
        before = log_of(other).read(0)
        self.lose_log(store)
        pages = [log_of(each).read(after) for each in (store, other) for after in (0, last)]
        assert len({page.epoch for page in pages}) == 1 and pages[0].epoch != before.epoch
        assert all(page.floor > last and page.generation == page.floor and not page.entries for page in pages)
        generation = log_of(other).append([Scope(tenant=9)], "me")
        page = log_of(store).read(pages[0].generation)
        assert page.epoch == pages[0].epoch and [entry.generation for entry in page.entries] == [generation]
        assert generation > pages[0].floor

    def test_a_new_epoch_hides_all_objects(self, store: ObjectStore, other: ObjectStore) -> None:
        """With the log all objects and marks are lost, to those who knew them, too; they can be put anew."""
        (chunk,) = chain("a", 1)
        put(store, chunk, 4096)
        store.mark({chunk.key: marks_of(Terms(labels=tag_labels(["old"])), 9)})
        assert found(other, chunk) is not None
        self.lose_log(store)
        for each in (store, other):
            log_of(each).read(0)
            assert found(each, chunk) is None
        assert put(other, chunk, 4096, version=1)
        one = found(store, chunk)
        assert one is not None and one.terms == TERMS
        assert read(store, one) == frame_of(chunk.key, 4096, version=1)

    def test_a_loss_that_several_notice_is_one(self, open_store: MakeStore) -> None:
        """Replicas that find at once that entries were lost begin one epoch between them."""
        stores = [open_store(MOST_ENTRIES) for _ in range(4)]
        last = log_of(stores[0]).append([Scope()], "me")
        for each in stores:
            assert log_of(each).read(0).generation == last
        barrier = threading.Barrier(len(stores))

        def notice(store: ObjectStore) -> bytes:
            barrier.wait(10)
            return log_of(store).read(last + 1000).epoch

        with ThreadPoolExecutor(len(stores)) as threads:
            epochs = list(threads.map(notice, stores))
        assert {log_of(each).read(0).epoch for each in stores} == set(epochs)


class TrimmedLogTests(StoreFixtures):
    """Of a log that is told how many entries to keep."""

    ENTRIES = 8
    """Few; a log may keep as many again."""

    def test_a_log_keeps_the_newest_entries(self, open_store: MakeStore) -> None:
        """Of many entries those above the floor are there, about as many as were asked for, and the floor says so."""
        store, other = open_store(self.ENTRIES), open_store(self.ENTRIES)
        generations = [log_of(each).append([Scope(tenant=n)], "me") for n, each in enumerate([store, other] * 20)]
        for each in (store, other):
            page = log_of(each).read(0)
            kept = [entry.generation for entry in page.entries]
            assert kept == [at for at in generations if at > page.floor]
            assert self.ENTRIES <= len(kept) <= 2 * self.ENTRIES and page.floor in generations
            assert [entry.scopes[0].tenant for entry in page.entries] == list(range(40 - len(kept), 40))
            assert log_of(each).read(generations[-2]).epoch == page.epoch

    def test_who_reads_on_misses_nothing(self, open_store: MakeStore) -> None:
        """A reader that keeps up sees every entry once while the oldest are dropped, in one epoch."""
        store, other = open_store(self.ENTRIES), open_store(self.ENTRIES)
        first = page = log_of(other).read(0)
        for n in range(40):
            log_of(store).append([Scope(tenant=n)], "me")
            page = log_of(other).read(page.generation)
            assert [entry.scopes[0].tenant for entry in page.entries] == [n] and page.epoch == first.epoch


class Server(Protocol):
    """The process that a store speaks to."""

    def stop(self) -> None:
        """Kill it."""
        ...

    def start(self) -> None:
        """Start it where it was; returns when it answers."""
        ...

    def freeze(self) -> None:
        """Stop it in the middle of whatever it does, its connections open."""
        ...

    def thaw(self) -> None:
        """Let it go on."""
        ...


class StoreOutageTests(StoreFixtures):
    """Of a store with a server. `make_store` gives it a deadline of at most half of LIMIT_S."""

    LIMIT_S = 5.0
    """Within which every call must end, however ill the server is."""

    @pytest.fixture
    def server(self) -> Server:
        """What the stores of `make_store` speak to."""
        raise NotImplementedError("give the class a `server` fixture")

    def calls(self, store: ObjectStore, chunk: Chunk) -> Mapping[str, Callable[[], Any]]:
        """Each method, of `chunk` where it wants one that is there."""
        one, new = found(store, chunk), chain("new", 1)[0]
        assert one is not None
        calls: dict[str, Callable[[], Any]] = {
            "find": lambda: store.find([chunk.key], TENANT),
            "get": lambda: store.get(one, [aligned(HEADER_BYTES + one.record.payload_bytes)]),
            "put": lambda: put(store, new, self.PAYLOAD_BYTES),
            "mark": lambda: store.mark({chunk.key: marks_of(TERMS, 9)}),
            "delete": lambda: store.delete([new.key], TENANT),
            "usage": store.usage,
        }
        if store.log is not None:
            calls |= {
                "append": lambda: log_of(store).append([Scope(tenant=1)], "me"),
                "read": lambda: log_of(store).read(0),
                "report": lambda: log_of(store).report("me", 1, 60),
                "forget": lambda: log_of(store).forget("me"),
                "replicas": lambda: log_of(store).replicas(),
            }
        return calls

    def fail(self, calls: Sequence[Callable[[], Any]]) -> list[float]:
        """How long each call took to raise OSError, all at once. Raises: AssertionError if one returned."""

        def fails(call: Callable[[], Any]) -> float:
            started_s = time.monotonic()
            with pytest.raises(OSError):
                call()
            return time.monotonic() - started_s

        with ThreadPoolExecutor(len(calls)) as threads:
            return list(threads.map(fails, calls))

    def test_without_a_server_every_call_fails(self, store: ObjectStore, server: Server) -> None:
        """While the server is away every method raises OSError in time; when it is back, the same store works again."""
        (chunk,) = chain("a", 1)
        put(store, chunk, self.PAYLOAD_BYTES)
        calls = self.calls(store, chunk)
        server.stop()
        assert max(self.fail(list(calls.values()))) < self.LIMIT_S
        server.start()
        self.works(store)

    def test_a_frozen_server_holds_nobody(self, store: ObjectStore, server: Server) -> None:
        """While the server says nothing every method raises OSError in time; later answers are not mistaken."""
        chunks = [chain(name, 1)[0] for name in "abc"]
        for chunk in chunks:
            put(store, chunk, self.PAYLOAD_BYTES)
        calls = self.calls(store, chunks[0])
        for call in calls.values():
            call()  # so that connections are there, and idle
        put(store, chunks[0], self.PAYLOAD_BYTES)
        server.freeze()
        try:
            assert max(self.fail([call for name, call in calls.items() if name != "delete"])) < self.LIMIT_S
        finally:
            server.thaw()
        for chunk in chunks:
            assert read(store, found(store, chunk)) == frame_of(chunk.key, self.PAYLOAD_BYTES)
        self.works(store)

    def test_a_server_that_dies_under_calls(self, store: ObjectStore, server: Server) -> None:
        """Calls under way when the server dies raise OSError in time; none of them says what is not so."""
        chunks = [chain(f"{n}", 1)[0] for n in range(4)]
        for chunk in chunks:
            put(store, chunk, self.PAYLOAD_BYTES)
        frames = {chunk.key: frame_of(chunk.key, self.PAYLOAD_BYTES) for chunk in chunks}
        running = threading.Semaphore(0)

        def use(chunk: Chunk) -> float:
            while True:
                started_s = time.monotonic()
                try:
                    one = found(store, chunk)
                    assert one is not None and read(store, one) == frames[chunk.key]
                    put(store, chain(f"{chunk.key.hex()}/{started_s}", 1)[0], self.PAYLOAD_BYTES)
                except OSError:
                    return time.monotonic() - started_s
                running.release()

        with ThreadPoolExecutor(len(chunks)) as threads:
            ended = [threads.submit(use, chunk) for chunk in chunks]
            for _ in range(2 * len(chunks)):
                assert running.acquire(timeout=10)
            server.stop()
            assert max(each.result(2 * self.LIMIT_S) for each in ended) < 2 * self.LIMIT_S  # it makes several calls
        server.start()
        self.works(store)

    def test_a_store_opened_without_a_server(self, open_store: MakeStore, server: Server) -> None:
        """A store can be opened while its server is away, and works once it is there."""
        server.stop()
        store = open_store(MOST_ENTRIES)
        with pytest.raises(OSError):
            store.find([key_of("a")], TENANT)
        server.start()
        self.works(store)

    def works(self, store: ObjectStore) -> None:
        """A store does what it should, whatever its server still knows."""
        (chunk,) = chain("afterwards", 1)
        store.delete([chunk.key], TENANT)
        assert put(store, chunk, self.PAYLOAD_BYTES, version=3)
        assert read(store, found(store, chunk)) == frame_of(chunk.key, self.PAYLOAD_BYTES, version=3)
        if store.log is not None:
            generation = store.log.append([Scope(tenant=5)], "me")
            assert store.log.read(generation - 1).entries[-1] == SharedInvalidation(
                generation, (Scope(tenant=5),), "me"
            )
