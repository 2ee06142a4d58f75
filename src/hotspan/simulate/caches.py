"""The caches of a simulated replica: which blocks of a prompt are there, and which go for others.

A block is its key, an int. Each cache holds whole prefixes: what a block stands on goes after it.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, cast

from hotspan.core.requests import ABORT, LENGTH, STOP, TOOL_CALLS, Request
from hotspan.core.types import ChunkKey
from hotspan.tiers.eviction import LeafArc
from hotspan.tiers.retention import Ending, LeafRetention


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

    def ended(self, request: Request) -> None:
        """A request that has used these blocks was answered."""


class Lru:
    """The blocks that were used last, the leaves of a prompt before what they stand on."""

    def __init__(self, capacity: int) -> None:
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
        for key in reversed(keys[: self._capacity]):
            if key in blocks:
                touch(key)
            else:
                blocks[key] = None
                came.append(key)
        for _ in range(len(blocks) - self._capacity):
            went.append(blocks.popitem(last=False)[0])
        came.reverse()
        return Change(came, went)

    def ended(self, request: Request) -> None: ...


class Pool:
    """vLLM's own: an Lru in which what a request has behind its whole blocks takes room, too, as the prompt's leaf.

    The engine's blocks are smaller than a trace's. Those that such a tail fills are kept, though nobody will ask for
    them; the rest of it only while the request runs.

    tokens: its size. block_tokens: of a trace's block. own_tokens: of the engine's.
    """

    def __init__(self, tokens: int, block_tokens: int, own_tokens: int) -> None:
        self._tokens = tokens
        self._block_tokens = block_tokens
        self._own_tokens = own_tokens
        self._running = 0  # blocks of the engine's that running requests have filled in part
        self._used = 0
        self._tails = 0
        self._blocks: OrderedDict[int | tuple[int], int] = OrderedDict()  # to tokens; a tail's key is a tuple

    def __len__(self) -> int:
        return sum(not isinstance(key, tuple) for key in self._blocks)

    def prefix(self, keys: Sequence[int], start: int, end: int) -> int:
        blocks = self._blocks
        for n in range(start, end):
            if keys[n] not in blocks:
                return n
        return end

    def begin(self, tail_tokens: int) -> None:
        """A request of such a tail begins to run: `use` comes next."""
        self._running += tail_tokens % self._own_tokens > 0
        if kept := tail_tokens // self._own_tokens * self._own_tokens:
            self._tails += 1
            self._put((self._tails,), kept)

    def end(self, tail_tokens: int) -> None:
        """It has ended."""
        self._running -= tail_tokens % self._own_tokens > 0

    def use(self, keys: Sequence[int], loaded: range | None = None) -> Change:
        came: list[int] = []
        went: list[int] = []
        room = max(0, self._tokens - self._running * self._own_tokens)
        for key in reversed(keys[: room // self._block_tokens]):
            if key in self._blocks:
                self._blocks.move_to_end(key)
            else:
                self._put(key, self._block_tokens)
                came.append(key)
        while self._used > room:
            gone, tokens = self._blocks.popitem(last=False)
            self._used -= tokens
            if not isinstance(gone, tuple):
                went.append(gone)
        came.reverse()
        return Change(came, went)

    def ended(self, request: Request) -> None: ...

    def _put(self, key: int | tuple[int], tokens: int) -> None:
        self._blocks[key] = tokens
        self._used += tokens


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

    def may_come(self, key: int, parent: int | None, victim: int) -> bool:
        """Whether a block behind `parent` is worth more than the one that goes for it."""
        return True

    def ended(self, request: Request) -> None: ...

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
                if victim is None or not self.may_come(keys[n], keys[n - 1] if n else None, victim):
                    break
                policy.remove(victim, evicted=True)
                went.append(victim)
            policy.add(keys[n], keys[n - 1] if n else None, tenant)
            came.append(keys[n])
        return Change(came, went)


class LearnedCache(TierCache):
    """A tier that learns from how requests end. What is not worth its room does not come if nothing is below it."""

    def __init__(self, capacity: int) -> None:
        self._retention = LeafRetention(capacity)
        super().__init__(capacity, self._retention)

    def may_come(self, key: int, parent: int | None, victim: int) -> bool:
        return self._retention.is_worth(*cast("tuple[ChunkKey, ChunkKey | None, ChunkKey]", (key, parent, victim)))

    def ended(self, request: Request) -> None:
        ending = ENDINGS.get(request.finish_reason, Ending.UNKNOWN)
        keys = cast("Sequence[ChunkKey]", request.keys)
        last = next((key for key in reversed(keys) if key in self._retention), None)
        if last is not None:
            self._retention.ended(last, ending, is_subagent=request.is_subagent)


ENDINGS = {TOOL_CALLS: Ending.TOOL_CALLS, STOP: Ending.STOP, LENGTH: Ending.LENGTH, ABORT: Ending.ABORT}

EVICTIONS = ("learned", "arc", "lru")


def make_cache(eviction: str, blocks: int) -> BlockCache:
    """A tier of so many blocks, with one of EVICTIONS."""
    if eviction == "learned":
        return LearnedCache(blocks)
    return TierCache(blocks, LeafArc(blocks)) if eviction == "arc" else Lru(blocks)
