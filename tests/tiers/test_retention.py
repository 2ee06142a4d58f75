"""Retention that learns: leaves go by what their kind is worth, within the same floors, quotas and books as ARC."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotspan.core.requests import LENGTH, STOP, TOOL_CALLS, Request
from hotspan.simulate.caches import ENDINGS, EVICTIONS, BlockCache, LearnedCache, Lru, TierCache, make_cache
from hotspan.testing.chunks import chain, key_of
from hotspan.tiers.eviction import LeafArc
from hotspan.tiers.retention import Ending, LeafRetention
from hotspan.tiers.uses import AGES, KINDS, Use, Uses, _indices
from tests.tiers.test_eviction import KEY, NAMES, PARENT, TENANTS, parent_key, serve


def ask(cache: BlockCache, keys: tuple[int, ...], finish_reason: str = "") -> int:
    """A request that ends so; how many of its blocks were there."""
    found = cache.prefix(keys, 0, len(keys))
    cache.use(keys)
    cache.ended(Request(0.0, 256 * len(keys), 1, keys, finish_reason=finish_reason))
    return found


steps = st.lists(
    st.tuples(
        st.sampled_from(["add", "touch", "end", "remove", "forget", "victim"]),
        st.sampled_from(NAMES),
        st.sampled_from(TENANTS),
        st.sampled_from(list(Ending)),
    ),
    max_size=120,
)


@settings(deadline=None)
@given(steps=steps, capacity=st.integers(1, 8))
def test_the_books_agree_and_only_leaves_go(steps: list[tuple[str, str, int, Ending]], capacity: int) -> None:
    """Whatever comes, ends and goes in whatever order: every leaf is up for eviction, and only one that may go goes."""
    policy = LeafRetention(capacity)
    for what, name, tenant, ending in steps:
        key = KEY[name]
        if what == "add" and key not in policy:
            if len(policy) >= capacity or not policy.may_add(tenant):
                found = policy.victim(tenant, lambda each: each != parent_key(name))  # noqa: B023
                if found is None:
                    continue
                assert policy.is_leaf(found) and found != parent_key(name)
                policy.is_worth(key, parent_key(name), found)
                policy.remove(found, evicted=True)
            policy.add(key, parent_key(name), tenant)
        elif what == "touch":
            policy.touch([key, *([KEY[above]] if (above := PARENT[name]) else [])])
        elif what == "end":
            policy.ended(key, ending)
        elif what in ("remove", "forget"):
            policy.remove(key, evicted=what == "remove")
        elif what == "victim" and (found := policy.victim(tenant, lambda each: True)) is not None:
            assert policy.is_leaf(found)
        policy.check()
        policy.uses.check()


def test_what_is_never_used_again_goes_in_the_order_of_use() -> None:
    """With one kind, whose value falls with age, every victim is the least recently used leaf."""
    policy = LeafRetention(50)
    for n in range(1000):
        if len(policy) == 50:
            victim = policy.victim(0, lambda each: True)
            assert victim == key_of(f"text {n - 50}")
            policy.remove(victim, evicted=True)
        policy.add(key_of(f"text {n}"), None)


def test_what_ended_with_a_tool_call_outlives_what_ended_a_turn() -> None:
    """Tool calls return at once and ended turns never: once that was seen, an older tool call stays, a turn goes."""
    cache = LearnedCache(100)
    for n in range(200):
        tool, turn = tuple(range(n * 20, n * 20 + 6)), tuple(range(10_000 + n * 20, 10_000 + n * 20 + 6))
        ask(cache, tool, TOOL_CALLS)
        ask(cache, turn, STOP)
        ask(cache, tool, TOOL_CALLS)
    policy = cache._retention
    waits = tuple(range(90_000, 90_006))
    ask(cache, waits, TOOL_CALLS)
    for n in range(30):  # nearly twice the tier
        ask(cache, tuple(range(50_000 + n * 20, 50_000 + n * 20 + 6)), STOP)
    assert ask(cache, waits, TOOL_CALLS) == 6
    policy.check()


def test_documents_in_turn_are_found_from_the_second_round_on() -> None:
    """40 texts asked in turn, with room for 20: LRU and ARC find none, this at least 70 % of what Belady finds."""
    found: dict[str, int] = {}
    for name in EVICTIONS:
        cache = make_cache(name, 120)
        texts = [tuple(range(n * 6, n * 6 + 6)) for n in range(40)]
        found[name] = sum(ask(cache, text, STOP) for _ in range(5) for text in texts)
    belady = 4 * 20 * 6
    print(f"documents in turn: {found}, Belady {belady}")
    assert found["lru"] == found["arc"] == 0
    assert found["learned"] >= 0.7 * belady


def test_a_scan_costs_what_is_reused_nothing_once_it_was_seen() -> None:
    """From the fourth flood on, texts that are used again and again stay through floods as large as the tier."""
    texts = [chain(f"reused {n}", 6) for n in range(10)]
    policy, found = LeafRetention(100), []
    for turn in range(30):
        found.append(sum(serve(policy, text) for text in texts) / 60)
        for text in [chain(f"flood {turn} {n}", 8) for n in range(10)] if turn else []:
            serve(policy, text)
    print(f"found of what is reused: {found}")
    assert sum(found[4:]) / len(found[4:]) >= 0.95


def test_a_text_that_ends_badly_does_not_come_at_the_expense_of_a_better_one() -> None:
    """A chunk is not worth its room behind a text whose kind never returns, and always where nothing is known."""
    cache = LearnedCache(60)
    for n in range(300):
        ask(cache, tuple(range(n * 20, n * 20 + 6)), LENGTH)
        for _ in range(2):
            ask(cache, tuple(range(90_000, 90_012)), TOOL_CALLS)
    policy = cache._retention
    never, always = max(each for each in policy._nodes if each < 90_000), 90_011
    assert policy.is_worth(7_777_777, always, never) and policy.is_worth(7_777_777, None, always)  # type: ignore[arg-type]
    assert not policy.is_worth(7_777_777, never, always)  # type: ignore[arg-type]


def test_what_was_learned_is_kept_over_a_restart() -> None:
    """What is known after `restore` is what was, also through JSON; what is no state is refused and changes nothing."""
    cache = LearnedCache(100)
    for n in range(300):
        ask(cache, tuple(range(n % 25 * 8, n % 25 * 8 + 8)), TOOL_CALLS if n % 3 else STOP)
    state = json.loads(json.dumps(cache._retention.uses.state()))
    restored = Uses(100)
    assert restored.restore(state) and restored.values().keys() <= cache._retention.uses.values().keys()
    assert restored.state()["figures"].keys() == state["figures"].keys()
    for wrong in (None, {}, {**state, "version": 2}, {**state, "figures": {"0": [[1.0], [1.0]]}}, "text"):
        other = Uses(100)
        assert not other.restore(wrong) and not other.values()


def test_values_fall_with_a_falling_hazard_and_rise_before_a_certain_return() -> None:
    """The index is highest just before the age at which all return, and falls where the hazard falls."""
    widths = [2 ** (n / 3) for n in range(AGES)]
    falling = _indices([0.5 / (1 + n) for n in range(AGES)], widths, AGES)
    assert falling == sorted(falling, reverse=True)
    certain = _indices([1.0 if n == 30 else 0.0 for n in range(AGES)], widths, AGES)
    assert certain[:31] == sorted(certain[:31]) and max(certain) == certain[30]


def test_kinds_are_bounded_and_follow_what_is_known() -> None:
    """Every use has one of KINDS kinds; how it ended, who made it and its rhythm tell them apart."""
    kinds = {
        Use(int(ending), rhythm, is_subagent).kind(is_often=is_often)
        for ending in Ending
        for rhythm in (-1.0, *(0.5 * n for n in range(80)))
        for is_subagent in (False, True)
        for is_often in (False, True)
    }
    assert len(kinds) == 2 + 4 * 2 * 12 and max(kinds) < KINDS and min(kinds) == 0


def test_memory_is_bounded() -> None:
    """However many texts come, no more are followed than there is room for, nor more lists kept than kinds."""
    policy, rng = LeafRetention(64), random.Random(1)
    for n in range(4000):
        serve(policy, chain(f"text {rng.randrange(40) if n % 2 else n}", 3), tenant=n % 3)
        policy.ended(key_of(f"text {n}"), rng.choice(list(Ending)))
    policy.check()
    policy.uses.check()
    tenants = policy._tenants.values()
    assert all(len(held.lines) <= 2 * KINDS for held in tenants)
    assert sum(len(line) for held in tenants for line in held.lines.values()) <= len(policy) <= 64
    assert all(len(line._odd.entries()) <= 2 * 64 + 65 for held in tenants for line in held.lines.values())


@pytest.mark.parametrize("name", EVICTIONS)
def test_every_policy_of_the_simulator_is_told_how_requests_end(name: str) -> None:
    """Each has `ended`, and an ending that is unknown is one."""
    cache = make_cache(name, 10)
    assert isinstance(cache, Lru | TierCache)
    assert ask(cache, (1, 2), "made up") == 0 and ask(cache, (1, 2), STOP) == 2
    assert set(ENDINGS.values()) == set(Ending) - {Ending.UNKNOWN}


def test_it_is_arc_for_tenants() -> None:
    """Floors and quotas are those of the class that it extends; only what goes within a tenant differs."""
    assert {LeafRetention.floor, LeafRetention.may_add} == {LeafArc.floor, LeafArc.may_add}
