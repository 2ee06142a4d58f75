"""What replicas measured themselves: how fast they compute prompts, from their own metrics, every now and then."""

import asyncio
import dataclasses
import math
import re
from collections.abc import Sequence

from hotspan.core.errors import ConfigError
from hotspan.router.fleet import Fleet
from hotspan.router.upstream import BrokenError, UnreachedError, Upstream

_PATH = "/metrics"
_INTERVAL_S = 15.0
_TIMEOUT_S = 2.0
_MOST_BYTES = 4 << 20
_RATE = re.compile(rb"^hotspan_cost_prefill_tokens_per_second(?:\{[^}\n]*\})? ([0-9.eE+]+)$", re.MULTILINE)


class Measured:
    """Tells the fleet. One event loop's. A replica that has no such metric, or shows it to nobody, is left alone."""

    def __init__(self, fleet: Fleet, names: Sequence[str], upstream: Upstream, interval_s: float = _INTERVAL_S) -> None:
        self._fleet = fleet
        self._names = names
        self._upstream = upstream
        self._interval_s = interval_s
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Ask from now on."""
        self._task = asyncio.create_task(self._run())

    async def end(self) -> None:
        """Ask no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            for name in self._names:
                await self._ask(name)
            await asyncio.sleep(self._interval_s)

    async def _ask(self, name: str) -> None:
        answer = None
        try:
            answer = await self._upstream.ask(name, "GET", _PATH, [], within_s=_TIMEOUT_S)
            rate = rate_of(await answer.whole(_MOST_BYTES)) if answer.status == 200 else None
            if rate is not None:
                speeds = self._fleet.replicas[name].speeds
                self._fleet.tell(name, dataclasses.replace(speeds, tokens_per_s=rate))
        except (UnreachedError, BrokenError, ConfigError):
            pass  # what was learnt so far stays
        finally:
            if answer is not None:
                answer.close()


def rate_of(page: bytes) -> float | None:
    """The prompt tokens a second that a page of metrics tells, of all its engines together; None if it tells none."""
    total = 0.0
    for found in _RATE.findall(page):
        try:
            total += float(found)
        except ValueError:
            return None
    return total if 0 < total < math.inf else None
