"""The store on `hotspan daemon`, a process of its own, as on HyperPod's; and what only hotspan's daemon can."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from hotspan.core.terms import Terms
from hotspan.l2.base import marks_of
from hotspan.l2.hyperpod import HyperpodStore
from hotspan.l2.options import HyperpodOptions
from tests.daemon_protocol.conftest import Daemon
from tests.l2.hyperpod.rig import PATIENT, Object, found_in, there

MIB = 1 << 20


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """A daemon that the tests share."""
    daemon = Daemon()
    yield daemon
    daemon.close()


def connected(daemon: Daemon, **settings: Any) -> HyperpodStore:
    """A store on the daemon."""
    settings = {"shared_memory_name": daemon.name, **PATIENT, **settings}
    return HyperpodStore("127.0.0.1", daemon.port, HyperpodOptions(**settings))


@pytest.fixture
def store(daemon: Daemon, request: pytest.FixtureRequest) -> Iterator[HyperpodStore]:
    """A store in a bucket of its own."""
    with contextlib.closing(connected(daemon, bucket=request.node.name)) as store:
        yield store


def test_marks_and_deletes(daemon: Daemon, store: HyperpodStore, request: pytest.FixtureRequest) -> None:
    """Marks of one replica are seen by another, and go with their object when it is deleted."""
    with contextlib.closing(connected(daemon, bucket=request.node.name)) as other:
        one, two = Object("a"), Object("b")
        assert one.put(store) and two.put(store)
        for label in range(1, 12):
            (store, other)[label % 2].mark({one.key: marks_of(Terms(labels=frozenset([label])), label)})
        assert there(other, one.key).terms == Terms(1, labels=frozenset(range(1, 12)), generation=11)
        other.delete([one.key, Object("never").key])
        assert found_in(store, one.key) is None and two.get(store, there(store, two.key))
        assert one.put(store) and there(other, one.key).terms == one.record.terms


def test_a_restart_is_a_miss() -> None:
    """After a restart nothing is found, what was leased before is not read, and the store goes on."""
    daemon = Daemon()
    try:
        with contextlib.closing(connected(daemon)) as store:
            one = Object()
            assert one.put(store)
            found = there(store, one.key)
            daemon.restart()
            assert not one.get(store, found)
            assert found_in(store, one.key) is None
            assert one.put(store) and one.get(store, there(store, one.key))
    finally:
        daemon.close()
