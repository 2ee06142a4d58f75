"""What one tenant holds of a tier, in ARC's lists, and who stands on whom."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from hotspan.core.types import ChunkKey

Leaf = tuple[int, ChunkKey]
"""When a leaf was used, and its key."""


class Leaves:
    """One of a tenant's lists: its leaves, a heap by the time of use, and its ghosts, the oldest first.

    chunks: in the list, leaves or not. Entries of the heap go stale, and are dropped when they come up.
    """

    __slots__ = ("_is_leaf", "chunks", "ghosts", "heap")

    def __init__(self, is_leaf: Callable[[Leaf], bool]) -> None:
        self.chunks = 0
        self.ghosts: OrderedDict[ChunkKey, None] = OrderedDict()
        self.heap: list[Leaf] = []
        self._is_leaf = is_leaf

    def push(self, leaf: Leaf) -> None:
        """A chunk of the list is a leaf, or was used as one."""
        heappush(self.heap, leaf)
        if len(self.heap) > 2 * self.chunks + 64:
            self.heap = list(filter(self._is_leaf, set(self.heap)))
            heapify(self.heap)

    def first(self) -> Leaf | None:
        """The least recently used leaf."""
        while self.heap:
            if self._is_leaf(self.heap[0]):
                return self.heap[0]
            heappop(self.heap)
        return None


@dataclass(slots=True, eq=False)
class Held:
    """What one tenant holds.

    target:     the part of its chunks that `once` should be.
    rank, used: where it stands among those who may have to pay (`LeafArc`); used 0: nowhere.
    """

    tenant: int
    once: Leaves
    often: Leaves
    target: float = 0.5
    rank: int = 1
    used: int = 0

    @property
    def chunks(self) -> int:
        return self.once.chunks + self.often.chunks

    @property
    def is_once_long(self) -> bool:
        """Whether `once` is longer than its target."""
        return self.once.chunks > self.target * self.chunks

    def first(self) -> tuple[Leaves, Leaf] | None:
        """The leaf that goes first, and its list: of the list that is too long, if it has one, else of the other."""
        for each in (self.once, self.often) if self.is_once_long else (self.often, self.once):
            leaf = each.first()
            if leaf is not None:
                return each, leaf
        return None

    def list_for(self, key: ChunkKey) -> Leaves:
        """Where a chunk goes that comes; one that comes back as a ghost moves the target."""
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
        """Remember, of each list, half as many chunks as the tenant holds."""
        for each in (self.once, self.often):
            while len(each.ghosts) > self.chunks // 2:
                each.ghosts.popitem(last=False)


class Children(dict[ChunkKey, ChunkKey | set[ChunkKey]]):
    """The children of each parent that has some, here or not: a child may come back first.

    Most parents have one, which stands there bare: a set for each would cost 25 MB per 100,000 chunks.
    """

    def put(self, parent: ChunkKey, key: ChunkKey) -> None:
        """A child came."""
        there = self.get(parent)
        if there is None:
            self[parent] = key
        elif isinstance(there, set):
            there.add(key)
        else:
            self[parent] = {there, key}

    def drop(self, parent: ChunkKey, key: ChunkKey) -> bool:
        """A child went; whether it was the last."""
        there = self[parent]
        if isinstance(there, set):
            there.remove(key)
            if there:
                return False
        del self[parent]
        return True

    def of(self, parent: ChunkKey) -> set[ChunkKey]:
        """The children of one parent."""
        there = self.get(parent)
        return there if isinstance(there, set) else set() if there is None else {there}
