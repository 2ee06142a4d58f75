"""The routes of adapters: LMI's, with and without the model's name; SageMaker calls the short ones.

    POST   /adapters  name src [preload] [pin]           POST   /adapters/{a}/update  [src] [preload] [pin]
    GET    /adapters  [limit] [next_page_token]          GET    /adapters/{a}       DELETE /adapters/{a}

Each stands under /models/{model} too. Arguments come in the query or in a JSON body. `tenant` is the administrator's.
"""

import json
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse

from hotspan.core.errors import did_you_mean
from hotspan.http.errors import HttpError
from hotspan.http.paths import ADAPTER, ADAPTERS, MODEL, UPDATE
from hotspan.server.adapters.loader import Adapter
from hotspan.server.adapters.registry import LORA_OFF, AdapterRegistry
from hotspan.server.exchange import OwnRoute
from hotspan.server.principal import SERVER, current_owner, current_principal

_ALIAS = "x-amzn-sagemaker-adapter-alias"
_MAX_LIMIT = 10_000
_MAX_BODY_BYTES = 1 << 16

_Handler = Callable[["AdapterRoutes", Request], Awaitable[dict[str, Any]]]


class AdapterRoutes:
    """The handlers. models: names of the base model. is_open: clients may register adapters."""

    def __init__(self, registry: AdapterRegistry, models: Collection[str], *, is_open: bool = False) -> None:
        self._registry = registry
        self._models = models
        self._is_open = is_open

    async def register(self, request: Request) -> dict[str, Any]:
        """Register `name` from `src`. `preload` (true) loads it now, `pin` (false) keeps it loaded."""
        asked = await _asked(request, "name", "src", "preload", "pin", "tenant")
        name = _text(asked, "name")
        preload, pin = _flag(asked, "preload"), _flag(asked, "pin")
        await self._registry.register(
            name,
            _text(asked, "src"),
            preload=True if preload is None else preload,
            pin=bool(pin),
            owner=_owner(asked) or SERVER,
            is_clients=not current_principal().is_admin,
        )
        return {"status": f"Adapter {_shown(request, name)} registered"}

    async def update(self, request: Request) -> dict[str, Any]:
        """Replace `src`, and set `preload` and `pin`, as far as they are given."""
        name = request.path_params["adapter_name"]
        asked = await _asked(request, "name", "src", "preload", "pin", "tenant")
        if asked.get("name", name) != name:
            raise HttpError(400, f"name is {asked['name']!r} and the path says {name!r}: leave name out")
        src = _text(asked, "src") if "src" in asked else None
        owner = _owner(asked) or SERVER
        await self._registry.update(
            name, src=src, preload=_flag(asked, "preload"), pin=_flag(asked, "pin"), owner=owner
        )
        return {"status": f"Adapter {_shown(request, name)} updated"}

    async def delete(self, request: Request) -> dict[str, Any]:
        """Unregister an adapter."""
        name = request.path_params["adapter_name"]
        asked = await _asked(request, "tenant")
        await self._registry.delete(name, _owner(asked) or SERVER)
        return {"status": f"Adapter {_shown(request, name)} unregistered"}

    async def describe(self, request: Request) -> dict[str, Any]:
        """An adapter: name, whether it is pinned and loaded, digest of its files."""
        asked = await _asked(request, "tenant")
        return self._described(self._registry.describe(request.path_params["adapter_name"], _owner(asked) or SERVER))

    async def list(self, request: Request) -> dict[str, Any]:
        """The adapters, `limit` (100) at a time; `next_page_token` goes on."""
        asked = await _asked(request, "limit", "next_page_token", "tenant")
        limit, token = _count(asked, "limit", 1, 100), _count(asked, "next_page_token", 0, 0)
        found, end = self._registry.seen_by(_owner(asked)), token + limit
        listed: dict[str, Any] = {"adapters": [self._described(adapter) for adapter in found[token:end]]}
        return listed | ({"nextPageToken": str(end)} if end < len(found) else {})

    def _described(self, adapter: Adapter) -> dict[str, Any]:
        """What the caller may know of an adapter. `src` is shown only to those who may change it."""
        is_admin = current_principal().is_admin
        said: dict[str, Any] = {"name": adapter.name}
        if is_admin or (self._is_open and adapter.owner == current_owner()):
            said["src"] = adapter.src
        if is_admin and adapter.owner:
            said["tenant"] = adapter.owner
        rest = {"preload": adapter.preload, "pin": adapter.pin, "loaded": adapter.is_loaded, "digest": adapter.digest}
        return said | rest

    def check_model(self, request: Request) -> None:
        """Raise HttpError if the path names another model."""
        model = request.path_params.get("model")
        if model is not None and model not in self._models:
            names = ", ".join(sorted(self._models))
            raise HttpError(404, f"there is no model {model!r:.140} here: it is {names}, or leave /models/... out")


def adapter_router(registry: AdapterRegistry | None, models: Collection[str], *, is_open: bool = False) -> APIRouter:
    """The routes in all their spellings; without a registry they answer that LoRA is off."""
    routes = None if registry is None else AdapterRoutes(registry, models, is_open=is_open)
    router = APIRouter(tags=["adapters"], route_class=OwnRoute)
    for prefix in ("", MODEL):
        for method, path, handler in (
            ("POST", ADAPTERS, AdapterRoutes.register),
            ("GET", ADAPTERS, AdapterRoutes.list),
            ("GET", ADAPTER, AdapterRoutes.describe),
            ("DELETE", ADAPTER, AdapterRoutes.delete),
            ("POST", UPDATE, AdapterRoutes.update),
        ):
            answer = _answering(routes, handler)
            router.add_api_route(
                prefix + path, answer, methods=[method], name=handler.__name__, description=handler.__doc__
            )
    return router


def _answering(routes: AdapterRoutes | None, handler: _Handler) -> Callable[[Request], Awaitable[JSONResponse]]:
    async def answer(request: Request) -> JSONResponse:
        if routes is None:
            raise HttpError(400, LORA_OFF)
        routes.check_model(request)
        return JSONResponse(await handler(routes, request))

    return answer


async def _asked(request: Request, *known: str) -> dict[str, Any]:
    """The arguments of the query and of a JSON body. Raises: HttpError for one that is unknown or given twice."""
    asked: dict[str, Any] = dict(request.query_params)
    for name, value in (await _body(request)).items():
        if asked.get(name, value) != value:
            raise HttpError(400, f"{name} is {asked[name]!r} in the query and {value!r} in the body: give it once")
        asked[name] = value
    for name in asked:
        if name not in known:
            hint = did_you_mean(name, known, f"there are {', '.join(known)}")
            raise HttpError(400, f"unknown argument {name!r:.80}: {hint}")
    return asked


async def _body(request: Request) -> Mapping[str, Any]:
    data = b""
    async for part in request.stream():
        data += part
        if len(data) > _MAX_BODY_BYTES:
            raise HttpError(413, f"the body is over {_MAX_BODY_BYTES} bytes: it takes the adapter's src, not its files")
    if not data.strip():
        return {}
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise HttpError(400, f"the body is no JSON ({error}): give an object, or arguments in the query") from error
    if not isinstance(body, dict):
        raise HttpError(400, f"the body is {body!r:.80}: give a JSON object")
    return body


def _text(asked: Mapping[str, Any], name: str) -> str:
    value = asked.get(name)
    if not isinstance(value, str) or not value:
        raise HttpError(400, f"{name} is missing: give it as text, in the query or in a JSON body")
    return value


def _flag(asked: Mapping[str, Any], name: str) -> bool | None:
    value = asked.get(name)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise HttpError(400, f"{name} is {value!r:.80}: give true or false")


def _count(asked: Mapping[str, Any], name: str, least: int, default: int) -> int:
    value = asked.get(name, default)
    text = str(value)
    if isinstance(value, bool) or not (text.isascii() and text.isdigit() and len(text) < 10) or int(text) < least:
        raise HttpError(400, f"{name} is {value!r:.80}: give a whole number from {least} on")
    return min(int(text), _MAX_LIMIT) if name == "limit" else int(text)


def _owner(asked: Mapping[str, Any]) -> str | None:
    """The owner of a request's adapters; None if the administrator names no tenant. Raises: HttpError."""
    tenant = asked.get("tenant")
    if not current_principal().is_admin:
        if tenant is not None:
            raise HttpError(403, "tenant is the administrator's to give: leave it out")
        return current_owner()
    return None if tenant is None else _text(asked, "tenant")


def _shown(request: Request, name: str) -> str:
    """The platform's name for the adapter if it sent one."""
    return request.headers.get(_ALIAS, name)
