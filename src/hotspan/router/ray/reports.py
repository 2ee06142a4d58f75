"""Messages between a router and a replica beside those of Ray and HAProxy.

    client -- POST --> HAProxy -- body --> picker: chooses, opens a ticket
                          |    <-- replica, assignment --
                          +-- POST, assignment --> replica -- datagram: received, first byte, end --> picker

The answer never comes by the picker, so the replica tells it how the request goes. A datagram that is lost leaves work
reserved until the ticket is too old; nothing waits for one. HAProxy takes the assignment's header from nobody else.
While it does not know a replica yet it hands requests for it to any, without their assignment: nobody reports on those.
"""

import asyncio
import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

from hotspan.core.clock import Clock
from hotspan.router.fleet import Ticket

logger = logging.getLogger(__name__)

HEADER = "x-serve-router-hotspan"
"""Ray's HAProxy drops what clients send under this prefix."""

_MAX_BYTES = 512

RECEIVED_S = 2.0
"""A request that no replica has received after so long went elsewhere, or waits behind all that its replica takes."""


class Kind(StrEnum):
    """What happened to a request."""

    RECEIVED = "received"
    FIRST = "first"
    END = "end"
    FAILED = "failed"


class Assignment(NamedTuple):
    """What a replica is told of a request: where to report, under which number, and its work in seconds."""

    host: str
    port: int
    number: int
    work_s: float

    def __str__(self) -> str:
        return f"{self.host} {self.port} {self.number:x} {self.work_s:.6g}"


def parse_assignment(text: str) -> Assignment | None:
    """The assignment of a header; None if it is none."""
    try:
        host, port, number, work_s = text.split()
        assignment = Assignment(host, int(port), int(number, 16), float(work_s))
    except ValueError:
        return None
    return assignment if 0 < assignment.port < 65536 and 0 <= assignment.work_s < 1e6 else None


class Report(NamedTuple):
    """A datagram: of which request, what, and who says so."""

    number: int
    kind: Kind
    replica: str

    def __bytes__(self) -> bytes:
        return f"{self.number:x} {self.kind} {self.replica}".encode()


def parse_report(data: bytes) -> Report | None:
    """The report of a datagram; None if it is none."""
    if len(data) > _MAX_BYTES:
        return None
    try:
        number, kind, replica = data.decode().split(" ")
        return Report(int(number, 16), Kind(kind), replica)
    except ValueError:
        return None


class Tickets(asyncio.DatagramProtocol):
    """Requests that were sent and whose end was not reported yet.

    Numbers can't be guessed, so that nobody else ends them. missed: called with a replica that was chosen but did not
    get the request.
    """

    def __init__(self, clock: Clock, max_s: float, missed: Callable[[str], None]) -> None:
        self._clock = clock
        self._max_s = max_s
        self._missed = missed
        self._open: OrderedDict[int, Ticket] = OrderedDict()
        self._unreceived: OrderedDict[int, Ticket] = OrderedDict()
        self._reached_s: dict[str, float] = {}
        self.expired = 0

    def __len__(self) -> int:
        return len(self._open)

    def open(self, ticket: Ticket) -> int:
        """The number of a request that is sent now."""
        number = secrets.randbits(64)
        self._open[number] = self._unreceived[number] = ticket
        return number

    def withdraw(self, number: int) -> None:
        """The request was not sent: its work is no longer reserved."""
        ticket = self._close(number)
        if ticket is not None:
            ticket.end(failed=True)

    def datagram_received(self, data: bytes, addr: object) -> None:
        report = parse_report(data)
        if report is not None:
            self.told(report)

    def told(self, report: Report) -> None:
        """A report came. Those of requests that are over, or were never sent, are ignored."""
        ticket = self._open.get(report.number)
        if ticket is None:
            return
        self._unreceived.pop(report.number, None)
        if report.replica == ticket.decision.name:
            self._reached_s[report.replica] = ticket.sent_s
        else:
            self._missed(ticket.decision.name)
        if report.kind is Kind.FIRST and report.replica == ticket.decision.name:
            ticket.first_byte()
        elif report.kind in (Kind.END, Kind.FAILED):
            self._close(report.number)
            ticket.end(failed=report.kind is Kind.FAILED)

    def expire(self) -> None:
        """End those that are older than any request may be, and those that no replica received. Call it often."""
        now = self._clock.monotonic()
        for tickets, max_s in ((self._open, self._max_s), (self._unreceived, min(RECEIVED_S, self._max_s))):
            while tickets:
                number, ticket = next(iter(tickets.items()))
                if ticket.sent_s >= now - max_s:
                    break
                name = ticket.decision.name
                if tickets is self._unreceived and self._reached_s.get(name, -1.0) < ticket.sent_s:
                    self._missed(name)
                self._close(number)
                ticket.end(failed=True)
                self.expired += 1

    def forget(self, name: str) -> None:
        """A replica is gone."""
        self._reached_s.pop(name, None)

    def _close(self, number: int) -> Ticket | None:
        self._unreceived.pop(number, None)
        return self._open.pop(number, None)


class Reporter:
    """Sends datagrams, to nodes of the cluster only."""

    def __init__(self, name: str, nodes: Callable[[], set[str]]) -> None:
        """name: the replica's own. nodes: their addresses now."""
        self._name = name
        self._nodes = nodes
        self._known: set[str] = set()
        self._transport: asyncio.DatagramTransport | None = None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_datagram_endpoint(asyncio.DatagramProtocol, local_addr=("0.0.0.0", 0))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def tell(self, assignment: Assignment, kind: Kind) -> None:
        """Send one; never blocks, and never fails."""
        if self._transport is None or not self._is_node(assignment.host):
            return
        self._transport.sendto(bytes(Report(assignment.number, kind, self._name)), (assignment.host, assignment.port))

    def _is_node(self, host: str) -> bool:
        if host not in self._known:
            self._known = self._nodes()
        return host in self._known
