"""The KV events of all replicas, and what the router may rely on because of them: exact, or assumed and why."""

import asyncio
import functools
import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from hotspan.core.curve import CurveKeys
from hotspan.core.errors import ConfigError
from hotspan.router.event_sync import REASONS
from hotspan.router.events import EventFeed
from hotspan.router.fleet import Fleet
from hotspan.router.metrics import Figure, Sample
from hotspan.router.settings import Replica
from hotspan.router.text import Prompts
from hotspan.router.tokens import TokenTable

logger = logging.getLogger(__name__)

_NONE = "no_events"
_COUNTED = {
    "messages": "Messages of KV events.",
    "gaps": "Gaps in a replica's messages.",
    "losses": "Gaps that no replay filled.",
    "restarts": "Times that a replica began anew.",
    "garbled": "Messages that could not be read.",
    "failures": "Connections to a replica's events that ended.",
    "duplicates": "Messages that had come before.",
    "ignored_blocks": "Blocks of events in media or KV cache groups that are not followed.",
    "dropped_blocks": "Blocks forgotten, or not taken, for want of memory.",
    "unknown_blocks": "Blocks of events without a known place in a text.",
}


class Feeds:
    """The feeds of those replicas that have events. One event loop's.

    slots: of the replicas in the index. keys: of their events.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        slots: Mapping[str, int],
        fleet: Fleet,
        prompts: Prompts,
        table: TokenTable | None,
        rng: random.Random,
        keys: CurveKeys | None = None,
    ) -> None:
        """Raises: ConfigError where events can't be read without a model's tokens."""
        self._fleet = fleet
        self._names = [replica.url for replica in replicas]
        self._reasons = {replica.url: "starting" if replica.events else _NONE for replica in replicas}
        self._feeds: dict[str, EventFeed] = {}
        self._tasks: list[asyncio.Task[None]] = []
        for replica in replicas:
            if not replica.events:
                continue
            if table is None:
                raise ConfigError("events name tokens: give the model's directory with --model, or leave events= out")
            self._feeds[replica.url] = EventFeed(
                slots[replica.url],
                replica.events,
                replica.replay,
                fleet.index,
                table.join,
                prompts.roots.of_engine,
                functools.partial(self.heard, replica.url),
                rng=rng,
                keys=keys,
            )

    def begin(self) -> None:
        """Follow them from now on."""
        self._tasks = [asyncio.create_task(feed.run()) for feed in self._feeds.values()]

    async def end(self) -> None:
        """Follow none of them any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def figures(self) -> list[Figure]:
        """For the metrics."""
        reasons = ("", _NONE, *REASONS)
        states = Figure(
            "events_state",
            "Why what a replica holds is assumed and not known; 1 at the reason, '' is known exactly.",
            ("replica", "reason"),
            lambda: [
                Sample((name, reason), float(self._reasons[name] == reason))
                for name in self._names
                for reason in reasons
            ],
        )
        return [states, *(self._counter(name, meaning) for name, meaning in _COUNTED.items())]

    def heard(self, name: str, is_exact: bool, reason: str) -> None:
        """A feed's state changed."""
        level = logging.INFO if is_exact else logging.WARNING
        logger.log(level, "kv_events_%s replica=%s reason=%s", "exact" if is_exact else "assumed", name, reason)
        self._reasons[name] = "" if is_exact else reason
        self._fleet.set_exact(name, is_exact)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _counter(self, name: str, meaning: str) -> Figure:
        def read() -> list[Sample]:
            return [Sample((url,), float(asdict(feed.report())[name])) for url, feed in self._feeds.items()]

        return Figure(f"events_{name}", meaning, ("replica",), read, is_counter=True)
