"""The races of a store that replicas share: what must not be a hit, whatever comes first. Part of the kit in stores.py.

    class TestMyStore(SharedStoreTests):
        @pytest.fixture
        def make_store(self, tmp_path):
            return lambda entries: MyStore(tmp_path, log_entries=entries)

Two replicas, each with a tier and a follower of its own, whose I/O happens when a test says so.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from hotspan.core.frame import HEADER_BYTES
from hotspan.core.terms import Scope, Terms, tag_labels, tenant_label
from hotspan.core.types import Chunk, ChunkKey
from hotspan.l2.base import ObjectStore, updates_of
from hotspan.l2.follower import LogFollower
from hotspan.l2.node import NodeStore
from hotspan.l2.objects import BlobStore
from hotspan.l2.remote import RemoteOptions, RemoteTier
from hotspan.testing.chunks import aligned, chain, content
from hotspan.tiers.base import Fault
from hotspan.tiers.io import Dropped, Job
from tests.l2.kit.logs import SharedLogTests, TrimmedLogTests, log_of
from tests.l2.kit.stores import (
    NAMESPACE,
    TENANT,
    TERMS,
    MakeStore,
    ObjectStoreTests,
    StoreFixtures,
    found,
    frame_of,
    put,
    read,
    record_of,
)

SIZE = 4096
TAG = tag_labels(["secret"])
TAGGED = Terms(TENANT, labels=TAG)
PLAIN = Terms(TENANT)


class SteppedQueue:
    """An I/O queue whose jobs run when `run` is called, in their order."""

    def __init__(self, scratch_bytes: int = HEADER_BYTES) -> None:
        self.jobs: list[Job] = []
        self._scratch = aligned(scratch_bytes)

    def run(self) -> None:
        """Run all jobs, and those that they submit."""
        while self.jobs:
            self.jobs.pop(0)(self._scratch)

    def submit(self, job: Job, dropped: Dropped, *, urgent: bool) -> None:
        """A job for the next `run`."""
        self.jobs.append(job)

    def drop(self) -> None:
        """Nothing is dropped: tests run what they submit."""

    def drain(self, timeout_s: float) -> bool:
        """Run all jobs."""
        self.run()
        return True

    def close(self, timeout_s: float) -> bool:
        """Run all jobs."""
        return self.drain(timeout_s)


class SteppedReplica:
    """A tier over a store, and the follower of its log."""

    def __init__(self, store: ObjectStore, name: str, *, is_up: bool = True) -> None:
        self.queues: list[SteppedQueue] = []
        self.store = store
        self.follower = LogFollower(log_of(store), name)
        if isinstance(store, NodeStore):
            store.follows = lambda: self.follower.is_shared
        if is_up:
            self.poll()
        self.tier = RemoteTier(RemoteOptions(store, self.follower, queue=self._queue), NAMESPACE, SIZE)

    def poll(self) -> None:
        """Read the log, and apply it."""
        assert self.follower.poll()
        self.follower.foreign()

    def run(self) -> None:
        """All I/O ends."""
        for _ in range(3):
            for queue in self.queues:
                queue.run()
            self.tier.finished()

    def begin_store(self, chunks: Sequence[Chunk], terms: Terms) -> None:
        """Stores that reach the store at the next `run`."""
        for chunk in chunks:
            assert self.tier.submit_store(chunk, terms, aligned(SIZE, content(chunk.key, SIZE)))

    def put(self, chunks: Sequence[Chunk], terms: Terms) -> None:
        """Store chunks."""
        self.begin_store(chunks, terms)
        self.run()

    def ask(self, chunks: Sequence[Chunk]) -> list[bool]:
        """Which chunks may be loaded, asked of the store."""
        self.tier.ask(chunks, TENANT)
        self.run()
        return [self.tier.lookup(chunk.key) for chunk in chunks]

    def invalidate(self, **scope: object) -> None:
        """Invalidate, and wait until the log has it."""
        told: list[bool] = []
        self.tier.invalidate([Scope(**scope)], told.append)  # type: ignore[arg-type]
        self.run()
        assert told == [True]
        self.poll()

    def load(self, chunk: Chunk) -> bytes | Fault | None:
        """A chunk's bytes, the fault, or None if it is not known."""
        into = aligned(SIZE)
        if not self.tier.submit_load(chunk.key, into):
            return None
        for queue in self.queues:
            queue.run()
        (ended,) = [one for one in self.tier.finished() if one.is_load]
        return bytes(into) if ended.fault is None else ended.fault

    def _queue(self, name: str, threads: int, scratch_bytes: int) -> SteppedQueue:
        self.queues.append(SteppedQueue(scratch_bytes))
        return self.queues[-1]


class StoreRaceTests(StoreFixtures):
    """Of every store with a log."""

    @pytest.fixture
    def replicas(self, open_store: MakeStore) -> Iterator[Callable[[str], SteppedReplica]]:
        """Begins a replica; all are closed at the end."""
        begun: list[SteppedReplica] = []

        def begin(name: str) -> SteppedReplica:
            begun.append(SteppedReplica(open_store(4096), name))
            return begun[-1]

        yield begin
        for one in begun:
            one.run()
            one.tier.close(5.0)
            one.follower.close()

    def evict_metadata(self, store: ObjectStore, key: ChunkKey) -> None:
        """The server evicts what it keeps beside an object; where it never does so alone, the object as well."""
        if isinstance(store, BlobStore) and store.evicts:
            store.blobs.delete([store.metadata_name(key)])
        else:
            store.delete([key], TENANT)

    def lose_log(self, store: ObjectStore) -> None:
        """Make the log one that has lost entries which `store` had read."""
        log_of(store).read(log_of(store).read(0).generation + 1000)

    def test_a_put_is_older_than_an_invalidation_it_did_not_know(
        self, replicas: Callable[[str], SteppedReplica]
    ) -> None:
        """A store that began before an invalidation and lands after it is a hit for nobody."""
        a, b, chunks = replicas("a"), replicas("b"), chain("text", 3)
        a.begin_store(chunks, TAGGED)
        b.invalidate(tenant=TENANT, labels=TAG)
        a.run()
        a.poll()
        for each in (a, b, replicas("c")):
            assert each.ask(chunks) == [False] * 3

    def test_an_answer_from_before_an_invalidation_is_not_believed(
        self, replicas: Callable[[str], SteppedReplica]
    ) -> None:
        """What the store found before an invalidation was read is unknown after it."""
        a, b, chunks = replicas("a"), replicas("b"), chain("text", 3)
        a.put(chunks, TAGGED)
        b.tier.ask(chunks, TENANT)
        for queue in b.queues:
            queue.run()  # the store has answered; the tier has not taken the answer
        a.invalidate(tenant=TENANT, labels=TAG)
        b.poll()
        b.run()
        assert [b.tier.lookup(chunk.key) for chunk in chunks] == [False] * 3
        assert b.ask(chunks) == [False] * 3

    def test_a_tag_of_a_hit_counts_before_the_log_is_reported_as_read(
        self, replicas: Callable[[str], SteppedReplica]
    ) -> None:
        """A tag that a hit added, not written yet when it is invalidated, takes the chunk; receipts wait for it."""
        a, b, (chunk,) = replicas("a"), replicas("b"), chain("text", 1)
        a.put([chunk], PLAIN)
        assert b.ask([chunk]) == [True]
        b.tier.join(chunk.key, TAGGED)
        a.invalidate(tenant=TENANT, labels=TAG)
        b.poll()
        assert log_of(a.store).replicas()["b"] < a.follower.generation
        b.run()  # the tag is written
        b.poll()
        assert log_of(a.store).replicas()["b"] == a.follower.generation
        for each in (a, b, replicas("c")):
            assert each.ask([chunk]) == [False]

    def test_descendants_of_an_evicted_ancestor_do_not_come_back(
        self, replicas: Callable[[str], SteppedReplica]
    ) -> None:
        """What a tag of an evicted chunk took stays gone when that chunk is stored anew without the tag."""
        a, b, chunks = replicas("a"), replicas("b"), chain("text", 3)
        a.put(chunks[:1], PLAIN)
        a.put(chunks[1:2], TAGGED)
        a.put(chunks[2:], PLAIN)
        a.store.delete([chunks[1].key], TENANT)  # as an eviction does: no log
        b.invalidate(tenant=TENANT, labels=TAG)
        a.poll()
        b.put(chunks[1:2], PLAIN)
        for each in (a, b, replicas("c")):
            assert each.ask(chunks) == [True, True, False]

    def test_an_object_without_its_metadata_is_gone(self, replicas: Callable[[str], SteppedReplica]) -> None:
        """Where a server evicts the tags that hits added, the object is no hit; stored anew, it is."""
        a, b, (chunk,) = replicas("a"), replicas("b"), chain("text", 1)
        a.put([chunk], PLAIN)
        assert b.ask([chunk]) == [True]
        b.tier.join(chunk.key, TAGGED)
        b.run()
        self.evict_metadata(a.store, chunk.key)
        c = replicas("c")
        assert c.ask([chunk]) == [False]
        a.invalidate(tenant=TENANT, labels=TAG)
        for each in (b, c):
            each.poll()
        late = replicas("d")
        assert [each.ask([chunk]) for each in (a, b, late)] == [[False]] * 3
        late.put([chunk], PLAIN)
        assert late.load(chunk) == content(chunk.key, SIZE)
        e = replicas("e")
        assert e.ask([chunk]) == [True] and e.load(chunk) == content(chunk.key, SIZE)

    def test_tags_outlast_an_eviction_of_their_metadata_in_the_middle(
        self, replicas: Callable[[str], SteppedReplica]
    ) -> None:
        """Tags that are added after the metadata was evicted make no hit of the object that had the old metadata."""
        a, b, (chunk,) = replicas("a"), replicas("b"), chain("text", 1)
        a.put([chunk], TAGGED)
        self.evict_metadata(a.store, chunk.key)
        b.store.add_updates({chunk.key: updates_of(Terms(labels=tag_labels(["another"])), 0)})
        assert found(a.store, chunk) is None
        b.put([chunk], PLAIN)
        one = found(a.store, chunk)
        assert one is not None and tag_labels(["another"]) <= one.terms.labels

    def test_a_put_of_an_epoch_that_is_over_is_no_hit(self, replicas: Callable[[str], SteppedReplica]) -> None:
        """A store that began before the log was lost, and lands after it, is a hit for nobody."""
        a, b, chunks = replicas("a"), replicas("b"), chain("text", 2)
        b.put(chunks[:1], PLAIN)
        a.begin_store(chunks[1:], PLAIN)
        self.lose_log(b.store)
        b.poll()
        a.run()
        a.poll()
        for each in (a, b, replicas("c")):
            assert each.ask(chunks) == [False] * 2
        a.put(chunks, PLAIN)
        assert b.tier.asking == 0 and replicas("d").ask(chunks) == [True] * 2

    def test_a_delete_during_a_put_leaves_all_or_nothing(self, store: ObjectStore, other: ObjectStore) -> None:
        """An object that is deleted while its put is under way is there whole afterwards, or not there."""
        with ThreadPoolExecutor(1) as thread:
            for number in range(8):
                (chunk,) = chain(f"{number}", 1)
                putting = thread.submit(put, store, chunk, self.PAYLOAD_BYTES)
                while not putting.done():
                    other.delete([chunk.key], TENANT)
                assert putting.result()
                there = read(store, found(store, chunk))
                assert there in (None, frame_of(chunk.key, self.PAYLOAD_BYTES))
                assert put(other, chunk, self.PAYLOAD_BYTES) == (there is None)
                assert read(store, found(store, chunk)) == frame_of(chunk.key, self.PAYLOAD_BYTES)

    def test_calls_that_are_repeated_change_nothing(self, store: ObjectStore, other: ObjectStore) -> None:
        """Who lost a reply asks again: a put, updates, a delete and a report count once; an entry may stand twice."""
        (chunk,) = chain("a", 1)
        assert put(store, chunk, SIZE) and not put(store, chunk, SIZE)
        updates = updates_of(Terms(labels=TAG), 9)
        for _ in range(2):
            store.add_updates({chunk.key: updates})
        one = found(other, chunk)
        assert one is not None and one.record == record_of(chunk, SIZE) and one.terms.labels == TERMS.labels | TAG
        assert read(other, one) == frame_of(chunk.key, SIZE)
        generations = [log_of(store).append([Scope(tenant=tenant_label("t"))], "me") for _ in range(2)]
        page = log_of(other).read(page_before(generations))
        assert [entry.generation for entry in page.entries] == generations and generations[0] < generations[1]
        for _ in range(2):
            store.delete([chunk.key], TENANT)
            log_of(store).report("me", 3, 60)
        assert found(other, chunk) is None and log_of(other).replicas() == {"me": 3}

    @pytest.mark.parametrize("count", [20, 500])
    def test_a_chunk_with_many_tags_loses_none(self, store: ObjectStore, other: ObjectStore, count: int) -> None:
        """With more updates than a store keeps of one chunk it is wild, or gone: never a hit without one of them."""
        (chunk,) = chain("a", 1)
        assert put(store, chunk, SIZE)
        labels = [tag_labels([f"tag {n}"]) for n in range(count)]
        for label in labels:
            try:
                other.add_updates({chunk.key: updates_of(Terms(labels=label), 9)})
            except OSError:
                break
        else:
            one = found(store, chunk)
            assert one is None or one.terms.is_wild or one.terms.labels >= frozenset().union(*labels)


class SharedStoreTests(ObjectStoreTests, SharedLogTests, TrimmedLogTests, StoreRaceTests):
    """All of the kit but outages: of a store whose log's length can be set."""


def page_before(generations: Sequence[int]) -> int:
    """What to read after to get these entries."""
    return min(generations) - 1
