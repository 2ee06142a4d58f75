"""The store controller: which chunks of RAM go to a lower tier, in the background, and in which order."""

from collections import OrderedDict, deque
from collections.abc import Iterable

from hotspan.cache.entry import Entry, State
from hotspan.cache.ram import RamTier
from hotspan.cache.stats import CacheStats
from hotspan.core.types import ChunkKey
from hotspan.tiers.base import StorageTier, Transfer


class StoreController:
    """Offers chunks oldest first, as many as the tier's queue takes; a chunk that is written stays in RAM meanwhile.

    Those that an invalidation holds back are set aside until the tier releases them, and are the next then; so is what
    stands on them, which no tier takes before.
    """

    def __init__(self, ram: RamTier, tier: StorageTier, stats: CacheStats) -> None:
        self._ram = ram
        self._tier = tier
        self._stats = stats
        self._offered: OrderedDict[ChunkKey, None] = OrderedDict()  # in the order in which they came
        self._held: dict[ChunkKey, list[ChunkKey]] = {}  # set aside, with those that wait for them
        self._writing: dict[ChunkKey, Entry] = {}

    @property
    def queued(self) -> int:
        """How many chunks wait for the tier, or are on their way to it."""
        return len(self._offered) + len(self._held) + len(self._writing)

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
        while self._offered and self._tier.can_store():
            key, _ = self._offered.popitem(last=False)
            entry = self._ram.entries.get(key)
            if entry is None or entry.state is not State.READY or key in self._writing or self._tier.lookup(key):
                continue
            if self._tier.holds_back(key, entry.terms):
                self._held[key] = []
            elif entry.chunk.parent in self._held:
                self._held[entry.chunk.parent].append(key)
                self._held[key] = []
            elif self._tier.submit_store(entry.chunk, entry.terms, self._ram.slab.slot(entry.slot)):
                entry.pins += 1
                entry.moving += 1
                self._writing[key] = entry
            else:
                self._stats.stores_refused[self._tier.tier] += 1

    def _release(self, keys: Iterable[ChunkKey]) -> None:
        """Offer what was set aside, before all else, and what waits for it behind it."""
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
        entry.pins -= 1
        entry.moving -= 1
        if entry.deleted and transfer.key in self._ram.entries:
            self._offered[transfer.key] = None  # stored anew while the old write still ran
        return entry

    def in_flight(self) -> list[Entry]:
        """Entries whose slots the tier reads."""
        return list(self._writing.values())
