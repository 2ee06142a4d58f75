"""Which replicas may be given work: what they say when asked, what became of requests, and what the operator says.

health   unknown -> up <-> down      asked every few seconds; draining: it answers, and wants no more
breaker  closed -> open -> half-open -> closed      requests that failed in a row; one request tries it again
drain    by the operator
"""

import random
from dataclasses import dataclass
from enum import Enum

from hotspan.config.options import option
from hotspan.core.breaker import Breaker
from hotspan.core.clock import Clock
from hotspan.core.errors import ConfigError


class HealthState(Enum):
    """What a replica says of itself."""

    UNKNOWN = "unknown"
    UP = "up"
    DOWN = "down"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class HealthSettings:
    """When a replica is taken out, and when it is taken back.

    timeout_s:           of one health check; None is the interval, and at least 1 s.
    downs, ups:          checks in a row that change a replica's state; the first of all counts at once.
    failures:            failed requests in a row that open the circuit breaker.
    open_s, max_open_s:  how long the breaker is open first, and at most: it doubles with each trial that fails.
    """

    path: str = option("/ping", "Health-check path; 200 means healthy.", name="health_path")
    interval_s: float = option(2.0, "Seconds between health checks.", name="health_interval_s")
    timeout_s: float | None = None
    downs: int = 2
    ups: int = 1
    failures: int = 3
    open_s: float = 1.0
    max_open_s: float = 30.0

    def __post_init__(self) -> None:
        """Raises: ConfigError for what can't be checked."""
        if not self.path.startswith("/"):
            raise ConfigError(f"--health-path {self.path}: give a path, such as /ping or /health")
        if self.interval_s <= 0:
            raise ConfigError(f"--health-interval-s is {self.interval_s}: give seconds above 0")

    @property
    def answer_s(self) -> float:
        """How long a replica has to answer a health check."""
        return max(self.interval_s, 1.0) if self.timeout_s is None else self.timeout_s


class ReplicaHealth:
    """All that decides whether one replica is given work.

    is_drained: the operator wants none there. failed_checks: since the start.
    """

    def __init__(self, settings: HealthSettings, clock: Clock, rng: random.Random) -> None:
        self._settings = settings
        self.breaker = Breaker(clock, settings.failures, settings.open_s, settings.max_open_s, rng=rng)
        self.health = HealthState.UNKNOWN
        self.is_drained = False
        self.failed_checks = 0
        self._row = 0

    @property
    def can_take(self) -> bool:
        """Whether a request may go there."""
        return self.health is HealthState.UP and not self.is_drained and self.breaker.can_take

    def checked(self, *, is_well: bool, is_draining: bool = False) -> None:
        """What it said when it was asked; an answer that says draining holds at once."""
        self.failed_checks += not is_well
        if is_draining:
            self.health, self._row = HealthState.DRAINING, 0
            return
        towards = HealthState.UP if is_well else HealthState.DOWN
        if towards is self.health:
            self._row = 0
            return
        self._row += 1
        needed = self._settings.ups if is_well else self._settings.downs
        if self.health in (HealthState.UNKNOWN, HealthState.DRAINING) or self._row >= needed:
            if towards is HealthState.UP:
                self.breaker.half_open()
            self.health, self._row = towards, 0


class RetryBudget:
    """How many requests may be sent again: a part of all, and a reserve for a replica that dies with many.

    share:   retries for each request. reserve: at most so many at once; it fills up again by itself in a minute.
    """

    def __init__(self, share: float, reserve: float, clock: Clock) -> None:
        self._share = share
        self._reserve = max(reserve, 1.0)
        self._clock = clock
        self._left = reserve
        self._at_s = clock.monotonic()

    @property
    def left(self) -> float:
        """Retries that may be made now."""
        now_s = self._clock.monotonic()
        self._left = min(self._reserve, self._left + (now_s - self._at_s) * self._reserve / _FILLS_S)
        self._at_s = now_s
        return self._left

    def asked(self) -> None:
        """A request came."""
        self._left = min(self._reserve, self._left + self._share)

    def spend(self) -> bool:
        """Whether a retry may be made; if so, it is counted."""
        if self.left < 1:
            return False
        self._left -= 1
        return True


_FILLS_S = 60.0
