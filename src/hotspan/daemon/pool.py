"""All objects of a node in one segment: being written, whole, leased; and who gives way when it is full.

    reserve --> being written --commit--> whole --delete, evict--> gone --its last lease ends--> free
                      |                                                                           ^
                      +---------------------------------abort-------------------------------------+

    with a disk:  whole --in the background--> whole, with a copy --evict--> on disk only --load--> whole, with a copy

Bytes are given out again only when nobody writes them and no lease pins them. One thread (the daemon's loop) owns all
of it; nothing here blocks.
"""

import itertools
import math
import secrets
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from hotspan.core.clock import Clock
from hotspan.core.types import PAGE_BYTES, ChunkKey, round_up
from hotspan.daemon.disk import DiskCopies
from hotspan.daemon.leases import Lease, LeaseBook
from hotspan.daemon.metadata import AbsentMetadata
from hotspan.daemon.space import FreeSpace
from hotspan.daemon.stored import PoolCounts, Refusal, StoredObject, Writing, joined_updates
from hotspan.l2.daemon_protocol import CHANGE_BITS
from hotspan.tiers.base import Fault
from hotspan.tiers.eviction import LeafArc, Shares
from hotspan.tiers.record import RECORD_BYTES, unpack

MAX_LEASES = 1 << 17
_CHANGES = 1 << CHANGE_BITS


class Pool:
    """Objects in `memory`, from byte `start` on; both are of whole pages.

    max_lease_s: no lease lasts longer; who asks for more is refused before (routes.py).
    disk:        where copies go; what is there is taken over.
    metadata:    of chunks that are not here.
    """

    def __init__(
        self,
        memory: memoryview,
        start: int,
        clock: Clock,
        max_lease_s: float = 600.0,
        *,
        disk: DiskCopies | None = None,
    ) -> None:
        self.memory = memory
        self.capacity_bytes = len(memory) - start
        self.used_bytes = 0
        self.counts = PoolCounts()
        self._clock = clock
        self.max_lease_s = max_lease_s
        self._space = FreeSpace(start, len(memory))
        self._objects: dict[ChunkKey, StoredObject] = {}
        self._writing: dict[ChunkKey, Writing] = {}
        self._loading: dict[ChunkKey, Writing] = {}
        self._writing_bytes = 0  # in both
        self._gone: set[StoredObject] = set()
        self._leases = LeaseBook()
        # Other daemons begin elsewhere, so that no version of theirs is taken for one of this one's.
        self._versions = itertools.count(_CHANGES * (1 + secrets.randbits(39)), _CHANGES)
        self.metadata = AbsentMetadata(clock, is_kept=disk is not None)
        # Objects differ in size, so that floors and quotas in objects would mean nothing.
        self._order = LeafArc(len(memory) // PAGE_BYTES, Shares(default_floor=0.0))
        self._disk = disk
        self._unsaved: OrderedDict[StoredObject, None] = OrderedDict()  # that wait to be written to disk
        if disk is not None:
            disk.on_gone = self._uncopied
            for stored in disk.adopt():
                stored.version = next(self._versions)
                self._objects[stored.key] = stored

    # -- writing -------------------------------------------------------------------------------------------------------

    def reserve(self, key: ChunkKey, size: int, *, is_own: bool) -> Writing | Refusal:
        """Room for an object of `size` bytes, at least 1; others give way for it."""
        if key in self._objects or key in self._writing:
            self.counts.refused_exists += 1
            return Refusal.EXISTS
        if size > self.capacity_bytes:
            self.counts.refused_too_large += 1
            return Refusal.TOO_LARGE
        if not self._make_room(size):
            self.counts.refused_no_room += 1
            return Refusal.NO_ROOM
        writing = self._writing[key] = self._writing_to(key, size, is_own=is_own)
        return writing

    def commit(self, writing: Writing) -> None:
        """The bytes are all there: from now on the object is found."""
        stored = writing.object
        if writing.is_own:
            begin = self._begin(stored)
            record = unpack(begin)
            if record is not None and record.key == stored.key:
                stored.record = begin
        self._objects[stored.key] = stored
        self._come(stored)
        self.counts.stored += 1
        self.counts.stored_bytes += stored.size
        stored.has_all_updates = self.metadata.knows(stored.key)
        stored.updates = self.metadata.take(stored.key)
        self._end(writing, self._writing)
        if self._disk is not None:
            self._unsaved[stored] = None
            self._save()

    def abort(self, writing: Writing) -> None:
        """Nobody writes the bytes any more: they are free."""
        self._space.give(writing.object.extents)
        self.counts.aborted += 1
        self._end(writing, self._writing)

    def writing(self, key: ChunkKey) -> Writing | None:
        """The object of that name that is being written, or read from a disk that moves."""
        stored = self._objects.get(key)
        is_below = stored is not None and not stored.extents and self._disk is not None and self._disk.is_up
        return self._loading.get(key) if is_below else self._writing.get(key)

    # -- the disk ------------------------------------------------------------------------------------------------------

    def load(self, key: ChunkKey) -> Writing | None:
        """Begin to read an object that is on disk only; None if there is none, or it can't be read now."""
        stored = self._objects.get(key)
        if stored is None or stored.extents or not stored.is_saved or key in self._loading:
            return None
        if self._disk is None or not self._disk.can_load() or not self._make_room(stored.size):
            return None
        loading = self._loading[key] = self._writing_to(key, stored.size)
        if not self._disk.load(stored, self._parts(loading.object), partial(self._loaded, loading, stored)):
            self._loaded(loading, stored, Fault.GONE)
            return None
        return loading

    def sweep(self) -> None:
        """End the leases whose time is over, and see to the disk; called now and then."""
        self.expire()
        if self._disk is None:
            return
        self._disk.sweep()
        if not self._disk.is_up:
            for loading in self._loading.values():
                loading.tell()
        self._save()

    # -- reading -------------------------------------------------------------------------------------------------------

    def peek(self, keys: Iterable[ChunkKey]) -> list[StoredObject | None]:
        """What is there whole, be it on a disk that works, in the order of `keys`."""
        found = list(map(self._objects.get, keys))
        if self._disk is None or self._disk.is_up:
            return found
        return [None if each is None or not each.extents else each for each in found]

    def find(self, keys: Sequence[ChunkKey]) -> list[StoredObject | None]:
        """The same, counted as hits and misses; `use` what was found."""
        found = self.peek(keys)
        misses = found.count(None)
        self.counts.misses += misses
        self.counts.hits += len(found) - misses
        return found

    def use(self, keys: Sequence[ChunkKey]) -> None:
        """These objects were found, in a chain's order."""
        self._order.touch(reversed(keys))
        if self._disk is not None:
            self._disk.use(reversed(keys))

    def lease(self, objects: Sequence[StoredObject], ttl_s: float, owner: object | None = None) -> Lease | None:
        """Pin objects; None if there are too many leases already."""
        if len(self._leases) >= MAX_LEASES:
            self.expire()
            if len(self._leases) >= MAX_LEASES:
                return None
        self.counts.leased += 1
        return self._leases.grant(objects, self._clock.monotonic() + min(ttl_s, self.max_lease_s), owner)

    def release(self, id: int, owner: object | None = None) -> None:
        """End a lease of this owner; nothing if there is none, any more."""
        self._free(self._leases.end(id, owner))

    def release_all(self, owner: object) -> None:
        """The owner is gone: its leases end."""
        self._free(self._leases.end_all(owner))

    def expire(self) -> None:
        """End the leases whose time is over."""
        now = self._clock.monotonic()
        while (lease := self._leases.expired(now)) is not None:
            self._free(self._leases.end(lease.id, lease.owner))
            self.counts.leases_expired += 1

    # -- changing ------------------------------------------------------------------------------------------------------

    def delete(self, key: ChunkKey) -> bool:
        """Forget an object, its copy and its updates, whether it was there whole. One that is being written stays."""
        stored = self._objects.get(key)
        if self.metadata.knows(key) if stored is None else stored.has_all_updates:
            self.metadata.deleted(key)
        if stored is None:
            return False
        self._remove(stored)
        self.counts.deleted += 1
        return True

    def forget_own(self) -> None:
        """Nobody can tell any more what was invalidated: hotspan's own objects go, and all updates."""
        for stored in [each for each in self._objects.values() if each.record]:
            self._remove(stored)
            self.counts.deleted += 1
        self.metadata.clear()

    def add_updates(self, updates: Mapping[ChunkKey, Iterable[bytes]]) -> None:
        """Add updates to objects, be they there or not."""
        for key, added in updates.items():
            stored = self._objects.get(key)
            if stored is None:
                self.metadata.add(key, added)
            elif (joined := joined_updates(stored.updates, added)) != stored.updates:
                self.metadata.note(key, added)
                stored.updates = joined
                if self._disk is not None:
                    self._disk.note(stored)
                stored.version += 1
                if not stored.version % _CHANGES:
                    stored.version = next(self._versions)

    # -- looking -------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._order)

    @property
    def objects(self) -> int:
        """How many there are in all, on disk and in memory."""
        return len(self._objects)

    @property
    def usage(self) -> tuple[int, int]:
        """Bytes that are taken, and that there are, in memory and on disk."""
        if self._disk is None:
            return self.used_bytes, self.capacity_bytes
        return self.used_bytes + self._disk.used_bytes, self.capacity_bytes + self._disk.capacity_bytes

    @property
    def unsaved(self) -> int:
        """How many wait to be written to disk."""
        return len(self._unsaved)

    @property
    def leases(self) -> int:
        """How many leases there are, some of them over perhaps."""
        return len(self._leases)

    @property
    def pinned_bytes(self) -> int:
        """What can't give way now: it is read, or written."""
        return self._leases.pinned_bytes + self._writing_bytes

    @property
    def free_bytes(self) -> int:
        """What nothing has to give way for."""
        return self._space.bytes

    def check(self) -> None:
        """Raise AssertionError if the books do not agree."""
        writing = [each.object for each in (*self._writing.values(), *self._loading.values())]
        taken = [*self._objects.values(), *self._gone, *writing]
        self._space.check(extent for each in taken for extent in each.extents)
        self._order.check()
        self._leases.check()
        if any(each.extents and sum(extent.size for extent in each.extents) != each.size for each in taken):
            raise AssertionError("an object is not as large as its extents")
        if any(not each.is_saved and not each.extents for each in self._objects.values()):
            raise AssertionError("an object is nowhere")
        if self._disk is not None:
            self._disk.check()
            if any(each.is_saved and each.key not in self._disk.slab for each in self._objects.values()):
                raise AssertionError("a copy is lost")
            if any(key not in self._objects for key in self._disk.slab):
                raise AssertionError("a copy is nobody's")
        here = [each for each in self._objects.values() if each.extents]
        if self.used_bytes != sum(each.room for each in here):
            raise AssertionError("used bytes are miscounted")
        if self._writing_bytes != sum(each.room for each in writing):
            raise AssertionError("bytes being written are miscounted")
        if any(each.key not in self._order for each in here) or len(self._order) != len(here):
            raise AssertionError("an object is not in the order of eviction")
        if self._objects.keys() & self._writing.keys() or not all(each.pins and each.is_gone for each in self._gone):
            raise AssertionError("an object is in two states")
        if any(each.is_gone for each in self._objects.values()):
            raise AssertionError("an object that is gone is found")

    # -- inside --------------------------------------------------------------------------------------------------------

    def _make_room(self, size: int) -> bool:
        self.expire()
        if size > self.capacity_bytes - self.pinned_bytes:
            return False  # nothing goes for what would not fit anyway
        while not self._space.can_take(size):
            victim = self._order.victim(0, self._may_go)
            if victim is None:
                return False
            self._evict(self._objects[victim])
        return True

    def _writing_to(self, key: ChunkKey, size: int, *, is_own: bool = False) -> Writing:
        extents = self._space.take(size)
        if extents is None:
            raise AssertionError("room was made, and is not there")
        writing = Writing(StoredObject(key, size, extents), is_own)
        self._writing_bytes += writing.object.room
        return writing

    def _evict(self, stored: StoredObject) -> None:
        """Leave the segment to others; what has a copy stays on disk."""
        self.counts.evicted += 1
        self.counts.evicted_bytes += stored.size
        if stored.is_saved:
            self._go(stored, evicted=True)
            self._space.give(stored.extents)
            stored.extents = ()
            return
        if self._disk is not None:
            self._disk.counts.late += 1
        self.metadata.evicted(stored)
        self._remove(stored, evicted=True)

    def _may_go(self, key: ChunkKey) -> bool:
        return not self._objects[key].pins

    def _remove(self, stored: StoredObject, *, evicted: bool = False) -> None:
        del self._objects[stored.key]
        stored.is_gone = True
        if self._disk is not None:
            self._disk.forget(stored.key)
        if not stored.extents:
            return
        self._go(stored, evicted=evicted)
        if stored.pins:
            self._gone.add(stored)
        else:
            self._space.give(stored.extents)

    def _come(self, stored: StoredObject) -> None:
        """An object is in the segment now, where it was not before."""
        self._order.add(stored.key, *stored.standing)
        self.used_bytes += stored.room
        stored.version = next(self._versions)

    def _go(self, stored: StoredObject, *, evicted: bool) -> None:
        self._order.remove(stored.key, evicted=evicted)
        self.used_bytes -= stored.room
        self._unsaved.pop(stored, None)

    def _free(self, unpinned: Iterable[StoredObject]) -> None:
        for stored in unpinned:
            if stored.is_gone:
                self._gone.remove(stored)
                self._space.give(stored.extents)

    def _end(self, writing: Writing, among: dict[ChunkKey, Writing]) -> None:
        del among[writing.object.key]
        self._writing_bytes -= writing.object.room
        writing.tell()

    def _save(self) -> None:
        """Begin to write to disk what waits for that: the write is one more lease on it."""
        while self._disk is not None and self._unsaved and self._disk.can_store():
            stored, _ = self._unsaved.popitem(last=False)
            lease = self._leases.grant([stored], math.inf, self._disk)
            if not self._disk.store(stored, self._parts(stored), partial(self._saved, stored, lease)):
                self.release(lease.id, self._disk)

    def _saved(self, stored: StoredObject, lease: Lease, fault: Fault | None) -> None:
        if fault is None:
            stored.is_saved = not stored.is_gone
        elif fault is Fault.DROPPED and not stored.is_gone:
            self._unsaved[stored] = None
        self.release(lease.id, self._disk)
        self._save()

    def _loaded(self, loading: Writing, stored: StoredObject, fault: Fault | None) -> None:
        extents = loading.object.extents
        if fault is None and not stored.is_gone:
            stored.extents = extents
            self._come(stored)
        else:
            self._space.give(extents)
            if fault not in (None, Fault.DROPPED) and not stored.is_gone:
                self.metadata.evicted(stored)
                self._remove(stored)
        self._end(loading, self._loading)

    def _uncopied(self, key: ChunkKey) -> None:
        """The copy of an object was evicted or is corrupt, or the object itself is going."""
        stored = self._objects.get(key)
        if stored is None:
            return
        stored.is_saved = False
        if not stored.extents:
            self.metadata.evicted(stored)
            self._remove(stored)

    def _parts(self, stored: StoredObject) -> list[memoryview]:
        """Where an object's bytes are, in whole pages."""
        return [self.memory[start : start + round_up(size, PAGE_BYTES)] for start, size in stored.extents]

    def _begin(self, stored: StoredObject) -> bytes:
        """The first bytes of an object, where its record is if it has one: the first extent holds a page at least."""
        offset, size = stored.extents[0]
        return bytes(self.memory[offset : offset + min(size, RECORD_BYTES)]).ljust(RECORD_BYTES, b"\0")
