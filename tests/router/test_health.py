"""Health, on a simulated clock."""

import random

from hotspan.core.breaker import BreakerState
from hotspan.router.health import HealthState, ReplicaHealth
from hotspan.router.settings import HealthSettings
from hotspan.testing.clock import SimulatedClock

SETTINGS = HealthSettings(failures=3, open_s=1.0, max_open_s=8.0, downs=2, ups=2)


def health() -> ReplicaHealth:
    return ReplicaHealth("r", SETTINGS, SimulatedClock(), random.Random(1))


def test_health_takes_several_answers() -> None:
    """The first answer counts at once; later ones need two in a row to change it, either way."""
    one = health()
    assert one.health is HealthState.UNKNOWN and not one.can_take
    one.checked(is_well=True)
    assert one.can_take
    seen = []
    for is_well in (False, True, False, False, True, False, True, True):
        one.checked(is_well=is_well)
        seen.append(one.health is HealthState.UP)
    assert seen == [True, True, True, False, False, False, False, True]


def test_draining_holds_at_once() -> None:
    """A replica that says it is draining gets nothing more, and is back with its first good answer."""
    one = health()
    one.checked(is_well=True)
    one.checked(is_well=False, is_draining=True)
    assert one.health is HealthState.DRAINING and not one.can_take
    one.checked(is_well=True)
    assert one.can_take
    one.is_drained = True
    assert not one.can_take


def test_a_replica_that_came_back_is_tried_at_once() -> None:
    """Down and up again, it need not wait for what its breaker had left; the first request still tries it alone."""
    one = health()
    one.checked(is_well=True)
    for _ in range(3):
        one.breaker.failed()
    for is_well in (False, False, True, True):
        one.checked(is_well=is_well)
    assert one.breaker.state is BreakerState.HALF_OPEN and one.can_take
