"""Proxies a request to a replica and its response back, byte for byte; before the first byte it may try another one.

slot -> ask -> head -> first byte -> head and bytes to the client -> end
  ^                |
  +--- retry ------+
"""

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus

from hotspan.http.errors import MODEL, REFUSED, HttpError
from hotspan.http.exchange import ClientGone, Exchange, RawHeaders
from hotspan.http.head import CLOSED_SESSION_HEADER, HELD_HEADER, NEW_SESSION_HEADER, SESSION_HEADER
from hotspan.http.upstream import BrokenError, UnreachedError, Upstream, UpstreamResponse, forwarded, relay
from hotspan.router.dispatcher import Dispatcher
from hotspan.router.fleet import Fleet, NoReplicaError, Ticket
from hotspan.router.health import ReplicaHealth
from hotspan.router.metrics import Metrics
from hotspan.router.models import ServedModels, is_missing, named_by
from hotspan.router.queue import Where
from hotspan.router.retries import RetryBudget
from hotspan.router.session import REST, Split, StatefulSessions
from hotspan.router.settings import RouterSettings
from hotspan.router.shadow import Shadows
from hotspan.router.text import Prompts
from hotspan.router.tracing import Span, Tracer
from hotspan.router.types import PIECE_BYTES, Ask
from hotspan.router.unready import UnreadyModels

logger = logging.getLogger(__name__)


_AT_ONCE_S = 0.05
_RETRIED = frozenset((502, 503, 504))
_STREAMS = ("text/event-stream", "application/jsonlines", "application/x-ndjson")
_SLOW_CLIENT_S = 1.0
"""If the client did not read for so long, that may be why a replica closed the connection."""

_TAIL = 2048
"""Bytes at the end of an answer that contain its usage."""

_RESPONSE = re.compile(rb'"id":\s*"(resp_[\w-]{1,128})"')
_RESPONSE_LASTS_S = 86_400.0
"""How long the replica that made a response is known."""

_ANSWERED = (b'"completion_tokens":', b'"generated_tokens":')
_PROMPT = (b'"prompt_tokens":', b'"input_length":')


@dataclass(slots=True)
class _Request:
    """A request on its way.

    where:   replicas that may take it; None is any.
    serving: those that may have its model, to which `where` is widened at most; None is any.
    bound:   the table and the name by which only one replica may take it: that of its session or stored response.
    is_work: somebody waits for it to be computed. An announcement is none: it is tried once, and whatever becomes of it
             is no sign of a replica's health, since it takes as long as what one client announces.
    withdrawals: of `Shadows` when it began.
    """

    exchange: Exchange
    body: bytes
    ask: Ask
    headers: list[tuple[str, str]]
    span: Span
    began_s: float
    withdrawals: int
    group: str = ""
    where: Where | None = None
    serving: Where | None = None
    bound: tuple[StatefulSessions, str] | None = None
    tried: frozenset[str] = frozenset()
    attempts: int = 0
    is_work: bool = True

    @property
    def named(self) -> str:
        """All by which it can name a model: in its body, its path or its query."""
        return f"{self.ask.model}\0{self.ask.adapter}\0{self.exchange.target}"


class Proxy:
    """Forwards requests to replicas. One event loop's."""

    def __init__(
        self,
        settings: RouterSettings,
        prompts: Prompts,
        upstream: Upstream,
        fleet: Fleet,
        dispatcher: Dispatcher,
        health: Mapping[str, ReplicaHealth],
        sessions: StatefulSessions,
        metrics: Metrics,
        tracer: Tracer,
        shadows: Shadows,
        models: ServedModels,
    ) -> None:
        self._settings = settings
        self._prompts = prompts
        self._upstream = upstream
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._health = health
        self._sessions = sessions
        self._responses = StatefulSessions(fleet.clock, lasts_s=_RESPONSE_LASTS_S, is_kept=True)
        self._metrics = metrics
        self._tracer = tracer
        self._shadows = shadows
        self._models = models
        self._clock = fleet.clock
        # Clients make up names of models: what is sent on for these takes nothing of what a replica's failure needs.
        self._budget, self._model_budget = (
            RetryBudget(settings.retry_share, settings.retry_reserve, fleet.clock) for _ in range(2)
        )
        self._split = Split(settings.group_shares) if settings.group_shares else None
        self._groups = _groups(settings)
        self._unready = UnreadyModels(fleet.clock)

    async def forward(
        self,
        exchange: Exchange,
        body: bytes,
        ask: Ask,
        began_s: float,
        *,
        withdrawals: int = -1,
        is_work: bool = True,
    ) -> str:
        """Answer a request from a replica; the outcome, for the metrics.

        began_s: when its head came. withdrawals: of `Shadows`, at that time; without it there are no copies.
        """
        span = self._tracer(exchange.path, exchange.raw_headers)
        outcome = "failed"
        try:
            headers = forwarded(exchange, span.carried)
            request = _Request(exchange, body, ask, headers, span, began_s, withdrawals, is_work=is_work)
            if is_work:
                self._budget.asked(ask.tenant)
                self._model_budget.asked(ask.tenant)
            self._aim(request)
            while True:
                try:
                    ticket = await self._dispatcher.take(
                        ask, where=request.where, without=self._avoided(request), is_retry=request.attempts > 0
                    )
                except NoReplicaError:
                    if request.where == request.serving:
                        raise
                    self._widen(request)
                    continue
                try:
                    request.attempts += 1
                    self._metrics.decided(ticket.decision, request.group, ask.tokens)
                    span.decided(ticket.decision, request.attempts)
                    again = await self._attempt(request, ticket)
                finally:
                    self._dispatcher.give(ticket)
                if again is None:
                    outcome = _outcome(exchange)
                    return outcome
                self._metrics.retries[again,] += 1
                request.tried |= {ticket.decision.name}
        except ClientGone:
            outcome = "gone"
            raise
        finally:
            span.end(outcome, exchange.status)

    async def _attempt(self, request: _Request, ticket: Ticket) -> str | None:
        """Answer a request from a replica. Returns why it has to go to another one; None if it is answered."""
        answer: UpstreamResponse | None = None
        name, exchange = ticket.decision.name, request.exchange
        health = self._health[name]
        is_over, since = False, health.parts
        try:
            headers = [*request.headers, *self._held(request)]
            answer = await self._upstream.ask(name, exchange.method, exchange.target, headers, request.body)
            is_sign = not (about := answer.header(REFUSED)) and request.is_work
            if answer.status in _RETRIED and (is_sign or about == MODEL):
                if not is_sign:
                    self._unready.note(name, request.named, answer, request.ask.owner)
                elif answer.status == HTTPStatus.GATEWAY_TIMEOUT:
                    health.was_late(since, "504")
                else:
                    health.failed(str(answer.status))
                is_over, is_sign = is_sign, False
                budget = self._model_budget if about == MODEL else self._budget
                if request.bound is None and self._may_retry(request, name, budget):
                    return str(answer.status)
            try:
                first = await answer.part()
            except BrokenError as error:
                raise UnreachedError(str(error), is_overdue=error.is_overdue) from error
            if is_sign:
                is_over = True
                health.answered()
            if is_missing(answer.status, first) and self._may_try_for_model(request, name):
                return "404"
            await self._relay(request, ticket, answer, first, is_sign=is_sign)
            return None
        except UnreachedError as error:
            is_over = request.is_work
            self._count(health, since, error, is_work=request.is_work)
            self._unbind(request)
            if not error.is_overdue and self._may_retry(request, name, self._budget):
                return "unreached"
            why = "gave no answer in time" if error.is_overdue else "gave no answer"
            logger.warning("request_unanswered request=%s replica=%s why=%s", exchange.request_id, name, error)
            raise HttpError(504 if error.is_overdue else 502, f"the replica {why}: try again", retry_s=1) from error
        finally:
            if not is_over:
                health.gave_up()
            if answer is not None:
                answer.close()

    def _count(self, health: ReplicaHealth, since: int, error: UnreachedError | BrokenError, *, is_work: bool) -> None:
        """Count an answer that did not come, or broke off. since: `parts` of the replica when it was last well."""
        if not is_work:
            return
        if error.is_overdue:
            health.was_late(since, str(error))
        else:
            health.failed(str(error))

    def _held(self, request: _Request) -> list[tuple[str, str]]:
        """The header that says for how long a request was held, if it was not sent on at once."""
        held_s = self._clock.monotonic() - request.began_s
        return [(HELD_HEADER, str(math.ceil(1000 * held_s)))] if request.attempts > 1 or held_s > _AT_ONCE_S else []

    def _may_retry(self, request: _Request, name: str, budget: RetryBudget) -> bool:
        """Whether a request may go to another replica now; if so, the retry is counted in `budget`."""
        if not request.is_work:
            return False
        up = self._fleet.up
        others = set(up if request.where is None else request.where.intersection(up)) - request.tried - {name}
        if not others and request.where != request.serving:  # better another group than none
            request.where = request.serving
            others = set(up if request.where is None else request.where & up) - request.tried - {name}
        if not others or request.attempts >= self._settings.attempts or request.exchange.is_begun:
            return False
        if not budget.spend(request.ask.tenant):
            self._metrics.retries_refused += 1
            return False
        return True

    def _may_try_for_model(self, request: _Request, name: str) -> bool:
        """Whether a request whose model a replica does not have may go to another one that may have it."""
        ask = request.ask
        if not (ask.model or ask.adapter or named_by(request.exchange.path)):
            return False
        self._unready.lacks(name, request.named, ask.owner)
        if request.serving is not None:  # what it listed is no longer so
            self._models.ask_again()
            request.serving = None
        return request.bound is None and self._may_retry(request, name, self._model_budget)

    def _avoided(self, request: _Request) -> frozenset[str]:
        """The replicas that a request has tried, and while there are others those that are not ready for its model."""
        where = self._fleet.up if request.where is None else request.where.intersection(self._fleet.up)
        avoided = request.tried | self._unready.of(request.named, request.ask.owner)
        return avoided if where - avoided else request.tried

    def _widen(self, request: _Request) -> None:
        """No replica is up any more where a request may go: from now on any may take it."""
        if not self._unbind(request):
            self._metrics.split_fallbacks += 1
            request.where = request.serving

    def _unbind(self, request: _Request) -> bool:
        """Whether a request was bound to a replica, which is gone: from now on any replica may take it."""
        if request.bound is None:
            return False
        table, name = request.bound
        table.lose(name, request.ask.owner)
        request.bound, request.where = None, request.serving
        return True

    async def _relay(
        self, request: _Request, ticket: Ticket, answer: UpstreamResponse, part: bytes, *, is_sign: bool
    ) -> None:
        """Pass an answer on, byte for byte. If it breaks off, so does the client's: nobody takes it for complete.

        is_sign: the answer is a sign of the replica's health.
        """
        exchange, health = request.exchange, self._health[ticket.decision.name]
        if answer.header("content-type").startswith(_STREAMS):
            ticket.first_byte()
        self._metrics.first_byte_s.observe(self._clock.monotonic() - request.began_s)
        if SESSION_HEADER in exchange.headers:
            new = answer.header(NEW_SESSION_HEADER) or answer.header(SESSION_HEADER)
            self._sessions.note(ticket.decision.name, new, answer.header(CLOSED_SESSION_HEADER), request.ask.owner)
        if exchange.path.endswith("/responses") and (made := _RESPONSE.search(part, 0, _TAIL)):
            self._responses.note(ticket.decision.name, made[1].decode(), "", request.ask.owner)
        asked = (exchange, request.body, request.headers)
        copies = self._shadows.begin(*asked, ticket.decision.name, answer, request.withdrawals)
        since, before, last = 0, b"", b""
        began_s = waited_s = 0.0

        def came(part: bytes) -> None:
            nonlocal since, before, last, began_s
            began_s = self._clock.monotonic()
            health.parts = since = health.parts + 1
            before, last = last, part
            for copy in copies:
                copy.add(part)

        def written() -> None:
            nonlocal waited_s
            waited_s = max(waited_s, self._clock.monotonic() - began_s)

        try:
            await relay(exchange, answer, self._head(ticket, answer), part, came, written)
        except BrokenError as error:
            self._metrics.broken += 1
            if error.is_overdue or waited_s < _SLOW_CLIENT_S:
                self._count(health, since, error, is_work=request.is_work)
            ticket.end(failed=True)
            name = ticket.decision.name
            logger.warning("answer_broken request=%s replica=%s why=%s", exchange.request_id, name, error)
            exchange.status = -1
            return
        self._shadows.end(copies)
        if is_sign:
            health.succeeded()
        ticket.end(answer_tokens=self._learn(request.ask, before, last), failed=answer.status >= 400)

    def _learn(self, ask: Ask, before: bytes, last: bytes) -> int | None:
        """The tokens of an answer, by the usage at its end; None without one."""
        tail = last[-_TAIL:] if len(last) >= _TAIL else (before + last)[-_TAIL:]
        answered = _number(tail, _ANSWERED)
        if answered is not None and ask.keys:
            size = ask.tokens * PIECE_BYTES / ask.piece_tokens
            self._prompts.learn(size, _number(tail, _PROMPT) or 0, answered)
        return answered

    def _head(self, ticket: Ticket, answer: UpstreamResponse) -> RawHeaders:
        headers = answer.headers
        if self._settings.is_exposing:
            headers.append((b"x-hotspan-replica", ticket.decision.name.encode()))
            headers.append((b"x-hotspan-cached-tokens", b"%d" % ticket.decision.cached_tokens))
        return headers

    # -- which replicas ------------------------------------------------------------------------------------------------

    def _aim(self, request: _Request) -> None:
        """Set which replicas may take a request: that of its session or response, or its group of the split."""
        ask = request.ask
        asked = (ask.model, ask.adapter, named_by(request.exchange.path))
        request.serving = request.where = self._models.serving(asked)
        named = request.exchange.headers.get(SESSION_HEADER, "")
        for table, name in ((self._sessions, named), (self._responses, request.ask.response)):
            if (home := table.home(name, request.ask.owner)) is None:
                continue
            if home in self._fleet.up:
                request.bound, request.where = (table, name), frozenset((home,))
                return
            table.lose(name, request.ask.owner)
        if self._split is None:
            return
        session = request.ask.session or request.exchange.request_id.encode()
        request.group = self._split.group(session)
        where = self._groups[request.group]
        if request.serving is not None:
            where &= request.serving
        if where.isdisjoint(self._fleet.up):
            self._metrics.split_fallbacks += 1
        else:
            request.where = where


def _groups(settings: RouterSettings) -> dict[str, Where]:
    """The replicas of each group that has a share, and the rest."""
    shares = settings.group_shares
    groups = {replica.url: replica.group if replica.group in shares else REST for replica in settings.replicas}
    return {group: frozenset(url for url, each in groups.items() if each == group) for group in (*shares, REST)}


def _outcome(exchange: Exchange) -> str:
    if exchange.status < 0:
        return "broken"
    return "ok" if exchange.status < 400 else "client_error" if exchange.status < 500 else "server_error"


def _number(tail: bytes, names: tuple[bytes, ...]) -> int | None:
    """The last number that one of these names has; None if there is none."""
    for name in names:
        _, found, rest = tail.rpartition(name)
        digits = rest[:12].lstrip()
        number = digits[: len(digits) - len(digits.lstrip(b"0123456789"))]
        if found and number:
            return int(number)
    return None
