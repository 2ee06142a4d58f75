"""Which chunk goes when a tier is full: the leaf that is worth least, as learned from how texts are used again.

Among tenants all is as in `LeafArc`: floors, quotas, and who pays. Within a tenant, leaves are in lists by the kind of
their last use (tiers/uses.py), each in the order of use. Of each list the oldest and the youngest leaf are compared,
and the one of the least value goes; the youngest only if it is worth clearly less than the oldest. That is so where
texts return after a fixed time, such as documents that are asked in turn.

A use is a request's: what it touches and adds behind that has the same one, so that the end of a request, of which
`ended` is told, changes the kind of all its chunks at once.
"""

from collections.abc import Iterable
from enum import IntEnum
from typing import Final, NamedTuple

from hotspan.core.types import ChunkKey
from hotspan.tiers.duel import Duel, SmallTier, sample_mask
from hotspan.tiers.eviction import LeafArc
from hotspan.tiers.leaves import BothEnds, Held, Leaf, Leaves, Node
from hotspan.tiers.shares import Share, Shares
from hotspan.tiers.uses import Ending, KnownUses, Use, Uses

__all__ = ["Ending", "LeafRetention", "Share", "Shares"]

_YOUNGER: Final = 0.8
"""The youngest leaf of a list goes if it is worth less than this part of the oldest."""

_REFUSED: Final = 2.0
"""A chunk is not worth its room if what would go for it is worth more than this many times as much."""

NEVER: Final = 1 << 62

_SLACK: Final = 64
"""A leaf goes in the place of the oldest if it is younger by less than this part of the capacity, in uses."""

_CHOICES: Final = 16
"""So many victims at most are of one list before all lists are compared again."""


class Order(IntEnum):
    """In which order a tenant's leaves go."""

    ARC = 0
    LRU = 1
    LEARNED = 2


class _Choice:
    """The list of which a tenant's next victims are, and from which end. left: how many.

    until: the first leaf is a victim as long as it was not used later. is_once_long: when this was chosen.
    """

    __slots__ = ("is_once_long", "is_young", "leaves", "left", "until")

    def __init__(
        self, leaves: BothEnds, *, is_young: bool = False, until: int = NEVER, is_once_long: bool = False
    ) -> None:
        self.leaves, self.is_young, self.until, self.is_once_long = leaves, is_young, until, is_once_long
        self.left = _CHOICES


class _Candidate(NamedTuple):
    value: float
    used: int
    leaves: BothEnds
    is_young: bool


class LeafRetention(LeafArc):
    """Chunks of one tier in the order of what they are worth, or in ARC's or by the last use where that finds more.

    Costs as `LeafArc`, and O(kinds that are here) for one in `_CHOICES` victims.

    learned: of whom this is a copy, to compare by; None: it is none, and chooses its order (tiers/duel.py).
    """

    def __init__(self, capacity: int, shares: Shares | None = None, *, learned: Uses | None = None) -> None:
        super().__init__(capacity, shares)
        self.uses = Uses(capacity) if learned is None else KnownUses(learned, capacity)
        self._kinds: dict[int, dict[int, BothEnds]] = {}  # by tenant, then by kind and list of ARC
        self._choices: dict[int, _Choice] = {}
        self._use: Use | None = None  # while a text is touched
        self._copy: LeafRetention | None = None
        self._duel: Duel | None = None
        self._order = Order.LEARNED
        if learned is None:
            mask = sample_mask(capacity)
            copied = max(1, capacity // (mask + 1))
            self._copy = LeafRetention(copied, learned=self.uses)
            ways: dict[int, SmallTier] = {
                Order.LEARNED: self._copy,
                Order.ARC: LeafArc(copied),
                Order.LRU: _LeafLru(copied),
            }
            self._duel = Duel(copied, mask, ways)

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        """These chunks were used again, in this order: give a chain leaf first, in one call a request."""
        those = [key for key in keys if key in self._nodes]
        if self._duel is not None:
            seen = [key for key in those if self._duel.sees(key)]
            self._duel.begin(seen, [self._sample_above(key) for key in seen])
            if self._duel.best != self._order:
                self._order = Order(self._duel.best)
                self._choices.clear()
                for held in self._tenants.values():  # another of its leaves goes first
                    self._post(held)
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
        if self._copy is not None and node.sample is not None:
            self._copy.ended(node.sample, ending, is_subagent=is_subagent)
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
        if self._order != Order.LEARNED:
            return True
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
            if self._duel is not None and self._duel.sees(key):
                self._duel.forget(key)
        super().remove(key, evicted=evicted)
        if node is not None and node.tenant not in self._tenants:
            self._kinds.pop(node.tenant, None)
            self._choices.pop(node.tenant, None)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _used(self, key: ChunkKey, node: Node) -> None:
        use = self._use
        above = self._nodes.get(node.parent) if node.parent is not None else None
        if use is None:  # it came: behind what the same request has used, or as the first of a text
            if self._duel is not None:
                self._sample(key, node, above)
            node.returned = self.uses.knows(key)
            use = above.use if above is not None else None
            if use is None:
                use = Use()
                self.uses.began()
        else:
            node.returned = True
        node.use = use
        self.uses.note(key, self._now, use, is_often=node.returned)

    def _sample(self, key: ChunkKey, node: Node, above: Node | None) -> None:
        node.sample = above.sample if above is not None else None
        if self._duel is not None and self._duel.sees(key):
            self._duel.ask(key, node.sample)
            node.sample = key

    def _sample_above(self, key: ChunkKey) -> ChunkKey | None:
        parent = self._nodes[key].parent
        above = self._nodes.get(parent) if parent is not None else None
        return above.sample if above is not None else None

    def _offer(self, held: Held, key: ChunkKey, node: Node, parent: ChunkKey | None = None) -> None:
        kinds = self._kinds.get(held.tenant)
        if kinds is None:
            kinds = self._kinds[held.tenant] = {}
        kind = 2 * _kind(node) + node.is_often
        leaves = kinds.get(kind)
        if leaves is None:
            leaves = kinds[kind] = BothEnds(self._is_leaf)
        leaves.push((node.used, key), parent)
        choice = self._choices.get(held.tenant)
        if choice is not None and self._order != Order.LEARNED and choice.leaves is not leaves:
            choice.until = min(choice.until, node.used + self._capacity // _SLACK)

    def _first(self, held: Held) -> tuple[Leaves, Leaf] | None:
        choice = self._choices.get(held.tenant)
        is_long = held.is_once_long if self._order == Order.ARC else False
        if choice is not None and choice.left and choice.is_once_long == is_long:
            leaf = choice.leaves.last() if choice.is_young else choice.leaves.first()
            if leaf is not None and leaf[0] <= choice.until:
                return choice.leaves, leaf
        choice = self._choose(held) if self._order == Order.LEARNED else self._oldest(held, is_long)
        if choice is None:
            return None
        self._choices[held.tenant] = choice
        leaf = choice.leaves.last() if choice.is_young else choice.leaves.first()
        return None if leaf is None else (choice.leaves, leaf)

    def _choose(self, held: Held) -> _Choice | None:
        """The leaf of the least value."""
        best = min(self._candidates(held), key=lambda each: each[:2], default=None)
        return None if best is None else _Choice(best.leaves, is_young=best.is_young)

    def _oldest(self, held: Held, is_long: bool) -> _Choice | None:
        """The list of the oldest leaf: of all, or of ARC's list that exceeds its target."""
        ends: list[tuple[int, int, BothEnds]] = []
        for kind, leaves in list(self._kinds.get(held.tenant, {}).items()):
            oldest = leaves.first()
            if oldest is None:
                if leaves.is_empty:
                    del self._kinds[held.tenant][kind]
            else:
                ends.append((oldest[0], kind, leaves))
        own = [each for each in ends if each[1] & 1 != is_long] if self._order == Order.ARC else ends
        if not ends:
            return None
        first, *others = sorted(own or ends, key=lambda each: each[0])
        until = others[0][0] + self._capacity // _SLACK if others else NEVER
        choice = _Choice(first[2], until=until, is_once_long=is_long)
        if not own:
            choice.left = 0  # the other list's, for once: this one may have a leaf soon
        return choice

    def _candidates(self, held: Held) -> Iterable[_Candidate]:
        kinds, now, value = self._kinds.get(held.tenant, {}), self._now, self.uses.value
        for kind, leaves in list(kinds.items()):
            oldest = leaves.first()
            if oldest is None:
                if leaves.is_empty:
                    del kinds[kind]
                continue
            of_oldest = value(kind >> 1, now - oldest[0])
            yield _Candidate(of_oldest, oldest[0], leaves, False)
            youngest = leaves.last()
            if youngest is not None and (worth := value(kind >> 1, now - youngest[0])) < _YOUNGER * of_oldest:
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
    return int(node.returned) if node.use is None else node.use.kind(is_often=node.returned)


class _LeafLru(LeafArc):
    """The least recently used leaf goes first: all chunks are in one list, and none leaves a ghost."""

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        self.defer(key for key in keys if key in self._nodes)

    def remove(self, key: ChunkKey, *, evicted: bool = False) -> None:
        super().remove(key)
