"""Asks replicas how they are, every few seconds and whenever a request fared badly there."""

import asyncio
import contextlib
import logging
import random
from collections.abc import Mapping
from http import HTTPStatus

import orjson

from hotspan.core.breaker import BreakerState
from hotspan.http.upstream import BrokenError, UnreachedError, Upstream
from hotspan.router.dispatcher import Dispatcher
from hotspan.router.health import HealthSettings, HealthState, ReplicaHealth

logger = logging.getLogger(__name__)

_MAX_BYTES = 4096
_SPREAD = 0.1
"""Of the interval, by lot, so that several routers do not ask in step."""


class HealthChecks:
    """Keeps the replicas' state, and tells `dispatcher` who may be given requests. One event loop's.

    parts: of answers that came from each replica.
    """

    def __init__(
        self,
        replica_health: Mapping[str, ReplicaHealth],
        dispatcher: Dispatcher,
        upstream: Upstream,
        settings: HealthSettings,
        *,
        rng: random.Random,
    ) -> None:
        self._replica_health = replica_health
        self._dispatcher = dispatcher
        self._upstream = upstream
        self._settings = settings
        self._rng = rng
        self._asked = {name: asyncio.Event() for name in replica_health}
        self.parts = dict.fromkeys(replica_health, 0)
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def begin(self) -> None:
        """Ask all for the first time, and go on asking."""
        await asyncio.gather(*(self._check(name) for name in self._replica_health))
        self._tasks = [asyncio.create_task(self._run(name)) for name in self._replica_health]

    async def end(self) -> None:
        """Ask no more."""
        for timer in self._timers.values():
            timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def succeeded(self, name: str) -> None:
        """A replica answered a request to its end."""
        self.answered(name)
        self._replica_health[name].breaker.succeeded()

    def answered(self, name: str) -> None:
        """A replica's answer has begun."""
        breaker = self._replica_health[name].breaker
        was_closed = breaker.state is BreakerState.CLOSED
        breaker.answered()
        if not was_closed:
            logger.info("breaker_closed replica=%s", name)
            self.changed(name)

    def failed(self, name: str, why: str) -> None:
        """A request failed at a replica; it is asked how it is at once."""
        breaker = self._replica_health[name].breaker
        if breaker.failed():
            logger.warning("breaker_opened replica=%s wait_s=%.1f why=%s", name, breaker.wait_s, why)
        self.changed(name)
        self._asked[name].set()

    def was_late(self, name: str, since: int, why: str) -> None:
        """A request got no answer in time. since: `parts` when it was sent.

        It counts as a failure of the replica's only if that answered nobody meanwhile: else the request was long.
        """
        if self.parts[name] == since:
            self.failed(name, why)
        else:
            self.gave_up(name)
            self._asked[name].set()

    def gave_up(self, name: str) -> None:
        """A request ended at a replica without saying anything of it."""
        breaker = self._replica_health[name].breaker
        if breaker.state is not BreakerState.CLOSED:
            breaker.gave_up()
            self.changed(name)

    def took(self, name: str) -> None:
        """A request is sent to a replica."""
        breaker = self._replica_health[name].breaker
        if breaker.state is not BreakerState.CLOSED:
            breaker.took()
            self.changed(name)

    def drain(self, name: str, *, is_drained: bool) -> None:
        """The operator wants no more requests there, or wants them again."""
        self._replica_health[name].is_drained = is_drained
        logger.warning("replica_%s replica=%s by=operator", "drained" if is_drained else "resumed", name)
        self.changed(name)

    def changed(self, name: str) -> None:
        """Something about a replica is different: see whether it may be given requests."""
        replica_health = self._replica_health[name]
        if replica_health.breaker.state is BreakerState.OPEN and name not in self._timers:
            wait_s = replica_health.breaker.wait_s
            self._timers[name] = asyncio.get_running_loop().call_later(wait_s + 0.001, self._again, name)
        self._dispatcher.set_up(name, replica_health.can_take)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _again(self, name: str) -> None:
        del self._timers[name]
        self.changed(name)

    async def _run(self, name: str) -> None:
        interval_s, asked = self._settings.interval_s, self._asked[name]
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval_s * self._rng.uniform(1 - _SPREAD, 1 + _SPREAD)):
                    await asked.wait()
            asked.clear()
            await self._check(name)
            if self._replica_health[name].health is HealthState.DOWN or asked.is_set():
                # Asked at once by many failures: once is enough for a while.
                await asyncio.sleep(min(interval_s, 0.1))

    async def _check(self, name: str) -> None:
        replica_health = self._replica_health[name]
        before = replica_health.health
        is_well, is_draining, why = await self._ask(name)
        replica_health.checked(is_well=is_well, is_draining=is_draining)
        if replica_health.health is not before:
            level = logging.INFO if replica_health.health is HealthState.UP else logging.WARNING
            logger.log(level, "replica_%s replica=%s why=%s", replica_health.health.value, name, why)
        self.changed(name)

    async def _ask(self, name: str) -> tuple[bool, bool, str]:
        """Whether it is well, whether it is draining, and what it said."""
        path, within_s = self._settings.path, self._settings.answer_s
        try:
            status, said = await self._upstream.fetch(name, path, within_s=within_s, max_bytes=_MAX_BYTES)
        except (UnreachedError, BrokenError) as error:
            return False, False, str(error)
        return status == HTTPStatus.OK, status != HTTPStatus.OK and _says_draining(said), str(status)


def _says_draining(said: bytes) -> bool:
    try:
        found = orjson.loads(said)
    except orjson.JSONDecodeError:
        return False
    return isinstance(found, dict) and str(found.get("status", "")).lower() == "draining"
