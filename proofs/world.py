"""A cache over a disk tier, all in one thread and in simulated time, whose process and whose machine may die."""

import contextlib
import os
import random
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from hotspan.cache.cost import CostModel
from hotspan.cache.tiered import TieredCache
from hotspan.core.frame import HEADER_BYTES
from hotspan.core.types import PAGE_BYTES, ChunkKey, Tier
from hotspan.testing import chunks
from hotspan.testing.clock import SimulatedClock
from hotspan.tiers.disk import DiskOptions, DiskTier
from hotspan.tiers.lower import LowerTier
from hotspan.tiers.packer import Packer
from hotspan.tiers.shares import Shares
from hotspan.tiers.slab import SharedSlab
from kit.simulated.faults import BadPlace, BadPlaces
from kit.simulated.inline import InlineQueues
from kit.simulated.keys import FixedKeys
from kit.simulated.lower import SettledTier, SteadyTier
from kit.simulated.power import RecordingFiles, power_loss

NAMESPACE = bytes(range(32))
JUNK = b"\x5a"

content = lru_cache(maxsize=1024)(chunks.content)
"""A chunk's bytes, which worlds compare with all the time: those of a few pages that were asked for last are kept."""


class SlowFaultyFiles(BadPlaces):
    """Calls that may fail, and take `slow_s` of simulated time; `places` of the disk are bad."""

    def __init__(self, clock: SimulatedClock, places: list[BadPlace] | None = None) -> None:
        BadPlaces.__init__(self, places, wait=clock.advance)
        self.slow_s = 0.0
        self._clock = clock

    def before(self, kind: str) -> bool:
        if self.slow_s:
            self._clock.advance(self.slow_s)
        return super().before(kind)


class MortalFiles(SlowFaultyFiles, RecordingFiles):
    """The same, recorded, so that the power may go."""

    def __init__(self, clock: SimulatedClock, directory: Path, places: list[BadPlace] | None = None) -> None:
        SlowFaultyFiles.__init__(self, clock, places)
        RecordingFiles.__init__(self, directory)


@dataclass(frozen=True, slots=True)
class WorldOptions:
    """What stands in the world.

    is_packed:   chunks on disk are compressed in every second life, and take several slots; a payload of some pages
                 is needed for that.
    is_guarded:  the disk tier is given up while it fails. is_recorded: so that the power may go.
    is_deciding: a cost model says what is loaded from the disk tier.
    """

    payload_bytes: int = 4096
    ram_slots: int = 6
    disk_slots: int = 14
    is_sealed: bool = False
    is_packed: bool = False
    is_guarded: bool = False
    is_recorded: bool = False
    is_deciding: bool = False
    ram_shares: Shares = Shares()  # noqa: RUF009  (frozen)
    disk_shares: Shares = Shares()  # noqa: RUF009

    @property
    def slot_bytes(self) -> int:
        """Of the disk's slots."""
        return PAGE_BYTES if self.is_packed else self.payload_bytes + HEADER_BYTES

    @property
    def slots(self) -> int:
        """Of the disk."""
        return self.disk_slots * (self.payload_bytes + HEADER_BYTES) // self.slot_bytes


class World:
    """RAM, disk, time and I/O of one process after the other. `open` begins a life.

    tier: what the cache has below it. disk: its DiskTier, the newest that was opened.
    """

    def __init__(self, root: Path, options: WorldOptions, rng: random.Random) -> None:
        self.options = options
        self.clock = SimulatedClock()
        self.lives = 0
        self._root = root
        self._rng = rng
        self._losses = 0
        self.slab = SharedSlab(f"proof-{uuid.uuid4().hex}", options.ram_slots, options.payload_bytes)
        self.slab.unlink()
        self.places: list[BadPlace] = []
        self.met: Counter[str] = Counter()  # calls of all lives that met one
        self.files = SlowFaultyFiles(self.clock, self.places)
        self.queues = InlineQueues()
        self.disk: DiskTier
        self.tier: LowerTier
        self.cache: TieredCache

    @property
    def directory(self) -> Path:
        """Where the disk tier is now."""
        return self._root / f"disk-{self._losses}"

    def open(self, arm: Callable[[BadPlaces], None] = lambda files: None) -> None:
        """A process starts. arm: called before its first system call. Raises: DirectoryError."""
        self.lives += 1
        self.files = (
            MortalFiles(self.clock, self.directory, self.places)
            if self.options.is_recorded
            else SlowFaultyFiles(self.clock, self.places)
        )
        self.files.met = self.met
        self.queues = InlineQueues(self._rng.getrandbits(32))
        self.slab.view[:] = JUNK * self.slab.bytes
        arm(self.files)
        self.tier = (SettledTier if self.options.is_guarded else SteadyTier)(self._open_disk, self.clock)
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
        if not self.is_up:
            return set()
        table = self.disk.directory.table
        return {table.key(slot) for slot in table.slots()}

    def crash(self) -> None:
        """The process is gone, with all that it had not written."""
        for fd in list(self.files.open_fds):
            self.files.open_fds.discard(fd)
            with contextlib.suppress(OSError):
                os.close(fd)

    def lose_power(self) -> None:
        """The machine is gone, with all that was not synced."""
        self.crash()
        files = self.files
        if not isinstance(files, MortalFiles):
            raise ValueError("a power loss needs a recorded world")
        image = power_loss(files.recording, len(files.recording.events), self._rng)
        self._losses += 1
        image.restore(self.directory)

    def close(self) -> None:
        """All is over."""
        self.tier.close(5.0)
        self.slab.close()

    def _open_disk(self, again: bool) -> DiskTier:
        options = DiskOptions(
            self.directory,
            self.options.disk_slots * (self.options.payload_bytes + HEADER_BYTES),
            threads=3,
            store_depth=4,
            allow_direct=False,
            is_new=not again,
            keys=FixedKeys(self._rng.getrandbits(60)) if self.options.is_sealed else None,
            shares=self.options.disk_shares,
            packer=Packer("always" if self.options.is_packed and self.lives % 2 else "never", 3, self.clock),
            slot_bytes=PAGE_BYTES if self.options.is_packed else None,
            files=self.files,
            queue=self.queues.queue,
            step_bytes=2 * (self.options.payload_bytes + HEADER_BYTES),
        )
        self.disk = DiskTier(options, NAMESPACE, self.options.payload_bytes, self.clock)
        return self.disk
