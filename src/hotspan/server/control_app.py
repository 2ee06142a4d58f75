"""hotspan's routes in an engine core's process, for the administrator: who has its socket, or the admin token."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator, Mapping
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from hotspan.config.control import peers
from hotspan.config.server_settings import ServerSettings
from hotspan.config.settings import CacheSettings
from hotspan.config.tenants import Tenants
from hotspan.core.errors import EngineError
from hotspan.core.types import MIB
from hotspan.engine.plugin import tokenizer_of
from hotspan.engine.traces import recorded_engine
from hotspan.http.errors import REQUEST, HttpError
from hotspan.http.exchange import JSON, note_read
from hotspan.http.paths import LOOKUP, PREFETCH, is_small
from hotspan.http.upstream import BrokenError, UnreachedError, Upstream
from hotspan.server.admin import CacheAdmin, admin_router
from hotspan.server.admission import Admission
from hotspan.server.control_serving import LIMITS, Apps
from hotspan.server.exchange import AppExchange, OwnRoute
from hotspan.server.principal import Principal, asking
from hotspan.server.sizes import ANY_BODY, SMALL_BODY, BodyLimit, TextLimit

if TYPE_CHECKING:
    from hotspan.engine.admin import Administrator

_COMMAND = "/control/command"
_TRACE_S = 10.0
"""Within which each core tells what it recorded."""

_LONGEST_S = 6 * 3600.0
"""Within which another core answers what has no time of its own: a check reads the whole disk."""

_MAX_ANSWER = 64 * MIB

_CHARS_PER_TOKEN = 128
"""Of the longest token, where the tokenizer does not tell."""

_making = threading.Lock()
"""FastAPI changes the filters of warnings while it makes routes, which are the process's: two engines may be in one."""

Json = dict[str, Any]


def _with_verb(command: Json) -> Json:
    if not isinstance(command.get("do"), str):
        raise ValueError("the command has no `do`")
    return command


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
        told = [_passed_on(path, command, timeout_s) for path in others.values()]
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


class Command(BaseModel):
    """What one core of an engine asks another."""

    model_config = ConfigDict(extra="forbid", strict=True)

    command: Annotated[dict[str, Any], AfterValidator(_with_verb)]
    timeout_s: float | None = Field(ge=0, allow_inf_nan=False)


class AsAdministrator:
    """An app whose requests are the administrator's, and have the bounds of those that hotspan's own server gets."""

    def __init__(self, app: ASGIApp, admission: Admission, text: BodyLimit) -> None:
        self._app = app
        self._admission = admission
        self._text = text

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with asking(Principal(is_admin=True)):
            exchange = AppExchange(scope, receive, send, is_lmi=False)

            async def work(body: bytes) -> None:
                await exchange.forward(self._app, body)

            async with exchange.answered("engine"):
                limit = SMALL_BODY if is_small(exchange.method, exchange.path) else ANY_BODY
                limit = self._text if exchange.path in (PREFETCH, LOOKUP) else limit
                await self._admission.run(exchange, work, is_counted=False, is_read_here=True, limit=limit)


def apps_of(engine: CoreEngine, config: Any) -> Apps:
    """hotspan's routes over one engine. config: vLLM's."""
    settings = CacheSettings.from_json(config.kv_transfer_config.kv_connector_extra_config["hotspan"])
    admission, text = Admission(ServerSettings(), LIMITS), TextLimit(engine.max_tokens, engine.max_chars).of_bodies()
    with _making:
        routes = admin_router(CacheAdmin(engine, settings, Tenants()))
        made = [_app_of(routes, _between_cores(engine)), _app_of(routes)]
    return Apps(*(AsAdministrator(each, admission, text) for each in made))


def _between_cores(engine: CoreEngine) -> APIRouter:
    """What cores ask each other (_passed_on)."""
    own = APIRouter(route_class=OwnRoute)

    @own.post(_COMMAND)
    async def command(asked: Command) -> Json:
        note_read()
        with _answering():
            return await engine.do(asked.command, asked.timeout_s)

    return own


def _app_of(*routers: APIRouter) -> FastAPI:
    app = FastAPI(title="hotspan", docs_url=None, redoc_url=None, openapi_url=None)
    for each in routers:
        app.include_router(each)
    app.add_exception_handler(RequestValidationError, _misread)
    app.add_exception_handler(StarletteHTTPException, _unknown)
    return app


@contextlib.contextmanager
def _answering() -> Iterator[None]:
    """A block that asks the engine. Raises: HttpError 503 if it fails, or gives no answer in time."""
    try:
        yield
    except (EngineError, TimeoutError) as error:
        raise HttpError(503, str(error) or "the engine gave no answer in time", about=REQUEST) from error


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


async def _passed_on(path: Path, command: Mapping[str, Any], timeout_s: float | None) -> Json:
    """What another core answers. Raises: EngineError."""
    body = json.dumps({"command": dict(command), "timeout_s": timeout_s}).encode()
    within_s = _LONGEST_S if timeout_s is None else timeout_s + 1
    try:
        async with Upstream(connect_timeout_s=within_s, unix_path=str(path)) as core:
            status, told = await core.fetch(
                "http://localhost",
                _COMMAND,
                method="POST",
                headers=[("content-type", JSON)],
                body=body,
                within_s=within_s,
                max_bytes=_MAX_ANSWER,
            )
        said: Json = json.loads(told)
    except (UnreachedError, BrokenError, ValueError) as error:
        raise EngineError(f"a core of the engine can't be asked ({error}): nothing is known of its part") from error
    if status != 200:
        raise EngineError(str(said.get("error", {}).get("message", said)))
    return said
