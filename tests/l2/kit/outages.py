"""What a store does whose server goes away, freezes or dies under calls. Part of the kit in stores.py."""

import gc
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import pytest

from hotspan.core.frame import HEADER_BYTES
from hotspan.core.terms import Scope
from hotspan.core.types import Chunk
from hotspan.l2.base import Found, ObjectStore, SharedInvalidation, updates_of
from hotspan.l2.objects import BlobStore
from hotspan.testing.chunks import HANG_S, aligned, chain, key_of
from hotspan.tiers.record import Record
from tests.l2.kit.logs import log_of
from tests.l2.kit.races import TAG, TAGGED, SteppedReplica
from tests.l2.kit.stores import (
    MAX_ENTRIES,
    TENANT,
    TERMS,
    MakeStore,
    StoreFixtures,
    found,
    frame_of,
    put,
    read,
    record_of,
)


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
            "update": lambda: store.add_updates({chunk.key: updates_of(TERMS, 9)}),
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
                assert running.acquire(timeout=HANG_S)
            server.stop()
            assert max(each.result(2 * self.LIMIT_S) for each in ended) < 2 * self.LIMIT_S  # it makes several calls
        server.start()
        self.works(store)

    def test_a_store_opened_without_a_server(self, open_store: MakeStore, server: Server) -> None:
        """A store can be opened while its server is away, and works once it is there."""
        server.stop()
        store = open_store(MAX_ENTRIES)
        with pytest.raises(OSError):
            store.find([key_of("a")], TENANT)
        server.start()
        self.works(store)

    def test_who_began_before_the_server_reads_nothing_invalidated(self, open_store: MakeStore, server: Server) -> None:
        """A replica that begins while the server is away obeys what others invalidate as soon as it is there."""
        if open_store(MAX_ENTRIES).log is None:
            pytest.skip("this store keeps no log")
        server.stop()
        late = SteppedReplica(open_store(MAX_ENTRIES), "late", is_up=False)
        assert not late.follower.poll() and not late.follower.is_fresh
        server.start()
        other = SteppedReplica(open_store(MAX_ENTRIES), "other")
        chunks = chain("a", 2)
        other.put(chunks, TAGGED)
        assert late.ask(chunks) == [False, False]  # it has not read the log
        other.invalidate(labels=TAG)
        assert late.ask(chunks) == [False, False]
        late.poll()
        assert late.follower.is_shared and late.ask(chunks) == [False, False]
        new = chain("b", 1)
        other.put(new, TAGGED)
        late.poll()
        assert late.ask(new) == [True] and other.follower.readers().keys() == {"late", "other"}
        other.invalidate(labels=TAG)
        late.poll()
        assert late.ask(new) == [False]

    def test_nobody_keeps_a_buffer_of_a_call_that_ended(self, store: ObjectStore, server: Server) -> None:
        """A put or a get that gave up holds no buffer of its caller, whatever of it still goes on: it is lent no more.

        A bytearray can't change its size while anybody has a view of it.
        """
        (chunk,), (new,) = chain("a", 1), chain("new", 1)
        put(store, chunk, self.PAYLOAD_BYTES)
        one, frame = found(store, chunk), frame_of(new.key, self.PAYLOAD_BYTES)
        assert one is not None
        read_into, put_from = bytearray(len(frame)), bytearray(frame)
        server.freeze()
        try:
            self.fail(transfers(store, one, record_of(new, self.PAYLOAD_BYTES), read_into, put_from))
            gc.collect()  # frames of errors
            read_into.clear()
            put_from.clear()
        finally:
            server.thaw()
        self.works(store)
        assert read(store, found(store, new)) in (None, frame)

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


def transfers(
    store: ObjectStore, one: Found, record: Record, into: bytearray, data: bytearray
) -> list[Callable[[], Any]]:
    """A get and a put that go to the medium at once, with nothing asked before them."""
    if not isinstance(store, BlobStore):
        return [lambda: store.get(one, [memoryview(into)]), lambda: store.put(record, [memoryview(data)])]
    blobs, (_, epoch, _) = store.blobs, store.metadata_name(record.key).split("/")
    names = [f"objects/{epoch}/0/{key.hex()}" for key in (one.record.key, record.key)]
    return [
        lambda: blobs.read_into(names[0], [memoryview(into)]),
        lambda: blobs.create(names[1], [memoryview(data)]),
    ]
