"""The lower tiers as one: each is given every chunk, and the fastest that has one gives it back."""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from hotspan.cache.controller import StoreController
from hotspan.cache.entry import Entry
from hotspan.cache.ram import RamTier
from hotspan.cache.stats import CacheStats
from hotspan.core.clock import Clock
from hotspan.core.terms import Scope, Terms
from hotspan.core.types import Chunk, ChunkKey, Tier
from hotspan.tiers.base import AllDurable, Durable, StorageTier, TierUsage, Transfer

_SLICE_S = 0.001


class LowerTiers:
    """Tiers, fastest first, and what is on its way to them. The cache's one thread calls it."""

    def __init__(self, tiers: Sequence[StorageTier], ram: RamTier, stats: CacheStats, clock: Clock) -> None:
        self.tiers = tuple(tiers)
        self._controllers = [StoreController(ram, tier, stats) for tier in tiers]
        self._clock = clock

    # -- what is there ---------------------------------------------------------------------------------------------

    def find(self, key: ChunkKey) -> StorageTier | None:
        """The fastest tier that is known to have a chunk."""
        return next((tier for tier in self.tiers if tier.lookup(key)), None)

    def where(self, key: ChunkKey) -> list[Tier]:
        """The tiers that are known to have a chunk."""
        return [tier.tier for tier in self.tiers if tier.lookup(key)]

    def holds(self, key: ChunkKey) -> bool:
        """Whether a tier has a chunk, or is being given it."""
        return any(controller.holds(key) for controller in self._controllers)

    def ask(self, chunks: Sequence[Chunk], tenant: int) -> None:
        """Let tiers that must ask elsewhere begin to find out which of these chunks they have."""
        for tier in self.tiers:
            tier.ask(chunks, tenant)

    def asked(self, key: ChunkKey) -> list[StorageTier]:
        """The tiers that wait to be told whether they have a chunk."""
        return [tier for tier in self.tiers if tier.is_asking(key)]

    @property
    def is_asking(self) -> bool:
        """Whether answers are on their way."""
        return any(tier.asking for tier in self.tiers)

    def terms(self, key: ChunkKey) -> Terms | None:
        """The terms of a chunk, joined over the tiers that have it; None if none has."""
        found = [tier.terms(key) for tier in self.tiers if tier.lookup(key)]
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
            tier.touch(leaf_first)

    def discard(self, key: ChunkKey) -> None:
        """Forget a chunk and what stands on it, for it is to be written anew."""
        for tier in self.tiers:
            tier.discard(key)

    def invalidate(self, scopes: Sequence[Scope], durable: Durable, *, is_foreign: bool) -> dict[Tier, int]:
        """As StorageTier says, on all tiers; durable once it is so on all. is_foreign: the L2's log has it already."""
        told = [tier for tier in self.tiers if not (is_foreign and tier.tier is Tier.L2)]
        logged = AllDurable(len(told), durable)
        return {tier.tier: tier.invalidate(scopes, logged) for tier in told}

    def usage(self) -> dict[Tier, TierUsage]:
        """How full each tier is."""
        return {tier.tier: tier.usage() for tier in self.tiers}

    # -- on its way ------------------------------------------------------------------------------------------------

    @property
    def is_storing(self) -> bool:
        """Whether chunks wait for a tier, or are on their way to it."""
        return any(controller.queued for controller in self._controllers)

    def queued(self) -> dict[Tier, int]:
        """How many chunks wait for each tier, or are on their way to it."""
        return {tier.tier: controller.queued for tier, controller in zip(self.tiers, self._controllers, strict=True)}

    def offer(self, keys: Iterable[ChunkKey]) -> None:
        """Chunks came to RAM, or were used there a second time."""
        for key in keys:
            for controller in self._controllers:
                controller.offer(key)

    def waits(self, key: ChunkKey) -> bool:
        """Whether a chunk is to be given to a tier that does not have it."""
        return any(controller.waits(key) for controller in self._controllers)

    def left(self, key: ChunkKey) -> None:
        """A chunk went from RAM for room: what waited for it is counted."""
        for controller in self._controllers:
            controller.left(key)

    def forget(self, key: ChunkKey) -> None:
        """A chunk of RAM is not to be written any more."""
        for controller in self._controllers:
            controller.forget(key)

    def step(self) -> None:
        """Hand over chunks until the tiers take no more."""
        for controller in self._controllers:
            controller.step()

    def finished(self, ended: Callable[[Entry], None]) -> Iterator[tuple[Tier, Transfer]]:
        """The transfers that ended, tier by tier; `ended` is told of entries whose slots a store uses no more."""
        for tier, controller in zip(self.tiers, self._controllers, strict=True):
            for transfer in tier.finished():
                yield tier.tier, transfer
                if not transfer.is_load:
                    ended(controller.ended(transfer))
            controller.step()

    def wait(self, sources: set[StorageTier], timeout_s: float) -> None:
        """Sleep until something ends in one of `sources`, or in a tier that asks; in any, if that is none."""
        busy = [tier for tier in self.tiers if tier.asking or tier in sources] or list(self.tiers)
        if len(busy) == 1:
            busy[0].wait(timeout_s)
            return
        deadline = self._clock.monotonic() + timeout_s
        for tier in itertools.cycle(busy):  # nobody tells which of them will be first
            left = deadline - self._clock.monotonic()
            if left <= 0 or tier.wait(min(left, _SLICE_S)):
                return

    def in_flight(self) -> list[Entry]:
        """Entries whose slots stores read."""
        return [entry for controller in self._controllers for entry in controller.in_flight()]

    def close(self, timeout_s: float) -> None:
        """Let go of all tiers, within `timeout_s`."""
        deadline = self._clock.monotonic() + timeout_s
        for tier in self.tiers:
            tier.close(max(0.0, deadline - self._clock.monotonic()))
