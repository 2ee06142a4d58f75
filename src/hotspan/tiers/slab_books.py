"""The books of a slab on disk: which chunk is in which slots, and which goes next. Only its owner's thread has them.

A chunk is in the table (on disk, about to be), among the entries, and in the eviction order, or in none of them. What
changes a record is written by the I/O threads (tiers/slab_transfers.py).
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from hotspan.core.clock import Clock
from hotspan.core.frame import HEADER_BYTES
from hotspan.core.terms import Terms
from hotspan.core.types import ChunkKey
from hotspan.tiers.base import Losses
from hotspan.tiers.directory import OpenDirectory
from hotspan.tiers.eviction import LeafArc
from hotspan.tiers.record import MAX_PARTS, Flaw, Record
from hotspan.tiers.room import SlotRoom
from hotspan.tiers.shares import Shares
from hotspan.tiers.slab_transfers import Entry, SlabTransfers

logger = logging.getLogger(__name__)

_NOBODY = -1
"""The tenant for whom chunks are evicted when the file system runs low."""

_Parts = dict[tuple[ChunkKey, int], dict[int, int]]
"""The slots of each chunk's parts after the first, by key and stamp, then by number."""


class SlabBooks:
    """Chunks and their slots. `adopt` first: it takes over what a former process left.

    namespace: chunks of others take space and are not found; None: those of all are found.
    has_gaps:  whether a chunk may be here without its parent.
    gone:      told of each chunk that was evicted or deleted.
    """

    def __init__(
        self,
        directory: OpenDirectory,
        room: SlotRoom,
        transfers: SlabTransfers,
        shares: Shares,
        clock: Clock,
        *,
        namespace: bytes | None,
        has_gaps: bool,
        gone: Callable[[ChunkKey], None],
    ) -> None:
        self.directory = directory
        self.slot_bytes = directory.geometry.slot_bytes
        self.losses = Losses()
        self._table = directory.table
        self._room = room
        self._transfers = transfers
        self._clock = clock
        self._namespace, self._has_gaps, self._gone = namespace, has_gaps, gone
        self._entries: dict[ChunkKey, Entry] = {}
        self._lru = LeafArc(directory.geometry.slots, shares)

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
            self._transfers.write(entry.slots)

    def discard(self, key: ChunkKey) -> None:
        """Forget a chunk and its descendants; they may come back after a crash until the table was flushed."""
        entry = self._entries.get(key)
        if entry is not None:
            self._delete(entry)

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
            self._transfers.write([*bad])
        self._free_records([slot for slot in entry.slots if not bad or slot not in bad])

    def _shrink(self, entry: Entry, stored_bytes: int) -> None:
        """A chunk was stored compressed: its record says so now, and the slots that it does not need are free again."""
        slots = entry.slots
        count = self.directory.geometry.slots_for(stored_bytes)
        entry.more = slots[1:count]
        self._put(entry, self._table.record(entry.slot).packed(stored_bytes))
        self._lru.sized(entry.key, count)
        self._transfers.write(entry.slots)
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
        self._transfers.free(slots)
