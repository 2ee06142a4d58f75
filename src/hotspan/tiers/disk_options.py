"""How a slab on disk works: what its owner chooses."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hotspan.tiers.base import FrameKeys
from hotspan.tiers.files import Files
from hotspan.tiers.io import IoQueue, IoThreads
from hotspan.tiers.pace import Pace
from hotspan.tiers.pins import Pins
from hotspan.tiers.shares import Shares

if TYPE_CHECKING:  # it needs zstandard, which the node daemon does without
    from hotspan.tiers.packer import Packer


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """How a slab on disk works.

    threads:     I/O threads; each has one I/O in flight.
    store_depth: chunks that may wait to be written; more are refused.
    is_new:      whether the directory may have to be made (tiers/directory.py).
    keys:        with keys, frames are encrypted, and plain ones are misses.
    step_bytes:  the slab grows by so much as it fills; None allocates all of it at the start.
    reserve_bytes: what a slab that grows leaves free on its file system (tiers/room.py); below it, it gives back.
    pace:        of loads.
    packer:      compresses and restores chunks. One that was compressed needs fewer slots than it was given: the rest
                 is free again when the store has ended.
    slot_bytes:  of a new directory, whole pages; None leaves it to the tier.
    files, queue: the system calls and the threads; tests put others in their place.
    """

    directory: Path
    bytes: int
    threads: int = 4
    store_depth: int = 32
    allow_direct: bool = True
    is_new: bool = True
    keys: FrameKeys | None = None
    shares: Shares = field(default_factory=Shares)
    step_bytes: int | None = None
    reserve_bytes: int = 0
    pins: Pins = field(default_factory=Pins)
    pace: Pace = field(default_factory=Pace)
    packer: "Packer | None" = None
    slot_bytes: int | None = None
    files: Files = field(default_factory=Files)
    queue: Callable[[str, int, int], IoQueue] = IoThreads
