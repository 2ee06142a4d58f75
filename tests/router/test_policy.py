"""The policy: the least cost in seconds wins, and the strategies with names keep to what their names say."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotspan.core.errors import ConfigError
from hotspan.router.load import Speeds, TierSpeed
from hotspan.router.policy import NEAR_S, NEAR_SHARE, Decision, View, Weights, decide
from hotspan.router.types import Ask, Held, Medium, Strategy

SPEEDS = Speeds(
    tokens_per_s=1000,
    decode_s=0.001,
    tiers={Medium.RAM: TierSpeed(100_000), Medium.DISK: TierSpeed(5_000, 0.1), Medium.L2: TierSpeed(500, 0.1)},
)
ASK = Ask(keys=tuple(range(40)), tokens=4000, piece_tokens=100.0, session=b"s")
IDLE = View("r0", 0, Held(), 0.0, 1000.0, 0, 0.0, 0.0, 0, False, SPEEDS)


def view(name: str, *, gpu: int = 0, ram: int = 0, disk: int = 0, l2: int = 0, **changes: object) -> View:
    """A replica that holds so many pieces in a medium, or in a faster one."""
    ram, disk, l2 = max(gpu, ram), max(gpu, ram, disk), max(gpu, ram, disk, l2)
    return IDLE._replace(name=name, held=Held(gpu, ram, disk, l2), **changes)  # type: ignore[arg-type]


def auto(*views: View, ask: Ask = ASK, weights: Weights | None = None, seed: int = 0) -> Decision:
    """What `auto` decides."""
    return decide(ask, views, Strategy.AUTO, random.Random(seed), weights)


def test_what_is_held_wins_while_the_queue_is_short() -> None:
    """A prefix is worth the seconds of its computing and not one more."""
    assert auto(view("held", gpu=20, queue_s=1.5), view("idle"), weights=Weights(others=0)).name == "held"
    assert auto(view("held", gpu=20, queue_s=2.5), view("idle"), weights=Weights(others=0)).name == "idle"


def test_what_others_wait_counts() -> None:
    """The more requests come, the more a second of computing is worth against one of waiting."""
    held, less = view("held", gpu=20, queue_s=5.0), view("less", queue_s=2.8)
    assert auto(held, less).name == "less"
    assert auto(*(each._replace(arrivals=2.0) for each in (held, less))).name == "held"


def test_own_rates_count() -> None:
    """A replica that is twice as fast is chosen in spite of some queue."""
    assert auto(view("slow"), view("fast", tokens_per_s=2000.0, queue_s=1.0)).name == "fast"


def test_loads_only_what_is_faster_to_load() -> None:
    """Tiers that are slower than computing are left, and those below them are still looked at."""
    decision = auto(view("r", gpu=10, ram=20, disk=30, l2=40))
    assert decision.cached_tokens == 3000
    assert decision.load_s == pytest.approx(0.01 + 0.1 + 0.2)
    assert decision.costs["prefill"] == pytest.approx(1.0)
    fast = replace(SPEEDS, tiers={Medium.L2: TierSpeed(100_000)})
    assert auto(view("r", l2=30, speeds=fast)).cached_tokens == 3000
    slow = {Medium.DISK: TierSpeed(10, 5.0), Medium.L2: TierSpeed(1e9)}
    assert auto(view("r", disk=1, l2=40, speeds=replace(SPEEDS, tiers=slow))).load_s == 0.0


@given(
    held=st.lists(st.integers(0, 40), min_size=4, max_size=4).map(sorted),
    rates=st.lists(st.floats(1, 1e7), min_size=3, max_size=3),
    latency_s=st.floats(0, 10),
    rate=st.floats(1, 1e6),
)
def test_a_load_never_costs_more_than_computing(
    held: list[int], rates: list[float], latency_s: float, rate: float
) -> None:
    """Loading and computing the rest is at most computing all that the GPU has not."""
    media = (Medium.RAM, Medium.DISK, Medium.L2)
    tiers = {medium: TierSpeed(each, latency_s) for medium, each in zip(media, rates, strict=True)}
    one = IDLE._replace(held=Held(*held), tokens_per_s=rate, speeds=replace(SPEEDS, tiers=tiers))
    decision = auto(one)
    computing_s = (ASK.tokens - min(held[0] * 100, ASK.tokens - 1)) / rate
    assert decision.costs["prefill"] + decision.costs["load"] <= computing_s * (1 + 1e-9)
    assert 0 <= decision.cached_tokens < ASK.tokens


def test_a_session_stays_as_far_as_that_saves() -> None:
    """Home wins among equals, and not against a queue that is longer than what it saves."""
    weights = Weights(affinity=0.1, others=0)
    home = view("home", is_home=True, queue_s=0.3)
    assert auto(home, view("b"), weights=weights).session_bound
    assert not auto(home._replace(queue_s=0.5), view("b"), weights=weights).session_bound


def test_near_equals_are_drawn() -> None:
    """All that are as good get their share, and none that is worse."""
    views = [view(f"r{n}", queue_s=0.0005 * n) for n in range(3)] + [view("worse", queue_s=0.5)]
    count = Counter(auto(*views, seed=seed).name for seed in range(600))
    assert set(count) == {"r0", "r1", "r2"}
    assert min(count.values()) > 130
    assert auto(*views).near == 3
    assert {auto(view("a"), view("b"), seed=seed).name for seed in range(20)} == {"a", "b"}


@given(st.lists(st.tuples(st.integers(0, 40), st.floats(0, 100), st.integers(0, 50)), min_size=1, max_size=8))
def test_nobody_costs_less(replicas: list[tuple[int, float, int]]) -> None:
    """The chosen one's terms add up to no more than any other's alone, but for what counts as equal."""
    views = [
        view(f"r{n}", gpu=gpu, queue_s=queue_s, decode_s=0.1 * flying)
        for n, (gpu, queue_s, flying) in enumerate(replicas)
    ]
    chosen = sum(auto(*views).costs.values())
    least = min(sum(auto(each).costs.values()) for each in views)
    assert chosen <= least + max(NEAR_S, NEAR_SHARE * least) + 1e-9


def test_answers_that_slow_down_count() -> None:
    """A short wait does not make up for an answer that takes much longer."""
    assert auto(view("busy", gpu=20, decode_s=9.0), view("idle")).name == "idle"
    assert auto(view("busy", gpu=20, decode_s=3.0), view("idle")).name == "busy"


def test_round_robin_takes_turns() -> None:
    """The one whose turn is the longest ago, whatever else."""
    views = [view("a", turn=7, gpu=40), view("b", turn=3, queue_s=99.0), view("c", turn=5)]
    assert decide(ASK, views, Strategy.ROUNDROBIN, random.Random(0)).name == "b"


def test_session_knows_no_load() -> None:
    """`session` goes home however long the queue; a request without one takes its turn."""
    views = [view("a", is_home=True, queue_s=99.0), view("b")]
    decision = decide(ASK, views, Strategy.SESSION, random.Random(0))
    assert (decision.name, decision.session_bound) == ("a", True)
    assert decide(ASK, [view("a", turn=1), view("b")], Strategy.SESSION, random.Random(0)).name == "b"


@pytest.mark.parametrize("strategy", [Strategy.PREFIXAWARE, Strategy.KVAWARE])
def test_longest_prefix_below_the_threshold(strategy: Strategy) -> None:
    """The longest match and not the first one, until it has its share in flight; then the next, then the least busy."""
    weights, rng = Weights(threshold=4), random.Random(0)
    short, long, none = view("short", gpu=5, in_flight=1), view("long", gpu=9, in_flight=3), view("none", in_flight=2)
    assert decide(ASK, [short, long, none], strategy, rng, weights).name == "long"
    assert decide(ASK, [short, long._replace(in_flight=4), none], strategy, rng, weights).name == "short"
    busy = [each._replace(in_flight=each.in_flight + 4) for each in (short, long, none)]
    assert decide(ASK, busy, strategy, rng, weights).name == "short"
    assert decide(ASK, [none, none._replace(name="idle", in_flight=0)], strategy, rng, weights).name == "idle"


@pytest.mark.parametrize("strategy", list(Strategy))
def test_costs_are_told_by_every_strategy(strategy: Strategy) -> None:
    """In the same terms, so that strategies can be compared."""
    decision = decide(ASK, [view("r", gpu=10, queue_s=0.5, decode_s=0.4)], strategy, random.Random(0))
    assert decision.costs["queue"] == 0.5
    assert decision.costs["prefill"] == pytest.approx(3.0)
    assert decision.costs["decode"] == pytest.approx(0.2)
    assert (decision.cached_tokens, decision.strategy) == (1000, strategy)


def test_bad_input() -> None:
    """No replica is the caller's bug, and weights that can't be are refused."""
    with pytest.raises(ValueError, match="no replica"):
        decide(ASK, [], Strategy.AUTO, random.Random(0))
    for weights in ({"affinity": 2.0}, {"others": -1.0}, {"decode": -1.0}, {"threshold": 0}):
        with pytest.raises(ConfigError, match="can't be"):
            Weights(**weights)
    Weights(affinity=0, others=0, decode=0, threshold=1)
    Weights(affinity=1)
