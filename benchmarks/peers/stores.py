"""Where a system keeps KV outside of its processes: what a restart may find, and what the comparison damages."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import obstore
import redis
from obstore.store import S3Store

from hotspan.core.aftermath import Aftermath
from kit.child import Child
from kit.s3_server import CLIENT, S3Server

PAGE: Final = 4096
LARGE: Final = 1 << 20
"""Files and values below this many bytes hold no KV."""


class Store(Protocol):
    """What stays when a system's processes end."""

    @property
    def pids(self) -> Sequence[int]:
        """Its own processes; they are not restarted or killed with the system's."""

    def flip(self) -> int:
        """Flip one bit in each page of everything large. Returns how many pages."""

    def clear(self) -> None:
        """Remove everything. The system's processes must have ended."""


Opened = AbstractContextManager[Store | None]


def flip_pages(data: Any) -> int:
    """Flip the highest bit of the exponent of one float32 or bfloat16 number in each page.

    Mutates: `data`, uint8[bytes].
    Returns: how many pages.
    """
    data[PAGE // 2 + 3 :: PAGE] ^= 0x40
    return -(-len(data) // PAGE)


class Files:
    """The files below a directory."""

    pids: Sequence[int] = ()

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def flip(self) -> int:
        pages = 0
        for path in sorted(self._directory.rglob("*")):
            if path.is_file() and path.stat().st_size >= LARGE:
                data = np.memmap(path, np.uint8, "r+")
                pages += flip_pages(data)
                data.flush()
        return pages

    def clear(self) -> None:
        for path in sorted(self._directory.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()


class Redis:
    """The values of a Redis server. pids: the server's."""

    def __init__(self, port: int, pids: Sequence[int]) -> None:
        self.pids = pids
        self._client = redis.Redis("127.0.0.1", port)

    def flip(self) -> int:
        pages = 0
        for key in list(self._client.scan_iter(_type="string")):
            if self._client.strlen(key) >= LARGE:
                value = bytearray(self._client.get(key))
                pages += flip_pages(np.frombuffer(value, np.uint8))
                self._client.set(key, bytes(value), keepttl=True)
        return pages

    def clear(self) -> None:
        self._client.flushall()


@contextmanager
def redis_server(port: int, log: Path, aftermath: Aftermath) -> Iterator[Redis]:
    """A Redis server without files for as long as the block runs."""
    command = ("redis-server", "--port", str(port), "--save", "", "--bind", "127.0.0.1")
    with Child(command, port, log, aftermath, {}) as server:
        server.wait("")
        yield Redis(port, [server.pid])


BUCKET: Final = "hotspan"


class Bucket:
    """The objects of a bucket. pids: the server's."""

    def __init__(self, url: str, pids: Sequence[int]) -> None:
        self.pids = pids
        self._bucket = S3Store(BUCKET, config={"endpoint": url, **CLIENT}, client_options={"allow_http": True})

    def _objects(self) -> Iterator[Any]:
        for page in obstore.list(self._bucket):
            yield from page

    def flip(self) -> int:
        pages = 0
        for each in list(self._objects()):
            if each["size"] >= LARGE:
                data = bytearray(obstore.get(self._bucket, each["path"]).bytes())
                pages += flip_pages(np.frombuffer(data, np.uint8))
                obstore.put(self._bucket, each["path"], bytes(data))
        return pages

    def clear(self) -> None:
        obstore.delete(self._bucket, [each["path"] for each in self._objects()])


@contextmanager
def s3_server(port: int) -> Iterator[Bucket]:
    """An S3 server with one bucket, in memory, for as long as the block runs, or this process."""
    with S3Server(BUCKET, port=port) as server:
        yield Bucket(server.url, [server.pid])
