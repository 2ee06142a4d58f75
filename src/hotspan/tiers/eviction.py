"""Which chunk goes when a tier is full: ARC over the leaves, with a floor and a quota for each tenant.

A chunk is useless without its ancestors, so only a chunk that no other chunk here stands on may go, and a use counts
for all ancestors (leaf first, so that the root is the last to go).

ARC (Megiddo and Modha, FAST '03) keeps two lists in the order of use, and remembers what went from each:

    once     came, and was not used since (T1)              ghosts of once  (B1)
    often    was used again, or came back as a ghost (T2)   ghosts of often (B2)

A ghost that comes back says that its list was too short, and moves the target, how long `once` should be. What is
never used a second time passes through `once` and leaves `often` alone. Two things differ from the paper, which is
beside it in benchmarks/results/eviction.json: the target begins in the middle and not at 0, from where it hardly moves
in a tier so large that few ghosts come back; and both lists have the same room for ghosts, while the paper leaves a
long `once` hardly any.

Each tenant has lists and a target of its own, for with common ones a flood by one would move the targets of all, and
crowd out the others' ghosts and their `once`. Who pays for a chunk is decided between those above their floors: first
tenants with a `once` that is too long, the oldest leaf of these, so that a flood pays for itself; if there are none,
the oldest leaf of the others. Theirs comes first, too, once it was left unused for `_IDLE_TURNS`: a tenant that is gone
gives way to one that can't show by its ghosts what it would do with more.
"""

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush

from hotspan.core.multimap import Multimap
from hotspan.core.types import ChunkKey
from hotspan.tiers.leaves import Ends, Held, Leaf, Leaves, Node
from hotspan.tiers.shares import Share, Shares

__all__ = ["LeafArc", "Share", "Shares"]

_IDLE_TURNS = 16
"""In uses and arrivals of as many chunks as the tier holds."""

_MAX_MOVED = 32
"""Tenants whose places are looked at together, so that no decision waits for more."""


class LeafArc:
    """Chunks of one tier in the order in which they would go.

    capacity: what the tier holds. Floors, quotas and sizes are in the same unit: chunks, or slots where a chunk takes
              several.

    Costs, amortised: O(log n) a change or victim, O(tenants) more when a tenant comes; one step more for each older
    leaf that may not go. A tenant at its floor is one step, however many old leaves it has.
    """

    def __init__(self, capacity: int, shares: Shares | None = None) -> None:
        self._capacity = capacity
        self._slots = capacity  # what quotas are parts of, also while there is room for less
        self._shares = shares or Shares()
        self._nodes: dict[ChunkKey, Node] = {}
        self._children = Multimap[ChunkKey, ChunkKey]()  # of each parent, here or not: a child may come back first
        self._tenants: dict[int, Held] = {}
        self._sharing = 0  # tenants here that have the default floor
        # (time of a tenant's first leaf, tenant), heaps by the tenant's rank; entries go stale as in `Leaves`.
        self._payers: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
        self._moved: list[Held] = []  # tenants that may stand elsewhere: looked at when somebody has to pay
        self._now = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._nodes

    @property
    def size(self) -> int:
        """Of all chunks together."""
        return sum(held.size for held in self._tenants.values())

    # -- what came, was used, went -----------------------------------------------------------------------------------

    def add(self, key: ChunkKey, parent: ChunkKey | None, tenant: int = 0) -> None:
        """A chunk came, just used."""
        if key in self._nodes:
            raise ValueError("the chunk is here already")
        self._now += 1
        held = self._tenants.get(tenant) or self._arrive(tenant)
        into = held.list_for(key)
        into.chunks += 1
        node = self._nodes[key] = Node(parent, held.tenant, self._now, into is held.often)
        held.size += 1
        if key not in self._children:
            self._offer(held, key, node, parent)
        if parent is not None:
            self._children.add(parent, key)
            above = self._nodes.get(parent)
            if above is not None and above.tenant != tenant:
                self._post(self._tenants[above.tenant])
        self._post(held)

    def adopt(self, chunks: Iterable[tuple[ChunkKey, ChunkKey | None, int]]) -> None:
        """Add many chunks at once (key, parent, tenant), before any other came."""
        if self._now:
            raise ValueError("chunks are adopted before any is added")
        nodes, children, tenants = self._nodes, self._children, self._tenants
        for now, (key, parent, tenant) in enumerate(chunks, 1):
            held = tenants.get(tenant) or self._arrive(tenant)
            held.once.chunks += 1
            held.size += 1
            nodes[key] = Node(parent, held.tenant, now)
            if parent is not None:
                children.add(parent, key)
            self._now = now
        if len(nodes) != self._now:
            raise ValueError("a chunk came twice")
        for key, node in nodes.items():
            if key not in children:
                self._offer(tenants[node.tenant], key, node)
        for held in tenants.values():
            self._post(held)

    def sized(self, key: ChunkKey, size: int) -> None:
        """A chunk takes so much from now on; 1 until this is called."""
        node = self._nodes[key]
        held = self._tenants[node.tenant]
        held.size += size - node.size
        held.largest = max(held.largest, size)
        node.size = size
        self._post(held)

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        """These chunks were used again, in this order: give a chain leaf first."""
        touched: dict[int, Held] = {}
        for key in keys:
            node = self._nodes.get(key)
            if node is None:
                continue
            self._now += 1
            node.used = self._now
            held = touched[node.tenant] = self._tenants[node.tenant]
            if not node.is_often:
                held.once.chunks -= 1
                held.often.chunks += 1
                node.is_often = True
            if key not in self._children:
                self._offer(held, key, node)
        for held in touched.values():
            self._post(held)

    def defer(self, leaves: Iterable[ChunkKey]) -> None:
        """These leaves stay though their turn has come: they are the last of their lists now."""
        for key in leaves:
            self._now += 1
            node = self._nodes[key]
            node.used = self._now
            held = self._tenants[node.tenant]
            self._offer(held, key, node)
            self._post(held)

    def remove(self, key: ChunkKey, *, evicted: bool = False) -> None:
        """A chunk went. One that was evicted is remembered as a ghost, one that was forgotten is not."""
        node = self._nodes.pop(key, None)
        if node is None:
            return
        held = self._tenants[node.tenant]
        leaves = held.list_of(node.is_often)
        leaves.chunks -= 1
        held.size -= node.size
        if evicted:
            leaves.ghosts[key] = None
        held.forget_ghosts()
        if node.parent is not None and self._children.discard(node.parent, key):
            above = self._nodes.get(node.parent)
            if above is not None:
                of_above = self._tenants[above.tenant]
                self._offer(of_above, node.parent, above)
                if of_above is not held:
                    self._post(of_above)
        if held.chunks:
            self._post(held)
        else:
            del self._tenants[node.tenant]
            self._sharing -= not self._shares.has_floor(node.tenant)

    # -- who makes room ------------------------------------------------------------------------------------------------

    def victim(
        self, tenant: int, may_go: Callable[[ChunkKey], bool], *, is_modest: bool = False, size: int = 1
    ) -> ChunkKey | None:
        """The leaf to evict for a chunk of `tenant` that takes `size`, or None if no leaf may go. Removes nothing.

        Tenants above their floors pay. If nothing of theirs may go, or the tenant is at its quota, it pays itself.

        is_modest: others pay only while the tenant is below its floor.
        """
        passed: list[tuple[Held, Ends, Leaf]] = []
        self._settle()
        own = self._tenants.get(tenant)
        others_pay = self.may_add(tenant, size)
        if is_modest:
            others_pay = others_pay and (0 if own is None else own.size) < self.floor(tenant)
        found = self._payers_first(may_go, passed) if others_pay else None
        while found is None and own is not None and own.front is not None:
            found = self._unless_pinned(own, *own.front, may_go, passed)
        for held, leaves, leaf in reversed(passed):
            leaves.push(leaf)
            self._post(held)
        return found

    def may_add(self, tenant: int, size: int = 1) -> bool:
        """Whether a chunk of the tenant may come; at its quota only if one of its own goes."""
        held = self._tenants.get(tenant)
        return (held.size if held is not None else 0) + size <= _part(self._slots, self._shares.quota(tenant))

    def floor(self, tenant: int) -> int:
        """How much others leave a tenant that holds as much, also one that holds nothing yet."""
        comes = tenant not in self._tenants and not self._shares.has_floor(tenant)
        return _part(self._capacity, self._shares.floor(tenant, self._sharing + comes))

    def is_leaf(self, key: ChunkKey) -> bool:
        """Whether a chunk is here and no other chunk here stands on it."""
        return key in self._nodes and key not in self._children

    def tenants(self) -> dict[int, int]:
        """How many chunks each tenant holds."""
        return {tenant: held.chunks for tenant, held in self._tenants.items()}

    def descendants(self, keys: Iterable[ChunkKey]) -> set[ChunkKey]:
        """The chunks here that stand on these, which need not be here; one of these only if it stands on another.

        Where a chunk in between is missing, and is not given, the link is not known, and ends there.
        """
        found: set[ChunkKey] = set()
        todo = list(keys)
        while todo:
            new = self._children.of(todo.pop()) - found
            found |= new
            todo.extend(new)
        return found

    def resize(self, capacity: int) -> None:
        """The tier holds so much from now on, of which floors are parts; quotas stay. Evicts nothing."""
        if capacity == self._capacity:
            return
        self._capacity = capacity
        for held in self._tenants.values():
            self._post(held)

    def check(self) -> None:
        """Raise AssertionError if the books do not agree."""
        self._settle()
        children: dict[ChunkKey, set[ChunkKey]] = {}
        chunks: dict[tuple[int, bool], int] = {}
        sizes: dict[int, int] = {}
        for key, node in self._nodes.items():
            of = (node.tenant, node.is_often)
            chunks[of] = chunks.get(of, 0) + 1
            sizes[node.tenant] = sizes.get(node.tenant, 0) + node.size
            if node.parent is not None:
                children.setdefault(node.parent, set()).add(key)
            if node.tenant not in self._tenants:
                raise AssertionError("a chunk is held by nobody")
        if children != {parent: self._children.of(parent) for parent in self._children}:
            raise AssertionError("children are miscounted")
        leaves: dict[tuple[int, bool], list[Leaf]] = {}
        for key, node in self._nodes.items():
            if key not in children:
                leaves.setdefault((node.tenant, node.is_often), []).append((node.used, key))
        for (tenant, is_often), those in leaves.items():
            if not self._offered(self._tenants[tenant], is_often=is_often).issuperset(those):
                raise AssertionError("a leaf is not up for eviction")
        for tenant, held in self._tenants.items():
            counted = chunks.get((tenant, False), 0), chunks.get((tenant, True), 0)
            if not held.chunks or counted != (held.once.chunks, held.often.chunks) or held.size != sizes[tenant]:
                raise AssertionError("a tenant's chunks are miscounted")
            if max(len(held.once.ghosts), len(held.often.ghosts)) > held.chunks // 2 or not 0 <= held.target <= 1:
                raise AssertionError("a tenant has too many ghosts, or no sound target")
            first = self._first(held)
            place = self._rank(held, first), 0 if first is None else first[1][0]
            if (held.rank, held.used) != place and (held.used or self._may_pay(held)):
                raise AssertionError("a tenant that may have to pay stands in a wrong place, or in none")
            if held.used and (held.used, tenant) not in self._payers[held.rank]:
                raise AssertionError("a tenant does not stand where it was posted")
        if self._sharing != sum(not self._shares.has_floor(tenant) for tenant in self._tenants):
            raise AssertionError("tenants with the default floor are miscounted")

    # -- inside --------------------------------------------------------------------------------------------------------

    def _payers_first(
        self, may_go: Callable[[ChunkKey], bool], passed: list[tuple[Held, Ends, Leaf]]
    ) -> ChunkKey | None:
        """The first leaf of all tenants above their floors.

        One that comes up and may not go is taken out of its list meanwhile: its tenant then stands where its next does.
        """
        found: ChunkKey | None = None
        while found is None and (held := self._payer()) is not None and held.front is not None:
            found = self._unless_pinned(held, *held.front, may_go, passed)
        return found

    def _payer(self) -> Held | None:
        """Who pays for the next chunk, of the tenants above their floors."""
        long, other = self._front(0), self._front(1)
        if long is None or other is None:
            return long or other
        idle = self._now - _IDLE_TURNS * self._capacity
        return other if other.used < min(idle, long.used) else long

    def _front(self, rank: int) -> Held | None:
        """Of the tenants above their floors and of this rank, the one whose first leaf is the oldest."""
        payers = self._payers[rank]
        while payers:
            used, tenant = payers[0]
            held = self._tenants.get(tenant)
            if held is not None and (held.rank, held.used) == (rank, used):
                if self._may_pay(held):
                    return held
                held.used = 0
            heappop(payers)
        return None

    def _unless_pinned(
        self,
        held: Held,
        leaves: Ends,
        leaf: Leaf,
        may_go: Callable[[ChunkKey], bool],
        passed: list[tuple[Held, Ends, Leaf]],
    ) -> ChunkKey | None:
        if may_go(leaf[1]):
            return leaf[1]
        leaves.pop(leaf)
        passed.append((held, leaves, leaf))
        self._stand(held)
        return None

    def _post(self, held: Held) -> None:
        """A tenant has changed, so that it may stand elsewhere among those who may have to pay."""
        if not held.is_moved:
            held.is_moved = True
            self._moved.append(held)
            if len(self._moved) >= _MAX_MOVED:
                self._settle()

    def _settle(self) -> None:
        """Put each tenant where it stands now."""
        moved, self._moved = self._moved, []
        for held in moved:
            held.is_moved = False
            if held.chunks:
                self._stand(held)

    def _stand(self, held: Held) -> None:
        """Put a tenant where it stands among those who may have to pay."""
        found = held.front = self._first(held)
        rank, used = self._rank(held, found), 0 if found is None else found[1][0]
        if rank == held.rank and used == held.used:
            return
        held.rank, held.used = rank, used
        if used:
            payers = self._payers[rank]
            heappush(payers, (used, held.tenant))
            if len(payers) > 2 * len(self._tenants) + 64:
                standing = (each for each in self._tenants.values() if each.used and each.rank == rank)
                payers[:] = [(each.used, each.tenant) for each in standing]
                heapify(payers)

    def _rank(self, held: Held, first: tuple[Ends, Leaf] | None) -> int:
        """0 if its first leaf is of a `once` that is too long, else 1."""
        return 0 if first is not None and first[0] is held.once and held.is_once_long else 1

    def _offer(self, held: Held, key: ChunkKey, node: Node, parent: ChunkKey | None = None) -> None:
        """A leaf is up for eviction. parent: no leaf from now on."""
        held.list_of(node.is_often).push((node.used, key), parent)

    def _first(self, held: Held) -> tuple[Ends, Leaf] | None:
        """A tenant's leaf to evict first, and the list that it is in."""
        return held.first()

    def _offered(self, held: Held, *, is_often: bool) -> set[Leaf]:
        """What is up for eviction, for `check`."""
        return set(held.list_of(is_often).entries())

    def _arrive(self, tenant: int) -> Held:
        """A tenant comes, which may lower the floors of others: these may have to pay again."""
        held = self._tenants[tenant] = Held(tenant, Leaves(self._is_leaf), Leaves(self._is_leaf))
        if not self._shares.has_floor(tenant):
            self._sharing += 1
            for each in self._tenants.values():
                self._post(each)
        return held

    def _is_leaf(self, leaf: Leaf) -> bool:
        node = self._nodes.get(leaf[1])
        return node is not None and node.used == leaf[0] and leaf[1] not in self._children

    def _may_pay(self, held: Held) -> bool:
        return held.size - held.largest >= self.floor(held.tenant)


def _part(capacity: int, fraction: float) -> int:
    return int(fraction * capacity + 1e-9)  # 0.29 of 100 is 29
