"""The managed-tier protocol as its known clients speak it, against a real daemon.

Everything here is from the protocol alone: HTTP/1.1 with keep-alive, a mapping of the segment, nothing of hotspan's.
"""

import http.client
import json
import mmap
import os
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import pytest

from hotspan.core.types import GIB
from hotspan.daemon.routes import ROUTES
from kit.waiting import PATIENCE_S, until
from tests.daemon.rig import DaemonProcess


class Client:
    """What such a client does: put, lease, copy, release; one connection that is kept."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", daemon.port, timeout=2 * PATIENCE_S)
        with daemon.segment.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)

    def ask(
        self, method: str, target: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """Status, and the body as JSON if there is one."""
        given = {"User-Agent": "LMCache-SageMaker-HyperPod/1.0", **(headers or {})}
        self._connection.request(method, target, body, given)
        response = self._connection.getresponse()
        data = response.read()
        return response.status, json.loads(data) if data else None

    def put(self, bucket: str, key: str, value: bytes) -> int:
        """The status."""
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(len(value))}
        return self.ask("PUT", f"/v1/kv/{quote(bucket, safe='@')}/{quote(key, safe='@')}", value, headers)[0]

    def lease(self, bucket: str, key: str, timeout_ms: int = 1000, ttl_s: float = 30.0) -> tuple[int, Any]:
        """The status, and what was answered."""
        path = f"/v1/kv/{quote(bucket, safe='@')}/{quote(key, safe='@')}/leases"
        return self.ask("POST", f"{path}?timeout_ms={timeout_ms}&ttl_s={ttl_s}")

    def bytes(self, lease: dict[str, Any]) -> bytes:
        """The fragments, in their order."""
        return b"".join(self._map[part["offset"] : part["offset"] + part["len"]] for part in lease["offsets"])

    def release(self, id: str) -> int:
        """The status."""
        return self.ask("POST", f"/v1/leases/{quote(id, safe='')}/release")[0]

    def close(self) -> None:
        """Hang up."""
        self._connection.close()
        self._map.close()


@contextmanager
def connected(daemon: DaemonProcess) -> Iterator[Client]:
    """Another client."""
    client = Client(daemon)
    yield client
    client.close()


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[Client]:
    """A client of a daemon that other tests use, too."""
    with connected(daemon) as client:
        yield client


@pytest.fixture
def key() -> str:
    """Nobody's yet, of the shape that keys have."""
    return f"org/some model@{0:08x}@{0:x}@{secrets.token_hex(32)}@salt"


@pytest.mark.parametrize("route", ROUTES)
def test_every_route_of_the_table_is_answered(daemon: DaemonProcess, key: str, route: str) -> None:
    """The reference lists no path or method that the daemon does not have."""
    method, _, path = route.partition(" ")
    path = path.format(bucket="listed", key=quote(key, safe=""), id="0-0")
    connection = http.client.HTTPConnection("127.0.0.1", daemon.port, timeout=2 * PATIENCE_S)
    connection.request(method, path, b"value" if method == "PUT" else b"")
    response = connection.getresponse()
    said = response.read()
    connection.close()
    assert response.status != 405 and b"no such path" not in said


@pytest.mark.parametrize("size", [1, 28, 4095, 4096, 4097, 1_000_003, 7 * 1024 * 1024 + 28])
def test_what_was_put_is_leased_and_read(client: Client, key: str, size: int) -> None:
    """A put is 200, its lease 200 with an id and fragments that hold its bytes, its release 200."""
    value = secrets.token_bytes(size)
    assert client.put("lmcache", key, value) == 200
    status, lease = client.lease("lmcache", key)
    assert status == 200 and set(lease) == {"id", "offsets"} and isinstance(lease["id"], str) and lease["id"]
    assert all(set(part) == {"offset", "len"} and part["offset"] >= 0 < part["len"] for part in lease["offsets"])
    assert client.bytes(lease) == value
    assert client.release(lease["id"]) == 200


def test_a_second_put_is_a_conflict(client: Client, key: str) -> None:
    """What is there stays: 409, however long the body, and the connection goes on."""
    assert client.put("lmcache", key, b"first") == 200
    for value in (b"other", b"first", secrets.token_bytes(3_000_000)):
        assert client.put("lmcache", key, value) == 409
    assert client.bytes(client.lease("lmcache", key)[1]) == b"first"


def test_what_is_not_there_is_a_miss(client: Client, key: str) -> None:
    """404, at once: nobody is writing it."""
    assert client.lease("lmcache", key, timeout_ms=60_000)[0] == 404, "504 is the end of a hold"


def test_buckets_are_apart(client: Client, key: str) -> None:
    """The same key in another bucket is another object."""
    for bucket in ("lmcache", "other", "with space/and slash"):
        assert client.lease(bucket, key)[0] == 404
        assert client.put(bucket, key, bucket.encode()) == 200
        assert client.bytes(client.lease(bucket, key)[1]) == bucket.encode()


@pytest.mark.parametrize(
    ("name", "spellings"),
    [
        ("a@b", ["a@b", "a%40b", "%61@%62"]),
        ("a/b c", ["a%2Fb%20c", "a%2fb%20c"]),
        ("100%41", ["100%2541"]),
        ("a+b?c#d", ["a%2Bb%3Fc%23d", "a+b%3Fc%23d"]),
        ("schlüssel", ["schl%C3%BCssel"]),
        ("..", ["..", "%2E%2E"]),
        ("x/leases", ["x%2Fleases"]),
    ],
)
def test_names_are_decoded_once(client: Client, key: str, name: str, spellings: list[str]) -> None:
    """All spellings of a name are one object; what is decoded is not decoded again, and no slash in it counts."""
    suffix = f"@{key[-10:]}"
    assert client.put("spelt", name + suffix, b"v") == 200
    for spelling in spellings:
        status, lease = client.ask("POST", f"/v1/kv/spelt/{spelling}{suffix}/leases?timeout_ms=0&ttl_s=30.0")
        assert status == 200 and client.bytes(lease) == b"v"
        assert client.ask("PUT", f"/v1/kv/spelt/{spelling}{suffix}", b"w")[0] == 409


def test_what_is_decoded_is_another_name(client: Client, key: str) -> None:
    """A name with a percent sign in it is not the name that it would be if it were decoded again."""
    for name in (f"100%41@{key}", f"100A@{key}"):
        assert client.lease("spelt", name)[0] == 404
        assert client.put("spelt", name, name.encode()) == 200
        assert client.bytes(client.lease("spelt", name)[1]) == name.encode()


def test_a_release_may_come_again(client: Client, key: str) -> None:
    """Released twice, released after its time, never granted, quoted or of another daemon: 200 each time."""
    client.put("lmcache", key, b"v")
    _, lease = client.lease("lmcache", key)
    for id in (lease["id"], lease["id"], "no such lease", "lease/1", lease["id"] + "0", "é"):
        assert client.release(id) == 200
    quoted = "".join(f"%{byte:02X}" for byte in client.lease("lmcache", key)[1]["id"].encode())
    assert client.ask("POST", f"/v1/leases/{quoted}/release")[0] == 200


def test_several_leases_of_one_object(fresh_daemon: DaemonProcess, key: str) -> None:
    """Each look-up has its own lease, and the object is pinned until the last of them is released."""
    with connected(fresh_daemon) as client:
        client.put("lmcache", key, b"v")
        ids = {client.lease("lmcache", key)[1]["id"] for _ in range(5)}
        assert len(ids) == 5 == fresh_daemon.stats()["leases"]
        for n, id in enumerate(sorted(ids), 1):
            assert fresh_daemon.stats()["pinned_bytes"] > 0
            client.release("0123456789abcdef" + id[16:])  # another daemon's
            assert fresh_daemon.stats()["leases"] == 6 - n
            client.release(id)
            client.release(id)
            assert fresh_daemon.stats()["leases"] == 5 - n
        assert fresh_daemon.stats()["pinned_bytes"] == 0


def test_a_lease_is_never_shorter_than_was_asked(client: Client, key: str) -> None:
    """What is granted lasts as long as was asked; what would last longer than the limit is refused with the limit."""
    client.put("b", key, b"value")
    status, lease = client.lease("b", key, ttl_s=600.0)
    assert status == 200
    client.release(lease["id"])
    status, answer = client.lease("b", key, ttl_s=601.0)
    assert status == 400 and "at most" in answer["error"] and "600 s" in answer["error"]
    assert "--max-lease-s" in answer["error"]


def test_a_lease_pins_against_eviction_until_it_is_over(fresh_daemon: DaemonProcess) -> None:
    """While leases run their bytes stay, and what finds no room is refused; released or expired, they make room."""
    value, half = secrets.token_bytes(1 << 20), secrets.token_bytes(1 << 25)
    with connected(fresh_daemon) as client:
        client.put("b", "leased", value)
        client.put("b", "short", value)
        _, lease = client.lease("b", "leased", ttl_s=600.0)
        assert client.lease("b", "short", ttl_s=0.5)[0] == 200
        for n in range(6):  # each needs half of the memory: only one is there at a time
            assert client.put("b", f"half {n}", half) == 200
        assert client.bytes(lease) == value and client.lease("b", "half 0")[0] == 404
        until(lambda: fresh_daemon.stats()["leases"] == 1, "the end of the short lease")
        capacity = fresh_daemon.stats()["capacity_bytes"]
        assert client.put("b", "too much beside it", bytes(capacity - 4096)) == 507
        client.release(lease["id"])
        assert client.put("b", "all of it", bytes(capacity)) == 200
        assert client.put("b", "more than all", bytes(capacity + 1)) == 413
        assert client.lease("b", "leased")[0] == 404


def test_a_lease_waits_for_an_object_that_is_being_written(daemon: DaemonProcess, key: str) -> None:
    """The request is held until the object is whole; a second writer meanwhile is a conflict."""
    value = secrets.token_bytes(2_000_000)
    answers: list[tuple[int, Any]] = []

    def lease() -> None:
        with connected(daemon) as reader:
            answers.append(reader.lease("lmcache", key, timeout_ms=60_000))
            if answers[0][0] == 200:
                answers.append((0, reader.bytes(answers[0][1])))

    with connected(daemon) as writer, connected(daemon) as second:
        connection = writer._connection
        connection.putrequest("PUT", f"/v1/kv/lmcache/{quote(key, safe='@')}")
        connection.putheader("Content-Length", str(len(value)))
        connection.endheaders(value[:1_000_000])
        until(lambda: daemon.stats()["pinned_bytes"] >= len(value), "the writer's reservation")
        held = threading.Thread(target=lease)
        held.start()
        assert second.put("lmcache", key, value) == 409
        assert second.lease("lmcache", key, timeout_ms=0)[0] == 504
        assert not answers
        connection.send(value[1_000_000:])
        assert connection.getresponse().read() == b""
        held.join(PATIENCE_S)
    assert answers[0][0] == 200 and answers[1][1] == value


def test_a_writer_that_dies_leaves_nothing(fresh_daemon: DaemonProcess, key: str) -> None:
    """Half a body is no object: who waits for it hears 404, its room is free, and it can be put anew."""
    answers: list[int] = []

    def lease() -> None:
        with connected(fresh_daemon) as reader:
            answers.append(reader.lease("lmcache", key, timeout_ms=60_000)[0])

    with connected(fresh_daemon) as writer:
        writer._connection.putrequest("PUT", f"/v1/kv/lmcache/{quote(key, safe='@')}")
        writer._connection.putheader("Content-Length", "1000000")
        writer._connection.endheaders(bytes(500_000))
        until(lambda: fresh_daemon.stats()["pinned_bytes"] > 0, "the writer's reservation")
        held = threading.Thread(target=lease)
        held.start()
    held.join(PATIENCE_S)
    assert answers == [404]
    until(fresh_daemon.idle, "the end of the reservation")
    with connected(fresh_daemon) as again:
        assert again.put("lmcache", key, b"whole") == 200


def test_a_delete_leaves_readers_what_they_lease(client: Client, key: str) -> None:
    """A deleted object is a miss at once, its bytes stay for who reads them, and a new one has a place of its own."""
    target = f"/v1/kv/lmcache/{quote(key, safe='@')}"
    client.put("lmcache", key, b"old" * 1000)
    _, lease = client.lease("lmcache", key)
    assert client.ask("DELETE", target)[0] == 200
    assert client.ask("DELETE", target)[0] == 404 == client.lease("lmcache", key)[0]
    assert client.put("lmcache", key, b"new" * 1000) == 200
    assert client.bytes(lease) == b"old" * 1000
    assert client.bytes(client.lease("lmcache", key)[1]) == b"new" * 1000


@pytest.mark.parametrize(
    ("method", "target", "status"),
    [
        ("GET", "/v1/kv/b/k", 405),
        ("POST", "/v1/kv/b/k", 405),
        ("GET", "/v1/kv/b/k/leases", 405),
        ("DELETE", "/v1/leases/x/release", 405),
        ("PUT", "/v1/kv/b/", 405),
        ("PUT", "/v1/kv/b", 404),
        ("PUT", "/v1/kv/b/k/more", 404),
        ("GET", "/", 404),
        ("GET", "/v2/stats", 404),
        ("PUT", "/v1/kv/b/%FF", 400),
        ("PUT", "/v1/kv/b/k", 400),
        ("POST", "/v1/kv/b/k/leases?timeout_ms=x", 400),
        ("POST", "/v1/kv/b/k/leases?timeout_ms=-1", 400),
        ("POST", "/v1/kv/b/k/leases?ttl_s=0", 400),
        ("POST", "/v1/kv/b/k/leases?ttl_s=nan", 400),
        ("POST", "/v1/kv/b/k/leases?ttl_s=inf", 400),
        ("POST", "/v1/kv/b/k/leases?ttl_s=600.1", 400),
        ("POST", "/v1/kv/b/k/leases", 404),
    ],
)
def test_what_makes_no_sense_is_said(client: Client, method: str, target: str, status: int) -> None:
    """A path, method or number that is none has its status and a reason, and the connection goes on."""
    found, reason = client.ask(method, target)
    assert found == status and reason["error"]
    assert client.ask("GET", "/health")[0] == 200


def test_the_daemon_says_how_it_is(fresh_daemon: DaemonProcess) -> None:
    """Health says that it is hotspan's, stats and metrics count the same objects, hits and refusals."""
    with connected(fresh_daemon) as client:
        client.put("b", "k", b"x" * 5000)
        client.put("b", "k", b"x")
        client.lease("b", "k")
        client.lease("b", "none")
        status, health = client.ask("GET", "/health")
        assert (
            status == 200
            and health["service"] == "hotspan-daemon"
            and health["unix_socket"] == str(fresh_daemon.unix_socket)
        )
    until(lambda: fresh_daemon.stats()["http_connections"] == 1, "the client's end")
    stats = fresh_daemon.stats()
    expected = {"objects": 1, "used_bytes": 8192, "stored": 1, "stored_bytes": 5000, "refused_exists": 1, "hits": 1}
    expected |= {"misses": 1, "leases": 1, "pinned_bytes": 8192, "is_exposed": 0, "http_connections": 1}
    assert {name: stats[name] for name in expected} == expected
    assert stats["capacity_bytes"] == GIB // 16 - 4096 == stats["free_bytes"] + 8192
    status, page = fresh_daemon.request("GET", "/metrics")
    lines = page.decode().splitlines()
    assert status == 200 and "hotspan_daemon_objects 1.0" in lines and "hotspan_daemon_hits_total 1.0" in lines
    assert "hotspan_daemon_refused_exists_total 1.0" in lines
    assert {line.split()[2] for line in lines if line.startswith("# HELP")} >= {
        f"hotspan_daemon_{name}" for name in ("used_bytes", "leases", "unix_clients", "evicted_total")
    }


def test_the_mapping_needs_no_write_access(daemon: DaemonProcess) -> None:
    """The segment has mode 0600, and a client maps it read-only."""
    assert os.stat(daemon.segment).st_mode & 0o777 == 0o600
    with connected(daemon) as client, pytest.raises(TypeError):
        client._map[0:1] = b"x"
