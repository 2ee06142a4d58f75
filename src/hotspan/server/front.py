"""The front of the engine's app: LMI's and SageMaker's routes beside its own, and the limits that hold for all.

client -> Gate (policy.py) -> Front: Admission -> Dialect -> the engine's app
"""

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from starlette.routing import BaseRoute
from starlette.types import Receive, Scope, Send

from hotspan.config.server_settings import Compat, ServerSettings
from hotspan.formatters import Formatters
from hotspan.http.bodies import LOG, MAX_TEXT_BYTES
from hotspan.http.connections import HttpLimits
from hotspan.http.errors import RETRY_S
from hotspan.http.exchange import JSON, Exchange
from hotspan.http.paths import AUDIO, BY_NAME, INVOCATIONS, LOOKUP, PREFETCH, STATELESS, WORK, is_small
from hotspan.server.adapters.registry import AdapterRegistry
from hotspan.server.admission import Admission
from hotspan.server.exchange import AppExchange
from hotspan.server.lmi.request import LMI_NAMES
from hotspan.server.lmi.routes import Dialect, Forget
from hotspan.server.lmi.sessions import Sessions
from hotspan.server.policy import App, declared, matched, refuse_websocket
from hotspan.server.sizes import ANY_BODY, SMALL_BODY, BodyLimit, TextLimit

PING, HEALTH = "/ping", "/health"

STALLED = "Stalled"
"""The status of an engine that has work and makes no steps (liveness.py)."""

OWN = (PING, INVOCATIONS, *BY_NAME)
"""Routes that the engine's app does not have, or not so."""

LMI_HAS = (INVOCATIONS, *BY_NAME, "/v1/chat/completions")

_COUNTED = frozenset((*WORK, *LMI_HAS))
"""Routes whose posts take a place in the queue."""

_OF_TEXT = (_COUNTED | {*STATELESS, PREFETCH, LOOKUP}) - {*AUDIO}
"""Routes whose bodies are a prompt, which is text unless the model takes other media."""


class Front:
    """The app that is served. `admission.drain()` stops it.

    names:        the base model's, besides those that LMI has for any; all other names are adapters'.
    is_embedding: the model makes embeddings: `inputs` asks for them.
    is_alive:     whether the engine can answer.
    illness:      why health checks are 503; None while they are not.
    text_limit:   of texts that are tokenised or rendered only; None has none.
    body_limit:   of bodies that are a prompt.
    log:          which log of a shared L2 is read; with `is_asked`, also how far.
    """

    def __init__(
        self,
        app: App,
        settings: ServerSettings,
        limits: HttpLimits,
        *,
        names: Iterable[str] = (),
        is_embedding: bool = False,
        is_alive: Callable[[], bool],
        illness: Callable[[], str | None] = lambda: None,
        adapters: AdapterRegistry | None = None,
        formatters: Formatters | None = None,
        forget: Forget | None = None,
        text_limit: TextLimit | None = None,
        body_limit: BodyLimit = ANY_BODY,
        log: Callable[..., Awaitable[Mapping[str, Any] | None]] | None = None,
    ) -> None:
        """Raises: ConfigError if the directory of sessions can't be used."""
        sessions = None
        if not settings.no_sessions:
            sessions = Sessions(settings.sessions_path, settings.session_expiry_s, is_strict=settings.strict_sessions)
        self.admission = Admission(settings, limits)
        self.root_path: str = getattr(app, "root_path", "")
        self._app = app
        self._compat = settings.compat
        self._is_alive = is_alive
        self._illness = illness
        self._text_limit = text_limit
        self._body_limit = body_limit
        self._log = log
        self._dialect = Dialect(
            app,
            base_names=tuple(dict.fromkeys((*names, *LMI_NAMES))),
            is_embedding=is_embedding,
            adapters=adapters,
            formatters=formatters,
            sessions=sessions,
            forget=forget if settings.forget_closed_sessions else None,
        )
        self._own = [*declared([PING], "GET", "POST"), *declared(OWN[1:], "POST")]

    @property
    def routes(self) -> Sequence[BaseRoute]:
        """All routes; our own come first."""
        return [*self._own, *self._app.routes]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket" and self._dialect.has_formatters:
            await refuse_websocket(receive, send)
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        found = matched(scope, self.routes, self.root_path)
        path, model = found.path or scope["path"], found.params.get("model")
        exchange = AppExchange(scope, receive, send, is_lmi=self._compat == "lmi" and path in LMI_HAS)
        async with exchange.answered():
            if path == PING and exchange.method in ("GET", "HEAD", "POST"):
                await self._ping(exchange)
                return
            if path == HEALTH and (reason := self._illness()) is not None:
                await tell_health(exchange, STALLED, self._compat, RETRY_S, reason=reason)
                return
            is_post = exchange.method == "POST"
            is_text = is_post and path in STATELESS

            async def work(body: bytes) -> None:
                if is_text and self._text_limit is not None:
                    self._text_limit.check_body(body)
                await self._dialect.answer(exchange, path, body, model)

            is_counted = is_post and path in _COUNTED
            limit = SMALL_BODY if is_small(exchange.method, path) else ANY_BODY
            limit = self._body_limit if is_post and path in _OF_TEXT else limit
            await self.admission.run(
                exchange, work, is_counted=is_counted, takes_turn=is_text, is_read_here=path not in AUDIO, limit=limit
            )

    async def _ping(self, exchange: Exchange) -> None:
        status = "Draining" if self.admission.is_draining else "Healthy"
        if not self._is_alive():
            await tell_health(exchange, "Unhealthy", self._compat, RETRY_S)
        elif (reason := self._illness()) is not None:
            await tell_health(exchange, STALLED, self._compat, RETRY_S, reason=reason)
        else:
            told: dict[str, Any] = {} if self._body_limit.bytes is None else {MAX_TEXT_BYTES: self._body_limit.bytes}
            is_asked = exchange.scope["query_string"] == LOG.encode()
            if self._log is not None and (log := await self._log(is_asked=is_asked)) is not None:
                told[LOG] = log
            await tell_health(exchange, status, self._compat, RETRY_S, **told)


async def tell_health(
    exchange: Exchange, status: str, compat: Compat, retry_s: int, *, has_body: bool = True, **more: Any
) -> None:
    """Answer a question about the server's health. more: fields of the body besides `status`."""
    code = 200 if status == "Healthy" else 500 if status == "Unhealthy" and compat == "lmi" else 503
    headers = {"retry-after": str(retry_s)} if code == 503 else {}
    body = json.dumps({"status": status, **more}).encode() if has_body else b""
    await exchange.respond(code, body, JSON, headers)
