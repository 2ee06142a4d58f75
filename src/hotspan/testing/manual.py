"""A tier in memory whose transfers end when the test says so, as the test says, or never."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from hotspan.core.types import Chunk, ChunkKey, Tier
from hotspan.tiers.base import Fault, TierUsage, Transfer

_UNDEFINED = 0xA5
"""What a load leaves in its buffer until it has ended well: nobody may take it for a chunk."""


@dataclass(slots=True, eq=False)
class Flight:
    """A transfer that was submitted and has not ended.

    before: what the buffer held at the start. data: what a load brings, as it was when it began.
    """

    key: ChunkKey
    is_load: bool
    buffer: memoryview
    before: bytes
    data: bytes
    doomed: bool = False


class ManualTier:
    """A StorageTier for tests: also holds its caller to the rules.

    Raises AssertionError when a buffer changes while a transfer uses it, which is the caller's fault.

    store_depth: stores in flight; more are refused.
    auto:        transfers end by themselves, at the next `finished`.
    """

    tier = Tier.DISK

    def __init__(self, slots: int, payload_bytes: int, *, store_depth: int = 32, auto: bool = False) -> None:
        self._slots = slots
        self._payload_bytes = payload_bytes
        self._store_depth = store_depth
        self._auto = auto
        self._ended: deque[Transfer] = deque()
        self._closed = False
        self.held: dict[ChunkKey, bytes] = {}
        self.flights: list[Flight] = []
        self.refusals: list[ChunkKey] = []

    # -- what a test does ------------------------------------------------------------------------------------------

    def finish(self, flight: Flight, fault: Fault | None = None) -> None:
        """End one transfer, well or with a fault."""
        if flight.buffer != flight.before:
            raise AssertionError("a buffer was changed while a transfer used it")
        self.flights.remove(flight)
        if flight.is_load and fault is None:
            flight.buffer[:] = flight.data
        elif flight.is_load and not flight.doomed:
            self.held.pop(flight.key, None)  # quarantined
        elif not flight.is_load and fault is None and not flight.doomed:
            self.held[flight.key] = flight.data
        self._ended.append(Transfer(flight.key, flight.is_load, fault, self._payload_bytes, 0.001))

    def finish_all(self) -> None:
        """End all transfers well, in the order in which they were submitted."""
        for flight in list(self.flights):
            self.finish(flight)

    # -- StorageTier -----------------------------------------------------------------------------------------------

    def lookup(self, key: ChunkKey) -> bool:
        return key in self.held

    def can_store(self) -> bool:
        return sum(not flight.is_load for flight in self.flights) < self._store_depth

    def submit_store(self, chunk: Chunk, payload: memoryview) -> bool:
        self._check_size(payload)
        storing = [flight.key for flight in self.flights if not flight.is_load and not flight.doomed]
        if chunk.key in self.held or chunk.key in storing or not self.can_store():
            return False
        if len(self.held) + len(storing) >= self._slots:
            self.refusals.append(chunk.key)
            return False
        self.flights.append(Flight(chunk.key, False, payload, bytes(payload), bytes(payload)))
        return True

    def submit_load(self, key: ChunkKey, into: memoryview) -> bool:
        self._check_size(into)
        if key not in self.held:
            return False
        into[:] = bytes([_UNDEFINED]) * len(into)
        self.flights.append(Flight(key, True, into, bytes(into), self.held[key]))
        return True

    def finished(self) -> list[Transfer]:
        if self._auto:
            self.finish_all()
        ended = list(self._ended)
        self._ended.clear()
        return ended

    def wait(self, timeout_s: float) -> None:
        return

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        return

    def discard(self, key: ChunkKey) -> None:
        self.held.pop(key, None)
        for flight in self.flights:
            flight.doomed |= flight.key == key

    def clear(self) -> int:
        keys = set(self.held) | {flight.key for flight in self.flights if not flight.is_load and not flight.doomed}
        for key in keys:
            self.discard(key)
        return len(keys)

    def usage(self) -> TierUsage:
        size = self._payload_bytes
        return TierUsage(len(self.held), self._slots, len(self.held) * size, self._slots * size)

    def close(self, timeout_s: float) -> None:
        self._closed = True

    def check(self) -> None:
        """Raise AssertionError if it holds more than it has room for."""
        if len(self.held) > self._slots:
            raise AssertionError("more chunks than slots")

    def _check_size(self, buffer: memoryview) -> None:
        if len(buffer) != self._payload_bytes:
            raise ValueError(f"a buffer of {len(buffer)} bytes, not {self._payload_bytes}")
