"""Eviction: the least recently used leaf goes, and nothing else."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hotspan.core.types import ChunkKey
from hotspan.testing.chunks import key_of
from hotspan.tiers.eviction import LeafLru

NAMES = "abcdefgh"
PARENT = {"a": None, "b": "a", "c": "b", "d": "b", "e": "a", "f": None, "g": "f", "h": "d"}
KEY: dict[str, ChunkKey] = {name: key_of(name) for name in NAMES}
NAME = {key: name for name, key in KEY.items()}


def parent_key(name: str) -> ChunkKey | None:
    """The key of the parent in the fixed tree."""
    parent = PARENT[name]
    return None if parent is None else KEY[parent]


class Eviction(RuleBasedStateMachine):
    """LeafLru against a list in the order of use, over chunks of a fixed tree that come in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.lru = LeafLru()
        self.used: list[str] = []  # least recently used first

    @rule(name=st.sampled_from(NAMES))
    def add(self, name: str) -> None:
        if name in self.used:
            with pytest.raises(ValueError):
                self.lru.add(KEY[name], parent_key(name))
        else:
            self.lru.add(KEY[name], parent_key(name))
            self.used.append(name)

    @rule(names=st.lists(st.sampled_from(NAMES), max_size=4))
    def touch(self, names: list[str]) -> None:
        self.lru.touch([KEY[name] for name in names])
        for name in names:
            if name in self.used:
                self.used.remove(name)
                self.used.append(name)

    @rule(name=st.sampled_from(NAMES))
    def remove(self, name: str) -> None:
        self.lru.remove(KEY[name])
        if name in self.used:
            self.used.remove(name)

    @rule(pinned=st.sets(st.sampled_from(NAMES)), take=st.booleans())
    def victim(self, pinned: set[str], take: bool) -> None:
        parents = {PARENT[name] for name in self.used}
        leaves = [name for name in self.used if name not in parents and name not in pinned]
        found = self.lru.victim(lambda key: NAME[key] not in pinned)
        assert found == (KEY[leaves[0]] if leaves else None)
        if take and found is not None:
            self.remove(NAME[found])

    @invariant()
    def agree(self) -> None:
        self.lru.check()
        assert len(self.lru) == len(self.used)
        assert [name for name in NAMES if KEY[name] in self.lru] == sorted(self.used)


TestEviction = Eviction.TestCase
TestEviction.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_chain_goes_leaf_by_leaf() -> None:
    """A chain touched leaf first is evicted from its end, root last, though the root is the most recently used."""
    lru = LeafLru()
    names = [f"chunk {n}" for n in range(5)]
    for n, name in enumerate(names):
        lru.add(key_of(name), key_of(names[n - 1]) if n else None)
    lru.touch([key_of(name) for name in reversed(names)])
    gone = []
    while (victim := lru.victim(lambda key: True)) is not None:
        gone.append(victim)
        lru.remove(victim)
    assert gone == [key_of(name) for name in reversed(names)]


def test_the_queue_stays_small() -> None:
    """Many touches of few chunks leave only a few stale entries behind."""
    lru = LeafLru()
    for name in NAMES:
        lru.add(KEY[name], None)
    for _ in range(20_000):
        lru.touch(KEY.values())
    assert len(lru._heap) <= 2 * len(NAMES) + 65
    lru.check()
