"""Which chunk goes when a tier is full: the leaf that is worth least, as learned from how texts are used again.

Among tenants all is as in `LeafArc`: floors, quotas, and who pays. Within a tenant, leaves are in lists by the kind of
their last use (tiers/uses.py), each in the order of use. Of each list the oldest and the youngest leaf are compared,
and the one of the least value goes; the youngest only if it is worth clearly less than the oldest. That is so where
texts return after a fixed time, such as documents that are asked in turn.

A use is a request's: what it touches and adds behind that has the same one, so that the end of a request, of which
`ended` is told, changes the kind of all its chunks at once.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from hotspan.core.types import ChunkKey
from hotspan.tiers.choosing import SLACK, Order, of_least_value, of_the_oldest
from hotspan.tiers.duel import Duel, SmallTier, sample_mask
from hotspan.tiers.eviction import LeafArc
from hotspan.tiers.leaves import Ends, Held, Leaf, Line, Node
from hotspan.tiers.shares import Share, Shares
from hotspan.tiers.uses import Ending, KnownUses, Use, Uses

__all__ = ["Ending", "LeafRetention", "Order", "Share", "Shares"]

_REFUSED: Final = 2.0
"""A chunk is not worth its room if what would go for it is worth more than this many times as much."""

_CHOICES: Final = 16
"""So many victims at most are of one list before all lists are compared again; more in a tier of more than this times
`_OF_CAPACITY`."""

_OF_CAPACITY: Final = 1024


class LeafRetention(LeafArc):
    """Chunks of one tier in the order of what they are worth, or in ARC's or by the last use where that finds more.

    Costs O(1) for a chunk that comes or goes, O(kinds that are here) for one in `_CHOICES` victims, and for a text that
    is used a step for each chunk that is used again first, or that is of the sample. What has chunks on it is as old as
    the youngest of these, so it takes over their use when they go.

    learned: of whom this is a copy, to compare by; None: it is none, and chooses its order (tiers/duel.py).
    """

    def __init__(self, capacity: int, shares: Shares | None = None, *, learned: Uses | None = None) -> None:
        super().__init__(capacity, shares)
        self.uses = Uses(capacity) if learned is None else KnownUses(learned, capacity)
        self._mask = self.uses.mask
        self._copy: LeafRetention | None = None
        self._duel: Duel | None = None
        self._order = Order.LEARNED
        self._tail: ChunkKey | None = None  # a leaf that came last, and is in no line yet
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

    # -- what came, was used, went -----------------------------------------------------------------------------------

    def add(self, key: ChunkKey, parent: ChunkKey | None, tenant: int = 0) -> None:
        nodes = self._nodes
        if key in nodes:
            raise ValueError("the chunk is here already")
        self._now += 1
        held = self._tenants.get(tenant) or self._arrive(tenant)
        into = held.list_for(key)
        into.chunks += 1
        held.size += 1
        is_often = into is held.often
        node = nodes[key] = Node(parent, held.tenant, self._now, is_often, returned=is_often)
        above = nodes.get(parent) if parent is not None else None
        use = None
        if above is not None:
            node.sample, use = above.sample, above.use
        if use is None:
            use = Use()
            self.uses.began()
        node.use = use
        if not hash(key) & self._mask:
            self._sampled_came(key, node, use)
        if self._tail is not None and self._tail != parent:
            self._offer_tail()
        self._tail = None if key in self._children else key
        if parent is not None:
            self._children.add(parent, key)
            if above is not None:
                if above.line is not None:
                    above.line.discard(parent)
                    above.line = None
                if above.tenant != tenant:
                    self._post(self._tenants[above.tenant])
        self._post(held)

    def adopt(self, chunks: Iterable[tuple[ChunkKey, ChunkKey | None, int]]) -> None:
        super().adopt(chunks)
        nodes, mask = self._nodes, self._mask
        known = set[ChunkKey]()
        for key in nodes:
            path: list[ChunkKey] = []
            at: ChunkKey | None = key
            while at is not None and at not in known and (node := nodes.get(at)) is not None:
                path.append(at)
                known.add(at)
                at = node.parent
            sample = nodes[at].sample if at is not None and at in nodes else None
            for each in reversed(path):
                if not hash(each) & mask:
                    sample = each
                nodes[each].sample = sample

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        """These chunks were used again, in this order: give a chain leaf first, in one call a request.

        What a chain stands on was used, too.
        """
        self._offer_tail()
        nodes, before = self._nodes, self._now
        ends: list[ChunkKey] = []
        above: ChunkKey | None = None
        for key in keys:
            node = nodes.get(key)
            if node is not None:
                self._now += 1
                if key != above:
                    ends.append(key)
                above = node.parent
        samples = {key: parent for end in ends for key, parent in self._samples(end)}
        if self._duel is not None:
            self._begin_duel(self._duel, samples)
        if not ends:
            return
        last = nodes[ends[0]]
        former = last.use or Use()
        use = Use(former.ending, self.uses.rhythm(former, before - last.used), former.is_subagent)
        self.uses.began()
        for key in samples:
            self.uses.note(key, self._now, use, is_often=True)
        for key in ends:
            self._use_chain(key, use)

    def defer(self, leaves: Iterable[ChunkKey]) -> None:
        self._offer_tail()
        super().defer(leaves)

    def ended(self, key: ChunkKey, ending: Ending, *, is_subagent: bool = False) -> None:
        """The request that used this chunk last, and nothing behind it, has ended."""
        node = self._nodes.get(key)
        if node is None or node.use is None:
            return
        if key == self._tail:
            self._tail = None
        node.use.end(int(ending), is_subagent=is_subagent)
        if self._copy is not None and (sample := self._seen_above(key)) is not None:
            self._copy.ended(sample, ending, is_subagent=is_subagent)
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
        nodes = self._nodes
        node = nodes.pop(key, None)
        if not evicted:
            self._forget(key)
        if node is None:
            return
        if key == self._tail:
            self._tail = None
        held = self._tenants[node.tenant]
        if node.line is not None:
            node.line.discard(key)
        of = held.often if node.is_often else held.once
        of.chunks -= 1
        held.size -= node.size
        if evicted:
            of.ghosts[key] = None
            if held.choice is not None:
                held.choice.left -= 1
        held.forget_ghosts()
        parent = node.parent
        if parent is not None:
            is_leaf = self._children.discard(parent, key)
            above = nodes.get(parent)
            if above is not None:
                if node.used >= above.used:
                    above.used, above.use = node.used, node.use
                if is_leaf:
                    of_above = held if above.tenant == node.tenant else self._tenants[above.tenant]
                    self._offer(of_above, parent, above)
                    if of_above is not held:
                        self._post(of_above)
        self._left(held)

    def victim(
        self, tenant: int, may_go: Callable[[ChunkKey], bool], *, is_modest: bool = False, size: int = 1
    ) -> ChunkKey | None:
        if self._tail is not None and self._nodes[self._tail].tenant != tenant:
            self._offer_tail()
        found = super().victim(tenant, may_go, is_modest=is_modest, size=size)
        if found is None and self._tail is not None:
            self._offer_tail()
            found = super().victim(tenant, may_go, is_modest=is_modest, size=size)
        return found

    def check(self) -> None:
        self._offer_tail()
        super().check()
        for key, node in self._nodes.items():
            if (node.line is not None) != (key not in self._children):
                raise AssertionError("a chunk is in a line and no leaf, or a leaf in none")
        if sum(len(line) for held in self._tenants.values() for line in held.lines.values()) > len(self._nodes):
            raise AssertionError("a line has what is no leaf")

    # -- inside --------------------------------------------------------------------------------------------------------

    def _sampled_came(self, key: ChunkKey, node: Node, use: Use) -> None:
        """A chunk of the sample comes."""
        if self._duel is not None and self._duel.sees(key):
            self._duel.ask(key, self._seen(node.sample))
        node.sample = key
        node.returned = node.is_often or self.uses.knows(key)
        self.uses.note(key, self._now, use, is_often=node.returned)

    def _forget(self, key: ChunkKey) -> None:
        self.uses.forget(key)
        if self._duel is not None and self._duel.sees(key):
            self._duel.forget(key)

    def _use_chain(self, key: ChunkKey, use: Use) -> None:
        """A chunk was used, and what it stands on: some of that for the first time again, or all of it was before."""
        nodes = self._nodes
        node = nodes[key]
        held = self._tenants[node.tenant]
        node.used, node.use = self._now, use
        at: Node | None = node
        while at is not None and not at.is_often:
            of = held if at.tenant == held.tenant else self._tenants[at.tenant]
            of.once.chunks -= 1
            of.often.chunks += 1
            at.is_often = at.returned = True
            if of is not held:
                self._post(of)
            at = nodes.get(at.parent) if at.parent is not None else None
        if key not in self._children:
            self._offer(held, key, node)
        self._post(held)

    def _samples(self, key: ChunkKey) -> Iterator[tuple[ChunkKey, ChunkKey | None]]:
        """The chunks of the sample from one on upwards, each with the next."""
        nodes = self._nodes
        at = nodes[key].sample
        while at is not None:
            node = nodes.get(at)
            above = nodes.get(node.parent) if node is not None and node.parent is not None else None
            following = above.sample if above is not None else None
            yield at, following
            at = following

    def _seen(self, sample: ChunkKey | None) -> ChunkKey | None:
        """This chunk of the sample, or the first that it stands on, that the copies see."""
        if sample is None or self._duel is None:
            return None
        if self._duel.sees(sample):
            return sample
        if sample not in self._nodes:
            return None
        return next((key for key, _ in self._samples(sample) if self._duel.sees(key)), None)

    def _seen_above(self, key: ChunkKey) -> ChunkKey | None:
        return self._seen(self._nodes[key].sample)

    def _begin_duel(self, duel: Duel, samples: dict[ChunkKey, ChunkKey | None]) -> None:
        seen = [key for key in samples if duel.sees(key)]
        duel.begin(seen, [self._seen(samples[key]) for key in seen])
        if duel.best != self._order:
            self._order = Order(duel.best)
            for held in self._tenants.values():  # another of its leaves goes first
                held.choice = None
                self._post(held)

    def _offer_tail(self) -> None:
        """The chunk that came last is up for eviction, too, if it is a leaf: the next one stands on it mostly."""
        key, self._tail = self._tail, None
        if key is not None:
            node = self._nodes[key]
            held = self._tenants[node.tenant]
            self._offer(held, key, node)
            self._post(held)

    def _left(self, held: Held) -> None:
        """One of a tenant's chunks went."""
        if held.once.chunks or held.often.chunks:
            self._post(held)
        else:
            del self._tenants[held.tenant]
            self._sharing -= not self._shares.has_floor(held.tenant)

    def _offer(self, held: Held, key: ChunkKey, node: Node, parent: ChunkKey | None = None) -> None:
        use = node.use
        kind = 2 * ((use.known if use is not None else 0) or node.returned) + node.is_often
        line = held.lines.get(kind)
        if line is None:
            line = held.lines[kind] = Line()
        if node.line is not None:
            node.line.discard(key)
        node.line = line
        line.put(key, node.used)
        choice = held.choice
        if choice is not None and self._order != Order.LEARNED and choice.line is not line:
            choice.until = min(choice.until, node.used + self._capacity // SLACK)

    def _first(self, held: Held) -> tuple[Line, Leaf] | None:
        choice = held.choice
        is_long = held.is_once_long if self._order == Order.ARC else False
        if choice is not None and choice.left > 0 and choice.is_once_long == is_long:
            leaf = choice.leaf()
            if leaf is not None and leaf[0] <= choice.until:
                return choice.line, leaf
        slack = self._capacity // SLACK
        if self._order == Order.LEARNED:
            choice = of_least_value(held, self._now, self.uses, self._choices, slack)
        else:
            choice = of_the_oldest(held, is_long if self._order == Order.ARC else None, self._choices, slack)
        if choice is None:
            return None
        held.choice = choice
        leaf = choice.leaf()
        return None if leaf is None else (choice.line, leaf)

    @property
    def _choices(self) -> int:
        return max(_CHOICES, self._capacity // _OF_CAPACITY)

    def _rank(self, held: Held, first: tuple[Ends, Leaf] | None) -> int:
        return 0 if first is not None and held.is_once_long else 1

    def _offered(self, held: Held, *, is_often: bool) -> set[Leaf]:
        return {leaf for each in held.lines.values() for leaf in each.entries()}


def _kind(node: Node) -> int:
    return int(node.returned) if node.use is None else node.use.kind(is_often=node.returned)


class _LeafLru(LeafArc):
    """The least recently used leaf goes first: all chunks are in one list, and none leaves a ghost."""

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        self.defer(key for key in keys if key in self._nodes)

    def remove(self, key: ChunkKey, *, evicted: bool = False) -> None:
        super().remove(key)
