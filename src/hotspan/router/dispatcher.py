"""Reserves a place at a replica for each request: each takes so many at a time, the others wait in a fair queue.

take -> room? -> choose, dispatch -> Ticket          give -> room -> the next of the queue
         no -> FairQueue -> Ticket, refused, or too late
"""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass

from hotspan.http.errors import LIMIT, HttpError
from hotspan.router.fleet import Fleet, NoReplicaError, Ticket
from hotspan.router.queue import FairQueue, Waiting, Where
from hotspan.router.types import Ask

_ANSWER_TOKENS = 256
"""Assumed length of an answer, for the shares of the queue."""

_MAX_RETRY_S = 60
_WEIGHT = 0.1
"""Weight of the last request in the mean time at a replica."""


@dataclass(eq=False, slots=True)
class _Want:
    """A request in the queue. without: replicas that it has tried."""

    ask: Ask
    where: Where | None
    without: frozenset[str]
    found: "asyncio.Future[Ticket]"


class Dispatcher:
    """Gives places at the replicas of a fleet. One event loop's.

    on_take:  called with the name of each replica that is chosen.
    waited_s: sum of the times in the queue. overdue: requests that waited for too long.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        max_in_flight: int,
        queue_size: int,
        queue_timeout_s: float,
        on_take: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._fleet = fleet
        self._max_in_flight = max_in_flight
        self._timeout_s = queue_timeout_s
        self._on_take = on_take
        self._mean_s = 1.0
        self.queue: FairQueue[_Want] = FairQueue(queue_size)
        self.waited_s = 0.0
        self.overdue = 0

    def set_up(self, name: str, is_up: bool) -> None:
        """Whether a replica may be given requests."""
        if is_up != (name in self._fleet.up):
            self._fleet.set_up(name, is_up)
            self._serve()

    async def take(
        self, ask: Ask, *, where: Where | None = None, without: frozenset[str] = frozenset(), is_retry: bool = False
    ) -> Ticket:
        """A place at the best replica that has one; waits in the queue while none has. `give` ends it.

        where:    these only. without: and not these.
        is_retry: it has waited before: it goes before the others of its tenant.
        Raises:   HttpError 429 or 503; NoReplicaError if no replica is up that may have it.
        """
        if not len(self.queue):
            ticket = self._try(ask, where, without)
            if ticket is not None:
                return ticket
        if without:
            where = frozenset(where if where is not None else self._fleet.replicas) - without
        return await self._wait(ask, where, without, is_retry=is_retry)

    def give(self, ticket: Ticket) -> None:
        """A request has left its replica; unless its end was told before, it failed."""
        ticket.end(failed=True)
        self._mean_s += _WEIGHT * (self._fleet.clock.monotonic() - ticket.sent_s - self._mean_s)
        self._serve()

    # -- inside --------------------------------------------------------------------------------------------------------

    async def _wait(self, ask: Ask, where: Where | None, without: frozenset[str], *, is_retry: bool) -> Ticket:
        want = _Want(ask, where, without, asyncio.get_running_loop().create_future())
        cost = max(1.0, float(ask.tokens + (ask.answer_tokens or _ANSWER_TOKENS)))
        entry = Waiting(want, ask.tenant, where, cost)
        leaving = self.queue.push(entry, is_first=is_retry)
        if leaving is entry:
            raise self._full()
        if leaving is not None and not leaving.item.found.done():
            leaving.item.found.set_exception(self._full())
        self._serve()
        began_s = self._fleet.clock.monotonic()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await want.found
        except BaseException as error:
            self._return(want.found)
            if not isinstance(error, TimeoutError):
                raise
            self.overdue += 1
            message = f"every replica is busy, and none was free within {self._timeout_s:g} s: try again"
            raise HttpError(503, message, retry_s=self._retry_s(), about=LIMIT) from error
        finally:
            self.waited_s += self._fleet.clock.monotonic() - began_s
            self.queue.remove(entry)

    def _return(self, found: "asyncio.Future[Ticket]") -> None:
        """Give back a place that came in the moment in which nobody waited for it any more."""
        if not found.done():
            found.cancel()
        elif not found.cancelled() and found.exception() is None:
            self.give(found.result())

    def _serve(self) -> None:
        """Give places to those who wait, as far as there are any."""
        while len(self.queue):
            entry = self.queue.pop(self._room(), self._fleet.up)
            if entry is None:
                return
            want = entry.item
            if want.found.done():
                continue
            try:
                ticket = self._try(want.ask, want.where, want.without)
            except NoReplicaError as error:
                want.found.set_exception(error)
                continue
            if ticket is None:
                raise RuntimeError("the queue gave a request whose replicas are full")
            want.found.set_result(ticket)

    def _try(self, ask: Ask, where: Where | None, without: frozenset[str]) -> Ticket | None:
        """A place now; None if there is one only later. Raises: NoReplicaError if there is none."""
        room = self._room()
        try:
            decision = self._fleet.choose(ask, among=room if where is None else room & where, without=without)
        except NoReplicaError:
            if (self._fleet.up if where is None else self._fleet.up & where) - without:
                return None
            raise
        ticket = self._fleet.dispatch(ask, decision)
        self._on_take(decision.name)
        return ticket

    def _room(self) -> set[str]:
        """The replicas that may be given another request now."""
        replicas = self._fleet.replicas
        return {name for name in self._fleet.up if replicas[name].load.in_flight < self._max_in_flight}

    def _full(self) -> HttpError:
        return HttpError(429, f"{len(self.queue)} requests wait, as many as may: try again", retry_s=self._retry_s())

    def _retry_s(self) -> int:
        """In the mean time that a request takes, as many end as there are places."""
        return min(max(math.ceil(self._mean_s), 1), _MAX_RETRY_S)
