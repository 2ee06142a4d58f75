"""What a tier below RAM is: lookup, submit_store, submit_load, finished transfers, over slots of the RAM slab.

The shape is that of vLLM's secondary tiers. All calls come from one thread (the scheduler's) and return at once; the
bytes move on the tier's own threads. A tier never raises for I/O: a transfer ends as done or with its fault.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from hotspan.core.types import Chunk, ChunkKey, Tier


class Fault(Enum):
    """Why a transfer did not do what was asked. A load's is a miss, a store's means the chunk is not in the tier."""

    IO = "io"
    CORRUPT = "corrupt"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Transfer:
    """One finished transfer of one chunk.

    bytes:     payload moved. seconds: on the I/O thread, without the wait in the queue.
    """

    key: ChunkKey
    is_load: bool
    fault: Fault | None
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class TierUsage:
    """How full a tier is, in chunks and bytes."""

    chunks: int
    capacity_chunks: int
    bytes: int
    capacity_bytes: int


class StorageTier(Protocol):
    """A tier below RAM."""

    tier: Tier

    def lookup(self, key: ChunkKey) -> bool:
        """Whether the chunk is here and readable. Changes nothing."""
        ...

    def can_store(self) -> bool:
        """Whether its queue has room for a store; if not, ask again when transfers have ended."""
        ...

    def submit_store(self, chunk: Chunk, payload: memoryview) -> bool:
        """Start to write `payload` (uint8[n], page-aligned); False if the tier does not want it or can't take it now.

        The caller keeps the bytes unchanged until the transfer is reported.
        """
        ...

    def submit_load(self, key: ChunkKey, into: memoryview) -> bool:
        """Start to read a chunk into `into` (uint8[n], page-aligned, n as stored); False if it is not here.

        The contents of `into` are undefined until the transfer is reported without a fault.
        """
        ...

    def finished(self) -> list[Transfer]:
        """Transfers that ended since the last call."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Sleep until a transfer ends, at most `timeout_s`; returns at once if one is unreported."""
        ...

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        """These chunks were used, leaf first."""
        ...

    def discard(self, key: ChunkKey) -> None:
        """Forget one chunk."""
        ...

    def clear(self) -> int:
        """Forget all chunks; returns how many."""
        ...

    def usage(self) -> TierUsage:
        """How full it is."""
        ...

    def close(self, timeout_s: float) -> None:
        """Finish what was submitted, at most `timeout_s`, and let go of all resources."""
        ...
