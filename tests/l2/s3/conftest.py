"""A server for all tests here, and replicas of a place in its bucket that is each test's own."""

import uuid
from collections.abc import Iterator

import pytest

from tests.l2.s3.rig import BUCKET, Place, Replicas
from tests.l2.s3_server import S3Server


@pytest.fixture(scope="package")
def server() -> Iterator[S3Server]:
    with S3Server(BUCKET) as server:
        yield server


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def place(server: S3Server) -> Place:
    """A prefix of its own."""
    return Place(server.url, uuid.uuid4().hex)


@pytest.fixture
def replica(place: Place) -> Iterator[Replicas]:
    """Makes stores of the place; their books must agree in the end."""
    replicas = Replicas(place)
    yield replicas
    replicas.close()
