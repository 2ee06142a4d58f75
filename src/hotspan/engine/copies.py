"""Which copy between the engine's blocks and the slab is next: loads before stores, and no one starves.

Loads are copied as they came, but a shorter one may go before a longer one: a load of one chunk is not held up by one
of a hundred. A load lets later ones go first for at most as many blocks as it has itself, so that it ends at most that
much later than in order of arrival, however many short ones come. Measured: benchmarks/results/load-wait.json.
"""

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import inf
from typing import Final, NamedTuple

from vllm.v1.kv_offload.base import GPULoadStoreSpec
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

LOADS_PER_STORE: Final = 8
"""Pieces of loads for each of a store, while both wait: a store's blocks are held until it ends."""


class Place(NamedTuple):
    """A block of a KV cache group, and where it goes or comes from: the `nth` of a slot."""

    group: int
    block: int
    slot: int
    nth: int


def places(in_engine: GPULoadStoreSpec, in_slab: CPULoadStoreSpec, blocks_per_chunk: int) -> Iterator[Place]:
    """The blocks of a job, each with its place in a slot.

    Blocks come group by group; a group's first block may stand in the middle of its first chunk.

        blocks_per_chunk 2, block_indices 3, blocks a b c: [ . a ][ b c ]
    """
    blocks, slots = in_engine.block_ids.tolist(), in_slab.block_ids.tolist()
    block_at = slot_at = 0
    for group, size in enumerate(in_engine.group_sizes):
        if not size:
            continue
        skipped = in_engine.block_indices[group] % blocks_per_chunk
        for n in range(size):
            place = skipped + n
            slot = slots[slot_at + place // blocks_per_chunk]
            yield Place(group, blocks[block_at + n], slot, place % blocks_per_chunk)
        block_at += size
        slot_at += -(-(skipped + size) // blocks_per_chunk)


@dataclass(slots=True, eq=False)
class Copy:
    """A job of the engine's: blocks to copy, in order.

    done:      how many were handed out.
    overtaken: how many of later loads were copied before its own.
    """

    job_id: int
    is_store: bool
    places: list[Place]
    done: int = 0
    overtaken: int = 0
    moved_bytes: int = 0
    seconds: float = 0.0

    @property
    def left(self) -> int:
        """Blocks that are still to be copied."""
        return len(self.places) - self.done


class CopyQueue:
    """The jobs that wait, or are copied in part. One thread at a time.

    piece: blocks that are copied before the choice is made anew.
    """

    def __init__(self, piece: int) -> None:
        self.piece = piece
        self._loads: dict[int, Copy] = {}
        self._stores: dict[int, Copy] = {}
        self._awaited: deque[int] = deque()
        self._since_store = 0

    def __len__(self) -> int:
        return len(self._loads) + len(self._stores)

    def add(self, copy: Copy) -> None:
        """A job comes."""
        (self._stores if copy.is_store else self._loads)[copy.job_id] = copy

    def hurry(self, job_ids: Collection[int]) -> None:
        """The engine's step waits for these: they go before all others."""
        self._awaited.extend(sorted(job_ids))

    def take(self) -> tuple[Copy, list[Place]] | None:
        """The next piece: its job, and the blocks to copy. `put_back` comes before the next call."""
        copy = self._next()
        if copy is None:
            return None
        places = copy.places[copy.done : copy.done + self.piece]
        copy.done += len(places)
        self._since_store = 0 if copy.is_store else self._since_store + 1
        if not copy.is_store:
            for earlier in self._loads.values():
                if earlier is copy:
                    break
                earlier.overtaken += len(places)
        return copy, places

    def put_back(self, copy: Copy, *, has_failed: bool = False) -> bool:
        """A piece was copied, or failed; whether that was the end of its job."""
        has_ended = has_failed or not copy.left
        if has_ended:
            del (self._stores if copy.is_store else self._loads)[copy.job_id]
        return has_ended

    def _next(self) -> Copy | None:
        while self._awaited:
            copy = self._loads.get(self._awaited[0]) or self._stores.get(self._awaited[0])
            if copy is not None:
                return copy
            self._awaited.popleft()  # it has ended
        if self._stores and (not self._loads or self._since_store >= LOADS_PER_STORE):
            return next(iter(self._stores.values()))
        return self._load()

    def _load(self) -> Copy | None:
        """The shortest of those that everyone before them lets go first."""
        chosen, patience = None, inf
        for copy in self._loads.values():  # in order of arrival
            if chosen is None or (copy.left < chosen.left and copy.left <= patience):
                chosen = copy
            patience = min(patience, len(copy.places) - copy.overtaken)
            if not patience:
                break
        return chosen
