"""TieredCache: look up, promote, store, persist, forget. One thread (the scheduler's) calls it; nothing here waits.

    engine --begin_store/end_store--> RAM slot --submit_store (background)--> disk
    engine <--begin_load/end_load---- RAM slot <--submit_load (promotion)---- disk

HIT is said only of what is in RAM. What lies below is promoted while the request waits (RETRY); a promotion that fails,
or makes no progress for `patience_s`, or finds no room in RAM is a MISS, and the request's prefix is cut there.
This file is the one place where a tier's fault becomes a miss.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hotspan.cache.controller import StoreController
from hotspan.cache.entry import Entry, Reader, State
from hotspan.cache.ram import RamTier
from hotspan.cache.stats import CacheStats
from hotspan.core.clock import Clock, SystemClock
from hotspan.core.terms import Scope, Terms
from hotspan.core.types import Chunk, ChunkKey, Lookup, Tier
from hotspan.tiers.base import Durable, StorageTier, TierUsage, Transfer
from hotspan.tiers.shares import Shares
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
    namespace:  of all its chunks.
    shares:     of RAM, by tenant.
    patience_s: how long a request waits for a promotion that makes no progress.
    stats:      counts since they were taken; the engine adds what only it knows.
    """

    def __init__(
        self,
        slab: SharedSlab,
        below: StorageTier | None,
        *,
        namespace: bytes = bytes(32),
        shares: Shares | None = None,
        patience_s: float = PATIENCE_S,
        clock: Clock | None = None,
    ) -> None:
        self.ram = RamTier(slab, shares)
        self.stats = CacheStats()
        self._below = below
        self._namespace = namespace
        self._patience_s = patience_s
        self._clock = clock or SystemClock()
        self._controller = StoreController(self.ram, below, self.stats)
        self._promoting: dict[ChunkKey, Entry] = {}
        self._doomed: dict[ChunkKey, Entry] = {}  # forgotten, and the engine still copies from or into their slots
        self._held: list[Entry] = []  # cleared, likewise, and the engine won't say when it is done
        self._expiries: list[tuple[int, ChunkKey]] = []
        self._loading = 0
        self._landed_s = 0.0

    # -- look up ---------------------------------------------------------------------------------------------------

    def lookup(self, chunk: Chunk, reader: Reader) -> Lookup:
        """Where one chunk of the reader's chain stands; starts its promotion if it lies below RAM.

        HIT pins it for the reader until `release`. Ask in the chain's order, and no further than the first MISS.
        """
        entry = self.ram.entries.get(chunk.key)
        if entry is not None and entry.terms.expires_s and self._clock.unix() >= entry.terms.expires_s:
            self._expire()
            entry = None
        if entry is not None and entry.state is State.READY:
            if reader.pins.get(chunk.key) is not entry:
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
        return self._cut_late(reader) if self._is_late(reader) else Lookup.RETRY

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

    def join(self, chunks: Iterable[Chunk], reader: Reader) -> None:
        """The reader's request uses these chunks, wherever they lie: they carry its tags and its expiry from now on."""
        for chunk in chunks:
            terms = reader.terms_at(chunk.index)
            entry = self.ram.entries.get(chunk.key)
            if entry is not None:
                self._join(entry, terms, renew=reader.renews)
            elif self._below is not None and self._below.lookup(chunk.key):
                self._below.join(chunk.key, terms)

    def terms(self, key: ChunkKey) -> Terms | None:
        """The terms of a chunk, wherever it lies; None if it is nowhere."""
        entry = self.ram.entries.get(key)
        if entry is not None:
            return entry.terms
        return self._below.terms(key) if self._below is not None and self._below.lookup(key) else None

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
            entry = self._doomed.get(key) or self.ram.entries.get(key)
            if entry is not None and entry.loads > 0:
                entry.pins -= 1
                entry.loads -= 1
                self._loading -= 1
                self._let_go(entry)

    # -- store -----------------------------------------------------------------------------------------------------

    def begin_store(self, chunks: Sequence[Chunk], reader: Reader | None = None) -> list[Placement]:
        """Slots for those of a request's new chunks that are worth keeping, in order; the rest is left out.

        Left out: what is in RAM already, what has no ancestors here to stand on, and what finds no room.
        """
        self.step()
        reader = reader or Reader()
        placements: list[Placement] = []
        for chunk in chunks:
            terms = reader.terms_at(chunk.index)
            if (known := self.ram.entries.get(chunk.key)) is not None:
                self._join(known, terms, renew=False)
                continue
            entry = None
            if chunk.key not in self._doomed and self._has_parent(chunk):
                was_nowhere = not self._controller.holds(chunk.key)
                entry = self._add(chunk, self._joined_below(chunk.key, terms), State.STORING)
                if entry is not None and was_nowhere:  # what stood on it stood behind a gap
                    for fallen in self.ram.above(entry):
                        self._forget_one(fallen)
            if entry is None:
                self.stats.stores_refused[Tier.RAM] += 1
            else:
                placements.append(Placement(chunk, entry.slot))
        return placements

    def end_store(self, chunks: Iterable[Chunk], *, success: bool = True) -> None:
        """The engine's copies are complete: from now on the chunks are hits, and go on to the tier below."""
        for chunk in chunks:
            entry = self._doomed.get(chunk.key) or self.ram.entries.get(chunk.key)
            if entry is None or entry.state is not State.STORING:
                continue  # dropped by `clear` meanwhile
            entry.state = State.READY
            if entry.doomed:
                self._let_go(entry)
            elif not success:
                self._forget(entry)
            else:
                self.stats.store_bytes[Tier.RAM] += self.ram.slab.slot_bytes
                self._wake(entry, Tier.RAM)
                self._controller.offer(chunk.key)
        self._controller.step()

    # -- forget ----------------------------------------------------------------------------------------------------

    def invalidate(self, scope: Scope, durable: Durable) -> dict[Tier, int]:
        """Forget at once, on every tier, what `scope` takes and what stands on it; returns how many chunks by tier.

        `durable` is called when not even a crash can bring them back (at once where nothing is below RAM), or with
        False when that can't be had.
        """
        removed = {Tier.RAM: 0}
        for entry in self.ram.taken(scope, self._namespace):
            self._forget_one(entry)
            removed[Tier.RAM] += 1
        if self._below is None:
            durable(True)
        else:
            removed[self._below.tier] = self._below.invalidate(scope, durable)
        removed[Tier.RAM] += self._forget_fallen()
        self.stats.invalidated.update(removed)
        return removed

    def clear(self) -> int:
        """Forget every chunk on every tier, when the engine forgets its copies in flight; returns how many.

        The slots of those copies are held back until `end_clear`.
        """
        removed = self.invalidate(Scope(), lambda done: None)
        for entry in self._doomed.values():
            entry.state, entry.loads, entry.held = State.READY, 0, True
            self._held.append(entry)
        self._doomed.clear()
        self._loading = 0
        return sum(removed.values())

    def end_clear(self) -> None:
        """The engine's copies that were in flight at the last `clear` have ended."""
        while self._held:
            entry = self._held.pop()
            entry.held = False
            self._let_go(entry)

    # -- in between ------------------------------------------------------------------------------------------------

    @property
    def is_moving(self) -> bool:
        """Whether promotions are on their way."""
        return bool(self._promoting)

    @property
    def is_persisting(self) -> bool:
        """Whether chunks wait for the tier below, or are on their way to it."""
        return self._controller.is_busy

    def step(self) -> None:
        """Take note of what the tier below finished and of what expired, and give the tier more to write."""
        self._expire()
        if self._below is None:
            return
        for transfer in self._below.finished():
            if transfer.is_load:
                self._end_promotion(transfer)
            else:
                self._settle(transfer)
                self._let_go(self._controller.ended(transfer))
        self._controller.step()

    def wait(self, timeout_s: float) -> None:
        """Sleep until the tier below finishes something, at most `timeout_s`."""
        if self._below is not None:
            self._below.wait(timeout_s)

    def take_stats(self) -> CacheStats:
        """The counts since the last call."""
        if self.ram.evictions:
            self.stats.evictions[Tier.RAM], self.ram.evictions = self.ram.evictions, 0
        return self.stats.take()

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
        lent = [*self._promoting.values(), *self._controller.in_flight(), *self._doomed.values(), *self._held]
        self.ram.check({entry.slot for entry in lent if entry.doomed})
        if any(not entry.doomed or not entry.engine_copies for entry in self._doomed.values()):
            raise AssertionError("a forgotten chunk that nobody copies is kept")

    # -- inside ----------------------------------------------------------------------------------------------------

    def _add(self, chunk: Chunk, terms: Terms, state: State) -> Entry | None:
        entry = self.ram.add(chunk, terms, state, self._controller.holds)
        if entry is not None and terms.expires_s:
            heapq.heappush(self._expiries, (terms.expires_s, chunk.key))
        return entry

    def _has_parent(self, chunk: Chunk) -> bool:
        """Whether the chunk stands on something, in RAM or below."""
        return chunk.parent is None or chunk.parent in self.ram.entries or self._controller.holds(chunk.parent)

    def _joined_below(self, key: ChunkKey, terms: Terms) -> Terms:
        """The terms of a chunk that was computed again although the tier below has it: one set for both copies.

        Told also to a tier that does not find it: one that is given up may have it still, and come back.
        """
        if self._below is None:
            return terms
        self._below.join(key, terms)
        return self._below.terms(key) if self._below.lookup(key) else terms

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
                self._controller.offer(key)  # refused before, or evicted there: a second touch

    def _join(self, entry: Entry, terms: Terms, *, renew: bool) -> None:
        joined = entry.terms.joined(terms)
        if renew and terms.expires_s > joined.expires_s > 0:
            joined = replace(joined, expires_s=terms.expires_s)
            if self._below is not None and entry.state is State.READY:
                self._below.discard(
                    entry.chunk.key
                )  # its frame says the old expiry: write it anew, and what stood on it
                for each in sorted([entry, *self.ram.above(entry)], key=lambda each: each.chunk.index):
                    if each.state is State.READY:
                        self._controller.offer(each.chunk.key)
        if joined is entry.terms:
            return
        entry.terms = joined
        if joined.expires_s:
            heapq.heappush(self._expiries, (joined.expires_s, entry.chunk.key))
        if self._below is not None:
            self._below.join(entry.chunk.key, joined)

    def _expire(self) -> None:
        """Forget what is in RAM past its time."""
        if not self._expiries or self._expiries[0][0] > self._clock.unix():
            return
        now = self._clock.unix()
        while self._expiries and self._expiries[0][0] <= now:
            _, key = heapq.heappop(self._expiries)
            entry = self.ram.entries.get(key)
            if entry is not None and 0 < entry.terms.expires_s <= now:
                self._forget(entry)
                self.stats.expired[Tier.RAM] += 1

    def _promote(self, chunk: Chunk) -> Entry | None:
        """Start to read a chunk from below into RAM; None if it is not there or RAM has no room."""
        if self._below is None or not self._below.lookup(chunk.key):
            return None
        if chunk.key in self._promoting or chunk.key in self._doomed:
            return None  # forgotten, and its slot is still in use: two of one name could not be told apart
        entry = self._add(chunk, self._below.terms(chunk.key), State.PROMOTING)
        if entry is None:
            return None
        if not self._below.submit_load(chunk.key, self.ram.slab.slot(entry.slot)):
            self.ram.free(self.ram.forget(entry))
            return None
        entry.moving += 1
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

    def _cut_late(self, reader: Reader) -> Lookup:
        if self._below is not None:
            self._below.late()
        return self._cut(reader)

    def _end_promotion(self, transfer: Transfer) -> None:
        entry = self._promoting.pop(transfer.key)
        entry.moving -= 1
        tier = self._settle(transfer)
        if entry.doomed:
            self._let_go(entry)
        elif transfer.fault is None:
            entry.state = State.READY
            self._wake(entry, tier)
        else:
            for reader in entry.readers:
                reader.cut = True
            self._forget(entry)

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

    def _forget(self, entry: Entry) -> None:
        """Make a chunk unfindable, and what stands on it: behind a gap no invalidation would reach it."""
        for fallen in self.ram.above(entry):
            self._forget_one(fallen)
        self._forget_one(entry)

    def _forget_one(self, entry: Entry) -> None:
        """Make one chunk unfindable; its slot comes free when nothing uses it any more."""
        self._wake(entry, None)
        self.ram.forget(entry)
        self._controller.forget(entry.chunk.key)
        entry.doomed = True
        if entry.engine_copies:
            self._doomed[entry.chunk.key] = entry
        self._let_go(entry)

    def _forget_fallen(self) -> int:
        """Forget what stood on chunks that the tier below alone had, and has no more; returns how many."""
        before = len(self.ram.entries)
        for entry in [entry for entry in self.ram.entries.values() if not self._has_parent(entry.chunk)]:
            if not entry.doomed:
                self._forget(entry)
        return before - len(self.ram.entries)

    def _let_go(self, entry: Entry) -> None:
        """Free the slot of a forgotten chunk, unless it is still used."""
        if not entry.doomed:
            return
        if not entry.engine_copies and self._doomed.get(entry.chunk.key) is entry:
            del self._doomed[entry.chunk.key]
        if not entry.is_used:
            self.ram.free(entry.slot)

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
