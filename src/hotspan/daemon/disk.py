"""Copies of objects on disk: written in the background, read on demand, verified, and never waited for by the loop.

    store --threads--> written --keep--> a copy --evict, forget--> free
                                            |
                                            +--load--> the segment

The loop's thread owns the books. Threads move bytes, and say on the loop when they have. A disk that hangs or fails is
left alone for a while: nothing is begun, what has not begun is dropped, and what is there counts as missing.
"""

import logging
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial

from hotspan.core.breaker import Breaker, BreakerState
from hotspan.core.clock import Clock
from hotspan.core.types import PAGE_BYTES, ChunkKey, round_up
from hotspan.daemon.directory import SlabDirectory
from hotspan.daemon.journal import Notes
from hotspan.daemon.space import Extent, FreeSpace
from hotspan.daemon.stored import DiskCopy, StoredObject
from hotspan.tiers.eviction import LeafArc, Shares
from hotspan.tiers.io import IoQueue, IoThreads

logger = logging.getLogger(__name__)

THREADS = 4
STALL_S = 1.0
"""An I/O that moves nothing for so long hangs; when two do, so does the disk."""

_MAX_STORES = 2  # of the threads' work, so that others are free to read
_MAX_LOADS = 256
_COPY = b"O"  # followed by a key: a copy, as `_pack` has it
_HEAD = struct.Struct("<Q16sH")
_EXTENT = struct.Struct("<QQ")


class Outcome(Enum):
    """How a transfer ended.

    FAULT: with an error. CORRUPT: what was read is not what was written. DROPPED: never begun, since the disk hangs or
    fails.
    """

    DONE = "done"
    FAULT = "fault"
    CORRUPT = "corrupt"
    DROPPED = "dropped"


@dataclass(slots=True)
class DiskCounts:
    """What happened on disk since the start.

    late:    objects that gave way in memory before they were written.
    corrupt: copies that were not what had been written. trips: how often the disk was left alone.
    """

    stored: int = 0
    stored_bytes: int = 0
    loaded: int = 0
    loaded_bytes: int = 0
    evicted: int = 0
    late: int = 0
    faults: int = 0
    corrupt: int = 0
    trips: int = 0


@dataclass(slots=True, eq=False)
class _Flight:
    """A transfer. moved_s: when it last moved something; None before it has begun."""

    clock: Clock
    is_load: bool
    moved_s: float | None = None

    def move(self) -> None:
        self.moved_s = self.clock.monotonic()


class DiskSlab:
    """Copies in a directory.

    post:       has the loop's thread call something; from any thread.
    on_evicted: told of a copy that gave way to another, after it is gone.
    """

    def __init__(
        self,
        directory: SlabDirectory,
        notes: Notes,
        clock: Clock,
        post: Callable[[Callable[[], object]], None],
        queue: Callable[[str, int, int], IoQueue] = IoThreads,
    ) -> None:
        self.counts = DiskCounts()
        self.capacity_bytes = directory.bytes
        self.on_evicted: Callable[[ChunkKey], None] = lambda key: None
        self._directory = directory
        self._notes = notes
        self._clock = clock
        self._post = post
        self._copies: dict[ChunkKey, DiskCopy] = {}
        self._writing: set[DiskCopy] = set()
        self._space = FreeSpace(0, directory.bytes)
        self._order = LeafArc(directory.bytes // PAGE_BYTES, Shares(default_floor=0.0))
        self._flights: set[_Flight] = set()
        self._breaker = Breaker(clock)
        self._is_hung = self._is_lost = False
        self._queue = queue("daemon-disk", THREADS, PAGE_BYTES)

    def adopt(self) -> list[StoredObject]:
        """What an earlier daemon left, as far as it is within the slab; to be called once, first."""
        said = {name: data for name, data in self._notes.found.items() if name.startswith(_COPY)}
        found = {name: _unpack(ChunkKey(name[len(_COPY) :]), data) for name, data in said.items()}
        found = {name: stored for name, stored in found.items() if _end_of(stored) <= self.capacity_bytes}
        copies = {stored.key: stored.copy for stored in found.values() if stored.copy is not None}
        try:
            self._space = FreeSpace(0, self.capacity_bytes, (e for copy in copies.values() for e in copy.extents))
            self._copies = copies
        except ValueError:
            logger.warning(
                "daemon_disk_unclear path=%s: two copies in one place, all are forgotten", self._directory.path
            )
            found = {}
        for name in said.keys() - found.keys():
            self._notes.put(name, None)
        self._order.adopt((stored.key, *stored.standing) for stored in found.values())
        return list(found.values())

    def __len__(self) -> int:
        return len(self._copies)

    @property
    def used_bytes(self) -> int:
        """What is not free."""
        return self.capacity_bytes - self._space.bytes

    @property
    def is_up(self) -> bool:
        """Whether it takes part."""
        return not (self._is_lost or self._is_hung or self._breaker.state is BreakerState.OPEN)

    def can_store(self) -> bool:
        """Whether `store` may be called."""
        return self.is_up and sum(not each.is_load for each in self._flights) < _MAX_STORES

    def can_load(self) -> bool:
        """Whether `load` may be called."""
        return self.is_up and sum(each.is_load for each in self._flights) < _MAX_LOADS

    def store(self, size: int, parts: Sequence[memoryview], done: Callable[[Outcome, DiskCopy | None], None]) -> bool:
        """Write a value that lies in `parts`, whole pages; others give way for it. False if there is no room.

        done: told on the loop, with a copy that is to be kept or freed, if it went well. The bytes stay until then.
        """
        extents = self._take(size)
        if extents is None:
            return False
        copy, flight = DiskCopy(size, extents, b""), self._begin(is_load=False)
        self._writing.add(copy)

        def end(outcome: Outcome) -> None:
            self._end(flight, outcome)
            if outcome is Outcome.DONE:
                done(outcome, copy)
                return
            self.free(copy)
            done(outcome, None)

        self._queue.submit(
            lambda scratch: self._write(copy, parts, flight, end),
            lambda: self._post(partial(end, Outcome.DROPPED)),
            urgent=False,
        )
        return True

    def load(self, copy: DiskCopy, parts: Sequence[memoryview], done: Callable[[Outcome], None]) -> None:
        """Read a copy into `parts`, whole pages, which nobody else uses until `done` is told on the loop."""
        flight = self._begin(is_load=True)
        copy.readers += 1

        def end(outcome: Outcome) -> None:
            self._end(flight, outcome)
            copy.readers -= 1
            if outcome is Outcome.DONE:
                self.counts.loaded += 1
                self.counts.loaded_bytes += copy.size
            done(outcome)

        self._queue.submit(
            lambda scratch: self._read(copy, parts, flight, end),
            lambda: self._post(partial(end, Outcome.DROPPED)),
            urgent=True,
        )

    def keep(self, stored: StoredObject, copy: DiskCopy) -> None:
        """A copy that was written is this object's: from now on it outlives the daemon."""
        if self._is_lost:
            self.free(copy)
            return
        self._writing.remove(copy)
        stored.copy = self._copies[stored.key] = copy
        self._order.add(stored.key, *stored.standing)
        self._notes.put(_COPY + stored.key, _pack(stored, copy))
        self.counts.stored += 1
        self.counts.stored_bytes += copy.size

    def free(self, copy: DiskCopy) -> None:
        """A copy that was written is nobody's."""
        self._writing.remove(copy)
        self._space.give(copy.extents)

    def use(self, keys: Iterable[ChunkKey]) -> None:
        """These objects were used, in this order: a chain leaf first."""
        self._order.touch(keys)

    def forget(self, key: ChunkKey, *, evicted: bool = False) -> None:
        """An object's copy is gone; across a crash, too, once the notes are durable."""
        copy = self._copies.pop(key)
        self._order.remove(key, evicted=evicted)
        self._notes.put(_COPY + key, None)
        self._space.give(copy.extents)  # who still reads it may get another's bytes, and will not take them for its own

    def lose(self) -> None:
        """Nothing can be noted any more: no copy is there, and none is made."""
        self._is_lost = True
        self._queue.drop()

    def sweep(self) -> None:
        """See whether the disk hangs; called now and then."""
        was_hung, self._is_hung = self._is_hung, self._hanging() > 1
        if self._is_hung and not was_hung:
            self.counts.trips += 1
            logger.warning("daemon_disk_hangs path=%s: what is on it counts as missing", self._directory.path)
            self._queue.drop()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in flight."""
        return not self._flights

    def close(self, timeout_s: float) -> bool:
        """Begin nothing any more; False if an I/O hangs, whose thread then ends with the process."""
        return self._queue.close(timeout_s)

    def check(self) -> None:
        """Raise AssertionError if the books do not agree."""
        taken = [*self._copies.values(), *self._writing]
        self._space.check(extent for copy in taken for extent in copy.extents)
        self._order.check()
        if len(self._order) != len(self._copies) or any(key not in self._order for key in self._copies):
            raise AssertionError("a copy is not in the order of eviction")

    # -- inside ----------------------------------------------------------------------------------------------------

    def _take(self, size: int) -> Sequence[Extent] | None:
        """Room for a value. What is being read stays, and so does what stands behind it."""
        if round_up(size, PAGE_BYTES) > self.capacity_bytes:
            return None
        while not self._space.can_take(size):
            victim = self._order.victim(0, lambda key: not self._copies[key].readers)
            if victim is None:
                return None
            self.forget(victim, evicted=True)
            self.counts.evicted += 1
            self.on_evicted(victim)
        return self._space.take(size)

    def _begin(self, *, is_load: bool) -> _Flight:
        flight = _Flight(self._clock, is_load)
        self._flights.add(flight)
        return flight

    def _end(self, flight: _Flight, outcome: Outcome) -> None:
        self._flights.remove(flight)
        if outcome is Outcome.DONE:
            if self.is_up:  # what was in flight when it rested is no trial
                self._breaker.succeeded()
        elif outcome is Outcome.CORRUPT:
            self.counts.corrupt += 1
        elif outcome is Outcome.FAULT:
            self.counts.faults += 1
            if self.is_up and self._breaker.failed():
                self.counts.trips += 1
                logger.warning("daemon_disk_fails path=%s pause_s=%g", self._directory.path, self._breaker.pause_s)
                self._queue.drop()

    def _hanging(self) -> int:
        since = self._clock.monotonic() - STALL_S
        return sum(each.moved_s is not None and each.moved_s < since for each in self._flights)

    # -- the threads: touch only what they were given ---------------------------------------------------------------

    def _write(
        self, copy: DiskCopy, parts: Sequence[memoryview], flight: _Flight, end: Callable[[Outcome], None]
    ) -> None:
        flight.move()
        outcome = Outcome.DONE
        try:
            copy.check = self._directory.write(parts, copy.size, copy.extents, flight.move)
        except OSError as error:
            outcome = Outcome.FAULT
            logger.warning("daemon_disk_store_failed bytes=%d error=%s", copy.size, str(error))
        self._post(partial(end, outcome))

    def _read(
        self, copy: DiskCopy, parts: Sequence[memoryview], flight: _Flight, end: Callable[[Outcome], None]
    ) -> None:
        flight.move()
        outcome = Outcome.DONE
        try:
            if not self._directory.read(parts, copy.size, copy.extents, copy.check, flight.move):
                outcome = Outcome.CORRUPT
                logger.warning("daemon_disk_value_refused bytes=%d: it is not what was written", copy.size)
        except OSError as error:
            outcome = Outcome.FAULT
            logger.warning("daemon_disk_load_failed bytes=%d error=%s", copy.size, str(error))
        self._post(partial(end, outcome))


def _pack(stored: StoredObject, copy: DiskCopy) -> bytes:
    extents = b"".join(_EXTENT.pack(*extent) for extent in copy.extents)
    return _HEAD.pack(copy.size, copy.check, len(copy.extents)) + extents + stored.record


def _unpack(key: ChunkKey, data: bytes) -> StoredObject:
    size, check, count = _HEAD.unpack_from(data)
    end = _HEAD.size + count * _EXTENT.size
    extents = [Extent(*each) for each in _EXTENT.iter_unpack(data[_HEAD.size : end])]
    return StoredObject(key, size, (), data[end:], copy=DiskCopy(size, extents, check))


def _end_of(stored: StoredObject) -> int:
    return max(extent.end for extent in stored.copy.extents) if stored.copy is not None else 0
