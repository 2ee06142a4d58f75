"""What the S3 store's tests share: replicas of one bucket, chunks, and a look at the objects themselves."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import obstore
from obstore.store import S3Store as ObstoreS3

from hotspan.core.clock import Clock
from hotspan.core.terms import Terms
from hotspan.core.types import Chunk
from hotspan.l2.base import Found
from hotspan.l2.options import S3Options
from hotspan.l2.s3 import S3Store
from hotspan.testing.chunks import aligned, content
from hotspan.tiers.record import Record
from kit.s3_server import CLIENT

BUCKET = "hotspan"
TENANT = 0xFEED
FRAME_BYTES = 2 * 4096


def record_of(chunk: Chunk, terms: Terms | None = None, stamp: int = 1) -> Record:
    """The record of a chunk that `stamp` stored."""
    terms = terms or Terms(tenant=TENANT)
    return Record(chunk.key, chunk.parent, bytes(32), FRAME_BYTES - 4096, terms, stamp, chunk.index)


def frame_of(chunk: Chunk, stamp: int = 1) -> list[memoryview]:
    """The bytes of a chunk as `stamp` stored them, in two buffers."""
    data = memoryview(content(chunk.key, FRAME_BYTES, stamp))
    return [data[:4096], data[4096:]]


def put_all(store: S3Store, chunks: Iterable[Chunk], terms: Terms | None = None, stamp: int = 1) -> list[bool]:
    """Put chunks one after the other; what each put said."""
    return [store.put(record_of(chunk, terms, stamp), frame_of(chunk, stamp)) for chunk in chunks]


def find(store: S3Store, chunks: Sequence[Chunk], tenant: int = TENANT) -> list[Found | None]:
    """What is found of a text."""
    return store.find([chunk.key for chunk in chunks], tenant)


def places(found: Sequence[Found | None]) -> list[int]:
    """The places at which something was found."""
    return [at for at, one in enumerate(found) if one is not None]


def read(store: S3Store, found: Found | None) -> bytes | None:
    """The frame of what was found; None if it is gone."""
    assert found is not None
    into = aligned(FRAME_BYTES)
    return bytes(into) if store.get(found, [into[:4096], into[4096:]]) else None


@dataclass
class Place:
    """A prefix of a bucket on a server."""

    endpoint: str
    prefix: str

    @property
    def url(self) -> str:
        return f"s3://{BUCKET}/{self.prefix}"

    def store(self, clock: Clock | None = None, **settings: Any) -> S3Store:
        """Another replica's store; close it."""
        settings = {"client": CLIENT | {"endpoint": self.endpoint}, "timeout_s": 60.0, **settings}
        return S3Store(self.url, S3Options(**settings), clock)

    def raw(self) -> ObstoreS3:
        """The bucket itself, as anybody else sees it."""
        config: Any = CLIENT | {"endpoint": self.endpoint}
        return ObstoreS3(BUCKET, prefix=self.prefix, config=config, client_options={"allow_http": True})

    def paths(self, directory: str = "") -> list[str]:
        """Of all objects, sorted."""
        return sorted(meta["path"] for meta in obstore.list(self.raw(), directory or None).collect())

    def read(self, path: str) -> bytes:
        """An object's bytes."""
        return bytes(obstore.get(self.raw(), path).bytes())

    def write(self, path: str, data: bytes) -> None:
        """Put bytes in an object's place."""
        obstore.put(self.raw(), path, data)

    def delete(self, path: str) -> None:
        """Delete an object."""
        obstore.delete(self.raw(), path)


@dataclass
class Replicas:
    """Stores of one place, closed together."""

    place: Place
    stores: list[S3Store] = field(default_factory=list)

    def __call__(self, clock: Clock | None = None, **settings: Any) -> S3Store:
        """One more."""
        self.stores.append(self.place.store(clock, **settings))
        return self.stores[-1]

    def close(self) -> None:
        """Close all."""
        for store in self.stores:
            store.close()
