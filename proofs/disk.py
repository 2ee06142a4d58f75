"""A disk in simulated time: it outlives the processes that open it, fails as it is told, and may lose its power."""

import contextlib
import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hotspan.core.frame import HEADER_BYTES
from hotspan.core.types import PAGE_BYTES, ChunkKey
from hotspan.testing.clock import SimulatedClock
from hotspan.tiers.directory import POSITION_FILE
from hotspan.tiers.disk import DiskOptions, DiskTier
from hotspan.tiers.packer import Packer
from hotspan.tiers.shares import Shares
from kit.simulated.faults import BadPlace, BadPlaces
from kit.simulated.inline import InlineQueues
from kit.simulated.keys import FixedKeys
from kit.simulated.power import RecordingFiles, power_loss

NAMESPACE = bytes(range(32))


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
class DiskShape:
    """How large a disk is, and what lies there.

    payload_bytes: of a chunk. chunks: that it has room for.
    is_packed:     chunks are compressed in every second life, and take several slots; a payload of some pages is
                   needed for that.
    is_recorded:   so that the power may go. shares: of it, by tenant.
    """

    payload_bytes: int
    chunks: int
    is_sealed: bool = False
    is_packed: bool = False
    is_recorded: bool = False
    shares: Shares = Shares()  # noqa: RUF009  (frozen)

    @property
    def frame_bytes(self) -> int:
        """Of a chunk that is not compressed."""
        return self.payload_bytes + HEADER_BYTES

    @property
    def slot_bytes(self) -> int:
        """Of the disk's slots."""
        return PAGE_BYTES if self.is_packed else self.frame_bytes

    @property
    def slots(self) -> int:
        """Of the disk."""
        return self.chunks * self.frame_bytes // self.slot_bytes


class SimulatedDisk:
    """A directory in `root`. A process is `begin`, then `open` as often as its tier wants; then `crash`, or no more.

    tier:   the newest that was opened. files: the process's calls. places: that are bad, whoever opens it.
    met:    calls of all lives that met one. lives, losses: processes, and power losses.
    """

    def __init__(self, root: Path, shape: DiskShape, clock: SimulatedClock, rng: random.Random) -> None:
        self.shape = shape
        self.lives = self.losses = 0
        self.places: list[BadPlace] = []
        self.met: Counter[str] = Counter()
        self.files = SlowFaultyFiles(clock, self.places)
        self.tier: DiskTier
        self._root = root
        self._clock = clock
        self._rng = rng

    @property
    def directory(self) -> Path:
        """Where it is now."""
        return self._root / f"disk-{self.losses}"

    def begin(self, arm: Callable[[BadPlaces], None] = lambda files: None) -> None:
        """A process starts. arm: called before its first system call."""
        self.lives += 1
        self.files = (
            MortalFiles(self._clock, self.directory, self.places)
            if self.shape.is_recorded
            else SlowFaultyFiles(self._clock, self.places)
        )
        self.files.met = self.met
        arm(self.files)

    def open(self, queues: InlineQueues, again: bool) -> DiskTier:
        """A tier of this process. again: it had one. Raises: DirectoryError."""
        shape = self.shape
        options = DiskOptions(
            self.directory,
            shape.chunks * shape.frame_bytes,
            threads=3,
            store_depth=4,
            allow_direct=False,
            is_new=not again,
            keys=FixedKeys(self._rng.getrandbits(60)) if shape.is_sealed else None,
            shares=shape.shares,
            packer=Packer("always" if shape.is_packed and self.lives % 2 else "never", 3, self._clock),
            slot_bytes=PAGE_BYTES if shape.is_packed else None,
            files=self.files,
            queue=queues.queue,
            step_bytes=2 * shape.frame_bytes,
        )
        self.tier = DiskTier(options, NAMESPACE, shape.payload_bytes, self._clock)
        return self.tier

    def chunks(self) -> set[ChunkKey]:
        """The chunks that the newest tier has, whole or not."""
        table = self.tier.directory.table
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
            raise ValueError("a power loss needs a recorded disk")
        image = power_loss(files.recording, len(files.recording.events), self._rng)
        position = self.directory / POSITION_FILE  # written beside the recorded calls: its bytes are synced
        said = position.read_bytes() if position.exists() else None
        self.losses += 1
        image.restore(self.directory)
        if said is not None and self._rng.random() < 0.8:
            (self.directory / POSITION_FILE).write_bytes(said)

    def damage(self) -> bool:
        """Change a few bytes of one place of the slab; whether there is one."""
        slab = self.directory / "slab"
        size = slab.stat().st_size if slab.exists() else 0
        if not size:
            return False
        with slab.open("r+b") as file:
            at = self._rng.randrange(size)
            file.seek(at)
            old = file.read(self._rng.randint(1, 64))
            file.seek(at)
            file.write(bytes(byte ^ self._rng.randint(1, 255) for byte in old))
        return True
