"""What a tier below RAM is: lookup, submit_store, submit_load, finished transfers, over slots of the RAM slab.

The shape is that of vLLM's secondary tiers. All calls come from one thread (the scheduler's) and return at once; the
bytes move on the tier's own threads. A tier never raises for I/O: a transfer ends as done or with its fault.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from hotspan.core.frame import FrameSealing
from hotspan.core.terms import Scope, Terms
from hotspan.core.types import Chunk, ChunkKey, Tier
from hotspan.tiers.compressing import Packing


class Fault(Enum):
    """Why a transfer did not do what was asked. A load's is a miss, a store's means the chunk is not in the tier.

    IO:      the medium failed. CORRUPT: the bytes are not the chunk's; it was quarantined.
    GONE:    expired, shredded or without a key. DROPPED: the tier was given up while the transfer was queued.
    FULL:    the medium has no space for it now.
    """

    IO = "io"
    CORRUPT = "corrupt"
    GONE = "gone"
    DROPPED = "dropped"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Transfer:
    """One finished transfer of one chunk.

    bytes:     of the chunk. seconds: on the I/O thread, without the wait in the queue.
    packing:   whether it was compressed; None in a tier that does not compress.
    ended_s:   when it ended there (monotonic), which may be long before it is reported; 0 if it never began.
    """

    key: ChunkKey
    is_load: bool
    fault: Fault | None
    bytes: int
    seconds: float
    packing: Packing | None = None
    ended_s: float = 0.0


@dataclass(slots=True)
class Losses:
    """Chunks that a tier gave up by itself since it was opened, each counted once.

    evicted: for room. expired: their time was over, or that of a chunk before them. quarantined: a check of all that is
    stored found them corrupt; what a load finds is the load's fault. What was invalidated or discarded is not here.
    """

    evicted: int = 0
    expired: int = 0
    quarantined: int = 0

    def add(self, more: "Losses") -> None:
        """Count these, too."""
        self.evicted += more.evicted
        self.expired += more.expired
        self.quarantined += more.quarantined

    def since(self, before: "Losses") -> "Losses":
        """What was added."""
        return Losses(
            self.evicted - before.evicted, self.expired - before.expired, self.quarantined - before.quarantined
        )


@dataclass(frozen=True, slots=True)
class TierUsage:
    """How full a tier is, in chunks and bytes; `tenants` says who holds how many chunks.

    is_up: False while it is given up and takes no part. pinned_chunks: what pins have kept from being evicted.
    counts_evictions: False if its medium evicts by itself, or never does.
    bad_slots: that were set aside (tiers/places.py), and `bad_bytes` of them; the capacity is without them.
    """

    chunks: int
    capacity_chunks: int
    bytes: int
    capacity_bytes: int
    tenants: dict[int, int]
    is_up: bool = True
    pinned_chunks: int = 0
    counts_evictions: bool = True
    bad_slots: int = 0
    bad_bytes: int = 0


class FrameKeys(Protocol):
    """Where a tier gets its keys when what it writes is encrypted. Calls return at once."""

    def sealing(self, tenant: int) -> FrameSealing | None:
        """What this process seals a tenant's frames with; None if it can't be had: the chunk is not written."""
        ...

    def opening(self, key_id: bytes, writer: bytes) -> AESGCM | None:
        """The key of a frame; None if it was shredded or can't be had: the load is a miss."""
        ...


Durable = Callable[[bool], None]
"""Called once, from any thread: whether an invalidation is on the medium for good."""


class AllDurable:
    """Calls `durable` once, when as many have called it: with True only if all of them said so. From any thread."""

    def __init__(self, count: int, durable: Durable) -> None:
        self._left = count
        self._is_durable = True
        self._durable = durable
        self._lock = threading.Lock()
        if not count:
            durable(True)

    def __call__(self, done: bool) -> None:
        with self._lock:
            self._left -= 1
            self._is_durable &= done
            if self._left:
                return
        self._durable(self._is_durable)


class StorageTier(Protocol):
    """A tier below RAM."""

    tier: Tier

    losses: Losses
    """What it gave up by itself; of a store that replicas share, what this process did."""

    @property
    def asking(self) -> int:
        """How many answers it waits for; 0 for a tier that knows what it has."""
        ...

    @property
    def answer_s(self) -> float:
        """How long an answer takes, as far as is known: a mean of late ones, or since when the oldest is awaited."""
        ...

    def ask(self, chunks: Sequence[Chunk], tenant: int) -> None:
        """Begin to find out which chunks of a tenant's text are here: all of it, a KV cache group after the other."""
        ...

    def is_asking(self, key: ChunkKey) -> bool:
        """Whether it waits to be told if this chunk is here."""
        ...

    def lookup(self, key: ChunkKey) -> bool:
        """Whether the chunk is known to be here and readable. Changes nothing."""
        ...

    def terms(self, key: ChunkKey) -> Terms:
        """The terms of a chunk that is here. Raises: KeyError if it is not."""
        ...

    def labelled(self, scope: Scope) -> list[Chunk]:
        """The chunks here that a scope takes, and all that they stand on; none in a tier without an index of labels."""
        ...

    def can_store(self) -> bool:
        """Whether its queue has room for a store; if not, ask again when transfers have ended."""
        ...

    def holds_back(self, key: ChunkKey, terms: Terms) -> bool:
        """Whether a store of this chunk has to wait for an invalidation that may take it to reach the log.

        If so, `released` reports it: there is no use in asking before.
        """
        ...

    def released(self) -> list[ChunkKey]:
        """Chunks that were held back, and may be stored now; some of them may be held back anew."""
        ...

    def submit_store(self, chunk: Chunk, terms: Terms, payload: memoryview) -> bool:
        """Start to write `payload` (uint8[n], page-aligned); False if the tier does not want it or can't take it now.

        A chunk whose parent is not here, or on its way, is not wanted: behind a gap no invalidation would reach it.
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

    def wait(self, timeout_s: float) -> bool:
        """Sleep until a transfer ends or an answer comes, at most `timeout_s`; returns at once if one is unreported.

        Whether one is.
        """
        ...

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        """These chunks were used, leaf first."""
        ...

    def join(self, key: ChunkKey, terms: Terms) -> None:
        """A request under `terms` hit the chunk: keep it on the joined terms. Nothing if it is not here."""
        ...

    def discard(self, key: ChunkKey) -> None:
        """Forget a chunk and what stands on it, whose owner did not ask for it: it may come back after a crash."""
        ...

    def invalidate(self, scopes: Sequence[Scope], durable: Durable) -> int:
        """Forget at once all that one of `scopes` takes, and what stands on it; returns how many chunks.

        However many scopes there are, they are one entry of the tier's log.
        `durable` is called when not even a crash can bring them back, or when that can't be had.
        """
        ...

    def rename(self, namespace: bytes, *, forget: bool) -> None:
        """Go on with the chunks of another namespace; what waits to be moved is dropped.

        From now on no chunk of the former one is found. forget: nobody will look for those again, so they may go.
        """
        ...

    def usage(self) -> TierUsage:
        """How full it is."""
        ...

    def give_up(self) -> None:
        """Begin no transfer that has not begun, and report it as dropped. The log goes on: receipts wait for it."""
        ...

    def close(self, timeout_s: float) -> None:
        """Finish what was submitted, at most `timeout_s`, and let go of all resources."""
        ...
