"""Load or compute: what is best of all, what it may cost when it was wrong, and how soon it is right again."""

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotspan.cache.choice import BOUND_S, BOUND_SHARE, Choice, Run, Text
from hotspan.cache.cost import CostModel
from hotspan.core.types import MIB, Tier
from hotspan.testing.clock import SimulatedClock

from .cost_rig import (
    CHUNK,
    CPU,
    FAST,
    GPU,
    HUNG,
    REMOTE,
    SLOW,
    START_S,
    Engine,
    Pace,
    Trial,
    attended,
    load_s,
    texts,
    trial,
)

SIZE = 14 * MIB
LENGTHS = [4, 16, 40, 120]
LANES = {Tier.DISK: 8, Tier.L2: 4}
POLL_S = 0.002


def taught(
    engine: Engine | None = GPU, paces: dict[Tier, Pace] | None = None, clock: SimulatedClock | None = None
) -> CostModel:
    """A model that has seen 40 steps of an engine, and 40 chunks of each tier, one after the other."""
    model = CostModel(2048, LANES, clock or SimulatedClock())
    for start, tokens in itertools.product(range(0, 20 * 512, 512), [512, 64]) if engine else ():
        model.observe_step(tokens, attended(start, tokens), engine.step(start, tokens))
    for (tier, pace), size in itertools.product((paces or {}).items(), [SIZE, SIZE // 8] * 20):
        model.begin_load(tier, size)
        model.end_load(tier, size, pace.latency_s + size / pace.bytes_per_s)
    return model


def ask(model: CostModel, *runs: Run, **facts: float) -> Choice:
    """What the model says of a text whose chunks lie there, with 100 tokens more."""
    return model.cut(Text(sum(run.chunks for run in runs) * CHUNK + 100, CHUNK, **facts), runs)  # type: ignore[arg-type]


def later(model: CostModel, seconds: float = 1000.0) -> CostModel:
    """The same model when all that was asked before has long been computed."""
    assert isinstance(model._clock, SimulatedClock)
    model._clock.advance(seconds)
    return model


def on_disk(chunks: int, size: int = SIZE) -> Run:
    return Run(Tier.DISK, chunks, size)


# -- the best of all ---------------------------------------------------------------------------------------------------


def test_what_is_not_known_is_loaded() -> None:
    """Before the first step of the engine everything is loaded, and for 40 ms without progress, no longer."""
    choice = ask(CostModel(2048, LANES, SimulatedClock()), on_disk(40), Run(Tier.L2, 40, SIZE))
    assert (choice.chunks, choice.probe) == (80, 0)
    assert choice.patience_s(0, 0.0) == pytest.approx(0.040)
    assert choice.patience_s(20, 0.1) == pytest.approx(0.140)


def test_nobody_waits_long_for_a_tier_slower_than_any_engine_while_nothing_is_known() -> None:
    """A chunk every 39 ms is progress, and yet no request waits for 40 of them."""
    choice = ask(CostModel(2048, LANES, SimulatedClock()), on_disk(40))
    landed = next(k for k in range(41) if (k + 1) * 0.039 > choice.patience_s(k, k * 0.039))
    assert landed < 4


def test_an_unknown_tier_is_tried() -> None:
    """A tier that was never used is loaded from, though the engine is known."""
    assert ask(taught(), on_disk(40)).chunks == 40


@pytest.mark.parametrize("holds", [True, False], ids=["copies hold up the engine", "copies run beside it"])
def test_what_a_copy_takes_is_the_engines_time_only_where_it_copies_itself(holds: bool) -> None:
    """Copies that take longer than computing cost all who wait, unless something else than the engine makes them."""
    model = taught(Engine(0.0001, 1 / 1_000_000, 0.0), {Tier.DISK: FAST})
    model._copies_hold = holds
    for _ in range(8):
        model.observe_copy(SIZE, 0.001)
    assert (ask(model, on_disk(8), others=50, busy_s=1.0, step_s=0.01).chunks == 8) is not holds


def test_what_lies_in_ram_is_taken_in_any_case() -> None:
    """Chunks in RAM are taken although nothing below is worth it, and a slow tier behind them is left."""
    model = taught(GPU, {Tier.DISK: SLOW})
    assert ask(model, Run(Tier.RAM, 12, SIZE), on_disk(40)).chunks == 12
    assert ask(model, Run(Tier.RAM, 12, SIZE)).chunks == 12
    assert ask(model).chunks == 0


def test_the_prefix_is_cut_where_the_slow_tier_begins() -> None:
    """The fast tier's chunks are loaded, the slow one's behind them computed."""
    model = taught(GPU, {Tier.DISK: FAST, Tier.L2: SLOW})
    choice = ask(model, Run(Tier.RAM, 4, SIZE), on_disk(40), Run(Tier.L2, 40, SIZE))
    assert choice.chunks == 44
    assert choice.tier is Tier.DISK


def test_two_tiers_load_at_the_same_time() -> None:
    """A request waits for the slower of its tiers and not for both."""
    pace = Pace(0.0, 2e9)
    model = taught(GPU, {Tier.DISK: pace, Tier.L2: pace})
    both = ask(model, on_disk(60), Run(Tier.L2, 60, SIZE))
    assert both.chunks == 120
    assert both.load_s == pytest.approx(60 * SIZE / 2e9, rel=0.2)
    as_engine = Pace(0.0, 120 * SIZE / GPU.prefill(0, 120 * CHUNK))
    model = taught(GPU, {Tier.DISK: as_engine, Tier.L2: as_engine})
    assert ask(model, on_disk(60), Run(Tier.L2, 60, SIZE)).chunks == 120


def test_what_the_engine_has_is_not_loaded_for() -> None:
    """A load that is worth it for a whole text is not for the few tokens that the engine lacks."""
    model = taught(GPU, {Tier.DISK: Pace(0.030, 4e9)})
    assert model.cut(Text(40 * CHUNK + 100, CHUNK), [on_disk(40)]).chunks == 40
    assert model.cut(Text(40 * CHUNK + 100, CHUNK, 39 * CHUNK + 10), [on_disk(1)]).chunks == 0


def test_a_load_that_saves_too_little_is_left() -> None:
    """A load that takes a little longer than computing is left, one that takes half as long is not."""
    chunk_s = GPU.prefill(0, 40 * CHUNK) / 40
    assert ask(taught(GPU, {Tier.DISK: Pace(0.0, SIZE / chunk_s / 1.1)}), on_disk(40)).chunks == 0
    assert ask(taught(GPU, {Tier.DISK: Pace(0.0, SIZE / chunk_s / 0.5)}), on_disk(40)).chunks == 40


def test_a_queue_counts() -> None:
    """A request is told to compute while so much is queued before it that computing is sooner."""
    model = taught(GPU, {Tier.DISK: FAST})
    for _ in range(400):
        model.begin_load(Tier.DISK, SIZE)
    assert load_s(model, Tier.DISK, 1, SIZE) == pytest.approx(401 * SIZE / FAST.bytes_per_s, rel=0.2)
    assert ask(model, on_disk(40)).chunks == 0
    for _ in range(400):
        model.end_load(Tier.DISK, SIZE, None)
    assert ask(model, on_disk(40)).chunks == 40


def test_transfers_side_by_side_share_the_bandwidth() -> None:
    """Eight transfers at once that take eight times as long each are not a slower tier."""
    model = CostModel(2048, LANES, SimulatedClock())
    for depth in [2, 8] * 20:
        for _ in range(depth):
            model.begin_load(Tier.DISK, SIZE)
        for _ in range(depth):
            model.end_load(Tier.DISK, SIZE, depth * SIZE / 1e9)
    assert load_s(model, Tier.DISK, 80, SIZE) == pytest.approx(80 * SIZE / 1e9, rel=0.15)
    assert load_s(model, Tier.DISK, 1, SIZE) < 2 * SIZE / 1e9


def test_latency_is_waited_out_side_by_side() -> None:
    """Where every transfer takes 200 ms, however many there are, eight chunks take 200 ms and eighty ten times that."""
    model = CostModel(2048, LANES, SimulatedClock())
    for depth in [1, 8] * 10:
        for _ in range(depth):
            model.begin_load(Tier.DISK, SIZE)
        for _ in range(depth):
            model.end_load(Tier.DISK, SIZE, 0.2)
    assert load_s(model, Tier.DISK, 8, SIZE) == pytest.approx(0.2, rel=0.15)
    assert load_s(model, Tier.DISK, 80, SIZE) == pytest.approx(2.0, rel=0.15)


def test_copies_to_the_engine_count() -> None:
    """What a slow copy from RAM takes is added to the load, and makes a short one not worth it."""
    model = taught(GPU, {Tier.DISK: FAST})
    without = ask(model, on_disk(40))
    for size in [SIZE, 40 * SIZE] * 10:
        model.observe_copy(size, size / 1e9)
    choice = ask(model, on_disk(40))
    assert choice.chunks == 0
    assert without.chunks == 40


def test_an_engine_that_is_busy_anyway_gives_time_to_load() -> None:
    """What is too slow for an idle engine is loaded while the engine has that much to do before."""
    model = taught(GPU, {Tier.DISK: Pace(0.0, 0.8e9)})
    assert ask(model, on_disk(40)).chunks == 0
    choice = ask(later(model), on_disk(40), busy_s=1.0)
    assert choice.chunks == 40
    assert choice.patience_s(0, 0.0) > 0.7


def test_what_a_request_has_waited_for_a_place_counts() -> None:
    """Who has waited 20 s to be looked at may wait a twentieth of that more without trust, and is granted it."""
    model = taught(GPU, {Tier.L2: REMOTE})
    chain = Run(Tier.L2, 4, SIZE), Run(Tier.RAM, 26, SIZE)
    at_once = ask(model, *chain)
    model.settle(at_once, at_once.load_s, 30)
    queued = ask(later(model), *chain, waited_s=20.0, queued_s=20.0)
    assert at_once.is_risky and not queued.is_risky
    assert at_once.chunks == queued.chunks == 30
    more_s = queued.patience_s(0, 0.0) - 0.8 * (BOUND_SHARE * queued.recompute_s + BOUND_S)
    assert more_s == pytest.approx(0.8 * BOUND_SHARE * 20.0, rel=0.1)
    assert queued.bound_s == pytest.approx(BOUND_SHARE * (20.0 + queued.recompute_s) + BOUND_S)
    assert ask(later(model), *chain, waited_s=20.0).is_risky  # it waited for tiers, which counts for nothing


def test_a_load_ends_no_sooner_than_the_step_beside_it() -> None:
    """A short text is computed in the step that runs anyway, rather than wait that step out for a load."""
    model = taught(GPU, {Tier.DISK: FAST})
    assert ask(model, on_disk(4)).chunks == 4
    assert ask(model, on_disk(4), step_s=0.1).chunks == 0


runs = st.lists(
    st.builds(Run, st.sampled_from([Tier.RAM, Tier.DISK, Tier.L2]), st.integers(1, 40), st.just(SIZE)), max_size=6
)
paces = st.builds(
    Pace, st.sampled_from([0.0, 0.001, 0.02, 0.2]), st.integers(15, 20).map(lambda half: 10 ** (half / 2))
)


@settings(max_examples=150, deadline=None)
@given(runs, paces, paces, st.integers(0, 3 * CHUNK), st.sampled_from([0.0, 0.02, 0.5]), st.integers(0, 300))
def test_no_other_cut_is_better(
    chain: list[Run], disk: Pace, l2: Pace, gpu_tokens: int, busy_s: float, queued: int
) -> None:
    """The choice is what trying every cut finds: the least time, of those that patience allows, if it saves enough."""
    model = taught(GPU, {Tier.DISK: disk, Tier.L2: l2})
    for _ in range(queued):
        model.begin_load(Tier.DISK, SIZE)
    places = [run.tier for run in chain for _ in range(run.chunks)]
    first = gpu_tokens // CHUNK
    total = (first + len(places)) * CHUNK + 100
    factors = {tier: estimate.factor for tier, estimate in model.report().tiers.items()}

    def wait_s(k: int, factors: dict[Tier, float]) -> float:
        counts = {tier: places[:k].count(tier) for tier in (Tier.DISK, Tier.L2)}
        return max((load_s(model, tier, n, SIZE) * factors[tier] for tier, n in counts.items() if n), default=0.0)

    def total_s(k: int) -> float:
        have = (first + k) * CHUNK if k else gpu_tokens
        return max(wait_s(k, dict.fromkeys(factors, 1.0)), busy_s) + model.prefill_s(have, total)

    choice = model.cut(Text(total, CHUNK, gpu_tokens, busy_s=busy_s), chain)
    ram = next((k for k, tier in enumerate(places) if tier is not Tier.RAM), len(places))
    sure = next((k for k in range(ram, len(places)) if wait_s(k + 1, factors) > choice.patience_s(k, 0.0)), len(places))
    candidates = range(ram, len(places) + 1) if choice.is_risky else range(ram, sure + 1)
    best = min(candidates, key=lambda k: (total_s(k), k))
    saves_s = total_s(ram) - total_s(best)
    least_s = 0.03 * model.prefill_s((first + ram) * CHUNK if ram else gpu_tokens, total)
    if not math.isclose(saves_s, least_s, rel_tol=1e-6):
        assert total_s(choice.chunks) == pytest.approx(total_s(best if saves_s > least_s else ram))
    model.check()


@settings(deadline=None)
@given(paces, st.integers(1, 200), st.floats(0.01, 1.0), st.sampled_from([GPU, CPU]))
def test_a_faster_tier_is_never_used_less(pace: Pace, chunks: int, factor: float, engine: Engine) -> None:
    """If every transfer takes a share of the time, no fewer chunks are loaded, and no later."""
    faster = Pace(pace.latency_s * factor, pace.bytes_per_s / factor)
    slow, fast = (ask(taught(engine, {Tier.DISK: each}), on_disk(chunks)) for each in (pace, faster))
    assert fast.chunks >= slow.chunks
    assert fast.load_s + fast.rest_s <= (slow.load_s + slow.rest_s) * 1.001


# -- what it may cost --------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    st.sampled_from([GPU, CPU]),
    paces,
    st.integers(1, 150),
    st.lists(st.floats(0.0, 2.0), min_size=150, max_size=150),
    st.sampled_from([0.0, 0.3]),
)
def test_giving_up_keeps_the_bounds_whatever_lands_when(
    engine: Engine, pace: Pace, chunks: int, gaps: list[float], busy_s: float
) -> None:
    """A request that is cut when its patience is over has its first token within both bounds; if risky, the second."""
    choice = ask(taught(engine, {Tier.DISK: pace}), on_disk(chunks), busy_s=busy_s)
    landings = list(itertools.accumulate(gaps[: choice.chunks]))
    landed = next((k for k, at in enumerate(landings) if at > choice.patience_s(k, 0.0)), choice.chunks)
    waited_s = choice.patience_s(landed, 0.0) if landed < choice.chunks else (landings or [0.0])[-1]
    lost_s = choice.lost_s(waited_s, landed)
    if not choice.is_risky:
        assert lost_s <= BOUND_SHARE * choice.recompute_s + BOUND_S
    assert lost_s <= choice.recompute_s


def test_risk_ends_where_the_second_bound_is() -> None:
    """A risky load may be worth twice what was predicted for it, and yet no more than computing takes."""
    choice = ask(taught(GPU, {Tier.L2: REMOTE}), Run(Tier.L2, 4, SIZE), Run(Tier.RAM, 26, SIZE))
    assert choice.is_risky
    assert 2 * choice.load_s + BOUND_S > choice.recompute_s > choice.patience_s(0, 0.0) > choice.load_s


def test_progress_earns_patience() -> None:
    """A chunk that lands makes a request wait longer, by at most what the chunk saves."""
    choice = ask(taught(GPU, {Tier.DISK: FAST}), on_disk(40))
    patiences = [choice.patience_s(k, 0.0) for k in range(41)]
    chunk_s = GPU.prefill(0, 40 * CHUNK) / 40
    assert all(0 < after - before < 1.5 * chunk_s for before, after in itertools.pairwise(patiences))


def test_risk_needs_trust_and_trust_is_earned() -> None:
    """Of requests to a tier that deserves no trust any more, one at first and one in 200 then risk the first bound."""
    model = taught(GPU, {Tier.L2: REMOTE})
    risky = 0
    for _ in range(1000):
        choice = ask(later(model), Run(Tier.L2, 4, SIZE), Run(Tier.RAM, 100, SIZE))
        risky += choice.is_risky
        model.settle(choice, 10.0, 0)
        model.check()
    assert 5 <= risky <= 6


def test_no_bound_is_risked_for_little() -> None:
    """Without trust, what lands bit by bit is loaded; what brings its first chunk later than the bound is not."""
    model = taught(GPU, {Tier.DISK: Pace(0.0, 1.35e9), Tier.L2: REMOTE})
    model.settle(ask(model, Run(Tier.L2, 4, SIZE), Run(Tier.RAM, 100, SIZE)), 10.0, 0)
    assert ask(later(model), on_disk(40)).chunks == 40
    later(model)
    assert model.prefill_s(0, 19 * CHUNK) * 0.8 > load_s(model, Tier.L2, 1, SIZE)
    assert ask(model, Run(Tier.L2, 1, SIZE), Run(Tier.RAM, 18, SIZE)).chunks == 0


def test_trust_that_was_not_abused_is_given_again() -> None:
    """Requests to a tier with a latency that it keeps are loaded, one after the other; not two at a time at first."""
    model = taught(GPU, {Tier.L2: REMOTE})
    for _ in range(50):
        later(model)
        choice, other = (ask(model, Run(Tier.L2, 4, SIZE), Run(Tier.RAM, 100, SIZE), waiting=n) for n in range(2))
        assert choice.is_risky and not other.is_risky
        assert other.chunks == 104  # without loads it would have waited for the other's computing
        model.settle(choice, choice.load_s, choice.chunks)
        model.settle(other, 0.0, 0)
    assert model.report().late == 0


PACES: dict[str, Callable[[], Callable[[float], Pace]]] = {
    "fast": lambda: lambda at_s: FAST,
    "slow": lambda: lambda at_s: SLOW,
    "remote": lambda: lambda at_s: REMOTE,
    "hung": lambda: lambda at_s: HUNG,
    "bimodal": lambda: sometimes(0.3),
    "stalls": lambda: sometimes(0.02),
    "turns": lambda: lambda at_s: SLOW if int((at_s - START_S) / 200) % 2 else FAST,
    "hangs": lambda: lambda at_s: HUNG if at_s > START_S + 500 else FAST,
}


def sometimes(probability: float) -> Callable[[float], Pace]:
    """Fast, but for some transfers that take 300 ms."""
    rng = random.Random(5)
    return lambda at_s: Pace(0.3, FAST.bytes_per_s) if rng.random() < probability else FAST


def over(outcome: Trial, share: float, constant_s: float) -> int:
    """How many requests took longer than this share of the time without a cache, and that much."""
    return sum(a > share * b + constant_s for a, b in zip(outcome.ttft_s, outcome.plain_s, strict=True))


@pytest.mark.parametrize("name", PACES)
@pytest.mark.parametrize(("engine", "gap_s"), [(GPU, 4.0), (CPU, 60.0)], ids=["gpu", "cpu"])
def test_the_bounds_hold(engine: Engine, gap_s: float, name: str) -> None:
    """Of 400 requests at most 4 take longer than 1.05 x no cache + 50 ms, and none longer than 2 x, on any tier."""
    outcome = trial(engine, PACES[name](), lambda: texts(400, gap_s, LENGTHS))
    assert over(outcome, 1 + BOUND_SHARE, BOUND_S) <= 4
    assert over(outcome, 2.0, POLL_S) == 0
    outcome.model.check()


@pytest.mark.parametrize("name", PACES)
def test_the_first_bound_holds_in_a_crowd(name: str) -> None:
    """With more requests than the engine can compute, p99 is no later than 1.05 x that of no cache + 50 ms."""
    engine = dataclasses.replace(GPU, noise=0.05)
    outcome = trial(engine, PACES[name](), lambda: texts(400, 0.3, LENGTHS))
    plain_s = float(np.percentile(outcome.plain_s, 99))
    assert np.percentile(outcome.ttft_s, 99) <= (1 + BOUND_SHARE) * plain_s + BOUND_S
    assert np.mean(outcome.ttft_s) <= np.mean(outcome.plain_s) * 1.01


@pytest.mark.parametrize(("engine", "gap_s"), [(GPU, 4.0), (CPU, 60.0)], ids=["gpu", "cpu"])
def test_a_fast_tier_is_used_whole(engine: Engine, gap_s: float) -> None:
    """Once it is known, every request loads all of its chunks, and first tokens come in a quarter of the time."""
    outcome = trial(engine, lambda at_s: FAST, lambda: texts(100, gap_s, LENGTHS))
    choices = [request.choice for request in outcome.requests[8:]]
    assert all(choice and choice.chunks == length for choice, length in zip(choices, LENGTHS * 23, strict=True))
    assert sum(outcome.ttft_s) < 0.25 * sum(outcome.plain_s)


def test_a_remote_tier_is_used_where_it_is_worth_it() -> None:
    """With 200 ms to the first byte and many lanes, long texts are loaded, and short ones computed."""
    outcome = trial(GPU, lambda at_s: REMOTE, lambda: texts(200, 4.0, [4, 120]), lanes=64)
    short, long = outcome.requests[20::2], outcome.requests[21::2]
    assert sum(request.choice is not None and request.choice.chunks == 120 for request in long) > 0.9 * len(long)
    assert sum(request.choice is not None and request.choice.chunks for request in short) == 0


# -- how soon it is right again ----------------------------------------------------------------------------------------


def test_a_tier_that_turns_is_followed() -> None:
    """Three requests after a tier became slow none loads from it; ten after it is fast again all do, and whole."""
    gap_s, count = 30.0, 40

    def pace(at_s: float) -> Pace:
        return SLOW if 1 <= (at_s - START_S) / gap_s // count < 2 else FAST

    outcome = trial(GPU, pace, lambda: texts(3 * count, gap_s, [16]))
    taken = [request.choice.chunks for request in outcome.requests if request.choice]
    assert set(taken[10:count]) == {16}
    assert set(taken[count + 3 : 2 * count]) == {0}
    assert set(taken[2 * count + 10 :]) == {16}


def test_a_look_at_a_slow_tier_makes_no_request_wait() -> None:
    """Requests to a slow tier are as fast as without, but for the first; no more chunks are looked at than requests."""
    outcome = trial(GPU, lambda at_s: SLOW, lambda: texts(400, 0.9, [16], MIB))
    report = outcome.model.report()
    assert 100 < report.probed < 400
    assert all(a <= b + 0.001 for a, b in zip(outcome.ttft_s[5:], outcome.plain_s[5:], strict=True))


def test_looks_become_rare_until_the_tier_is_used_again() -> None:
    """One request in 1, 2, 4, 8, 8, .. looks at as many chunks; a tier that was used and left is looked at soon."""
    model = taught(GPU, {Tier.DISK: SLOW})
    assert [ask(model, on_disk(16)).probe for _ in range(24)] == [1, 0, 2, *[0] * 3, 4, *[0] * 7, 8, *[0] * 7, 8, 0]
    assert ask(model, on_disk(16), busy_s=1000.0).chunks == 16
    assert [ask(model, on_disk(16)).probe for _ in range(3)] == [1, 0, 2]
    model.begin_load(Tier.DISK, SIZE)
    assert not any(ask(model, on_disk(16)).probe for _ in range(20))


def test_a_burst_of_loads_is_over_some_time() -> None:
    """After 40 loads within 40 ms nothing is loaded behind them; when a while has passed, all is again."""
    model = taught(GPU, {Tier.DISK: FAST})
    for _ in range(40):
        model._clock.advance(1e-3)  # type: ignore[attr-defined]
        model._tiers[Tier.DISK].take(40 * SIZE, model._clock.monotonic())
    assert ask(model, on_disk(40)).chunks == 0
    assert ask(later(model), on_disk(40)).chunks == 40


def test_a_silent_tier_is_left_though_it_ends_no_transfer() -> None:
    """While a chunk is a second late nobody loads behind it; once it has landed the tier is used as before."""
    clock = SimulatedClock()
    model = taught(GPU, {Tier.DISK: FAST}, clock)
    model.begin_load(Tier.DISK, SIZE)
    assert ask(model, on_disk(40)).chunks == 40
    clock.advance(1.0)
    assert load_s(model, Tier.DISK, 1, SIZE) > 0.9
    left = ask(model, on_disk(40))
    assert (left.chunks, left.probe) == (0, 0)
    model.end_load(Tier.DISK, SIZE, 1.0)
    assert ask(model, on_disk(40)).chunks == 40


def test_loads_that_do_not_pay_become_rare() -> None:
    """A tier whose loads take far longer than its transfers say is tried ever more rarely, and again when they pay."""
    model = taught(GPU, {Tier.DISK: FAST})
    tried = []
    for waits in (100, 0.5):
        choices = []
        for _ in range(200):
            choice = ask(later(model), on_disk(16))
            choices.append(choice)
            if choice.chunks:
                waited_s = min(waits * choice.load_s, choice.patience_s(0, 0.0) + 0.001)
                model.settle(choice, waited_s, 0 if waits > 1 else choice.chunks)
        tried.append(sum(choice.chunks > 0 for choice in choices))
    assert tried[0] < 40
    assert tried[1] > 180


def test_a_request_that_goes_away_teaches_nothing() -> None:
    """Requests aborted while they wait leave the model as it was."""
    model = taught(GPU, {Tier.DISK: FAST})
    for _ in range(20):
        model.settle(ask(model, on_disk(40)), 0.001, 0)
    assert ask(model, on_disk(40)).chunks == 40
    assert (model.report().late, model.report().loads[Tier.DISK].count) == (0, 0)


def test_transfers_that_failed_after_a_silence_are_slow_ones() -> None:
    """A tier that was given up after a second's silence is not believed to be fast; one that failed at once is."""
    for silence_s, chunks in ((1.0, 0), (0.0, 4)):
        clock = SimulatedClock()
        model = taught(GPU, {Tier.DISK: FAST}, clock)
        for _ in range(3):
            model.begin_load(Tier.DISK, SIZE)
            clock.advance(silence_s)
            model.end_load(Tier.DISK, SIZE, None)
        assert ask(model, on_disk(4)).chunks == chunks


# -- what it says of itself --------------------------------------------------------------------------------------------


def test_the_report_says_what_was_predicted_and_what_came() -> None:
    """Counts, sums and errors of predictions, and what is believed of engine and tiers."""
    model = taught(GPU, {Tier.DISK: FAST, Tier.L2: SLOW})
    loaded, left = ask(model, on_disk(40)), ask(later(model), Run(Tier.L2, 40, SIZE))
    model.settle(loaded, 2 * loaded.load_s, 40)
    model.settle(left, 0.0, 0)
    late = ask(later(model), on_disk(40))
    model.settle(late, 1.0, 10)
    model.begin_load(Tier.DISK, SIZE)
    report = model.report()
    assert (report.asked, report.loaded, report.refused, report.probed, report.late) == (3, 2, 1, 1, 1)
    assert report.loads[Tier.DISK].count == 2
    assert report.loads[Tier.DISK].predicted_s == pytest.approx(2 * loaded.load_s)
    assert report.loads[Tier.DISK].actual_s == pytest.approx(2 * loaded.load_s + 1.0)
    assert report.loads[Tier.DISK].error == pytest.approx((1 / 2 + 1 - late.load_s) / 2)
    assert report.loads[Tier.L2].count == 0
    assert report.prefill.count == 37 and report.prefill.error < 0.01
    assert report.tokens_per_s == pytest.approx(20_000, rel=0.1)
    assert report.tiers[Tier.DISK].bytes_per_s == pytest.approx(FAST.bytes_per_s, rel=0.1)
    assert report.tiers[Tier.DISK].queued_bytes == SIZE
    assert report.tiers[Tier.L2].bytes_per_s == pytest.approx(SLOW.bytes_per_s, rel=0.1)


def test_an_empty_report_is_of_zeros() -> None:
    """Before anything happened nothing is claimed."""
    report = CostModel(2048, LANES, SimulatedClock()).report()
    assert (report.asked, report.prefill.count, report.tokens_per_s) == (0, 0, 0.0)
    assert report.tiers[Tier.DISK].bytes_per_s == 0.0


wild = st.floats() | st.floats(0, 10) | st.just(1e-9)
amounts = st.integers(-5, 5) | st.integers(0, 1 << 62)
events = st.one_of(
    st.tuples(st.just("step"), amounts, amounts, wild),
    st.tuples(st.just("copy"), st.integers(0, 1 << 40), wild),
    st.tuples(st.just("begin"), st.sampled_from(list(LANES)), st.integers(0, 1 << 33)),
    st.tuples(st.just("end"), st.sampled_from(list(LANES)), st.integers(0, 1 << 33), wild | st.none()),
    st.tuples(st.just("pass"), st.floats(0, 100)),
    st.tuples(st.just("cut"), runs, st.integers(0, 1 << 20), st.floats(0, 10), st.integers(0, 99)),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(events, max_size=40))
def test_no_observation_makes_it_wild(happened: Sequence[tuple[object, ...]]) -> None:
    """Whatever is observed, what it says is finite and not negative, and a choice is one of the chain's prefixes."""
    clock = SimulatedClock()
    model = CostModel(2048, LANES, clock)
    for kind, *facts in happened:
        if kind == "pass":
            clock.advance(*facts)  # type: ignore[arg-type]
        elif kind == "cut":
            chain, total, waited_s, landed = facts
            choice = model.cut(Text(total, CHUNK, busy_s=waited_s, step_s=waited_s), chain)  # type: ignore[arg-type]
            said = [choice.load_s, choice.rest_s, choice.recompute_s, choice.patience_s(landed, 0.0)]  # type: ignore[arg-type]
            assert all(math.isfinite(each) and each >= 0 for each in said)
            assert np.isfinite(choice.patiences_s).all() and (choice.patiences_s >= 0).all()
            assert 0 <= choice.chunks + choice.probe <= sum(run.chunks for run in chain)  # type: ignore[attr-defined]
            model.settle(choice, waited_s, landed)  # type: ignore[arg-type]
        else:
            observe = {
                "step": model.observe_step,
                "copy": model.observe_copy,
                "begin": model.begin_load,
                "end": model.end_load,
            }
            observe[kind](*facts)  # type: ignore[index]
        model.check()
    report = model.report()
    for accuracy in (report.prefill, *report.loads.values()):
        assert all(math.isfinite(each) and each >= 0 for each in (accuracy.error, accuracy.actual_s))
    assert all(math.isfinite(each.bytes_per_s) and each.queued_bytes >= 0 for each in report.tiers.values())
