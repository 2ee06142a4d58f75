"""Which of several ways to evict finds more in this tier: small copies of the tier, one a way, that see a sample.

A sample of the chunks, drawn by their hash, is looked up and stored in a small tier for each way: a chain of chunks
keeps its order when some of them are left out (Waldspurger and others, ATC '17, call this a miniature simulation). A
tier of up to `WHOLE` chunks is copied whole. Of each request's chunks the copies count what they have; the way that
finds clearly more than the one in use takes its place.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from math import sqrt
from typing import Final, Protocol

from hotspan.core.types import ChunkKey

WHOLE: Final = 1024
"""A copy has this many chunks at most, and more than half as many of a larger tier."""

_WINDOW: Final = 16
"""In lookups of as many chunks as a copy has: after so many, what was found counts 1/e."""

_CLEARLY: Final = 1.5
"""Standard deviations by which a way must be ahead of the one in use."""


class SmallTier(Protocol):
    """What a copy is evicted by."""

    @property
    def size(self) -> int: ...

    def __contains__(self, key: ChunkKey) -> bool: ...

    def add(self, key: ChunkKey, parent: ChunkKey | None, tenant: int = 0) -> None: ...

    def touch(self, keys: Iterable[ChunkKey]) -> None: ...

    def remove(self, key: ChunkKey, *, evicted: bool = False) -> None: ...

    def victim(self, tenant: int, may_go: Callable[[ChunkKey], bool]) -> ChunkKey | None: ...


def sample_mask(capacity: int) -> int:
    """For a tier of so many chunks: those whose hash has none of these bits are in the sample."""
    mask = 0
    while capacity > WHOLE * (mask + 1):
        mask = 2 * mask + 1
    return mask


class _Standing:
    """How a way does. found: of the request that is looked up; ahead: chunks more than the way in use, decayed.

    spread: the sum of squares of what `ahead` is the sum of.
    """

    __slots__ = ("ahead", "copy", "found", "spread")

    def __init__(self, copy: SmallTier) -> None:
        self.copy, self.found, self.ahead, self.spread = copy, 0, 0.0, 0.0


class Duel:
    """Copies of a tier, by the way that each is evicted, and the best of these. The first is it to begin with.

    capacity: of a copy. mask: as `sample_mask` gives it.
    """

    def __init__(self, capacity: int, mask: int, copies: Mapping[int, SmallTier]) -> None:
        self._capacity, self._mask = capacity, mask
        self._ways = {way: _Standing(copy) for way, copy in copies.items()}
        self.best = next(iter(copies))
        self._asked = 0

    def sees(self, key: Hashable) -> bool:
        """Whether a chunk is in the sample."""
        return not hash(key) & self._mask

    def begin(self, keys: Sequence[ChunkKey], parents: Sequence[ChunkKey | None]) -> None:
        """A request has found these chunks of the sample, leaf first; parents: those that each stands on."""
        self._judge()
        self._asked += len(keys)
        for way in self._ways.values():
            here = [key for key in keys if key in way.copy]
            way.found += len(here)
            way.copy.touch(here)
            if len(here) < len(keys):
                for key, parent in zip(reversed(keys), reversed(parents), strict=True):
                    self._add(way.copy, key, parent)

    def ask(self, key: ChunkKey, parent: ChunkKey | None) -> None:
        """The request has asked for this chunk of the sample, too, which is not in the tier itself."""
        self._asked += 1
        for way in self._ways.values():
            if key in way.copy:
                way.found += 1
                way.copy.touch((key,))
            else:
                self._add(way.copy, key, parent)

    def forget(self, key: ChunkKey) -> None:
        """Somebody deleted a chunk."""
        for way in self._ways.values():
            way.copy.remove(key)

    def _add(self, copy: SmallTier, key: ChunkKey, parent: ChunkKey | None) -> None:
        if key in copy or (parent is not None and parent not in copy):
            return
        while copy.size >= self._capacity:
            victim = copy.victim(0, lambda each: each != parent)
            if victim is None:
                return
            copy.remove(victim, evicted=True)
        copy.add(key, parent)

    def _judge(self) -> None:
        """Count the request that was looked up; another way is in use from now on if it is clearly ahead."""
        if not self._asked:
            return
        kept = max(0.0, 1 - self._asked / (_WINDOW * self._capacity))
        of_best = self._ways[self.best].found
        for way in self._ways.values():
            ahead = way.found - of_best
            way.ahead = kept * way.ahead + ahead
            way.spread = kept * kept * way.spread + ahead * ahead
            way.found = 0
        self._asked = 0
        leader = max(self._ways, key=lambda each: self._ways[each].ahead)
        lead = self._ways[leader].ahead
        if leader != self.best and lead > _CLEARLY * sqrt(self._ways[leader].spread):
            self.best = leader
            for way in self._ways.values():
                way.ahead -= lead
