"""What a store last said of chunks: which may be read, until the log says more of their tenant; which are missing."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from hotspan.core.clock import Clock
from hotspan.core.types import Chunk, ChunkKey
from hotspan.l2.base import Found
from hotspan.l2.follower import LogFollower
from hotspan.l2.view import LogView
from hotspan.tiers.base import Fault

_ABSENT_S = 10.0
"""After which a chunk that was not there, or could not be read, is asked for again."""


class Moment(NamedTuple):
    """What the log said when something was asked or judged: all up to a generation, in this view of it."""

    view: LogView
    generation: int


class _Known(NamedTuple):
    found: Found
    since: Moment

    @property
    def tenant(self) -> int:
        return self.found.record.terms.tenant


class FailedChunks:
    """The latest `max_entries` chunks of which a transfer failed, and until when they are not tried again.

    again: how a fault counts where the chunk had failed before: of one object nobody judges the store.
    """

    def __init__(self, again: Fault, max_entries: int, clock: Clock) -> None:
        self._again = again
        self._max_entries = max_entries
        self._clock = clock
        self._until_s: OrderedDict[ChunkKey, float] = OrderedDict()

    def __contains__(self, key: object) -> bool:
        return key in self._until_s and self._until_s[key] > self._clock.monotonic()  # type: ignore[index]

    def has_failed(self, key: ChunkKey) -> bool:
        """Whether a chunk's last transfer failed, however long ago."""
        return key in self._until_s

    def judge(self, key: ChunkKey, fault: Fault | None) -> Fault | None:
        """A transfer ended so; the fault as it counts."""
        if fault is None:
            self.forgive(key)
        if fault is not Fault.IO:
            return fault
        fault = self._again if key in self._until_s else fault
        self._until_s[key] = self._clock.monotonic() + _ABSENT_S
        self._until_s.move_to_end(key)
        while len(self._until_s) > self._max_entries:
            self._until_s.popitem(last=False)
        return fault

    def forgive(self, key: ChunkKey) -> None:
        """It is as any other."""
        self._until_s.pop(key, None)


class KnownChunks:
    """The most recent `max_entries` chunks that may be read, and as many that are not there.

    An invalidation costs only what it may take: a tenant's.

    follower: of the log. unreadable, unwritable: those of which the last load, or store, failed a moment ago.
    """

    def __init__(self, follower: LogFollower, max_entries: int, clock: Clock) -> None:
        self._follower = follower
        self._max_entries = max_entries
        self._clock = clock
        self._known: OrderedDict[ChunkKey, _Known] = OrderedDict()
        self._of: dict[int, set[ChunkKey]] = {}
        self._absent: OrderedDict[ChunkKey, float] = OrderedDict()  # until when
        self.unreadable = FailedChunks(Fault.GONE, max_entries, clock)
        self.unwritable = FailedChunks(Fault.DROPPED, max_entries, clock)
        self._gaps: set[ChunkKey] = set()  # of those, where a chain breaks off: there may be more of it behind

    def __len__(self) -> int:
        return len(self._known)

    def now(self) -> Moment:
        """As of now; to be asked for before the question, and kept with the answer."""
        generation = self._follower.generation  # read first: what is read meanwhile is of later ones
        return Moment(self._follower.view, generation)

    def holds(self, since: Moment, tenant: int) -> bool:
        """Whether nothing of a tenant was invalidated since then, as far as the log was read."""
        return self._follower.view is since.view and since.view.latest(tenant) <= since.generation

    def get(self, key: ChunkKey) -> Found | None:
        """What is known of a chunk; None also if an invalidation that was read since may have taken it."""
        known = self._known.get(key)
        if known is None:
            return None
        if self.holds(known.since, known.tenant):
            return known.found
        self.pop(key)
        return None

    def put(self, found: Found, since: Moment) -> None:
        """A chunk was found to be readable then."""
        key = found.record.key
        self.pop(key)
        self._known[key] = known = _Known(found, since)
        self._of.setdefault(known.tenant, set()).add(key)
        while len(self._known) > self._max_entries:
            self.pop(next(iter(self._known)))
        self._absent.pop(key, None)
        self._gaps.discard(key)

    def loaded(self, key: ChunkKey, fault: Fault | None) -> Fault | None:
        """A chunk was loaded, or not; the fault as it counts."""
        if fault not in (None, Fault.DROPPED):
            self.pop(key)
        return self.unreadable.judge(key, fault)

    def put_absent(self, chunks: Sequence[Chunk], asked: set[ChunkKey]) -> None:
        """Of a text, what was asked for and is not known is not there."""
        absent = {key for key in asked if self.get(key) is None}
        until_s = self._clock.monotonic() + _ABSENT_S
        for key in absent:
            self._absent[key] = until_s
            self._absent.move_to_end(key)
        parents = {chunk.parent for chunk in chunks}
        self._gaps |= {c.key for c in chunks if c.key in absent and c.key in parents and c.parent not in absent}
        while len(self._absent) > self._max_entries:
            self._gaps.discard(self._absent.popitem(last=False)[0])

    def is_absent(self, key: ChunkKey) -> bool:
        """Whether a chunk was not there, or could not be read, a moment ago."""
        return self._absent.get(key, 0.0) > self._clock.monotonic() or key in self.unreadable

    def is_gap(self, key: ChunkKey) -> bool:
        """Whether a chain broke off at a chunk that was not there: more of it may lie behind."""
        return key in self._gaps

    def change(self, found: Found) -> None:
        """A chunk that is known has other terms."""
        key = found.record.key
        self._known[key] = self._known[key]._replace(found=found)

    def pop(self, key: ChunkKey) -> Found | None:
        """Know nothing of a chunk any more; what was known."""
        known = self._known.pop(key, None)
        if known is None:
            return None
        self._of[known.tenant].discard(key)
        if not self._of[known.tenant]:
            del self._of[known.tenant]
        return known.found

    def pop_tenants(self, concerned: Callable[[int], bool]) -> Iterator[Found]:
        """Know nothing any more of some tenants; what was known until now."""
        for tenant in filter(concerned, list(self._of)):
            for key in list(self._of[tenant]):
                found = self.get(key)
                self.pop(key)
                if found is not None:
                    yield found

    def check(self) -> None:
        """Raise AssertionError if the books do not agree."""
        if any(key != known.found.record.key for key, known in self._known.items()):
            raise AssertionError("a chunk is known by another's name")
        of = {key: tenant for tenant, keys in self._of.items() for key in keys}
        if {key: known.tenant for key, known in self._known.items()} != of or not all(self._of.values()):
            raise AssertionError("a tenant is known to have other chunks than are known")
        if len(self._known) > self._max_entries:
            raise AssertionError("more is known than there is room for")
