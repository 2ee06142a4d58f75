"""Small copies of a tier: they see a sample in its order, and the way that finds clearly more is chosen."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotspan.core.requests import STOP, Request
from hotspan.simulate.caches import BlockCache, LearnedCache, Lru, TierCache
from hotspan.tiers.duel import WHOLE, Duel, sample_mask
from hotspan.tiers.eviction import LeafArc
from hotspan.tiers.retention import LeafRetention, Order, _LeafLru


def found(cache: BlockCache, texts: list[tuple[int, ...]], ending: str = STOP) -> int:
    """How many blocks of these texts are there, asked for in order."""
    hits = 0
    for keys in texts:
        hits += cache.prefix(keys, 0, len(keys))
        cache.use(keys)
        cache.ended(Request(0.0, 256 * len(keys), 1, keys, finish_reason=ending))
    return hits


def drawn(rng: random.Random, texts: int) -> list[tuple[int, ...]]:
    """Texts with one beginning, of which some are asked for often and others once."""
    return [
        (0, 1, *range(n * 10, n * 10 + 5))
        for n in (rng.choice((rng.randrange(1, 12), 100 + at)) for at in range(texts))
    ]


def test_the_sample_is_as_large_as_a_copy() -> None:
    """A small tier is copied whole; of a large one so many chunks are seen that a copy has half of WHOLE or more."""
    assert sample_mask(1) == sample_mask(WHOLE) == 0
    for capacity in (WHOLE + 1, 5000, 1 << 20, 10_000_000):
        mask = sample_mask(capacity)
        assert mask & (mask + 1) == 0 and WHOLE / 2 <= capacity / (mask + 1) <= WHOLE


@pytest.mark.parametrize("seed", range(3))
def test_a_whole_copy_finds_what_its_policy_finds(seed: int) -> None:
    """Copied whole, ARC and LRU find in their copies what tiers of theirs would, to within a chunk in a hundred."""
    texts = drawn(random.Random(seed), 600)
    cache = LearnedCache(60)
    duel = cache._retention._duel
    assert duel is not None
    counted = dict.fromkeys(Order, 0)
    for keys in texts:
        found(cache, [keys], "")
        for way in Order:
            counted[way] += duel._ways[way].found
    alone = {Order.ARC: found(TierCache(60, LeafArc(60)), texts), Order.LRU: found(Lru(60), texts)}
    asked = sum(map(len, texts))
    for way, hits in alone.items():
        assert abs(counted[way] - hits) <= 0.02 * asked, (way, counted[way], hits)


def test_what_finds_clearly_more_is_chosen() -> None:
    """Of two copies of which one never finds anything, the other is chosen, and stays."""
    lru, none = _LeafLru(10), _LeafLru(10)
    duel = Duel(10, 0, {0: none, 1: lru})
    none.add = lambda key, parent, tenant=0: None  # type: ignore[method-assign]
    assert duel.best == 0
    for _ in range(30):
        duel.begin([], [])
        for n in range(5):
            duel.ask(n, None)  # type: ignore[arg-type]
    assert duel.best == 1


def test_equal_ways_leave_the_first_one() -> None:
    """Nothing changes where no way finds more than another."""
    duel = Duel(10, 0, {0: _LeafLru(10), 1: _LeafLru(10)})
    rng = random.Random(1)
    for _ in range(200):
        duel.begin([], [])
        for _ in range(4):
            duel.ask(rng.randrange(20), None)  # type: ignore[arg-type]
    assert duel.best == 0


def test_the_order_follows_the_best_way() -> None:
    """A tier whose duel has ARC for its best evicts as ARC does: by the same lists, targets and ghosts."""
    policy = LeafRetention(50)
    arc, ours = TierCache(50, LeafArc(50)), TierCache(50, policy)
    assert policy._duel is not None
    policy._duel.best = Order.ARC
    policy._duel._judge = lambda: None  # type: ignore[method-assign]  # it stays the best
    for keys in drawn(random.Random(5), 500):
        assert found(arc, [keys]) == found(ours, [keys])
    assert policy._order == Order.ARC


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 1000), capacity=st.integers(1, 40), best=st.sampled_from(list(Order)))
def test_the_books_agree_whatever_is_best(seed: int, capacity: int, best: Order) -> None:
    """Also where the best way changes in between, and where chunks are deleted."""
    rng, cache = random.Random(seed), LearnedCache(capacity)
    policy = cache._retention
    for at, keys in enumerate(drawn(rng, 40)):
        if at % 7 == 0 and policy._duel is not None:
            policy._duel.best = rng.choice(list(Order)) if at else best
        found(cache, [keys])
        if rng.random() < 0.2 and len(policy):
            policy.remove(rng.choice([key for key in policy._nodes if policy.is_leaf(key)]))
        policy.check()
        assert len(policy) <= capacity
        for way in policy._duel._ways.values() if policy._duel is not None else ():
            assert isinstance(way.copy, LeafArc)
            assert way.copy.size <= capacity
            way.copy.check()


def test_a_large_tier_has_small_copies() -> None:
    """Of ten times as many chunks: the copies stay below WHOLE, and nothing is followed that is not of the sample."""
    policy = LeafRetention(10 * WHOLE)
    cache = TierCache(10 * WHOLE, policy)
    for n in range(300):
        found(cache, [tuple(range(n * 50, n * 50 + 50))])
    assert policy._duel is not None
    for way in policy._duel._ways.values():
        assert 0 < len(way.copy._nodes) <= WHOLE  # type: ignore[attr-defined]
        assert all(policy._duel.sees(key) for key in way.copy._nodes)  # type: ignore[attr-defined]
