"""Eviction: ARC's leaf goes, of a tenant that may pay, and nothing else."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from benchmarks.policies import LeafLru, replay_one
from hotspan.core.types import Chunk, ChunkKey
from hotspan.testing.chunks import chain, key_of
from hotspan.tiers.eviction import LeafArc, Share, Shares
from hotspan.tiers.leaves import Line
from hotspan.tiers.retention import LeafRetention
from tests.operations import operations
from tests.tiers.arc_reference import ReferenceArc

PARENT = {
    "a": None, "b": "a", "c": "b", "d": "b", "e": "a", "h": "d",
    "f": None, "g": "f", "i": "g", "j": "g", "k": None, "l": None,
}  # fmt: skip
NAMES = sorted(PARENT)
KEY: dict[str, ChunkKey] = {name: key_of(name) for name in NAMES}
NAME = {key: name for name, key in KEY.items()}
BOTH = (LeafArc, LeafRetention)
TENANTS = (0, 1, 2, -(2**63), 2**64 - 1)
SHARES = {
    "default": Shares(),
    "no floors": Shares(default_floor=0.0),
    "given floors": Shares(by_tenant={1: Share(floor=0.5), 2: Share(floor=0.25)}),
    "quotas": Shares(by_tenant={0: Share(quota=0.5), 1: Share(floor=0.25, quota=0.25), 2: Share(quota=0.0)}),
}


def parent_key(name: str) -> ChunkKey | None:
    """The key of the parent in the fixed trees."""
    parent = PARENT[name]
    return None if parent is None else KEY[parent]


def everything(key: ChunkKey) -> bool:
    """For victims that any chunk may be."""
    return True


class Eviction(RuleBasedStateMachine):
    """LeafArc against the reference, over chunks of fixed trees that come in any order, for any tenant."""

    @initialize(shares=st.sampled_from(sorted(SHARES)), capacity=st.integers(1, 8))
    def begin(self, shares: str, capacity: int) -> None:
        self.capacity = capacity
        self.arc = LeafArc(capacity, SHARES[shares])
        by_tenant = SHARES[shares].by_tenant
        floors = {tenant: share.floor for tenant, share in by_tenant.items() if share.floor is not None}
        quotas = {tenant: share.quota for tenant, share in by_tenant.items()}
        self.reference = ReferenceArc(capacity, floors, quotas, SHARES[shares].default_floor)

    @rule(name=st.sampled_from(NAMES), tenant=st.sampled_from(TENANTS), pinned=st.sets(st.sampled_from(NAMES)))
    def store(self, name: str, tenant: int, pinned: set[str]) -> None:
        """As a tier does: into a free slot, or that of a victim."""
        if name in self.reference.chunks:
            with pytest.raises(ValueError, match="here already"):
                self.arc.add(KEY[name], parent_key(name), tenant)
            return
        assert self.arc.may_add(tenant) == self.reference.may_add(tenant)
        if len(self.arc) == self.capacity or not self.arc.may_add(tenant):
            found = self.asked(tenant, pinned)
            if found is None:
                return
            self.remove(found, evicted=True)
        self.arc.add(KEY[name], parent_key(name), tenant)
        self.reference.add(name, PARENT[name], tenant)

    @rule(names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=12), tenant=st.sampled_from(TENANTS[:2]))
    def serve(self, names: list[str], tenant: int) -> None:
        """Requests of one tenant: what is there is used, the rest comes."""
        for name in names:
            text = [name]
            while (parent := PARENT[text[0]]) is not None:
                text.insert(0, parent)
            self.touch([each for each in reversed(text) if each in self.reference.chunks])
            for each in text:
                if each not in self.reference.chunks:
                    self.store(each, tenant, set(text))

    @rule(names=st.lists(st.sampled_from(NAMES), max_size=4))
    def touch(self, names: list[str]) -> None:
        self.arc.touch([KEY[name] for name in names])
        self.reference.touch(names)

    @rule(name=st.sampled_from(NAMES), evicted=st.booleans())
    def remove(self, name: str, evicted: bool) -> None:
        self.arc.remove(KEY[name], evicted=evicted)
        self.reference.remove(name, evicted)

    @rule(tenant=st.sampled_from(TENANTS), pinned=st.sets(st.sampled_from(NAMES)))
    def victim(self, tenant: int, pinned: set[str]) -> None:
        self.asked(tenant, pinned)

    def asked(self, tenant: int, pinned: set[str]) -> str | None:
        """The victim on which both agree."""
        found = self.arc.victim(tenant, lambda key: NAME[key] not in pinned)
        expected = self.reference.victim(tenant, lambda name: name not in pinned)
        assert (None if found is None else NAME[found]) == expected
        return expected

    @rule(names=st.sets(st.sampled_from(NAMES)))
    def descendants(self, names: set[str]) -> None:
        expected: set[str] = set()
        while True:
            below = {name for name in self.reference.chunks if PARENT[name] in names | expected}
            if below <= expected:
                break
            expected |= below
        assert {NAME[key] for key in self.arc.descendants(KEY[name] for name in names)} == expected

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "arc"):
            return
        self.arc.check()
        assert len(self.arc) == len(self.reference.chunks)
        assert {name for name in NAMES if KEY[name] in self.arc} == self.reference.chunks.keys()
        assert self.arc.tenants() == Counter(chunk.tenant for chunk in self.reference.chunks.values())
        for tenant, memory in self.reference.memories.items():
            held = self.arc._tenants[tenant]
            assert held.target == memory.target
            assert [NAME[key] for key in held.once.ghosts] == memory.once_ghosts
            assert [NAME[key] for key in held.often.ghosts] == memory.often_ghosts


TestEviction = Eviction.TestCase
TestEviction.settings = settings(max_examples=300, stateful_step_count=60, deadline=None)


def store(arc: LeafArc, name: str, tenant: int) -> bool:
    """What a tier of `arc`'s capacity does with a chunk that is not in it; False if there is no room."""
    return replay_one(arc, arc._capacity, [key_of(name)], tenant) == 0 and key_of(name) in arc


def serve(arc: LeafArc | LeafLru, text: list[Chunk], tenant: int = 0) -> int:
    """One request: how many of its chunks were there; they were used, and the others come."""
    return replay_one(arc, arc._capacity, [chunk.key for chunk in text], tenant)


def test_a_chain_goes_leaf_by_leaf() -> None:
    """A chain touched leaf first is evicted from its end, root last, though the root is the most recently used."""
    for touched in (False, True):
        arc, text = LeafArc(5), chain("text", 5)
        for chunk in text:
            arc.add(chunk.key, chunk.parent)
        if touched:
            arc.touch([chunk.key for chunk in reversed(text)])
        gone = []
        while (victim := arc.victim(0, everything)) is not None:
            gone.append(victim)
            arc.remove(victim, evicted=True)
        assert gone == [chunk.key for chunk in reversed(text)]


def test_the_queues_stay_small() -> None:
    """Many touches of few chunks, and tenants that come and go, leave only a few stale entries behind."""
    arc = LeafArc(len(NAMES))
    for name in NAMES:
        arc.add(KEY[name], None)
    for n in range(20_000):
        arc.touch(KEY.values())
        arc.remove(KEY["a"])
        arc.add(KEY["a"], None, n % 50)
    assert all(len(payers) <= 2 * len(arc._tenants) + 65 for payers in arc._payers)
    for held in arc._tenants.values():
        assert all(len(each.entries()) <= 2 * each.chunks + 65 for each in (held.once, held.often))
    arc.check()


@pytest.mark.parametrize("is_often", [False, True])
def test_a_leaf_that_no_queue_has_is_found(is_often: bool) -> None:
    """check() raises if a leaf of one of several tenants is missing where evictions look for it."""
    arc = LeafArc(len(NAMES))
    for number, name in enumerate(NAMES):
        arc.add(KEY[name], None, number % 2)
    if is_often:
        arc.touch(KEY.values())
    arc.check()
    queue = arc._tenants[1].list_of(is_often)
    queue.heap.clear()
    queue._old.clear()
    with pytest.raises(AssertionError, match="a leaf is not up for eviction"):
        arc.check()


def test_evicting_a_long_text_costs_the_same_for_each_chunk() -> None:
    """A text of 2,000 chunks leaves no stale entries behind as it comes: none of its chunks pays for the others."""
    arc, text = LeafArc(2_001), chain("text", 2_000)
    for chunk in [*chain("older", 1), *text]:
        arc.add(chunk.key, chunk.parent)

    def evict() -> None:
        victim = arc.victim(0, everything)
        assert victim is not None
        arc.remove(victim, evicted=True)

    costs = [operations(evict) for _ in text[:200]]
    assert max(costs) < 15 * sorted(costs)[100]
    arc.check()


def test_no_use_pays_for_the_stale_entries_of_others() -> None:
    """Among 4,000 chunks that are used again and again, no use costs much more than another: stale entries are dropped
    a few at a time, and each chunk is evicted in its turn all the same."""
    arc, text = LeafArc(4_000), [Chunk(ChunkKey(n.to_bytes(32)), None) for n in range(4_000)]
    for chunk in text:
        arc.add(chunk.key, None)
    uses = [operations(lambda chunk=chunk: arc.touch([chunk.key])) for _ in range(4) for chunk in text]  # type: ignore[misc]
    assert max(uses) < 10 * min(uses)
    arc.check()
    for chunk in text[:100]:
        assert arc.victim(0, everything) == chunk.key
        arc.remove(chunk.key, evicted=True)
        arc.check()


@given(order=st.permutations(NAMES), tenants=st.lists(st.sampled_from(TENANTS), min_size=12, max_size=12))
def test_adopting_is_adding(order: list[str], tenants: list[int]) -> None:
    """Chunks that are adopted at once go in the same order as chunks added one by one, whatever comes first."""
    adopted, added = (LeafArc(len(NAMES), SHARES["given floors"]) for _ in range(2))
    chunks = [(KEY[name], parent_key(name), tenant) for name, tenant in zip(order, tenants, strict=True)]
    adopted.adopt(chunks)
    for chunk in chunks:
        added.add(*chunk)
    adopted.check()
    assert adopted.tenants() == added.tenants()
    for _ in chunks:
        victim = adopted.victim(tenants[0], everything)
        assert victim == added.victim(tenants[0], everything)
        if victim is None:
            break
        adopted.remove(victim, evicted=True)
        added.remove(victim, evicted=True)
        adopted.check()


def test_adoption_comes_first_and_once() -> None:
    """Adopting after anything came, or the same chunk twice, is a bug of the caller."""
    arc = LeafArc(4)
    arc.add(KEY["a"], None)
    with pytest.raises(ValueError, match="before"):
        arc.adopt([])
    with pytest.raises(ValueError, match="twice"):
        LeafArc(4).adopt([(KEY["a"], None, 0), (KEY["a"], None, 0)])


def test_a_scan_leaves_what_is_reused() -> None:
    """Texts used again and again stay through floods of which each is nearly as large as the tier; LRU keeps none."""
    texts = [chain(f"reused {n}", 6) for n in range(10)]
    floods = [[chain(f"flood {turn} {n}", 8) for n in range(10)] for turn in range(30)]
    rates = {}
    for policy in (LeafArc(100), LeafLru(100)):
        found = []
        for turn, flood in enumerate(floods):
            found.append(sum(serve(policy, text) for text in texts) / 60)
            for text in flood if turn else []:
                serve(policy, text)
        rates[type(policy)] = sum(found[2:]) / len(found[2:])
    print(f"hit rates of what is reused: ARC {rates[LeafArc]:.3f}, LRU {rates[LeafLru]:.3f}")
    assert rates[LeafLru] == 0
    assert rates[LeafArc] >= 0.95


@pytest.mark.parametrize("make", BOTH)
@pytest.mark.parametrize("working_set", [0.25, 0.24, 0.15])
@pytest.mark.parametrize("length", [1, 7, 40])
def test_a_flood_costs_others_nothing_within_their_floor(make: type[LeafArc], working_set: float, length: int) -> None:
    """One-time texts of one tenant cost another, whose working set fits its floor, at most 5 points of hit rate."""
    rates = []
    for flooded in (False, True):
        rng, arc, hits, asked = random.Random(1), make(400), 0, 0
        texts = [chain(f"B {n}", 5) for n in range(int(400 * working_set) // 5)]
        for n in range(1500):
            text = rng.choice(texts)
            hits += serve(arc, text, tenant=2)
            asked += len(text)
            for m in range(rng.randrange(8)):
                if flooded:
                    serve(arc, chain(f"A {n} {m}", length), tenant=1)
        arc.check()
        rates.append(hits / asked)
    print(f"hit rate of B, {working_set:.0%} of the tier: alone {rates[0]:.3f}, beside a flood {rates[1]:.3f}")
    assert rates[0] - rates[1] <= 0.05


@pytest.mark.parametrize("make", BOTH)
def test_a_flood_that_comes_first_gives_way(make: type[LeafArc]) -> None:
    """A tenant that comes to a full tier gets to its floor at the others' expense, not by pushing out its own."""
    arc = make(100)
    for n in range(100):
        store(arc, f"A {n}", 1)
    for n in range(25):
        store(arc, f"B {n}", 2)
    assert arc.tenants() == {1: 75, 2: 25}


@pytest.mark.parametrize("make", BOTH)
@pytest.mark.parametrize("pattern", ["in turns", "at random"])
def test_an_idle_tenant_gives_way(make: type[LeafArc], pattern: str) -> None:
    """A working set that fits the tier gets its room from a tenant that went away, down to that one's floor."""
    rng, arc = random.Random(1), make(400)
    for _ in range(3000):
        serve(arc, chain(f"gone {rng.randrange(80)}", 5), tenant=1)
    assert arc.tenants() == {1: 400}
    texts = [chain(f"new {n}", 5) for n in range(56)]
    found = [serve(arc, texts[n % 56] if pattern == "in turns" else rng.choice(texts), tenant=2) for n in range(3000)]
    assert arc.tenants()[1] >= 100
    assert sum(found[-1000:]) >= 0.95 * 5000


@pytest.mark.parametrize("make", BOTH)
def test_nobody_pays_below_the_floor(make: type[LeafArc]) -> None:
    """Whatever tenants do, another's chunk goes only while that one holds more than its floor."""
    rng, arc = random.Random(3), make(60, Shares(by_tenant={1: Share(floor=0.5), 2: Share(floor=0.1, quota=0.2)}))
    for n in range(5000):
        tenant = rng.choice([1, 2, 3, 3, 3, 4])
        name = f"{tenant} {rng.randrange(40)}" if rng.random() < 0.5 else f"{tenant} {n} once"
        before = arc.tenants()
        if key_of(name) in arc:
            arc.touch([key_of(name)])
        elif store(arc, name, tenant):
            payers = [each for each, count in before.items() if each != tenant and arc.tenants().get(each, 0) < count]
            sharing = len(before.keys() - {1, 2})
            for each in payers:
                floor = {1: 30, 2: 6}.get(each, int(60 * 0.5 * 0.4 / max(1, sharing)))
                assert before[each] > floor
        assert arc.tenants().get(2, 0) <= 12
        arc.check()


@pytest.mark.parametrize("make", BOTH)
def test_at_its_quota_a_tenant_makes_room_itself(make: type[LeafArc]) -> None:
    """A tenant never holds more than its quota, and there only its own chunks go, or none."""
    arc = make(10, Shares(by_tenant={1: Share(quota=0.3)}))
    arc.add(KEY["a"], None, 2)
    for n in range(3):
        assert arc.may_add(1)
        arc.add(key_of(f"own {n}"), None, 1)
    assert not arc.may_add(1) and arc.may_add(2)
    assert arc.victim(1, everything) == key_of("own 0")
    assert arc.victim(1, lambda key: key == KEY["a"]) is None
    assert make(10, Shares(by_tenant={1: Share(quota=0.0)})).victim(1, everything) is None


@pytest.mark.parametrize("make", BOTH)
def test_old_protected_chunks_are_passed_as_one(make: type[LeafArc], monkeypatch: pytest.MonkeyPatch) -> None:
    """A victim is found with a handful of questions though thousands of protected chunks are the oldest."""
    arc = make(20_000, Shares(by_tenant={1: Share(floor=0.5)}))
    arc.adopt([(key_of(f"protected {n}"), None, 1) for n in range(10_000)])
    for n in range(10_000):
        arc.add(key_of(f"other {n}"), None, 2)
    asked: list[ChunkKey] = []
    steps = 0
    is_leaf = arc._is_leaf

    def counted(leaf: tuple[int, ChunkKey]) -> bool:
        nonlocal steps
        steps += 1
        return is_leaf(leaf)

    for held in arc._tenants.values():
        held.once._is_leaf = held.often._is_leaf = counted
    first = Line.first

    def asked_first(line: Line) -> tuple[int, ChunkKey] | None:
        nonlocal steps
        steps += 1
        return first(line)

    monkeypatch.setattr(Line, "first", asked_first)
    for n in range(1000):
        victim = arc.victim(2, lambda key: not asked.append(key))
        assert victim == key_of(f"other {n}")
        arc.remove(victim, evicted=True)
        arc.add(key_of(f"new {n}"), None, 2)
    assert len(asked) == 1000 and steps < 10_000


@pytest.mark.parametrize("make", BOTH)
@pytest.mark.parametrize("evicted", [True, False])
def test_forgotten_chunks_leave_no_ghost(make: type[LeafArc], evicted: bool) -> None:
    """An evicted chunk that comes back was used twice, and outlives newer ones; a forgotten one is as new."""
    arc = make(20)
    for n in range(20):
        store(arc, f"old {n}", 0)
    arc.remove(key_of("old 0"), evicted=evicted)
    store(arc, "old 0", 0)
    for n in range(20):
        store(arc, f"new {n}", 0)
    assert (key_of("old 0") in arc) == evicted


@pytest.mark.parametrize("make", BOTH)
def test_ghosts_are_bounded(make: type[LeafArc]) -> None:
    """However much was evicted, no more ghosts are kept than the tier holds chunks."""
    rng, arc = random.Random(0), make(50, Shares(by_tenant={1: Share(quota=0.1)}))
    most = 0
    for n in range(3000):
        serve(arc, chain(f"text {rng.randrange(60) if n % 2 else n}", rng.randrange(1, 6)), tenant=n % 3)
        arc.check()
        ghosts = sum(len(held.once.ghosts) + len(held.often.ghosts) for held in arc._tenants.values())
        assert ghosts <= 50
        most = max(most, ghosts)
    assert most > 25


@pytest.mark.parametrize("make", BOTH)
def test_a_flood_moves_nobody_elses_target(make: type[LeafArc]) -> None:
    """What one tenant's chunks do leaves the balance between another's lists alone, and its ghosts."""
    arc = make(200)
    rng = random.Random(5)
    for _ in range(600):
        serve(arc, chain(f"B {rng.randrange(120)}", 2), tenant=2)
    held = arc._tenants[2]
    target, ghosts = held.target, [*held.once.ghosts, *held.often.ghosts]
    assert ghosts
    for n in range(500):
        serve(arc, chain(f"A {n % 90 if n % 3 else n}", 2), tenant=1)
    assert held.target == target != 0.5
    assert set(ghosts) & {*held.once.ghosts, *held.often.ghosts}


@pytest.mark.parametrize(
    "build",
    [
        lambda: Share(quota=1.5),
        lambda: Share(floor=0.5, quota=0.4),
        lambda: Share(floor=-0.1),
        lambda: Share(quota=float("nan")),
        lambda: Shares(default_floor=2.0),
        lambda: Shares(by_tenant={1: Share(floor=0.6), 2: Share(floor=0.6)}),
    ],
)
def test_shares_that_cannot_be_kept_are_refused(build: object) -> None:
    """A share that is no fraction, a floor above the quota, and floors that exceed the tier are errors at once."""
    with pytest.raises(ValueError):
        build()  # type: ignore[operator]
