"""The conformance kit on HyperPod's store: over the reference peer, and over `hotspan daemon`."""

from collections.abc import Iterator

import pytest

from hotspan.l2.hyperpod import HyperpodStore
from hotspan.l2.options import HyperpodOptions
from tests.daemon_protocol.conftest import Daemon
from tests.daemon_protocol.peer import Peer
from tests.l2.hyperpod.rig import PATIENT
from tests.l2.kit.outages import StoreOutageTests
from tests.l2.kit.stores import MakeStore, ObjectStoreTests


class TestHyperpodStore(ObjectStoreTests):
    """Over the reference peer, which deletes as hotspan's daemon does: the protocol has no way to delete."""

    @pytest.fixture
    def make_store(self) -> Iterator[MakeStore]:
        with Peer(is_hotspan=True) as peer:
            settings = HyperpodOptions(shared_memory_name=peer.name, **PATIENT)
            yield lambda entries: HyperpodStore("127.0.0.1", peer.port, settings)


class TestHyperpodStoreOnDaemon(ObjectStoreTests):
    """Over a daemon that all tests share, each in a bucket of its own."""

    @pytest.fixture(scope="class")
    def server(self) -> Iterator[Daemon]:
        daemon = Daemon()
        yield daemon
        daemon.close()

    @pytest.fixture
    def make_store(self, server: Daemon, request: pytest.FixtureRequest) -> MakeStore:
        settings = HyperpodOptions(shared_memory_name=server.name, bucket=request.node.name, **PATIENT)
        return lambda entries: HyperpodStore("127.0.0.1", server.port, settings)


class TestHyperpodStoreOutages(StoreOutageTests):
    """Over a daemon of each test's own."""

    LIMIT_S = 30.0

    @pytest.fixture
    def server(self) -> Iterator[Daemon]:
        daemon = Daemon()
        yield daemon
        daemon.close()

    @pytest.fixture
    def make_store(self, server: Daemon) -> MakeStore:
        settings = HyperpodOptions(shared_memory_name=server.name, timeout_ms=5000, lease_wait_timeout_ms=5000)
        return lambda entries: HyperpodStore("127.0.0.1", server.port, settings)
