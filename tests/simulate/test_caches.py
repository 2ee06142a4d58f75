"""The caches of simulated replicas."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotspan.simulate.caches import EVICTIONS, Lru, TierCache, make_cache
from hotspan.tiers.eviction import LeafArc

# A prompt is a path in a tree: a block's key is the path to it.
prompts = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=5), min_size=1, max_size=40).map(
    lambda paths: [[int("".join(map(str, path[: n + 1]))) for n in range(len(path))] for path in paths]
)


@pytest.mark.parametrize("name", EVICTIONS)
@given(asked=prompts, capacity=st.integers(1, 12))
def test_changes_tell_what_is_there(name: str, asked: list[list[int]], capacity: int) -> None:
    """Who hears the changes knows what a cache holds: whole prefixes, no more than fit, the last prompt among them."""
    cache, there = make_cache(name, capacity), set[int]()
    for keys in asked:
        came, went = cache.use(keys)
        assert not there & set(came) and set(went) <= there and len(set(came)) == len(came)
        there = (there - set(went)) | set(came)
        assert len(cache) == len(there) <= capacity
        assert all(key // 10 in there for key in there if key > 9)
        assert cache.prefix(keys, 0, len(keys)) == min(len(keys), capacity)
        for other in asked:
            held = next((n for n, key in enumerate(other) if key not in there), len(other))
            assert cache.prefix(other, 0, len(other)) == held


def test_lru_forgets_what_was_used_longest_ago() -> None:
    """The leaf of the prompt that was used longest ago goes first, and its root last."""
    cache = Lru(4)
    cache.use([1, 11])
    cache.use([2, 21])
    cache.use([1])
    assert cache.use([3]).went == [11]
    assert cache.use([4]).went == [21]
    assert cache.use([5]).went == [2]


def test_what_a_tier_was_not_asked_for_was_not_used() -> None:
    """Blocks that the GPU had grow old in a tier, whatever stands on them; what is missing comes all the same."""
    cache = make_cache("arc", 3)
    for keys in ([1], [2], [3]):
        cache.use(keys)
    cache.use([2], range(1))
    cache.use([1], range(1, 1))
    assert cache.use([4], range(0)).went == [1]
    assert cache.use([5, 51], range(0)) == (([5, 51]), [3, 4])


def test_what_may_come_is_asked_with_its_parent() -> None:
    """Each block of a prompt that needs another's room is judged as the one behind the block before it."""
    asked: list[tuple[int, int | None]] = []

    class Watching(TierCache):
        def may_come(self, key: int, parent: int | None, victim: int) -> bool:
            asked.append((key, parent))
            return True

    cache = Watching(3, LeafArc(3))
    cache.use([1, 11, 111])
    assert not asked
    cache.use([2, 21, 211])
    assert asked == [(2, None), (21, 2), (211, 21)]
