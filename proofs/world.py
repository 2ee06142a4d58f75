"""A cache over a disk tier, all in one thread and in simulated time, whose process and whose machine may die."""

import random
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from hotspan.cache.cost import CostModel
from hotspan.cache.tiered import TieredCache
from hotspan.core.types import ChunkKey, Tier
from hotspan.testing import chunks
from hotspan.testing.clock import SimulatedClock
from hotspan.tiers.disk import DiskTier
from hotspan.tiers.lower import LowerTier
from hotspan.tiers.shares import Shares
from hotspan.tiers.slab import SharedSlab
from kit.simulated.faults import BadPlace, BadPlaces
from kit.simulated.inline import InlineQueues
from kit.simulated.lower import SettledTier, SteadyTier
from proofs.disk import NAMESPACE, DiskShape, SimulatedDisk, SlowFaultyFiles

JUNK = b"\x5a"

content = lru_cache(maxsize=1024)(chunks.content)
"""A chunk's bytes, which worlds compare with all the time: those of a few pages that were asked for last are kept."""


@dataclass(frozen=True, slots=True)
class WorldOptions:
    """What stands in the world.

    is_guarded:  the disk tier is given up while it fails.
    is_deciding: a cost model says what is loaded from the disk tier.
    """

    disk: DiskShape
    ram_slots: int = 6
    is_guarded: bool = False
    is_deciding: bool = False
    ram_shares: Shares = Shares()  # noqa: RUF009  (frozen)


class World:
    """RAM, disk, time and I/O of one process after the other. `open` begins a life.

    tier: what the cache has below it.
    """

    def __init__(self, root: Path, options: WorldOptions, rng: random.Random) -> None:
        self.options = options
        self.clock = SimulatedClock()
        self._rng = rng
        self._medium = SimulatedDisk(root, options.disk, self.clock, rng)
        self.slab = SharedSlab(f"proof-{uuid.uuid4().hex}", options.ram_slots, options.disk.payload_bytes)
        self.slab.unlink()
        self.queues = InlineQueues()
        self.tier: LowerTier
        self.cache: TieredCache

    @property
    def disk(self) -> DiskTier:
        """The newest that was opened."""
        return self._medium.tier

    @property
    def files(self) -> SlowFaultyFiles:
        """The process's system calls."""
        return self._medium.files

    @property
    def places(self) -> list[BadPlace]:
        """That are bad; may be changed."""
        return self._medium.places

    @property
    def met(self) -> Counter[str]:
        """Calls of all lives that met a bad place."""
        return self._medium.met

    def open(self, arm: Callable[[BadPlaces], None] = lambda files: None) -> None:
        """A process starts. arm: called before its first system call. Raises: DirectoryError."""
        self.queues = InlineQueues(self._rng.getrandbits(32))
        self.slab.view[:] = JUNK * self.slab.bytes
        self._medium.begin(arm)
        kind = SettledTier if self.options.is_guarded else SteadyTier
        self.tier = kind(lambda again: self._medium.open(self.queues, again), self.clock)
        cost = CostModel(2048, {Tier.DISK: 3}, self.clock) if self.options.is_deciding else None
        self.cache = TieredCache(
            self.slab, self.tier, namespace=NAMESPACE, shares=self.options.ram_shares, cost=cost, clock=self.clock
        )

    @property
    def is_up(self) -> bool:
        """Whether the tier below takes part."""
        return self.tier.is_up

    def below(self) -> set[ChunkKey]:
        """The chunks that the tier below has, whole or not; none while it is given up."""
        return self._medium.chunks() if self.is_up else set()

    def crash(self) -> None:
        """The process is gone, with all that it had not written."""
        self._medium.crash()

    def lose_power(self) -> None:
        """The machine is gone, with all that was not synced."""
        self._medium.lose_power()

    def close(self) -> None:
        """All is over."""
        self.tier.close(5.0)
        self.slab.close()
