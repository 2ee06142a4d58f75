"""The disk tier: one preallocated slab of equal slots, O_DIRECT, a record a slot, every read verified."""

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hotspan.core.clock import Clock, SystemClock
from hotspan.core.frame import HEADER_BYTES, FrameFault, FrameIdentity, seal, verify
from hotspan.core.types import PAGE_BYTES, Chunk, ChunkKey, Tier, round_up
from hotspan.tiers.base import Fault, TierUsage, Transfer
from hotspan.tiers.directory import open_directory
from hotspan.tiers.eviction import LeafLru
from hotspan.tiers.io import IoThreads, read_frame, write_frame
from hotspan.tiers.table import Record

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """How a disk tier works.

    threads:     I/O threads; each has one I/O in flight.
    store_depth: chunks that may wait to be written; more are refused, and stay in RAM only.
    """

    directory: Path
    bytes: int
    threads: int = 4
    store_depth: int = 32
    allow_direct: bool = True


@dataclass(slots=True)
class _Entry:
    """A chunk on disk. Not readable while `writing`; its slot is not reused while `readers` or after `doomed`."""

    slot: int
    record: Record
    writing: bool
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
        self._clock = clock or SystemClock()
        self._directory = open_directory(
            options.directory,
            round_up(HEADER_BYTES + payload_bytes, PAGE_BYTES),
            options.bytes,
            allow_direct=options.allow_direct,
        )
        self.direct = self._directory.direct
        self._entries: dict[ChunkKey, _Entry] = {}
        self._lru = LeafLru()
        self._refused: OrderedDict[ChunkKey, None] = OrderedDict()
        self._storing = 0
        self._done: deque[_Done] = deque()
        self._landed = threading.Event()
        self._threads = IoThreads("disk", options.threads)
        self._closed = False
        self._adopt(self._directory.records)

    def lookup(self, key: ChunkKey) -> bool:
        return self._readable(key) is not None

    def can_store(self) -> bool:
        return self._storing < self._store_depth

    def submit_store(self, chunk: Chunk, payload: memoryview) -> bool:
        if len(payload) != self._payload_bytes:
            raise ValueError(f"the payload has {len(payload)} bytes, not {self._payload_bytes}")
        if chunk.key in self._entries or not self.can_store():
            return False
        slot = self._take_slot(chunk)
        if slot is None:
            return False
        record = Record(chunk.key, chunk.parent, self._namespace, self._payload_bytes)
        entry = _Entry(slot, record, writing=True)
        self._entries[chunk.key] = entry
        self._lru.add(chunk.key, chunk.parent)
        self._storing += 1
        self._threads.submit(lambda header: self._store(entry, header, payload), urgent=False)
        return True

    def submit_load(self, key: ChunkKey, into: memoryview) -> bool:
        if len(into) != self._payload_bytes:
            raise ValueError(f"the buffer has {len(into)} bytes, not {self._payload_bytes}")
        entry = self._readable(key)
        if entry is None:
            return False
        entry.readers += 1
        self._threads.submit(lambda header: self._load(entry, header, into), urgent=True)
        return True

    def finished(self) -> list[Transfer]:
        self._landed.clear()
        transfers: list[Transfer] = []
        while self._done:
            done = self._done.popleft()
            if done.entry is None or done.transfer is None:
                self._free.append(done.slot)
                continue
            self._settle(done.entry, done.transfer)
            transfers.append(done.transfer)
        return transfers

    def wait(self, timeout_s: float) -> None:
        self._landed.wait(timeout_s)

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        self._lru.touch(keys)

    def discard(self, key: ChunkKey) -> None:
        entry = self._entries.get(key)
        if entry is not None:
            self._doom(entry)

    def clear(self) -> int:
        keys = list(self._entries)
        for key in keys:
            self.discard(key)
        return len(keys)

    def usage(self) -> TierUsage:
        slot_bytes, slots = self._directory.geometry.slot_bytes, self._directory.geometry.slots
        used = slots - len(self._free)
        return TierUsage(used, slots, used * slot_bytes, slots * slot_bytes)

    def close(self, timeout_s: float) -> None:
        if self._closed:
            return
        deadline = time.monotonic() + timeout_s
        if self._threads.drain(timeout_s):
            self.finished()  # what was forgotten while it was written has a record now, and loses it here
        if self._threads.close(max(0.0, deadline - time.monotonic())):
            self._closed = True
            try:
                self._directory.table.sync()
            except OSError as error:
                logger.warning("disk_sync_failed path=%s error=%s", self._directory.path, error)
            self._directory.close()
        else:
            # An I/O that hangs still uses the descriptors: the process's end closes them, and frees the lock.
            logger.warning("disk_close_timed_out path=%s timeout_s=%g", self._directory.path, timeout_s)

    def check(self) -> None:
        """Raise AssertionError if the books do not agree (for tests; call with no transfer unreported)."""
        if not self._threads.drain(5.0) or self.finished():
            raise AssertionError("called with a transfer in flight")
        self._lru.check()
        slots = [entry.slot for entry in self._entries.values()]
        if sorted(slots + self._free) != list(range(self._directory.geometry.slots)):
            raise AssertionError("a slot is lost or has two owners")
        if len(self._lru) != len(self._entries) or any(key not in self._lru for key in self._entries):
            raise AssertionError("the eviction order knows other chunks than there are")
        if self._storing or any(entry.writing or entry.readers for entry in self._entries.values()):
            raise AssertionError("a transfer is counted that has ended")

    # -- the scheduler's thread ------------------------------------------------------------------------------------

    def _adopt(self, records: dict[int, Record]) -> None:
        """Take over what a former process left; slots of other namespaces count as used until they are evicted."""
        self._free = [slot for slot in range(self._directory.geometry.slots - 1, -1, -1) if slot not in records]
        for slot, record in records.items():
            if record.key in self._entries:
                self._free_record(slot)  # stored twice around a crash: forgetting one must not bring back the other
                continue
            self._entries[record.key] = _Entry(slot, record, writing=False)
            self._lru.add(record.key, record.parent)

    def _readable(self, key: ChunkKey) -> _Entry | None:
        """The entry of a chunk that can be loaded by this namespace now."""
        entry = self._entries.get(key)
        if entry is None or entry.writing or entry.doomed or entry.record.namespace != self._namespace:
            return None
        return entry

    def _take_slot(self, chunk: Chunk) -> int | None:
        """A free slot; once there is none, one of an evicted leaf, for chunks that are offered a second time."""
        if self._free:
            return self._free.pop()
        if chunk.key not in self._refused:
            self._refused[chunk.key] = None
            if len(self._refused) > self._directory.geometry.slots + 1024:
                self._refused.popitem(last=False)
            return None
        victim = self._lru.victim(lambda key: key != chunk.parent and self._is_idle(key))
        if victim is None:
            return None
        del self._refused[chunk.key]
        self._lru.remove(victim)
        return self._entries.pop(victim).slot

    def _is_idle(self, key: ChunkKey) -> bool:
        entry = self._entries[key]
        return not entry.writing and not entry.readers

    def _settle(self, entry: _Entry, transfer: Transfer) -> None:
        if transfer.is_load:
            entry.readers -= 1
        else:
            entry.writing = False
            self._storing -= 1
        if transfer.fault is not None and not entry.doomed:
            self._doom(entry)  # quarantined: the next store of this chunk heals it
        elif entry.doomed and not entry.readers and not entry.writing:
            self._free_record(entry.slot)

    def _doom(self, entry: _Entry) -> None:
        """Make a chunk unfindable now, and free its slot once no transfer uses it."""
        entry.doomed = True
        if self._entries.get(entry.record.key) is entry:
            del self._entries[entry.record.key]
            self._lru.remove(entry.record.key)
        if not entry.readers and not entry.writing:
            self._free_record(entry.slot)

    def _free_record(self, slot: int) -> None:
        self._threads.submit(lambda header: self._free_slot(slot), urgent=False)

    # -- the I/O threads: touch only what they were given -----------------------------------------------------------

    def _store(self, entry: _Entry, header: memoryview, payload: memoryview) -> None:
        started = time.perf_counter()
        fault: Fault | None = None
        try:
            seal(header, payload, FrameIdentity(entry.record.key, self._namespace))
            write_frame(self._directory.slab_fd, self._at(entry.slot), header, payload)
            self._directory.table.write(entry.slot, entry.record)
        except OSError as error:
            fault = Fault.IO
            logger.warning("disk_store_failed slot=%d error=%s", entry.slot, error)
        self._report(entry, False, fault, len(payload), started)

    def _load(self, entry: _Entry, header: memoryview, into: memoryview) -> None:
        started = time.perf_counter()
        fault: Fault | None = None
        try:
            read_frame(self._directory.slab_fd, self._at(entry.slot), header, into)
        except OSError as error:
            fault = Fault.IO
            logger.warning("disk_load_failed slot=%d error=%s", entry.slot, error)
        else:
            identity = FrameIdentity(entry.record.key, self._namespace)
            found = verify(header, into, identity, self._clock.unix())
            if found is not None:
                fault = Fault.GONE if found is FrameFault.EXPIRED else Fault.CORRUPT
                logger.warning("disk_frame_quarantined slot=%d fault=%s", entry.slot, found.value)
        self._report(entry, True, fault, len(into), started)

    def _free_slot(self, slot: int) -> None:
        try:
            self._directory.table.free(slot)
        except OSError as error:
            logger.warning("disk_free_failed slot=%d error=%s", slot, error)  # the stale record costs a miss
        self._done.append(_Done(slot))
        self._landed.set()

    def _report(self, entry: _Entry, is_load: bool, fault: Fault | None, size: int, started: float) -> None:
        transfer = Transfer(entry.record.key, is_load, fault, size, time.perf_counter() - started)
        self._done.append(_Done(entry.slot, entry, transfer))
        self._landed.set()

    def _at(self, slot: int) -> int:
        return slot * self._directory.geometry.slot_bytes
