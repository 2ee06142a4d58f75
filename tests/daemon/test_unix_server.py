"""The Unix server, tested message by message: what it promises, and how it treats clients that break the protocol."""

import json
import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hotspan.core.terms import Terms
from hotspan.core.types import PAGE_BYTES
from hotspan.l2.base import updates_of
from hotspan.l2.daemon_protocol import (
    EXTENT,
    FIND,
    FOUND,
    GREETING,
    HELLO,
    HELLO_MESSAGE,
    LEASE_ID,
    LOG_ENTRY,
    MAX_KEYS,
    REQUEST,
    RESERVE,
    UPDATES,
    USAGE,
    VERSION,
    Operation,
    Status,
)
from hotspan.testing.chunks import key_of
from hotspan.tiers.record import Record
from kit.waiting import PATIENCE_S, until
from tests.daemon.rig import DaemonProcess, patient_store


class RawClient:
    """A connection to the Unix server, and the segment that came with it."""

    def __init__(self, daemon: DaemonProcess, hello: bytes = HELLO_MESSAGE) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(PATIENCE_S)
        self.socket.connect(str(daemon.unix_socket))
        self.socket.send(hello)
        self.greeting, self.fds, _, _ = socket.recv_fds(self.socket, 1024, 4)

    def ask(self, operation: int, body: bytes = b"", releases: tuple[int, ...] = ()) -> tuple[int, bytes]:
        """Status and body of the answer; -1 if there is none within the socket's time."""
        head = REQUEST.pack(operation, len(releases)) + b"".join(map(LEASE_ID.pack, releases))
        return self.say(head + body)

    def say(self, message: bytes) -> tuple[int, bytes]:
        """The same for any message."""
        self.socket.send(message)
        try:
            answer = self.socket.recv(1 << 20)
        except TimeoutError:
            return -1, b""
        return answer[0], answer[1:]

    def reserve(self, name: str, size: int) -> tuple[int, list[tuple[int, int]]]:
        """Status and extents."""
        status, body = self.ask(Operation.RESERVE, RESERVE.pack(key_of(name), size))
        return status, list(EXTENT.iter_unpack(body))

    def find(self, *names: str, ttl_ms: int = 60_000) -> tuple[int, list[bool]]:
        """The lease, and which of them are there."""
        body = FIND.pack(ttl_ms) + b"".join(key_of(name) for name in names)
        status, answer = self.ask(Operation.FIND, body)
        assert status == Status.OK
        return FOUND.unpack_from(answer)[0], [bool(v) for (v,) in struct.iter_unpack("<Q", answer[FOUND.size :])]

    def put(self, name: str, size: int = 10_000) -> None:
        """An object of zeros."""
        assert self.reserve(name, size)[0] == Status.OK and self.ask(Operation.COMMIT) == (Status.OK, b"")

    def close(self) -> None:
        """Hang up."""
        self.socket.close()
        for fd in self.fds:
            os.close(fd)


@contextmanager
def connected(daemon: DaemonProcess, hello: bytes = HELLO_MESSAGE) -> Iterator[RawClient]:
    """A client, for a while."""
    client = RawClient(daemon, hello)
    try:
        yield client
    finally:
        client.close()


@pytest.fixture
def client(fresh_daemon: DaemonProcess) -> Iterator[RawClient]:
    """The first client of a daemon."""
    with connected(fresh_daemon) as client:
        yield client


def test_a_client_is_given_the_segment(fresh_daemon: DaemonProcess, client: RawClient) -> None:
    """Who says hello rightly gets the segment itself, writable, and its size."""
    status, version, size = GREETING.unpack(client.greeting)
    assert (status, version) == (Status.OK, VERSION) and len(client.fds) == 1
    assert (
        os.fstat(client.fds[0]).st_ino == fresh_daemon.segment.stat().st_ino and os.fstat(client.fds[0]).st_size == size
    )
    mmap.mmap(client.fds[0], size).close()
    assert fresh_daemon.unix_socket.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "hello",
    [b"GET / HTTP/1.1\r\n\r\n", HELLO.pack(b"HSPUNIX\0", VERSION + 1, 256, 17, 4096), HELLO_MESSAGE[:-1], b"x"],
)
def test_a_stranger_is_given_nothing(daemon: DaemonProcess, hello: bytes) -> None:
    """Who speaks another version, or something else, is told so, gets no memory, and no answer after that."""
    with connected(daemon, hello) as client:
        assert client.greeting[0] == Status.BAD_REQUEST and not client.fds
        client.socket.settimeout(0.2)
        assert client.ask(Operation.USAGE)[0] == -1


def test_what_is_reserved_is_seen_when_it_is_committed(daemon: DaemonProcess) -> None:
    """Between the reservation and its commit an object is neither found nor put by others; an abort frees it."""
    with connected(daemon) as writer, connected(daemon) as other:
        used = USAGE.unpack(writer.ask(Operation.USAGE)[1])
        for ends in (Operation.ABORT, Operation.COMMIT):
            status, extents = writer.reserve("a", 9000)
            assert status == Status.OK and sum(size for _, size in extents) == 9000
            assert all(offset >= PAGE_BYTES and offset % PAGE_BYTES == 0 for offset, _ in extents)
            assert other.find("a")[1] == [False] and other.reserve("a", 9000)[0] == Status.EXISTS
            assert writer.ask(ends) == (Status.OK, b"")
        assert other.find("a")[1] == [True] and other.reserve("a", 9000)[0] == Status.EXISTS
        assert USAGE.unpack(writer.ask(Operation.USAGE)[1]) == (used[0] + 1, used[1] + 12288, used[2])
        assert writer.ask(Operation.DELETE, key_of("a")) == (Status.OK, b"")


def test_no_room_and_too_large_are_said(fresh_daemon: DaemonProcess, client: RawClient) -> None:
    """What never fits and what does not fit now are told apart, and a client may go on after either."""
    capacity = USAGE.unpack(client.ask(Operation.USAGE)[1])[2]
    assert client.reserve("a", capacity + 1) == (Status.TOO_LARGE, [])
    assert client.reserve("a", capacity)[0] == Status.OK
    with connected(fresh_daemon) as other:
        assert other.reserve("b", 1) == (Status.NO_ROOM, [])
        assert client.ask(Operation.ABORT)[0] == Status.OK and other.reserve("b", 1)[0] == Status.OK


def test_one_lease_for_a_look_up(fresh_daemon: DaemonProcess, client: RawClient) -> None:
    """A look-up pins all it finds with one lease, none if it finds nothing or wants none, until that is released."""
    for name in "abc":
        client.put(name)
    lease, found = client.find("a", "x", "b", "c")
    assert lease and found == [True, False, True, True]
    assert fresh_daemon.stats()["leases"] == 1 and fresh_daemon.stats()["pinned_bytes"] == 3 * 12288
    assert client.find("x")[0] == 0 and client.find("a", ttl_ms=0) == (0, [True])
    client.ask(Operation.USAGE, releases=(lease, lease, 12345))
    assert fresh_daemon.stats()["leases"] == 0 == fresh_daemon.stats()["pinned_bytes"]


def test_nobody_releases_anothers_lease(fresh_daemon: DaemonProcess, client: RawClient) -> None:
    """A lease is its owner's: neither another client nor HTTP ends it, and the Unix server ends none of HTTP's."""
    client.put("a")
    lease, _ = client.find("a")
    _, answer = fresh_daemon.request("POST", f"/v1/kv/hotspan/{key_of('a').hex()}/leases?timeout_ms=0&ttl_s=60.0", b"")
    of_http = json.loads(answer)["id"]
    with connected(fresh_daemon) as other:
        other.ask(Operation.USAGE, releases=(lease, int(of_http.partition("-")[2], 16)))
    fresh_daemon.request("POST", f"/v1/leases/{of_http.partition('-')[0]}-{lease:x}/release", b"")
    assert fresh_daemon.stats()["leases"] == 2
    fresh_daemon.request("POST", f"/v1/leases/{of_http}/release", b"")
    client.ask(Operation.USAGE, releases=(lease,))
    assert fresh_daemon.stats()["leases"] == 0


def test_what_a_connection_had_ends_with_it(fresh_daemon: DaemonProcess, client: RawClient) -> None:
    """When a connection ends its leases and its reservation do, at once; those of others stay."""
    client.put("a")
    mine, _ = client.find("a")
    assert mine
    with connected(fresh_daemon) as other:
        other.find("a")
        other.reserve("b", 1 << 20)
        assert fresh_daemon.stats()["leases"] == 2 and fresh_daemon.stats()["pinned_bytes"] == 12288 + (1 << 20)
    until(lambda: fresh_daemon.stats()["pinned_bytes"] == 12288, "the end of the other's reservation")
    assert fresh_daemon.stats()["leases"] == 1 and client.find("b")[1] == [False]


KILLED = """
import sys, time
from pathlib import Path
from tests.daemon.test_unix_server import RawClient
class Daemon: unix_socket = Path(sys.argv[1])
client = RawClient(Daemon)
client.find("a")
client.reserve("b", 1 << 20)
print("ready", flush=True)
time.sleep(60)
"""


def test_a_killed_client_has_nothing(fresh_daemon: DaemonProcess, client: RawClient) -> None:
    """A client that is stopped keeps what it reserved, since it may go on to write; killed, it keeps nothing."""
    client.put("a")
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(fresh_daemon.unix_socket)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGSTOP)
    assert client.reserve("b", 10)[0] == Status.EXISTS and fresh_daemon.stats()["leases"] == 1
    process.kill()
    process.wait()
    process.stdout.close()
    until(fresh_daemon.idle, "the end of what the killed one had")
    assert client.reserve("b", 10)[0] == Status.OK


BAD = {
    "no operation": REQUEST.pack(99, 0),
    "nothing": b"\0",
    "cut releases": REQUEST.pack(Operation.USAGE, 5) + bytes(8),
    "find without keys": REQUEST.pack(Operation.FIND, 0) + FIND.pack(0),
    "find half a key": REQUEST.pack(Operation.FIND, 0) + FIND.pack(0) + bytes(33),
    "find too many": REQUEST.pack(Operation.FIND, 0) + FIND.pack(0) + bytes(32 * (MAX_KEYS + 1)),
    "describe nothing": REQUEST.pack(Operation.DESCRIBE, 0),
    "reserve nothing": REQUEST.pack(Operation.RESERVE, 0) + RESERVE.pack(bytes(32), 0),
    "reserve what": REQUEST.pack(Operation.RESERVE, 0) + b"x",
    "commit nothing": REQUEST.pack(Operation.COMMIT, 0),
    "abort nothing": REQUEST.pack(Operation.ABORT, 0),
    "cut updates": REQUEST.pack(Operation.UPDATE, 0) + UPDATES.pack(bytes(32), 2) + bytes(17),
    "cut entry": REQUEST.pack(Operation.LOG_APPEND, 0) + b"{",
    "entry without a body": REQUEST.pack(Operation.LOG_APPEND, 0) + LOG_ENTRY.pack(1, bytes(16)),
    "log begins with what": REQUEST.pack(Operation.LOG_BEGIN, 0) + bytes(41),
    "log read from nowhere": REQUEST.pack(Operation.LOG_READ, 0) + bytes(15),
    "log report of nobody": REQUEST.pack(Operation.LOG_REPORT, 0) + b'{"replica": "", "data": "{}"}',
    "log report of nothing": REQUEST.pack(Operation.LOG_REPORT, 0) + b'{"replica": "x"}',
    "log report of a list": REQUEST.pack(Operation.LOG_REPORT, 0) + b"[]",
    "log report without measure": REQUEST.pack(Operation.LOG_REPORT, 0) + b'{"replica":"x","data":"%s"}' % bytes(2000),
    "log report of depths": REQUEST.pack(Operation.LOG_REPORT, 0) + b"[" * 60_000,
    "huge": bytes(200_000),
}


@pytest.mark.parametrize("message", BAD.values(), ids=BAD)
def test_who_breaks_the_rules_is_ignored(daemon: DaemonProcess, message: bytes) -> None:
    """A message that makes no sense is answered so, and nothing after it; others go on."""
    with connected(daemon) as bad, connected(daemon) as good:
        assert bad.say(message) == (Status.BAD_REQUEST, b"")
        bad.socket.settimeout(0.1)
        assert bad.ask(Operation.USAGE)[0] == -1
        assert good.ask(Operation.USAGE)[0] == Status.OK


def test_who_is_ignored_keeps_its_reservation_while_it_lives(fresh_daemon: DaemonProcess, client: RawClient) -> None:
    """The bytes of a client that broke the rules are given to nobody before its connection ends: it may be writing."""
    with connected(fresh_daemon) as bad:
        assert bad.reserve("a", 10)[0] == Status.OK
        assert bad.reserve("b", 10)[0] == Status.BAD_REQUEST
        assert client.reserve("a", 10)[0] == Status.EXISTS and not fresh_daemon.idle()
    until(fresh_daemon.idle, "the end of the reservation")
    assert client.reserve("a", 10)[0] == Status.OK


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(messages=st.lists(st.tuples(st.integers(0, 15), st.integers(0, 2), st.binary(max_size=300)), max_size=4))
def test_no_message_harms_the_daemon(daemon: DaemonProcess, messages: list[tuple[int, int, bytes]]) -> None:
    """Whatever is sent, every message has an answer or silence, and the next client is served."""
    with connected(daemon) as client:
        for operation, releases, body in messages:
            status, _ = client.say(REQUEST.pack(operation, releases) + body)
            assert status in set(Status)
            if status == Status.BAD_REQUEST:
                break
    with connected(daemon) as client:
        assert client.ask(Operation.USAGE)[0] == Status.OK


def test_what_does_not_fit_into_an_answer_is_asked_for_again(fresh_daemon: DaemonProcess) -> None:
    """More chunks, with more updates, than one message holds are all found, each with all its updates."""
    store = patient_store(fresh_daemon.unix_socket)
    keys = [key_of(str(n)) for n in range(700)]
    updates = [update for n in range(120) for update in updates_of(Terms(labels=frozenset([n + 1])), 9)]
    for n, key in enumerate(keys):
        assert store.put(Record(key, None, bytes(32), 4096, Terms(), n), [memoryview(bytes(8192))])
    store.add_updates(dict.fromkeys(keys, updates))
    found = store.find(keys)
    assert [each.record.stamp for each in found if each is not None] == list(range(700))
    assert all(each.terms.is_wild for each in found if each is not None)  # so all of more than 64 labels came
    store.close()


def test_a_client_that_reads_nothing_holds_nobody(daemon: DaemonProcess) -> None:
    """Who asks and asks and never reads is ignored once its answers no longer fit; others are answered meanwhile."""
    with connected(daemon) as deaf, connected(daemon) as good:
        body: Any = REQUEST.pack(Operation.FIND, 0) + FIND.pack(0) + bytes(32 * MAX_KEYS)
        for _ in range(2000):
            deaf.socket.send(body)
        assert good.ask(Operation.USAGE)[0] == Status.OK
