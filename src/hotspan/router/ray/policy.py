"""hotspan's policy as a request router of Ray Serve's."""

import asyncio
import random
from dataclasses import dataclass
from typing import Any

import ray
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from hotspan.core.types import MIB
from hotspan.router.fleet import Fleet
from hotspan.router.index import PrefixIndex
from hotspan.router.ray.reports import Assignment, Tickets
from hotspan.router.types import Ask, Strategy

ASKED = "asked"
"""The argument under which the picker hands a request over."""

_AWAY_S = 5.0
"""A replica that did not take a request gets none for so long, or until Ray lists the replicas anew."""


@dataclass(slots=True)
class Asked:
    """A request that waits for a replica, and once it has one, what that replica is told."""

    ask: Ask
    assignment: Assignment | None = None


class FleetRouter(RequestRouter):
    """Sends each request to the replica with the least cost. One event loop's: that of Ray's router.

    Calls that carry no request go to any replica.
    """

    def initialize_state(
        self,
        strategy: str = Strategy.AUTO,
        index_mib: int = 256,
        max_s: float = 300.0,
        host: str | None = None,
        **_: Any,
    ) -> None:
        """What `request_router_kwargs` says. max_s: of one request. host: where replicas reach this process."""
        self.fleet = Fleet(strategy=Strategy(strategy), index=PrefixIndex(index_mib * MIB))
        self.tickets = Tickets(self.fleet.clock, max_s, self._leave_alone)
        self._host = host or str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        self._listening: asyncio.Task[int] | None = None
        self._away: dict[str, asyncio.TimerHandle] = {}
        self._rng = random.Random()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Ray lists the replicas."""
        names = {replica.replica_id.unique_id for replica in replicas}
        for name in set(self.fleet.replicas) - names:
            self._return(name)
            self.tickets.forget(name)
            self.fleet.remove(name)
        for name in sorted(names - set(self.fleet.replicas)):
            self.fleet.add(name)
        super().update_replicas(replicas)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replica for a request; its work is reserved there from here on."""
        # Not by its type: Ray copies this module to where it uses the class.
        asked: Asked | None = None if pending_request is None else pending_request.kwargs.get(ASKED)
        there = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if asked is None or not there:
            return [self._rng.sample(candidate_replicas, len(candidate_replicas))]
        port = await self._listen()
        if asked.assignment is not None:  # Ray asks again where a replica did not tell it in time how long its queue is
            self.tickets.withdraw(asked.assignment.number)
        self.tickets.expire()
        if all(name in self._away for name in there):
            for name in there:
                self._return(name)
        ticket = self.fleet.dispatch(asked.ask, self.fleet.choose(asked.ask, among=there))
        asked.assignment = Assignment(self._host, port, self.tickets.open(ticket), ticket.work_s)
        return [[there[ticket.decision.name]]]

    async def _listen(self) -> int:
        """The port that replicas report to."""
        if self._listening is None:
            self._listening = asyncio.create_task(self._bind())
        return await asyncio.shield(self._listening)

    async def _bind(self) -> int:
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(lambda: self.tickets, local_addr=(self._host, 0))
        port: int = transport.get_extra_info("sockname")[1]
        return port

    def _leave_alone(self, name: str) -> None:
        if name in self._away or name not in self.fleet.replicas:
            return
        self.fleet.set_up(name, False)
        self._away[name] = asyncio.get_running_loop().call_later(_AWAY_S, self._return, name)

    def _return(self, name: str) -> None:
        timer = self._away.pop(name, None)
        if timer is not None:
            timer.cancel()
            self.fleet.set_up(name, True)
