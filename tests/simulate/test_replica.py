"""What a simulated replica takes, by its costs."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from hotspan.core.errors import ConfigError
from hotspan.core.trace import Request, Trace
from hotspan.router.types import Medium
from hotspan.simulate.caches import Change, Lru, Pool
from hotspan.simulate.costs import Costs, Setup, Sizes
from hotspan.simulate.replica import Job, SimulatedReplica
from hotspan.simulate.simulation import Outcome, Simulation
from tests.simulate.rig import RATE, row, setup, workload

BLOCK_S = 512 / RATE


def replay(made: Setup, *rows: object, policy: str = "roundrobin") -> Outcome:
    """What becomes of these."""
    return Simulation(made, policy, 1).run(workload(*rows))  # type: ignore[arg-type]


def test_an_idle_replica_takes_what_the_costs_say() -> None:
    """TTFT is prefill, with its quadratic part; a decoded token takes a step."""
    costs = Costs(prefill_tokens_per_s=RATE, attention_s=1e-8, step_s=0.03)
    outcome = replay(setup(costs=costs), row(5.0, range(10), more=100, answer_tokens=11))
    tokens = 5220
    assert outcome.ttft_s == [pytest.approx(tokens / RATE + 1e-8 * tokens**2 / 2)]
    assert outcome.tpot_s == [pytest.approx(0.03)]
    assert outcome.span_s == pytest.approx(5.0 + outcome.ttft_s[0] + 0.3)


def test_what_is_held_is_not_computed() -> None:
    """A second request for a prompt computes its end only; one that is held whole computes its last block."""
    outcome = replay(setup(), row(0, range(8)), row(10, range(8), more=64), row(20, range(8)))
    assert outcome.ttft_s == pytest.approx([8 * BLOCK_S, 64 / RATE, BLOCK_S])
    assert outcome.found == (8 + 7) * 512


def test_prompts_wait_for_each_other() -> None:
    """Prefill is first come, first served."""
    outcome = replay(setup(), row(0, range(4)), row(0, range(10, 12)), row(0.1, range(20, 21)))
    assert outcome.ttft_s == pytest.approx([4 * BLOCK_S, 6 * BLOCK_S, 7 * BLOCK_S - 0.1])


def test_prompts_of_one_step_get_their_first_tokens_together() -> None:
    """Those that wait, fit into a step with the one before them, and may run; the rest waits for that step."""
    costs = Costs(prefill_tokens_per_s=RATE, step_tokens=1024)
    rows = [row(0, range(4)), row(0.01, range(10, 11)), row(0.02, range(20, 21)), row(0.03, range(30, 31))]
    outcome = replay(setup(costs=costs), *rows)
    assert outcome.ttft_s == pytest.approx([4 * BLOCK_S, 6 * BLOCK_S - 0.01, 6 * BLOCK_S - 0.02, 7 * BLOCK_S - 0.03])
    one = replay(setup(costs=replace(costs, max_running=1)), *rows)
    assert one.ttft_s == pytest.approx([4 * BLOCK_S, 5 * BLOCK_S - 0.01, 6 * BLOCK_S - 0.02, 7 * BLOCK_S - 0.03])
    shared = [row(0, range(4)), row(0.01, [9], more=60), row(0.02, [9], more=60)]
    first, second = replay(setup(costs=replace(costs, step_tokens=640)), *shared).ttft_s[1:]
    assert first - second == pytest.approx(0.01), "the second finds what the first of its step computes"


def test_decode_and_prefill_slow_each_other() -> None:
    """While a prompt is prefilled, who decodes gets a token a step of prefill, and takes one of its tokens."""
    costs = Costs(prefill_tokens_per_s=RATE, step_s=0.01, request_step_s=0.0, step_tokens=256)
    outcome = replay(setup(costs=costs), row(0, [1], answer_tokens=1001), row(1, range(10, 20)))
    prefill_s = 10 * BLOCK_S / (1 - 1 / 256)
    assert outcome.ttft_s[1] == pytest.approx(prefill_s)
    in_prefill = prefill_s / (256 / RATE)
    assert outcome.tpot_s[0] == pytest.approx((prefill_s + (1000 - in_prefill) * 0.01) / 1000)


@pytest.mark.parametrize("costs", [Costs(RATE, step_s=1e-13), Costs(1e18, step_s=0.01), Costs(1e18, step_s=1e-13)])
def test_what_takes_less_than_the_clock_can_tell_ends(costs: Costs) -> None:
    """Late in a trace a step may be too short to move the clock: answers end, and prompts begin, all the same."""
    rows = [row(1e6 + n / 7, range(4 * n, 4 * n + 4), answer_tokens=17) for n in range(40)]
    outcome = replay(setup(costs=costs), *rows)
    assert len(outcome.ttft_s) == len(rows) and min(outcome.ttft_s) >= 0
    assert 1e6 + 39 / 7 <= outcome.span_s <= 1e6 + 39 / 7 + len(rows) * 4 * BLOCK_S


def test_a_short_prompt_is_one_step_of_who_decodes() -> None:
    """A prompt shorter than a step takes as long as it has tokens, and who decodes gets a token when it ends."""
    costs = Costs(prefill_tokens_per_s=RATE, step_s=0.01, request_step_s=0.0, step_tokens=2048)
    outcome = replay(setup(costs=costs), row(0, [1], answer_tokens=101), row(1, range(10, 12)))
    assert outcome.tpot_s[0] == pytest.approx((2 * BLOCK_S + 99 * 0.01) / 100, rel=1e-3)


def test_the_next_event_is_when_the_prompt_is_done() -> None:
    """Beside a request that decodes, a step of two tokens computes one: twice as long, and nothing happens before."""
    costs = Costs(prefill_tokens_per_s=RATE, step_tokens=2)
    firsts: list[int] = []
    replica = SimulatedReplica(
        *(0, costs, Pool(10**6, 512, 512), {}, 512),
        *(lambda job, now_s: firsts.append(job.index), lambda job, now_s: None),
    )
    replica.arrive(Job(0, row(0.0, [1], answer_tokens=10_000), 0.0), 0.0)
    assert replica.next_s() == pytest.approx(BLOCK_S)
    replica.advance(replica.next_s())
    replica.arrive(Job(1, row(BLOCK_S, [2]), BLOCK_S), BLOCK_S)
    assert firsts == [0] and replica.next_s() == pytest.approx(3 * BLOCK_S)
    replica.advance(replica.next_s())
    assert firsts == [0, 1]


def test_a_tier_is_used_for_what_the_pool_lost_alone() -> None:
    """What was loaded counts as used there: what comes behind the blocks that the pool still has, and nothing else."""
    used: list[range | None] = []

    class Watched(Lru):
        def use(self, keys: Sequence[int], loaded: range | None = None) -> Change:
            used.append(loaded)
            return super().use(keys, loaded)

    replica = SimulatedReplica(
        *(0, Costs(prefill_tokens_per_s=RATE), Pool(8 * 512, 512, 512), {Medium.RAM: Watched(100)}, 512),
        *(lambda job, now_s: None, lambda job, now_s: None),
    )
    for n, keys in enumerate((range(1, 7), range(11, 17), range(1, 7))):
        replica.arrive(Job(n, row(replica.at_s, keys, more=10), replica.at_s), replica.at_s)
        while replica.requests:
            replica.advance(replica.next_s())
    assert used == [range(0), range(0), range(1, 6)]


def test_a_step_gives_one_token_however_many_decode() -> None:
    """A prompt that leaves room for those that decode is one step: each of them gets one token out of it."""
    decoding = 384
    costs = Costs(RATE, step_s=1e-6, request_step_s=0.0, step_tokens=512, max_running=512)
    replica = SimulatedReplica(
        *(0, costs, Pool(10**9, 512, 512), {}, 512), *(lambda job, now_s: None, lambda job, now_s: None)
    )
    for n in range(decoding):
        replica.arrive(Job(n, Request(0.0, 1, 10**9, ()), 0.0), replica.at_s)
        while len(replica._decoding) <= n:
            replica.advance(replica.next_s())
    steps, began_s = replica._steps, replica.at_s
    replica.arrive(Job(decoding, Request(began_s, 128, 1, ()), began_s), began_s)
    replica.advance(replica.next_s())
    assert replica.at_s - began_s == pytest.approx(512 / RATE)
    assert replica._steps - steps == pytest.approx(1, rel=1e-6)


def test_running_requests_slow_each_other() -> None:
    """A step takes longer for each request that decodes beside it, until that has ended."""
    costs = Costs(prefill_tokens_per_s=1e9, step_s=0.02, request_step_s=0.01)
    outcome = replay(setup(costs=costs), row(0, [1], answer_tokens=101), row(0, [2], answer_tokens=51))
    assert outcome.tpot_s[1] == pytest.approx(0.03, rel=1e-4)
    assert outcome.tpot_s[0] == pytest.approx(0.025, rel=1e-4)


def test_no_more_run_than_may() -> None:
    """At `max_running` a prompt waits until an answer ends."""
    costs = Costs(prefill_tokens_per_s=RATE, step_s=0.01, max_running=1)
    outcome = replay(setup(costs=costs), row(0, [1], answer_tokens=101), row(0, [2]))
    assert outcome.ttft_s[1] == pytest.approx(BLOCK_S + 1.0 + BLOCK_S)


@pytest.mark.parametrize(("medium", "sizes"), [(Medium.RAM, {"ram_gib": 1}), (Medium.DISK, {"disk_gib": 1})])
def test_a_tier_brings_back_what_the_pool_lost(medium: Medium, sizes: dict[str, float]) -> None:
    """What is in a tier is loaded at its rate where that is faster than computing."""
    costs = Costs(prefill_tokens_per_s=RATE, kv_bytes=10_000)
    made = setup(sizes=Sizes(gpu_tokens=8 * 512, **sizes), costs=costs)
    outcome = replay(made, row(0, range(8)), row(10, range(10, 18)), row(20, range(8), more=1))
    load_s = costs.load_s[medium] + 8 * 512 * 10_000 / (costs.load_gb_per_s[medium] * 1e9)
    assert outcome.ttft_s[2] == pytest.approx(load_s + 1 / RATE)
    assert outcome.loaded[medium] == 8 * 512


def test_a_slow_tier_is_left_alone() -> None:
    """What is computed sooner than loaded is computed."""
    costs = Costs(prefill_tokens_per_s=RATE, ram_gb_per_s=0.1, disk_gb_per_s=0.1, l2_gb_per_s=0.1)
    made = setup(sizes=Sizes(gpu_tokens=8 * 512, ram_gib=10), costs=costs)
    outcome = replay(made, row(0, range(8)), row(10, range(10, 18)), row(20, range(8), more=1))
    assert outcome.ttft_s[2] == pytest.approx(8 * BLOCK_S + 1 / RATE)
    assert not any(outcome.loaded.values())


def test_an_l2_is_shared() -> None:
    """What one replica computed, another loads from L2, and only from there."""
    for l2_gib, loaded in ((10.0, 8 * 512), (0.0, 0)):
        made = setup(2, sizes=Sizes(ram_gib=10, l2_gib=l2_gib))
        outcome = replay(made, row(0, range(8)), row(10, range(8), more=1))
        assert outcome.replica == [0, 1]
        assert outcome.loaded[Medium.L2] == loaded and outcome.found == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: Costs(prefill_tokens_per_s=0),
        lambda: Costs(step_s=float("nan")),
        lambda: Costs(attention_s=-1),
        lambda: Setup(sizes=Sizes(gpu_tokens=511)),
        lambda: Sizes(ram_gib=-1),
        lambda: Setup(replicas=0),
        lambda: Setup(sizes=Sizes(eviction="lfu")),
        lambda: Simulation(Setup(), "fastest"),
    ],
)
def test_what_can_not_be_is_refused(make: object) -> None:
    """Costs, sizes and names that make no sense are errors that say so."""
    with pytest.raises(ConfigError):
        make()  # type: ignore[operator]


def test_smaller_blocks_hold_the_same_bytes() -> None:
    """A tier holds so many tokens, in blocks of whatever size; the last block of a prompt is computed."""
    small = Trace("made", tuple(Request(float(at), 1024, 1, tuple(range(4))) for at in (0, 10)), 256)
    made = setup(sizes=Sizes(gpu_tokens=1024))
    found = {
        each.block_tokens: Simulation(replace(made, block_tokens=each.block_tokens), "roundrobin").run(each).found
        for each in (small, workload(row(0, range(2)), row(10, range(2))))
    }
    assert found == {256: 768, 512: 512}
