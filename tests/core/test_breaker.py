"""The circuit breaker, on a simulated clock."""

import random

from hypothesis import given
from hypothesis import strategies as st

from hotspan.core.breaker import Breaker, BreakerState
from hotspan.testing.clock import SimulatedClock


def breaker() -> tuple[Breaker, SimulatedClock]:
    clock = SimulatedClock()
    return Breaker(clock, 3, 1.0, 8.0, rng=random.Random(1)), clock


def test_three_failures_in_a_row_open_it() -> None:
    """Failures with a success between do not add up; three in a row do."""
    one, _ = breaker()
    for _ in range(5):
        one.failed()
        one.failed()
        one.succeeded()
    assert one.can_take and one.opened == 0
    for _ in range(3):
        one.failed()
    assert one.state is BreakerState.OPEN and not one.can_take and one.opened == 1


def test_half_open_lets_one_try() -> None:
    """After its time one request may try it, and no second one until the first is over; success closes it."""
    one, clock = breaker()
    for _ in range(3):
        one.failed()
    clock.advance(one.wait_s)
    assert one.state is BreakerState.HALF_OPEN and one.can_take
    one.took()
    assert not one.can_take
    one.gave_up()
    assert one.can_take
    one.took()
    one.succeeded()
    assert one.state is BreakerState.CLOSED and one.can_take


def test_each_trial_that_fails_doubles_the_wait() -> None:
    """1, 2, 4, 8, 8 s, each with up to a tenth more; after a success it begins with 1 s again."""
    one, clock = breaker()
    for _ in range(3):
        one.failed()
    for expected_s in (1, 2, 4, 8, 8):
        assert expected_s <= one.wait_s <= 1.1 * expected_s
        clock.advance(one.wait_s)
        one.took()
        one.failed()
    clock.advance(one.wait_s)
    one.succeeded()
    for _ in range(3):
        one.failed()
    assert one.wait_s <= 1.1


def test_a_trial_that_breaks_off_lengthens_it() -> None:
    """A call that begins to succeed closes it; if it fails after all, the pause goes on growing."""
    one, clock = breaker()
    for _ in range(3):
        one.failed()
    for expected_s in (1, 2, 4):
        assert expected_s <= one.wait_s <= 1.1 * expected_s
        clock.advance(one.wait_s)
        one.took()
        one.answered()
        assert one.state is BreakerState.CLOSED
        assert one.failed()


def test_late_failures_do_not_lengthen_it() -> None:
    """Requests that were under way when it opened, and fail too, change nothing."""
    one, _ = breaker()
    for _ in range(3):
        one.failed()
    wait_s = one.wait_s
    for _ in range(50):
        one.failed()
    assert one.wait_s == wait_s and one.opened == 1


@given(st.lists(st.sampled_from(["fail", "succeed", "take", "give up", "wait"]), max_size=60))
def test_a_replica_can_always_come_back(steps: list[str]) -> None:
    """Whatever happened, some time later a request may try it, and its success closes the breaker."""
    one, clock = breaker()
    for step in steps:
        if step == "wait":
            clock.advance(0.7)
        else:
            {"fail": one.failed, "succeed": one.succeeded, "take": one.took, "give up": one.gave_up}[step]()
    one.gave_up()
    clock.advance(10)
    assert one.can_take
    one.took()
    one.succeeded()
    assert one.state is BreakerState.CLOSED


def test_pauses_grow_until_it_was_steady() -> None:
    """With `steady_s`, a breaker that opens again sooner doubles its pause whatever succeeded; later it does not."""
    clock = SimulatedClock()
    one = Breaker(clock, failures=1, longest_s=4.0, steady_s=30.0)
    pauses = []
    for closed_s in (100.0, 29.0, 29.0, 29.0, 30.0):
        one.succeeded()
        clock.advance(closed_s)
        assert one.failed()
        pauses.append(one.pause_s)
        clock.advance(one.wait_s)
    assert pauses == [1, 2, 4, 4, 1]


def test_open_needs_no_failure() -> None:
    """What is opened for another reason pauses and comes back like one that failed."""
    clock = SimulatedClock()
    one = Breaker(clock)
    one.open()
    assert one.state is BreakerState.OPEN and not one.can_take and one.wait_s == one.pause_s == 1.0
    clock.advance(1.0)
    assert one.state is BreakerState.HALF_OPEN and one.can_take
    one.answered()
    assert one.state is BreakerState.CLOSED
