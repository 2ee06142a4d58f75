"""What the tests of HyperPod's store have in common: whole objects, and how to ask for them."""

import threading
import time
from collections.abc import Callable
from typing import Any

from hotspan.core.frame import HEADER_BYTES, FrameIdentity, seal
from hotspan.core.terms import Terms
from hotspan.core.types import ChunkKey
from hotspan.l2.base import PREAMBLE_BYTES, Found
from hotspan.l2.hyperpod import HyperpodStore
from hotspan.l2.metadata import NO_LIFE
from hotspan.testing.chunks import content, key_of
from hotspan.testing.clock import SimulatedClock
from hotspan.tiers.record import Record, pack
from tests.daemon_protocol.peer import Peer

NAMESPACE = bytes(range(32))
SIZE = 50_000

PATIENT: dict[str, Any] = {"timeout_ms": 60_000, "lease_wait_timeout_ms": 60_000}
"""Settings of a store that does not give up because the machine stands still."""

TIMEOUT_S = 0.3
SLACK_S = 60.0
"""A hang guard: what a broken peer's answer takes that is waited for is far more."""


class Object:
    """A chunk's record and frame."""

    def __init__(self, name: str = "a", size: int = SIZE, terms: Terms = Terms(tenant=1), key: ChunkKey | None = None):  # noqa: B008
        key = key or key_of(name)
        self.identity = FrameIdentity(key, NAMESPACE, 7)
        self.record = Record(key, None, NAMESPACE, size, terms, 7)
        self.frame = [memoryview(bytearray(HEADER_BYTES)), memoryview(bytearray(content(key, size)))]
        seal(self.frame[0], self.frame[1], self.identity)

    @property
    def key(self) -> ChunkKey:
        """Its name."""
        return self.record.key

    @property
    def value(self) -> bytes:
        """What the daemon holds of it."""
        return (pack(self.record) + NO_LIFE).ljust(PREAMBLE_BYTES, b"\0") + b"".join(self.frame)

    def put(self, store: HyperpodStore) -> bool:
        """Store it."""
        return store.put(self.record, self.frame)

    def get(self, store: HyperpodStore, found: Found) -> bool:
        """Read it; what comes for a hit must be its bytes."""
        into = [memoryview(bytearray(len(part))) for part in self.frame]
        got = store.get(found, into)
        if got:
            assert [bytes(part) for part in into] == [bytes(part) for part in self.frame]
        return got


def found_in(store: HyperpodStore, key: ChunkKey) -> Found | None:
    """What `find` says of one key."""
    (found,) = store.find([key])
    return found


def there(store: HyperpodStore, key: ChunkKey) -> Found:
    """What `find` says of a key that must be there."""
    found = found_in(store, key)
    assert found is not None
    return found


def missed(ask: Callable[[], object]) -> None:
    """Ask: the answer must be a miss or an OSError, and come within the deadline."""
    begun = time.monotonic()
    try:
        answer = ask()
    except OSError:
        answer = None
    assert not answer
    assert time.monotonic() - begun < TIMEOUT_S + SLACK_S


class JumpingClock(SimulatedClock):
    """Jumps by an hour when the thread that made it reads it for the n-th time.

    Reads of other threads are not counted: a store's thread for releases reads it whenever it gets to run.
    """

    jump_at = 0

    def __init__(self) -> None:
        super().__init__()
        self._reader = threading.get_ident()

    def monotonic(self) -> float:
        if threading.get_ident() == self._reader:
            self.jump_at -= 1
            if not self.jump_at:
                self.advance(3600)
        return super().monotonic()


def scribble(peer: Peer, key: ChunkKey, at: int, data: bytes) -> None:
    """Write over an object's bytes in the segment."""
    stored = peer._objects["lmcache", key.hex()]
    peer.write(stored, at, data)
