"""`python -m benchmarks.eviction`: each policy does what its name says, and all figures are written down."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from benchmarks.eviction import (
    CAPACITIES,
    FLOODED_CAPACITIES,
    GOAL_POINTS,
    OURS,
    SHAPES,
    FloodCost,
    alone,
    capacity_chunks,
    flooded,
    hit_rate,
)
from benchmarks.eviction import main as eviction
from benchmarks.policies import LeafBelady, LeafLru, LeafPaperArc, LeafS3Fifo, Policy, replay_one
from hotspan.core.trace import BLOCK_TOKENS, Request, Trace
from hotspan.core.types import ChunkKey
from hotspan.simulate.shapes import CONVERSATION
from hotspan.tiers.eviction import LeafArc
from hotspan.tiers.retention import LeafRetention

app = typer.Typer()
app.command()(eviction)

POLICIES: dict[str, Callable[[int], Policy]] = {
    "LRU": LeafLru,
    "paper": LeafPaperArc,
    "ours": LeafArc,
    "learned": LeafRetention,
    "S3-FIFO": LeafS3Fifo,
}


def text(*names: str) -> Request:
    """A request for a chain of chunks, root first; each name begins with that of its parent."""
    return Request(0.0, len(names) * BLOCK_TOKENS, 0, tuple(ChunkKey(name.encode()) for name in names))


def of_tenant(requests: list[Request]) -> list[tuple[int, Request]]:
    return [(0, request) for request in requests]


# Texts over an alphabet of three are chains in a common tree: "ab" is the child of "a".
texts = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=60).map(
    lambda words: [text(*(word[: n + 1] for n in range(len(word)))) for word in words]
)


@settings(deadline=None)
@given(requests=texts, capacity=st.integers(1, 12))
def test_nothing_finds_more_than_belady(requests: list[Request], capacity: int) -> None:
    """Who knows the future finds at least as much as any other policy, on any trace."""
    belady = LeafBelady(capacity, [request.keys for request in requests])
    best = hit_rate(belady, capacity, of_tenant(requests))
    for name, make in POLICIES.items():
        assert hit_rate(make(capacity), capacity, of_tenant(requests)) <= best, name


@settings(deadline=None)
@given(requests=texts, capacity=st.integers(1, 12))
def test_policies_keep_whole_prefixes(requests: list[Request], capacity: int) -> None:
    """No policy holds more than the tier, a chunk without its parent, or leaves room when it could have stored."""
    belady: Callable[[int], Policy] = lambda chunks: LeafBelady(chunks, [request.keys for request in requests])  # noqa: E731
    for make in (*POLICIES.values(), belady):
        policy, came = make(capacity), set()
        for request in requests:
            replay_one(policy, capacity, request.keys)
            came |= set(request.keys)
            assert len(policy) == min(capacity, len(came))
            assert all(key[:-1] in policy for key in came if key in policy and len(key) > 1)
            assert all(key in policy for key in request.keys[:capacity])


def test_lru_is_lru() -> None:
    """On texts of one chunk, what is found is what is among the last that were asked for."""
    requests = [text(name) for name in "abcabcdeabdcae"]
    policy = LeafLru(3)
    found = [replay_one(policy, 3, request.keys) for request in requests]
    assert found == [int(name in "abcabcdeabdcae"[max(0, n - 3) : n]) for n, name in enumerate("abcabcdeabdcae")]


def test_probation_lets_through_what_is_used_twice() -> None:
    """S3-FIFO keeps through a flood what was used again twice on probation, and not what was used again once."""
    for uses, stays in ((1, False), (2, True)):
        policy = LeafS3Fifo(20)
        for request in [text("reused")] * (1 + uses) + [text(f"{n}") for n in range(200)]:
            replay_one(policy, 20, request.keys)
        assert (ChunkKey(b"reused") in policy) == stays


def test_the_paper_adapts() -> None:
    """The paper's ARC keeps what is used twice through a flood, and learns from a ghost that `once` was too short."""
    policy = LeafPaperArc(20)
    for request in [text("twice")] * 2 + [text(f"{n}") for n in range(200)]:
        replay_one(policy, 20, request.keys)
    assert ChunkKey(b"twice") in policy
    assert policy._target == 0
    replay_one(policy, 20, text(f"{200 - 20}").keys)
    assert policy._target == 1


def test_only_the_flooded_tenant_counts() -> None:
    """A hit rate is that of tenant 0, in tokens, whatever others ask for in between."""
    requests = [(0, text("a")), (1, Request(0.0, 10**6, 0, (ChunkKey(b"a"),))), (0, text("a", "ab"))]
    assert hit_rate(LeafLru(10), 10, requests) == pytest.approx(1 / 3)


def test_a_flood_costs_few_points() -> None:
    """ARC and what learns lose at most 5 points to a flood while the working set fits the floor, LRU many more."""
    trace = CONVERSATION.draw(4, scale=0.03)
    chunks = capacity_chunks(trace, max(FLOODED_CAPACITIES))
    lost = {
        make: hit_rate(make(chunks), chunks, alone(trace)) - hit_rate(make(chunks), chunks, flooded(trace))
        for make in (LeafArc, LeafRetention, LeafLru)
    }
    assert max(lost[LeafArc], lost[LeafRetention]) <= GOAL_POINTS / 100
    assert lost[LeafLru] > 0.1


def test_a_cost_is_in_points() -> None:
    """Points are hundredths of the mean hit rate, and promised only where the floor holds the working set."""
    assert FloodCost(OURS, max(FLOODED_CAPACITIES), [0.4, 0.3], [0.3, 0.3]).points == pytest.approx(5)
    assert FloodCost(OURS, max(FLOODED_CAPACITIES), [0.4], [0.3]).is_promised
    assert not FloodCost(OURS, min(FLOODED_CAPACITIES), [0.4], [0.3]).is_promised
    assert not FloodCost("LRU", max(FLOODED_CAPACITIES), [0.4], [0.3]).is_promised


def test_a_tier_holds_a_part_of_the_footprint() -> None:
    """A capacity is a fraction of the different chunks, and at least one."""
    trace = Trace("x", (text("a", "ab"), text("a", "ac"), text("b")))
    assert [capacity_chunks(trace, capacity) for capacity in (0.01, 0.5, 1.0)] == [1, 2, 4]


def test_it_shows_and_writes_everything(tmp_path: Path) -> None:
    """The tables name every policy, and the file has each seed's figures with the machine and what was published."""
    output = tmp_path / "out" / "eviction.json"
    result = CliRunner().invoke(app, ["--scale", "0.005", "--seeds", "2", "--output", str(output)])
    assert result.exit_code == 0, result.output
    data = json.loads(output.read_text())
    assert data["kind"] == "eviction" and data["machine"]["CPU"] and data["settings"]["seeds"] == 2
    assert data["traces"]["conversation"]["published"]["requests"] == 12_031
    assert len(data["traces"]["toolagent"]["drawn"]) == 2
    assert len(data["hit_rates"]) == len(SHAPES) * len(CAPACITIES) * 6
    for rate in data["hit_rates"]:
        assert len(rate["rates"]) == 2 and 0 < rate["mean"] < 1
        assert rate["policy"] in result.output and rate["trace"] in result.output
    assert {cost["capacity"] for cost in data["floods"]} == set(FLOODED_CAPACITIES)
    assert all(len(cost["beside"]) == 2 for cost in data["floods"])
