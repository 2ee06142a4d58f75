"""The lower tiers as one: each is given every chunk, and the fastest that has one gives it back."""

import functools
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from hotspan.cache.entry import Entry, State, small_part
from hotspan.cache.stats import CacheStats
from hotspan.core.clock import Clock, SystemClock
from hotspan.core.deadline import Deadline
from hotspan.core.terms import Scope, Terms
from hotspan.core.types import Chunk, ChunkKey, Tier
from hotspan.tiers.base import AllDurable, Durable, TierUsage, Transfer
from hotspan.tiers.lower import LowerTier
from hotspan.tiers.slab import SharedSlab

_SLICE_S = 0.001

_DOCUMENT = 64
"""Chunks that one step of the engine may store: a fast tier is given all of them at once, also of a small RAM."""

_LEAST_DEPTH, _LONG_S = 8, 1.0
"""Chunks that a tier is given to write at a time: so few at first, or a small part of RAM if that is less; when it had
none left before the scheduler looked, as many as it writes until the scheduler looks or in this time, at least twice as
many; half as many when one took longer than this. They can't be evicted meanwhile, and requests want their slots."""


class LowerTiers:
    """Tiers, fastest first, and what is on its way to them. The cache's one thread calls it.

    entries, slab: of RAM, from which chunks are stored.
    """

    def __init__(
        self,
        tiers: Sequence[LowerTier],
        entries: Mapping[ChunkKey, Entry],
        slab: SharedSlab,
        stats: CacheStats,
        clock: Clock,
    ) -> None:
        self.tiers = tuple(tiers)
        self._entries = entries
        self._queues = [StoreQueue(entries, slab, tier, stats, clock) for tier in tiers]
        self._stats = stats
        self._clock = clock

    # -- what is there ---------------------------------------------------------------------------------------------

    def find(self, key: ChunkKey) -> LowerTier | None:
        """The fastest tier that is known to have a chunk."""
        return next((tier for tier in self.tiers if tier.lookup(key)), None)

    def where(self, key: ChunkKey) -> list[Tier]:
        """The tiers that are known to have a chunk."""
        return [tier.tier for tier in self.tiers if tier.lookup(key)]

    def holds(self, key: ChunkKey) -> bool:
        """Whether a tier has a chunk, or is being given it."""
        return any(queue.holds(key) for queue in self._queues)

    def ask(self, chunks: Sequence[Chunk], tenant: int) -> None:
        """Let tiers that must ask elsewhere begin to find out which of these chunks they have."""
        for tier in self.tiers:
            if tier.is_up:
                tier.storage.ask(chunks, tenant)

    def asked(self, key: ChunkKey) -> list[LowerTier]:
        """The tiers that wait to be told whether they have a chunk."""
        return [tier for tier in self.tiers if tier.is_up and tier.storage.is_asking(key)]

    def answer_s(self, key: ChunkKey) -> float:
        """How long it takes until all have said whether they have a chunk; 0 if none is asked, or none has answered."""
        return max((tier.storage.answer_s for tier in self.asked(key)), default=0.0)

    @property
    def is_asking(self) -> bool:
        """Whether answers are on their way."""
        return any(tier.is_up and tier.storage.asking for tier in self.tiers)

    def labelled(self, scope: Scope) -> list[Chunk]:
        """What a scope takes in tiers that have an index, with what it stands on there."""
        return [chunk for tier in self.tiers if tier.is_up for chunk in tier.storage.labelled(scope)]

    def terms(self, key: ChunkKey) -> Terms | None:
        """The terms of a chunk, joined over the tiers that have it; None if none has."""
        found = [tier.storage.terms(key) for tier in self.tiers if tier.lookup(key)]
        return functools.reduce(Terms.joined, found) if found else None

    def join(self, key: ChunkKey, terms: Terms) -> None:
        """Keep a chunk on the joined terms, wherever it is.

        Told also to tiers that do not find it: one that is given up may have it still, and come back.
        """
        for tier in self.tiers:
            tier.join(key, terms)

    def touch(self, leaf_first: Sequence[ChunkKey]) -> None:
        """These chunks were used."""
        for tier in self.tiers:
            if tier.is_up:
                tier.storage.touch(leaf_first)

    def discard(self, key: ChunkKey) -> None:
        """Forget a chunk and what stands on it, for it is to be written anew."""
        for tier in self.tiers:
            if tier.is_up:
                tier.storage.discard(key)

    def invalidate(self, scopes: Sequence[Scope], durable: Durable, *, is_foreign: bool) -> dict[Tier, int]:
        """As StorageTier says, on all tiers; durable once it is so on all. is_foreign: the L2's log has it already."""
        told = [tier for tier in self.tiers if not (is_foreign and tier.tier is Tier.L2)]
        logged = AllDurable(len(told), durable)
        return {tier.tier: tier.invalidate(scopes, logged) for tier in told}

    def rename(self, namespace: bytes, *, forget: bool) -> None:
        """Go on with the chunks of another namespace; `forget` as StorageTier says."""
        for tier in self.tiers:
            tier.rename(namespace, forget=forget)

    def usage(self) -> dict[Tier, TierUsage]:
        """How full each tier is."""
        return {tier.tier: tier.usage() for tier in self.tiers}

    # -- on its way ------------------------------------------------------------------------------------------------

    @property
    def is_storing(self) -> bool:
        """Whether chunks wait for a tier, or are on their way to it."""
        return any(queue.queued for queue in self._queues)

    def queued(self) -> dict[Tier, int]:
        """How many chunks wait for each tier, or are on their way to it."""
        return {tier.tier: queue.queued for tier, queue in zip(self.tiers, self._queues, strict=True)}

    def writing(self) -> dict[Tier, int]:
        """How many chunks each tier was given and has not written yet."""
        return {tier.tier: queue.writing for tier, queue in zip(self.tiers, self._queues, strict=True)}

    def unwritten(self) -> dict[Tier, int]:
        """The chunks that each tier does not have though it was to: those that are queued, and failed writes."""
        return {tier.tier: queue.queued + queue.failed for tier, queue in zip(self.tiers, self._queues, strict=True)}

    def offer(self, keys: Iterable[ChunkKey]) -> None:
        """Chunks came to RAM, or were used there a second time."""
        if not self._queues:
            return
        for key in keys:
            for queue in self._queues:
                queue.offer(key)

    def waits(self, key: ChunkKey) -> bool:
        """Whether a chunk is to be given to a tier that does not have it."""
        return any(queue.waits(key) for queue in self._queues)

    def spares(self, key: ChunkKey) -> bool:
        """Whether a chunk should stay in RAM a little: a tier that does not have it will get it soon."""
        return any(queue.spares(key) for queue in self._queues)

    def left(self, key: ChunkKey) -> None:
        """A chunk went from RAM for room: what waited for it is counted."""
        for queue in self._queues:
            queue.left(key)

    def forget(self, key: ChunkKey) -> None:
        """A chunk of RAM is not to be written any more."""
        for queue in self._queues:
            queue.forget(key)

    def step(self) -> None:
        """Hand over chunks until the tiers take no more."""
        for queue in self._queues:
            queue.step()

    def finished(self, ended: Callable[[Entry], None]) -> Iterator[tuple[Tier, Transfer]]:
        """The transfers that ended, tier by tier; `ended` is told of entries whose slots a store uses no more."""
        for tier, queue in zip(self.tiers, self._queues, strict=True):
            for transfer in tier.finished():
                yield tier.tier, transfer
                if not transfer.is_load:
                    ended(queue.ended(transfer))
            queue.step()
            self._stats.lost(tier.tier, tier.take_losses())

    def wait(self, sources: set[LowerTier], timeout_s: float) -> None:
        """Sleep until something ends in one of `sources`, or in a tier that asks; in any, if that is none."""
        busy = [tier for tier in self.tiers if (tier.is_up and tier.storage.asking) or tier in sources]
        busy = busy or list(self.tiers)
        if len(busy) == 1:
            busy[0].wait(timeout_s)
            return
        deadline = Deadline(timeout_s, self._clock.monotonic)
        for tier in itertools.cycle(busy):  # nobody tells which of them will be first
            left_s = deadline.rest_s()
            if not left_s or tier.wait(min(left_s, _SLICE_S)):
                return

    def in_flight(self) -> list[Entry]:
        """Entries whose slots stores read."""
        return [entry for queue in self._queues for entry in queue.in_flight()]

    def close(self, timeout_s: float) -> None:
        """Let go of all tiers, within `timeout_s`; first of those that are not busy: one that hangs takes all of it."""
        deadline = Deadline(timeout_s, self._clock.monotonic)
        for tier, _ in sorted(zip(self.tiers, self._queues, strict=True), key=lambda pair: pair[1].queued):
            tier.close(deadline.rest_s())


class StoreQueue:
    """Offers chunks oldest first, as many as the tier's queue takes; a chunk that is written stays in RAM meanwhile.

    Those that an invalidation holds back are set aside until the tier releases them, and are the next then; so is what
    stands on them, which no tier takes before.

    failed: writes that ended with a fault.
    """

    def __init__(
        self,
        entries: Mapping[ChunkKey, Entry],
        slab: SharedSlab,
        tier: LowerTier,
        stats: CacheStats,
        clock: Clock | None = None,
    ) -> None:
        self._entries = entries
        self._slab = slab
        self._tier = tier
        self._stats = stats
        self._offered: OrderedDict[ChunkKey, None] = OrderedDict()  # in the order in which they came
        self._held: dict[ChunkKey, list[ChunkKey]] = {}  # set aside, with those that wait for them
        self._writing: dict[ChunkKey, Entry] = {}
        self._clock = clock or SystemClock()
        self._begun_s: dict[ChunkKey, float] = {}
        self._least = min(_LEAST_DEPTH, small_part(slab.slots))
        self._most = max(slab.slots // 4, min(slab.slots // 2, _DOCUMENT), 1)
        self._depth = self._least
        self._is_full = False  # more was offered than the depth allows
        self._given, self._given_s, self._ended_s = 0, 0.0, 0.0  # writes, since it was first given some; the last end
        self.failed = 0

    @property
    def queued(self) -> int:
        """How many chunks wait for the tier, or are on their way to it."""
        return len(self._offered) + len(self._held) + len(self._writing)

    @property
    def writing(self) -> int:
        """How many chunks the tier was given and has not written yet."""
        return len(self._writing)

    def holds(self, key: ChunkKey) -> bool:
        """Whether the tier has the chunk, or is being given it."""
        writing = self._writing.get(key)
        return self._tier.lookup(key) or (writing is not None and not writing.deleted)

    def offer(self, key: ChunkKey) -> None:
        """A chunk came to RAM, or was used there a second time."""
        if key not in self._held and not self.holds(key):
            self._offered[key] = None

    def waits(self, key: ChunkKey) -> bool:
        """Whether a chunk is to be given to the tier."""
        return key in self._offered or key in self._held

    def spares(self, key: ChunkKey) -> bool:
        """Whether the tier, which does not have a chunk, will get it soon: it keeps up with what it is given."""
        return self.waits(key) and len(self._offered) <= self._depth

    def left(self, key: ChunkKey) -> None:
        """A chunk went from RAM for room."""
        if self.waits(key):
            self.forget(key)
            self._stats.stores_late[self._tier.tier] += 1

    def forget(self, key: ChunkKey) -> None:
        """A chunk is not to be written any more."""
        self._offered.pop(key, None)
        self._release(self._held.pop(key, ()))

    def step(self) -> None:
        """Hand over chunks until the tier takes no more."""
        self._release(self._tier.released())
        if not self._writing:
            self._rested()
        while self._offered and (storage := self._tier.working) is not None and storage.can_store():
            self._is_full = len(self._writing) >= self._depth
            if self._is_full:
                break
            key, _ = self._offered.popitem(last=False)
            entry = self._entries.get(key)
            if entry is None or entry.state is not State.READY or key in self._writing or self._tier.lookup(key):
                continue
            if storage.holds_back(key, entry.terms):
                self._held[key] = []
            elif entry.chunk.parent in self._held:
                self._held[entry.chunk.parent].append(key)
                self._held[key] = []
            elif self._tier.submit_store(entry.chunk, entry.terms, self._slab.slot(entry.slot)):
                entry.pins += 1
                entry.moving += 1
                self._writing[key] = entry
                self._given += 1
                self._begun_s[key] = self._clock.monotonic()
            else:
                self._stats.stores_refused[self._tier.tier] += 1

    def _rested(self) -> None:
        """The tier has nothing to write: from now on it is given what it writes until the scheduler looks again."""
        now_s = self._clock.monotonic()
        if self._given:
            looked_s = min(now_s - self._given_s, _LONG_S)
            writes = self._given * looked_s / max(self._ended_s - self._given_s, _SLICE_S)
            doubled = 2 * self._depth if self._offered and self._is_full else self._depth
            self._depth = min(max(int(writes), doubled), self._most)
        self._given, self._given_s = 0, now_s

    def _release(self, keys: Sequence[ChunkKey]) -> None:
        """Offer what was set aside, before all else, and what waits for it behind it."""
        if not keys:
            return
        waiting, released = deque(keys), list[ChunkKey]()
        while waiting:
            key = waiting.popleft()
            if key in self._held:
                released.append(key)
                waiting.extend(self._held.pop(key))
        for key in reversed(released):
            self._offered[key] = None
            self._offered.move_to_end(key, last=False)

    def ended(self, transfer: Transfer) -> Entry:
        """A write ended: the chunk's entry, whose slot the tier uses no more."""
        entry = self._writing.pop(transfer.key)
        ended_s = self._ended_s = transfer.ended_s or self._clock.monotonic()
        if ended_s - self._begun_s.pop(transfer.key) > _LONG_S:
            self._depth = max(self._depth // 2, self._least)
            self._is_full, self._given = False, 0  # it did not rest: it was slow
        entry.pins -= 1
        entry.moving -= 1
        self.failed += transfer.fault is not None
        if entry.deleted and transfer.key in self._entries:
            self._offered[transfer.key] = None  # stored anew while the old write still ran
        return entry

    def in_flight(self) -> list[Entry]:
        """Entries whose slots the tier reads."""
        return list(self._writing.values())
