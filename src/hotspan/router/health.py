"""Which replicas may be given requests.

health   unknown -> up <-> down, draining            by health checks every few seconds
breaker  closed -> open -> half-open -> closed       by requests that fail in a row; one request tries it again
drain    by the operator
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from enum import Enum
from http import HTTPStatus
from typing import Any

import orjson

from hotspan.core.breaker import Breaker, BreakerState
from hotspan.core.clock import Clock
from hotspan.http.bodies import LOG, MAX_TEXT_BYTES
from hotspan.http.upstream import BrokenError, UnreachedError, Upstream
from hotspan.router.settings import HealthSettings

logger = logging.getLogger(__name__)

_MAX_BYTES = 4096
"""Of the answer to a health check."""

_SPREAD = 0.1
"""Part of the interval that is drawn by lot, so that several routers do not ask in step."""


class HealthState(Enum):
    """Result of the health checks."""

    UNKNOWN = "unknown"
    UP = "up"
    DOWN = "down"
    DRAINING = "draining"


class ReplicaHealth:
    """Whether one replica may be given requests: what it answers when it is asked, and what became of requests.

    on_change:     called with its name and whether it may be given requests.
    is_drained:    the operator wants no requests there. failed_checks: since the start.
    parts:         of responses that came from it.
    text_bytes:    how large it takes bodies whose prompt is text; None if it does not tell.
    log:           the name of the log of a shared L2 that it reads, as it told last; None if it reads none.
    """

    def __init__(
        self,
        name: str,
        settings: HealthSettings,
        clock: Clock,
        rng: random.Random,
        on_change: Callable[[str, bool], None] = lambda name, can_take: None,
    ) -> None:
        self._name = name
        self._settings = settings
        self._rng = rng
        self._on_change = on_change
        self._row = 0
        self._is_asked = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self.breaker = Breaker(clock, settings.failures, settings.open_s, settings.max_open_s, rng=rng)
        self.health = HealthState.UNKNOWN
        self.is_drained = False
        self.failed_checks = 0
        self.parts = 0
        self.text_bytes: int | None = None
        self.log: str | None = None
        self._to_read = 0

    @property
    def can_take(self) -> bool:
        """Whether a request may go there."""
        return self.health is HealthState.UP and not self.is_drained and not self._to_read and self.breaker.can_take

    # -- requests ------------------------------------------------------------------------------------------------------

    def took(self) -> None:
        """A request is sent there."""
        if self.breaker.state is not BreakerState.CLOSED:
            self.breaker.took()
            self._changed()

    def answered(self) -> None:
        """Its response to a request has begun."""
        was_closed = self.breaker.state is BreakerState.CLOSED
        self.breaker.answered()
        if not was_closed:
            logger.info("breaker_closed replica=%s", self._name)
            self._changed()

    def succeeded(self) -> None:
        """It answered a request to its end."""
        self.answered()
        self.breaker.succeeded()

    def failed(self, why: str) -> None:
        """A request failed there; the next health check comes at once."""
        if self.breaker.failed():
            logger.warning("breaker_opened replica=%s wait_s=%.1f why=%s", self._name, self.breaker.wait_s, why)
        self._changed()
        self._is_asked.set()

    def was_late(self, since: int, why: str) -> None:
        """A request got no answer in time. since: `parts` when it was sent.

        It counts as a failure only if the replica answered nobody meanwhile: else the request was long.
        """
        if self.parts == since:
            self.failed(why)
        else:
            self.gave_up()
            self._is_asked.set()

    def gave_up(self) -> None:
        """A request there ended without a sign of the replica's health: its client hung up."""
        if self.breaker.state is not BreakerState.CLOSED:
            self.breaker.gave_up()
            self._changed()

    def drain(self, *, is_drained: bool, by: str = "operator") -> None:
        """The operator wants no more requests there, or wants them again; or a rollback does."""
        self.is_drained = is_drained
        logger.warning("replica_%s replica=%s by=%s", "drained" if is_drained else "resumed", self._name, by)
        self._changed()

    def must_read(self, generation: int) -> None:
        """An invalidation did not reach it: it gets no requests until it has done what its log says up to there."""
        self._to_read = max(self._to_read, generation)
        self._changed()

    # -- checks --------------------------------------------------------------------------------------------------------

    async def run(self, upstream: Upstream) -> None:
        """Check the replica every few seconds, and whenever a request failed there, until cancelled."""
        interval_s, asked = self._settings.interval_s, self._is_asked
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(interval_s * self._rng.uniform(1 - _SPREAD, 1 + _SPREAD)):
                        await asked.wait()
                asked.clear()
                await self.check(upstream)
                if self.health is HealthState.DOWN or asked.is_set():
                    # Asked at once by many failures: once is enough for a while.
                    await asyncio.sleep(min(interval_s, 0.1))
        finally:
            if self._timer is not None:
                self._timer.cancel()

    async def check(self, upstream: Upstream) -> None:
        """Ask the replica once."""
        before, path, within_s = self.health, self._settings.path, self._settings.answer_s
        path += f"?{LOG}" if self._to_read else ""
        try:
            status, said = await upstream.fetch(self._name, path, within_s=within_s, max_bytes=_MAX_BYTES)
            is_well, why = status == HTTPStatus.OK, str(status)
            answer = _parsed(said)
            if is_well and not self._has_read(answer.get(LOG)):
                is_well, why = False, f"it has not read the L2's log up to generation {self._to_read} yet"
            is_draining = str(answer.get("status", "")).lower() == "draining"
            self.checked(is_well=is_well, is_draining=is_draining and not is_well)
            if is_well:
                told = answer.get(MAX_TEXT_BYTES)
                self.text_bytes = told if type(told) is int and told > 0 else None
        except (UnreachedError, BrokenError) as error:
            why = str(error)
            self.checked(is_well=False)
        if self.health is not before:
            level = logging.INFO if self.health is HealthState.UP else logging.WARNING
            logger.log(level, "replica_%s replica=%s why=%s", self.health.value, self._name, why)
        self._changed()

    def checked(self, *, is_well: bool, is_draining: bool = False) -> None:
        """Take over the result of a check; an answer that says draining holds at once."""
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

    def _has_read(self, told: Any) -> bool:
        """Take over what it tells of its log; whether it has read what it must.

        One that reads another log now has forgotten all that it had (l2/follower.py does so when a log is replaced).
        """
        name, read = (told.get("name"), told.get("generation")) if isinstance(told, dict) else (None, None)
        is_behind = name == self.log and not (type(read) is int and read >= self._to_read)
        if self._to_read and (name is None or is_behind):
            return False
        self.log, self._to_read = name if isinstance(name, str) else None, 0
        return True

    # -- inside --------------------------------------------------------------------------------------------------------

    def _changed(self) -> None:
        """Tell whether it may be given requests, and again when its breaker lets one try."""
        if self.breaker.state is BreakerState.OPEN and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.breaker.wait_s + 0.001, self._wait_over)
        self._on_change(self._name, self.can_take)

    def _wait_over(self) -> None:
        self._timer = None
        self._changed()


def _parsed(said: bytes) -> dict[str, Any]:
    """The object in an answer; an empty one if it is none."""
    try:
        found = orjson.loads(said)
    except orjson.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}
