"""The RAM tier: which chunk is in which slot of the slab, and which goes when there is no slot left."""

from collections import deque
from collections.abc import Iterable, Iterator

from hotspan.cache.entry import Entry, State
from hotspan.cache.labels import Labels
from hotspan.cache.lower import LowerTiers
from hotspan.core.expiries import Expiries
from hotspan.core.scopes import ScopeSet
from hotspan.core.terms import Terms
from hotspan.core.types import Chunk, ChunkKey
from hotspan.tiers.base import TierUsage
from hotspan.tiers.eviction import LeafArc
from hotspan.tiers.pins import Kept, Pins
from hotspan.tiers.shares import Shares
from hotspan.tiers.slab import SharedSlab

_PASSED_OVER = 16
"""Leaves at most that stay, though their turn has come, because they wait for a lower tier."""


_MAX_SPARE, _SLOTS_PER_SPARE = 7, 4096
"""Leaves that are evicted besides the one that must go. While requests decode, a step of the engine stores about one
chunk: evicting eight in every eighth step costs less, since the code is in the CPU's caches after the first."""

_NOBODY = -1
"""The tenant for whom those leaves are evicted: they come from tenants above their floors."""


class RamTier:
    """Entries by key, each with a slot of its own.

    entries:   what is here and may be found.
    forgotten: what may not, while the engine copies from or into its slot.
    """

    def __init__(self, slab: SharedSlab, shares: Shares | None = None, pins: Pins | None = None) -> None:
        self.slab = slab
        self.entries: dict[ChunkKey, Entry] = {}
        self.forgotten: dict[ChunkKey, Entry] = {}
        self.expiries = Expiries(self._expiring)
        self.evictions = 0
        self.gone: deque[ChunkKey] | None = None  # what left since somebody looked; None while nobody does
        self._labels = Labels()
        self._lru = LeafArc(slab.slots, shares)
        self.kept = Kept(pins or Pins(), slab.slot_bytes, self._lru.floor, self._parent_here)
        self._free = list(range(slab.slots - 1, -1, -1))
        self._held: list[Entry] = []  # forgotten; the engine uses their slots and will not say when that ends

    def add(
        self, chunk: Chunk, terms: Terms, state: State, lower: LowerTiers, *, is_modest: bool = False
    ) -> Entry | None:
        """An entry for a chunk that is not here, in a free slot or that of an evicted leaf; None if there is no room.

        A chunk's own parent makes room for it only if a lower tier has it.

        is_modest: other tenants make room only until its own has its floor.
        """
        has_room = self._free and self._lru.may_add(terms.tenant)
        if not has_room and not self._make_room(chunk, terms.tenant, lower, is_modest=is_modest):
            return None
        entry = Entry(chunk, self._free.pop(), state, terms)
        self.entries[chunk.key] = entry
        self._labels.add(chunk.key, terms)
        self._lru.add(chunk.key, chunk.parent, terms.tenant)
        self.note_expiry(entry)
        return entry

    def drop(self, entry: Entry) -> None:
        """Let a chunk that a lower tier has go before its turn, unless something needs it here."""
        if self._lru.is_leaf(entry.chunk.key) and self._may_go(entry.chunk.key):
            self._free.append(self._take(entry, evicted=False))

    def floor(self, tenant: int) -> int:
        """How many chunks others leave a tenant."""
        return self._lru.floor(tenant)

    def copied(self, key: ChunkKey) -> Entry | None:
        """The entry of a chunk from or into whose slot the engine copies; of two, the one that was forgotten."""
        return self.forgotten.get(key) or self.entries.get(key)

    def forget(self, entry: Entry) -> None:
        """Make a chunk unfindable; its slot comes free when nothing uses it any more."""
        self._take(entry, evicted=False)
        entry.deleted = True
        if entry.engine_copies:
            self.forgotten[entry.chunk.key] = entry
        self.let_go(entry)

    def let_go(self, entry: Entry) -> None:
        """The slot of an entry is used by one less: free it if the entry is forgotten and nothing else uses it."""
        if not entry.deleted:
            return
        if not entry.engine_copies and self.forgotten.get(entry.chunk.key) is entry:
            del self.forgotten[entry.chunk.key]
        if not entry.is_used:
            self._free.append(entry.slot)

    def hold(self) -> None:
        """The engine will not say when its copies of what is forgotten end: hold their slots back until `unhold`."""
        for entry in self.forgotten.values():
            entry.state, entry.loads, entry.held = State.READY, 0, True
            self._held.append(entry)
        self.forgotten.clear()

    def unhold(self) -> None:
        """Those copies have ended."""
        while self._held:
            entry = self._held.pop()
            entry.held = False
            self.let_go(entry)

    def keep(self, entry: Entry, terms: Terms) -> None:
        """Keep an entry on other terms."""
        if not entry.deleted and entry.terms.labels is not terms.labels:
            self._labels.discard(entry.chunk.key, entry.terms)
            self._labels.add(entry.chunk.key, terms)
        entry.terms = terms
        self.note_expiry(entry)

    def note_expiry(self, entry: Entry) -> None:
        """Remember when to look at an entry whose terms are new."""
        if entry.terms.expires_s:
            self.expiries.note(entry.terms.expires_s, entry.chunk.key, len(self.entries))

    def expired(self, now_s: float) -> Iterator[Entry]:
        """Entries past their time; each may be forgotten before the next is asked for."""
        for key in self.expiries.due(now_s):
            entry = self.entries.get(key)
            if entry is not None and 0 < entry.terms.expires_s <= now_s:
                yield entry

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        """These chunks were used, leaf first."""
        self._lru.touch(keys)

    def matched(self, scopes: ScopeSet, namespace: bytes) -> list[Entry]:
        """The chunks that an invalidation or a look-up by labels takes, with what stands on them.

        Costs about 0.2 us for each chunk that has the labels; of scopes without any, for each chunk that is here.
        """
        if scopes.is_everything:
            return list(self.entries.values())
        named = self._labels.candidates(scopes, len(self.entries))
        entries = self.entries if named is None else {key: self.entries[key] for key in named if key in self.entries}
        keys = {key for key, entry in entries.items() if scopes.takes(key, namespace, entry.terms)}
        keys |= self._lru.descendants(keys | scopes.keys)
        return [self.entries[key] for key in keys]

    def above(self, entry: Entry) -> list[Entry]:
        """The chunks here that stand on one."""
        return [self.entries[key] for key in self._lru.descendants([entry.chunk.key])]

    @property
    def is_pinned(self) -> bool:
        """Whether any chunk may not go: a request holds it, or a transfer uses it."""
        return any(not self._may_go(key) for key in self.entries)

    def usage(self) -> TierUsage:
        """How full it is."""
        used, size = self.slab.slots - len(self._free), self.slab.slot_bytes
        tenants, pinned = self._lru.tenants(), self.kept.chunks
        return TierUsage(used, self.slab.slots, used * size, self.slab.bytes, tenants, pinned_chunks=pinned)

    def check(self, moving: Iterable[Entry]) -> None:
        """Raise AssertionError if the books do not agree. moving: entries whose slots transfers of lower tiers use."""
        self._lru.check()
        self._labels.check((key, entry.terms) for key, entry in self.entries.items())
        held = [entry.slot for entry in self.entries.values()]
        lent = {entry.slot for entry in (*moving, *self.forgotten.values(), *self._held) if entry.deleted}
        if sorted([*held, *lent, *self._free]) != list(range(self.slab.slots)):
            raise AssertionError("a slot is lost or has two owners")
        if any(not entry.deleted or not entry.engine_copies for entry in self.forgotten.values()):
            raise AssertionError("a forgotten chunk that nobody copies is kept")
        if len(self._lru) != len(self.entries) or any(key not in self._lru for key in self.entries):
            raise AssertionError("the eviction order knows other chunks than RAM holds")
        if any(entry.pins < 0 for entry in self.entries.values()):
            raise AssertionError("a chunk was unpinned more often than pinned")

    def _make_room(self, chunk: Chunk, tenant: int, lower: LowerTiers, *, is_modest: bool) -> bool:
        """Evict the leaf whose turn has come, and in a large tier a few more; whether there was one."""
        spare = 0 if self._free or is_modest else min(_MAX_SPARE, self.slab.slots // _SLOTS_PER_SPARE)
        for evicted in range(1 + spare):
            victim = self._victim(chunk, _NOBODY if evicted else tenant, lower, is_modest=is_modest)
            if victim is None or (evicted and lower.waits(victim)):
                return evicted > 0
            self._free.append(self._take(self.entries[victim], evicted=True))
            self.evictions += 1
            lower.left(victim)
        return True

    def _victim(self, chunk: Chunk, tenant: int, lower: LowerTiers, *, is_modest: bool) -> ChunkKey | None:
        """The leaf whose turn has come; one that waits for a lower tier only if those next in turn do so, too.

        One that is pinned goes only if no other may, and is the last in turn then.
        """
        passed_over, pinned, spares_pinned = 0, list[ChunkKey](), True

        def may_go(key: ChunkKey) -> bool:
            nonlocal passed_over
            if not self._may_go(key) or (key == chunk.parent and not lower.holds(key)):
                return False
            if passed_over < _PASSED_OVER and lower.spares(key):
                passed_over += 1
                return False
            if spares_pinned and self.kept.keeps(key, self._terms):
                pinned.append(key)
                return False
            return True

        victim = self._lru.victim(tenant, may_go, is_modest=is_modest)
        if victim is None and passed_over:
            passed_over = _PASSED_OVER
            victim = self._lru.victim(tenant, may_go, is_modest=is_modest)
        self._lru.defer(pinned)
        if victim is None and pinned:
            spares_pinned = False
            victim = self._lru.victim(tenant, may_go, is_modest=is_modest)
        return victim

    def _take(self, entry: Entry, *, evicted: bool) -> int:
        del self.entries[entry.chunk.key]
        self._labels.discard(entry.chunk.key, entry.terms)
        self._lru.remove(entry.chunk.key, evicted=evicted)
        self.kept.left(entry.chunk.key)
        if self.gone is not None:
            self.gone.append(entry.chunk.key)
        return entry.slot

    def _terms(self, key: ChunkKey) -> Terms:
        return self.entries[key].terms

    def _parent_here(self, key: ChunkKey) -> ChunkKey | None:
        parent = self.entries[key].chunk.parent
        return parent if parent in self.entries else None

    def _expiring(self) -> list[tuple[int, ChunkKey]]:
        return [(entry.terms.expires_s, key) for key, entry in self.entries.items() if entry.terms.expires_s]

    def _may_go(self, key: ChunkKey) -> bool:
        entry = self.entries[key]
        return entry.state is State.READY and not entry.pins
