"""The disk engine: chunks of any size in equal slots of one slab, O_DIRECT, a record per slot, every read verified.

A chunk is one frame (core/frame.py) in as few slots as hold it; they need not be adjacent, so that space never becomes
too fragmented for a chunk. The slots of one chunk have the same record, but for the number of their part.
"""

import logging
import time
from collections.abc import Callable, Sequence

from hotspan.core.clock import Clock, SystemClock
from hotspan.core.frame import HEADER_BYTES
from hotspan.core.terms import Scope
from hotspan.core.types import ChunkKey
from hotspan.tiers.base import Durable, Fault, TierUsage, Transfer
from hotspan.tiers.commit import GroupCommit
from hotspan.tiers.directory import TIER, DirectoryLayout, OpenDirectory, open_directory
from hotspan.tiers.disk_jobs import FrameJobs
from hotspan.tiers.disk_options import DiskOptions
from hotspan.tiers.io import FrameFile, staging_bytes
from hotspan.tiers.places import PlaceTests, Verdict
from hotspan.tiers.record import Record
from hotspan.tiers.room import SlotRoom
from hotspan.tiers.slab_books import SlabBooks
from hotspan.tiers.slab_transfers import Entry, SlabTransfers, Told

logger = logging.getLogger(__name__)

TICK_S = 1.0
"""How often the free space of the file system is looked at, and a table that changed is flushed."""


class DiskSlab(SlabBooks):
    """Chunks in a directory that this process owns. One thread calls the methods, which return at once; `adopt` first.

    chunk_bytes: of the largest payload that is expected; what fills a slot by default.
    namespace: chunks of others take space and are not found; None: those of all are found.
    has_gaps:  whether a chunk may be here without its parent.
    settles:   called before `settle` tells that something is durable, on the log's thread; may raise OSError.
    landed:    called from any thread when `finished` has something to report.
    gone:      told of each chunk that was evicted or deleted.
    Raises:    DirectoryError from the constructor only (tiers/directory.py says when).
    """

    def __init__(
        self,
        options: DiskOptions,
        slot_bytes: int,
        clock: Clock | None = None,
        *,
        chunk_bytes: int | None = None,
        layout: DirectoryLayout = TIER,
        namespace: bytes | None = None,
        has_gaps: bool = False,
        settles: Callable[[], None] = lambda: None,
        landed: Callable[[], None] = lambda: None,
        gone: Callable[[ChunkKey], None] = lambda key: None,
    ) -> None:
        self._store_depth = options.store_depth
        self._settles = settles
        chunk_bytes = slot_bytes - HEADER_BYTES if chunk_bytes is None else chunk_bytes
        clock = clock or SystemClock()
        directory = _opened(options, slot_bytes, chunk_bytes, layout)
        slot_bytes = directory.geometry.slot_bytes
        frames = FrameFile(options.files, directory.slab_fd, slot_bytes, options.pace)
        jobs = FrameJobs(frames, options.keys, clock, options.pace, options.packer)
        scratch = HEADER_BYTES + (staging_bytes(max(chunk_bytes, slot_bytes)) if options.keys is not None else 0)
        self._queue = options.queue("disk", options.threads, scratch)
        self._log_queue = options.queue("disk-log", 1, HEADER_BYTES)
        self._room_queue = options.queue("disk-room", 1, HEADER_BYTES)
        self._commits = GroupCommit(self._log_queue, self._write_log)
        self.chunk_slots = directory.geometry.slots_for(chunk_bytes)
        tests = PlaceTests(directory, clock)
        transfers = SlabTransfers(self._queue, jobs, tests, directory.table, clock, landed)
        room = SlotRoom(
            directory.space,
            self._room_queue,
            directory.geometry.slots,
            directory.free,
            directory.bare,
            step=max((options.step_bytes or 0) // slot_bytes, self.chunk_slots),
            landed=transfers.land,
            least=self.chunk_slots,
            aside=len(directory.table.aside()),
        )
        super().__init__(
            directory, room, transfers, options.shares, clock, namespace=namespace, has_gaps=has_gaps, gone=gone
        )
        self._storing = 0
        self._ticked_s = clock.monotonic()
        self._flushing = False
        self.is_closed = False

    def can_store(self) -> bool:
        """Whether the queue has room for a store."""
        return self._storing < self._store_depth and not self._room.is_growing

    def store(
        self, record: Record, payload: Sequence[memoryview], *, may_evict: bool = True, told: Told | None = None
    ) -> bool:
        """Start to write a chunk, which stays unchanged until the transfer is reported. False if there is no room.

        Without `has_gaps` also if its parent is not here: behind a gap no invalidation would reach it.
        Shape: payload: whole pages that hold `record.payload_bytes`.
        """
        key = record.key
        if key in self._entries or (self._is_behind_gap(record.parent) and not self._has_gaps):
            return False
        slots = self._take_slots(self.directory.geometry.slots_for(record.payload_bytes), record, may_evict=may_evict)
        if slots is None:
            return False
        entry = Entry(slots[0], key, True, record.terms.expires_s, writing=True, more=tuple(slots[1:]))
        self._put(entry, record)
        self._entries[key] = entry
        self._lru.add(key, record.parent, record.terms.tenant)
        self._lru.sized(key, len(slots))
        self._storing += 1
        self._transfers.store(entry, record, payload, told)
        return True

    def load(self, key: ChunkKey, into: Sequence[memoryview], told: Told | None = None) -> bool:
        """Start to read a chunk; False if it can't be read now."""
        entry = self._readable(key)
        if entry is None:
            return False
        entry.readers += 1
        self._transfers.load(entry, self._table.record(entry.slot), into, told)
        return True

    def finished(self) -> list[Transfer]:
        """Transfers that ended since the last call; brings the books in line with them."""
        now = self._clock.monotonic()
        if not self._transfers.landed.is_set() and now - self._ticked_s < TICK_S:
            return []
        transfers: list[Transfer] = []
        for done in self._transfers.reports():
            if done.entry is not None and done.verdict is not None:
                self._judge(done.entry, done.verdict)
                continue
            if done.entry is None or done.transfer is None:
                for slot in done.slots:
                    self._room.give(slot)
                continue
            self._settle(done.entry, done.transfer, done.is_suspect)
            transfers.append(done.transfer)
            if done.told is not None:
                done.told(done.transfer)
        self._make_space(self._room.settle())
        if now - self._ticked_s >= TICK_S:
            self._ticked_s = now
            self._tick()
        return transfers

    def settle(self, durable: Durable) -> None:
        """Call `durable` when nothing that was changed so far can come back after a crash, or that can't be had."""
        self._commits.submit((), durable)

    def usage(self) -> TierUsage:
        """How full it is, in slots."""
        used, capacity, bad = self._room.used, self._room.capacity, self._room.aside
        sizes = (used * self.slot_bytes, capacity * self.slot_bytes)
        return TierUsage(*(used, capacity, *sizes, self._lru.tenants()), bad_slots=bad, bad_bytes=bad * self.slot_bytes)

    def give_up(self) -> None:
        """Begin no transfer that has not begun, and report it as dropped. The log goes on: receipts wait for it."""
        self._queue.drop()
        self._room_queue.drop()
        self._commits.give_up()

    def close(self, timeout_s: float) -> None:
        """Finish what was submitted, at most `timeout_s`, and let go of all resources."""
        if self.is_closed:
            return
        deadline = time.monotonic() + timeout_s
        if self._queue.drain(timeout_s):
            self.finished()  # what was deleted while it was written has a record now, and loses it here
        ended = [queue.close(max(0.0, deadline - time.monotonic())) for queue in (self._queue, self._room_queue)]
        self._log_queue.submit(lambda scratch: self._flush(), self._flushed, urgent=False)
        if self._log_queue.close(max(0.0, deadline - time.monotonic())) and all(ended):
            self.is_closed = True
            if self._table.is_dirty:  # the log had no time for it: tags that were joined must not get lost
                self._flush()
            self.directory.close()
        else:
            # An I/O that hangs still uses the descriptors: the process's end closes them, and frees the lock.
            logger.warning("disk_close_timed_out path=%s timeout_s=%g", self.directory.path, timeout_s)

    def check(self) -> None:
        """Raise AssertionError if the books do not agree (for tests; call with no transfer unreported)."""
        if not self._queue.drain(5.0) or self.finished() or not self._queue.drain(5.0) or self.finished():
            raise AssertionError("called with a transfer in flight")
        self.check_books()
        slots = [slot for entry in self._entries.values() for slot in entry.slots]
        aside = self._table.aside()
        if len(aside) != self._room.aside:
            raise AssertionError("the table says other slots are set aside")
        if sorted([*slots, *self._room.spare(), *aside]) != list(range(self.directory.geometry.slots)):
            raise AssertionError("a slot is lost or has two owners")
        if sorted(slots) != self._table.slots():
            raise AssertionError("the table says other slots are in use")
        if self._storing or any(entry.writing or entry.readers for entry in self._entries.values()):
            raise AssertionError("a transfer is counted that has ended")

    # -- the owner's thread ----------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._room.look()
        if self._table.is_dirty and not self._flushing:
            self._flushing = True  # a slow disk has one of them to do, not one a second
            self._log_queue.submit(lambda scratch: self._flush(), self._flushed, urgent=False)

    def _settle(self, entry: Entry, transfer: Transfer, is_suspect: bool) -> None:
        """Bring the books in line with a transfer that ended."""
        entry.readers += is_suspect  # the test's, until its verdict
        if transfer.is_load:
            entry.readers -= 1
            entry.doubtful |= transfer.fault is Fault.IO
            if transfer.fault is Fault.CORRUPT and not entry.deleted:
                self._delete(entry)
                return
        else:
            self._storing -= 1
            entry.writing = False
            if transfer.fault is Fault.FULL:
                self._room.note_full()
            if transfer.fault is not None and not entry.deleted:
                self._delete(entry)
                return
            if not entry.deleted and transfer.packing is not None and transfer.packing.is_compressed:
                self._shrink(entry, transfer.packing.stored_bytes)
            elif entry.joined and not entry.deleted:
                self._transfers.write(entry.slots)
        if entry.deleted:
            self._let_go(entry)

    def _judge(self, entry: Entry, verdict: Verdict) -> None:
        """The slots of a chunk were tested: one that could not be read is forgotten, unless the whole disk fails."""
        entry.readers -= 1
        is_lost = bool(verdict.flaws) or (entry.doubtful and verdict.is_place)
        entry.doubtful = False
        self._note_flaws(entry, verdict.flaws)
        if is_lost and not entry.deleted:
            self._delete(entry)
        elif entry.deleted:
            self._let_go(entry)

    # -- the log's thread ------------------------------------------------------------------------------------------

    def _write_log(self, number: int, scopes: Sequence[Scope]) -> None:
        """Make what was changed durable, for all who wait. Raises: OSError."""
        self._table.flush()
        self._settles()

    def _flush(self) -> None:
        """Bound how long a tag or a shorter time to live, that a hit added, can be lost to a power failure."""
        try:
            self._table.flush()
        except OSError as error:
            logger.warning("disk_flush_failed path=%s error=%s", self.directory.path, str(error))
        self._flushed()

    def _flushed(self) -> None:
        self._flushing = False


def _opened(options: DiskOptions, slot_bytes: int, chunk_bytes: int, layout: DirectoryLayout) -> OpenDirectory:
    return open_directory(
        options.directory,
        slot_bytes,
        options.bytes,
        frame_bytes=HEADER_BYTES + chunk_bytes,
        layout=layout,
        allow_direct=options.allow_direct,
        is_new=options.is_new,
        files=options.files,
        step_bytes=options.step_bytes,
        reserve_bytes=options.reserve_bytes,
    )
