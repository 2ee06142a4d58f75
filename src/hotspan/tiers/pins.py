"""Chunks that a tier evicts last, because their tenant has pinned a tag of theirs, for a while and up to a quota."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from hotspan.core.clock import Clock, SystemClock
from hotspan.core.terms import Terms
from hotspan.core.types import ChunkKey

MAX_PINS = 64
"""Of one tenant at a time."""

MAX_HELD = 256
"""Single chunks that a tenant has pinned, one for each prefix; the pin that ends first goes for another."""


@dataclass(frozen=True, slots=True)
class Pin:
    """Chunks of a tenant that carry all of some labels; or one chunk, with those that it stands on.

    bytes: of them at most, in each tier. until_s: monotonic. key: of the one chunk.
    """

    tenant: int
    labels: frozenset[int]
    bytes: int
    until_s: float
    key: ChunkKey | None = None

    def takes(self, terms: Terms) -> bool:
        """Whether it is about chunks under these terms."""
        return self.key is None and terms.tenant == self.tenant and self.labels <= terms.labels


class Pins:
    """The pins of all tenants, for all tiers."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._pins: dict[int, dict[frozenset[int] | ChunkKey, Pin]] = {}
        self._first_end_s = math.inf
        self._version = 0

    def put(self, tenant: int, labels: frozenset[int], size: int, hold_s: float) -> bool:
        """Pin labels, in place of an earlier pin of the same; with a size of 0 only that is ended.

        False if the tenant has too many pins.
        """
        self._expire()
        mine = self._pins.get(tenant, {})
        others = {name: pin for name, pin in mine.items() if name != labels}
        is_taken = size <= 0 or sum(pin.key is None for pin in others.values()) < MAX_PINS
        if size > 0 and is_taken:
            others[labels] = Pin(tenant, labels, size, self._clock.monotonic() + hold_s)
        self._pins |= {tenant: others}
        self._changed()
        return is_taken

    def hold(self, tenant: int, key: ChunkKey, size: int, hold_s: float) -> None:
        """Pin a chunk and the prefix that ends there: `size` bytes of it at most, until the later of two ends."""
        self._expire()
        mine, until_s = self._pins.setdefault(tenant, {}), self._clock.monotonic() + hold_s
        if key in mine:
            until_s = max(until_s, mine[key].until_s)
        mine[key] = Pin(tenant, frozenset(), size, until_s, key)
        held = [pin for pin in mine.values() if pin.key is not None]
        if len(held) > MAX_HELD:
            first = min(held, key=lambda pin: pin.until_s)
            mine.pop(first.key or key)
        self._changed()

    def matching(self, key: ChunkKey, terms: Terms) -> list[Pin]:
        """Those that are about a chunk under these terms."""
        mine = self._pins.get(terms.tenant, {})
        found = [pin for pin in mine.values() if pin.takes(terms)]
        return [*found, mine[key]] if key in mine else found

    def live(self) -> list[Pin]:
        """Those that have not ended."""
        self._expire()
        return list(self._each())

    def of(self, tenant: int) -> Collection[Pin]:
        """Those of one tenant that have not ended; at most MAX_PINS of labels, and MAX_HELD of single chunks."""
        self._expire()
        return self._pins[tenant].values() if tenant in self._pins else ()

    @property
    def any(self) -> bool:
        """Whether there is one that has not ended."""
        self._expire()
        return bool(self._pins)

    def version(self) -> int:
        """A number that changes whenever a pin begins or ends."""
        self._expire()
        return self._version

    def _expire(self) -> None:
        """Drop what has ended; the first end is known, so that most calls do nothing."""
        if self._first_end_s > (now_s := self._clock.monotonic()):
            return
        for tenant, pins in self._pins.items():
            self._pins[tenant] = {name: pin for name, pin in pins.items() if pin.until_s > now_s}
        self._changed()

    def _each(self) -> Iterator[Pin]:
        return (pin for pins in self._pins.values() for pin in pins.values())

    def _changed(self) -> None:
        self._pins = {tenant: pins for tenant, pins in self._pins.items() if pins}
        self._first_end_s = min((pin.until_s for pin in self._each()), default=math.inf)
        self._version += 1


class Kept:
    """What pins keep in one tier: as many chunks as their quotas hold, and no more of a tenant than its floor.

    A chunk counts with those that it stands on, from the moment in which it would have been evicted. To ask for one
    costs a walk over these and a step for each pin of its tenant, however many other tenants have pins.

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
        self._counts: dict[Pin, int] = {}
        self._keepers: dict[ChunkKey, set[Pin]] = {}
        self._version = pins.version()

    @property
    def chunks(self) -> int:
        """How many chunks are kept."""
        self._forget()
        return sum(self._counts.values())

    def of(self, tenant: int) -> int:
        """How many are kept of a tenant."""
        return sum(self._counts.get(pin, 0) for pin in self._pins.of(tenant))

    def keeps(self, key: ChunkKey, terms: Callable[[ChunkKey], Terms]) -> bool:
        """Whether a chunk, which would go now, is to go only if nothing else may."""
        self._forget()
        if not self._pins.any:
            return False
        found = terms(key)
        pins = self._pins.matching(key, found)
        if not pins:
            return False
        free = self._floor(found.tenant) - self.of(found.tenant)
        counts = self._counts
        rooms = {pin: min(pin.bytes // self._chunk_bytes - counts.get(pin, 0), free) for pin in pins}
        for pin in pins:
            if rooms[pin] < 0:  # the floor is lower now, if it was kept
                self._let_go(key, pin)
                del rooms[pin]
        return self._takes(key, rooms)

    def left(self, key: ChunkKey) -> None:
        """A chunk is here no longer."""
        for pin in self._keepers.pop(key, ()):
            self._counts[pin] -= 1

    def check(self) -> None:
        """Raise AssertionError if the counts are not those of what is kept."""
        found = Counter(pin for keepers in self._keepers.values() for pin in keepers)
        if found != +Counter(self._counts):
            raise AssertionError(f"{found} are kept, {self._counts} are counted")

    def _takes(self, key: ChunkKey, rooms: dict[Pin, int]) -> bool:
        """Whether one of some pins has room for a chunk and those that it stands on, as far as it lacks them."""
        path: list[ChunkKey] = []
        at: ChunkKey | None = key
        most = max(rooms.values(), default=-1)
        while at is not None and len(path) <= most:
            for pin in rooms.keys() & self._keepers.get(at, frozenset()):
                if rooms.pop(pin) >= len(path):
                    return self._keep(path, pin)
            path.append(at)
            at = self._parent(at)
        whole = next((pin for pin, room in rooms.items() if at is None and room >= len(path)), None)
        return whole is not None and self._keep(path, whole)

    def _keep(self, path: Iterable[ChunkKey], pin: Pin) -> bool:
        for key in path:
            self._keepers.setdefault(key, set()).add(pin)
            self._counts[pin] = self._counts.get(pin, 0) + 1
        return True

    def _let_go(self, key: ChunkKey, pin: Pin) -> None:
        keepers = self._keepers.get(key, set())
        if pin in keepers:
            keepers.remove(pin)
            self._counts[pin] -= 1
            if not keepers:
                del self._keepers[key]

    def _forget(self) -> None:
        """Drop what ended pins kept."""
        version = self._pins.version()
        if version == self._version:
            return
        self._version = version
        ended = self._counts.keys() - set(self._pins.live())
        self._counts = {pin: count for pin, count in self._counts.items() if pin not in ended}
        if ended:
            left = {key: keepers - ended for key, keepers in self._keepers.items()}
            self._keepers = {key: keepers for key, keepers in left.items() if keepers}
