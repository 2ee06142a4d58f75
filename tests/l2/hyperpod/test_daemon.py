"""The store on `hotspan daemon`, a process of its own, as on HyperPod's; and what only hotspan's daemon can."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

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
