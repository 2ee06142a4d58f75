"""Copies of objects on disk: written in the background, read on demand, verified, and never waited for by the loop.

The disk engine (tiers/disk_slab.py) keeps them. A disk that hangs or fails is left alone for a while: nothing is begun,
what has not begun is dropped, and what is there counts as missing.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hotspan.core.breaker import Breaker, BreakerState
from hotspan.core.clock import Clock
from hotspan.core.frame import HEADER_BYTES
from hotspan.core.terms import Terms
from hotspan.core.types import MIB, ChunkKey
from hotspan.daemon.stored import StoredObject
from hotspan.l2.base import PREAMBLE_BYTES, updated
from hotspan.tiers.base import Fault, Transfer
from hotspan.tiers.directory import DirectoryLayout
from hotspan.tiers.disk_options import DiskOptions
from hotspan.tiers.disk_slab import DiskSlab
from hotspan.tiers.log import LogFile
from hotspan.tiers.owned import explained
from hotspan.tiers.record import Record, pack, unpack
from hotspan.tiers.shares import Shares

logger = logging.getLogger(__name__)

LAYOUT = DirectoryLayout("the daemon", "objects", ("log", "log.new"), has_log=False)
SLOT_BYTES = MIB // 2
"""What objects waste at most, each; the table of a slab takes 256 bytes of memory per slot."""

STALL_S = 1.0
"""How long nothing of what is in flight may end, besides the time that four of the largest take at 25 MB/s."""

MAX_WAIT_S = 1.0
"""How long a client waits at most to hear that something is durable."""

_LEAST_BYTES_PER_S = 25_000_000
_MAX_STORES = 2  # of the threads' work, so that others are free to read
_MAX_LOADS = 256
_FOREIGN = b"object of others than hotspan".ljust(32, b"\0")
"""In the place of a namespace: the object is not hotspan's."""


def disk_options(path: Path, size: int) -> DiskOptions:
    """How the daemon's slab works. Objects differ in size, so that floors and quotas of tenants would mean nothing."""
    return DiskOptions(path, size, store_depth=_MAX_STORES, shares=Shares(default_floor=0.0))


@dataclass(slots=True)
class DiskCounts:
    """What happened on disk since the start.

    late:    objects that were evicted from memory before they were written.
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


class DiskCopies:
    """Copies in a directory, and the file for the log of invalidations.

    post:    has the loop's thread call something; from any thread.
    on_gone: told of a copy that is there no more.
    settles: called on another thread before anything is told to be durable; may raise OSError.
    Raises:  DirectoryError from the constructor only.
    """

    def __init__(self, options: DiskOptions, clock: Clock, slot_bytes: int = SLOT_BYTES) -> None:
        self.counts = DiskCounts()
        self.post: Callable[[Callable[[], object]], None] = lambda call: None
        self.on_gone: Callable[[ChunkKey], None] = lambda key: None
        self.settles: Callable[[], None] = lambda: None
        self.slab = DiskSlab(
            *(options, slot_bytes, clock),
            layout=LAYOUT,
            has_gaps=True,
            settles=lambda: self.settles(),
            landed=lambda: self.post(self.slab.finished),
            gone=lambda key: self.on_gone(key),
        )
        try:
            self.log = LogFile(options.files, options.directory / "log")
        except OSError as error:
            self.slab.close(0.0)
            raise explained(options.directory, error, LAYOUT.whose) from error
        self._clock = clock
        self._breaker = Breaker(clock)
        self._loads = self._stores = 0
        self._moved_s = 0.0  # when something in flight last ended, or the first began
        self._stall_s = STALL_S
        self._is_hung = False

    def adopt(self) -> list[StoredObject]:
        """What an earlier daemon left; to be called once, first."""
        self.slab.adopt()
        return [_object(self.slab.record(key)) for key in self.slab]

    def __len__(self) -> int:
        return len(self.slab)

    @property
    def used_bytes(self) -> int:
        """What is not free."""
        return self.slab.usage().bytes

    @property
    def capacity_bytes(self) -> int:
        """How much there is room for."""
        return self.slab.usage().capacity_bytes

    @property
    def bad_slots(self) -> int:
        """Slots that are set aside."""
        return self.slab.usage().bad_slots

    @property
    def is_up(self) -> bool:
        """Whether it takes part."""
        return not self._is_hung and self._breaker.state is not BreakerState.OPEN

    def can_store(self) -> bool:
        """Whether `store` may be called."""
        return not self._is_hung and self._breaker.can_take and self.slab.can_store()

    def can_load(self) -> bool:
        """Whether `load` may be called."""
        return not self._is_hung and self._breaker.can_take and self._loads < _MAX_LOADS

    def store(self, stored: StoredObject, parts: Sequence[memoryview], done: Callable[[Fault | None], None]) -> bool:
        """Write an object that lies in `parts`, whole pages; others are evicted for it. False if there is no room.

        done: told on the loop. The bytes stay until then.
        """
        is_begun = self.slab.store(_record(stored), parts, told=partial(self._end, done))
        self.counts.evicted = self.slab.losses.evicted
        if is_begun:
            self._stores += 1
            self._begin(stored.size)
        return is_begun

    def load(self, stored: StoredObject, parts: Sequence[memoryview], done: Callable[[Fault | None], None]) -> bool:
        """Read a copy into `parts`, whole pages, which nobody else uses until `done` is told. False if it is gone."""
        is_begun = self.slab.load(stored.key, parts, told=partial(self._end, done))
        if is_begun:
            self._loads += 1
            self._begin(stored.size)
        return is_begun

    def note(self, stored: StoredObject) -> None:
        """The updates of an object changed."""
        if stored.record and stored.key in self.slab:
            self.slab.stamp(stored.key, _record(stored).terms)

    def use(self, keys: Iterable[ChunkKey]) -> None:
        """These objects were used, in this order: a chain leaf first."""
        self.slab.touch(keys)

    def forget(self, key: ChunkKey) -> None:
        """An object's copy is gone; across a crash, too, once that is settled."""
        self.slab.discard(key)

    def settle(self, tell: Callable[[bool], None]) -> None:
        """Say, from any thread, whether all that was changed so far stays so after a crash."""
        self.slab.settle(tell)

    async def settled(self, timeout_s: float | None = None) -> bool:
        """The same; False, too, if the disk does not say so in time."""
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def tell(is_durable: bool) -> None:
            if not done.done():
                done.set_result(is_durable)

        self.settle(lambda is_durable: self.post(partial(tell, is_durable)))
        try:
            return await asyncio.wait_for(done, MAX_WAIT_S if timeout_s is None else timeout_s)
        except TimeoutError:
            return False

    def sweep(self) -> None:
        """See whether the disk hangs; called now and then."""
        self.slab.finished()
        self.counts.evicted = self.slab.losses.evicted
        was_hung, in_flight = self._is_hung, self._loads + self._stores
        self._is_hung = in_flight > 0 and self._clock.monotonic() - self._moved_s > self._stall_s
        if self._is_hung and not was_hung:
            self.counts.trips += 1
            logger.warning("daemon_disk_hangs path=%s: what is on it counts as missing", self.slab.directory.path)
            self.slab.give_up()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in flight."""
        return not self._loads + self._stores

    def close(self, timeout_s: float) -> None:
        """Begin nothing any more; an I/O that hangs ends with the process."""
        self.slab.close(timeout_s)
        if self.slab.is_closed:
            self.log.close()

    def check(self) -> None:
        """Raise AssertionError if the books do not agree."""
        self.slab.check_books()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _begin(self, size: int) -> None:
        self._breaker.took()
        if self._loads + self._stores == 1:
            self._moved_s, self._stall_s = self._clock.monotonic(), STALL_S
        self._stall_s = max(self._stall_s, STALL_S + 4 * size / _LEAST_BYTES_PER_S)

    def _end(self, done: Callable[[Fault | None], None], transfer: Transfer) -> None:
        if transfer.fault is not Fault.DROPPED:  # which says nothing about the disk
            self._moved_s = self._clock.monotonic()
        if transfer.is_load:
            self._loads -= 1
        else:
            self._stores -= 1
        self._judge(transfer)
        done(transfer.fault)

    def _judge(self, transfer: Transfer) -> None:
        counts, was_up = self.counts, self.is_up  # what was in flight when it was left alone is no trial
        self._breaker.gave_up()  # unless it says below how it went
        if transfer.fault is None:
            if was_up:
                self._breaker.succeeded()
            if transfer.is_load:
                counts.loaded += 1
                counts.loaded_bytes += transfer.bytes
            else:
                counts.stored += 1
                counts.stored_bytes += transfer.bytes
            return
        if transfer.fault is Fault.CORRUPT:
            counts.corrupt += 1
        elif transfer.fault in (Fault.IO, Fault.FULL):
            counts.faults += 1
            if was_up and self._breaker.failed():
                counts.trips += 1
                path, pause_s = self.slab.directory.path, self._breaker.pause_s
                logger.warning("daemon_disk_fails path=%s pause_s=%g", path, pause_s)
                self.slab.give_up()


def _record(stored: StoredObject) -> Record:
    """What the table keeps of an object. One of hotspan's own has the terms on which it is kept now."""
    own = unpack(stored.record) if stored.record else None
    if own is None or own.payload_bytes != stored.size - PREAMBLE_BYTES - HEADER_BYTES:
        return Record(stored.key, None, _FOREIGN, stored.size, Terms(), secrets.randbits(64))
    return own._replace(payload_bytes=stored.size, terms=updated(own.terms, stored.updates))


def _object(record: Record) -> StoredObject:
    """An object that is on disk only."""
    own = record._replace(payload_bytes=record.payload_bytes - PREAMBLE_BYTES - HEADER_BYTES)
    packed = b"" if record.namespace == _FOREIGN else pack(own)
    return StoredObject(record.key, record.payload_bytes, (), packed, is_saved=True, has_all_updates=False)
