"""What the I/O threads do for a slab: stores, loads, records, tests of slots; and what they report to its owner.

the owner's thread   store, load, free, write        then, when `landed` is set, `reports`
the I/O threads      touch only what they were given
"""

import logging
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from msgspec import Struct

from hotspan.core.clock import Clock
from hotspan.core.types import ChunkKey
from hotspan.tiers.base import Fault, Transfer
from hotspan.tiers.disk_jobs import FrameJobs
from hotspan.tiers.io import IoQueue
from hotspan.tiers.places import PlaceTests, Verdict, is_suspect
from hotspan.tiers.record import Flaw, Record
from hotspan.tiers.table import DiskTable

logger = logging.getLogger(__name__)


class Entry(Struct, eq=False, gc=False):
    """A chunk on disk. Not readable while `writing` or `doubtful`; its slots are not reused while `readers`.

    slot, more: the first, and the others in order.
    doubtful:   a read failed, and a test of its slots is to tell whether they or the disk did. Tests are readers, too.
    flaws:      of its slots that failed their test.
    """

    slot: int
    key: ChunkKey
    is_own: bool  # of the slab's namespace
    expires_s: int
    writing: bool = False
    joined: bool = False  # its terms changed meanwhile
    readers: int = 0
    deleted: bool = False
    doubtful: bool = False
    more: Sequence[int] = ()
    flaws: dict[int, Flaw] | None = None

    @property
    def slots(self) -> Sequence[int]:
        return (self.slot, *self.more)


Told = Callable[[Transfer], None]
"""Called by `finished`, when the books say already what a transfer did."""


@dataclass(frozen=True, slots=True)
class Done:
    """What an I/O thread reports: a transfer of `entry`, the test of its slots, or (entry None) that the records of
    slots are free on disk. is_suspect: a test of the transfer's slots follows."""

    slots: Sequence[int]
    entry: Entry | None = None
    transfer: Transfer | None = None
    is_suspect: bool = False
    told: Told | None = None
    verdict: Verdict | None = None


class SlabTransfers:
    """The transfers of one slab, in `queue`. Its owner submits them on one thread, and takes their reports there.

    landed: set when there is a report. told: called then, too, from any thread.
    """

    def __init__(
        self,
        queue: IoQueue,
        jobs: FrameJobs,
        tests: PlaceTests,
        table: DiskTable,
        clock: Clock,
        told: Callable[[], None],
    ) -> None:
        self.landed = threading.Event()
        self._queue = queue
        self._jobs = jobs
        self._tests = tests
        self._table = table
        self._clock = clock
        self._told = told
        self._done: deque[Done] = deque()

    def store(self, entry: Entry, record: Record, payload: Sequence[memoryview], told: Told | None) -> None:
        """Write a chunk, which stays unchanged until the transfer is reported, and its records."""
        self._queue.submit(
            lambda scratch: self._store(entry, record, scratch, payload, told),
            lambda: self._drop(entry, False, told),
            urgent=False,
        )

    def load(self, entry: Entry, record: Record, into: Sequence[memoryview], told: Told | None) -> None:
        """Read a chunk."""
        self._queue.submit(
            lambda scratch: self._load(entry, record, scratch, into, told),
            lambda: self._drop(entry, True, told),
            urgent=True,
        )

    def free(self, slots: Sequence[int]) -> None:
        """Write that nothing is in these slots, as the table says, and report it."""
        self._queue.submit(lambda scratch: self._free_slots(slots), lambda: self._freed(slots), urgent=False)

    def write(self, slots: Sequence[int]) -> None:
        """Write the records of slots."""
        self._queue.submit(lambda scratch: self._write_records(slots), lambda: None, urgent=False)

    def reports(self) -> Iterator[Done]:
        """What ended since the last call, and meanwhile, in its order."""
        self.landed.clear()
        while self._done:
            yield self._done.popleft()

    def land(self) -> None:
        """`reports` has something, or the room has."""
        self.landed.set()
        try:
            self._told()
        except Exception as error:  # its owner is ending: what landed is found at the next look
            logger.warning("disk_not_told error=%s", repr(error))

    # -- the I/O threads: touch only what they were given -----------------------------------------------------------

    def _store(
        self, entry: Entry, record: Record, scratch: memoryview, parts: Sequence[memoryview], told: Told | None
    ) -> None:
        slots = entry.slots
        fault, seconds, packing = self._jobs.store(slots, record, scratch, parts, lambda: self._table.write_all(slots))
        now_s = self._clock.monotonic()
        transfer = Transfer(entry.key, False, fault, record.payload_bytes, seconds, packing, now_s)
        self._end(entry, slots, transfer, told)

    def _load(
        self, entry: Entry, record: Record, scratch: memoryview, parts: Sequence[memoryview], told: Told | None
    ) -> None:
        slots = entry.slots
        fault, seconds, packing = self._jobs.load(slots, record, scratch, parts)
        now_s = self._clock.monotonic()
        self._end(entry, slots, Transfer(entry.key, True, fault, record.chunk_bytes, seconds, packing, now_s), told)

    def _free_slots(self, slots: Sequence[int]) -> None:
        self._write_records(slots)
        self._freed(slots)

    def _freed(self, slots: Sequence[int]) -> None:
        self._done.append(Done(slots))
        self.land()

    def _drop(self, entry: Entry, is_load: bool, told: Told | None) -> None:
        self._end(entry, (), Transfer(entry.key, is_load, Fault.DROPPED, 0, 0.0), told)

    def _write_records(self, slots: Iterable[int]) -> None:
        try:
            self._table.write_all(slots)
        except OSError as error:
            logger.warning("disk_records_failed error=%s", str(error))  # a stale record costs a miss

    def _end(self, entry: Entry, slots: Sequence[int], transfer: Transfer, told: Told | None) -> None:
        """Report a transfer; and then, since a request may wait for that, test its slots if they are suspect."""
        suspect = is_suspect(transfer)
        self._done.append(Done(slots, entry, transfer, suspect, told))
        self.land()
        if suspect:
            try:
                verdict = self._tests.after(transfer, slots)
            except Exception:  # such as too little memory: the slots are held until there is a verdict
                logger.error("disk_slots_not_tested error=%s", traceback.format_exc())
                verdict = Verdict(False, {})
            self._done.append(Done(slots, entry, verdict=verdict))
            self.land()
