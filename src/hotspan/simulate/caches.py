"""The caches of a simulated replica: which blocks of a prompt are there, and which go for others.

A block is its key, an int. Each cache holds whole prefixes: what a block stands on goes after it.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from hotspan.tiers.eviction import LeafArc


class Change(NamedTuple):
    """What one use of a cache did: blocks that came, root first, and blocks that went."""

    came: Sequence[int]
    went: Sequence[int]


class BlockCache(Protocol):
    """A tier of so many blocks."""

    def __len__(self) -> int: ...

    def prefix(self, keys: Sequence[int], start: int, end: int) -> int:
        """The first of the places [start, end) in a prompt whose block is not here; `end` if all are."""

    def use(self, keys: Sequence[int], loaded: range | None = None) -> Change:
        """A prompt of these blocks was served: all are here now as far as they fit.

        loaded: the places of those that a tier was asked for; None: of all that it has. What the GPU had is no use of
                the tiers' chunks, as in the engine.
        """


class Lru:
    """The blocks that were used last, the leaves of a prompt before what they stand on: as vLLM's pool does it.

    reserved: so many hold what is no whole block of a prompt, of requests that run. vLLM uses these again first.
    """

    def __init__(self, capacity: int) -> None:
        self.reserved = 0
        self._capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def prefix(self, keys: Sequence[int], start: int, end: int) -> int:
        blocks = self._blocks
        for n in range(start, end):
            if keys[n] not in blocks:
                return n
        return end

    def use(self, keys: Sequence[int], loaded: range | None = None) -> Change:
        blocks, came, went = self._blocks, [], []
        touch = blocks.move_to_end
        capacity = max(0, self._capacity - self.reserved)
        for key in reversed(keys[:capacity]):
            if key in blocks:
                touch(key)
            else:
                blocks[key] = None
                came.append(key)
        for _ in range(len(blocks) - capacity):
            went.append(blocks.popitem(last=False)[0])
        came.reverse()
        return Change(came, went)


class TierCache:
    """What a tier does with an eviction policy, over blocks instead of chunks.

    policy: such as LeafArc. It never looks into a key, so that ints do.
    """

    def __init__(self, capacity: int, policy: Any) -> None:
        self._capacity = capacity
        self._policy = policy

    def __len__(self) -> int:
        return len(self._policy)

    def prefix(self, keys: Sequence[int], start: int, end: int) -> int:
        return next((n for n in range(start, end) if keys[n] not in self._policy), end)

    def use(self, keys: Sequence[int], loaded: range | None = None, tenant: int = 0) -> Change:
        """As above. What is missing comes in order, until there is no victim: these blocks never evict each other."""
        policy = self._policy
        came: list[int] = []
        went: list[int] = []
        used = range(self.prefix(keys, 0, len(keys))) if loaded is None else loaded
        policy.touch(keys[n] for n in reversed(used))
        own = set(keys)
        for n in range(len(keys)):
            if keys[n] in policy:
                continue
            if len(policy) >= self._capacity or not policy.may_add(tenant):
                victim = policy.victim(tenant, lambda key: key not in own)
                if victim is None:
                    break
                policy.remove(victim, evicted=True)
                went.append(victim)
            policy.add(keys[n], keys[n - 1] if n else None, tenant)
            came.append(keys[n])
        return Change(came, went)


EVICTIONS = ("arc", "lru")


def make_cache(eviction: str, blocks: int) -> BlockCache:
    """A tier of so many blocks, with one of EVICTIONS."""
    return TierCache(blocks, LeafArc(blocks)) if eviction == "arc" else Lru(blocks)
