"""The daemon of the node as an L2, whichever it is and whenever it comes."""

import contextlib
from collections.abc import Iterator

import pytest

from hotspan.core.terms import Scope
from hotspan.l2.base import LogPosition, ObjectStore
from hotspan.l2.follower import LogFollower
from hotspan.l2.node import NodeStore
from hotspan.l2.open import open_store
from hotspan.testing.chunks import chain
from kit.ports import free_port
from tests.daemon.rig import DaemonProcess, patient_store
from tests.daemon_protocol.peer import Peer
from tests.l2.kit.outages import StoreOutageTests
from tests.l2.kit.races import PLAIN, TAG, TAGGED, SteppedReplica
from tests.l2.kit.stores import MakeStore

CHUNKS = chain("a", 2)
OTHERS = chain("b", 2)


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    """That is not started yet."""
    process = DaemonProcess()
    yield process
    process.close()


def node_store(name: str, port: int) -> NodeStore:
    """As `--l2 sagemaker-hyperpod://127.0.0.1:PORT` opens it."""
    options = {"shared_memory_name": name, "timeout_ms": "5000"}
    store = open_store("--l2", f"sagemaker-hyperpod://127.0.0.1:{port}", options)
    assert isinstance(store, NodeStore)
    return store


class TestNodeOutage(StoreOutageTests):
    """hotspan's daemon, by the URL that users give."""

    LIMIT_S = 30.0

    @pytest.fixture
    def server(self, daemon: DaemonProcess) -> DaemonProcess:
        daemon.start()
        return daemon

    @pytest.fixture
    def make_store(self, server: DaemonProcess) -> MakeStore:
        return lambda entries: node_store(server.name, server.port)


@pytest.fixture
def stores() -> Iterator[list[ObjectStore]]:
    """Closed at the end."""
    with contextlib.ExitStack() as closing:
        opened: list[ObjectStore] = []
        closing.callback(lambda: [store.close() for store in opened])
        yield opened


def test_without_any_daemon_nothing_is_durable(daemon: DaemonProcess, stores: list[ObjectStore]) -> None:
    """While nothing answers an invalidation is refused: what comes may have chunks that it takes."""
    stores.append(node_store(daemon.name, free_port()))
    log = stores[0].log
    assert log is not None
    for call in (lambda: log.append([Scope()], "me"), lambda: log.read(0), log.replicas):
        with pytest.raises(OSError):
            call()


def test_a_daemon_that_comes_in_the_place_of_another(daemon: DaemonProcess, stores: list[ObjectStore]) -> None:
    """Once hotspan's daemon is there a replica goes over to its log, obeys it, and takes its own invalidations along.

    Others read on in the same epoch: who comes late begins no new log.
    """
    with Peer(is_hotspan=False) as peer:
        stores.append(node_store(daemon.name, peer.port))
        late = SteppedReplica(stores[0], "late")
        assert not late.follower.is_shared
        late.invalidate(labels=frozenset([7]))
        late.invalidate(labels=TAG)
        daemon.start()
        stores.append(patient_store(daemon.unix_socket))
        other = SteppedReplica(stores[1], "other")
        epoch = other.follower.position
        other.put(CHUNKS, TAGGED)
        other.invalidate(labels=TAG)
        other.put(OTHERS, PLAIN)
        assert late.ask(CHUNKS) == late.ask(OTHERS) == [False, False]  # of whose log it has read nothing
        assert late.follower.poll() and late.follower.is_shared
        assert late.follower.foreign() == [Scope()], "what others invalidated until then is not known"
        assert late.ask(CHUNKS) == [False, False] and late.ask(OTHERS) == [True, True]
        assert other.follower.poll() and other.follower.position is not None and epoch is not None
        assert other.follower.position.epoch == epoch.epoch
        taken = {label for scope in other.follower.foreign() for label in scope.labels}
        assert taken == {7, *TAG}, "what was acknowledged here holds there"


def test_without_a_shared_log_an_invalidation_holds_on_one_replica(
    stores: list[ObjectStore], caplog: pytest.LogCaptureFixture
) -> None:
    """What was stored before it is a miss there; what another replica stores later is a hit, since nobody told it.

    Its receipt names that replica alone, and the log says so from the start.
    """
    with Peer(is_hotspan=False) as peer:
        stores += [node_store(peer.name, peer.port) for _ in range(2)]
        one, other = SteppedReplica(stores[0], "one"), SteppedReplica(stores[1], "other")
        assert caplog.text.count("l2_log_not_shared") == 2
        other.put(CHUNKS, TAGGED)
        one.invalidate(labels=TAG)
        assert one.ask(CHUNKS) == [False, False]
        assert one.follower.readers().keys() == {"one"} and not one.follower.is_shared
        while other.follower.generation <= one.follower.generation:  # milliseconds
            other.poll()
        other.put(OTHERS, TAGGED)
        while one.follower.generation <= other.follower.generation:
            one.poll()
        assert one.ask(OTHERS) == [True, True]


def test_a_replica_that_followed_a_log_trusts_nothing_without_it(stores: list[ObjectStore]) -> None:
    """What is on its disk may have been invalidated by others: with a log of its own it forgets all of it."""
    with Peer(is_hotspan=False) as peer:
        for since, forgotten in ((None, []), (LogPosition(b"e" * 16, 7, b"c" * 8), [Scope()])):
            stores.append(node_store("hotspan-no-such-segment", peer.port))
            log = stores[-1].log
            assert log is not None
            follower = LogFollower(log, "me", since=since)
            assert follower.poll() and follower.foreign() == forgotten and not follower.is_shared
