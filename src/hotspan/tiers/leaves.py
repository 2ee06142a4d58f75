"""The chunks of each tenant in ARC's lists."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Protocol

from msgspec import Struct

from hotspan.core.types import ChunkKey
from hotspan.tiers.uses import Use

Leaf = tuple[int, ChunkKey]
"""When a leaf was used, and its key."""


class Ends(Protocol):
    """Leaves of which one is a victim, or is set aside."""

    def pop(self, leaf: Leaf) -> None: ...

    def push(self, leaf: Leaf) -> None: ...


class Node(Struct, eq=False, gc=False):
    """A chunk of `tenant`, in its list `often` or `once`.

    What only `LeafRetention` knows, of which `use` and `used` are behind for what other chunks stand on:

    use:      the last one. returned: whether it was used before that, also if it was evicted in between.
    sample:   the nearest chunk of the sample, itself or one that it stands on.
    line:     of a leaf, the one that it is in.
    """

    parent: ChunkKey | None
    tenant: int
    used: int
    is_often: bool = False
    size: int = 1
    use: Use | None = None
    returned: bool = False
    sample: ChunkKey | None = None
    line: "Line | None" = None


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
    is_moved:   its place may be another. front: the first leaf, as it was when the place was found.
    lines:      of `LeafRetention`, its leaves by kind. choice: the one that the next victims are of.
    """

    tenant: int
    once: Leaves
    often: Leaves
    target: float = 0.5
    rank: int = 1
    used: int = 0
    size: int = 0
    largest: int = 1
    is_moved: bool = False
    front: "tuple[Ends, Leaf] | None" = None
    lines: dict[int, "Line"] = field(default_factory=dict)
    choice: "Choice | None" = None

    @property
    def chunks(self) -> int:
        return self.once.chunks + self.often.chunks

    def list_of(self, is_often: bool) -> Leaves:
        """One of the two."""
        return self.often if is_often else self.once

    @property
    def is_once_long(self) -> bool:
        """Whether `once` is longer than its target."""
        once = self.once.chunks
        return once > self.target * (once + self.often.chunks)

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
        once, often = self.once, self.often
        most = (once.chunks + often.chunks) // 2
        while len(once.ghosts) > most:
            once.ghosts.popitem(last=False)
        while len(often.ghosts) > most:
            often.ghosts.popitem(last=False)


class Line:
    """Leaves of one kind of a tenant's, in the order of use; nothing in it is stale.

    A leaf is used later than all others of its line, or is older than all when what stood on it has gone. Where it is
    neither, it is among `_odd`, in the order of a heap.
    """

    __slots__ = ("_aside", "_line", "_newest", "_odd", "_odd_used")

    def __init__(self) -> None:
        self._line: OrderedDict[ChunkKey, int] = OrderedDict()  # to when they were used
        self._newest = 0  # no leaf of `_line` was used later
        self._odd_used: dict[ChunkKey, int] = {}
        self._odd = Leaves(self._is_odd)
        self._aside = 0

    def __len__(self) -> int:
        return len(self._line) + len(self._odd_used)

    def put(self, key: ChunkKey, used: int) -> None:
        """A leaf that is in no line."""
        line = self._line
        if used >= self._newest or not line or used >= line[next(reversed(line))]:
            line[key] = self._newest = used
        elif used <= line[next(iter(line))]:
            line[key] = used
            line.move_to_end(key, last=False)
        else:
            self._odd_used[key] = used
            self._odd.chunks = len(self._odd_used)
            self._odd.push((used, key))

    def discard(self, key: ChunkKey) -> None:
        """It is no leaf any more, or one of another kind."""
        if self._line.pop(key, None) is None and self._odd_used.pop(key, None) is not None:
            self._odd.chunks = len(self._odd_used)

    def first(self) -> Leaf | None:
        """The least recently used leaf."""
        line = self._line
        odd = self._odd.first() if self._odd_used else None
        for key in line:
            used = line[key]
            return odd if odd is not None and odd[0] < used else (used, key)
        return odd

    def last(self) -> Leaf | None:
        """The most recently used leaf, or one of the most recently used."""
        line = self._line
        if not line:
            return self.first()
        key = next(reversed(line))
        return line[key], key

    def pop(self, leaf: Leaf) -> None:
        """Take a leaf that `first` or `last` gave out, until it is pushed again."""
        self.discard(leaf[1])
        self._aside += 1

    def push(self, leaf: Leaf) -> None:
        """Give it back."""
        self._aside -= 1
        self.put(leaf[1], leaf[0])

    @property
    def is_empty(self) -> bool:
        """Whether it has no leaf, nor one that was taken out."""
        return not self._aside and not self._line and not self._odd_used

    def entries(self) -> list[Leaf]:
        """All leaves."""
        return [(used, key) for of in (self._line, self._odd_used) for key, used in of.items()]

    def _is_odd(self, leaf: Leaf) -> bool:
        return self._odd_used.get(leaf[1]) == leaf[0]


class Choice:
    """The line of which a tenant's next victims are, and from which end. left: how many.

    until: the first leaf is a victim as long as it was not used later. is_once_long: when this was chosen.
    """

    __slots__ = ("is_once_long", "is_young", "left", "line", "until")

    def __init__(
        self, line: Line, left: int, until: int, *, is_young: bool = False, is_once_long: bool = False
    ) -> None:
        self.line, self.left, self.until = line, left, until
        self.is_young, self.is_once_long = is_young, is_once_long

    def leaf(self) -> Leaf | None:
        """The next victim."""
        return self.line.last() if self.is_young else self.line.first()
