"""The index: it says what a plain table of sets would say, in bounded memory, and at worst knows less."""

import random
import tracemalloc
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hotspan.core.errors import ConfigError
from hotspan.core.types import MIB
from hotspan.router.index import _MASK_BYTES, ASSUMED, LEAST_BYTES, SHARED, PrefixIndex, _max_entries
from hotspan.router.types import Held, Medium

REPLICAS = range(5)
KINDS = (Medium.GPU, Medium.RAM, Medium.DISK, Medium.L2, ASSUMED)
LEVEL = {Medium.GPU: 0, ASSUMED: 0, Medium.RAM: 1, Medium.DISK: 2}
KEYS = [random.Random(7).getrandbits(64) for _ in range(12)]

Table = dict[int, set[tuple[int, int]]]


def place(replica: int, kind: int) -> tuple[int, int]:
    """Where the table has it: L2 is one for all."""
    return (SHARED if kind == Medium.L2 else replica, kind)


def naive(table: Table, keys: Sequence[int], assumed_only: bool = False) -> dict[int, Held]:
    """What `match` has to say, the slow way."""
    found = {}
    for replica in (SHARED, *REPLICAS):
        lengths = []
        for level in range(4):
            kinds = {kind for kind, at in LEVEL.items() if at <= level and not (assumed_only and kind != ASSUMED)}
            places = {(replica, kind) for kind in kinds}
            if level == 3 and not assumed_only:
                places.add((SHARED, Medium.L2))
            lengths.append(next((n for n, key in enumerate(keys) if not places & table.get(key, set())), len(keys)))
        found[replica] = Held(*lengths)
    return found


class Index(RuleBasedStateMachine):
    """PrefixIndex against sets, with room for all."""

    @initialize()
    def begin(self) -> None:
        self.index = PrefixIndex(MIB)
        self.table: Table = {}

    @rule(replica=st.sampled_from(REPLICAS), kind=st.sampled_from(KINDS), keys=st.lists(st.sampled_from(KEYS)))
    def add(self, replica: int, kind: int, keys: list[int]) -> None:
        self.index.add(replica, kind, keys)
        for key in keys:
            self.table.setdefault(key, set()).add(place(replica, kind))

    @rule(replica=st.sampled_from(REPLICAS), kind=st.sampled_from(KINDS), keys=st.lists(st.sampled_from(KEYS)))
    def remove(self, replica: int, kind: int, keys: list[int]) -> None:
        self.index.remove(replica, kind, keys)
        for key in keys:
            self.table.get(key, set()).discard(place(replica, kind))

    @rule(replica=st.sampled_from(REPLICAS), kind=st.sampled_from((*KINDS, None)))
    def clear(self, replica: int, kind: int | None) -> None:
        self.index.clear(replica, kind)
        gone = {place(replica, each) for each in (KINDS if kind is None else (kind,))}
        if kind is None:
            gone.discard((SHARED, Medium.L2))
        for places in self.table.values():
            places -= gone

    @precondition(lambda self: hasattr(self, "index"))
    @rule(keys=st.lists(st.sampled_from(KEYS), unique=True), assumed_only=st.booleans())
    def match(self, keys: list[int], assumed_only: bool) -> None:
        found = self.index.match(keys, assumed_only=assumed_only)
        shared = found.get(SHARED, Held())
        for replica, expected in naive(self.table, keys, assumed_only).items():
            assert found.get(replica, shared) == expected, replica

    @invariant()
    def agree(self) -> None:
        if hasattr(self, "index"):
            self.index.check()
            assert self.index.evicted == 0
            assert len(self.index) >= sum(bool(places) for places in self.table.values())


TestIndex = Index.TestCase
TestIndex.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


class Bounded(RuleBasedStateMachine):
    """PrefixIndex with too little room: it never says more than the sets do."""

    @initialize()
    def begin(self) -> None:
        self.index = PrefixIndex(LEAST_BYTES)
        self.table: Table = {}
        self.next = 0

    @rule(replica=st.sampled_from(REPLICAS), kind=st.sampled_from(KINDS), count=st.integers(1, 200))
    def add(self, replica: int, kind: int, count: int) -> None:
        keys = [hash((self.next + n, "piece")) & (1 << 64) - 1 for n in range(count)]
        self.next += count // 2
        self.index.add(replica, kind, keys)
        for key in keys:
            self.table.setdefault(key, set()).add(place(replica, kind))

    @rule(replica=st.sampled_from(REPLICAS))
    def clear(self, replica: int) -> None:
        self.index.clear(replica)
        for places in self.table.values():
            places -= {place(replica, kind) for kind in KINDS if kind != Medium.L2}

    @rule(count=st.integers(1, 100))
    def match(self, count: int) -> None:
        keys = list(self.table)[-count:]
        found = self.index.match(keys)
        for replica, most in naive(self.table, keys).items():
            assert all(held <= bound for held, bound in zip(found.get(replica, Held()), most, strict=True))

    @invariant()
    def fits(self) -> None:
        if hasattr(self, "index"):
            self.index.check()
            assert len(self.index) <= self.index.max_pieces


TestBounded = Bounded.TestCase
TestBounded.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def random_keys(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.getrandbits(64) for _ in range(count)]


def test_longest_prefix_of_each_medium() -> None:
    """A piece in a faster medium counts for the slower ones; what comes after a gap does not count."""
    index = PrefixIndex()
    keys = random_keys(8)
    index.add(0, Medium.GPU, keys[:2])
    index.add(0, Medium.RAM, keys[1:4])
    index.add(0, Medium.DISK, keys[5:])
    index.add(1, Medium.L2, keys[:6])
    assert index.match(keys) == {0: Held(2, 4, 4, 8), SHARED: Held(0, 0, 0, 6)}


def test_cap_holds_and_what_is_asked_for_stays() -> None:
    """Past the cap pieces go, those that nobody asks for first, and each is counted."""
    index = PrefixIndex(MIB)
    asked, others = random_keys(50, 1), random_keys(60_000, 2)
    index.add(0, Medium.GPU, asked)
    for at in range(0, len(others), 100):
        assert index.match(asked) == {0: Held(50, 50, 50, 50)}
        index.add(1, Medium.GPU, others[at : at + 100])
        assert index.bytes <= MIB
    index.check()
    assert index.evicted == 50 + len(others) - len(index)
    assert len(index) == index.max_pieces
    assert index.match(others[-100:]) == {1: Held(100, 100, 100, 100)}
    assert not index.match(others[:100])


@pytest.mark.parametrize("count", [30_000, 90_000])
def test_bytes_are_what_it_takes(count: int) -> None:
    """The size that it tells is within a quarter of what was allocated."""
    tracemalloc.start()
    try:
        index = PrefixIndex()
        for replica in range(4):
            index.add(replica, Medium.GPU, random_keys(count // 4, replica))
        index.match(random_keys(100, 0))
        allocated, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.75 * index.bytes <= allocated <= 1.25 * index.bytes


def test_memory_does_not_pass_the_cap_even_while_it_grows() -> None:
    """The most that was ever allocated stays below the cap, tables that are moved included."""
    cap = 8 * MIB
    rng = random.Random(3)
    tracemalloc.start()
    try:
        index = PrefixIndex(cap)
        for n in range(1500):
            index.add(n % 3, Medium.GPU, [rng.getrandbits(64) for _ in range(100)])
            if n % 400 == 0:
                index.clear(n % 3)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert index.evicted > 0
    assert peak <= cap


def test_many_clears_leave_nothing_behind() -> None:
    """A replica that restarts again and again takes neither bits nor room for good."""
    index = PrefixIndex()
    keys = random_keys(2_000)
    for n in range(300):
        index.add(0, Medium.GPU, keys[n : n + 500])
        index.clear(0)
        assert not index.match(keys)
    index.add(1, Medium.GPU, keys[:10])
    for _ in range(100):
        index.add(1, Medium.GPU, keys[:10])
    index.check()
    assert len(index) == 10
    assert index._bits < 64


@given(count=st.integers(1, 60), seed=st.integers(0, 5))
def test_many_different_masks_are_bounded(count: int, seed: int) -> None:
    """Any number of combinations of places is held, and told right."""
    index = PrefixIndex(LEAST_BYTES)
    rng = random.Random(seed)
    keys = random_keys(100, seed)
    table: Table = {}
    for _ in range(count):
        replica, chosen = rng.choice(REPLICAS), rng.sample(keys, 20)
        index.add(replica, Medium.RAM, chosen)
        for key in chosen:
            table.setdefault(key, set()).add((replica, Medium.RAM))
    index.check()
    for key in keys:
        for replica, held in naive(table, [key]).items():
            assert index.match([key]).get(replica, Held()) == held


def test_too_small_a_cap_is_refused() -> None:
    """The message says what to give."""
    with pytest.raises(ConfigError, match="give it at least"):
        PrefixIndex(1000)


@pytest.mark.parametrize(
    "broken",
    [
        lambda index: index._places.update({(0, 1): index._places[0, 0]}),
        lambda index: index._pieces.update({5: 1}),
        lambda index: index._pieces.update({5: 1 << 40}),
        lambda index: setattr(index, "max_pieces", 0),
        lambda index: index._free.append(index._places[0, 0]),
    ],
)
def test_check_finds(broken: Callable[[PrefixIndex], object]) -> None:
    """`check` can fail."""
    index = PrefixIndex()
    index.add(0, Medium.GPU, [1, 2, 3])
    index.check()
    broken(index)
    with pytest.raises(AssertionError):
        index.check()


@settings(deadline=None, max_examples=30)
@given(st.integers(LEAST_BYTES, 4 * LEAST_BYTES))
def test_pieces_and_masks_share_the_cap(cap_bytes: int) -> None:
    """However many combinations of replicas there are, a quarter of the cap is theirs, and the rest the pieces'."""
    index = PrefixIndex(cap_bytes)
    for n in range(1, index._max_masks):
        for replica in range(n.bit_length()):
            if n >> replica & 1:
                index.add(replica, Medium.GPU, [n])
    index.add(0, Medium.GPU, range(1 << 30, (1 << 30) + index.max_pieces))
    assert len(index) == index.max_pieces <= _max_entries(cap_bytes - index._max_masks * _MASK_BYTES)
    index.check()
