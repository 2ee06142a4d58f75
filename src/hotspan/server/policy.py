"""Access to routes: one table has every route of the app; all others are the administrator's. Other paths are 404."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from http import HTTPStatus
from typing import Any, Protocol

from starlette.datastructures import Headers
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hotspan.http.dashboard import DASHBOARD
from hotspan.http.errors import HttpError
from hotspan.http.exchange import Exchange
from hotspan.http.head import HELD_HEADER, HeadError, check_head
from hotspan.http.hosts import Hosts
from hotspan.http.paths import (
    ADAPTER_READS,
    ADAPTER_WRITES,
    BY_NAME,
    CANCEL,
    EXPLAIN,
    INVOCATIONS,
    LOOKUP,
    PIN,
    PREFETCH,
    PRIVILEGED,
    STATELESS,
    WARM,
    WARM_UP,
    WORK,
)
from hotspan.server.principal import ANYBODY, Credentials, Principal, asking

_MATCHED = "hotspan.route"
"""In a scope: which route it matches."""


class Access(Enum):
    """Who may call a route."""

    PUBLIC = "public"
    CLIENT = "client"
    ADMIN = "admin"


PUBLIC = (
    # Load balancers and kubelets ask without a key. They say that the engine lives, and nothing else.
    "/health",
    "/ping",
    # A page without data, which asks for the token: a browser has none to show when it opens a page.
    DASHBOARD,
)

CLIENT = (
    *(path for path in WORK if path != PRIVILEGED),
    *(INVOCATIONS, *BY_NAME, *STATELESS),
    *("/v1/models", "/v1/realtime", "/tokenizer_info"),
    # Each tenant's stored responses are its own (engine/responses.py).
    *("/v1/responses/{response_id}", CANCEL),
    # What a router in front needs to know of a replica.
    *("/load", "/version"),
    # The schema; a browser has no key to show, so that with keys it is for tools only.
    *("/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc", "/static"),
    # A tenant may forget and pin what is its own, announce what it is about to ask, and have it computed before
    # (server/admin.py).
    *("/hotspan/cache/invalidate", PREFETCH, LOOKUP, PIN, EXPLAIN, WARM, WARM_UP),
)

ADMIN = (
    *("/hotspan/cache", "/hotspan/cache/clear", "/hotspan/cache/check", "/hotspan/keys/shred", "/hotspan/keys/rotate"),
    "/hotspan/trace",
    # Adapters: loading one runs its files.
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", *ADAPTER_WRITES),
    PRIVILEGED,
    # Ends anybody's request, by its id.
    *("/inference/v1/abort_requests", "/abort_requests"),
    *("/kv_event_sources", "/scale_elastic_ep", "/is_scaling_elastic_ep"),
    *("/fault_tolerance/apply", "/fault_tolerance/status", "/start_profile", "/stop_profile"),
    # vLLM's development mode.
    *("/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache", "/collective_rpc", "/server_info"),
    *("/sleep", "/release_kv_cache_memory", "/wake_up", "/is_sleeping", "/pause", "/resume", "/is_paused"),
    *("/init_weight_transfer_engine", "/shutdown_weight_transfer_engine", "/start_weight_update"),
    *("/start_draft_weight_update", "/update_weights", "/finish_weight_update", "/update_weight_version"),
    *("/weight_info", "/weight_checker", "/get_world_size"),
)

CLIENT_READS = tuple(f"GET {path}" for path in ADAPTER_READS)
"""What a client may look at and only the administrator may change; a method before a path goes before the path."""

SHARED = (*CLIENT_READS, *ADAPTER_WRITES, "/hotspan/cache/invalidate", PREFETCH, LOOKUP, PIN, EXPLAIN, WARM, WARM_UP)
"""The client's, of which the administrator has need as well: where administration has a port of its own, both have."""

BODILESS = ("GET", "HEAD", "OPTIONS", "TRACE")
"""Methods whose bodies mean nothing."""

METRICS = "/metrics"
"""Public, as scrapers expect, on a server without keys whose operator gave no admin token; otherwise the
administrator's: counts tell one tenant what the others do."""


def access_table(*, has_keys: bool, has_given_token: bool, has_client_adapters: bool = False) -> Mapping[str, Access]:
    """The access level of each route by its path in the app. Routes that are not in it are the administrator's.

    has_client_adapters: clients register adapters, as a platform in front does that has no token.
    """
    return {
        **dict.fromkeys(PUBLIC, Access.PUBLIC),
        **dict.fromkeys(CLIENT, Access.CLIENT),
        **dict.fromkeys(ADMIN, Access.ADMIN),
        **dict.fromkeys(ADAPTER_WRITES, Access.CLIENT if has_client_adapters else Access.ADMIN),
        **dict.fromkeys(CLIENT_READS, Access.CLIENT),
        METRICS: Access.ADMIN if has_keys or has_given_token else Access.PUBLIC,
    }


class App(Protocol):
    """What FastAPI and Starlette applications have."""

    @property
    def routes(self) -> Sequence[BaseRoute]: ...

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


class Gate:
    """Checks credentials and access before the app. Pure ASGI, outermost: refused requests do not reach the app.

    The body of a request to a public route, or of a method that has none, is never read: its memory would be
    everybody's, and anybody could take it.

    The route is found by the app's own routes, so that what is checked is what is called.

    admin_port: where administration is, and nothing else; None has all at one port. What counts is the port that the
                connection came in at, which no request can name.
    hosts:      names that requests may ask by; None takes all, where everybody needs a key.
    """

    def __init__(
        self,
        app: App,
        access: Mapping[str, Access],
        credentials: Credentials,
        admin_port: int | None = None,
        hosts: Hosts | None = None,
    ) -> None:
        self._app: ASGIApp = app
        self._routes = app.routes
        self._root_path: str = getattr(app, "root_path", "")
        self._access = access
        self._credentials = credentials
        self._admin_port = admin_port
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        try:
            check_head(_target(scope), scope["headers"], version=scope["http_version"])
        except HeadError as error:
            await _refuse(_refused(error.status, "bad_request", str(error)), scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            if self._hosts is not None:
                self._hosts.check(scope.get("method"), headers)
        except HttpError as error:
            await _refuse(error, scope, receive, send)
            return
        if matched(scope, self._routes, self._root_path).path is None and not _is_preflight(scope, headers):
            await _refuse(_refused(404, "not_found", _no_route(scope)), scope, receive, send)
            return
        principal = self._credentials.identify(headers)
        access = Access.PUBLIC if _is_preflight(scope, headers) else self._access_at(scope)
        if (refusal := _refusal(access, principal)) is not None:
            await _refuse(_refused(*refusal.value), scope, receive, send)
            return
        if access is Access.PUBLIC or scope.get("method") in BODILESS:
            receive = _without_body(receive)
        with asking(principal or ANYBODY, _held_s(headers)):
            await self._app(scope, receive, send)

    def _access_at(self, scope: Scope) -> Access | None:
        """The access level at the port of the request; None if its route is served at the other port only."""
        name, access = self._access_of(scope)
        if self._admin_port is None or access is Access.PUBLIC:
            return access
        _, port = scope.get("server") or (None, None)
        if port != self._admin_port:
            return None if access is Access.ADMIN else access
        return None if access is Access.CLIENT and name not in SHARED else Access.ADMIN

    def _access_of(self, scope: Scope) -> tuple[str | None, Access]:
        """The name of the route in the table, and who may call it."""
        path = matched(scope, self._routes, self._root_path).path
        for name in (f"{scope.get('method')} {path}", path):
            if name is not None and name in self._access:
                return name, self._access[name]
        return path, Access.ADMIN


@dataclass(frozen=True, slots=True)
class Matched:
    """The route that will answer a request.

    path:   as it was registered; None if there is none, whatever the method.
    params: what the request has in place of names; none for another method than the route's.
    """

    path: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)


def matched(scope: Scope, routes: Iterable[BaseRoute], root_path: str = "") -> Matched:
    """The route of a request. Matched once; the result is kept in the request's scope."""
    found: Matched | None = scope.get(_MATCHED)
    if found is None:
        found = scope[_MATCHED] = _match(routes, {**scope, "root_path": root_path or scope.get("root_path", "")})
    return found


def _match(routes: Iterable[BaseRoute], scope: Scope) -> Matched:
    partial = None
    for route in routes:
        match, child = route.matches(scope)
        path: str | None = getattr(route, "path", None)
        if match is Match.FULL:
            return Matched(path, child.get("path_params", {}))
        if match is Match.PARTIAL and partial is None:
            partial = Matched(path)
    return partial or Matched()


class Refusal(Enum):
    """The reasons to refuse a request: status, OpenAI's code, message."""

    NO_KEY = (401, "invalid_api_key", "this server needs a valid API key: send `Authorization: Bearer KEY`")
    NO_TOKEN = (401, "invalid_api_key", "this is for the administrator: send `Authorization: Bearer ADMIN_TOKEN`")
    NOT_YOURS = (
        403,
        "permission_denied",
        "an API key does not reach this: it needs the admin token",
    )
    ELSEWHERE = (
        403,
        "permission_denied",
        "this is not served at this port: clients and the administrator (--admin-port) have one each",
    )


def _no_route(scope: Scope) -> str:
    """What there is in place of a route that is not there."""
    return (
        f"there is no {scope.get('method', 'websocket')} {scope['path']:.200} here. The routes depend on what the "
        "model does (generate, embed, classify, transcribe): GET /openapi.json lists them"
    )


def _refusal(access: Access | None, principal: Principal | None) -> Refusal | None:
    if access is None:
        return Refusal.ELSEWHERE
    if access is Access.PUBLIC or (principal is not None and principal.is_admin):
        return None
    if access is Access.CLIENT:
        return Refusal.NO_KEY if principal is None else None
    return Refusal.NOT_YOURS if principal is not None and principal.has_key else Refusal.NO_TOKEN


def _is_preflight(scope: Scope, headers: Headers) -> bool:
    """A CORS preflight, which carries no key and is answered by the app."""
    return scope.get("method") == "OPTIONS" and "origin" in headers and "access-control-request-method" in headers


def _without_body(receive: Receive) -> Receive:
    """The app's `receive` for a request whose body is not read: it is empty. The server drops the rest."""
    parts: list[Message] = [{"type": "http.request", "body": b"", "more_body": False}]

    async def received() -> Message:
        if parts:
            return parts.pop()
        while (message := await receive())["type"] == "http.request":
            pass
        return message

    return received


def _target(scope: Scope) -> bytes:
    """The path as it came, without the prefix that uvicorn puts before it."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    return raw.removeprefix(str(scope.get("root_path", "")).encode())


def _refused(status: int, code: str, message: str) -> HttpError:
    kind = "permission_error" if status == HTTPStatus.FORBIDDEN else "invalid_request_error"
    return HttpError(status, f"{HTTPStatus(status).phrase}: {message}", code=code, kind=kind)


async def _refuse(error: HttpError, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await refuse_websocket(receive, send)
    else:
        await Exchange(scope, receive, send).fail(error)


async def refuse_websocket(receive: Receive, send: Send) -> None:
    """Close it before it opened: the server makes that a 403."""
    await receive()
    await send({"type": "websocket.close", "code": 1008})


def declared(paths: Iterable[str], *methods: str) -> list[BaseRoute]:
    """Routes for `matched`, of an app that answers them by itself."""

    async def never(scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError("the app answers its routes itself")

    return [Route(path, never, methods=list(methods)) for path in paths]


def unlisted(routes: Iterable[BaseRoute], access: Mapping[str, Access]) -> list[str]:
    """The paths that are not in the table, and are therefore the administrator's."""
    return sorted({str(getattr(route, "path", route)) for route in routes} - access.keys())


def _held_s(headers: Headers) -> float:
    """For how long routers say that they have held a request; a client that says so gets less kept, and no more."""
    said = [
        value for value in headers.getlist(HELD_HEADER) if value.isascii() and value.isdecimal() and len(value) < 16
    ]
    return max(map(int, said), default=0) / 1000
