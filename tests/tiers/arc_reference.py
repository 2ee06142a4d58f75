"""The policy of LeafArc once more, as plainly as can be: every question is answered by going through everything."""

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Held:
    """A chunk as the reference knows it."""

    parent: str | None
    tenant: int
    often: bool
    used: int


@dataclass
class Memory:
    """What the reference knows of a tenant besides its chunks; forgotten with the last of them."""

    target: float = 0.5
    once_ghosts: list[str] = field(default_factory=list)  # oldest first
    often_ghosts: list[str] = field(default_factory=list)


class ReferenceArc:
    """ARC over leaves with floors and quotas, in O(n) a step; chunks are names, in the order of use."""

    def __init__(self, capacity: int, floors: dict[int, float], quotas: dict[int, float], default_floor: float) -> None:
        self.capacity = capacity
        self.floors, self.quotas, self.default_floor = floors, quotas, default_floor
        self.chunks: dict[str, Held] = {}  # least recently used first
        self.memories: dict[int, Memory] = {}
        self.now = 0

    def held(self, tenant: int, often: bool | None = None) -> int:
        return sum(chunk.tenant == tenant and (often is None or often == chunk.often) for chunk in self.chunks.values())

    def may_add(self, tenant: int) -> bool:
        return self.held(tenant) < int(self.quotas.get(tenant, 1.0) * self.capacity)

    def floor(self, tenant: int) -> int:
        sharing = {chunk.tenant for chunk in self.chunks.values()} - self.floors.keys()
        equal = self.default_floor * (1 - sum(self.floors.values())) / max(1, len(sharing))
        return int(self.floors.get(tenant, equal) * self.capacity)

    def add(self, name: str, parent: str | None, tenant: int) -> None:
        memory = self.memories.setdefault(tenant, Memory())
        once, often, whole = len(memory.once_ghosts), len(memory.often_ghosts), max(1, self.held(tenant))
        came_back = name in memory.once_ghosts or name in memory.often_ghosts
        if name in memory.once_ghosts:
            memory.target = min(1, memory.target + max(1, often / once) / whole)
            memory.once_ghosts.remove(name)
        elif name in memory.often_ghosts:
            memory.target = max(0, memory.target - max(1, once / often) / whole)
            memory.often_ghosts.remove(name)
        self.now += 1
        self.chunks[name] = Held(parent, tenant, came_back, self.now)

    def touch(self, names: list[str]) -> None:
        for name in names:
            if name in self.chunks:
                chunk = self.chunks.pop(name)
                self.now += 1
                self.chunks[name] = Held(chunk.parent, chunk.tenant, True, self.now)

    def remove(self, name: str, evicted: bool) -> None:
        if name not in self.chunks:
            return
        chunk = self.chunks.pop(name)
        memory, room = self.memories[chunk.tenant], self.held(chunk.tenant) // 2
        if evicted:
            (memory.often_ghosts if chunk.often else memory.once_ghosts).append(name)
        for ghosts in (memory.once_ghosts, memory.often_ghosts):
            del ghosts[: max(0, len(ghosts) - room)]
        if not self.held(chunk.tenant):
            del self.memories[chunk.tenant]

    def victim(self, tenant: int, may_go: Callable[[str], bool]) -> str | None:
        """Whoever pays is asked for its first leaf; one that may not go counts no more, and who pays is asked anew."""
        parents = {chunk.parent for chunk in self.chunks.values()}
        leaves = [name for name in self.chunks if name not in parents]
        payers = [each for each in self.memories if self.held(each) > self.floor(each) and self.may_add(tenant)]
        for asked in (payers, [tenant]):
            while firsts := [first for each in asked if (first := self.first(each, leaves)) is not None]:
                name = leaves[min(firsts)[1]]
                if may_go(name):
                    return name
                leaves.remove(name)
        return None

    def first(self, tenant: int, leaves: list[str]) -> tuple[int, int] | None:
        """A tenant's leaf that goes first, as a place in `leaves`; after 0 if its `once` is too long, or it is idle."""
        if tenant not in self.memories:
            return None
        long = self.held(tenant, often=False) > self.memories[tenant].target * self.held(tenant)
        for often in (False, True) if long else (True, False):
            for place, name in enumerate(leaves):
                chunk = self.chunks[name]
                if chunk.tenant == tenant and chunk.often == often:
                    is_idle = chunk.used < self.now - 16 * self.capacity
                    return 0 if is_idle or (long and not often) else 1, place
        return None
