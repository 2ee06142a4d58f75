"""The front of the engine's app: LMI's and SageMaker's routes beside its own, and the limits that hold for all.

client -> Gate (policy.py) -> Front: body -> admission -> Invocations -> the engine's app
"""

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from hotspan.http.bodies import Bodies
from hotspan.http.errors import RETRY_S
from hotspan.server.admission import Admission
from hotspan.server.exchange import AppExchange
from hotspan.server.lmi.plugs import Adapters, Forget, Formatters
from hotspan.server.lmi.routes import WORK, Invocations, Plugs
from hotspan.server.lmi.sessions import Sessions
from hotspan.server.policy import App, matched
from hotspan.server.principal import current_principal
from hotspan.server.settings import HttpSettings

PING, INVOCATIONS = "/ping", "/invocations"
BY_NAME = ("/predictions/{model}", "/models/{model}/invoke")

OWN = (PING, INVOCATIONS, *BY_NAME)
"""Routes that the engine's app does not have, or not so."""

LMI_HAS = (INVOCATIONS, *BY_NAME, "/v1/chat/completions")


class Front:
    """The app that is served. `admission.drain()` stops it.

    is_alive: whether the engine can answer.
    """

    def __init__(
        self,
        app: App,
        settings: HttpSettings,
        *,
        is_alive: Callable[[], bool],
        adapters: Adapters | None = None,
        formatters: Formatters | None = None,
        forget: Forget | None = None,
    ) -> None:
        """Raises: ConfigError if the directory of sessions can't be used."""
        sessions = None
        if not settings.no_sessions:
            sessions = Sessions(settings.sessions_path, settings.session_expiry_s, is_strict=settings.strict_sessions)
        plugs = Plugs(
            adapters=adapters,
            formatters=formatters,
            sessions=sessions,
            forget=forget if settings.forget_closed_sessions else None,
        )
        self.admission = Admission(settings)
        self.root_path: str = getattr(app, "root_path", "")
        self._app = app
        self._settings = settings
        self._is_alive = is_alive
        self._bodies = Bodies(settings)
        self._invocations = Invocations(app, plugs, base_names=settings.model_names, is_embedding=settings.is_embedding)
        self._own = [
            Route(PING, _never, methods=["GET", "POST"]),
            *(Route(path, _never, methods=["POST"]) for path in (INVOCATIONS, *BY_NAME)),
        ]

    @property
    def routes(self) -> Sequence[BaseRoute]:
        """All routes; our own come first."""
        return [*self._own, *self._app.routes]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket" and self._invocations.has_formatters:
            await receive()
            await send({"type": "websocket.close", "code": 1008})  # before it opened: the server makes that a 403
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, model = self._place(scope)
        is_lmi = self._settings.compat == "lmi" and path in LMI_HAS
        exchange = AppExchange(scope, receive, send, is_lmi=is_lmi)
        async with exchange.answered():
            await self._answer(exchange, path, model)

    def _place(self, scope: Scope) -> tuple[str, str | None]:
        """The route, by its path as it is registered if it is ours, and the model that it names."""
        found = matched(scope, self.routes, self.root_path)
        if found.is_whole and found.path in OWN:
            return found.path, found.params.get("model")
        path, root = scope["path"], self.root_path or scope.get("root_path", "")
        return (path[len(root) :] if root and path.startswith(f"{root}/") else path), None

    async def _answer(self, exchange: AppExchange, path: str, model: str | None) -> None:
        if path == PING and exchange.scope["method"] in ("GET", "HEAD", "POST"):
            await self._ping(exchange)
            return
        async with self._bodies.body(exchange, current_principal()) as body:
            work = self._work(exchange, path, model, body)
            if exchange.scope["method"] == "POST" and (path in WORK or path in LMI_HAS):
                await self.admission.run(exchange, work)
            else:
                async with exchange.watched():
                    await work

    def _work(self, exchange: AppExchange, path: str, model: str | None, body: bytes) -> Coroutine[Any, Any, None]:
        is_ours = path in (INVOCATIONS, *BY_NAME) and exchange.scope["method"] == "POST"
        if is_ours:
            return self._invocations.invoke(exchange, body, model)
        return self._invocations.relay(exchange, path, body)

    async def _ping(self, exchange: AppExchange) -> None:
        later = {"retry-after": str(RETRY_S)}
        if not self._is_alive() and self._settings.compat == "lmi":
            await exchange.respond(500, b'{"status":"Unhealthy"}')
        elif not self._is_alive():
            await exchange.respond(503, b'{"status":"Unhealthy"}', headers=later)
        elif self.admission.is_draining:
            await exchange.respond(503, b'{"status":"Draining"}', headers=later)
        else:
            await exchange.respond(200, b'{"status":"Healthy"}')


async def _never(scope: Scope, receive: Receive, send: Send) -> None:
    raise NotImplementedError("Front answers its routes itself")
