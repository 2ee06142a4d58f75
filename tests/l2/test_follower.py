"""Following the log: nothing that it says, and no mistake of ours, ends it; what it can't understand it widens."""

import threading
from collections.abc import Callable, Sequence

import pytest

from hotspan.core.terms import Scope
from hotspan.l2 import follower as followers
from hotspan.l2.base import LogPage
from hotspan.l2.blob_log import BlobLog
from hotspan.l2.follower import STALE_S, LogFaults, LogFollower
from hotspan.l2.log import SharedInvalidationLog, checked
from hotspan.testing.clock import SimulatedClock
from kit.simulated.memory_store import MemoryServer
from tests.l2.receipts import missing

ONE, TWO = Scope(tenant=1, labels=frozenset([5])), Scope(tenant=2, labels=frozenset([6]))


@pytest.fixture
def server() -> MemoryServer:
    return MemoryServer(clock=SimulatedClock())


@pytest.fixture
def follower(server: MemoryServer) -> LogFollower:
    """Of the replica "a", which has read all there is."""
    follower = LogFollower(server.log(), "a", server.clock)
    follower.poll()
    follower.foreign()
    follower.take_faults()
    return follower


def test_a_batch_is_one_entry(server: MemoryServer, follower: LogFollower) -> None:
    """Several scopes are one entry of the log, and all of them reach the others."""
    server.log().append([ONE, TWO], "b")
    assert len(server.entries) == 1
    assert follower.poll() and follower.foreign() == [ONE, TWO]


def test_an_entry_that_is_not_understood_is_passed(server: MemoryServer, follower: LogFollower) -> None:
    """Its widened scopes are applied once and counted, the position moves on, and later entries are read."""
    at = server.log().append([ONE], "b")
    (name,) = (name for name in server.data if name.endswith(f"{at:016x}"))
    server.data[name] = b"E" + checked(b'{"by": "b", "scope": {"tenant": 1, "labels": "x"}}')
    assert follower.poll() and follower.foreign() == [Scope(tenant=1)]
    assert follower.take_faults() == LogFaults(malformed=1) and follower.take_faults() == LogFaults()
    server.log().append([TWO], "b")
    assert follower.poll() and follower.foreign() == [TWO]
    assert follower.applied == follower.generation == server.entries[-1].generation


class BrokenLog(SharedInvalidationLog):
    """A log whose reading may fail for a reason that is nobody's I/O. on_read: called before it is read, or fails."""

    is_broken = False

    def __init__(self, server: MemoryServer, on_read: Callable[[], object] = lambda: None) -> None:
        super().__init__(BlobLog(server, server.clock), 100, server.clock)
        self._on_read = on_read

    def read(self, after: int) -> LogPage:
        self._on_read()
        if self.is_broken:
            raise RecursionError("too deep")
        return super().read(after)


def test_a_mistake_is_a_fault_and_not_the_end(server: MemoryServer) -> None:
    """An exception that is no OSError is counted; the replica stays among those that have not read, and goes on."""
    log = BrokenLog(server)
    follower, writer = (LogFollower(one, name, server.clock) for one, name in ((log, "a"), (server.log(), "b")))
    assert follower.poll() and writer.poll() and follower.foreign() == [Scope()]  # what was before nobody knows
    log.is_broken = True
    writer.append([ONE])
    for _ in range(3):
        assert not follower.poll()
        server.clock.advance(1.0)  # type: ignore[attr-defined]
    assert follower.take_faults() == LogFaults(faults=3)
    assert not follower.is_fresh
    assert writer.poll() and missing(writer) == ["a"]
    log.is_broken = False
    assert follower.poll() and follower.foreign() == [ONE] and follower.is_fresh
    assert missing(writer) == []


def test_the_thread_outlives_what_it_reads(server: MemoryServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that reads the log ends with `close` and not before, whatever it comes upon."""
    monkeypatch.setattr(followers, "READ_EVERY_S", 0.0)
    faults, read = threading.Semaphore(0), threading.Semaphore(0)
    log = BrokenLog(server, lambda: (faults if log.is_broken else read).release())
    log.is_broken = True
    follower = LogFollower(log, "a", server.clock)
    follower.start(0.0)
    thread = follower._thread
    assert thread is not None
    for _ in range(3):
        assert faults.acquire(timeout=60)
    assert thread.is_alive()
    log.is_broken = False
    assert read.acquire(timeout=60)
    follower.close()
    thread.join(60)
    assert not thread.is_alive()


def test_a_lost_log_is_counted(server: MemoryServer, follower: LogFollower) -> None:
    """When entries that were not read are gone, everything is forgotten once, and that is counted."""
    server.data.clear()
    assert follower.poll() and follower.foreign() == [Scope()]
    assert follower.take_faults() == LogFaults(losses=1)


def test_what_waits_for_an_idle_engine_is_widened_tenant_by_tenant(server: MemoryServer, follower: LogFollower) -> None:
    """Many entries that an idle engine has not taken become one of their tenant; nobody else's chunks are concerned."""
    log = server.log()
    log.append([TWO], "b")
    for number in range(followers._MAX_FOREIGN + 1):
        log.append([Scope(tenant=1, labels=frozenset([number + 1]))], "b")
        if number % 10 == 0:
            follower.poll()
    follower.poll()
    assert sorted(follower.foreign(), key=lambda scope: scope.tenant or 0) == [Scope(tenant=1), TWO]
    assert follower.applied == server.entries[-1].generation
    assert follower.foreign() == []


def test_too_many_scopes_between_two_steps_take_one_tenant(server: MemoryServer, follower: LogFollower) -> None:
    """The same when they come at once."""
    scopes: Sequence[Scope] = [
        Scope(tenant=1, labels=frozenset([number + 1])) for number in range(followers._MAX_FOREIGN + 1)
    ]
    server.log().append(scopes, "b")
    follower.poll()
    assert follower.foreign() == [Scope(tenant=1)]


def test_a_log_that_was_not_read_for_long_is_not_fresh(server: MemoryServer, follower: LogFollower) -> None:
    """Faults do not make it fresh."""
    server.clock.advance(STALE_S)  # type: ignore[attr-defined]
    assert not follower.is_fresh
    assert follower.poll() and follower.is_fresh
