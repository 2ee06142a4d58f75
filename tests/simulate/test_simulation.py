"""Whole replays: what comes in comes out, follows from the seed, and shows what routing does."""

import random
import statistics
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotspan.core.trace import Trace
from hotspan.core.types import GIB
from hotspan.router.fleet import Fleet
from hotspan.router.load import TOLD_EVERY_S, Speeds
from hotspan.router.measured import told_by
from hotspan.router.types import Medium, Strategy
from hotspan.simulate.caches import Change
from hotspan.simulate.costs import GB, Costs, Setup, Sizes
from hotspan.simulate.replica import Job
from hotspan.simulate.routers import (
    LEAST_LOAD,
    POLICIES,
    PREFIX_TREE,
    UNTOLD,
    FleetRouter,
    PrefixTree,
    told_speeds,
)
from hotspan.simulate.shapes import SHAPES
from hotspan.simulate.simulation import _SAMPLES, Outcome, Simulation
from tests.simulate.rig import row, setup, workload

ENDLESS = Sizes(gpu_tokens=10**9)


def small(name: str, seed: int = 1, requests: int = 1500) -> Trace:
    """A part of a trace at its full rate."""
    return SHAPES[name].draw(seed, requests)


def replay(made: Trace, policy: str, seed: int = 1, **changes: object) -> Outcome:
    """Over eight replicas."""
    return Simulation(Setup(**changes), policy, seed).run(made)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_replay_follows_from_its_seed(policy: str) -> None:
    """The same trace and seed give the same figures to the last bit."""
    made = small("synthetic", requests=400)
    assert replay(made, policy, 3) == replay(made, policy, 3)


@pytest.mark.parametrize("sizes", [Sizes(409_600), Sizes(409_600, ram_gib=200), Sizes(409_600, 50, 400, 1000)])
def test_a_replica_tells_what_a_real_one_does(sizes: Sizes) -> None:
    """The router is told what it reads in the metrics of a replica of these costs and sizes, and nothing more."""
    costs = Costs(prefill_tokens_per_s=12_345.0, request_step_s=0.5)
    figures = {
        'vllm:cache_config_info{kv_cache_size_tokens="409600"}': 1,
        "hotspan_cost_prefill_tokens_per_second": costs.prefill_tokens_per_s,
        "hotspan_cache_token_bytes": costs.kv_bytes,
        'hotspan_cache_capacity_bytes{tier="ram"}': sizes.ram_gib * GIB,
        'hotspan_cache_capacity_bytes{tier="disk"}': sizes.disk_gib * GIB,
    }
    for medium in (Medium.DISK, Medium.L2):
        tier = f'{{tier="{medium.name.lower()}"}}'
        figures[f"hotspan_cost_bytes_per_second{tier}"] = costs.load_gb_per_s[medium] * GB
        figures[f"hotspan_cost_latency_seconds{tier}"] = costs.load_s[medium]
    page = "\n".join(f"{name} {value}" for name, value in figures.items())
    assert told_speeds(costs, sizes) == told_by(page.encode()).over(Speeds())
    blending = told_by((page + "\nhotspan_blend_up 1").encode()).over(Speeds())
    assert told_speeds(costs, sizes, is_blending=True) == blending


def test_a_rate_is_told_only_once_it_was_measured() -> None:
    """Until a replica has answered, and until it is asked again, the router has its own guess or what it learnt."""
    told: list[float] = []

    class Watching(Fleet):
        def tell(self, name: str, speeds: Speeds, *, is_measured: bool = True) -> None:
            told.extend([self.clock.monotonic()] * is_measured)
            super().tell(name, speeds, is_measured=is_measured)

    simulation = Simulation(Setup(replicas=1, costs=Costs(prefill_tokens_per_s=100.0)), Strategy.AUTO)
    fleet = Watching(clock=simulation._clock)
    simulation._router = FleetRouter(fleet, 1, 512, is_told=True, speeds=told_speeds(Costs(), Sizes()))
    simulation.run(workload(*(row(float(at), keys=[at]) for at in range(40))))
    assert told and min(told) == TOLD_EVERY_S and told[1] == 2 * TOLD_EVERY_S


def test_the_load_is_looked_at_with_each_request_of_a_short_trace() -> None:
    """A long one has a bounded number of looks."""
    short = workload(*(row(float(at), keys=[at]) for at in range(9)))
    assert [each.at_s for each in Simulation(setup(2), Strategy.AUTO).run(short).load] == [*map(float, range(9))]
    long = workload(*(row(float(at), keys=[at]) for at in range(2 * _SAMPLES)))
    assert len(Simulation(setup(2), Strategy.AUTO).run(long).load) == _SAMPLES


rows = st.lists(
    st.tuples(
        st.floats(0, 20, allow_nan=False),
        st.lists(st.integers(0, 3), max_size=4),
        st.integers(1, 511),
        st.integers(0, 200),
    ),
    min_size=1,
    max_size=25,
)


@settings(deadline=None, max_examples=60)
@given(
    made=rows,
    policy=st.sampled_from(POLICIES),
    max_running=st.integers(1, 3),
    gpu_blocks=st.integers(1, 8),
    ram_gib=st.sampled_from([0.0, 0.5, 10.0]),
    eviction=st.sampled_from(["arc", "lru"]),
)
def test_each_request_ends_once(
    made: list[tuple[float, list[int], int, int]],
    policy: str,
    max_running: int,
    gpu_blocks: int,
    ram_gib: float,
    eviction: str,
) -> None:
    """Every request has its first byte after its arrival and its end after that, once; then nothing is in flight."""
    made.sort(key=lambda each: each[0])
    ends: Counter[int] = Counter()
    firsts: Counter[int] = Counter()
    sizes = Sizes(gpu_blocks * 512, ram_gib, 0.0, ram_gib, eviction)
    simulation = Simulation(setup(3, sizes, Costs(max_running=max_running, step_tokens=2)), policy)
    router = simulation._router
    first_byte, end = router.first_byte, router.end

    def on_first(job: Job) -> None:
        firsts[job.index] += 1
        first_byte(job)

    def on_end(job: Job) -> None:
        ends[job.index] += 1
        assert job.arrived_s <= job.began_s < job.first_s <= job.ended_s
        assert job.found + sum(job.loaded.values()) < job.request.tokens
        end(job)

    router.first_byte, router.end = on_first, on_end  # type: ignore[method-assign]
    rows = [
        row(at_s, (hash(tuple(path[: n + 1])) % 2**64 for n in range(len(path))), more=more, answer_tokens=answer)
        for at_s, path, more, answer in made
    ]
    outcome = simulation.run(workload(*rows))
    everyone = Counter(range(len(made)))
    assert firsts == everyone == ends
    assert all(replica.requests == 0 for replica in simulation.replicas)
    assert all(ttft_s > 0 for ttft_s in outcome.ttft_s) and set(outcome.replica) <= {0, 1, 2}


@pytest.mark.parametrize("name", SHAPES)
def test_an_endless_cache_finds_what_was_asked_before(name: str) -> None:
    """One replica with room for all finds the share of blocks that the trace asks for again, within 2 points."""
    made = small(name)
    outcome = replay(made, "roundrobin", replicas=1, sizes=ENDLESS, costs=Costs(prefill_tokens_per_s=1e9))
    assert outcome.hit_rate == pytest.approx(made.facts().asked_before, abs=0.02)


@pytest.mark.parametrize("policy", [*Strategy, UNTOLD, LEAST_LOAD])
def test_a_shared_first_block_sends_nobody_astray(policy: str) -> None:
    """With a system prompt that all requests share, no policy but the tree sends one replica twice its part."""
    made = small("conversation")
    sent = Counter(replay(made, policy).replica)
    assert max(sent.values()) < len(made.requests) / 4


def test_a_tree_without_load_collapses() -> None:
    """What looks at the longest prefix only sends all that share a block to one replica."""
    outcome = replay(small("conversation"), PREFIX_TREE)
    assert max(Counter(outcome.replica).values()) > 0.97 * len(outcome.replica)
    assert statistics.mean(outcome.ttft_s) > 100


@pytest.mark.parametrize("name", ["conversation", "synthetic"])
def test_auto_waits_least(name: str) -> None:
    """On a part of each trace at its full rate, `auto` beats every other policy on mean and p99 TTFT."""
    seeds = (1, 2)
    times: dict[str, list[tuple[float, float]]] = {}
    for policy in POLICIES:
        if policy != UNTOLD:
            for seed in seeds:
                ttft_s = sorted(replay(small(name, seed), policy, seed).ttft_s)
                times.setdefault(policy, []).append((statistics.mean(ttft_s), ttft_s[int(0.99 * len(ttft_s))]))
    mean_s = {policy: statistics.mean(mean for mean, _ in found) for policy, found in times.items()}
    p99_s = {policy: statistics.mean(p99 for _, p99 in found) for policy, found in times.items()}
    assert min(mean_s, key=mean_s.__getitem__) == "auto" == min(p99_s, key=p99_s.__getitem__)


def test_the_router_hears_what_happened_later() -> None:
    """Events come after the first byte and their delay, in order, and tell what came and went."""
    made = setup(1, Sizes(gpu_tokens=2 * 512), event_delay_s=0.5)
    simulation = Simulation(made, "kvaware")
    heard: list[tuple[float, Medium, Change]] = []
    simulation._router.event = lambda replica, medium, change: heard.append(  # type: ignore[method-assign]
        (simulation._clock.now_s, medium, change)
    )
    simulation.run(workload(row(0, [1, 2]), row(0.4, [9]), row(1, [3]), row(1.5, [9]), row(9, [9])))
    assert heard == [
        (1, Medium.GPU, Change([1, 2], [])),
        (1, Medium.GPU, Change([9], [2])),
        (9, Medium.GPU, Change([3], [1])),
        (9, Medium.GPU, Change([], [])),
    ]


def test_who_is_not_told_hears_nothing() -> None:
    """Without events, and for policies that go by their own dispatches, none is delivered."""
    for policy, delay_s in (("kvaware", None), ("prefixaware", 0.0), (UNTOLD, 0.0), ("session", 0.0)):
        simulation = Simulation(setup(1, event_delay_s=delay_s), policy)
        simulation._router.event = lambda *event: pytest.fail("an event")  # type: ignore[method-assign]
        simulation.run(workload(row(0, [1, 2]), row(5, [1, 2]), row(9, [1])))


def test_the_tree_remembers_all_it_sent() -> None:
    """The reference policy goes where the longest beginning went, and anywhere if nothing did."""
    tree = PrefixTree(4, random.Random(1))
    first = tree.send(Job(0, row(0, [1, 2, 3]), 0))
    assert all(tree.send(Job(n, row(0, [1, 2, 40 + n]), 0)) == first for n in range(20))
    assert len({tree.send(Job(n, row(0, [100 + n]), 0)) for n in range(50)}) == 4


@pytest.mark.parametrize("policy", ["auto", "kvaware", "roundrobin"])
def test_tiers_find_more(policy: str) -> None:
    """RAM below a small pool finds more, and shortens the wait."""
    made = small("synthetic")
    without = replay(made, policy, sizes=Sizes(200_000))
    with_ram = replay(made, policy, sizes=Sizes(200_000, ram_gib=200))
    assert with_ram.hit_rate > without.hit_rate + 0.03
    assert statistics.mean(with_ram.ttft_s) < statistics.mean(without.ttft_s)
