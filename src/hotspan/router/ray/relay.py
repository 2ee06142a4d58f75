"""The app of a replica's actor: hands requests to the server that the actor started, and says how they go."""

import contextlib
import logging
from collections.abc import Callable

from hotspan.core.types import GIB
from hotspan.http.bodies import Bodies
from hotspan.http.connections import HttpLimits
from hotspan.http.errors import HttpError
from hotspan.http.exchange import ClientGone, Exchange, Receive, Scope, Send
from hotspan.http.head import DECISIVE
from hotspan.http.upstream import BrokenError, UnreachedError, Upstream, forwarded, relay
from hotspan.router.ray.reports import HEADER, Assignment, Kind, Reporter, parse_assignment
from hotspan.router.ray.scaling import Waiting

logger = logging.getLogger(__name__)

_CONNECT_S = 2.0
_READ_S = 600.0
LIMITS = HttpLimits(held_bytes=4 * GIB, principals=1)
"""Of what clients send: every client is one principal here, since each replica tells them apart itself."""

_DECISIVE = DECISIVE | {HEADER.encode()}


class Relay:
    """An ASGI app before one server."""

    def __init__(self, url: str, reporter: Reporter, *, limits: HttpLimits = LIMITS) -> None:
        """url: the server's."""
        self.waiting = Waiting()
        self._url = url
        self._reporter = reporter
        self._bodies = Bodies(limits)
        self._upstream: Upstream | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            exchange = Exchange(scope, receive, send)
            assignment = parse_assignment(exchange.headers.get(HEADER, ""))
            try:
                await self._relay(exchange, assignment)
            except ClientGone:
                pass
            except HttpError as error:
                await exchange.fail(error)

    async def is_well(self, seconds: float) -> bool:
        """Whether the server says in time that its engine lives."""
        if self._upstream is None:
            return True  # not asked for anything yet
        try:
            status, _ = await self._upstream.fetch(self._url, "/health", within_s=seconds)
        except (UnreachedError, BrokenError):
            return False
        return status == 200

    async def _live(self, receive: Receive, send: Send) -> None:
        async with Upstream(connect_timeout_s=_CONNECT_S, read_timeout_s=_READ_S) as self._upstream:
            await self._reporter.start()
            with contextlib.closing(self._reporter):
                await live(receive, send)

    async def _relay(self, exchange: Exchange, assignment: Assignment | None) -> None:
        if assignment is not None:
            self.waiting.begin(assignment)
            self._reporter.tell(assignment, Kind.RECEIVED)
        is_reported = assignment is None

        def report(kind: Kind) -> None:
            nonlocal is_reported
            if assignment is not None and not is_reported:
                is_reported = True
                self.waiting.end(assignment)
                self._reporter.tell(assignment, kind)

        try:
            exchange.check(_DECISIVE)
            async with self._bodies.body(exchange, "") as body, exchange.watched(is_cancelled=True):
                # Reported before the client sees the end: its next request then finds this replica free.
                await self._pass_on(exchange, body, assignment, lambda: report(Kind.END))
        finally:
            report(Kind.FAILED)

    async def _pass_on(
        self, exchange: Exchange, body: bytes, assignment: Assignment | None, on_end: Callable[[], None]
    ) -> None:
        if self._upstream is None:
            raise HttpError(503, "the replica is starting: try again", retry_s=1)
        headers = [(name, value) for name, value in forwarded(exchange) if name != HEADER]
        try:
            answer = await self._upstream.ask(self._url, exchange.method, exchange.target, headers, body)
        except UnreachedError as error:
            logger.warning("server_not_reached error=%s", error)
            raise HttpError(503, "the replica's server does not answer: try again", retry_s=1) from error
        try:
            first = await answer.part()
            if first and assignment is not None:
                self.waiting.end(assignment)
                self._reporter.tell(assignment, Kind.FIRST)
            await relay(exchange, answer, answer.headers, first, on_end=on_end)
        except BrokenError as error:
            logger.warning("answer_broke_off error=%s", error)
            raise RuntimeError("the replica's server broke off its answer") from error
        finally:
            answer.close()


async def live(receive: Receive, send: Send) -> None:
    """Answer the start and the end of an application server (ASGI's lifespan)."""
    while True:
        kind = (await receive())["type"].removeprefix("lifespan.")
        await send({"type": f"lifespan.{kind}.complete"})
        if kind == "shutdown":
            return
