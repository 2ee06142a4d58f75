"""Chunks that a tier evicts last, because their tenant has pinned a tag of theirs, for a while and up to a quota."""

from collections.abc import Callable
from dataclasses import dataclass

from hotspan.core.clock import Clock, SystemClock
from hotspan.core.terms import Terms
from hotspan.core.types import ChunkKey

MAX_PINS = 64
"""Of one tenant at a time."""


@dataclass(frozen=True, slots=True)
class Pin:
    """Chunks of a tenant that carry all of some labels.

    bytes: of them at most, in each tier. until_s: monotonic.
    """

    tenant: int
    labels: frozenset[int]
    bytes: int
    until_s: float

    def takes(self, terms: Terms) -> bool:
        """Whether it is about a chunk under these terms."""
        return terms.tenant == self.tenant and self.labels <= terms.labels


class Pins:
    """The pins of all tenants, for all tiers."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._pins: dict[tuple[int, frozenset[int]], Pin] = {}

    def put(self, tenant: int, labels: frozenset[int], size: int, hold_s: float) -> bool:
        """Pin labels, in place of an earlier pin of the same; with a size of 0 only that is ended.

        False if the tenant has too many pins.
        """
        name, live = (tenant, labels), self.live()
        self._pins.pop(name, None)
        if size <= 0:
            return True
        if sum(pin.tenant == tenant and pin.labels != labels for pin in live) >= MAX_PINS:
            return False
        self._pins[name] = Pin(tenant, labels, size, self._clock.monotonic() + hold_s)
        return True

    def live(self) -> list[Pin]:
        """Those that have not ended."""
        if self._pins:
            now_s = self._clock.monotonic()
            self._pins = {name: pin for name, pin in self._pins.items() if pin.until_s > now_s}
        return list(self._pins.values())


class Kept:
    """What pins keep in one tier: as many chunks as their quotas hold, and no more of a tenant than its floor.

    A chunk counts with those that it stands on, from the moment in which it would have been evicted.

    floor: how many chunks others leave a tenant. parent: of a chunk that is here.
    """

    def __init__(
        self,
        pins: Pins,
        chunk_bytes: int,
        floor: Callable[[int], int],
        parent: Callable[[ChunkKey], ChunkKey | None],
    ) -> None:
        self._pins = pins
        self._chunk_bytes = chunk_bytes
        self._floor = floor
        self._parent = parent
        self._kept: dict[Pin, set[ChunkKey]] = {}

    @property
    def chunks(self) -> int:
        """How many chunks are kept."""
        self._forget()
        return sum(map(len, self._kept.values()))

    def of(self, tenant: int) -> int:
        """How many are kept of a tenant."""
        return sum(len(keys) for pin, keys in self._kept.items() if pin.tenant == tenant)

    def keeps(self, key: ChunkKey, terms: Callable[[ChunkKey], Terms]) -> bool:
        """Whether a chunk, which would go now, is to go only if nothing else may."""
        live = self._pins.live()
        if not live and not self._kept:
            return False
        self._forget()
        found = terms(key)
        return any(self._takes(pin, key) for pin in live if pin.takes(found))

    def left(self, key: ChunkKey) -> None:
        """A chunk is here no longer."""
        for keys in self._kept.values():
            keys.discard(key)

    def _takes(self, pin: Pin, key: ChunkKey) -> bool:
        kept = self._kept.setdefault(pin, set())
        path: set[ChunkKey] = set()
        at: ChunkKey | None = key
        while at is not None and at not in kept:
            path.add(at)
            at = self._parent(at)
        most = min(pin.bytes // self._chunk_bytes, len(kept) + self._floor(pin.tenant) - self.of(pin.tenant))
        if len(kept) + len(path) > most:
            kept.discard(key)  # the floor is lower now, if it was kept
            return False
        kept |= path
        return True

    def _forget(self) -> None:
        """Drop what ended pins kept."""
        if self._kept:
            live = set(self._pins.live())
            self._kept = {pin: keys for pin, keys in self._kept.items() if pin in live}
