"""The conformance kit over a bucket."""

import uuid
from collections.abc import Iterator

import pytest

from hotspan.testing.races import StoreRaceTests
from hotspan.testing.stores import MakeStore, ObjectStoreTests, SharedLogTests, StoreOutageTests, TrimmedLogTests
from tests.l2.s3_rig import BUCKET, Place
from tests.l2.s3_server import S3Server


class _Fixtures:
    @pytest.fixture(scope="class")
    def server(self) -> Iterator[S3Server]:
        with S3Server(BUCKET) as server:
            yield server

    @pytest.fixture
    def make_store(self, server: S3Server, monkeypatch: pytest.MonkeyPatch) -> MakeStore:
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        place = Place(server.url, uuid.uuid4().hex)
        return lambda entries: place.store(is_per_tenant=False, log_entries=entries, timeout_s=self.TIMEOUT_S)

    TIMEOUT_S = 60.0


class TestS3Store(_Fixtures, ObjectStoreTests, SharedLogTests, TrimmedLogTests, StoreRaceTests):
    """One server for all: each test has a prefix of its own."""


class TestS3Outage(_Fixtures, StoreOutageTests):
    """Tests leave the server as they found it, but for what was in it."""

    TIMEOUT_S = 5.0
    LIMIT_S = 30.0
