"""Which chunk goes when a tier is full: the leaf that is worth least, as learned from how texts are used again.

Among tenants all is as in `LeafArc`: floors, quotas, and who pays. Within a tenant, leaves are in lists by the kind of
their last use (tiers/uses.py), each in the order of use. Of each list the oldest and the youngest leaf are compared,
and the one of the least value goes; the youngest only if it is worth clearly less than the oldest. That is so where
texts return after a fixed time, such as documents that are asked in turn.

A use is a request's: what it touches and adds behind that has the same one, so that the end of a request, of which
`ended` is told, changes the kind of all its chunks at once.
"""

from collections.abc import Iterable
from typing import Final, NamedTuple

from hotspan.core.types import ChunkKey
from hotspan.tiers.eviction import LeafArc, Node
from hotspan.tiers.leaves import BothEnds, Held, Leaf, Leaves
from hotspan.tiers.shares import Share, Shares
from hotspan.tiers.uses import Ending, Use, Uses

__all__ = ["Ending", "LeafRetention", "Share", "Shares"]

_YOUNGER: Final = 0.8
"""The youngest leaf of a list goes if it is worth less than this part of the oldest."""

_REFUSED: Final = 2.0
"""A chunk is not worth its room if what would go for it is worth more than this many times as much."""

_CHOICES: Final = 16
"""So many victims at most are of one list before all lists are compared again."""


class _Choice:
    """The list of which a tenant's next victims are, and from which end. left: how many."""

    __slots__ = ("is_young", "leaves", "left")

    def __init__(self, leaves: BothEnds, *, is_young: bool) -> None:
        self.leaves, self.is_young, self.left = leaves, is_young, _CHOICES


class _Candidate(NamedTuple):
    value: float
    used: int
    leaves: BothEnds
    is_young: bool


class LeafRetention(LeafArc):
    """Chunks of one tier in the order of what they are worth.

    Costs as `LeafArc`, and O(kinds that are here) for one in `_CHOICES` victims.
    """

    def __init__(self, capacity: int, shares: Shares | None = None) -> None:
        super().__init__(capacity, shares)
        self.uses = Uses(capacity)
        self._kinds: dict[int, dict[int, BothEnds]] = {}  # by tenant, then by kind
        self._choices: dict[int, _Choice] = {}
        self._use: Use | None = None  # while a text is touched

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        """These chunks were used again, in this order: give a chain leaf first, in one call a request."""
        those = [key for key in keys if key in self._nodes]
        if not those:
            return
        last = self._nodes[those[0]]
        before = last.use or Use()
        rhythm = self.uses.rhythm(before, self._now - last.used)
        self._use = Use(before.ending, rhythm, before.is_subagent)
        self.uses.began()
        super().touch(those)
        self._use = None

    def ended(self, key: ChunkKey, ending: Ending, *, is_subagent: bool = False) -> None:
        """The request that used this chunk last, and nothing behind it, has ended."""
        node = self._nodes.get(key)
        if node is None or node.use is None:
            return
        node.use.ending, node.use.is_subagent = int(ending), is_subagent
        self._now += 1
        node.used = self._now
        held = self._tenants[node.tenant]
        if key not in self._children:
            self._offer(held, key, node)
        self._post(held)

    def is_worth(self, key: ChunkKey, parent: ChunkKey | None, victim: ChunkKey) -> bool:
        """Whether a chunk that comes behind `parent` is worth as much as what goes for it.

        It is where it is not known how the text's requests end.
        """
        above = self._nodes.get(parent) if parent is not None else None
        going = self._nodes[victim]
        if above is None or above.use is None or not above.use.ending or going.use is None:
            return True
        own = self.uses.value(above.use.kind(is_often=self.uses.knows(key)), 0)
        return own * _REFUSED >= self.uses.value(_kind(going), self._now - going.used)

    def remove(self, key: ChunkKey, *, evicted: bool = False) -> None:
        node = self._nodes.get(key)
        if evicted and node is not None and (choice := self._choices.get(node.tenant)) is not None:
            choice.left -= 1
        if not evicted:
            self.uses.forget(key)
        super().remove(key, evicted=evicted)
        if node is not None and node.tenant not in self._tenants:
            self._kinds.pop(node.tenant, None)
            self._choices.pop(node.tenant, None)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _list_for(self, held: Held, key: ChunkKey) -> Leaves:
        found = held.list_for(key)
        return held.often if self.uses.knows(key) else found

    def _used(self, key: ChunkKey, node: Node) -> None:
        use = self._use
        if use is None:  # it came: behind what the same request has used, or as the first of a text
            above = self._nodes.get(node.parent) if node.parent is not None else None
            use = above.use if above is not None else None
            if use is None:
                use = Use()
                self.uses.began()
        node.use = use
        self.uses.note(key, self._now, use, is_often=node.is_often)

    def _offer(self, held: Held, key: ChunkKey, node: Node, parent: ChunkKey | None = None) -> None:
        kinds = self._kinds.get(held.tenant)
        if kinds is None:
            kinds = self._kinds[held.tenant] = {}
        kind = _kind(node)
        leaves = kinds.get(kind)
        if leaves is None:
            leaves = kinds[kind] = BothEnds(self._is_leaf)
        leaves.push((node.used, key), parent)

    def _first(self, held: Held) -> tuple[Leaves, Leaf] | None:
        choice = self._choices.get(held.tenant)
        if choice is not None and choice.left:
            leaf = choice.leaves.last() if choice.is_young else choice.leaves.first()
            if leaf is not None:
                return choice.leaves, leaf
        best = min(self._candidates(held), key=lambda each: each[:2], default=None)
        if best is None:
            return None
        choice = self._choices[held.tenant] = _Choice(best.leaves, is_young=best.is_young)
        leaf = choice.leaves.last() if choice.is_young else choice.leaves.first()
        return None if leaf is None else (choice.leaves, leaf)

    def _candidates(self, held: Held) -> Iterable[_Candidate]:
        kinds, now, value = self._kinds.get(held.tenant, {}), self._now, self.uses.value
        for kind, leaves in list(kinds.items()):
            oldest = leaves.first()
            if oldest is None:
                if leaves.is_empty:
                    del kinds[kind]
                continue
            of_oldest = value(kind, now - oldest[0])
            yield _Candidate(of_oldest, oldest[0], leaves, False)
            youngest = leaves.last()
            if youngest is not None and (worth := value(kind, now - youngest[0])) < _YOUNGER * of_oldest:
                yield _Candidate(worth, youngest[0], leaves, True)

    def _place(self, held: Held) -> tuple[int, int]:
        found = self._first(held)
        if found is None:
            return 1, 0
        return (0 if held.is_once_long else 1), found[1][0]

    def _offered(self, held: Held, *, is_often: bool) -> set[Leaf]:
        lists = self._kinds.get(held.tenant, {})
        return {leaf for each in lists.values() for leaf in each.entries()}


def _kind(node: Node) -> int:
    return int(node.is_often) if node.use is None else node.use.kind(is_often=node.is_often)
