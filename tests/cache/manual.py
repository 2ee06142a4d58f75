"""A tier in memory whose transfers end when the test says so, as the test says, or never."""

from collections import deque
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from hotspan.core.clock import Clock, SystemClock
from hotspan.core.scopes import ScopeSet
from hotspan.core.terms import Scope, Terms
from hotspan.core.types import Chunk, ChunkKey, Tier
from hotspan.tiers.base import Durable, Fault, Losses, TierUsage, Transfer

_UNDEFINED = 0xA5
"""What a load leaves in its buffer until it has ended well: nobody may take it for a chunk."""


@dataclass(slots=True, eq=False)
class Flight:
    """A transfer that was submitted and has not ended.

    before: what the buffer held at the start. data: what a load brings, as it was when it began.
    """

    chunk: Chunk
    terms: Terms
    is_load: bool
    buffer: memoryview
    before: bytes
    data: bytes
    deleted: bool = False

    @property
    def key(self) -> ChunkKey:
        return self.chunk.key


class ManualTier:
    """A StorageTier for tests: also holds its caller to the rules.

    Raises AssertionError when a buffer changes while a transfer uses it, which is the caller's fault.

    store_depth: stores in flight; more are refused.
    auto:        transfers end by themselves, at the next `finished`.

    held, kept_on: bytes and terms by key; a chunk that a test puts into `held` alone is kept on no terms.
    durables:      with `holds_durables`, those that were not told yet: the test does.
    transfer_s:    how long each transfer says that it took.
    """

    tier = Tier.DISK

    def __init__(
        self,
        slots: int,
        payload_bytes: int,
        *,
        store_depth: int = 32,
        auto: bool = False,
        namespace: bytes = bytes(32),
        clock: Clock | None = None,
    ) -> None:
        self._slots = slots
        self._payload_bytes = payload_bytes
        self._store_depth = store_depth
        self._auto = auto
        self._namespace = namespace
        self._clock = clock or SystemClock()
        self._ended: deque[Transfer] = deque()
        self._closed = False
        self._parents: dict[ChunkKey, ChunkKey | None] = {}
        self.held: dict[ChunkKey, bytes] = {}
        self.kept_on: dict[ChunkKey, Terms] = {}
        self.flights: list[Flight] = []
        self.refusals: list[ChunkKey] = []
        self.invalidations: list[tuple[Scope, ...]] = []
        self.holds_durables = False
        self.durables: list[Durable] = []
        self.transfer_s = 0.001
        self.losses = Losses()

    # -- what a test does ------------------------------------------------------------------------------------------

    def put(self, chunk: Chunk, terms: Terms, data: bytes) -> None:
        """Let it hold a chunk, as a former process left it."""
        self.held[chunk.key] = data
        self.kept_on[chunk.key] = terms
        self._parents[chunk.key] = chunk.parent

    def finish(self, flight: Flight, fault: Fault | None = None) -> None:
        """End one transfer, well or with a fault."""
        if flight.buffer != flight.before:
            raise AssertionError("a buffer was changed while a transfer used it")
        self.flights.remove(flight)
        if flight.is_load and fault is None:
            flight.buffer[:] = flight.data
        elif fault is not None and not flight.deleted:
            self.discard(flight.key)  # quarantined, or never here
        elif not flight.is_load and not flight.deleted:
            self.put(flight.chunk, flight.terms, flight.data)
        ended_s = self._clock.monotonic()
        transfer = Transfer(flight.key, flight.is_load, fault, self._payload_bytes, self.transfer_s, ended_s=ended_s)
        self._ended.append(transfer)

    def finish_all(self) -> None:
        """End all transfers well, in the order in which they were submitted."""
        for flight in list(self.flights):
            self.finish(flight)

    # -- StorageTier -----------------------------------------------------------------------------------------------

    asking = 0
    answer_s = 0.0

    def ask(self, chunks: Sequence[Chunk], tenant: int) -> None:
        return

    def is_asking(self, key: ChunkKey) -> bool:
        return False

    def lookup(self, key: ChunkKey) -> bool:
        if key not in self.held:
            return False
        expires_s = self.terms(key).expires_s
        return not expires_s or self._clock.unix() < expires_s

    def terms(self, key: ChunkKey) -> Terms:
        if key not in self.held:
            raise KeyError(key)
        return self.kept_on.get(key, Terms())

    def labelled(self, scope: Scope) -> list[Chunk]:
        keys = {key for key in self.held if ScopeSet([scope]).takes(key, self._namespace, self.terms(key))}
        found: dict[ChunkKey, Chunk] = {}
        for key in keys:
            at: ChunkKey | None = key
            while at is not None and at not in found and at in self.held:
                found[at] = Chunk(at, self._parents.get(at), self._depth(at))
                at = self._parents.get(at)
        return list(found.values())

    def can_store(self) -> bool:
        return sum(not flight.is_load for flight in self.flights) < self._store_depth

    def holds_back(self, key: ChunkKey, terms: Terms) -> bool:
        return False

    def released(self) -> list[ChunkKey]:
        return []

    def submit_store(self, chunk: Chunk, terms: Terms, payload: memoryview) -> bool:
        self._check_size(payload)
        storing = [flight.key for flight in self._storing()]
        here = self._parents_here()
        if chunk.key in here or not self.can_store() or (chunk.parent is not None and chunk.parent not in here):
            return False
        if len(self.held) + len(storing) >= self._slots:
            self.refusals.append(chunk.key)
            return False
        terms = terms.at(len(self.invalidations))
        self.flights.append(Flight(chunk, terms, False, payload, bytes(payload), bytes(payload)))
        return True

    def submit_load(self, key: ChunkKey, into: memoryview) -> bool:
        self._check_size(into)
        if not self.lookup(key):
            return False
        into[:] = bytes([_UNDEFINED]) * len(into)
        chunk = Chunk(key, self._parents.get(key))
        self.flights.append(Flight(chunk, self.terms(key), True, into, bytes(into), self.held[key]))
        return True

    def finished(self) -> list[Transfer]:
        if self._auto:
            self.finish_all()
        before = len(self.held)
        for key in [key for key in self.held if not self.lookup(key)]:
            self.discard(key)  # its time is over
        self.losses.expired += before - len(self.held)
        ended = list(self._ended)
        self._ended.clear()
        return ended

    def wait(self, timeout_s: float) -> bool:
        return bool(self._ended)

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        return

    def join(self, key: ChunkKey, terms: Terms) -> None:
        if key in self.held:
            self.kept_on[key] = self.terms(key).joined(terms)
        for flight in self._storing():
            if flight.key == key:
                flight.terms = flight.terms.joined(terms)

    def discard(self, key: ChunkKey) -> None:
        self._forget({key} | self._standing_on({key}))

    def invalidate(self, scopes: Sequence[Scope], durable: Durable) -> int:
        self.invalidations.append(tuple(scopes))
        asked = ScopeSet(scopes)
        terms = {key: self.terms(key) for key in self.held}
        terms |= {flight.key: flight.terms for flight in self._storing()}
        taken = {key for key in terms if asked.takes(key, self._namespace, terms[key])}
        taken |= self._standing_on(taken | asked.keys)
        self._forget(taken)
        if self.holds_durables and not self._closed:
            self.durables.append(durable)
        else:
            durable(not self._closed)
        return len(taken)

    def rename(self, namespace: bytes, *, forget: bool) -> None:
        self._forget(set(self.held))  # this tier finds what it has in any namespace

    def usage(self) -> TierUsage:
        size = self._payload_bytes
        tenants: dict[int, int] = {}
        for key in self.held:
            tenant = self.terms(key).tenant
            tenants[tenant] = tenants.get(tenant, 0) + 1
        return TierUsage(len(self.held), self._slots, len(self.held) * size, self._slots * size, tenants)

    def give_up(self) -> None:
        return  # all its transfers have begun

    def close(self, timeout_s: float) -> None:
        self._closed = True

    def check(self) -> None:
        """Raise AssertionError if it holds more than it has room for, or knows terms of what it does not hold."""
        if len(self.held) > self._slots:
            raise AssertionError("more chunks than slots")
        if not self.kept_on.keys() <= self.held.keys():
            raise AssertionError("terms without a chunk")
        here = self._parents_here()
        if not {parent for parent in here.values() if parent is not None} <= here.keys():
            raise AssertionError("a chunk stands behind a gap")

    # -- inside ----------------------------------------------------------------------------------------------------

    def _depth(self, key: ChunkKey) -> int:
        above = self._parents.get(key)
        return 0 if above is None else 1 + self._depth(above)

    def _storing(self) -> list[Flight]:
        return [flight for flight in self.flights if not flight.is_load and not flight.deleted]

    def _parents_here(self) -> dict[ChunkKey, ChunkKey | None]:
        """What is here or being written, and what each stands on."""
        held = {key: self._parents.get(key) for key in self.held}
        return held | {flight.key: flight.chunk.parent for flight in self._storing()}

    def _standing_on(self, keys: Set[ChunkKey]) -> set[ChunkKey]:
        parents = self._parents_here()
        found: set[ChunkKey] = set()
        while more := {key for key, parent in parents.items() if parent in keys or parent in found} - found:
            found |= more
        return found

    def _forget(self, keys: Set[ChunkKey]) -> None:
        for key in keys:
            self.held.pop(key, None)
            self.kept_on.pop(key, None)
            self._parents.pop(key, None)
        for flight in self.flights:
            flight.deleted |= flight.key in keys

    def _check_size(self, buffer: memoryview) -> None:
        if len(buffer) != self._payload_bytes:
            raise ValueError(f"a buffer of {len(buffer)} bytes, not {self._payload_bytes}")
