"""The adapters' routes: LMI's with and without the model's name, SageMaker's among them.

    POST   /adapters  name src [preload] [pin]           POST   /adapters/{a}/update  [src] [preload] [pin]
    GET    /adapters  [limit] [next_page_token]          GET    /adapters/{a}       DELETE /adapters/{a}

Each stands under /models/{model} too. Arguments come in the query or in a JSON body.
"""

import difflib
import json
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse

from hotspan.server.adapters.base import Adapter
from hotspan.server.adapters.errors import AdapterError
from hotspan.server.adapters.registry import LORA_OFF, AdapterRegistry

MODEL = "/models/{model}"
ADAPTERS = "/adapters"
ADAPTER = "/adapters/{adapter_name}"
UPDATE = "/adapters/{adapter_name}/update"

READS = tuple(prefix + path for prefix in ("", MODEL) for path in (ADAPTERS, ADAPTER))
"""Paths that any client may GET; every other method is the administrator's."""

WRITES = (*READS, *(prefix + UPDATE for prefix in ("", MODEL)))

_ALIAS = "x-amzn-sagemaker-adapter-alias"
_MOST_LIMIT = 10_000
_MOST_BODY_BYTES = 1 << 16

_Handler = Callable[["AdapterRoutes", Request], Awaitable[dict[str, Any]]]


class AdapterRoutes:
    """What the routes do, on a server that goes by the names of `models`."""

    def __init__(self, registry: AdapterRegistry, models: Collection[str]) -> None:
        self._registry = registry
        self._models = models

    async def register(self, request: Request) -> dict[str, Any]:
        asked = await _asked(request, "name", "src", "preload", "pin")
        name = _text(asked, "name")
        preload, pin = _flag(asked, "preload"), _flag(asked, "pin")
        await self._registry.register(
            name, _text(asked, "src"), preload=True if preload is None else preload, pin=bool(pin)
        )
        return {"status": f"Adapter {_shown(request, name)} registered"}

    async def update(self, request: Request) -> dict[str, Any]:
        name = request.path_params["adapter_name"]
        asked = await _asked(request, "name", "src", "preload", "pin")
        if asked.get("name", name) != name:
            raise AdapterError(400, f"name is {asked['name']!r} and the path says {name!r}: leave name out")
        src = _text(asked, "src") if "src" in asked else None
        await self._registry.update(name, src=src, preload=_flag(asked, "preload"), pin=_flag(asked, "pin"))
        return {"status": f"Adapter {_shown(request, name)} updated"}

    async def delete(self, request: Request) -> dict[str, Any]:
        name = request.path_params["adapter_name"]
        await self._registry.delete(name)
        return {"status": f"Adapter {_shown(request, name)} unregistered"}

    async def describe(self, request: Request) -> dict[str, Any]:
        return _described(self._registry.describe(request.path_params["adapter_name"]))

    async def list(self, request: Request) -> dict[str, Any]:
        asked = await _asked(request, "limit", "next_page_token")
        page = self._registry.page(_count(asked, "limit", 1, 100), _count(asked, "next_page_token", 0, 0))
        listed: dict[str, Any] = {"adapters": [_described(adapter) for adapter in page.adapters]}
        if page.next_page_token is not None:
            listed["nextPageToken"] = str(page.next_page_token)
        return listed

    def check_model(self, request: Request) -> None:
        """Raise AdapterError if the path names another model."""
        model = request.path_params.get("model")
        if model is not None and model not in self._models:
            names = ", ".join(sorted(self._models))
            raise AdapterError(404, f"there is no model {model!r:.140} here: it is {names}, or leave /models/... out")


def adapter_router(registry: AdapterRegistry | None, models: Collection[str]) -> APIRouter:
    """The routes, in all their spellings; without a registry they say that LoRA is off."""
    routes = None if registry is None else AdapterRoutes(registry, models)
    router = APIRouter(tags=["adapters"])
    for prefix in ("", MODEL):
        for method, path, handler in (
            ("POST", ADAPTERS, AdapterRoutes.register),
            ("GET", ADAPTERS, AdapterRoutes.list),
            ("GET", ADAPTER, AdapterRoutes.describe),
            ("DELETE", ADAPTER, AdapterRoutes.delete),
            ("POST", UPDATE, AdapterRoutes.update),
        ):
            router.add_api_route(prefix + path, _answering(routes, handler), methods=[method], name=handler.__name__)
    return router


def _answering(routes: AdapterRoutes | None, handler: _Handler) -> Callable[[Request], Awaitable[JSONResponse]]:
    async def answer(request: Request) -> JSONResponse:
        try:
            if routes is None:
                raise AdapterError(400, LORA_OFF)
            routes.check_model(request)
            return JSONResponse(await handler(routes, request))
        except AdapterError as error:
            return JSONResponse(error.body(error.status), error.status, error.headers)

    return answer


async def _asked(request: Request, *known: str) -> dict[str, Any]:
    """The arguments, of the query and of a JSON body. Raises: AdapterError for what is unknown or said twice."""
    asked: dict[str, Any] = dict(request.query_params)
    for name, value in (await _body(request)).items():
        if asked.get(name, value) != value:
            raise AdapterError(400, f"{name} is {asked[name]!r} in the query and {value!r} in the body: give it once")
        asked[name] = value
    for name in asked:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise AdapterError(400, f"unknown argument {name!r:.80}: {hint}")
    return asked


async def _body(request: Request) -> Mapping[str, Any]:
    data = b""
    async for part in request.stream():
        data += part
        if len(data) > _MOST_BODY_BYTES:
            raise AdapterError(
                413, f"the body is over {_MOST_BODY_BYTES} bytes: it takes the adapter's src, not its files"
            )
    if not data.strip():
        return {}
    try:
        body = json.loads(data)
    except ValueError as error:
        raise AdapterError(400, f"the body is no JSON ({error}): give an object, or arguments in the query") from error
    if not isinstance(body, dict):
        raise AdapterError(400, f"the body is {body!r:.80}: give a JSON object")
    return body


def _text(asked: Mapping[str, Any], name: str) -> str:
    value = asked.get(name)
    if not isinstance(value, str) or not value:
        raise AdapterError(400, f"{name} is missing: give it as text, in the query or in a JSON body")
    return value


def _flag(asked: Mapping[str, Any], name: str) -> bool | None:
    value = asked.get(name)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise AdapterError(400, f"{name} is {value!r:.80}: give true or false")


def _count(asked: Mapping[str, Any], name: str, least: int, default: int) -> int:
    value = asked.get(name, default)
    text = str(value)
    if isinstance(value, bool) or not (text.isascii() and text.isdigit() and len(text) < 10) or int(text) < least:
        raise AdapterError(400, f"{name} is {value!r:.80}: give a whole number from {least} on")
    return min(int(text), _MOST_LIMIT) if name == "limit" else int(text)


def _described(adapter: Adapter) -> dict[str, Any]:
    return {
        "name": adapter.name,
        "src": adapter.src,
        "preload": adapter.preload,
        "pin": adapter.pin,
        "loaded": adapter.is_loaded,
        "digest": adapter.digest,
    }


def _shown(request: Request, name: str) -> str:
    """What the platform calls the adapter, if it says."""
    return request.headers.get(_ALIAS, name)
