"""The load of a replica: what was sent is its queue until it answers, and its speed is learnt from that."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotspan.core.errors import ConfigError
from hotspan.router.load import ReplicaLoad, Speeds, TierSpeed, settle_rates


def serve(load: ReplicaLoad, tokens: list[int], tokens_per_s: float, now: float = 0.0, *, together: int = 1) -> float:
    """Send prompts at once to a server that computes `together` of them at a time; returns when the last answered."""
    for number, count in enumerate(tokens):
        load.reserve(number, count, 0.0, now)
    for at in range(0, len(tokens), together):
        batch = tokens[at : at + together]
        now += sum(batch) / tokens_per_s
        for number in range(at, at + len(batch)):
            load.first_byte(number, now)
            load.end(number, now)
    return now


def test_load_counts_from_dispatch() -> None:
    """A request makes others wait from the moment it is sent, not from its answer on."""
    load = ReplicaLoad(Speeds(tokens_per_s=1000))
    assert load.queue_s(5.0) == 0
    load.reserve(1, 2000, 0.5, 5.0)
    assert load.queue_s(5.0) == pytest.approx(2.5)
    assert load.in_flight == 1
    load.reserve(2, 1000, 0.0, 5.0)
    assert load.queue_s(6.0) == pytest.approx(2.5)


def test_queue_shrinks_with_time_but_only_by_the_first() -> None:
    """What waits behind the first is not done while that has not answered; one that hangs looks worse and worse."""
    load = ReplicaLoad(Speeds(tokens_per_s=1000))
    load.reserve(1, 1000, 0.0, 0.0)
    load.reserve(2, 3000, 0.0, 0.0)
    assert load.queue_s(1.0) == pytest.approx(3.0)
    assert load.queue_s(3.0) > 3.5
    assert load.queue_s(100.0) > 50
    load.first_byte(1, 100.0)
    assert load.queue_s(100.0) < 30


def test_first_byte_corrects_the_queue() -> None:
    """An answer that comes early or late takes exactly its own work out of the queue."""
    for answered_s in (0.1, 1.0, 1.9):
        load = ReplicaLoad(Speeds(tokens_per_s=1000))
        load.reserve(1, 1000, 0.0, 0.0)
        load.reserve(2, 500, 0.0, 0.0)
        load.first_byte(1, answered_s)
        assert load.queue_s(answered_s) == pytest.approx(0.5)
        assert load.running == 1


def test_a_later_one_that_answers_first_is_taken_out() -> None:
    """Out of order: the first keeps what is left of its own work."""
    load = ReplicaLoad(Speeds(tokens_per_s=1000))
    load.reserve(1, 4000, 0.0, 0.0)
    load.reserve(2, 1000, 0.0, 0.0)
    load.first_byte(2, 2.0)
    assert load.queue_s(2.0) == pytest.approx(3.0)


def test_one_that_fails_leaves_no_work() -> None:
    """The next one starts when the failed one is given up."""
    load = ReplicaLoad(Speeds(tokens_per_s=1000))
    load.reserve(1, 1000, 0.0, 0.0)
    load.reserve(2, 1000, 0.0, 0.0)
    load.end(1, 10.0)
    assert load.queue_s(10.0) == pytest.approx(1.0)
    load.end(2, 10.0)
    assert (load.queue_s(10.0), load.in_flight) == (0, 0)


@pytest.mark.parametrize("together", [1, 4])
@pytest.mark.parametrize("truth", [500.0, 4_000.0, 60_000.0])
def test_rate_is_learnt(truth: float, together: int) -> None:
    """Whatever the prior, the rate comes within a sixth of the truth, also where prompts are computed together."""
    load, rng, now = ReplicaLoad(Speeds(tokens_per_s=8000)), random.Random(1), 0.0
    for _ in range(60):
        now = serve(load, [rng.randrange(2_000, 20_000) for _ in range(4)], truth, now, together=together)
    assert load.tokens_per_s == pytest.approx(truth, rel=1 / 6)


def test_one_outlier_does_not_spoil_the_rate() -> None:
    """A pause of a minute counts as no more than some times what was expected."""
    load = ReplicaLoad(Speeds(tokens_per_s=8000))
    now = serve(load, [8000] * 20, 8000)
    load.reserve(99, 800, 0.0, now)
    load.first_byte(99, now + 60)
    assert load.tokens_per_s > 0.85 * 8000


def test_what_is_learnt_of_one_is_taken_of_all() -> None:
    """Replicas of which nothing is known are as fast as the others on average; what is learnt of one counts more."""
    first, second, new = (ReplicaLoad(Speeds(tokens_per_s=8000)) for _ in range(3))
    settle_rates([first, second, new])
    assert [load.pace for load in (first, second, new)] == [8000] * 3
    serve(first, [8000] * 40, 50_000)
    settle_rates([first, second, new])
    assert second.tokens_per_s == new.tokens_per_s == pytest.approx(first.tokens_per_s, rel=0.05)
    serve(second, [8000] * 40, 10_000)
    settle_rates([first, second, new])
    assert first.tokens_per_s == pytest.approx(50_000, rel=0.1)
    assert second.tokens_per_s == pytest.approx(10_000, rel=0.1)
    assert 12_000 < new.tokens_per_s < 40_000


@given(st.lists(st.floats(0.9, 1.1), min_size=1, max_size=8), st.lists(st.floats(0.9, 1.1), max_size=8))
def test_noise_makes_no_difference(slow: list[float], fast: list[float]) -> None:
    """Replicas whose rates differ by noise are compared as equals, and slower ones stay slower."""
    rates = [10_000 * each for each in slow] + [30_000 * each for each in fast]
    loads = [ReplicaLoad() for _ in rates]
    for load, rate in zip(loads, rates, strict=True):
        load.tell(Speeds(tokens_per_s=rate))
    settle_rates(loads)
    assert len({load.pace for load in loads[: len(slow)]}) == 1
    assert len({load.pace for load in loads[len(slow) :]}) <= 1
    assert all(load.pace == pytest.approx(10_000, rel=0.1001) for load in loads[: len(slow)])
    assert all(load.pace == pytest.approx(30_000, rel=0.1001) for load in loads[len(slow) :])
    assert [load.tokens_per_s for load in loads] == pytest.approx(rates)


def test_what_the_replica_tells_is_taken() -> None:
    """It replaces what was learnt so far, and learning goes on from there."""
    load = ReplicaLoad(Speeds(tokens_per_s=8000))
    serve(load, [8000] * 20, 8000)
    load.tell(Speeds(tokens_per_s=2000, cache_tokens=5))
    assert load.tokens_per_s == pytest.approx(2000)
    serve(load, [8000] * 40, 3000, 1e6)
    assert load.tokens_per_s == pytest.approx(3000, rel=0.1)
    load.tell(Speeds(cache_tokens=7), is_measured=False)
    assert load.tokens_per_s == pytest.approx(3000, rel=0.1)
    assert load.speeds.cache_tokens == 7


@given(rate=st.sampled_from([0.0, -1.0, float("inf"), float("nan")]))
def test_no_speeds(rate: float) -> None:
    """What can't be a speed is refused."""
    with pytest.raises(ConfigError, match="tokens_per_s"):
        Speeds(tokens_per_s=rate)
    if rate != float("inf"):
        with pytest.raises(ConfigError, match="tokens_per_s"):
            TierSpeed(rate)


def test_check_finds() -> None:
    """`check` can fail."""
    load = ReplicaLoad()
    load.reserve(1, 10, 0.0, 0.0)
    load.check()
    load.waiting_tokens += 1
    with pytest.raises(AssertionError):
        load.check()
