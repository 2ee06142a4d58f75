"""A careful client of the protocol, as its description says one behaves: what the tests ask with."""

import contextlib
import hashlib
import http.client
import json
import mmap
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from urllib.parse import quote

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Lease:
    """What the daemon granted. until_s: stamped before the request was sent."""

    id: str
    offsets: list[tuple[int, int]]
    until_s: float

    @property
    def size(self) -> int:
        """Of the object."""
        return sum(size for _, size in self.offsets)


class Segment:
    """The daemon's segment, mapped read-only; mapped anew when there is another file under its name."""

    def __init__(self, name: str) -> None:
        self._path = f"/dev/shm/{name}"
        self._memory: mmap.mmap | None = None
        self._size = 0
        self.identity: tuple[int, int] | None = None

    def read(self, offsets: list[tuple[int, int]]) -> bytes:
        """The fragments, one after the other. Raises: ValueError if one is not within the segment."""
        found = os.stat(self._path)
        if self._memory is None or (found.st_dev, found.st_ino) != self.identity:
            fd = os.open(self._path, os.O_RDONLY)
            found = os.fstat(fd)
            self._memory = mmap.mmap(fd, found.st_size, prot=mmap.PROT_READ)
            os.close(fd)
            self.identity, self._size = (found.st_dev, found.st_ino), found.st_size
        if any(offset < 0 or size <= 0 or offset + size > min(self._size, found.st_size) for offset, size in offsets):
            raise ValueError("a fragment is not within the segment")
        return b"".join(self._memory[offset : offset + size] for offset, size in offsets)


class Client:
    """Speaks to one daemon, on one connection that it keeps."""

    def __init__(self, port: int, segment: str, bucket: str = "lmcache") -> None:
        self._port = port
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
        self.segment = Segment(segment)
        self.bucket = bucket

    def request(self, method: str, target: str, body: bytes = b"") -> tuple[int, bytes]:
        """Status and body of an answer; `target` goes out as it is."""
        headers = {"User-Agent": "LMCache-SageMaker-HyperPod/1.0", "Content-Length": str(len(body))}
        if method == "PUT":
            headers["Content-Type"] = "application/octet-stream"
        self._connection.request(method, target, body, headers)
        response = self._connection.getresponse()
        return response.status, response.read()

    def path(self, key: str, *, is_encoded: bool = False) -> str:
        """Where an object is."""
        return f"/v1/kv/{quote(self.bucket, safe='@')}/{key if is_encoded else quote(key, safe='@')}"

    def put(self, key: str, value: bytes, *, is_encoded: bool = False) -> int:
        """The status of a put."""
        return self.request("PUT", self.path(key, is_encoded=is_encoded), value)[0]

    def lease(
        self, key: str, timeout_ms: int = 0, ttl_s: float = 30.0, *, is_encoded: bool = False
    ) -> tuple[int, Lease | None]:
        """Status and lease."""
        asked_s = time.monotonic()
        target = f"{self.path(key, is_encoded=is_encoded)}/leases?timeout_ms={timeout_ms}&ttl_s={ttl_s}"
        status, body = self.request("POST", target)
        return status, parse_lease(body, asked_s + ttl_s) if status == 200 else None

    def leased(self, key: str, ttl_s: float = 30.0) -> Lease:
        """A lease of what must be there."""
        status, lease = self.lease(key, ttl_s=ttl_s)
        assert status == 200 and lease is not None
        return lease

    def bytes_of(self, lease: Lease) -> bytes:
        """What the lease pins."""
        return self.segment.read(lease.offsets)

    def release(self, lease: Lease) -> int:
        """The status of a release."""
        return self.request("POST", f"/v1/leases/{quote(lease.id, safe='')}/release")[0]

    def get(self, key: str, *, is_encoded: bool = False) -> bytes | None:
        """An object's bytes, copied while it was leased; None if it is not there."""
        _, lease = self.lease(key, ttl_s=60.0, is_encoded=is_encoded)
        if lease is None:
            return None
        data = self.bytes_of(lease)
        assert self.release(lease) == 200
        return data

    def close(self) -> None:
        """Hang up."""
        self._connection.close()


def parse_lease(body: bytes, until_s: float) -> Lease:
    """The lease that a body says. Raises: AssertionError unless it has exactly the shape that clients read."""
    said = json.loads(body)
    assert isinstance(said, dict) and isinstance(said["id"], str) and said["id"]
    assert isinstance(said["offsets"], list) and said["offsets"]
    for part in said["offsets"]:
        assert type(part["offset"]) is int and type(part["len"]) is int
        assert part["offset"] >= 0 and part["len"] > 0
    return Lease(said["id"], [(part["offset"], part["len"]) for part in said["offsets"]], until_s)


def value_of(key: str, size: int) -> bytes:
    """Bytes that no other key has."""
    return hashlib.shake_128(key.encode()).digest(size)


def eventually(holds: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    """Whether something comes true in time."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@contextlib.contextmanager
def raw(port: int) -> Iterator[socket.socket]:
    """A connection on which a test writes what it likes."""
    with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as sock:
        yield sock


def answer_on(sock: socket.socket) -> int | None:
    """The status of the answer that comes; None if the connection ends without one."""
    response = http.client.HTTPResponse(sock)
    try:
        response.begin()
        response.read()
    except (http.client.HTTPException, ConnectionError):
        return None
    finally:
        response.close()
    return response.status
