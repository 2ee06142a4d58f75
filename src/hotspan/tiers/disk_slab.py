"""The disk engine: chunks of any size in equal slots of one slab, O_DIRECT, a record per slot, every read verified.

A chunk is one frame (core/frame.py) in as few slots as hold it; they need not be adjacent, so that space never becomes
too fragmented for a chunk. The slots of one chunk have the same record, but for the number of their part.
"""

import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from hotspan.core.clock import Clock, SystemClock
from hotspan.core.frame import HEADER_BYTES
from hotspan.core.terms import Scope, Terms
from hotspan.core.types import ChunkKey
from hotspan.tiers.base import Durable, Fault, FrameKeys, Losses, TierUsage, Transfer
from hotspan.tiers.commit import GroupCommit
from hotspan.tiers.directory import TIER, DirectoryLayout, open_directory
from hotspan.tiers.disk_jobs import FrameJobs
from hotspan.tiers.eviction import LeafArc
from hotspan.tiers.files import Files
from hotspan.tiers.io import FrameFile, IoQueue, IoThreads, staging_bytes
from hotspan.tiers.pace import Pace
from hotspan.tiers.pins import Pins
from hotspan.tiers.places import PlaceTests, Verdict, is_suspect
from hotspan.tiers.record import MAX_PARTS, Flaw, Record
from hotspan.tiers.room import SlotRoom
from hotspan.tiers.shares import Shares

if TYPE_CHECKING:
    from hotspan.tiers.packer import Packer

logger = logging.getLogger(__name__)

TICK_S = 1.0
"""How often the free space of the file system is looked at, and a table that changed is flushed."""

_NOBODY = -1
"""The tenant for whom chunks are evicted when the file system runs low."""


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """How a slab on disk works.

    threads:     I/O threads; each has one I/O in flight.
    store_depth: chunks that may wait to be written; more are refused.
    is_new:      whether the directory may have to be made (tiers/directory.py).
    keys:        with keys, frames are encrypted, and plain ones are misses.
    step_bytes:  the slab grows by so much as it fills; None allocates all of it at the start.
    reserve_bytes: what a slab that grows leaves free on its file system (tiers/room.py); below it, it gives back.
    pace:        of loads.
    packer:      compresses and restores chunks. One that was compressed needs fewer slots than it was given: the rest
                 is free again when the store has ended.
    slot_bytes:  of a new directory, whole pages; None leaves it to the tier.
    files, queue: the system calls and the threads; tests put others in their place.
    """

    directory: Path
    bytes: int
    threads: int = 4
    store_depth: int = 32
    allow_direct: bool = True
    is_new: bool = True
    keys: FrameKeys | None = None
    shares: Shares = field(default_factory=Shares)
    step_bytes: int | None = None
    reserve_bytes: int = 0
    pins: Pins = field(default_factory=Pins)
    pace: Pace = field(default_factory=Pace)
    packer: "Packer | None" = None
    slot_bytes: int | None = None
    files: Files = field(default_factory=Files)
    queue: Callable[[str, int, int], IoQueue] = IoThreads


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


_Parts = dict[tuple[ChunkKey, int], dict[int, int]]
"""The slots of each chunk's parts after the first, by key and stamp, then by number."""

Told = Callable[[Transfer], None]
"""Called by `finished`, when the books say already what a transfer did."""


@dataclass(frozen=True, slots=True)
class _Done:
    """What an I/O thread reports: a transfer of `entry`, the test of its slots, or (entry None) that the records of
    slots are free on disk."""

    slots: Sequence[int]
    entry: Entry | None = None
    transfer: Transfer | None = None
    told: Told | None = None
    verdict: Verdict | None = None


class DiskSlab:
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
        self._namespace = namespace
        self._has_gaps = has_gaps
        self._store_depth = options.store_depth
        self._clock = clock or SystemClock()
        self._settles, self._landed_call, self._gone = settles, landed, gone
        chunk_bytes = slot_bytes - HEADER_BYTES if chunk_bytes is None else chunk_bytes
        self.directory = open_directory(
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
        self.slot_bytes = self.directory.geometry.slot_bytes
        self.losses = Losses()
        self._table = self.directory.table
        frames = FrameFile(options.files, self.directory.slab_fd, self.slot_bytes, options.pace)
        self._jobs = FrameJobs(frames, options.keys, self._clock, options.pace, options.packer)
        self._tests = PlaceTests(self.directory, self._clock)
        self._entries: dict[ChunkKey, Entry] = {}
        self._lru = LeafArc(self.directory.geometry.slots, options.shares)
        self._storing = 0
        self._ticked_s = self._clock.monotonic()
        self._done: deque[_Done] = deque()
        self._landed = threading.Event()
        self._flushing = False
        largest = max(chunk_bytes, self.slot_bytes)
        scratch = HEADER_BYTES + (staging_bytes(largest) if options.keys is not None else 0)
        self._queue = options.queue("disk", options.threads, scratch)
        self._log_queue = options.queue("disk-log", 1, HEADER_BYTES)
        self._commits = GroupCommit(self._log_queue, self._write_log)
        self._room_queue = options.queue("disk-room", 1, HEADER_BYTES)
        self.chunk_slots = self.directory.geometry.slots_for(chunk_bytes)
        step = max((options.step_bytes or 0) // self.slot_bytes, self.chunk_slots)
        of = (self.directory.space, self._room_queue, self.directory.geometry.slots)
        lists, aside = (self.directory.free, self.directory.bare), len(self._table.aside())
        self._room = SlotRoom(*of, *lists, step, self._land, self.chunk_slots, aside)
        self.is_closed = False

    def adopt(self) -> None:
        """Take over what a former process left; chunks of other namespaces take space until they are evicted."""
        entries, namespace = self._entries, self._namespace
        parts: _Parts = {}
        twice: list[int] = []
        large: list[tuple[Entry, int, int]] = []
        named: list[tuple[ChunkKey, ChunkKey | None, int]] = []
        for slot, part, key, parent, of, tenant, expires_s, size, stamp in self._table.summaries():
            if part:
                parts.setdefault((key, stamp), {})[part] = slot
                continue
            if key in entries:
                twice.append(slot)
                continue
            entry = entries[key] = Entry(slot, key, namespace is None or of == namespace, expires_s)
            named.append((key, parent, tenant))
            if size > self.slot_bytes - HEADER_BYTES:
                large.append((entry, stamp, self.directory.geometry.slots_for(size)))
        self._lru.adopt(named)
        lost = [] if self._has_gaps else [key for key, parent, _ in named if self._is_behind_gap(parent)]
        self._join_twice(twice)
        for key in self._adopt_parts(large, parts) + lost:  # a torn record leaves a gap
            self.discard(key)

    def _adopt_namespace(self, namespace: bytes) -> None:
        """From now on the chunks of this namespace are found, and no others."""
        self._namespace = namespace
        entries = list(self._entries.values())
        for entry, is_own in zip(entries, self._table.are_of(namespace, [e.slot for e in entries]), strict=True):
            entry.is_own = is_own

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[ChunkKey]:
        return iter(self._entries)

    def record(self, key: ChunkKey) -> Record:
        """What is known of a chunk. Raises: KeyError if it is not here."""
        return self._table.record(self._entries[key].slot)

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
        self._queue.submit(
            lambda scratch: self._store(entry, record, scratch, payload, told),
            lambda: self._drop(entry, False, told),
            urgent=False,
        )
        return True

    def load(self, key: ChunkKey, into: Sequence[memoryview], told: Told | None = None) -> bool:
        """Start to read a chunk; False if it can't be read now."""
        entry = self._readable(key)
        if entry is None:
            return False
        entry.readers += 1
        record = self._table.record(entry.slot)
        self._queue.submit(
            lambda scratch: self._load(entry, record, scratch, into, told),
            lambda: self._drop(entry, True, told),
            urgent=True,
        )
        return True

    def finished(self) -> list[Transfer]:
        """Transfers that ended since the last call; brings the books in line with them."""
        now = self._clock.monotonic()
        if not self._landed.is_set() and now - self._ticked_s < TICK_S:
            return []
        self._landed.clear()
        transfers: list[Transfer] = []
        while self._done:
            done = self._done.popleft()
            if done.entry is not None and done.verdict is not None:
                self._judge(done.entry, done.verdict)
                continue
            if done.entry is None or done.transfer is None:
                for slot in done.slots:
                    self._room.give(slot)
                continue
            self._settle(done.entry, done.transfer)
            transfers.append(done.transfer)
            if done.told is not None:
                done.told(done.transfer)
        self._make_space(self._room.settle())
        if now - self._ticked_s >= TICK_S:
            self._ticked_s = now
            self._tick()
        return transfers

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        """These chunks were used, leaf first."""
        self._lru.touch(keys)

    def stamp(self, key: ChunkKey, terms: Terms) -> None:
        """Keep a chunk that is here on new terms."""
        entry = self._entries[key]
        self._put(entry, self._table.record(entry.slot)._replace(terms=terms))
        entry.expires_s = terms.expires_s
        if entry.writing:
            entry.joined = True
        else:
            self._submit_record(entry)

    def discard(self, key: ChunkKey) -> None:
        """Forget a chunk and its descendants; they may come back after a crash until the table was flushed."""
        entry = self._entries.get(key)
        if entry is not None:
            self._delete(entry)

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

    def check_books(self) -> None:
        """The part of it that holds while transfers are in flight."""
        self._lru.check()
        if len(self._lru) != len(self._entries) or any(key not in self._lru for key in self._entries):
            raise AssertionError("the eviction order knows other chunks than there are")
        for entry in self._entries.values():
            records = [self._table.record(slot) for slot in entry.slots]  # the terms of a chunk are those of the first
            named = {(record.key, record.stamp) for record in records}
            if len(named) > 1 or [record.part for record in records] != list(range(len(records))):
                raise AssertionError("the slots of a chunk have records of several")
            if self._is_behind_gap(records[0].parent) and not self._has_gaps:
                raise AssertionError("a chunk stands behind a gap: no invalidation of what is before it would take it")

    # -- the owner's thread ----------------------------------------------------------------------------------------

    def _is_behind_gap(self, parent: ChunkKey | None) -> bool:
        return parent is not None and parent not in self._entries

    def _put(self, entry: Entry, record: Record) -> None:
        self._table.put_parts(entry.slots, record)

    def _join_twice(self, slots: Iterable[int]) -> None:
        """Drop what was stored twice around a crash, but not its terms: deleting one must not bring back the other."""
        for slot in slots:
            record = self._table.record(slot)
            before = self.record(record.key).terms
            if (joined := before.joined(record.terms)) is not before:
                self.stamp(record.key, joined)
            self._free_records([slot])

    def _adopt_parts(self, large: Iterable[tuple[Entry, int, int]], parts: _Parts) -> list[ChunkKey]:
        """Give chunks that take several slots the rest of theirs; the keys of those that are not whole.

        large: each with its stamp and how many slots it takes.
        """
        torn = []
        for entry, stamp, count in large:
            rest = parts.get((entry.key, stamp), {})
            entry.more = tuple(rest.pop(part) for part in range(1, count) if part in rest)
            self._lru.sized(entry.key, len(entry.slots))
            if len(entry.slots) < count:
                torn.append(entry.key)
        for rest in parts.values():  # of chunks that are gone, or were given more slots than they needed
            self._free_records(tuple(rest.values()))
        return torn

    def _readable(self, key: ChunkKey) -> Entry | None:
        """The entry of a chunk that can be loaded now."""
        entry = self._entries.get(key)
        if entry is None or entry.writing or entry.doubtful or not entry.is_own:
            return None
        if entry.expires_s and self._clock.unix() >= entry.expires_s:
            return None
        return entry

    def _take_slots(self, count: int, record: Record, *, may_evict: bool) -> list[int] | None:
        """Slots that hold nothing; leaves are evicted for those that are missing."""
        if count > min(MAX_PARTS, self.directory.geometry.slots):
            return None
        tenant = record.terms.tenant
        slots = self._room.take(count) if self._lru.may_add(tenant, count) else []
        evicted: list[int] = []
        while len(slots) + len(evicted) < count:
            victim = self._victim(tenant, record.parent, count) if may_evict else None
            if victim is None:
                for slot in slots:
                    self._room.give(slot)
                self._free_records(evicted)
                return None
            evicted += self._evict(victim)
        slots = sorted(slots + evicted)  # one I/O moves what lies in adjacent slots; freed last, taken first
        self._free_records(slots[count:])
        return slots[:count]

    def _victim(self, tenant: int, parent: ChunkKey | None, slots: int) -> ChunkKey | None:
        """The leaf to evict for a chunk of a tenant with that parent, which takes so many slots."""
        return self._lru.victim(tenant, self._may_go(parent), size=slots)

    def _may_go(self, parent: ChunkKey | None) -> Callable[[ChunkKey], bool]:
        def may_go(key: ChunkKey) -> bool:
            entry = self._entries[key]
            return key != parent and not entry.writing and not entry.readers

        return may_go

    def _evict(self, key: ChunkKey) -> Sequence[int]:
        """The slots of a chunk that is evicted; their records are the caller's to replace."""
        self._lru.remove(key, evicted=True)
        self.losses.evicted += 1
        slots = self._entries.pop(key).slots
        self._gone(key)
        return slots

    def _make_space(self, slots: int) -> None:
        """Evict chunks from so many slots; the file system gets their space."""
        self._lru.resize(max(1, self._room.capacity))
        while slots > 0:
            victim = self._victim(_NOBODY, None, 1)
            if victim is None:
                return
            freed = self._evict(victim)
            slots -= len(freed)
            self._free_records(freed)

    def _tick(self) -> None:
        self._room.look()
        if self._table.is_dirty and not self._flushing:
            self._flushing = True  # a slow disk has one of them to do, not one a second
            self._log_queue.submit(lambda scratch: self._flush(), self._flushed, urgent=False)

    def _settle(self, entry: Entry, transfer: Transfer) -> None:
        """Bring the books in line with a transfer that ended."""
        entry.readers += is_suspect(transfer)  # the test's, until its verdict
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
                self._submit_record(entry)
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

    def _note_flaws(self, entry: Entry, flaws: Mapping[int, Flaw]) -> None:
        """These slots are set aside when the chunk lets them go."""
        entry.flaws = {**(entry.flaws or {}), **{slot: flaws[slot] for slot in entry.slots if slot in flaws}}

    def _let_go(self, entry: Entry) -> None:
        """Free the slots of a chunk that is gone once no transfer uses them, but for those that are bad."""
        if entry.readers or entry.writing:
            return
        if bad := entry.flaws:
            self._table.set_aside(bad)
            self._room.set_aside(len(bad))
            path, all_of = self.directory.path, self._room.aside
            for slot, flaw in bad.items():
                logger.warning("disk_slot_set_aside path=%s slot=%d flaw=%s", path, slot, flaw.name.lower())
            logger.warning("disk_slots_bad path=%s slots=%d of=%d", path, all_of, self.directory.geometry.slots)
            self._queue.submit(lambda scratch: self._write_records([*bad]), lambda: None, urgent=False)
        self._free_records([slot for slot in entry.slots if not bad or slot not in bad])

    def _shrink(self, entry: Entry, stored_bytes: int) -> None:
        """A chunk was stored compressed: its record says so now, and the slots that it does not need are free again."""
        slots = entry.slots
        count = self.directory.geometry.slots_for(stored_bytes)
        entry.more = slots[1:count]
        self._put(entry, self._table.record(entry.slot).packed(stored_bytes))
        self._lru.sized(entry.key, count)
        self._submit_record(entry)
        self._free_records(slots[count:])

    def _delete(self, entry: Entry) -> None:
        """Make a chunk unfindable now, and its descendants: behind a gap no invalidation would reach them."""
        descendants = set() if self._has_gaps else self._lru.descendants([entry.key])
        for key in descendants | {entry.key}:
            self._delete_one(self._entries[key])

    def _delete_one(self, entry: Entry) -> None:
        """Make one chunk unfindable, and free its slots once no transfer uses them."""
        entry.deleted = True
        self._table.free(entry.slots)
        del self._entries[entry.key]
        self._lru.remove(entry.key)
        self._let_go(entry)
        self._gone(entry.key)

    def _free_records(self, slots: Sequence[int]) -> None:
        if not slots:
            return
        self._table.free(slots)
        self._queue.submit(lambda scratch: self._free_slots(slots), lambda: self._freed(slots), urgent=False)

    def _submit_record(self, entry: Entry) -> None:
        self._queue.submit(lambda scratch: self._write_records(entry.slots), lambda: None, urgent=False)

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
        self._done.append(_Done(slots))
        self._land()

    def _drop(self, entry: Entry, is_load: bool, told: Told | None) -> None:
        self._end(entry, (), Transfer(entry.key, is_load, Fault.DROPPED, 0, 0.0), told)

    def _write_records(self, slots: Iterable[int]) -> None:
        try:
            self._table.write_all(slots)
        except OSError as error:
            logger.warning("disk_records_failed error=%s", str(error))  # a stale record costs a miss

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

    def _end(self, entry: Entry, slots: Sequence[int], transfer: Transfer, told: Told | None) -> None:
        """Report a transfer; and then, since a request may wait for that, test its slots if they are suspect."""
        self._done.append(_Done(slots, entry, transfer, told))
        self._land()
        if is_suspect(transfer):
            try:
                verdict = self._tests.after(transfer, slots)
            except Exception:  # such as too little memory: the slots are held until there is a verdict
                logger.error("disk_slots_not_tested error=%s", traceback.format_exc())
                verdict = Verdict(False, {})
            self._done.append(_Done(slots, entry, verdict=verdict))
            self._land()

    def _land(self) -> None:
        self._landed.set()
        try:
            self._landed_call()
        except Exception as error:  # its owner is ending: what landed is found at the next look
            logger.warning("disk_not_told error=%s", repr(error))
