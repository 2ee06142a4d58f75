"""Which chunk goes when a tier is full: the least recently used among the leaves.

A chunk is useless without its ancestors, so only a chunk that no other chunk here stands on may go, and a use counts
for all ancestors (leaf first, so that the root is the last to go).
"""

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hotspan.core.types import ChunkKey


@dataclass(slots=True)
class _Node:
    parent: ChunkKey | None
    used: int


class LeafLru:
    """Chunks of one tier in the order in which they would go."""

    def __init__(self) -> None:
        self._nodes: dict[ChunkKey, _Node] = {}
        self._children: dict[ChunkKey, int] = {}  # also of parents that are not here: a child may come back first
        self._heap: list[tuple[int, ChunkKey]] = []  # leaves; entries go stale, and are skipped when popped
        self._now = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._nodes

    def add(self, key: ChunkKey, parent: ChunkKey | None) -> None:
        """A chunk came, just used."""
        if key in self._nodes:
            raise ValueError("the chunk is here already")
        self._now += 1
        self._nodes[key] = _Node(parent, self._now)
        if parent is not None:
            self._children[parent] = self._children.get(parent, 0) + 1
        self._push(key)

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        """These chunks were used, in this order: give a chain leaf first."""
        for key in keys:
            node = self._nodes.get(key)
            if node is not None:
                self._now += 1
                node.used = self._now
                self._push(key)

    def remove(self, key: ChunkKey) -> None:
        """A chunk went, for whatever reason."""
        node = self._nodes.pop(key, None)
        if node is None or node.parent is None:
            return
        left = self._children[node.parent] - 1
        if left:
            self._children[node.parent] = left
        else:
            del self._children[node.parent]
            self._push(node.parent)

    def victim(self, may_go: Callable[[ChunkKey], bool]) -> ChunkKey | None:
        """The leaf to evict, or None if no leaf may go. Removes nothing.

        Costs O(log n), and one step more for each older leaf that may not go.
        """
        kept: list[tuple[int, ChunkKey]] = []
        found: ChunkKey | None = None
        while self._heap:
            used, key = self._heap[0]
            if not self._is_leaf_since(used, key):
                heapq.heappop(self._heap)
                continue
            if may_go(key):
                found = key
                break
            kept.append(heapq.heappop(self._heap))
        for entry in kept:
            heapq.heappush(self._heap, entry)
        return found

    def check(self) -> None:
        """Raise AssertionError if the books do not agree."""
        children: dict[ChunkKey, int] = {}
        for node in self._nodes.values():
            if node.parent is not None:
                children[node.parent] = children.get(node.parent, 0) + 1
        if children != self._children:
            raise AssertionError("children are miscounted")
        queued = set(self._heap)
        for key, node in self._nodes.items():
            if key not in self._children and (node.used, key) not in queued:
                raise AssertionError("a leaf is not up for eviction")

    def _is_leaf_since(self, used: int, key: ChunkKey) -> bool:
        node = self._nodes.get(key)
        return node is not None and node.used == used and key not in self._children

    def _push(self, key: ChunkKey) -> None:
        node = self._nodes.get(key)
        if node is None or key in self._children:
            return
        heapq.heappush(self._heap, (node.used, key))
        if len(self._heap) > 2 * len(self._nodes) + 64:
            self._heap = [(n.used, k) for k, n in self._nodes.items() if k not in self._children]
            heapq.heapify(self._heap)
