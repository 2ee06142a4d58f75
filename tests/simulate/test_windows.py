"""Windows in the simulator: documents that a replica saw twice are reused in whatever order they come."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from hotspan.bench.workloads.long_doc_permutator import orders
from hotspan.core.errors import ConfigError
from hotspan.core.trace import Request, Trace
from hotspan.router.types import Medium
from hotspan.simulate.costs import Blend, Costs, Setup, Sizes
from hotspan.simulate.shapes import DOCUMENTS, permuted
from hotspan.simulate.simulation import Outcome, Simulation
from tests.simulate.rig import RATE, setup

BLOCK = 256
MEASURED = Path(__file__).parents[2] / "benchmarks" / "results" / "blend-permutator.json"
SIZES = Sizes(gpu_tokens=200_000, ram_gib=20.0)
BLEND = Blend(recompute_ratio=0.1, probe_share=0.02, move_share=0.05)


def prompts(*asked: Iterable[int], tokens: int = 1024, system: int = 512) -> list[Request]:
    """Documents of so many tokens in these orders, a minute apart, and questions of 100 tokens."""
    rows = ((60.0 * n, tuple(order), 100) for n, order in enumerate(asked))
    return list(permuted(system, [tokens] * 8, rows, BLOCK))


def replay(rows: list[Request], made: Setup | None = None, policy: str = "roundrobin") -> Outcome:
    made = made or setup(sizes=SIZES, block_tokens=BLOCK, blend=BLEND)
    return Simulation(made, policy).run(Trace.of("made", rows, BLOCK))


def test_reuse_is_what_a_server_measured() -> None:
    """Of the permuted contexts of `make blend-permutator`, windows and prefixes have the shares of the real server,
    within a point."""
    measured = json.loads(MEASURED.read_text())["summary"]["first_k"]
    asked = ((60.0 * n, order, 20) for n, order in enumerate(orders(5, 6, 42)))
    rows = list(permuted(1000, [5000] * 5, asked, BLOCK))
    warmed, whole = replay(rows[:2]), replay(rows)
    tokens = whole.tokens - warmed.tokens
    assert tokens == pytest.approx(measured["prompt tokens"], rel=0.01)
    assert whole.blended / tokens == pytest.approx(measured["taken from windows"], abs=0.01)
    assert (whole.found - warmed.found) / tokens == pytest.approx(measured["prefix caches"], abs=0.01)
    assert warmed.blended == 0 and sum(whole.loaded.values()) == 0


def test_a_document_is_reused_when_it_comes_the_third_time() -> None:
    """It is noted, then stored, then reused; not while it stands behind the same text, nor from a blended prompt."""
    once, twice = replay(prompts([0, 1, 2], [2, 1, 0])), replay(prompts([0, 1, 2], [2, 1, 0], [1, 2, 0]))
    assert (once.blended, twice.blended) == (0, 3 * 1024)
    behind_the_same = replay(prompts([0, 1, 2], [0, 1, 2], [0, 2, 1], [2, 1, 0]))
    assert behind_the_same.blended == 2 * 1024  # 1 and 2: document 0 was computed once
    new = [[0, 1, 2], [2, 1, 0], *([0, 2, 1, number] for number in (3, 3, 3)), [3, 0, 1, 2]]
    assert replay(prompts(*new)).blended == 9 * 1024  # 0 is in the pool where it is first, 3 in blended prompts only


def test_a_blended_prompt_takes_what_the_costs_say() -> None:
    """Loading, moving and choosing, what is computed again, and the question; the system prompt is in the pool."""
    outcome = replay(prompts([0, 1, 2], [2, 1, 0], [1, 2, 0]))
    costs, tokens = Costs(prefill_tokens_per_s=RATE), 3 * 1024
    expected_s = costs.loading_s(Medium.RAM, tokens) + (0.1 + 0.05) * tokens / RATE + 100 / RATE
    expected_s += 0.02 * (tokens + 100) / RATE
    assert outcome.ttft_s[2] == pytest.approx(expected_s)
    assert outcome.found == 2 * 512


def test_little_is_not_worth_it() -> None:
    """Not if less than 30 % of the time is saved, or fewer than 512 tokens are reused."""
    asked = ([0, 1, 2], [2, 1, 0], [1, 2, 0])
    costly = setup(sizes=SIZES, block_tokens=BLOCK, blend=replace(BLEND, recompute_ratio=0.7))
    assert replay(prompts(*asked), costly).blended == 0
    assert replay(prompts([0], [1, 0], [2, 0], tokens=256)).blended == 0


def test_without_blending_sections_change_nothing() -> None:
    """The outcome is that of the same trace without its sections."""
    rows = prompts(*(Random(n).sample(range(8), 4) for n in range(20)))
    bare, off = [each._replace(sections=()) for each in rows], setup(sizes=SIZES, block_tokens=BLOCK)
    assert replay(rows, off) == replay(bare, off) == replay(bare)


def test_windows_are_evicted_and_shared() -> None:
    """A RAM tier without room for them loses them; a second replica finds those of the first in the L2."""
    asked = [[0, 1, 2], [2, 1, 0], [1, 2, 0]]
    small = Sizes(gpu_tokens=200_000, ram_gib=1500 * 128 * 1024 / 2**30)
    assert replay(prompts(*asked), setup(sizes=small, block_tokens=BLOCK, blend=BLEND)).blended < 3 * 1024
    alternating = prompts([0, 1, 2], [3, 4], [2, 1, 0], [1, 2, 0])
    for l2_gib, blended in ((0.0, 0), (20.0, 3 * 1024)):
        costs = Costs(prefill_tokens_per_s=RATE, l2_gb_per_s=20.0)
        made = setup(2, replace(SIZES, l2_gib=l2_gib), costs, block_tokens=BLOCK, blend=BLEND)
        assert replay(alternating, made).blended == blended


def test_routing_by_sections_finds_more_windows() -> None:
    """`auto` sends prompts where their documents were computed, in whatever order, and so blends more than
    `roundrobin`; all of it follows from the seed."""
    made = DOCUMENTS.draw(1, 2000)
    shape = setup(8, SIZES, blend=Blend())
    found = {policy: Simulation(shape, policy, 1).run(made) for policy in ("auto", "roundrobin")}
    assert found["auto"].window_rate > 1.1 * found["roundrobin"].window_rate > 0
    assert Simulation(shape, "auto", 1).run(made) == found["auto"]


def test_windows_need_ram() -> None:
    """They are kept there first."""
    with pytest.raises(ConfigError, match="give --ram-gib"):
        setup(blend=BLEND)


def test_a_block_of_permuted_documents_is_named_by_all_before_its_end() -> None:
    """Prompts share blocks exactly as far as they begin with the same documents."""
    first, same, other, last = prompts([0, 1, 2], [0, 1, 2], [0, 2, 1], [1, 0, 2])
    shared = [sum(a == b for a, b in zip(first.keys, each.keys, strict=True)) for each in (same, other, last)]
    assert shared == [(512 + 3 * 1024) // BLOCK, (512 + 1024) // BLOCK, 512 // BLOCK]
    assert [section.key for section in other.sections] == [0, 1, 3, 2]
