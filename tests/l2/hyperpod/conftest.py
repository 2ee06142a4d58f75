"""A daemon that is not hotspan's, and stores on it."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hotspan.l2.hyperpod import HyperpodStore
from hotspan.l2.options import HyperpodOptions
from hotspan.testing.clock import SimulatedClock
from tests.daemon_protocol.peer import Peer
from tests.l2.hyperpod.rig import PATIENT, TIMEOUT_S


@pytest.fixture
def peer() -> Iterator[Peer]:
    """A daemon that is not hotspan's."""
    with Peer(16 << 20) as peer:
        yield peer


@pytest.fixture
def make(peer: Peer) -> Iterator[Callable[..., HyperpodStore]]:
    """Makes stores on `peer`, which are closed in the end."""
    with contextlib.ExitStack() as stack:

        def store(clock: SimulatedClock | None = None, port: int | None = None, **settings: Any) -> HyperpodStore:
            settings = {"shared_memory_name": peer.name, **PATIENT, **settings}
            store = HyperpodStore("127.0.0.1", port or peer.port, HyperpodOptions(**settings), clock)
            stack.callback(store.close)
            return store

        yield store


@pytest.fixture
def store(make: Callable[..., HyperpodStore]) -> HyperpodStore:
    """A store on `peer`."""
    return make()


@pytest.fixture
def quick(make: Callable[..., HyperpodStore]) -> HyperpodStore:
    """A store on `peer` whose calls take TIMEOUT_S at most."""
    return make(timeout_ms=int(TIMEOUT_S * 1000))
