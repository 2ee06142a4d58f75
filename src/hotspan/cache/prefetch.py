"""Chunks that are brought into RAM before a request asks for them, because somebody announced it.

    announced --answers of tiers that must ask--> known --a few at a time--> pinned in RAM --load--> used
                                                                               | its time is over
                                                                               v
                                                                     dropped from RAM, unless it was used

A prefetch gives way to everything else: it starts nothing while a request waits for promotions, holds at most a part of
what its tenant is sure of in RAM, and takes room from other tenants only until its own has as much as it is sure of.
Beside requests it moves a chunk or two at a time; where the engine computes on the CPU, one, and little of it at once.
"""

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hotspan.cache.entry import Entry, State
from hotspan.cache.lower import LowerTiers
from hotspan.cache.ram import RamTier
from hotspan.cache.stats import CacheStats
from hotspan.cache.waits import Waits
from hotspan.core.clock import Clock
from hotspan.core.expiries import Expiries
from hotspan.core.multimap import Multimap
from hotspan.core.types import MIB, Chunk, ChunkKey, Tier
from hotspan.tiers.pace import Pace

SHARE = 0.5
"""The part of a tenant's floor in RAM that its prefetches may pin. By default a lone tenant's floor is half of RAM."""

ANSWERS_S = 1.0
"""How long a prefetch waits for tiers that must ask elsewhere."""

MAX_PREFETCHES = 256
"""Of one tenant; with one more, its oldest ends."""

_IDLE_BYTES, _BUSY_BYTES, _MAX_DEPTH = 64 * MIB, 16 * MIB, 32
"""In flight for prefetches while no request is there, and beside requests: one that comes waits for so much at most."""


@dataclass(frozen=True, slots=True)
class Found:
    """What an announced text has: chunks by the fastest tier that has them, and how many are brought into RAM."""

    chunks: dict[Tier, int]
    started: int


@dataclass(slots=True, eq=False)
class _Prefetch:
    """One announcement.

    number:  of all announcements, in their order.
    chunks:  parents first. asked: how many of them tiers have said of whether they have them.
    todo:    to be promoted, in order; None until it is known what there is.
    entries: pinned, and not used yet. used: how many were.
    is_question: it is only asked what there is; nothing is brought or pinned.
    """

    number: int
    tenant: int
    chunks: Sequence[Chunk]
    asks_until_s: float
    until_s: float
    told: Callable[[Found], None]
    ended: Callable[[int, int], None]
    asked: int = 0
    todo: deque[Chunk] | None = None
    entries: dict[ChunkKey, Entry] = field(default_factory=dict)
    used: int = 0
    is_question: bool = False

    @property
    def is_open(self) -> bool:
        """Whether it is not known yet what there is, or not all of it has been begun to be brought."""
        return self.todo is None or bool(self.todo)


def _ignored(used: int, unused: int) -> None:
    return


def by_longest(chunks: Mapping[ChunkKey, Chunk]) -> list[Chunk]:
    """Chunks of several texts, each behind its parent, the texts with most chunks first."""
    ordered: dict[ChunkKey, Chunk] = {}
    for chunk in sorted(chunks.values(), key=lambda chunk: chunk.index, reverse=True):
        path: list[Chunk] = []
        at: Chunk | None = chunk
        while at is not None and at.key not in ordered:
            path.append(at)
            at = chunks.get(at.parent) if at.parent is not None else None
        ordered |= {each.key: each for each in reversed(path)}
    return list(ordered.values())


class Prefetches:
    """All of them, oldest first. The cache's thread calls it.

    is_busy: requests are there, so that prefetches are paced. pace: of the disk's loads; None where they go on fast.
    """

    def __init__(
        self,
        ram: RamTier,
        lower: LowerTiers,
        waits: Waits,
        stats: CacheStats,
        clock: Clock,
        pace: Pace | None = None,
    ) -> None:
        self._pace = pace
        self._ram = ram
        self._lower = lower
        self._waits = waits
        self._stats = stats
        self._clock = clock
        # A request, a step and an announcement cost what they concern, however many announcements there are.
        self._all: dict[int, _Prefetch] = {}
        self._open: dict[int, _Prefetch] = {}  # what `step` has something to do for
        self._of: dict[int, dict[int, _Prefetch]] = {}  # those of a tenant that are no questions
        self._holders: Multimap[ChunkKey, int] = Multimap()  # by each chunk that is pinned
        self._held: Counter[int] = Counter()  # chunks that are pinned, by tenant
        self._ends: Expiries[int] = Expiries(lambda: [(each.until_s, each.number) for each in self._all.values()])
        self._numbers = itertools.count()
        self._moving: list[Entry] = []
        self.is_busy = False

    def look_up(self, chunks: Sequence[Chunk], tenant: int, told: Callable[[Found], None]) -> None:
        """Say what there is of these chunks, as `begin` does; nothing is brought, pinned or counted as used."""
        until_s = self._clock.monotonic() + ANSWERS_S
        self._lower.ask(chunks, tenant)
        self._add(_Prefetch(next(self._numbers), tenant, chunks, until_s, until_s, told, _ignored, is_question=True))
        self.step()

    # -- announced ---------------------------------------------------------------------------------------------------

    def begin(
        self,
        chunks: Sequence[Chunk],
        tenant: int,
        hold_s: float,
        told: Callable[[Found], None],
        ended: Callable[[int, int], None] = _ignored,
    ) -> None:
        """Bring what lower tiers have of these chunks into RAM, and keep it there for `hold_s` at most.

        chunks: each behind its parent; only those of `tenant` are brought.
        told:   called once, when it is known what there is: at once, or when tiers have answered that must ask.
        ended:  called once, at the end, with how many of the chunks that were brought requests have used, and how many
                they have not.
        """
        own = self._of.get(tenant, {})
        if len(own) >= MAX_PREFETCHES:
            self._end(next(iter(own.values())))
        now_s = self._clock.monotonic()
        self._lower.ask(chunks, tenant)
        self._add(_Prefetch(next(self._numbers), tenant, chunks, now_s + ANSWERS_S, now_s + hold_s, told, ended))
        self.step()

    def used(self, keys: Iterable[ChunkKey]) -> None:
        """A request loads these chunks: they need no pin of a prefetch's any more."""
        if not self._holders:
            return
        for key in keys:
            for number in self._holders.of(key) if key in self._holders else ():
                each = self._all[number]
                entry = self._let_go(each, key)
                entry.pins -= 1
                each.used += not entry.deleted
                self._stats.prefetches["used"] += not entry.deleted
                if not each.entries:
                    self._open[number] = each  # it may be over

    def give_way(self) -> bool:
        """A request finds no room: end all prefetches. Whether that may have made some."""
        held = bool(self._holders)
        for each in list(self._all.values()):
            self._end(each)
        return held

    # -- in between --------------------------------------------------------------------------------------------------

    @property
    def is_moving(self) -> bool:
        """Whether `step` has something to do soon."""
        return any(each.is_open for each in list(self._open.values())) or bool(self._moving)

    @property
    def ends_s(self) -> float | None:
        """When the time of the next is over (monotonic), at the earliest; None if there is none."""
        return self._ends.next_s if self._all else None

    @property
    def all_held(self) -> int:
        """The chunks that are pinned."""
        return self._held.total()

    def held(self, tenant: int) -> int:
        """The chunks that are pinned for a tenant."""
        return self._held[tenant]

    def most(self, tenant: int) -> int:
        """How many may be."""
        return int(SHARE * self._ram.floor(tenant))

    def step(self) -> None:
        """Take note of answers and of times that are over, and start what may be."""
        if not self._all and not self._moving:
            return
        now_s = self._clock.monotonic()
        for each in list(self._open.values()):
            if each.todo is None and (now_s >= each.asks_until_s or not self._is_asking(each)):
                self._decide(each)
            if not each.is_open:
                del self._open[each.number]
                if not each.entries:
                    self._end(each)
        for number in self._ends.due(now_s):
            if number in self._all:
                self._end(self._all[number])
        self._moving = [entry for entry in self._moving if entry.state is State.PROMOTING and not entry.deleted]
        if not self._waits.is_waited_for:  # promotions of requests go first
            self._set_pace(is_moving=self.is_moving)  # before a thread begins with what is started
            self._start()
        self._set_pace(is_moving=bool(self._moving))

    def check(self) -> None:
        """Raise AssertionError if a chunk that is held may go."""
        held: Counter[int] = Counter()
        for each in self._all.values():
            if any(entry.pins < 1 and not entry.deleted for entry in each.entries.values()):
                raise AssertionError("a prefetched chunk may be evicted")
            if any(each.number not in self._holders.of(key) for key in each.entries):
                raise AssertionError("a chunk is held by an announcement that is not found by it")
            if (each.is_open or not each.entries) and each.number not in self._open:
                raise AssertionError("an announcement is not looked at any more")
            held[each.tenant] += len(each.entries)
        if +held != +self._held or sum(map(self._holders.count, self._holders)) != held.total():
            raise AssertionError("chunks are counted that are not held")
        if sum(map(len, self._of.values())) != sum(not each.is_question for each in self._all.values()):
            raise AssertionError("a tenant has other announcements than there are")

    # -- inside ------------------------------------------------------------------------------------------------------

    def _add(self, each: _Prefetch) -> None:
        self._all[each.number] = self._open[each.number] = each
        self._ends.note(each.until_s, each.number, len(self._all))
        if not each.is_question:
            self._of.setdefault(each.tenant, {})[each.number] = each

    def _hold(self, each: _Prefetch, key: ChunkKey, entry: Entry) -> None:
        """It has the pin of an entry."""
        each.entries[key] = entry
        self._holders.add(key, each.number)
        self._held[each.tenant] += 1

    def _let_go(self, each: _Prefetch, key: ChunkKey) -> Entry:
        """It has not; who calls has."""
        self._holders.discard(key, each.number)
        self._held[each.tenant] -= 1
        if not self._held[each.tenant]:
            del self._held[each.tenant]
        return each.entries.pop(key)

    def _set_pace(self, *, is_moving: bool) -> None:
        """Of what nobody waits for. A request that begins to wait sets it to full speed itself."""
        if self._pace is not None:
            self._pace.is_slow = self.is_busy and is_moving and not self._waits.is_waited_for

    def _is_asking(self, each: _Prefetch) -> bool:
        """Whether tiers have yet to say of one of its chunks if they have it. Each is looked at until they have."""
        while each.asked < len(each.chunks) and not self._is_unknown(each.chunks[each.asked].key):
            each.asked += 1
        return each.asked < len(each.chunks)

    def _is_unknown(self, key: ChunkKey) -> bool:
        return key not in self._ram.entries and self._lower.find(key) is None and bool(self._lower.asked(key))

    def _decide(self, each: _Prefetch) -> None:
        """Which chunks are brought: those whose ancestors are all there, as far as there is a share for them."""
        chunks, there = Counter[Tier](), set[ChunkKey]()
        todo: list[Chunk] = []
        for chunk in each.chunks:
            if chunk.parent is not None and chunk.parent not in there:
                continue
            source = None if chunk.key in self._ram.entries else self._lower.find(chunk.key)
            terms = None if source is None else self._lower.terms(chunk.key)
            if source is not None and terms is not None and terms.tenant == each.tenant:
                todo.append(chunk)
            elif chunk.key in self._ram.entries:
                if not each.is_question:
                    self._take_over(each, chunk.key)
            else:
                continue
            there.add(chunk.key)
            chunks[Tier.RAM if source is None else source.tier] += 1
        planned = sum(len(other.todo or ()) for other in self._open.values() if other.tenant == each.tenant)
        room = 0 if each.is_question else max(0, self.most(each.tenant) - self.held(each.tenant) - planned)
        each.todo = deque(todo[:room])
        each.told(Found(dict(chunks), len(each.todo)))

    def _take_over(self, each: _Prefetch, key: ChunkKey) -> None:
        """What is announced again is held for the later announcement's time."""
        entry = self._ram.entries[key]
        for number in self._holders.of(key) if key in self._holders else ():
            other = self._all[number]
            if other.tenant == each.tenant and other.entries[key] is entry:
                self._hold(each, key, self._let_go(other, key))
                if not other.entries:
                    self._open[number] = other  # it may be over

    def _start(self) -> None:
        """Promote what is next, the oldest announcement's first, until enough is in flight."""
        busy_bytes = 0 if self._pace is not None else _BUSY_BYTES
        at_most = (busy_bytes if self.is_busy else _IDLE_BYTES) // self._ram.slab.slot_bytes
        depth = min(max(1, at_most), _MAX_DEPTH)
        for each in self._open.values():
            while each.todo and len(self._moving) < depth:
                self._promote(each, each.todo.popleft())

    def _promote(self, each: _Prefetch, chunk: Chunk) -> None:
        if chunk.key in self._ram.entries:
            return
        if chunk.parent is not None and chunk.parent not in self._ram.entries:
            return  # what it stands on has gone meanwhile
        has_share = self.held(each.tenant) < self.most(each.tenant)  # tenants may have come since, and made it smaller
        entry = self._waits.promote(chunk, is_modest=True) if has_share else None
        if entry is None:
            each.todo = deque()  # what follows stands on it, or finds no room either
            return
        entry.pins += 1
        self._hold(each, chunk.key, entry)
        self._moving.append(entry)
        self._stats.prefetches["started"] += 1

    def _end(self, each: _Prefetch) -> None:
        """Unpin what no request came for, and drop it from RAM: lower tiers have it."""
        del self._all[each.number]
        self._open.pop(each.number, None)
        if not each.is_question:
            own = self._of[each.tenant]
            del own[each.number]
            if not own:
                del self._of[each.tenant]
        if each.todo is None:
            each.told(Found({}, 0))
        unused = sum(not entry.deleted for entry in each.entries.values())
        if unused:
            self._stats.prefetches["unused"] += unused
        for key in reversed(list(each.entries)):
            entry = self._let_go(each, key)
            entry.pins -= 1
            if not entry.deleted and self._lower.holds(entry.chunk.key):
                self._ram.drop(entry)
        each.ended(each.used, unused)
