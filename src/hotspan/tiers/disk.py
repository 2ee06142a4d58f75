"""The disk tier: one slab of equal slots, O_DIRECT, a record a slot, every read verified."""

import contextlib
import gc
import logging
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hotspan.core.clock import Clock, SystemClock
from hotspan.core.frame import HEADER_BYTES, FrameFault, FrameIdentity
from hotspan.core.terms import Scope, Terms
from hotspan.core.types import PAGE_BYTES, Chunk, ChunkKey, Tier, round_up
from hotspan.tiers.base import Durable, Fault, FrameKeys, TierUsage, Transfer
from hotspan.tiers.check import FrameCheck
from hotspan.tiers.commit import GroupCommit
from hotspan.tiers.directory import open_directory
from hotspan.tiers.eviction import LeafArc
from hotspan.tiers.files import Files
from hotspan.tiers.io import FrameFile, IoQueue, IoThreads, staging_bytes
from hotspan.tiers.log import Invalidation
from hotspan.tiers.record import Record
from hotspan.tiers.room import NO_SPACE, SlotRoom
from hotspan.tiers.shares import Shares

logger = logging.getLogger(__name__)

_PURGE_S = 1.0
"""How often chunks whose time is over are looked for (a look-up refuses them at once in any case), and how often the
table is flushed."""

_LONGEST_LOG = 64
"""Scopes after which the log begins anew: each costs the next start some milliseconds."""

_NOBODY = -1
"""For whom room is made that nobody of the cache gets."""

_GONE = (FrameFault.EXPIRED, FrameFault.SHREDDED)


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """How a disk tier works.

    threads:     I/O threads; each has one I/O in flight.
    store_depth: chunks that may wait to be written; more are refused, and stay in RAM only.
    is_new:      whether the directory may have to be made (tiers/directory.py).
    keys:        with keys, frames are encrypted, and plain ones are misses.
    step_bytes:  the slab grows by so much as it fills; None allocates all of it at the start.
    reserve_bytes: what a slab that grows leaves free on its file system (tiers/room.py); below it, it gives back.
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
    files: Files = field(default_factory=Files)
    queue: Callable[[str, int, int], IoQueue] = IoThreads


@dataclass(slots=True)
class _Entry:
    """A chunk on disk. Not readable while `writing`; its slot is not reused while `readers` or after `doomed`."""

    slot: int
    key: ChunkKey
    is_own: bool  # of this tier's namespace
    expires_s: int
    writing: bool
    joined: bool = False  # its terms changed meanwhile
    readers: int = 0
    doomed: bool = False


@dataclass(frozen=True, slots=True)
class _Done:
    """What an I/O thread reports: a transfer of `entry`, or (transfer None) that a slot's record is free on disk."""

    slot: int
    entry: _Entry | None = None
    transfer: Transfer | None = None


class DiskTier:
    """Chunks of one namespace in a directory that other namespaces may use too, one process at a time.

    Raises: DirectoryError from the constructor only (tiers/directory.py says when).
    """

    tier = Tier.DISK

    def __init__(self, options: DiskOptions, namespace: bytes, payload_bytes: int, clock: Clock | None = None) -> None:
        if payload_bytes % PAGE_BYTES:
            raise ValueError(f"a payload is whole pages of {PAGE_BYTES} bytes, not {payload_bytes}")
        self._namespace = namespace
        self._payload_bytes = payload_bytes
        self._store_depth = options.store_depth
        self._keys = options.keys
        self._clock = clock or SystemClock()
        self.directory = open_directory(
            options.directory,
            round_up(HEADER_BYTES + payload_bytes, PAGE_BYTES),
            options.bytes,
            allow_direct=options.allow_direct,
            is_new=options.is_new,
            files=options.files,
            step_bytes=options.step_bytes,
            reserve_bytes=options.reserve_bytes,
        )
        self._table = self.directory.table
        self._frames = FrameFile(options.files, self.directory.slab_fd)
        self._generation = self.directory.generation
        self._entries: dict[ChunkKey, _Entry] = {}
        self._lru = LeafArc(self.directory.geometry.slots, options.shares)
        self._refused: OrderedDict[ChunkKey, None] = OrderedDict()
        self._storing = 0
        self._purged_s = self._clock.monotonic()
        self._done: deque[_Done] = deque()
        self._landed = threading.Event()
        self._suspects: deque[tuple[int, ChunkKey]] = deque()
        self._flushing = False
        self._early: set[ChunkKey] = set()  # joined before an invalidation was logged: to be stamped after
        scratch = HEADER_BYTES + (staging_bytes(payload_bytes) if self._keys is not None else 0)
        self._queue = options.queue("disk", options.threads, scratch)
        self._log_queue = options.queue("disk-log", 1, HEADER_BYTES)
        self._commits = GroupCommit(self._log_queue, self._log)
        self._room_queue = options.queue("disk-room", 1, HEADER_BYTES)
        self._room = self._new_room(options)
        self._closed = False
        self._adopt()

    asking = 0

    def ask(self, chunks: Sequence[Chunk], tenant: int) -> None:
        return  # what is here stands in the table

    def is_asking(self, key: ChunkKey) -> bool:
        return False

    def lookup(self, key: ChunkKey) -> bool:
        return self._readable(key) is not None

    def terms(self, key: ChunkKey) -> Terms:
        return self._table.record(self._entries[key].slot).terms

    def can_store(self) -> bool:
        return self._storing < self._store_depth and not self._room.is_growing

    def holds_back(self, key: ChunkKey, terms: Terms) -> bool:
        # A chunk that comes back while its invalidation is not logged would have the old bytes' generation, perhaps in
        # their slot; nothing of that kind is left to what a power loss drops and keeps.
        return self._commits.hold_back(key, self._namespace, terms)

    def released(self) -> list[ChunkKey]:
        return self._commits.released()

    def submit_store(self, chunk: Chunk, terms: Terms, payload: memoryview) -> bool:
        if len(payload) != self._payload_bytes:
            raise ValueError(f"the payload has {len(payload)} bytes, not {self._payload_bytes}")
        if chunk.key in self._entries or not self.can_store():
            return False
        if self._commits.takes(chunk.key, self._namespace, terms):
            return False
        slot = self._take_slot(chunk, terms.tenant)
        if slot is None:
            return False
        terms = replace(terms, generation=self._generation)
        stamp = secrets.randbits(64)
        record = Record(chunk.key, chunk.parent, self._namespace, self._payload_bytes, terms, stamp, chunk.index)
        self._table.put(slot, record)
        entry = _Entry(slot, chunk.key, True, terms.expires_s, writing=True)
        self._entries[chunk.key] = entry
        self._lru.add(chunk.key, chunk.parent, terms.tenant)
        self._storing += 1
        self._queue.submit(
            lambda scratch: self._store(entry, record, scratch, payload), lambda: self._drop(entry, False), urgent=False
        )
        return True

    def submit_load(self, key: ChunkKey, into: memoryview) -> bool:
        if len(into) != self._payload_bytes:
            raise ValueError(f"the buffer has {len(into)} bytes, not {self._payload_bytes}")
        entry = self._readable(key)
        if entry is None:
            return False
        entry.readers += 1
        stamp = self._table.record(entry.slot).stamp
        self._queue.submit(
            lambda scratch: self._load(entry, stamp, scratch, into), lambda: self._drop(entry, True), urgent=True
        )
        return True

    def finished(self) -> list[Transfer]:
        self._landed.clear()
        transfers: list[Transfer] = []
        while self._done:
            done = self._done.popleft()
            if done.entry is None or done.transfer is None:
                self._room.give(done.slot)
                continue
            self._settle(done.entry, done.transfer)
            transfers.append(done.transfer)
        while self._suspects:
            slot, key = self._suspects.popleft()
            if (entry := self._entries.get(key)) is not None and entry.slot == slot:
                self._doom(entry)
        if self._early and not self._commits:
            for key in self._early & self._entries.keys():
                self._stamp(self._entries[key], self.terms(key))
            self._early.clear()
        self._make_space(self._room.settle())
        now = self._clock.monotonic()
        if now - self._purged_s >= _PURGE_S:
            self._purged_s = now
            self._purge()
            self._room.look()
            if self._table.is_dirty and not self._flushing:
                self._flushing = True  # a slow disk has one of them to do, not one a second
                self._log_queue.submit(lambda scratch: self._flush(), self._flushed, urgent=False)
        return transfers

    def late(self) -> None:
        return

    def wait(self, timeout_s: float) -> bool:
        return self._landed.wait(timeout_s)

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        self._lru.touch(keys)

    def join(self, key: ChunkKey, terms: Terms) -> None:
        entry = self._entries.get(key)
        if entry is None:
            return
        record = self._table.record(entry.slot)
        joined = record.terms.joined(terms)
        if joined is not record.terms:
            # It outlived all that was invalidated so far: a label that it gets now must not count as one it had then.
            self._stamp(entry, joined)
            if self._commits:
                self._early.add(key)

    def discard(self, key: ChunkKey) -> None:
        entry = self._entries.get(key)
        if entry is not None:
            self._doom(entry)

    def invalidate(self, scopes: Sequence[Scope], durable: Durable) -> int:
        keys = {self._table.key(slot) for slot in self._table.taken(scopes, slot_of=self._slot_of)}
        keys |= self._lru.descendants(keys.union(*(scope.keys or () for scope in scopes)))
        for key in keys:
            self._doom_one(self._entries[key])
        self._commits.submit(scopes, durable)
        return len(keys)

    def usage(self) -> TierUsage:
        slot_bytes = self.directory.geometry.slot_bytes
        used, capacity = self._room.used, self._room.capacity
        return TierUsage(used, capacity, used * slot_bytes, capacity * slot_bytes, self._lru.tenants())

    def verification(self) -> FrameCheck:
        """A check of all that is stored here, to be run on another thread; what is corrupt will be quarantined."""
        return FrameCheck(
            self.directory,
            self._keys,
            self._stored,
            lambda slot, key: self._suspects.append((slot, key)),
            self._clock,
        )

    def give_up(self) -> None:
        """Begin no I/O that has not begun; what is dropped is reported as such."""
        self._queue.drop()
        self._log_queue.drop()
        self._commits.give_up()
        self._room_queue.drop()

    def close(self, timeout_s: float) -> None:
        if self._closed:
            return
        deadline = time.monotonic() + timeout_s
        if self._queue.drain(timeout_s):
            self.finished()  # what was forgotten while it was written has a record now, and loses it here
        queues = (self._queue, self._log_queue, self._room_queue)
        ended = [queue.close(max(0.0, deadline - time.monotonic())) for queue in queues]
        if all(ended):
            self._closed = True
            try:
                self._table.flush()
            except OSError as error:
                logger.warning("disk_sync_failed path=%s error=%s", self.directory.path, str(error))
            self.directory.close()
        else:
            # An I/O that hangs still uses the descriptors: the process's end closes them, and frees the lock.
            logger.warning("disk_close_timed_out path=%s timeout_s=%g", self.directory.path, timeout_s)

    def check(self) -> None:
        """Raise AssertionError if the books do not agree (for tests; call with no transfer unreported)."""
        if not self._queue.drain(5.0) or self.finished() or not self._queue.drain(5.0) or self.finished():
            raise AssertionError("called with a transfer in flight")
        self._lru.check()
        slots = [entry.slot for entry in self._entries.values()]
        if sorted(slots + self._room.spare()) != list(range(self.directory.geometry.slots)):
            raise AssertionError("a slot is lost or has two owners")
        if sorted(slots) != self._table.slots():
            raise AssertionError("the table says other slots are in use")
        if len(self._lru) != len(self._entries) or any(key not in self._lru for key in self._entries):
            raise AssertionError("the eviction order knows other chunks than there are")
        parents = {self._table.record(slot).parent for slot in slots} - {None}
        if not parents <= self._entries.keys():
            raise AssertionError("a chunk stands behind a gap: no invalidation of what is before it would take it")
        if self._storing or any(entry.writing or entry.readers for entry in self._entries.values()):
            raise AssertionError("a transfer is counted that has ended")

    # -- the scheduler's thread ------------------------------------------------------------------------------------

    def _new_room(self, options: DiskOptions) -> SlotRoom:
        directory = self.directory
        step = (options.step_bytes or 0) // directory.geometry.slot_bytes
        return SlotRoom(
            *(directory.space, self._room_queue, directory.geometry.slots, directory.free, directory.bare, step),
            self._landed.set,
        )

    def _adopt(self) -> None:
        """Take over what a former process left; slots of other namespaces count as used until they are evicted."""
        entries, namespace = self._entries, self._namespace
        twice: list[int] = []
        named: list[tuple[ChunkKey, ChunkKey | None, int]] = []
        with _no_collection():
            for slot, key, parent, of, tenant, expires_s in self._table.summaries():
                if key in entries:
                    twice.append(slot)
                    continue
                entries[key] = _Entry(slot, key, of == namespace, expires_s, False)
                named.append((key, parent, tenant))
            self._lru.adopt(named)
        for slot in twice:  # stored twice around a crash: forgetting one must not bring back the other
            record = self._table.record(slot)
            self.join(record.key, record.terms)
            self._free_record(slot)
        lost = [key for key, parent, _ in named if parent is not None and parent not in entries]
        for key in self._lru.descendants(lost) | set(lost):  # behind a gap, as a torn record leaves one
            self._doom_one(entries[key])
        self._purge()

    def _readable(self, key: ChunkKey) -> _Entry | None:
        """The entry of a chunk that can be loaded by this namespace now."""
        entry = self._entries.get(key)
        if entry is None or entry.writing or not entry.is_own:
            return None
        if entry.expires_s and self._clock.unix() >= entry.expires_s:
            return None
        return entry

    def _stored(self, slot: int, key: ChunkKey) -> _Entry | None:
        """The chunk's stay in a slot, if it is there whole."""
        entry = self._entries.get(key)
        return entry if entry is not None and entry.slot == slot and not entry.writing else None

    def _take_slot(self, chunk: Chunk, tenant: int) -> int | None:
        """A free slot; once there is none, one of an evicted leaf, for chunks that are offered a second time.

        None for a chunk whose parent is not here: nothing stands behind a gap.
        """
        has_parent = chunk.parent is None or chunk.parent in self._entries
        if has_parent and self._lru.may_add(tenant) and (slot := self._room.take()) is not None:
            return slot
        if chunk.key not in self._refused:
            self._refused[chunk.key] = None
            if len(self._refused) > self.directory.geometry.slots + 1024:
                self._refused.popitem(last=False)
            return None
        if not has_parent:
            return None
        victim = self._lru.victim(tenant, lambda key: key != chunk.parent and self._is_idle(key))
        if victim is None:
            return None
        del self._refused[chunk.key]
        self._lru.remove(victim, evicted=True)
        return self._entries.pop(victim).slot

    def _slot_of(self, key: ChunkKey) -> int | None:
        entry = self._entries.get(key)
        return None if entry is None else entry.slot

    def _make_space(self, evictions: int) -> None:
        """Evict so many of the chunks that would go first; the file system gets the space of their slots."""
        self._lru.resize(max(1, self._room.capacity))
        for _ in range(evictions):
            victim = self._lru.victim(_NOBODY, self._is_idle)
            if victim is None:
                return
            self._lru.remove(victim, evicted=True)
            self._free_record(self._entries.pop(victim).slot)

    def _is_idle(self, key: ChunkKey) -> bool:
        entry = self._entries[key]
        return not entry.writing and not entry.readers

    def _purge(self) -> None:
        for slot in self._table.expired(self._clock.unix()):
            self.discard(self._table.key(slot))

    def _settle(self, entry: _Entry, transfer: Transfer) -> None:
        """Bring the books in line with a transfer that ended."""
        if transfer.is_load:
            entry.readers -= 1
            if transfer.fault is Fault.CORRUPT and not entry.doomed:
                self._doom(entry)
                return
        else:
            self._storing -= 1
            entry.writing = False
            if transfer.fault is Fault.FULL:
                self._room.note_full()
            if transfer.fault is not None and not entry.doomed:
                self._doom(entry)
                return
            if entry.joined and not entry.doomed:
                self._submit_record(entry.slot)
        if entry.doomed and not entry.readers and not entry.writing:
            self._free_record(entry.slot)

    def _doom(self, entry: _Entry) -> None:
        """Make a chunk unfindable now, and what stands on it: behind a gap no invalidation would reach it."""
        for key in self._lru.descendants([entry.key]) | {entry.key}:
            self._doom_one(self._entries[key])

    def _doom_one(self, entry: _Entry) -> None:
        """Make one chunk unfindable, and free its slot once no transfer uses it."""
        entry.doomed = True
        self._table.put(entry.slot, None)
        del self._entries[entry.key]
        self._lru.remove(entry.key)
        if not entry.readers and not entry.writing:
            self._free_record(entry.slot)

    def _free_record(self, slot: int) -> None:
        self._table.put(slot, None)
        self._queue.submit(lambda scratch: self._free_slot(slot), lambda: self._freed(slot), urgent=False)

    def _submit_record(self, slot: int) -> None:
        self._queue.submit(lambda scratch: self._write_record(slot), lambda: None, urgent=False)

    def _stamp(self, entry: _Entry, terms: Terms) -> None:
        """Give a chunk new terms, as of now."""
        record = self._table.record(entry.slot)
        self._table.put(entry.slot, record._replace(terms=replace(terms, generation=self._generation)))
        entry.expires_s = terms.expires_s
        if entry.writing:
            entry.joined = True
        else:
            self._submit_record(entry.slot)

    # -- the I/O threads: touch only what they were given -----------------------------------------------------------
    # An error goes to the log as text: the exception holds on to the buffers of its transfer, and a handler to it.

    def _store(self, entry: _Entry, record: Record, scratch: memoryview, payload: memoryview) -> None:
        started = self._clock.monotonic()
        fault: Fault | None = None
        identity = FrameIdentity(
            record.key, self._namespace, record.stamp, record.terms.generation, record.terms.expires_s
        )
        try:
            if self._keys is None:
                self._frames.write(self._at(entry.slot), scratch[:HEADER_BYTES], payload, identity)
                self._table.write(entry.slot)
            elif (sealing := self._keys.sealing(record.terms.tenant)) is None:
                fault = Fault.GONE
            else:
                self._frames.write_sealed(self._at(entry.slot), scratch, payload, identity, sealing)
                self._table.write(entry.slot)
        except OSError as error:
            fault = Fault.FULL if error.errno in NO_SPACE else Fault.IO
            logger.warning("disk_store_failed slot=%d error=%s", entry.slot, str(error))
        self._end(entry, False, fault, len(payload), started)

    def _load(self, entry: _Entry, stamp: int, scratch: memoryview, into: memoryview) -> None:
        started = self._clock.monotonic()
        fault: Fault | None = None
        identity = FrameIdentity(entry.key, self._namespace, stamp)
        at, now_s = self._at(entry.slot), self._clock.unix()
        try:
            if self._keys is None:
                found = self._frames.read(at, scratch[:HEADER_BYTES], into, identity, now_s)
            else:
                found = self._frames.read_sealed(at, scratch, into, identity, now_s, self._keys.opening)
        except OSError as error:
            fault = Fault.IO
            logger.warning("disk_load_failed slot=%d error=%s", entry.slot, str(error))
        else:
            if found is not None:
                fault = Fault.GONE if found in _GONE else Fault.CORRUPT
                logger.warning("disk_frame_quarantined slot=%d fault=%s", entry.slot, found.value)
        self._end(entry, True, fault, len(into), started)

    def _free_slot(self, slot: int) -> None:
        self._write_record(slot)
        self._freed(slot)

    def _freed(self, slot: int) -> None:
        self._done.append(_Done(slot))
        self._landed.set()

    def _drop(self, entry: _Entry, is_load: bool) -> None:
        self._end(entry, is_load, Fault.DROPPED, 0, self._clock.monotonic())

    def _write_record(self, slot: int) -> None:
        try:
            self._table.write(slot)
        except OSError as error:
            logger.warning("disk_record_failed slot=%d error=%s", slot, str(error))  # a stale record costs a miss

    def _log(self, number: int, scopes: Sequence[Scope]) -> None:
        """Make invalidations durable, with one sync however many they are. Raises: OSError.

        Nothing was stored under a generation between theirs, so that of the last is right for all. The table first:
        what the log alone would take follows from labels that were joined and from chunks in between, whose records may
        not be on the disk yet.
        """
        generation = self.directory.generation + number
        self._table.flush()
        self.directory.log.append(Invalidation(generation, tuple(dict.fromkeys(scopes)), self._clock.unix()))
        self._generation = generation
        if self.directory.log.scopes >= _LONGEST_LOG:
            self._log_queue.submit(lambda scratch: self._shorten_log(), lambda: None, urgent=False)

    def _shorten_log(self) -> None:
        """Begin the log anew: the table says by itself what was invalidated up to here."""
        if self.directory.log.scopes < _LONGEST_LOG:
            return  # another job did
        try:
            self.directory.log.begin(self._generation)
        except OSError as error:
            logger.warning("disk_log_not_shortened path=%s error=%s", self.directory.path, str(error))

    def _flush(self) -> None:
        """Bound how long a tag or a shorter time to live, that a hit added, can be lost to a power failure."""
        try:
            self._table.flush()
        except OSError as error:
            logger.warning("disk_flush_failed path=%s error=%s", self.directory.path, str(error))
        self._flushed()

    def _flushed(self) -> None:
        self._flushing = False

    def _end(self, entry: _Entry, is_load: bool, fault: Fault | None, size: int, started: float) -> None:
        transfer = Transfer(entry.key, is_load, fault, size, self._clock.monotonic() - started)
        self._done.append(_Done(entry.slot, entry, transfer))
        self._landed.set()

    def _at(self, slot: int) -> int:
        return slot * self.directory.geometry.slot_bytes


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Make many objects that stay, without the garbage collector looking through all of them again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on and not gc.get_freeze_count():  # into the oldest generation at once
            gc.freeze()
            gc.unfreeze()
        if was_on:
            gc.enable()
