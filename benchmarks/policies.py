"""Eviction policies to hold the product's own against: each evicts leaves only, and forgets all else about prefixes.

They look like `hotspan.tiers.eviction.LeafArc` as far as a replay uses it, know no tenants, and are never serve.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from typing import Protocol

from hotspan.core.types import ChunkKey
from hotspan.simulate.caches import TierCache

NEVER = 1 << 60
"""When a chunk is used next that is not used again."""


class Policy(Protocol):
    """What decides which chunk goes."""

    def __len__(self) -> int: ...

    def __contains__(self, key: ChunkKey) -> bool: ...

    def add(self, key: ChunkKey, parent: ChunkKey | None, tenant: int = 0) -> None:
        """A chunk came."""

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        """A request found these chunks, leaf first; called once a request, also if it found none."""

    def remove(self, key: ChunkKey, *, evicted: bool = False) -> None:
        """A chunk went."""

    def victim(self, tenant: int, may_go: Callable[[ChunkKey], bool]) -> ChunkKey | None:
        """The chunk to evict for one of `tenant`."""

    def may_add(self, tenant: int) -> bool:
        """Whether one more of `tenant` may come without one of its own going."""


def replay_one(policy: Policy, capacity: int, chunks: Sequence[ChunkKey], tenant: int = 0) -> int:
    """One request at a tier of so many chunks: how many were there, before the others came."""
    tier = TierCache(capacity, policy)
    hits = tier.prefix(chunks, 0, len(chunks))
    tier.use(chunks, tenant=tenant)
    return hits


class _Leaves:
    """Chunks and who stands on them, with queues of leaves by rank, the lowest first; entries go stale.

    A subclass says which rank a chunk has: it goes in the order of the ranks.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._parents: dict[ChunkKey, ChunkKey | None] = {}
        self._children: dict[ChunkKey, int] = {}
        self._ranks: dict[ChunkKey, int] = {}
        self._queue: list[tuple[int, ChunkKey]] = []

    def __len__(self) -> int:
        return len(self._parents)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._parents

    def may_add(self, tenant: int) -> bool:
        return True

    def remove(self, key: ChunkKey, *, evicted: bool = False) -> None:
        parent = self._parents.pop(key)
        del self._ranks[key]
        if parent is not None:
            self._children[parent] -= 1
            if not self._children[parent]:
                del self._children[parent]
                self._offer(parent)

    def victim(self, tenant: int, may_go: Callable[[ChunkKey], bool]) -> ChunkKey | None:
        return self._first(self._queue, may_go)

    def _insert(self, key: ChunkKey, parent: ChunkKey | None, rank: int) -> None:
        self._parents[key] = parent
        if parent is not None:
            self._children[parent] = self._children.get(parent, 0) + 1
        self._rank(key, rank)

    def _rank(self, key: ChunkKey, rank: int) -> None:
        self._ranks[key] = rank
        if key not in self._children:
            self._offer(key)

    def _offer(self, key: ChunkKey) -> None:
        rank = self._ranks.get(key)
        if rank is not None:
            heappush(self._queue_of(key), (rank, key))

    def _queue_of(self, key: ChunkKey) -> list[tuple[int, ChunkKey]]:
        return self._queue

    def _first(self, queue: list[tuple[int, ChunkKey]], may_go: Callable[[ChunkKey], bool]) -> ChunkKey | None:
        """The leaf of the lowest rank in this queue that may go."""
        passed: list[tuple[int, ChunkKey]] = []
        found: ChunkKey | None = None
        while queue and found is None:
            rank, key = queue[0]
            if self._ranks.get(key) != rank or key in self._children or self._queue_of(key) is not queue:
                heappop(queue)
            elif may_go(key):
                found = key
            else:
                passed.append(heappop(queue))
        for entry in passed:
            heappush(queue, entry)
        return found


class LeafLru(_Leaves):
    """The least recently used leaf goes."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._now = 0

    def add(self, key: ChunkKey, parent: ChunkKey | None, tenant: int = 0) -> None:
        self._now += 1
        self._insert(key, parent, self._now)

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        for key in keys:
            self._now += 1
            self._rank(key, self._now)


class LeafPaperArc(_Leaves):
    """ARC as in the paper (Megiddo and Modha, FAST '03), but for leaves; `tiers/eviction.py` says what ours does else.

    T1 stands in `_queue`, T2 in `_often_queue`; `_target` is the paper's p.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._now = 0
        self._often_queue: list[tuple[int, ChunkKey]] = []
        self._often: set[ChunkKey] = set()
        self._ghosts: tuple[OrderedDict[ChunkKey, None], ...] = (OrderedDict(), OrderedDict())
        self._target = 0.0

    def add(self, key: ChunkKey, parent: ChunkKey | None, tenant: int = 0) -> None:
        once, often = self._ghosts
        if key in once:
            self._target = min(float(self._capacity), self._target + max(1.0, len(often) / len(once)))
            del once[key]
            self._often.add(key)
        elif key in often:
            self._target = max(0.0, self._target - max(1.0, len(once) / len(often)))
            del often[key]
            self._often.add(key)
        self._now += 1
        self._insert(key, parent, self._now)
        while once and len(self) - len(self._often) + len(once) > self._capacity:
            once.popitem(last=False)
        while often and len(self) + len(once) + len(often) > 2 * self._capacity:
            often.popitem(last=False)

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        for key in keys:
            self._often.add(key)
            self._now += 1
            self._rank(key, self._now)

    def remove(self, key: ChunkKey, *, evicted: bool = False) -> None:
        if evicted:
            self._ghosts[key in self._often][key] = None
        self._often.discard(key)
        super().remove(key, evicted=evicted)

    def victim(self, tenant: int, may_go: Callable[[ChunkKey], bool]) -> ChunkKey | None:
        is_long = len(self) - len(self._often) > self._target
        queues = (self._queue, self._often_queue) if is_long else (self._often_queue, self._queue)
        return self._first(queues[0], may_go) or self._first(queues[1], may_go)

    def _queue_of(self, key: ChunkKey) -> list[tuple[int, ChunkKey]]:
        return self._often_queue if key in self._often else self._queue


class LeafS3Fifo(_Leaves):
    """S3-FIFO (Yang and others, SOSP '23), taking the oldest leaf of a queue for its tail.

    A tenth of the chunks is on probation (`_queue`); what was used more than once there moves on to `_main`, the rest
    goes and leaves a ghost. In `_main` a chunk has as many further rounds as it was used, three at most.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._now = 0
        self._main: list[tuple[int, ChunkKey]] = []
        self._in_main: set[ChunkKey] = set()
        self._uses: dict[ChunkKey, int] = {}
        self._ghosts: OrderedDict[ChunkKey, None] = OrderedDict()

    def add(self, key: ChunkKey, parent: ChunkKey | None, tenant: int = 0) -> None:
        if key in self._ghosts:
            del self._ghosts[key]
            self._in_main.add(key)
        self._uses[key] = 0
        self._now += 1
        self._insert(key, parent, self._now)

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        for key in keys:
            self._uses[key] = min(3, self._uses[key] + 1)

    def remove(self, key: ChunkKey, *, evicted: bool = False) -> None:
        if evicted and key not in self._in_main:
            self._ghosts[key] = None
            if len(self._ghosts) > self._capacity * 9 // 10:
                self._ghosts.popitem(last=False)
        self._in_main.discard(key)
        del self._uses[key]
        super().remove(key, evicted=evicted)

    def victim(self, tenant: int, may_go: Callable[[ChunkKey], bool]) -> ChunkKey | None:
        probation = len(self) - len(self._in_main)
        queues = (self._queue, self._main) if probation * 10 >= self._capacity else (self._main, self._queue)
        return self._tail(queues[0], may_go) or self._tail(queues[1], may_go)

    def _tail(self, queue: list[tuple[int, ChunkKey]], may_go: Callable[[ChunkKey], bool]) -> ChunkKey | None:
        while (key := self._first(queue, may_go)) is not None:
            if queue is self._main and self._uses[key]:
                self._uses[key] -= 1
            elif queue is self._queue and self._uses[key] > 1:
                self._uses[key] = 0
                self._in_main.add(key)
            else:
                break
            self._now += 1
            self._rank(key, self._now)
        return key

    def _queue_of(self, key: ChunkKey) -> list[tuple[int, ChunkKey]]:
        return self._main if key in self._in_main else self._queue


class LeafBelady(_Leaves):
    """The leaf that is used again last goes, which takes knowing all requests: nothing can be better.

    An ancestor is used whenever its descendants are, so that a leaf is always among the chunks that are used last.
    """

    def __init__(self, capacity: int, requests: Iterable[Sequence[ChunkKey]]) -> None:
        super().__init__(capacity)
        self._now = -1
        self._uses: dict[ChunkKey, list[int]] = {}  # the last first
        for now, keys in enumerate(requests):
            for key in keys:
                self._uses.setdefault(key, []).append(now)
        for uses in self._uses.values():
            uses.reverse()

    def add(self, key: ChunkKey, parent: ChunkKey | None, tenant: int = 0) -> None:
        self._insert(key, parent, -self._next(key))

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        self._now += 1
        for key in keys:
            self._rank(key, -self._next(key))

    def _next(self, key: ChunkKey) -> int:
        uses = self._uses[key]
        while uses and uses[-1] <= self._now:
            uses.pop()
        return uses[-1] if uses else NEVER
