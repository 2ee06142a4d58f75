"""A replica that computes other prompts than the router reads is found out by its events, and goes on without them."""

import logging

import pytest

from hotspan.router.fleet import Fleet
from hotspan.router.matching import CHECKS, LEAST_PIECES
from hotspan.router.types import Medium
from hotspan.testing.clock import SimulatedClock
from tests.router.test_fleet import ask, fleet, send

NAME = "http://10.0.0.0:8000"
LENGTH = 8


def played(to: Fleet, clock: SimulatedClock, count: int, first: int, reported: int, *, failed: bool = False) -> None:
    """So many new prompts, answered one after the other; `reported` of the pieces of each are in events."""
    for number in range(first, first + count):
        keys = tuple(range(1000 * number, 1000 * number + LENGTH))
        ticket = send(to, ask(*keys))
        to.index.add(0, Medium.GPU, keys[:reported])
        ticket.first_byte()
        ticket.end(answer_tokens=4, failed=failed)
        clock.advance(2.0)


@pytest.fixture
def clock() -> SimulatedClock:
    return SimulatedClock()


@pytest.fixture
def router(clock: SimulatedClock) -> Fleet:
    return fleet([NAME], exact=True, clock=clock)


def test_prompts_that_events_report_match(router: Fleet, clock: SimulatedClock) -> None:
    """Nothing changes as long as events have the prompts that were sent."""
    played(router, clock, 3 * CHECKS, 1, LENGTH - 1)
    replica = router.replicas[NAME]
    assert replica.is_exact and replica.matching.is_good and replica.matching.share == 1.0


def test_prompts_that_no_event_reports_are_found_out(
    router: Fleet, clock: SimulatedClock, caplog: pytest.LogCaptureFixture
) -> None:
    """After CHECKS of them it is said once, and a prompt that was sent there is expected there again."""
    with caplog.at_level(logging.INFO):
        played(router, clock, CHECKS, 1, 0)
        assert router.replicas[NAME].is_exact, "one has not been looked for yet"
        played(router, clock, CHECKS, 100, 0)
    replica = router.replicas[NAME]
    assert replica.is_told and not replica.is_exact and replica.matching.share == 0.0
    assert [record.message.split()[0] for record in caplog.records] == ["prompts_unmatched"]
    known = ask(*range(110_000, 110_000 + LENGTH))
    assert router.choose(known).cached_tokens > 0
    router.check()


def test_it_is_found_out_when_they_match_again(router: Fleet, clock: SimulatedClock) -> None:
    """A replica that was restarted with the template that is read here is exact again."""
    played(router, clock, 2 * CHECKS, 1, 0)
    assert not router.replicas[NAME].is_exact
    played(router, clock, 2 * CHECKS, 100, LENGTH - 1)
    assert router.replicas[NAME].is_exact
    router.check()


def test_a_beginning_that_is_the_same_is_no_match(router: Fleet, clock: SimulatedClock) -> None:
    """Of long prompts that agree in their first piece alone, the share counts."""
    for number in range(1, 2 * CHECKS):
        keys = (7, *range(1000 * number, 1000 * number + 30))
        ticket = send(router, ask(*keys))
        router.index.add(0, Medium.RAM, keys[:1])
        ticket.end()
        clock.advance(2.0)
    assert not router.replicas[NAME].is_exact


def test_what_failed_or_is_short_says_nothing(router: Fleet, clock: SimulatedClock) -> None:
    """Nothing is expected in events of a request that failed, nor of a prompt whose pieces may all be open."""
    played(router, clock, 3 * CHECKS, 1, 0, failed=True)
    for number in range(3 * CHECKS):
        send(router, ask(*range(1000 * number, 1000 * number + LEAST_PIECES - 1))).end()
        clock.advance(2.0)
    assert router.replicas[NAME].is_exact


def test_replicas_without_events_are_not_judged(clock: SimulatedClock) -> None:
    """There is nothing to compare; events that are lost and whole again do not make prompts match by themselves."""
    without = fleet([NAME], exact=False, clock=clock)
    played(without, clock, 3 * CHECKS, 1, 0)
    assert without.replicas[NAME].matching.is_good
    without.set_exact(NAME, True)
    played(without, clock, 2 * CHECKS, 200, 0)
    assert not without.replicas[NAME].is_exact
    without.set_exact(NAME, False)
    without.set_exact(NAME, True)
    assert not without.replicas[NAME].is_exact and without.replicas[NAME].is_told
