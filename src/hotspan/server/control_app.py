"""hotspan's routes in an engine core's process, for the administrator: who has its socket, or the admin token."""

import asyncio
import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from hotspan.config.admin_token import HOW_TO_GIVE
from hotspan.config.control import ByTcp, peers
from hotspan.config.settings import CacheSettings
from hotspan.config.tenants import Tenants
from hotspan.core.errors import EngineError
from hotspan.engine.plugin import tokenizer_of
from hotspan.engine.traces import recorded_engine
from hotspan.http.connections import HttpLimits
from hotspan.http.errors import HttpError
from hotspan.http.serving import listen
from hotspan.http.unix import UnixConnection
from hotspan.server.admin import CacheAdmin, admin_router
from hotspan.server.exchange import OwnRoute
from hotspan.server.principal import Credentials, Principal, asking

if TYPE_CHECKING:
    from hotspan.engine.admin import Administrator

_COMMAND = "/control/command"
_TRACE_S = 10.0
"""Within which each core tells what it recorded."""

_CHARS_PER_TOKEN = 128
"""Of the longest token, where the tokenizer does not tell."""

_making = threading.Lock()
"""FastAPI changes the filters of warnings while it makes routes, which are the process's: two engines may be in one."""

Json = dict[str, Any]


class CoreEngine:
    """An engine as `CacheAdmin` sees it, from within one of its cores.

    path, rank: of this core's socket, and its own. config: vLLM's.
    """

    names: frozenset[str]

    def __init__(self, path: Path, rank: int, administrator: "Administrator", config: Any) -> None:
        self._path = path
        self._administrator = administrator
        self._config = config
        self._model = config.model_config
        self._rank = rank
        served = self._model.served_model_name
        self.names = frozenset([served] if isinstance(served, str) else served or [self._model.model])
        self.max_tokens = int(self._model.max_model_len)

    @property
    def max_chars(self) -> int:
        """How many characters a prompt may have: as many as the longest tokens have."""
        longest = None if self._model.skip_tokenizer_init else getattr(self._tokenizer, "max_chars_per_token", None)
        return self.max_tokens * (int(longest) if longest else _CHARS_PER_TOKEN)

    async def administer(self, command: Mapping[str, Any], timeout_s: float | None = None) -> list[Json]:
        """The answer of each core on this host.

        Raises: TimeoutError; EngineError with what a core said, or that it can't be asked.
        """
        others = peers(self._path)
        others.pop(self._rank, None)
        told = [asyncio.to_thread(_passed_on, path, command, timeout_s) for path in others.values()]
        return list(await asyncio.gather(self.do(command, timeout_s), *told))

    async def do(self, command: Mapping[str, Any], timeout_s: float | None) -> Json:
        """This core's answer. Raises: as `administer`."""
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.wrap_future(self._administrator.ask(command))
        except TimeoutError:
            raise
        except Exception as error:  # of whatever kind the engine's answer is
            raise EngineError(f"the engine did not carry it out: {error}") from error

    def salt(self, tenant: str, salt: str | None) -> str | None:
        """The client's own: vLLM's server knows no tenants."""
        return salt

    async def trace(self, recording: str, block_tokens: int, *, is_last: bool) -> Json | None:
        """The requests of all cores on this host since the last call, without their text; None if somebody else
        records. The last answer says what the engine is. Raises: HttpError 503 if a core did not answer.
        """
        asked = {"do": "trace", "recording": recording, "block_tokens": block_tokens, "is_last": is_last}
        with _answering():
            answers = await self.administer(asked, _TRACE_S)
        if not all(answers):
            return None
        rows = sorted((row for answer in answers for row in answer["rows"]), key=itemgetter("timestamp"))
        found = {"rows": rows} | {name: sum(answer[name] for answer in answers) for name in ("running", "dropped")}
        found |= {"age_s": max(answer["age_s"] for answer in answers)}
        if not is_last:
            return found
        return found | {"server": recorded_engine(self._config, min(self.names)), "engines": len(answers)}

    async def tokens(self, prompt: str) -> list[int]:
        """A text's tokens, as /v1/completions makes them. Raises: ValueError for a model without a tokenizer."""
        if self._model.skip_tokenizer_init:
            raise ValueError("the engine has no tokenizer (skip_tokenizer_init): give the tokens")
        return list(await asyncio.to_thread(self._tokenizer.encode, prompt))

    async def chat_tokens(self, body: Mapping[str, Any]) -> list[int]:
        """Raises: ValueError: chats are rendered by the process that takes requests."""
        raise ValueError(
            "messages are rendered by `hotspan serve` alone: give the prompt, or its tokens from /tokenize"
        )

    def adapter_path(self, name: str) -> str | None:
        """None: which adapters there are is known to the process that takes requests."""
        return None

    @property
    def _tokenizer(self) -> Any:
        return tokenizer_of(self._model)


def app_of(engine: CoreEngine, cache: CacheSettings) -> ASGIApp:
    """hotspan's routes over one engine; who reaches them is the administrator."""
    app = FastAPI(title="hotspan", docs_url=None, redoc_url=None, openapi_url=None)
    app.include_router(admin_router(CacheAdmin(engine, cache, Tenants())))
    own = APIRouter(route_class=OwnRoute)

    @own.post(_COMMAND)
    async def command(request: Request) -> Json:
        asked = await request.json()  # of another core of this engine (_passed_on)
        with _answering():
            return await engine.do(asked["command"], asked["timeout_s"])

    app.include_router(own)
    app.add_exception_handler(RequestValidationError, _misread)
    app.add_exception_handler(StarletteHTTPException, _unknown)

    async def administered(scope: Scope, receive: Receive, send: Send) -> None:
        with asking(Principal(is_admin=True)):
            await app(scope, receive, send)

    return administered


@contextlib.contextmanager
def _answering() -> Iterator[None]:
    """A block that asks the engine. Raises: HttpError 503 if it fails, or gives no answer in time."""
    try:
        yield
    except (EngineError, TimeoutError) as error:
        raise HttpError(503, str(error) or "the engine gave no answer in time") from error


async def _misread(request: Request, error: Exception) -> Response:
    """A body that is not as the route has it."""
    found = error.errors() if isinstance(error, RequestValidationError) else []
    said = "; ".join(f"{'.'.join(map(str, each['loc'][1:])) or 'the body'}: {each['msg']}" for each in found)
    return _answered(HttpError(400, said or "the body can't be read"))


async def _unknown(request: Request, error: Exception) -> Response:
    """A route that is not here."""
    status = error.status_code if isinstance(error, StarletteHTTPException) else 404
    path = request.url.path
    return _answered(
        HttpError(status, f"an engine's own socket does not answer {request.method} {path}: `hotspan serve` does")
    )


def _answered(error: HttpError) -> Response:
    return JSONResponse(error.body(error.status), error.status, error.headers)


class ForToken:
    """An app for who sends the admin token, in the head of each request."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._credentials = Credentials(Tenants(), token)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        principal = self._credentials.identify(Headers(scope=scope)) if scope["type"] == "http" else None
        if principal is None or not principal.is_admin:
            error = HttpError(401, f"this is for the administrator: {HOW_TO_GIVE}", code="invalid_api_key")
            await _answered(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def serve(
    engine: CoreEngine, config: Any, listener: socket.socket, ends: socket.socket, by_tcp: ByTcp | None = None
) -> None:
    """Answer on listening sockets until something can be read from `ends`."""
    settings = CacheSettings.from_json(config.kv_transfer_config.kv_connector_extra_config["hotspan"])
    with _making:
        app = app_of(engine, settings)
    served: list[tuple[ASGIApp, socket.socket]] = [(app, listener)]
    if by_tcp is not None:
        served.append((ForToken(app, by_tcp.token), by_tcp.listener))
    asyncio.run(_serve(served, ends))


async def _serve(served: Sequence[tuple[ASGIApp, socket.socket]], ends: socket.socket) -> None:
    ends.setblocking(False)
    servers = []
    for app, listener in served:
        listener.setblocking(False)
        servers.append(await listen(app, HttpLimits(), listener, ServerState()))
    await asyncio.get_running_loop().sock_recv(ends, 1)
    for server in servers:
        server.close()


def _passed_on(path: Path, command: Mapping[str, Any], timeout_s: float | None) -> Json:
    """What another core answers. Raises: EngineError."""
    connection = UnixConnection(path, timeout_s=None if timeout_s is None else timeout_s + 1)
    try:
        body = json.dumps({"command": dict(command), "timeout_s": timeout_s})
        connection.request("POST", _COMMAND, body, {"content-type": "application/json"})
        response = connection.getresponse()
        said: Json = json.load(response)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise EngineError(f"a core of the engine can't be asked ({error}): nothing is known of its part") from error
    finally:
        connection.close()
    if response.status != 200:
        raise EngineError(str(said.get("error", {}).get("message", said)))
    return said
