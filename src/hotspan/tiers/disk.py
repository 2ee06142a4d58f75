"""The disk tier: chunks of one namespace on the disk engine, with a log of what was invalidated."""

import logging
import secrets
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hotspan.core.clock import Clock
from hotspan.core.frame import HEADER_BYTES
from hotspan.core.terms import Scope, Terms
from hotspan.core.types import MIB, PAGE_BYTES, Chunk, ChunkKey, Tier, round_up
from hotspan.tiers.base import Durable, TierUsage, Transfer
from hotspan.tiers.check import FrameCheck
from hotspan.tiers.disk_options import DiskOptions
from hotspan.tiers.disk_slab import DiskSlab
from hotspan.tiers.log import Invalidation
from hotspan.tiers.pins import Kept
from hotspan.tiers.record import Flaw, Record
from hotspan.tiers.slab_transfers import Entry

__all__ = ["DiskOptions", "DiskTier"]

logger = logging.getLogger(__name__)

_MAX_LOGGED_SCOPES = 64
"""After which the log begins anew: each scope costs the next start some milliseconds."""

_MAX_SLOTS, _LEAST_SLOT_BYTES = 16, MIB // 4
"""Slots of a chunk that may be stored compressed: half of one is lost on average, and each has a record of 256 bytes on
disk and in RAM."""

_MAX_RECORDS_BITS = 22
"""Slots are larger where the tier would have more of them: records of 1 GiB."""


class DiskTier(DiskSlab):
    """A StorageTier in a directory that other namespaces may use too, one process at a time.

    Where chunks may be stored compressed, one takes up to 16 slots, and fewer if it was. Compressed chunks are read in
    each mode of `options.packer`, and are a miss without one.

    Raises: DirectoryError from the constructor only (tiers/directory.py says when).
    """

    tier = Tier.DISK
    asking = 0
    answer_s = 0.0

    def __init__(self, options: DiskOptions, namespace: bytes, payload_bytes: int, clock: Clock | None = None) -> None:
        if payload_bytes % PAGE_BYTES:
            raise ValueError(f"a payload is whole pages of {PAGE_BYTES} bytes, not {payload_bytes}")
        self._own = namespace
        self._keys = options.keys
        self._payload_bytes = payload_bytes
        super().__init__(
            options,
            options.slot_bytes or slot_bytes_for(HEADER_BYTES + payload_bytes, options),
            clock,
            chunk_bytes=payload_bytes,
            namespace=namespace,
            gone=lambda key: self.kept.left(key),
        )
        self.kept = Kept(options.pins, payload_bytes, self._floor_chunks, self._parent_of)
        if self.directory.log is None:
            raise ValueError("a tier's directory has a log")
        self._log = self.directory.log
        self._generation = self.directory.generation
        self._refused: OrderedDict[ChunkKey, None] = OrderedDict()
        self._suspects: deque[tuple[int, ChunkKey, Mapping[int, Flaw]]] = deque()
        self._early: set[ChunkKey] = set()  # joined before an invalidation was logged: to be stamped after
        self.adopt()
        self._purge()

    def ask(self, chunks: Sequence[Chunk], tenant: int) -> None:
        return  # what is here stands in the table

    def is_asking(self, key: ChunkKey) -> bool:
        return False

    def lookup(self, key: ChunkKey) -> bool:
        return self._readable(key) is not None

    def terms(self, key: ChunkKey) -> Terms:
        return self.record(key).terms

    def labelled(self, scope: Scope) -> list[Chunk]:
        found: dict[ChunkKey, Chunk] = {}
        for slot in self._table.taken([scope], slot_of=self._slot_of):
            key: ChunkKey | None = self._table.key(slot)
            while key is not None and key not in found and self.lookup(key):
                record = self.record(key)
                found[key] = Chunk(key, record.parent, record.place)
                key = record.parent
        return list(found.values())

    def holds_back(self, key: ChunkKey, terms: Terms) -> bool:
        # A chunk that comes back while its invalidation is not logged would have the old bytes' generation, perhaps in
        # their slot; nothing of that kind is left to what a power loss drops and keeps.
        return self._commits.hold_back(key, self._own, terms)

    def released(self) -> list[ChunkKey]:
        return self._commits.released()

    def submit_store(self, chunk: Chunk, terms: Terms, payload: memoryview) -> bool:
        """As StorageTier says; on a full disk, leaves are evicted only for chunks that are offered a second time."""
        if len(payload) != self._payload_bytes:
            raise ValueError(f"the payload has {len(payload)} bytes, not {self._payload_bytes}")
        if chunk.key in self or not self.can_store() or self._commits.takes(chunk.key, self._own, terms):
            return False
        may_evict = chunk.key in self._refused
        if may_evict or self._room.has_free:
            terms = terms.at(self._generation)
            stamp = secrets.randbits(64)
            record = Record(chunk.key, chunk.parent, self._own, self._payload_bytes, terms, stamp, chunk.index)
            if self.store(record, [payload], may_evict=may_evict):
                self._refused.pop(chunk.key, None)
                return True
        self._refused[chunk.key] = None
        if len(self._refused) > self.directory.geometry.slots + 1024:
            self._refused.popitem(last=False)
        return False

    def submit_load(self, key: ChunkKey, into: memoryview) -> bool:
        if len(into) != self._payload_bytes:
            raise ValueError(f"the buffer has {len(into)} bytes, not {self._payload_bytes}")
        return self.load(key, [into])

    def finished(self) -> list[Transfer]:
        transfers = super().finished()
        while self._suspects:
            slot, key, flaws = self._suspects.popleft()
            if (entry := self._entries.get(key)) is not None and entry.slot == slot:
                self._note_flaws(entry, flaws)
                self._delete(entry)
                self.losses.quarantined += 1
        if self._early and not self._commits:
            for key in self._early & self._entries.keys():
                self.stamp(key, self.terms(key))
            self._early.clear()
        return transfers

    def wait(self, timeout_s: float) -> bool:
        return self._transfers.landed.wait(timeout_s)

    def join(self, key: ChunkKey, terms: Terms) -> None:
        if key not in self:
            return
        before = self.terms(key)
        joined = before.joined(terms)
        if joined is not before:
            self.stamp(key, joined)
            if self._commits:
                self._early.add(key)

    def stamp(self, key: ChunkKey, terms: Terms) -> None:
        """Keep a chunk on new terms, as of now.

        It outlived all that was invalidated so far: a label that it gets now must not count as one it had then.
        """
        super().stamp(key, terms.at(self._generation))

    def invalidate(self, scopes: Sequence[Scope], durable: Durable) -> int:
        keys = {self._table.key(slot) for slot in self._table.taken(scopes, slot_of=self._slot_of)}
        keys |= self._lru.descendants(keys.union(*(scope.keys or () for scope in scopes)))
        for key in keys:
            self._delete_one(self._entries[key])
        self._commits.submit(scopes, durable)
        return len(keys)

    def rename(self, namespace: bytes, *, forget: bool) -> None:
        """As StorageTier says. Costs about 0.3 us a chunk that is here."""
        if namespace == self._own:
            return
        self._queue.drop()
        for entry in [entry for entry in self._entries.values() if entry.is_own] if forget else ():
            self._delete_one(entry)
        self._refused.clear()
        self._own = namespace
        self._adopt_namespace(namespace)

    def usage(self) -> TierUsage:
        usage = super().usage()
        slots = self._lru.size / len(self) if len(self) else self.chunk_slots  # of a chunk that is here
        return replace(
            usage,
            chunks=round(usage.chunks / slots),
            capacity_chunks=int(usage.capacity_chunks / slots),
            pinned_chunks=self.kept.chunks,
        )

    def verification(self) -> FrameCheck:
        """A check of all that is stored here, to be run on another thread; what is corrupt will be quarantined."""
        return FrameCheck(
            self.directory,
            self._keys,
            self._stored,
            lambda slot, key, flaws: self._suspects.append((slot, key, flaws)),
            self._payload_bytes,
            self._clock,
        )

    # -- the scheduler's thread ------------------------------------------------------------------------------------

    def _slot_of(self, key: ChunkKey) -> int | None:
        entry = self._entries.get(key)
        return None if entry is None else entry.slot

    def _stored(self, slot: int, key: ChunkKey) -> Entry | None:
        """The chunk's stay in a slot, if it is there whole."""
        entry = self._entries.get(key)
        return entry if entry is not None and entry.slot == slot and not entry.writing else None

    def _floor_chunks(self, tenant: int) -> int:
        return self._lru.floor(tenant) // self.chunk_slots

    def _victim(self, tenant: int, parent: ChunkKey | None, slots: int) -> ChunkKey | None:
        """As the slab says; one that is pinned only if no other may go, and it is the last in turn then."""
        may_go, pinned = self._may_go(parent), list[ChunkKey]()

        def is_free(key: ChunkKey) -> bool:
            if not may_go(key):
                return False
            if self._entries[key].is_own and self.kept.keeps(key, self.terms):
                pinned.append(key)
                return False
            return True

        victim = self._lru.victim(tenant, is_free, size=slots)
        self._lru.defer(pinned)
        return victim if victim is not None or not pinned else self._lru.victim(tenant, may_go, size=slots)

    def _parent_of(self, key: ChunkKey) -> ChunkKey | None:
        parent = self.record(key).parent
        return parent if parent in self._entries else None

    def _tick(self) -> None:
        self._purge()
        super()._tick()

    def _purge(self) -> None:
        before = len(self)
        for slot in self._table.expired(self._clock.unix()):
            self.discard(self._table.key(slot))
        self.losses.expired += before - len(self)

    # -- the log's thread ------------------------------------------------------------------------------------------

    def _write_log(self, number: int, scopes: Sequence[Scope]) -> None:
        """Make invalidations durable, with one sync however many they are. Raises: OSError.

        Nothing was stored under a generation between theirs, so that of the last is right for all. The table first:
        what the log alone would take follows from labels that were joined and from chunks in between, whose records may
        not be on the disk yet.
        """
        self._table.flush()
        if not scopes:  # `settle`: an entry without a scope would be damage to whoever reads the log
            return
        generation = self.directory.generation + number
        self._log.append(Invalidation(generation, tuple(dict.fromkeys(scopes)), self._clock.unix()))
        self._generation = generation
        if self._log.scopes >= _MAX_LOGGED_SCOPES:
            self._log_queue.submit(lambda scratch: self._shorten_log(), lambda: None, urgent=False)

    def _shorten_log(self) -> None:
        """Begin the log anew: the table says by itself what was invalidated up to here."""
        if self._log.scopes < _MAX_LOGGED_SCOPES:
            return  # another job did
        try:
            self._log.begin(self._generation)
        except OSError as error:
            logger.warning("disk_log_not_shortened path=%s error=%s", self.directory.path, str(error))


def slot_bytes_for(frame_bytes: int, options: DiskOptions) -> int:
    """Of a new directory's slots: a chunk fills one, or up to 16 where it may be compressed."""
    least = max(_LEAST_SLOT_BYTES, options.bytes >> _MAX_RECORDS_BITS)
    is_packing = options.packer is not None and options.packer.mode != "never"
    slots = 1 if not is_packing else max(1, min(_MAX_SLOTS, frame_bytes // least))
    return round_up(-(-frame_bytes // slots), PAGE_BYTES)
