"""Receipts of invalidations: durable, and read by which replicas. One thread answers all that wait."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hotspan.core.clock import Clock, SystemClock
from hotspan.core.threads import start_worker
from hotspan.l2.follower import WITNESS_S, LogFollower

logger = logging.getLogger(__name__)

_ASK_EVERY_S = 0.05

Tell = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A receipt that waits for other replicas to read its entry, at most until a time."""

    generation: int
    until_s: float
    tell: Tell


class Receipts:
    """Answers invalidations once they are durable and read. Any thread may call `ended`.

    One that is cut off from the log is among the missing as long as its last word is remembered, and reads nothing from
    the L2 until it has read the log again. However many receipts wait, the log is asked once for all of them.
    """

    def __init__(self, replica: str, follower: LogFollower | None, clock: Clock | None = None) -> None:
        self._replica = replica
        self._follower = follower
        self._clock = clock or SystemClock()
        self._waiting: list[_Waiting] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing = False

    def ended(self, is_durable: bool, tell: Tell, logged: int | None = None) -> None:
        """An invalidation is durable, or can't be: `tell` is called with what its receipt says of that.

        logged: the generation of its entry in the log, if another replica wrote it.
        """
        if self._follower is None or not is_durable:
            tell({"is_durable": is_durable, "replicas": [self._replica]})
            return
        generation = self._follower.appended if logged is None else logged
        with self._changed:
            self._waiting.append(_Waiting(generation, self._clock.monotonic() + WITNESS_S, tell))
            if self._thread is None and not self._closing:
                self._thread = start_worker("receipts", self._run, is_over=lambda: self._closing)
            self._changed.notify()

    def close(self) -> None:
        """Answer no more receipts."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def step(self, follower: LogFollower) -> None:
        """Answer those that every replica has read, and those that have waited enough."""
        with self._changed:
            waiting = list(self._waiting)
        try:
            read = follower.readers()
        except Exception as error:  # also a mistake of ours: it must not end the thread that answers everybody
            logger.warning("l2_witnesses_unknown error=%s", str(error), exc_info=not isinstance(error, OSError))
            read = {self._replica: follower.generation}
            waiting = [_Waiting(0, 0.0, each.tell) for each in waiting]
        now = self._clock.monotonic()
        for each in waiting:
            missing = sorted(name for name, generation in read.items() if generation < each.generation)
            if missing and now < each.until_s:
                continue
            with self._changed:
                self._waiting = [other for other in self._waiting if other.tell is not each.tell]
            told: dict[str, Any] = {"replicas": sorted(read.keys() - set(missing)), "replicas_missing": missing}
            if follower.is_shared and follower.position is not None:
                told["log"] = {"epoch": follower.position.epoch.hex(), "generation": each.generation}
            each.tell({"is_durable": True} | told)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if self._closing or self._follower is None:
                    return
            self.step(self._follower)
            with self._changed:
                if self._waiting:
                    self._changed.wait_for(lambda: self._closing, _ASK_EVERY_S)
