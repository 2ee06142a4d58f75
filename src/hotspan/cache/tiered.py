"""TieredCache: look up, promote, store, persist. One thread (the scheduler's) calls it; nothing here waits.

    engine --begin_store/end_store--> RAM slot --submit_store (background)--> disk
    engine <--begin_load/end_load---- RAM slot <--submit_load (promotion)---- disk

HIT is said only of what is in RAM. What lies below is promoted while the request waits (RETRY); a promotion that fails,
or makes no progress for `patience_s`, or finds no room in RAM is a MISS, and the request's prefix is cut there.
This file is the one place where a tier's fault becomes a miss.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hotspan.cache.entry import Entry, Reader, State
from hotspan.cache.ram import RamTier
from hotspan.cache.stats import CacheStats
from hotspan.core.clock import Clock, SystemClock
from hotspan.core.types import Chunk, ChunkKey, Lookup, Tier
from hotspan.tiers.base import StorageTier, TierUsage, Transfer
from hotspan.tiers.slab import SharedSlab

PATIENCE_S = 0.050
"""How long a request waits while nothing at all lands in RAM."""

_QUEUE_PATIENCE = 20
"""How many times longer it waits in the queue while others' chunks land."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the engine is to copy a chunk."""

    chunk: Chunk
    slot: int


class TieredCache:
    """RAM over one optional tier below it.

    slab:       the RAM tier's memory; slot i is a chunk's bytes.
    below:      the disk tier, or None.
    patience_s: how long a request waits for a promotion that makes no progress.
    stats:      counts since `take_stats`; the engine adds what only it knows.
    """

    def __init__(
        self,
        slab: SharedSlab,
        below: StorageTier | None,
        *,
        patience_s: float = PATIENCE_S,
        clock: Clock | None = None,
    ) -> None:
        self.ram = RamTier(slab)
        self.stats = CacheStats()
        self._below = below
        self._patience_s = patience_s
        self._clock = clock or SystemClock()
        self._unpersisted: dict[ChunkKey, None] = {}  # in the order in which they came
        self._persisting: dict[ChunkKey, Entry] = {}
        self._promoting: dict[ChunkKey, Entry] = {}
        self._held: list[int] = []  # slots of cleared chunks that the engine may still copy from or into
        self._loading = 0
        self._landed_s = 0.0

    # -- look up ---------------------------------------------------------------------------------------------------

    def lookup(self, chunk: Chunk, reader: Reader) -> Lookup:
        """Where one chunk of the reader's chain stands; starts its promotion if it lies below RAM.

        HIT pins it for the reader until `release`. Ask in the chain's order, and no further than the first MISS.
        """
        entry = self.ram.entries.get(chunk.key)
        if entry is not None and entry.state is State.READY:
            self._pin(entry, reader)
            return Lookup.HIT
        if reader.cut:
            return Lookup.MISS
        if entry is None:
            entry = self._promote(chunk)
            if entry is None:
                return self._await_room(chunk, reader)
        if chunk.key not in reader.waiting:
            reader.waiting.add(chunk.key)
            entry.readers.append(reader)
            self._pin(entry, reader)
        return self._cut(reader) if self._is_late(reader) else Lookup.RETRY

    def is_waiting(self, reader: Reader) -> bool:
        """Whether asking again would only be told RETRY: what the reader waits for is on its way and not late."""
        return bool(reader.waiting) and not self._is_late(reader)

    def release(self, reader: Reader) -> None:
        """The reader was scheduled, finished or gave up: what it held may go."""
        for key, entry in reader.pins.items():
            entry.pins -= 1
            if key in reader.waiting:
                entry.readers.remove(reader)
        reader.pins.clear()
        reader.waiting.clear()
        reader.since_s = None

    # -- load ------------------------------------------------------------------------------------------------------

    def begin_load(self, keys: Sequence[ChunkKey], reader: Reader) -> list[int]:
        """The slots of chunks that were HIT for this reader; they stay until `end_load`.

        Raises: KeyError if one is not in RAM (a bug of the caller: HIT is said of RAM only).
        """
        entries = [self.ram.entries[key] for key in keys]
        if any(entry.state is not State.READY for entry in entries):
            raise KeyError("a chunk is still on its way to RAM")
        for entry in entries:
            entry.pins += 1
            entry.loads += 1
        self._loading += len(keys)
        self._touch(keys)
        self.release(reader)
        return [entry.slot for entry in entries]

    def end_load(self, keys: Iterable[ChunkKey]) -> None:
        """The engine has its copies."""
        for key in keys:
            entry = self.ram.entries.get(key)
            if entry is not None and entry.loads > 0:
                entry.pins -= 1
                entry.loads -= 1
                self._loading -= 1

    # -- store -----------------------------------------------------------------------------------------------------

    def begin_store(self, chunks: Sequence[Chunk]) -> list[Placement]:
        """Slots for those of a request's new chunks that are worth keeping, in order; the rest is left out.

        Left out: what is in RAM already, what has no ancestors here to stand on, and what finds no room.
        """
        self.step()
        placements: list[Placement] = []
        for chunk in chunks:
            if chunk.key in self.ram.entries:
                continue
            entry = None
            if chunk.parent is None or chunk.parent in self.ram.entries or self._is_below(chunk.parent):
                entry = self.ram.add(chunk, State.STORING, self._is_below)
            if entry is None:
                self.stats.stores_refused[Tier.RAM] += 1
            else:
                placements.append(Placement(chunk, entry.slot))
        return placements

    def end_store(self, chunks: Iterable[Chunk], *, success: bool = True) -> None:
        """The engine's copies are complete: from now on the chunks are hits, and go on to the tier below."""
        for chunk in chunks:
            entry = self.ram.entries.get(chunk.key)
            if entry is None or entry.state is not State.STORING:
                continue  # dropped by `clear` meanwhile
            if not success:
                self._wake(entry, None)
                self.ram.free(self.ram.forget(entry))
                continue
            entry.state = State.READY
            self.stats.store_bytes[Tier.RAM] += self.ram.slab.slot_bytes
            self._wake(entry, Tier.RAM)
            if self._below is not None and not self._is_below(chunk.key):
                self._unpersisted[chunk.key] = None
        self._persist()

    # -- in between ------------------------------------------------------------------------------------------------

    @property
    def is_moving(self) -> bool:
        """Whether promotions are on their way."""
        return bool(self._promoting)

    @property
    def is_persisting(self) -> bool:
        """Whether chunks wait for the tier below, or are on their way to it."""
        return bool(self._unpersisted or self._persisting)

    def step(self) -> None:
        """Take note of what the tier below finished, and give it more to write."""
        if self._below is None:
            return
        for transfer in self._below.finished():
            if transfer.is_load:
                self._end_promotion(transfer)
            else:
                self._end_persist(transfer)
        self._persist()

    def wait(self, timeout_s: float) -> None:
        """Sleep until the tier below finishes something, at most `timeout_s`."""
        if self._below is not None:
            self._below.wait(timeout_s)

    def clear(self) -> int:
        """Forget every chunk on every tier; returns how many.

        Slots that the engine still copies from or into are held back until `end_clear`; those of other transfers come
        free when these end.
        """
        entries = list(self.ram.entries.values())
        for entry in entries:
            self._wake(entry, None)
            slot = self.ram.forget(entry)
            if entry.state is State.PROMOTING or self._persisting.get(entry.chunk.key) is entry:
                entry.doomed = True
            elif entry.state is State.STORING or entry.loads:
                self._held.append(slot)
            else:
                self.ram.free(slot)
        self._unpersisted.clear()
        self._loading = 0
        return len(entries) + (self._below.clear() if self._below is not None else 0)

    def end_clear(self) -> None:
        """The engine's copies that were in flight at the last `clear` have ended."""
        while self._held:
            self.ram.free(self._held.pop())

    def take_stats(self) -> CacheStats:
        """The counts since the last call."""
        stats, self.stats = self.stats, CacheStats()
        if self.ram.evictions:
            stats.evictions[Tier.RAM], self.ram.evictions = self.ram.evictions, 0
        return stats

    def usage(self) -> dict[Tier, TierUsage]:
        """How full each tier is."""
        usage = {Tier.RAM: self.ram.usage()}
        if self._below is not None:
            usage[self._below.tier] = self._below.usage()
        return usage

    def close(self, timeout_s: float) -> None:
        """Write what waits to be written, at most `timeout_s`, and let go of all tiers."""
        deadline = self._clock.monotonic() + timeout_s
        while self._below is not None and self.is_persisting:
            left = deadline - self._clock.monotonic()
            if left <= 0:
                break
            self.wait(min(left, 0.05))
            self.step()
        if self._below is not None:
            self._below.close(max(0.0, deadline - self._clock.monotonic()))
        self.ram.slab.close()

    def check(self) -> None:
        """Raise AssertionError if the books do not agree."""
        doomed = [entry.slot for entry in (*self._promoting.values(), *self._persisting.values()) if entry.doomed]
        self.ram.check([*doomed, *self._held])

    # -- inside ----------------------------------------------------------------------------------------------------

    def _is_below(self, key: ChunkKey) -> bool:
        """Whether the tier below has the chunk, or is being given it."""
        if self._below is None:
            return False
        persisting = self._persisting.get(key)
        return self._below.lookup(key) or (persisting is not None and not persisting.doomed)

    def _pin(self, entry: Entry, reader: Reader) -> None:
        held = reader.pins.get(entry.chunk.key)
        if held is entry:
            return
        if held is not None:
            held.pins -= 1  # dropped since, and stored anew
        reader.pins[entry.chunk.key] = entry
        entry.pins += 1

    def _is_late(self, reader: Reader) -> bool:
        """Whether nothing has landed for too long.

        Anyone's chunk counts, since a reader may stand behind others in the tier's queue, but not for ever: one I/O may
        hang while others go on.
        """
        now = self._clock.monotonic()
        if reader.since_s is None:
            reader.since_s = now
        own, any_s = now - reader.since_s, now - max(reader.since_s, self._landed_s)
        return any_s > self._patience_s or own > _QUEUE_PATIENCE * self._patience_s

    def _touch(self, keys: Sequence[ChunkKey]) -> None:
        leaf_first = list(reversed(keys))
        self.ram.touch(leaf_first)
        if self._below is not None:
            self._below.touch(leaf_first)
            for key in keys:
                if not self._is_below(key):
                    self._unpersisted[key] = None  # refused before, or evicted there: a second touch

    def _promote(self, chunk: Chunk) -> Entry | None:
        """Start to read a chunk from below into RAM; None if it is not there or RAM has no room."""
        if self._below is None or not self._below.lookup(chunk.key):
            return None
        if chunk.key in self._promoting:
            return None  # forgotten by `clear`, and its load still runs: two of one name could not be told apart
        entry = self.ram.add(chunk, State.PROMOTING, self._is_below)
        if entry is None:
            return None
        if not self._below.submit_load(chunk.key, self.ram.slab.slot(entry.slot)):
            self.ram.free(self.ram.forget(entry))
            return None
        self._promoting[chunk.key] = entry
        return entry

    def _await_room(self, chunk: Chunk, reader: Reader) -> Lookup:
        """A chunk could not be promoted: wait a little if others are about to make room, else miss."""
        if self._below is None or not self._below.lookup(chunk.key):
            return Lookup.MISS
        others_move = self._loading or len(self._promoting) > len(reader.waiting)
        if not others_move or reader.pins or self._is_late(reader):
            return self._cut(reader)
        return Lookup.RETRY

    def _cut(self, reader: Reader) -> Lookup:
        reader.cut = True
        self.stats.cuts += 1
        return Lookup.MISS

    def _persist(self) -> None:
        """Hand chunks to the tier below, oldest first, until it takes no more."""
        while self._below is not None and self._unpersisted and self._below.can_store():
            key = next(iter(self._unpersisted))
            del self._unpersisted[key]
            entry = self.ram.entries.get(key)
            if entry is None or entry.state is not State.READY or key in self._persisting or self._below.lookup(key):
                continue
            if self._below.submit_store(entry.chunk, self.ram.slab.slot(entry.slot)):
                entry.pins += 1
                self._persisting[key] = entry
            else:
                self.stats.stores_refused[self._below.tier] += 1

    def _end_persist(self, transfer: Transfer) -> None:
        entry = self._persisting.pop(transfer.key)
        entry.pins -= 1
        self._settle(transfer)
        if entry.doomed:
            if entry.loads:
                self._held.append(entry.slot)
            else:
                self.ram.free(entry.slot)
            if transfer.key in self.ram.entries:
                self._unpersisted[transfer.key] = None  # stored anew while the old write still ran

    def _end_promotion(self, transfer: Transfer) -> None:
        entry = self._promoting.pop(transfer.key)
        tier = self._settle(transfer)
        if entry.doomed:
            self.ram.free(entry.slot)
        elif transfer.fault is None:
            entry.state = State.READY
            self._wake(entry, tier)
        else:
            for reader in entry.readers:
                reader.cut = True
            self._wake(entry, None)
            self.ram.free(self.ram.forget(entry))

    def _settle(self, transfer: Transfer) -> Tier:
        """Count a transfer; returns the tier it was of."""
        assert self._below is not None
        tier = self._below.tier
        if transfer.fault is not None:
            self.stats.faults[tier, transfer.fault.value] += 1
        elif transfer.is_load:
            self.stats.loaded(tier, transfer.bytes, transfer.seconds)
        else:
            self.stats.stored(tier, transfer.bytes, transfer.seconds)
        return tier

    def _wake(self, entry: Entry, source: Tier | None) -> None:
        """Tell the readers of a chunk that it came to RAM from `source`, or (None) that it never will."""
        if source is not None:
            self._landed_s = self._clock.monotonic()
        for reader in entry.readers:
            reader.waiting.discard(entry.chunk.key)
            reader.since_s = self._landed_s if reader.waiting and source is not None else None
            if source is not None:
                reader.promoted[entry.chunk.key] = source
        entry.readers.clear()
