"""The chunks of each tenant in ARC's lists."""

from bisect import insort
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush

from msgspec import Struct

from hotspan.core.types import ChunkKey
from hotspan.tiers.uses import Use

Leaf = tuple[int, ChunkKey]
"""When a leaf was used, and its key."""


class Node(Struct, eq=False, gc=False):
    """A chunk of `tenant`, in its list `often` or `once`.

    use, returned, sample: as far as `LeafRetention` knows them: the last use; whether it was used before that, also if
                           it was evicted in between; the nearest chunk of the sample, itself or one that it stands on.
    """

    parent: ChunkKey | None
    tenant: int
    used: int
    is_often: bool = False
    size: int = 1
    use: Use | None = None
    returned: bool = False
    sample: ChunkKey | None = None


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

    def pop(self, leaf: Leaf) -> None:
        """Take the leaf that `first` gave out, until it is pushed again."""
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


class BothEnds(Leaves):
    """Leaves of which the youngest can be asked for, too. `chunks` is the number of leaves, as it was found last.

    `_young` has leaves in the order of use. One that is older than the last of it when it is pushed is not added: it is
    found at the other end. `_aside` has those that were taken out, with `True` if `_young` lacks one, `False` if the
    heap does.
    """

    __slots__ = ("_aside", "_is_leaf_at_all", "_young")

    def __init__(self, is_leaf: Callable[[Leaf], bool]) -> None:
        super().__init__(self._is_leaf_here)
        self._is_leaf_at_all = is_leaf
        self._young: list[Leaf] = []
        self._aside: dict[Leaf, set[bool]] = {}

    def push(self, leaf: Leaf, parent: ChunkKey | None = None) -> None:
        lacks = self._aside.pop(leaf, None)
        if lacks is None or False in lacks:
            self._push_old(leaf, parent)
        young = self._young
        if lacks is not None:
            if True in lacks:
                insort(young, leaf)
        elif parent is not None and young and young[-1][1] == parent:
            young[-1] = leaf
        elif self.last() is None or young[-1] < leaf:
            young.append(leaf)
            if len(young) > 2 * len(self.heap) + 64:
                del young[: len(young) // 2]

    def last(self) -> Leaf | None:
        """The most recently used leaf, or one of the most recently used."""
        young = self._young
        while young and not self._is_leaf_here(young[-1], in_young=True):
            young.pop()
        return young[-1] if young else None

    def pop(self, leaf: Leaf) -> None:
        """Take a leaf that `first` or `last` gave out, until it is pushed again."""
        lacks = set[bool]()
        heap = self._first_heap()
        if heap and heap[0] == leaf:
            heappop(heap)
            lacks.add(False)
        if self._young and self._young[-1] == leaf:
            self._young.pop()
            lacks.add(True)
        self._aside[leaf] = lacks

    @property
    def is_empty(self) -> bool:
        """Whether it has no leaf, nor one that was taken out."""
        return not self._aside and self.first() is None

    def _push_old(self, leaf: Leaf, parent: ChunkKey | None) -> None:
        was_moving = bool(self._old or self._moved)
        super().push(leaf, parent)
        if was_moving and not (self._old or self._moved):
            self.chunks = len(self.heap)

    def _is_leaf_here(self, leaf: Leaf, *, in_young: bool = False) -> bool:
        """Whether it is one and not set aside; it is dropped otherwise, and noted if it is set aside."""
        if not self._is_leaf_at_all(leaf):
            return False
        lacks = self._aside.get(leaf)
        if lacks is None:
            return True
        lacks.add(in_young)
        return False
