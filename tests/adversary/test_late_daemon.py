"""The node's daemon comes when replicas run already: no text that was withdrawn is read after a durable receipt.

The daemon is a process of its own, killed or not there yet; the replicas open its L2 by the URL that users give, and
do their I/O when the test says so.
"""

import contextlib
from collections.abc import Callable, Iterator

import pytest

from hotspan.core.terms import Scope
from hotspan.testing.chunks import aligned, chain
from kit.ports import free_port
from tests.daemon.rig import DaemonProcess
from tests.l2.kit.races import PLAIN, SIZE, TAG, TAGGED, SteppedReplica
from tests.l2.test_node import node_store

pytestmark = pytest.mark.engine

WITHDRAWN, KEPT, AGAIN = chain("withdrawn", 3), chain("kept", 2), chain("again", 3)


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    """That is not started yet; its port is free."""
    process = DaemonProcess()
    process.port = free_port()
    yield process
    process.close()


@pytest.fixture
def replica(daemon: DaemonProcess) -> Iterator[Callable[..., SteppedReplica]]:
    """Begins a replica, whether the daemon is there or not; all are closed at the end."""
    with contextlib.ExitStack() as closing:

        def begin(name: str, *, is_up: bool) -> SteppedReplica:
            store = node_store(daemon.name, daemon.port)
            closing.callback(store.close)
            return SteppedReplica(store, name, is_up=is_up)

        yield begin


def refused(replica: SteppedReplica) -> None:
    """An invalidation by this replica is not acknowledged while no daemon answers."""
    told: list[bool] = []
    replica.tier.invalidate([Scope(labels=TAG)], told.append)
    replica.run()
    assert told != [True]


EARLY: dict[str, Callable[[SteppedReplica], object]] = {
    "nothing": lambda one: None,
    "asked": lambda one: one.ask(WITHDRAWN),
    "stored": lambda one: [one.tier.submit_store(chunk, TAGGED, aligned(SIZE)) for chunk in WITHDRAWN],
    "invalidated": refused,
    "read the log": lambda one: one.follower.poll(),
}
"""What a replica has done when the daemon comes."""


@pytest.mark.parametrize("done", EARLY)
def test_a_replica_that_was_there_first_obeys(
    daemon: DaemonProcess, replica: Callable[..., SteppedReplica], done: str
) -> None:
    """Its receipts are durable in the daemon's log, and it obeys those of others, whatever it did before."""
    early = replica("early", is_up=False)
    EARLY[done](early)
    daemon.start()
    late = replica("late", is_up=True)
    early.poll()
    assert early.follower.is_shared and set(late.follower.readers()) == {"early", "late"}
    late.poll()
    late.put(WITHDRAWN, TAGGED)
    late.put(KEPT, PLAIN)
    assert all(early.ask(WITHDRAWN)) and all(early.ask(KEPT))
    late.invalidate(labels=TAG)
    early.poll()
    assert not any(early.ask(WITHDRAWN)) and all(early.ask(KEPT))
    assert [early.load(chunk) for chunk in WITHDRAWN] == [None] * len(WITHDRAWN)
    early.put(WITHDRAWN, TAGGED)
    early.invalidate(labels=TAG)
    late.poll()
    assert not any(late.ask(WITHDRAWN)) and all(late.ask(KEPT))


def test_what_was_found_before_a_receipt_is_not_read_after_it(
    daemon: DaemonProcess, replica: Callable[..., SteppedReplica]
) -> None:
    """A chunk that an early replica has found is a miss once it has read the log, though its load was asked for."""
    early = replica("early", is_up=False)
    daemon.start()
    late = replica("late", is_up=True)
    early.poll()
    late.put(WITHDRAWN, TAGGED)
    assert all(early.ask(WITHDRAWN))
    late.invalidate(labels=TAG)
    early.poll()
    assert not any(isinstance(early.load(chunk), bytes) for chunk in WITHDRAWN)


def test_a_daemon_that_was_killed_comes_again_with_nothing(
    daemon: DaemonProcess, replica: Callable[..., SteppedReplica]
) -> None:
    """A replica that misses the daemon meanwhile acknowledges nothing, and what comes has no withdrawn chunk."""
    daemon.start()
    one, other = replica("one", is_up=True), replica("other", is_up=True)
    one.put(WITHDRAWN, TAGGED)
    assert all(other.ask(WITHDRAWN))
    daemon.stop()
    refused(one)
    assert not other.follower.poll()
    daemon.start()
    for each in (one, other):
        each.follower.poll()
        each.poll()
        assert not any(each.ask(WITHDRAWN))
    other.put(AGAIN, TAGGED)
    assert all(one.ask(AGAIN))
    one.invalidate(labels=TAG)
    other.poll()
    assert not any(other.ask(AGAIN)) and not any(one.ask(AGAIN))
