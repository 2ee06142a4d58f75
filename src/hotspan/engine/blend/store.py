"""Windows in the tiers: chunks of their own, named by their tokens, that need nothing before them.

So they have terms, tenants, encryption, verification and eviction as all chunks have; a label says that they are
windows, and an invalidation that names chunks of a text takes them (core/terms.py).
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from hotspan.cache.entry import Reader
from hotspan.cache.tiered import TieredCache
from hotspan.core.terms import WINDOW, Terms
from hotspan.core.types import Chunk, ChunkKey, Lookup, Tier
from hotspan.engine.blend.index import Found


class _Storing(NamedTuple):
    """A store in flight. number: of the orders that have it. is_current: the cache was not cleared since."""

    number: int
    is_current: bool = True


class WindowStore:
    """The windows of one engine. The scheduler's thread calls it."""

    def __init__(self, cache: TieredCache) -> None:
        self.cache = cache
        self._storing: dict[ChunkKey, _Storing] = {}

    # -- look up -------------------------------------------------------------------------------------------------------

    def ask(self, keys: Iterable[ChunkKey], terms: Terms) -> None:
        """Let tiers that must ask elsewhere begin to find out which of these they have."""
        chunks = [Chunk(key, None, place) for place, key in enumerate(keys)]
        self.cache.ask(chunks, Reader(terms=terms))

    def is_asking(self, found: Iterable[Found]) -> bool:
        """Whether a tier has yet to say if it has one of these, which is nowhere else."""
        return any(self.cache.is_asking(each.window.key) for each in found)

    def is_there(self, found: Found) -> bool:
        """Whether a tier is known to have it."""
        return bool(self.cache.where(found.window.key))

    def is_in_ram(self, found: Found) -> bool:
        """Whether RAM has it."""
        return Tier.RAM in self.cache.where(found.window.key)

    def look_up(self, found: Sequence[Found], reader: Reader) -> tuple[list[Found], bool]:
        """Those of some windows that are in RAM, and held there for the reader; whether others are on their way."""
        answers = [self.cache.lookup(Chunk(each.window.key, None), reader) for each in found]
        there = [each for each, answer in zip(found, answers, strict=True) if answer is Lookup.HIT]
        return there, Lookup.RETRY in answers

    # -- load and store ------------------------------------------------------------------------------------------------

    def begin_load(self, found: Sequence[ChunkKey], reader: Reader, terms: Sequence[Reader]) -> list[int]:
        """The slots of windows that are held for the reader; from now on they have also the terms of their users."""
        for key, user in zip(found, terms, strict=True):
            self.cache.join([Chunk(key, None)], _windowed(user))
        return self.cache.begin_load(found, reader)

    def begin_store(self, found: Found, reader: Reader, number: int) -> int | None:
        """The slot to store a window in; None if it is somewhere, or on its way, or RAM has no room.

        number: of the orders that the worker gets it with.
        """
        key = found.window.key
        if key in self._storing or self.is_there(found):
            return None
        placements = self.cache.begin_store([Chunk(key, None)], _windowed(reader))
        if not placements:
            return None
        self._storing[key] = _Storing(number)
        return placements[0].slot

    def end_store(self, key: ChunkKey, done: int, *, success: bool) -> None:
        """The worker has stored a window, or has failed to. done: the orders that its report is of, or later ones.

        What does not wait to be stored, or was ordered later, is left as it is: its slot has other bytes yet.
        """
        storing = self._storing.get(key)
        if storing is None or storing.number > done:
            return
        if storing.is_current:
            self.cache.end_store([Chunk(key, None)], success=success)
            self.cache.stats.windows_stored += success
        del self._storing[key]

    def give_up(self, done: int) -> None:
        """All reports up to these orders were taken: what they were to store, and none told of, is not stored."""
        for key in [key for key, storing in self._storing.items() if storing.number <= done]:
            self.end_store(key, done, success=False)

    def clear(self) -> None:
        """The cache was cleared: stores in flight have nothing to report to it."""
        self._storing = {key: storing._replace(is_current=False) for key, storing in self._storing.items()}

    @property
    def is_busy(self) -> bool:
        """Whether the worker stores."""
        return bool(self._storing)

    @property
    def is_stale(self) -> bool:
        """Whether it still uses slots of before the cache was cleared."""
        return not all(storing.is_current for storing in self._storing.values())


def _windowed(reader: Reader) -> Reader:
    """A request's terms as those of a window."""
    terms = reader.terms
    terms = Terms(
        terms.tenant, terms.adapter, terms.labels | {WINDOW}, terms.generation, terms.expires_s, terms.is_wild
    )
    return replace(reader, terms=terms, bare_terms=terms)
