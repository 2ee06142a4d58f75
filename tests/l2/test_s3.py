"""The conformance kit over a bucket."""

import uuid
from collections.abc import Iterator
from contextlib import closing

import pytest

from hotspan.core.terms import Scope, Terms
from hotspan.core.types import MIB
from hotspan.l2.base import updates_of
from hotspan.l2.blobs import Part
from hotspan.l2.log import pack_entry
from hotspan.l2.metadata import MAX_BYTES, MAX_UPDATES
from hotspan.l2.s3 import S3Store
from hotspan.testing.chunks import chain
from kit.s3_server import S3Server
from tests.l2.kit.bounds import StoreBoundsTests, report_of
from tests.l2.kit.names import StoreNamesTests
from tests.l2.kit.outages import StoreOutageTests
from tests.l2.kit.races import SharedStoreTests
from tests.l2.kit.stores import MakeStore
from tests.l2.s3_rig import BUCKET, Place


@pytest.fixture(scope="module")
def shared_server() -> Iterator[S3Server]:
    """One for all: each test has a prefix of its own, and leaves it running."""
    with S3Server(BUCKET) as server:
        yield server


class _Fixtures:
    @pytest.fixture
    def server(self, shared_server: S3Server) -> S3Server:
        return shared_server

    @pytest.fixture
    def make_store(self, server: S3Server, monkeypatch: pytest.MonkeyPatch) -> MakeStore:
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        place = Place(server.url, uuid.uuid4().hex)
        return lambda entries: place.store(is_per_tenant=False, log_entries=entries, timeout_s=self.TIMEOUT_S)

    TIMEOUT_S = 60.0


class TestS3Store(_Fixtures, SharedStoreTests, StoreNamesTests):
    """Of which nobody stops the server."""

    def test_metadata_does_not_grow_for_ever(self, make_store: MakeStore) -> None:
        """Updates are added until there are too many for the chunk to be found."""
        (chunk,) = chain("a", 1)
        with closing(make_store(100)) as store:
            assert isinstance(store, S3Store)
            for _ in range(5):
                store.add_updates({chunk.key: updates_of(Terms(is_wild=True), 1) * (MAX_UPDATES // 2)})
            (data,) = store.blobs.read([Part(store.metadata_name(chunk.key), 10 * MAX_BYTES)])
            assert data is not None and MAX_BYTES < len(data) <= 2 * MAX_BYTES


class S3Planter:
    """Whoever may write the bucket."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def entry(self, number: int, size: int = 0) -> None:
        (log, *_) = {path.rpartition("/")[0] for path in self._place.paths("log")}
        self._place.write(f"{log}/{number:016x}", bytes(size) if size else b"E" + pack_entry([Scope()], "somebody"))

    def report(self, number: int, data: bytes | int) -> None:
        said = f"replica {number}".encode() + b"\0" + data if isinstance(data, bytes) else bytes(data)
        self._place.write(report_of(f"replica {number}"), said)

    def metadata(self, name: str, size: int) -> None:
        self._place.write(name, bytes(size))


class TestS3StoreBounds(_Fixtures, StoreBoundsTests):
    """Of which nobody stops the server."""

    LARGE = 3
    LARGE_BYTES = 48 * MIB

    @pytest.fixture
    def place(self, server: S3Server) -> Place:
        return Place(server.url, uuid.uuid4().hex)

    @pytest.fixture
    def make_store(self, place: Place, monkeypatch: pytest.MonkeyPatch) -> MakeStore:
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        return lambda entries: place.store(is_per_tenant=False, log_entries=entries)

    @pytest.fixture
    def planter(self, place: Place) -> S3Planter:
        return S3Planter(place)


class TestS3Outage(_Fixtures, StoreOutageTests):
    """Of which tests stop the server, which then has nothing in it."""

    TIMEOUT_S = 5.0
    LIMIT_S = 30.0
