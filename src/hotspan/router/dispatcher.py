"""Gives each request a slot at a replica, which takes so many at a time; the others wait in the fair queue.

take -> room? -> choose, reserve -> Slot          give -> room -> the next of the queue
         no -> FairQueue -> Slot, refused, or too late
"""

import asyncio
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

from hotspan.core.clock import Clock, SystemClock
from hotspan.http.errors import HttpError
from hotspan.router.fleet import Fleet, NoReplicaError, Ticket
from hotspan.router.policy import Decision
from hotspan.router.queue import FairQueue, Waiting, Where
from hotspan.router.types import Ask

_ANSWER_TOKENS = 256
"""Of an answer whose length nobody knows, for the shares of the queue."""

_MAX_RETRY_S = 60
_WEIGHT = 0.1
"""Of the last request in the mean time at a replica."""


@dataclass(eq=False, slots=True)
class Slot:
    """A request's slot at a replica. `Dispatcher.give` ends it, once."""

    decision: Decision
    ticket: Ticket
    began_s: float

    @property
    def name(self) -> str:
        """The replica."""
        return self.decision.name


@dataclass(eq=False, slots=True)
class _Want:
    """What a request wants. without: replicas that it has tried."""

    ask: Ask
    where: Where | None
    without: frozenset[str]
    found: "asyncio.Future[Slot]"


class Dispatcher:
    """All slots. One event loop's.

    on_take: told whenever a replica is chosen.
    waited_s: by those who waited in the queue, all together. overdue: who waited for too long.
    """

    def __init__(
        self,
        fleet: Fleet,
        names: Collection[str],
        *,
        max_in_flight: int,
        queue_size: int,
        queue_timeout_s: float,
        clock: Clock | None = None,
        on_take: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._fleet = fleet
        self._most = max_in_flight
        self._timeout_s = queue_timeout_s
        self._clock = clock or SystemClock()
        self._on_take = on_take
        self._up: set[str] = set()
        self._room: set[str] = set()
        self._mean_s = 1.0
        self.queue: FairQueue[_Want] = FairQueue(queue_size)
        self.in_flight = dict.fromkeys(names, 0)
        self.waited_s = 0.0
        self.overdue = 0
        for name in names:
            fleet.set_up(name, False)

    @property
    def up(self) -> Collection[str]:
        """Replicas that may be given requests."""
        return self._up

    def set_up(self, name: str, is_up: bool) -> None:
        """Whether a replica may be given requests."""
        if is_up == (name in self._up):
            return
        self._fleet.set_up(name, is_up)
        (self._up.add if is_up else self._up.discard)(name)
        self._note(name)
        self._serve()

    async def take(
        self, ask: Ask, *, where: Where | None = None, without: frozenset[str] = frozenset(), is_retry: bool = False
    ) -> Slot:
        """A slot at the best replica that has one; waits in the queue while none has.

        where:    these only. without: and not these.
        is_retry: it has waited before: it goes before the others of its tenant.
        Raises:   HttpError 429 or 503; NoReplicaError if no replica is up that may have it.
        """
        if not len(self.queue):
            slot = self._try(ask, where, without)
            if slot is not None:
                return slot
        if without:
            where = frozenset(where if where is not None else self.in_flight) - without
        return await self._wait(ask, where, without, is_retry=is_retry)

    def give(self, slot: Slot) -> None:
        """A request has left its replica; if nobody said how it ended, it failed."""
        slot.ticket.end(failed=True)
        self.in_flight[slot.name] -= 1
        self._mean_s += _WEIGHT * (self._clock.monotonic() - slot.began_s - self._mean_s)
        self._note(slot.name)
        self._serve()

    # -- inside --------------------------------------------------------------------------------------------------------

    async def _wait(self, ask: Ask, where: Where | None, without: frozenset[str], *, is_retry: bool) -> Slot:
        want = _Want(ask, where, without, asyncio.get_running_loop().create_future())
        cost = max(1.0, float(ask.tokens + (ask.answer_tokens or _ANSWER_TOKENS)))
        entry = Waiting(want, ask.tenant, where, cost)
        leaving = self.queue.push(entry, is_first=is_retry)
        if leaving is entry:
            raise self._full()
        if leaving is not None and not leaving.item.found.done():
            leaving.item.found.set_exception(self._full())
        self._serve()
        began_s = self._clock.monotonic()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await want.found
        except BaseException as error:
            self._return(want.found)
            if not isinstance(error, TimeoutError):
                raise
            self.overdue += 1
            message = f"every replica is busy, and none was free within {self._timeout_s:g} s: try again"
            raise HttpError(503, message, retry_s=self._retry_s()) from error
        finally:
            self.waited_s += self._clock.monotonic() - began_s
            self.queue.remove(entry)

    def _return(self, found: "asyncio.Future[Slot]") -> None:
        """Give back a slot that came in the moment in which nobody waited for it any more."""
        if not found.done():
            found.cancel()
        elif not found.cancelled() and found.exception() is None:
            self.give(found.result())

    def _serve(self) -> None:
        """Give slots to those who wait, as far as there are any."""
        while len(self.queue):
            entry = self.queue.pop(self._room, self._up)
            if entry is None:
                return
            want = entry.item
            if want.found.done():
                continue
            try:
                slot = self._try(want.ask, want.where, want.without)
            except NoReplicaError as error:
                want.found.set_exception(error)
                continue
            if slot is None:
                raise RuntimeError("the queue gave a request whose replicas are full")
            want.found.set_result(slot)

    def _try(self, ask: Ask, where: Where | None, without: frozenset[str]) -> Slot | None:
        """A slot now; None if there is one only later. Raises: NoReplicaError if there is none."""
        if len(self._room) == len(self._up):
            decision = self._fleet.choose(ask, among=where, without=without)
        else:
            among = self._room if where is None else self._room & where
            try:
                decision = self._fleet.choose(ask, among=among, without=without)
            except NoReplicaError:
                if (self._up if where is None else self._up & where) - without:
                    return None
                raise
        slot = Slot(decision, self._fleet.dispatch(ask, decision), self._clock.monotonic())
        self.in_flight[decision.name] += 1
        self._on_take(decision.name)
        self._note(decision.name)
        return slot

    def _note(self, name: str) -> None:
        if name in self._up and self.in_flight[name] < self._most:
            self._room.add(name)
        else:
            self._room.discard(name)

    def _full(self) -> HttpError:
        return HttpError(429, f"{len(self.queue)} requests wait, as many as may: try again", retry_s=self._retry_s())

    def _retry_s(self) -> int:
        """In the mean time that a request takes, as many end as there are slots."""
        return min(max(math.ceil(self._mean_s), 1), _MAX_RETRY_S)
