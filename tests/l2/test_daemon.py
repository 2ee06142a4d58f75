"""The node's daemon as a store: the conformance kit over a real daemon, its leases, and a daemon that lies."""

import contextlib
import json
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from hotspan.core.frame import HEADER_BYTES
from hotspan.core.terms import Scope, Terms
from hotspan.core.types import Chunk, ChunkKey
from hotspan.l2 import daemon
from hotspan.l2.base import PREAMBLE_BYTES, updates_of
from hotspan.l2.blobs import Entry
from hotspan.l2.daemon import DaemonLogMedium, DaemonStore
from hotspan.l2.daemon_client import DaemonClient
from hotspan.l2.daemon_protocol import (
    CHANGE_BITS,
    DESCRIBED,
    ENTRY,
    EXTENT,
    FOUND,
    GREETING,
    LOG_BODY,
    LOG_HEAD,
    VERSION,
    Operation,
    Status,
)
from hotspan.testing.chunks import aligned, chain, key_of
from hotspan.testing.clock import SimulatedClock
from hotspan.tiers.io import copy
from hotspan.tiers.record import pack
from tests.daemon.rig import PATIENCE_S, DaemonProcess, patient_store
from tests.l2.kit.bounds import StoreBoundsTests
from tests.l2.kit.logs import SharedLogTests
from tests.l2.kit.outages import StoreOutageTests
from tests.l2.kit.races import StoreRaceTests
from tests.l2.kit.stores import MakeStore, ObjectStoreTests, found, frame_of, put, read, record_of

SIZE = 4096


@pytest.fixture(scope="module")
def process() -> Iterator[DaemonProcess]:
    """A daemon for all tests that do it no harm."""
    process = DaemonProcess()
    process.start()
    yield process
    process.close()


@pytest.fixture
def emptied(process: DaemonProcess) -> DaemonProcess:
    """The same, with nothing in it and a new log."""
    store = patient_store(process.unix_socket)
    assert store.log is not None
    store.log.read(store.log.read(0).generation + 1)
    for replica in store.log.replicas():
        store.log.forget(replica)
    store.close()
    return process


class TestDaemonStore(ObjectStoreTests, SharedLogTests, StoreRaceTests):
    """One daemon, emptied before each test."""

    BEGINS_ITSELF = True

    @pytest.fixture
    def make_store(self, emptied: DaemonProcess) -> MakeStore:
        return lambda entries: patient_store(emptied.unix_socket)


class DaemonPlanter:
    """A client of the daemon that says what it likes."""

    def __init__(self, unix_socket: Path) -> None:
        self._unix_socket = unix_socket

    def entry(self, number: int, size: int = 0) -> None:
        medium = self._medium()
        stretch = medium.read(0)
        assert stretch is not None
        newest = stretch.entries[-1]
        with contextlib.suppress(OSError):  # the daemon takes no entry but the next one, and none that is too long
            if size:
                medium.append(Entry(number, newest.epoch, bytes(size)), 1)
            else:
                medium.begin(newest.epoch, Entry(number, newest.epoch, b""))

    def report(self, number: int, data: bytes | int) -> None:
        with contextlib.suppress(OSError):
            self._medium().write_report(f"replica {number}", data if isinstance(data, bytes) else bytes(data))

    def metadata(self, name: str, size: int) -> None:
        store = patient_store(self._unix_socket)
        store.add_updates({ChunkKey(bytes.fromhex(name)): [n.to_bytes(17) for n in range(20_000)]})
        store.close()

    def _medium(self) -> DaemonLogMedium:
        return DaemonLogMedium(DaemonClient(self._unix_socket), PATIENCE_S)


class TestDaemonBounds(StoreBoundsTests):
    """One daemon, emptied before each test."""

    LARGE_BYTES = 8 << 20

    @pytest.fixture
    def make_store(self, emptied: DaemonProcess) -> MakeStore:
        return lambda entries: patient_store(emptied.unix_socket)

    @pytest.fixture
    def planter(self, emptied: DaemonProcess) -> DaemonPlanter:
        return DaemonPlanter(emptied.unix_socket)


class TestDaemonOutage(StoreOutageTests):
    """A daemon that each test may kill."""

    LIMIT_S = 30.0

    @pytest.fixture
    def server(self) -> Iterator[DaemonProcess]:
        process = DaemonProcess()
        process.start()
        yield process
        process.close()

    @pytest.fixture
    def make_store(self, server: DaemonProcess) -> MakeStore:
        return lambda entries: DaemonStore(server.unix_socket, deadline_s=5.0, lease_s=PATIENCE_S)


# -- leases ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock() -> SimulatedClock:
    """By which a store takes its leases to be over; the daemon has the real one."""
    return SimulatedClock()


@pytest.fixture
def store(emptied: DaemonProcess, clock: SimulatedClock) -> Iterator[DaemonStore]:
    """Whose leases last a minute."""
    store = DaemonStore(emptied.unix_socket, deadline_s=PATIENCE_S, lease_s=60.0, clock=clock)
    yield store
    store.close()


def overwrite(process: DaemonProcess) -> None:
    """Give to somebody else all memory that nobody pins."""
    stats = process.stats()
    room = stats["capacity_bytes"] - stats["pinned_bytes"]
    assert process.request("PUT", f"/v1/kv/others/{stats['stored']}", b"\x5a" * room)[0] == 200


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """What is done after a copy, the first after the first one; empty when all of it was done."""
    to_do: list[Callable[[], object]] = []

    def copy_then(source: memoryview, into: Sequence[memoryview]) -> None:
        copy(source, into)
        if to_do:
            to_do.pop(0)()

    monkeypatch.setattr(daemon, "copy", copy_then)
    return to_do


def test_what_is_read_is_pinned(emptied: DaemonProcess, store: DaemonStore, copies: list[Callable[[], object]]) -> None:
    """While an object is copied it stays, though all else has to go; a moment later it goes, too."""
    (chunk,) = chain("a", 1)
    put(store, chunk, SIZE)
    one = found(store, chunk)
    copies.append(lambda: overwrite(emptied))
    assert read(store, one) == frame_of(chunk.key, SIZE) and not copies
    store.usage()  # tells that the copy is over
    overwrite(emptied)
    assert emptied.stats()["pinned_bytes"] == 0 and read(store, one) is None


def test_what_was_looked_up_is_not_pinned(emptied: DaemonProcess, store: DaemonStore) -> None:
    """However much is looked up, puts find room; what had to go is a miss when it is read, the rest is right."""
    each = emptied.stats()["capacity_bytes"] // 16 // 4096 * 4096 - PREAMBLE_BYTES - HEADER_BYTES
    chunks = [chain(str(n), 1)[0] for n in range(16)]
    for chunk in chunks:
        assert put(store, chunk, each)
    ones = store.find([chunk.key for chunk in chunks])
    assert all(ones) and emptied.stats()["pinned_bytes"] == 0
    for n in range(8):
        assert put(store, chain(f"new {n}", 1)[0], each)
    reads = [read(store, one) for one in ones]
    assert sum(got is not None for got in reads) == 8
    assert all(got is None or got == frame_of(c.key, each) for c, got in zip(chunks, reads, strict=True))


def test_bytes_of_others_are_never_taken_for_what_was_found(emptied: DaemonProcess, store: DaemonStore) -> None:
    """What is gone is a miss, and what was put anew elsewhere is read there, although its old place was known."""
    first, second = chain("first", 1)[0], chain("second", 1)[0]
    put(store, first, SIZE)
    put(store, second, SIZE)
    ones = [found(store, chunk) for chunk in (first, second)]
    store.delete([first.key, second.key])
    put(store, second, SIZE)  # where the first one was
    assert read(store, ones[0]) is None
    assert read(store, ones[1]) == frame_of(second.key, SIZE)
    store.usage()  # tells that the copy is over
    overwrite(emptied)
    assert read(store, ones[1]) is None


def test_another_object_under_the_key_is_a_miss(store: DaemonStore) -> None:
    """What was found is not there any more if it was deleted and stored anew, of whatever that is made."""
    (chunk,) = chain("a", 1)
    put(store, chunk, SIZE)
    one = found(store, chunk)
    store.delete([chunk.key])
    put(store, chunk, SIZE, version=1)
    assert read(store, one) is None
    assert read(store, found(store, chunk)) == frame_of(chunk.key, SIZE, version=1)


def test_updates_cost_no_second_copy(store: DaemonStore, copies: list[Callable[[], object]]) -> None:
    """An object is copied once, from where it was found, also with updates since, before and during it."""
    (chunk,) = chain("a", 1)
    put(store, chunk, SIZE)
    one = found(store, chunk)
    for label in range(3):
        store.add_updates({chunk.key: updates_of(Terms(labels=frozenset([label + 1])), 9)})
    copies += [
        lambda: store.add_updates({chunk.key: updates_of(Terms(labels=frozenset([7])), 9)}),
        lambda: pytest.fail("again"),
    ]
    assert read(store, one) == frame_of(chunk.key, SIZE) and len(copies) == 1
    one = found(store, chunk)
    assert one is not None and one.terms.labels >= {1, 2, 3, 7}


@pytest.mark.parametrize("seconds", [59, 60])
def test_a_lease_that_ends_during_the_copy_makes_it_a_miss(
    store: DaemonStore, clock: SimulatedClock, copies: list[Callable[[], object]], seconds: float
) -> None:
    """A reader that is stopped in the middle of a copy until its lease is over does not say that it read."""
    (chunk,) = chain("a", 1)
    put(store, chunk, SIZE)
    one = found(store, chunk)
    copies.append(lambda: clock.advance(seconds))
    assert (read(store, one) == frame_of(chunk.key, SIZE)) is (seconds < 60)


def test_a_large_entry_takes_several_messages(store: DaemonStore) -> None:
    """An entry with more chunks than one message holds is appended and read as one."""
    assert store.log is not None
    store.log.append([Scope(tenant=1)], "me")
    large = Scope(tenant=7, keys=frozenset(chunk.key for chunk in chain("text", 20_000)))
    generation = store.log.append([large], "me")
    store.log.append([Scope(tenant=2)], "me")
    page = store.log.read(0)
    assert [entry.scopes for entry in page.entries] == [(Scope(tenant=1),), (large,), (Scope(tenant=2),)]
    assert store.log.read(generation - 1).entries == page.entries[1:]


def test_what_finds_no_place_is_an_error(emptied: DaemonProcess, store: DaemonStore) -> None:
    """What exceeds the cache, or finds all of it in use, raises OSError that says so, and later puts succeed."""
    capacity = emptied.stats()["capacity_bytes"]
    (large,) = chain("large", 1)
    with pytest.raises(OSError, match="TOO_LARGE"):
        put(store, large, capacity)
    assert put(store, large, capacity - PREAMBLE_BYTES - HEADER_BYTES)
    small = chain("small", 1)[0]
    _, lease = emptied.request("POST", f"/v1/kv/hotspan/{large.key.hex()}/leases?timeout_ms=0&ttl_s=60.0", b"")
    with pytest.raises(OSError, match="NO_ROOM"):
        put(store, small, SIZE)
    emptied.request("POST", f"/v1/leases/{json.loads(lease)['id']}/release", b"")
    assert put(store, small, SIZE) and found(store, large) is None


# -- a daemon that lies ------------------------------------------------------------------------------------------------


class Liar:
    """Listens on a Unix socket, hands out a small segment, and answers what a test says."""

    def __init__(self, path: Path, answer: Callable[[int, bytes], bytes]) -> None:
        self.path = path
        self._answer = answer
        self._segment = os.memfd_create("liar")
        os.ftruncate(self._segment, 16 * 4096)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with sock:
                sock.recv(1024)
                socket.send_fds(sock, [GREETING.pack(Status.OK, VERSION, 16 * 4096)], [self._segment])
                while message := sock.recv(1 << 20):
                    sock.send(self._answer(message[0], message[3:]))

    def close(self) -> None:
        """End; clients have hung up."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(PATIENCE_S)
        os.close(self._segment)


CHUNK = Chunk(key_of("a"), None)
WHOLE = PREAMBLE_BYTES + HEADER_BYTES + SIZE
OK = bytes([Status.OK])


def finds(
    extents: list[tuple[int, int]], size: int = WHOLE, entry: bytes | None = None, described: int = 77
) -> Callable[[int, bytes], bytes]:
    """A daemon that has CHUNK in version 77, where and as large as is said; and what it says of another version."""
    head = ENTRY.pack(size, len(extents), 0, pack(record_of(CHUNK, SIZE)))
    entry = head + b"".join(EXTENT.pack(*extent) for extent in extents) if entry is None else entry

    def answer(operation: int, body: bytes) -> bytes:
        if operation == Operation.FIND:
            return OK + FOUND.pack(1) + struct.pack("<Q", 77)
        if operation == Operation.DESCRIBE:
            return OK + DESCRIBED.pack(1) + struct.pack("<QH", described, len(entry)) + entry
        return OK + EXTENT.pack(4096, WHOLE)

    return answer


@pytest.fixture
def lie(tmp_path: Path) -> Iterator[Callable[[Callable[[int, bytes], bytes]], DaemonStore]]:
    """Opens a store over a daemon that answers so."""
    made: list[tuple[DaemonStore, Liar]] = []

    def lie(answer: Callable[[int, bytes], bytes]) -> DaemonStore:
        liar = Liar(tmp_path / f"{len(made)}.sock", answer)
        made.append((DaemonStore(liar.path, deadline_s=PATIENCE_S), liar))
        return made[-1][0]

    yield lie
    for store, liar in made:
        store.close()
        liar.close()


Lie = Callable[[Callable[[int, bytes], bytes]], DaemonStore]


def test_the_liar_can_tell_the_truth(lie: Lie) -> None:
    """What the other tests change is otherwise right."""
    store = lie(finds([(4096, WHOLE)]))
    assert read(store, found(store, CHUNK)) == memoryview(bytes(HEADER_BYTES + SIZE))


def test_what_is_updated_while_it_is_described_is_found(lie: Lie) -> None:
    """A description of the same bytes with more updates will do, one of other bytes is of nothing that was found."""
    store = lie(finds([(4096, WHOLE)], described=78))
    assert read(store, found(store, CHUNK)) == memoryview(bytes(HEADER_BYTES + SIZE))
    assert found(lie(finds([(4096, WHOLE)], described=77 + (1 << CHANGE_BITS))), CHUNK) is None


@pytest.mark.parametrize(
    "extents",
    [
        [(16 * 4096, WHOLE)],
        [(14 * 4096, WHOLE)],
        [(2**64 - 4096, WHOLE)],
        [(0, 2**64 - 1)],
        [(4096, WHOLE - 1)],
        [(4096, WHOLE + 1)],
        [(4096, WHOLE), (4096, 0)],
        [],
    ],
)
def test_places_outside_the_segment_are_not_read(lie: Lie, extents: list[tuple[int, int]]) -> None:
    """An object that is not within the segment, or not as large as is said, is a miss; nothing is read there."""
    store = lie(finds(extents))
    into = aligned(HEADER_BYTES + SIZE, b"\xa5" * (HEADER_BYTES + SIZE))
    one = found(store, CHUNK)
    assert one is not None and not store.get(one, [into]) and set(into) == {0xA5}


@pytest.mark.parametrize("answer", [b"", EXTENT.pack(15 * 4096, WHOLE), EXTENT.pack(4096, 10), b"x" * 15, b"\xff" * 32])
def test_places_outside_the_segment_are_not_written(lie: Lie, answer: bytes) -> None:
    """A reservation that is not within the segment, or of another size, is an error, and not written to."""
    store = lie(lambda operation, body: OK + answer)
    with pytest.raises(OSError):
        put(store, CHUNK, SIZE)


@pytest.mark.parametrize(
    "answer",
    [
        b"\x63",
        OK,
        OK + b"x",
        OK + bytes(7),
        OK + FOUND.pack(1),
        bytes([Status.BAD_REQUEST]),
        bytes([Status.NO_ROOM]),
        OK + b'{"replica": 1e999}',
        OK + b"[" * 60_000,
    ],
)
def test_answers_without_meaning_are_errors(lie: Lie, answer: bytes) -> None:
    """Whatever a daemon answers that is no answer raises OSError from every method."""
    store = lie(lambda operation, body: answer)
    log = store.log
    assert log is not None
    calls: list[Callable[[], object]] = [lambda: store.find([CHUNK.key]), store.usage, lambda: put(store, CHUNK, SIZE)]
    calls += [lambda: log.append([Scope()], "me"), lambda: log.read(0), log.replicas]
    for call in calls:
        with pytest.raises(OSError):
            call()


@pytest.mark.parametrize(
    ("size", "data"), [(100, b""), (1 << 60, bytes(60_000)), (20, bytes(20)), (28, LOG_BODY.pack(1, bytes(16), 9))]
)
def test_a_log_that_has_no_end_or_is_cut_is_an_error(lie: Lie, size: int, data: bytes) -> None:
    """A log of more bytes than there are or can be, or with half an entry, raises OSError."""
    log = lie(lambda operation, body: OK + LOG_HEAD.pack(1, bytes(16), True, size) + data).log
    assert log is not None
    with pytest.raises(OSError):
        log.read(0)


@pytest.mark.parametrize("entry", [b"x", ENTRY.pack(WHOLE, 3, 0, bytes(256)), ENTRY.pack(WHOLE, 0, 60_000, bytes(256))])
def test_an_entry_that_is_cut_is_an_error(lie: Lie, entry: bytes) -> None:
    """An object of which only a part is described raises OSError."""
    with pytest.raises(OSError):
        lie(finds([], entry=entry)).find([CHUNK.key])


def test_a_record_that_does_not_hold_is_a_miss(lie: Lie) -> None:
    """A record whose checksum is wrong is not believed."""
    packed = bytearray(pack(record_of(CHUNK, SIZE)))
    packed[100] ^= 1
    entry = ENTRY.pack(WHOLE, 1, 0, bytes(packed)) + EXTENT.pack(4096, WHOLE)
    assert found(lie(finds([], entry=entry)), CHUNK) is None


def test_what_listens_there_may_be_no_daemon(tmp_path: Path) -> None:
    """A socket that is missing, of another kind, or that hangs up raises OSError."""
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(OSError):
            DaemonStore(path).find([CHUNK.key])
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
        stream.bind(str(tmp_path / "stream"))
        stream.listen()
        with pytest.raises(OSError):
            DaemonStore(tmp_path / "stream").find([CHUNK.key])
