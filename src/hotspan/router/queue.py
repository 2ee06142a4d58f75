"""Which request is served next when every replica is full: tenants in turn, by the tokens that they have used.

    tenant a  [500][500][500] ...        start-time fair queueing: a request starts at max(now, when its tenant's last
    tenant b  [20]                       one is through), the earliest start is served, its tokens move its tenant on

A tenant with few requests waits for about one request of another tenant, however many that one has waiting.
"""

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

_LEAST_TENANTS = 1024
"""Tenants whose use is remembered, besides twice as many as wait."""

Where = frozenset[str]
"""Replicas, by name, that a request may go to."""


@dataclass(eq=False, slots=True)
class Waiting(Generic[T]):
    """A request in the queue. where: None is anywhere. cost: in tokens, estimated."""

    item: T
    tenant: str
    where: Where | None
    cost: float
    is_gone: bool = False


@dataclass(eq=False, slots=True)
class _Lane(Generic[T]):
    """One tenant's requests that may go to the same replicas, in the order in which they came."""

    tenant: str
    where: Where | None
    queue: deque[Waiting[T]] = field(default_factory=deque)


class FairQueue(Generic[T]):
    """A bounded queue with fair shares by tenant. Not thread-safe.

    refused: requests turned away because it was full.
    """

    def __init__(self, max_length: int) -> None:
        self._max_length = max_length
        self._lanes: dict[tuple[str, Where | None], _Lane[T]] = {}
        self._heads: list[tuple[float, int, _Lane[T]]] = []
        self._counts: dict[str, int] = {}
        self._through: dict[str, float] = {}  # tenant -> when its last request is through
        self._now = 0.0
        self._number = 0
        self._length = 0
        self.refused = 0

    def __len__(self) -> int:
        return self._length

    @property
    def tenants(self) -> int:
        """How many tenants have requests here."""
        return len(self._counts)

    def push(self, entry: Waiting[T], *, is_first: bool = False) -> Waiting[T] | None:
        """Let one wait; the one that has to leave for it, which may be itself. None if there is room.

        is_first: before the others of its tenant, and without paying again: it has been served, and came back.
        """
        leaving = self._to_leave(entry.tenant) if self._length >= self._max_length else None
        if self._length >= self._max_length:
            self.refused += 1
            if leaving is None:
                return entry
            self.remove(leaving)
        if is_first:
            entry.cost = 0.0
        lane = self._lanes.get((entry.tenant, entry.where))
        if lane is None:
            lane = self._lanes[entry.tenant, entry.where] = _Lane(entry.tenant, entry.where)
            self._stand(lane, self._now if is_first else max(self._now, self._through.get(entry.tenant, 0.0)))
        if is_first:
            lane.queue.appendleft(entry)
        else:
            lane.queue.append(entry)
        self._counts[entry.tenant] = self._counts.get(entry.tenant, 0) + 1
        self._length += 1
        return leaving

    def pop(self, room: set[str], up: set[str]) -> Waiting[T] | None:
        """The next one that can go to a replica with room; None if nobody can.

        Also those that can go nowhere, since none of their replicas is up: they need not wait for that.
        """
        aside = []
        found = None
        while self._heads and found is None:
            start, number, lane = heapq.heappop(self._heads)
            while lane.queue and lane.queue[0].is_gone:
                lane.queue.popleft()
            if not lane.queue:
                del self._lanes[lane.tenant, lane.where]
            elif lane.queue[0].cost and self._through.get(lane.tenant, 0.0) > start:  # served from another lane
                self._stand(lane, self._through[lane.tenant])
            elif _can_serve(lane.where, room, up):
                found = self._take(lane, start)
            else:
                aside.append((start, number, lane))
        for head in aside:
            heapq.heappush(self._heads, head)
        return found

    def remove(self, entry: Waiting[T]) -> None:
        """One that does not wait any more; nothing if it has left."""
        if not entry.is_gone:
            entry.is_gone = True
            self._left(entry.tenant)

    def check(self) -> None:
        """Raise RuntimeError if the books don't balance."""
        waiting = [entry for lane in self._lanes.values() for entry in lane.queue if not entry.is_gone]
        standing = [id(lane) for _, _, lane in self._heads]
        if (
            len(waiting) != self._length
            or sum(self._counts.values()) != self._length
            or self._length > self._max_length
        ):
            raise RuntimeError(f"{len(waiting)} wait, {self._length} are counted, {self._counts} by tenant")
        if sorted(standing) != sorted(id(lane) for lane in self._lanes.values()):
            raise RuntimeError("a lane stands in line twice, or not at all")

    # -- inside --------------------------------------------------------------------------------------------------------

    def _take(self, lane: _Lane[T], start: float) -> Waiting[T]:
        entry = lane.queue.popleft()
        entry.is_gone = True
        self._now = max(self._now, start)
        through = max(start, self._through.get(lane.tenant, 0.0)) if entry.cost == 0.0 else start + entry.cost
        self._through[lane.tenant] = through
        self._left(lane.tenant)
        if lane.queue:
            self._stand(lane, max(self._now, through))
        else:
            del self._lanes[lane.tenant, lane.where]
        if not self._length:
            self._through.clear()
        elif len(self._through) > _LEAST_TENANTS + 2 * len(self._counts):
            # Whoever is forgotten starts now when it comes again: not before it is through.
            ends = sorted(self._through.values())
            self._now = max(self._now, ends[len(ends) // 2])
            self._through = {tenant: at for tenant, at in self._through.items() if at > self._now}
        return entry

    def _stand(self, lane: _Lane[T], start: float) -> None:
        self._number += 1
        heapq.heappush(self._heads, (start, self._number, lane))

    def _left(self, tenant: str) -> None:
        self._length -= 1
        self._counts[tenant] -= 1
        if not self._counts[tenant]:
            del self._counts[tenant]

    def _to_leave(self, tenant: str) -> Waiting[T] | None:
        """The newest of whoever has most here, if that is clearly more than the newcomer has."""
        longest = max(self._counts, key=self._counts.__getitem__, default=tenant)
        if self._counts.get(longest, 0) <= self._counts.get(tenant, 0) + 1:
            return None
        for lane in self._lanes.values():
            if lane.tenant == longest:
                for entry in reversed(lane.queue):
                    if not entry.is_gone:
                        return entry
        return None


def _can_serve(where: Where | None, room: set[str], up: set[str]) -> bool:
    if where is None:
        return bool(room) or not up
    return not where.isdisjoint(room) or where.isdisjoint(up)
