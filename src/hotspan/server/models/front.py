"""The front of a store: relays a request to the model that it names, and merges answers of all models.

client -> Gate (policy.py) -> StoreFront: Admission -> model -> relay -> the model's own server
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Sequence
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs

from starlette.routing import BaseRoute
from starlette.types import Receive, Scope, Send

from hotspan.config.server_settings import ServerSettings
from hotspan.http.connections import HttpLimits
from hotspan.http.dashboard import DASHBOARD, HTML, dashboard
from hotspan.http.errors import HttpError
from hotspan.http.exchange import JSON, Exchange, note_read
from hotspan.http.paths import CANCEL, EXPLAIN, PIN, STATELESS, is_small
from hotspan.server.admission import Admission
from hotspan.server.exchange import AppExchange
from hotspan.server.front import HEALTH, LMI_HAS, PING, STALLED, tell_health
from hotspan.server.models.merging import merged_lists, merged_metrics, merged_models, merged_receipt
from hotspan.server.models.relay import MODEL_NAME, ModelAnswer, ask, relay
from hotspan.server.models.served import LOADING_RETRY_S, ModelState, ServedModel
from hotspan.server.policy import (
    ADMIN,
    CLIENT,
    METRICS,
    PUBLIC,
    declared,
    matched,
    refuse_websocket,
)
from hotspan.server.principal import current_principal
from hotspan.server.sizes import ANY_BODY, SMALL_BODY

MODELS = "/v1/models"
CACHE, CHECK, ROTATE = "/hotspan/cache", "/hotspan/cache/check", "/hotspan/keys/rotate"
RECEIPTS = ("/hotspan/cache/invalidate", "/hotspan/cache/clear", "/hotspan/keys/shred")
OF_ALL = (*RECEIPTS, CACHE, CHECK, ROTATE, PIN, EXPLAIN)
"""Routes that are about every model, unless the query names one."""

_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class StoreFront:
    """The app that is served. `admission.drain()` stops it."""

    def __init__(
        self, models: Sequence[ServedModel], settings: ServerSettings, limits: HttpLimits, *, has_keys: bool
    ) -> None:
        self.admission = Admission(settings, limits)
        self._models = models
        self._by_name = {name: model for model in models for name in model.names}
        self._default = None if settings.default_model is None else self._by_name[settings.default_model]
        self._compat = settings.compat
        self._has_keys = has_keys
        self._created = int(time.time())
        paths = dict.fromkeys((*PUBLIC, *CLIENT, *ADMIN, METRICS))
        self.routes: Sequence[BaseRoute] = declared(paths, *_METHODS)
        """Every route of the policy: a model's server has them or not."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await refuse_websocket(receive, send)
            return
        if scope["type"] != "http":
            return
        found = matched(scope, self.routes)
        path = found.path or scope["path"]
        exchange = AppExchange(scope, receive, send, is_lmi=self._compat == "lmi" and path in LMI_HAS)
        async with exchange.answered():
            await self._answer(exchange, path, found.params.get("model"))

    async def _answer(self, exchange: Exchange, path: str, named: str | None) -> None:
        if path in (PING, HEALTH):
            await self._health(exchange, has_body=path == PING)
            return
        if path == DASHBOARD:
            page = dashboard()
            await exchange.respond(200, page.content, HTML, page.headers)
            return

        async def work(body: bytes) -> None:
            model = self._meant(exchange, named, body) if is_of_one else None
            note_read()
            if model is not None:
                await relay(model, exchange, body)
            elif exchange.method == "OPTIONS":  # a browser's question, to which all have the same answer
                await relay(self._default or self._models[0], exchange, body)
            elif path == METRICS:
                await self._metrics(exchange)
            elif path == MODELS:
                await _respond(exchange, merged_models(await self._of_ready(exchange), self._models, self._created))
            else:
                await self._of_all(exchange, path, body)

        is_of_one = exchange.method != "OPTIONS" and path not in (METRICS, MODELS, *OF_ALL)
        is_counted = exchange.method == "POST" and path in CLIENT and path not in (MODELS, CANCEL, *OF_ALL)
        takes_turn = exchange.method == "POST" and path in STATELESS
        limit = SMALL_BODY if is_small(exchange.method, path) else ANY_BODY
        is_counted = is_counted and not takes_turn
        await self.admission.run(
            exchange, work, is_counted=is_counted, takes_turn=takes_turn, is_read_here=True, limit=limit
        )

    # -- which model ---------------------------------------------------------------------------------------------------

    def _meant(self, exchange: Exchange, named: str | None, body: bytes) -> ServedModel:
        """The model of a request: by its path, its query, its body's `model`, or the default. Raises: HttpError."""
        name = named or _in_query(exchange)
        if name is not None:
            return self._called(name)
        name = _in_body(exchange, body)
        if name in self._by_name:
            return self._by_name[name]
        if self._default is not None:
            return self._default  # which may have an adapter of that name
        if name is not None:
            raise self._unknown(name)
        raise HttpError(
            400,
            f"several models are served: name one in the body's model, as ?{MODEL_NAME}=... or in the path; there are "
            f"{self._names()}",
            param="model",
        )

    def _called(self, name: str) -> ServedModel:
        model = self._by_name.get(name)
        if model is None:
            raise self._unknown(name)
        return model

    def _unknown(self, name: str) -> HttpError:
        return HttpError(404, f"there is no model {name!r:.140}: there are {self._names()}", param="model")

    def _names(self) -> str:
        return ", ".join(model.name for model in self._models)

    # -- what is about all of them -------------------------------------------------------------------------------------

    async def _health(self, exchange: Exchange, *, has_body: bool) -> None:
        states = {model.name: model.state for model in self._models}
        status = "Draining" if self.admission.is_draining else _health_of(list(states.values()))
        is_shown = not self._has_keys or current_principal().has_key
        more = {"models": {name: state.value for name, state in states.items()}} if is_shown else {}
        await tell_health(exchange, status, self._compat, LOADING_RETRY_S, has_body=has_body, **more)

    async def _metrics(self, exchange: Exchange) -> None:
        answers = await self._of_ready(exchange)
        pages = {answer.model: answer.content.decode() for answer in answers if answer.status == 200}
        # A page takes milliseconds to read, in which no stream would go on.
        page = await asyncio.to_thread(merged_metrics, pages, self._models)
        await exchange.respond(200, page, _METRICS_TYPE)

    async def _of_all(self, exchange: Exchange, path: str, body: bytes) -> None:
        """Ask every model, or the one that the query names. If one can't be asked, the answer is an error."""
        named = _in_query(exchange)
        if named is not None:
            await relay(self._called(named), exchange, body)
            return
        answers = await asyncio.gather(*(_whole(ask(model, exchange, body), model) for model in self._models))
        if path in RECEIPTS:
            await _respond(exchange, merged_receipt(answers))
        else:
            await _respond(exchange, merged_lists(answers, "roots" if path == ROTATE else "replicas"))

    async def _of_ready(self, exchange: Exchange) -> list[ModelAnswer]:
        ready = [model for model in self._models if model.state is ModelState.READY]
        return list(await asyncio.gather(*(_whole(ask(model, exchange, b""), model) for model in ready)))


async def _whole(asked: Awaitable[ModelAnswer], model: ServedModel) -> ModelAnswer:
    """The answer of a model, also if it is an error."""
    try:
        return await asked
    except HttpError as error:
        return ModelAnswer(model.name, error.status, error.content())


async def _respond(exchange: Exchange, said: dict[str, Any]) -> None:
    await exchange.respond(HTTPStatus.OK, json.dumps(said).encode())


def _health_of(states: Sequence[ModelState]) -> str:
    """Healthy once all were loaded, and as long as one can answer."""
    if ModelState.LOADING in states:
        return "Loading"
    if ModelState.READY in states:
        return "Healthy"
    return STALLED if ModelState.STALLED in states else "Unhealthy"


def _in_query(exchange: Exchange) -> str | None:
    given = parse_qs(exchange.scope["query_string"].decode("latin-1")).get(MODEL_NAME)
    return None if given is None else given[-1]


def _in_body(exchange: Exchange, body: bytes) -> str | None:
    """The model named in a JSON body. Errors in the body are left to the model's server."""
    if not body or exchange.headers.get("content-type", JSON).partition(";")[0].strip().lower() != JSON:
        return None
    try:
        said = json.loads(body)
    except (ValueError, RecursionError):
        return None
    name = said.get("model") if isinstance(said, dict) else None
    return name if isinstance(name, str) and name else None
