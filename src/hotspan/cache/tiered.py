"""TieredCache: look up, promote, store, persist, forget. One thread (the scheduler's) calls it; nothing here waits.

    engine --begin_store/end_store--> RAM slot --submit_store (background)--> disk, L2
    engine <--begin_load/end_load---- RAM slot <--submit_load (promotion)---- disk, else L2

HIT is said only of what is in RAM. What lies in a lower tier is promoted while the request waits (RETRY), as far as the
cost model finds that faster than computing it. A promotion that fails, or finds no room in RAM, or is late is a MISS,
and the request's prefix is cut there. So is what a tier that must ask elsewhere has not answered in time.
Here and in `Waits` a tier's fault becomes a miss.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hotspan.cache.choice import Text
from hotspan.cache.cost import CostModel
from hotspan.cache.decisions import Decisions
from hotspan.cache.entry import Entry, Reader, State
from hotspan.cache.lower import LowerTiers
from hotspan.cache.prefetch import Prefetches, by_longest
from hotspan.cache.ram import RamTier
from hotspan.cache.stats import CacheStats
from hotspan.cache.waits import Waits
from hotspan.core.clock import Clock, SystemClock
from hotspan.core.deadline import Deadline
from hotspan.core.scopes import ScopeSet
from hotspan.core.terms import Scope, Terms
from hotspan.core.types import Chunk, ChunkKey, Lookup, Tier
from hotspan.tiers.base import Durable, TierUsage
from hotspan.tiers.lower import LowerTier
from hotspan.tiers.pace import Pace
from hotspan.tiers.pins import Pins
from hotspan.tiers.shares import Shares
from hotspan.tiers.slab import SharedSlab

logger = logging.getLogger(__name__)

PATIENCE_S = 0.050
"""How long a request waits while nothing at all lands in RAM, where no cost model says how long."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the engine is to copy a chunk."""

    chunk: Chunk
    slot: int


class TieredCache:
    """RAM over the lower tiers.

    slab:       the RAM tier's memory; slot i is a chunk's bytes.
    lower:      the lower tiers, fastest first; each gets every chunk, and the first that has one gives it back.
    namespace:  of all its chunks.
    shares:     of RAM, by tenant.
    patience_s: how long a request waits while nothing lands, without a cost model.
    cost:       decides what is loaded from lower tiers; without one it is all that is there.
    stats:      counts since they were taken; the engine adds what only it knows.
    pace:       of the disk's loads that nobody waits for, if requests are to be spared them.
    prefetches: what was announced. pins: what is evicted last; those that the disk was opened with.
    """

    def __init__(
        self,
        slab: SharedSlab,
        *lower: LowerTier,
        namespace: bytes = bytes(32),
        shares: Shares | None = None,
        patience_s: float = PATIENCE_S,
        cost: CostModel | None = None,
        clock: Clock | None = None,
        pins: Pins | None = None,
        pace: Pace | None = None,
    ) -> None:
        self.pins = pins or Pins(clock)
        self.ram = RamTier(slab, shares, self.pins)
        self.stats = CacheStats()
        self._namespace = namespace
        self.cost = cost
        self._clock = clock or SystemClock()
        self._lower = LowerTiers(lower, self.ram.entries, slab, self.stats, self._clock)
        self._waits = Waits(self.ram, self._lower, self.stats, self._clock, patience_s, cost, pace)
        self.prefetches = Prefetches(self.ram, self._lower, self._waits, self.stats, self._clock, pace)
        self._loading = self._storing = 0
        self._unplaced: list[Chunk] = []  # placed by a call that raised: nobody copies them

    # -- look up ---------------------------------------------------------------------------------------------------

    def ask(self, chunks: Sequence[Chunk], reader: Reader) -> None:
        """A request is about to look up all chunks of its text: tiers that must ask elsewhere begin to.

        chunks: one KV cache group after the other, each in its order.
        """
        if any(chunk.key not in self.ram.entries and self._lower.find(chunk.key) is None for chunk in chunks):
            self._lower.ask(chunks, reader.terms.tenant)

    def is_asking(self, key: ChunkKey) -> bool:
        """Whether a tier has yet to say if it has a chunk that no other tier has."""
        return not self.where(key) and bool(self._lower.asked(key))

    def choose(self, groups: Sequence[Sequence[Chunk]], reader: Reader, text: Text) -> bool:
        """Decide, once and before its look-up, how much of a text is loaded; False while that has to wait for answers.

        groups: the chunks of the text by KV cache group, that of which a chain is cut first.
        """
        return self._waits.decisions.choose(groups, reader, text)

    @property
    def decisions(self) -> Decisions:
        """What a request's encoder outputs and windows are decided by, as `choose` decides about its chunks."""
        return self._waits.decisions

    def lookup(self, chunk: Chunk, reader: Reader) -> Lookup:
        """Where one chunk of the reader's chain stands; starts its promotion if it lies in a lower tier.

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
        if reader.cut or (reader.plan is not None and chunk.key in reader.plan.refused):
            return Lookup.MISS
        if entry is None:
            entry = self._waits.promote(chunk)
            if entry is None and self._lower.find(chunk.key) is not None and self.prefetches.give_way():
                entry = self._waits.promote(chunk)
            if entry is None and self._lower.find(chunk.key) is not None:
                return self._waits.await_room(reader, self._loading > 0)
            if entry is None:
                return self._waits.await_answer(chunk, reader)
            if reader.is_asking:
                reader.is_asking, reader.since_s = False, None  # the answer came: this is another wait
        if self._waits.join(chunk.key, reader):
            self._pin(entry, reader)
        return self._waits.await_landing(reader)

    def reconsider(self, reader: Reader) -> None:
        """The engine had no room for a request whose look-up had ended; what it was denied then it may be given now."""
        self._waits.reconsider(reader)

    def give_up(self, reader: Reader) -> None:
        """The reader waits no longer: what is not in RAM is a MISS for it."""
        self._waits.release(reader)
        reader.cut = True

    @property
    def waiting(self) -> int:
        """How many requests wait for chunks that are on their way to RAM."""
        return self._waits.waiting

    def is_waiting(self, reader: Reader) -> bool:
        """Whether asking again would only be told RETRY: what the reader waits for is on its way and not late."""
        return bool(reader.waiting) and not self._waits.is_late(reader)

    def release(self, reader: Reader) -> None:
        """The reader was scheduled, finished or gave up: what it held may go."""
        while reader.pins:
            _, entry = reader.pins.popitem()
            entry.pins -= 1
        self._waits.release(reader)

    def join(self, chunks: Iterable[Chunk], reader: Reader) -> None:
        """The reader's request uses these chunks, wherever they lie: they carry its tags and its expiry from now on."""
        for chunk in chunks:
            terms = reader.terms_at(chunk.index)
            entry = self.ram.entries.get(chunk.key)
            if entry is not None:
                self._join(entry, terms, renew=reader.renews)
            else:
                self._lower.join(chunk.key, terms)

    def labelled(self, scope: Scope) -> list[Chunk]:
        """The chunks of RAM and of tiers with an index that a scope takes, with what they stand on there.

        Each behind its parent, the longest text first. Costs what has the labels in RAM, and on disk a pass over its
        table (tiers/slot_records.py).
        """
        found = {chunk.key: chunk for chunk in self._lower.labelled(scope)}
        found |= {entry.chunk.key: entry.chunk for entry in self.ram.matched(ScopeSet([scope]), self._namespace)}
        return by_longest(found)

    @property
    def has_tier_down(self) -> bool:
        """Whether a lower tier is given up."""
        return not all(tier.is_up for tier in self._lower.tiers)

    def terms(self, key: ChunkKey) -> Terms | None:
        """The terms of a chunk, wherever it lies; None if it is nowhere."""
        entry = self.ram.entries.get(key)
        return entry.terms if entry is not None else self._lower.terms(key)

    def where(self, key: ChunkKey) -> frozenset[Tier]:
        """The tiers that are known to have a chunk whole."""
        entry = self.ram.entries.get(key)
        ram = [Tier.RAM] if entry is not None and entry.state is State.READY else []
        return frozenset([*ram, *self._lower.where(key)])

    # -- load ------------------------------------------------------------------------------------------------------

    def begin_load(self, keys: Sequence[ChunkKey], reader: Reader) -> list[int]:
        """The slots of chunks that were HIT for this reader; they stay until `end_load`. If it raises, none does.

        Raises: KeyError if one is not in RAM (a bug of the caller: HIT is said of RAM only).
        """
        entries = [self.ram.entries[key] for key in keys]
        if any(entry.state is not State.READY for entry in entries):
            raise KeyError("a chunk is still on its way to RAM")
        for entry in entries:
            entry.pins += 1
            entry.loads += 1
        try:
            self._touch(keys)
            self.prefetches.used(keys)
            self.release(reader)
        except BaseException:
            for entry in entries:
                entry.pins -= 1
                entry.loads -= 1
            raise
        self._loading += len(keys)
        return [entry.slot for entry in entries]

    def end_load(self, keys: Iterable[ChunkKey]) -> None:
        """The engine has its copies. If it raises, the chunk that it has come to is as it was, to be ended again."""
        for key in keys:
            entry = self.ram.copied(key)
            if entry is not None and entry.loads > 0:
                entry.pins -= 1
                entry.loads -= 1
                try:
                    self.ram.let_go(entry)
                except BaseException:
                    entry.pins += 1
                    entry.loads += 1
                    raise
                self._loading -= 1

    # -- store -----------------------------------------------------------------------------------------------------

    def begin_store(self, chunks: Sequence[Chunk], reader: Reader | None = None) -> list[Placement]:
        """Slots for those of a request's new chunks that are worth keeping, in order; the rest is left out.

        Left out: what is in RAM already, what has no ancestors here to stand on, and what finds no room.
        """
        placements, refused = self._place(chunks, reader or Reader())
        self._count_refused(refused)
        return placements

    def try_store(self, chunks: Sequence[Chunk], reader: Reader) -> list[Placement] | None:
        """As `begin_store`; None if nothing found room now, but may once copies that the engine makes have ended.

        Where RAM holds little more than one text, that is all the last text's chunks while its end is being copied.
        """
        placements, refused = self._place(chunks, reader)
        if refused and not placements and self._storing:
            return None
        self._count_refused(refused)
        return placements

    def _place(self, chunks: Sequence[Chunk], reader: Reader) -> tuple[list[Placement], int]:
        """Slots for what is to be stored, and how many chunks were refused; none is kept if it raises."""
        self.step()
        placements: list[Placement] = []
        try:
            refused = self._place_all(chunks, reader, placements)
        except BaseException:
            self._unplaced += [placement.chunk for placement in placements]
            raise
        return placements, refused

    def _place_all(self, chunks: Sequence[Chunk], reader: Reader, placements: list[Placement]) -> int:
        """Place chunks until one raises; how many were refused. Mutates: `placements`."""
        refused = 0
        for chunk in chunks:
            terms = reader.terms_at(chunk.index)
            if (known := self.ram.entries.get(chunk.key)) is not None:
                self._join(known, terms, renew=False)
                continue
            entry, was_nowhere = None, False
            if chunk.key not in self.ram.forgotten and self._has_parent(chunk):
                was_nowhere = not self._lower.holds(chunk.key)
                self._lower.join(chunk.key, terms)
                if not was_nowhere:  # one set of terms for all copies
                    terms = self._lower.terms(chunk.key) or terms
                entry = self.ram.add(chunk, terms, State.STORING, self._lower)
            if entry is None:
                refused += 1
                continue
            placements.append(Placement(chunk, entry.slot))
            self._storing += 1
            if was_nowhere:  # what stood on it stood behind a gap
                for descendant in self.ram.above(entry):
                    self._forget_one(descendant)
        return refused

    def _count_refused(self, refused: int) -> None:
        if refused:
            self.stats.stores_refused[Tier.RAM] += refused

    def end_store(self, chunks: Iterable[Chunk], *, success: bool = True) -> None:
        """The engine's copies are complete: from now on the chunks are hits, and go on to the lower tier.

        If it raises, the chunk that it has come to is as it was, and so are those behind it: they may be ended again.
        """
        for chunk in chunks:
            entry = self.ram.copied(chunk.key)
            if entry is None or entry.state is not State.STORING:
                continue  # dropped by `clear` meanwhile
            entry.state = State.READY
            try:
                self._end_one(entry, success=success)
            except BaseException:
                entry.state = State.STORING
                raise
            self._storing = max(0, self._storing - 1)
        self._lower.step()

    def _end_one(self, entry: Entry, *, success: bool) -> None:
        """A chunk was copied into its slot, or not."""
        if entry.deleted:
            self.ram.let_go(entry)
        elif not success:
            self._forget(entry)
        else:
            self._lower.offer([entry.chunk.key])
            self._waits.wake(entry.chunk.key, Tier.RAM)
            self.stats.store_bytes[Tier.RAM] += self.ram.slab.slot_bytes

    # -- forget ----------------------------------------------------------------------------------------------------

    def invalidate(self, scopes: Sequence[Scope], durable: Durable, *, is_foreign: bool = False) -> dict[Tier, int]:
        """Forget at once, on every tier, what one of `scopes` takes and what stands on it; how many chunks, by tier.

        However many scopes there are: each tier's log has one entry of them.

        is_foreign: another replica asked for it, so that the log of the L2 has it already.

        `durable` is called when not even a crash can bring them back (at once where there is no lower tier), or with
        False when that can't be had on every tier.
        """
        removed = {Tier.RAM: 0}
        for entry in self.ram.matched(ScopeSet(scopes), self._namespace):
            self._forget_one(entry)
            removed[Tier.RAM] += 1
        removed |= self._lower.invalidate(scopes, durable, is_foreign=is_foreign)
        removed[Tier.RAM] += self._forget_orphans()
        self.stats.invalidated.update(removed)
        return removed

    def rename(self, namespace: bytes, *, forget: bool) -> None:
        """Go on under another name, which no chunk in RAM has: these are forgotten, and nothing more of them is moved.

        forget: nobody will look for them in lower tiers again.
        """
        for entry in list(self.ram.entries.values()):
            self._forget_one(entry)
        self._lower.rename(namespace, forget=forget)
        self._namespace = namespace

    def clear(self) -> int:
        """Forget every chunk in RAM, when the engine forgets its copies in flight; returns how many.

        The slots of those copies are held back until `end_clear`. Lower tiers keep what they have: the names of its
        chunks tell the weights, and it may be others' too.
        """
        entries = list(self.ram.entries.values())
        for entry in entries:
            self._forget_one(entry)
        self.stats.invalidated[Tier.RAM] += len(entries)
        self.ram.hold()
        self._loading = self._storing = 0
        self._unplaced.clear()
        return len(entries)

    def end_clear(self) -> None:
        """The engine's copies that were in flight at the last `clear` have ended."""
        self.ram.unhold()

    # -- in between ------------------------------------------------------------------------------------------------

    @property
    def is_moving(self) -> bool:
        """Whether promotions, or answers of what could be promoted, are on their way."""
        return self._waits.is_promoting or self._lower.is_asking

    @property
    def is_persisting(self) -> bool:
        """Whether chunks wait for a lower tier, or are on their way to it."""
        return self._lower.is_storing

    def step(self) -> None:
        """Take note of what the lower tiers finished and of what expired, and give them more to write."""
        while self._unplaced:
            self.end_store(self._unplaced[-1:], success=False)
            self._unplaced.pop()
        self._expire()
        for tier, transfer in self._lower.finished(self.ram.let_go):
            self.stats.moved(tier, transfer)
            if transfer.is_load:
                entry = self._waits.end_promotion(tier, transfer)
                if entry.deleted:
                    self.ram.let_go(entry)
                elif transfer.fault is not None:
                    self._forget(entry)
        self.prefetches.step()

    def wait(self, timeout_s: float) -> None:
        """Sleep until a lower tier finishes something, at most `timeout_s`."""
        self._lower.wait(self._waits.sources(), timeout_s)

    def take_stats(self) -> CacheStats:
        """The counts since the last call."""
        if self.ram.evictions:
            self.stats.evictions[Tier.RAM], self.ram.evictions = self.ram.evictions, 0
        return self.stats.take()

    def usage(self) -> dict[Tier, TierUsage]:
        """How full each tier is."""
        return {Tier.RAM: self.ram.usage()} | self._lower.usage()

    def queued(self) -> dict[Tier, int]:
        """How many chunks wait to be written to each lower tier, or are being written."""
        return self._lower.queued()

    def close(self, timeout_s: float) -> None:
        """Write what waits to be written, and let go of all tiers, at most `timeout_s`; what is not written is logged.

        A tenth of the time is for the tiers' own ends.
        """
        writing, closing = (Deadline(share * timeout_s, self._clock.monotonic) for share in (0.9, 1.0))
        failed = {tier: count - self.queued()[tier] for tier, count in self._lower.unwritten().items()}
        self.step()  # what was offered since the last one is on its way then
        while self.is_persisting and (left_s := writing.rest_s()):
            self.wait(min(left_s, 0.05))
            self.step()
        for tier, count in self._lower.unwritten().items():
            if count > failed[tier]:
                chunks = count - failed[tier]
                logger.warning("stores_given_up tier=%s chunks=%d timeout_s=%g", tier.value, chunks, timeout_s)
        self._lower.close(closing.rest_s())
        self.ram.slab.close()

    def check(self) -> None:
        """Raise AssertionError if the books do not agree."""
        self.ram.check([*self._waits.promoting(), *self._lower.in_flight()])
        self.prefetches.check()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _has_parent(self, chunk: Chunk) -> bool:
        """Whether the chunk stands on something, in RAM or a lower tier."""
        return chunk.parent is None or chunk.parent in self.ram.entries or self._lower.holds(chunk.parent)

    def _pin(self, entry: Entry, reader: Reader) -> None:
        held = reader.pins.get(entry.chunk.key)
        if held is entry:
            return
        if held is not None:
            held.pins -= 1  # dropped since, and stored anew
        reader.pins[entry.chunk.key] = entry
        entry.pins += 1

    def _touch(self, keys: Sequence[ChunkKey]) -> None:
        leaf_first = list(reversed(keys))
        self.ram.touch(leaf_first)
        self._lower.touch(leaf_first)
        self._lower.offer(keys)  # refused before, or evicted there: a second touch

    def _join(self, entry: Entry, terms: Terms, *, renew: bool) -> None:
        joined = entry.terms.joined(terms)
        if renew and terms.expires_s > joined.expires_s > 0:
            joined = joined.until(terms.expires_s)
            if entry.state is State.READY:
                self._write_anew(entry)
        if joined is entry.terms:
            return
        self.ram.keep(entry, joined)
        self._lower.join(entry.chunk.key, joined)

    def _write_anew(self, entry: Entry) -> None:
        """Its frames in lower tiers have the old expiry: drop them, and write it again with what stood on it."""
        self._lower.discard(entry.chunk.key)
        again = sorted([entry, *self.ram.above(entry)], key=lambda each: each.chunk.index)
        self._lower.offer(each.chunk.key for each in again if each.state is State.READY)

    def _expire(self) -> None:
        """Forget what is in RAM past its time."""
        before = len(self.ram.entries)
        for entry in self.ram.expired(self._clock.unix()):
            self._forget(entry)
        if (expired := before - len(self.ram.entries)) > 0:
            self.stats.expired[Tier.RAM] += expired

    def _forget(self, entry: Entry) -> None:
        """Make a chunk unfindable, and what stands on it: behind a gap no invalidation would reach it."""
        for descendant in self.ram.above(entry):
            self._forget_one(descendant)
        self._forget_one(entry)

    def _forget_one(self, entry: Entry) -> None:
        """Make one chunk unfindable; its slot comes free when nothing uses it any more."""
        self._waits.wake(entry.chunk.key, None)
        self._lower.forget(entry.chunk.key)
        self.ram.forget(entry)

    def _forget_orphans(self) -> int:
        """Forget the descendants of chunks that only a lower tier had and now are gone; returns how many."""
        before = len(self.ram.entries)
        for entry in [entry for entry in self.ram.entries.values() if not self._has_parent(entry.chunk)]:
            if not entry.deleted:
                self._forget(entry)
        return before - len(self.ram.entries)
