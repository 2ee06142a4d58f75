"""The chunks of each tenant in ARC's lists."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush

from hotspan.core.types import ChunkKey

Leaf = tuple[int, ChunkKey]
"""When a leaf was used, and its key."""


class Leaves:
    """The leaves of one of a tenant's lists, least recently used first, and the list's ghosts, oldest first.

    chunks: number of chunks in the list, leaves or not.

    `heap` holds (time of use, key). Entries go stale when the chunk is used again, gets a child or goes; they are
    dropped when they reach the top. Once a third of the heap is stale, its leaves move to a new one, a few per push:
    with a million chunks, doing it at once would stop the engine for a second. Both together stay below two entries a
    chunk.
    """

    __slots__ = ("_is_leaf", "_moved", "_old", "chunks", "ghosts", "heap")

    def __init__(self, is_leaf: Callable[[Leaf], bool]) -> None:
        self.chunks = 0
        self.ghosts: OrderedDict[ChunkKey, None] = OrderedDict()
        self.heap: list[Leaf] = []
        self._old: list[Leaf] = []
        self._moved: set[Leaf] = set()
        self._is_leaf = is_leaf

    def push(self, leaf: Leaf, parent: ChunkKey | None = None) -> None:
        """A chunk of the list is a leaf, or was used as one. parent: no leaf from now on."""
        if parent is not None and self.heap and self.heap[-1][1] == parent:
            self.heap[-1] = leaf  # it is later than all others, so the heap stays one; a chain leaves one entry
        else:
            heappush(self.heap, leaf)
        if self._old or self._moved:
            self._move()
        elif len(self.heap) > 3 * self.chunks // 2 + 32:
            self._old, self.heap = self.heap, []

    def first(self) -> Leaf | None:
        """The least recently used leaf."""
        heap = self._first_heap()
        return heap[0] if heap else None

    def pop(self) -> None:
        """Take the least recently used leaf out, until it is pushed again."""
        heappop(self._first_heap())

    def entries(self) -> list[Leaf]:
        """All entries, stale ones among them."""
        return self.heap + self._old

    def _first_heap(self) -> list[Leaf]:
        """The heap whose top is the least recently used leaf; an empty one if there is no leaf."""
        for heap in (self.heap, self._old) if self._old else (self.heap,):
            while heap and not self._is_leaf(heap[0]):
                heappop(heap)
        return self._old if self._old and (not self.heap or self._old[0] < self.heap[0]) else self.heap

    def _move(self) -> None:
        """Move some leaves of the old heap, each once; then forget which were moved."""
        count = 4 + len(self._old) // (self.chunks + 64)
        for _ in range(min(count, len(self._old))):
            leaf = self._old.pop()  # from the end, so that the rest stays a heap
            if leaf not in self._moved and self._is_leaf(leaf):
                self._moved.add(leaf)
                heappush(self.heap, leaf)
        if not self._old:
            for _ in range(min(count, len(self._moved))):
                self._moved.pop()


@dataclass(slots=True, eq=False)
class Held:
    """The chunks of one tenant.

    target:     the share of its chunks that `once` should have.
    rank, used: its place in the order in which tenants give up chunks (`LeafArc`); used is 0 if it has none.
    size:       of its chunks together, in the unit of the tier's capacity. largest: of one, of all that it ever held.
    """

    tenant: int
    once: Leaves
    often: Leaves
    target: float = 0.5
    rank: int = 1
    used: int = 0
    size: int = 0
    largest: int = 1

    @property
    def chunks(self) -> int:
        return self.once.chunks + self.often.chunks

    def list_of(self, is_often: bool) -> Leaves:
        """One of the two."""
        return self.often if is_often else self.once

    @property
    def is_once_long(self) -> bool:
        """Whether `once` is longer than its target."""
        return self.once.chunks > self.target * self.chunks

    def first(self) -> tuple[Leaves, Leaf] | None:
        """The leaf to evict first, and its list: the list that exceeds its target, or the other if that has no leaf."""
        for each in (self.once, self.often) if self.is_once_long else (self.often, self.once):
            leaf = each.first()
            if leaf is not None:
                return each, leaf
        return None

    def list_for(self, key: ChunkKey) -> Leaves:
        """The list for a new chunk. If the chunk is a ghost, the target moves towards the ghost's list."""
        once, often, whole = self.once.ghosts, self.often.ghosts, max(1, self.chunks)
        if key in once:
            self.target = min(1.0, self.target + max(1.0, len(often) / len(once)) / whole)
            del once[key]
        elif key in often:
            self.target = max(0.0, self.target - max(1.0, len(once) / len(often)) / whole)
            del often[key]
        else:
            return self.once
        return self.often

    def forget_ghosts(self) -> None:
        """Drop the oldest ghosts: each list has at most half as many as the tenant has chunks."""
        for each in (self.once, self.often):
            while len(each.ghosts) > self.chunks // 2:
                each.ghosts.popitem(last=False)
