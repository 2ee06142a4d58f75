"""What is known of chunks in a store that others change, too: it holds until the log says more about their tenant."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import NamedTuple

from hotspan.core.types import ChunkKey
from hotspan.l2.base import Found
from hotspan.l2.follower import LogFollower
from hotspan.l2.view import LogView


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


class KnownChunks:
    """Chunks that may be read, the most recent `most` of them. An invalidation costs only what it may take: a tenant's.

    follower: of the log.
    """

    def __init__(self, follower: LogFollower, most: int) -> None:
        self._follower = follower
        self._most = most
        self._known: OrderedDict[ChunkKey, _Known] = OrderedDict()
        self._of: dict[int, set[ChunkKey]] = {}

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
        while len(self._known) > self._most:
            self.pop(next(iter(self._known)))

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
        if len(self._known) > self._most:
            raise AssertionError("more is known than there is room for")
