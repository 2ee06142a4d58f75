"""LMI's and SageMaker's routes, and what they add to the engine's own: adapters by header, sessions, formatters.

body -> adapter -> input formatter -> schema -> engine -> LMI's schema -> output formatter

A request to one of the engine's own routes that asks for none of these goes to the engine untouched.
"""

import json
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp

from hotspan.formatters import Formatters
from hotspan.http.errors import HttpError
from hotspan.http.exchange import JSON
from hotspan.http.head import ADAPTER_HEADER, CLOSED_SESSION_HEADER, NEW_SESSION_HEADER, SESSION_HEADER
from hotspan.http.paths import BY_NAME, INVOCATIONS, OPENAI, WORK
from hotspan.http.sse import SSE, event
from hotspan.server.adapters.registry import AdapterRegistry
from hotspan.server.exchange import JSONLINES, AppExchange, Conversion
from hotspan.server.lmi.request import (
    LMI_NAMES,
    Schema,
    chosen_schema,
    own_name,
    session_request,
    take_adapter,
)
from hotspan.server.lmi.schema import Generation, Rows, embeddings_answer, embeddings_body
from hotspan.server.lmi.sessions import NEW, Sessions
from hotspan.server.principal import current_owner, current_tenant

Payload = dict[str, Any]
Forget = Callable[[str, str], Awaitable[None]]
"""Invalidates what the cache holds of a session, given its id and tenant. Raises: HttpError if that is not certain."""

_WITH_DIRECTIVES = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
_UNFORMATTED = set(WORK) - set(OPENAI) | {"/v1/responses", "/v1/messages"}
"""Routes whose bodies or streams no formatter could take: they are refused where there is one."""

_WITHOUT_DEFAULT = ("/v1/messages",)
"""Routes whose bodies must name a model, the base model too."""

_SHAPES = "metadata"
"""The engine's header that says what vectors are in an answer in bytes (encoding_format)."""

_DONE_HERE = frozenset({ADAPTER_HEADER, SESSION_HEADER})
"""Headers that the engine's app would act upon a second time."""

_MAX_ERROR = 200


@dataclass(frozen=True, slots=True)
class _Call:
    """One invocation with its adapter and session.

    adapter: by the client's name. body: as it came, if the payload still says the same.
    """

    exchange: AppExchange
    payload: Payload
    adapter: str | None
    session: str | None
    body: bytes | None = None


class Dialect:
    """Answers requests with the engine's app.

    base_names: of the base model.
    forget:     called for each session that is closed.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        base_names: tuple[str, ...],
        is_embedding: bool,
        adapters: AdapterRegistry | None = None,
        formatters: Formatters | None = None,
        sessions: Sessions | None = None,
        forget: Forget | None = None,
    ) -> None:
        self._app = app
        self._base_names = base_names
        self._is_embedding = is_embedding
        self._adapters = adapters
        self._formatters = formatters
        self._sessions = sessions
        self._forget = forget

    @property
    def has_formatters(self) -> bool:
        """Whether anything is formatted, for any model."""
        return self._formatters is not None and not self._formatters.is_empty

    async def answer(self, exchange: AppExchange, path: str, body: bytes, model: str | None = None) -> None:
        """Answer a request to `path`, which names `model`. Raises: HotspanError, ClientGone."""
        is_post = exchange.method == "POST"
        if is_post and (path == INVOCATIONS or path in BY_NAME):
            await self._invoke(exchange, body, model)
        elif not is_post or self._is_plain(exchange, path):
            await exchange.forward(self._app, body)
        else:
            await self._forward(await self._call(exchange, _parsed(exchange, body), path, body), path)

    async def _invoke(self, exchange: AppExchange, body: bytes, model: str | None) -> None:
        if model is not None and model not in self._base_names:
            raise HttpError(404, f"there is no model {model!r:.80}: it is called {' or '.join(self._base_names)}")
        payload = _parsed(exchange, body)
        if (asks := session_request(payload)) is not None:
            await self._session(exchange, asks)
            return
        call = await self._call(exchange, payload, body=body)
        schema = chosen_schema(call.payload, is_embedding=self._is_embedding)
        if schema is Schema.LMI:
            await self._generate(call)
        elif schema is Schema.EMBEDDING:
            await self._embed(call)
        else:
            await self._forward(call, schema.value)

    def _is_plain(self, exchange: AppExchange, path: str) -> bool:
        """Whether a POST to one of the engine's own routes goes to the engine untouched. Raises: HttpError 400."""
        if path not in OPENAI:
            if path in WORK and exchange.headers.get(ADAPTER_HEADER):
                message = f"{path} takes no adapter by header: leave {ADAPTER_HEADER} out"
                raise HttpError(400, message, param=ADAPTER_HEADER)
            if path in _UNFORMATTED and self.has_formatters:
                raise _unformatted(path)
            return True
        names_nothing = SESSION_HEADER not in exchange.headers and ADAPTER_HEADER not in exchange.headers
        return self._adapters is None and self._formatters is None and names_nothing

    # -- what is asked -------------------------------------------------------------------------------------------------

    async def _call(self, exchange: AppExchange, payload: Payload, path: str | None = None, body: bytes = b"") -> _Call:
        """Adapter, session and input formatter applied to a request; `path` if it is one of the engine's own."""
        formatters, named, is_same = self._formatters, payload.get("model"), "adapters" not in payload
        name = take_adapter(payload, exchange.headers, self._base_names)
        if name is not None and self._adapters is not None:
            name = self._adapters.key_of(name, current_owner())
        if path in _UNFORMATTED and self._is_formatted(name):
            raise _unformatted(path)
        model = name
        if name is not None and self._adapters is not None:
            model = await self._adapters.resolve(name)
        session = self._session_of(exchange)
        if formatters is not None and formatters.has_input(name):
            payload = dict(await formatters.input(name, payload, exchange.named_headers, current_tenant()))
            is_same = False
        is_same &= named == model if model is not None else named is None or named not in LMI_NAMES
        payload.pop("model", None)
        if model is not None:
            payload["model"] = model
        elif path in _WITHOUT_DEFAULT:
            payload["model"] = self._base_names[0]
            is_same &= named is not None
        return _Call(exchange, payload, name, session, body if is_same else None)

    def _session_of(self, exchange: AppExchange) -> str | None:
        named, sessions = exchange.headers.get(SESSION_HEADER), self._sessions
        if not named or sessions is None:
            return None
        return _new_session(exchange, sessions) if named == NEW else sessions.use(current_tenant(), named)

    async def _session(self, exchange: AppExchange, asks: str) -> None:
        """Open or close a session."""
        sessions = self._sessions
        if sessions is None:
            raise HttpError(400, "this server keeps no sessions: leave requestType out", param="requestType")
        if asks == NEW:
            answer = {"session_id": _new_session(exchange, sessions)}
        else:
            name = exchange.headers.get(SESSION_HEADER)
            if not name:
                raise HttpError(
                    400, f"which session is to be closed? Send its id as {SESSION_HEADER}", param=SESSION_HEADER
                )
            with sessions.closing(current_tenant(), name):
                if self._forget is not None:
                    await self._forget(name, current_tenant())
            exchange.answer_headers[CLOSED_SESSION_HEADER] = name
            answer = {"closed_session_id": name}
        await exchange.respond(200, json.dumps(answer).encode())

    # -- how it is answered --------------------------------------------------------------------------------------------

    async def _forward(self, call: _Call, path: str) -> None:
        """An OpenAI body, with OpenAI's answer."""
        formatters = self._formatters
        is_formatted = formatters is not None and formatters.has_output(call.adapter)
        await self._ask(call, path, self._conversion(call, lambda said: said) if is_formatted else None)

    async def _generate(self, call: _Call) -> None:
        """LMI's schema, with LMI's answer."""
        generation = Generation.parse(call.payload)
        conversion = self._conversion(
            call,
            generation.answer,
            Rows(generation).of,
            SSE if SSE in call.exchange.headers.get("accept", "") else JSONLINES,
            lambda error: error.about(own_name(error.param)),  # by the name that the client knows
        )
        await self._ask(_with_body(call, generation.body), Schema.COMPLETION.value, conversion)

    async def _embed(self, call: _Call) -> None:
        """Answer `inputs` of an embedding model with bare vectors."""
        inputs = call.payload["inputs"]
        conversion = self._conversion(call, lambda said: embeddings_answer(inputs, said))
        await self._ask(_with_body(call, embeddings_body(call.payload)), Schema.EMBEDDING.value, conversion)

    async def _ask(self, call: _Call, path: str, conversion: Conversion | None) -> None:
        await call.exchange.ask(self._app, path, _encoded(call, path), _DONE_HERE, conversion)

    def _conversion(
        self,
        call: _Call,
        answer: Callable[[Payload], Any],
        rows: Callable[[Payload], Iterable[Payload]] = lambda chunk: [chunk],
        kind: str = SSE,
        error: Callable[[HttpError], HttpError] = lambda error: error,
    ) -> Conversion:
        """What becomes of a response: `answer` of a whole one, `rows` of a stream, then the output formatter."""

        async def whole(content: bytes, headers: Headers) -> tuple[bytes, str]:
            said: Any = content
            if headers.get("content-type", "").startswith(JSON):
                said = answer(json.loads(content))
            elif _SHAPES in headers:
                call.exchange.answer_headers[_SHAPES] = headers[_SHAPES]
            if isinstance(said, list) and isinstance(said[0], dict):
                return _content([_json_value(await self._output(call, each)) for each in said])
            return _content(await self._output(call, said))

        async def row(said: Payload) -> bytes:
            return _framed(await self._output(call, said), kind)

        return Conversion(whole, rows, row, kind, error)

    def _is_formatted(self, adapter: str | None) -> bool:
        formatters = self._formatters
        return formatters is not None and (formatters.has_input(adapter) or formatters.has_output(adapter))

    async def _output(self, call: _Call, said: Any) -> Any:
        """The formatter's result for an answer; the answer itself without a formatter."""
        formatters = self._formatters
        if formatters is None or not formatters.has_output(call.adapter):
            return said
        return await formatters.output(call.adapter, said, call.exchange.named_headers, current_tenant())


def _unformatted(path: str) -> HttpError:
    return HttpError(
        400,
        f"{path} can't be asked where a formatter has to see the request and its answer: ask /invocations, "
        "/v1/chat/completions, /v1/completions, or a route of pooling",
    )


def _new_session(exchange: AppExchange, sessions: Sessions) -> str:
    session = sessions.create(current_tenant())
    exchange.answer_headers |= {SESSION_HEADER: session.header, NEW_SESSION_HEADER: session.header}
    return session.id


def _parsed(exchange: AppExchange, body: bytes) -> Payload:
    kind = exchange.headers.get("content-type", JSON).partition(";")[0].strip().lower()
    if kind != JSON:
        raise HttpError(415, f"the content-type is {kind!r:.80}: send {JSON}", param="content-type")
    try:
        payload = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise HttpError(400, f"the body is no JSON: {str(error)[:_MAX_ERROR]}") from error
    if not isinstance(payload, dict):
        raise HttpError(400, f"the body is a JSON {type(payload).__name__}: send an object")
    return payload


def _with_body(call: _Call, body: Payload) -> _Call:
    """The same with a body in the engine's schema."""
    named = {"model": call.payload["model"]} if "model" in call.payload else {}
    return _Call(call.exchange, {**body, **named}, call.adapter, call.session)


def _encoded(call: _Call, path: str) -> bytes:
    """The body for the engine, with the session as one of the request's directives."""
    payload = call.payload
    if call.session is None and call.body is not None:
        return call.body
    if call.session is not None and path in _WITH_DIRECTIVES and not payload.get("use_beam_search"):
        directives = payload.get("kv_transfer_params")
        if directives is None or isinstance(directives, dict):
            payload = {**payload, "kv_transfer_params": {"session": call.session, **(directives or {})}}
    return json.dumps(payload).encode()


def _content(said: Any) -> tuple[bytes, str]:
    """An answer as bytes, and its content type."""
    if isinstance(said, bytes):
        return said, "application/octet-stream"
    if not isinstance(said, str):
        return _json(said), JSON
    try:
        json.loads(said)
    except ValueError:
        return said.encode(), "text/plain; charset=utf-8"
    return said.encode(), JSON


def _json_value(said: Any) -> Any:
    """One answer of several, as JSON holds it."""
    return said.decode(errors="replace") if isinstance(said, bytes) else said


def _framed(said: Any, kind: str) -> bytes:
    """One chunk of a stream. Bytes that a formatter returns are sent unchanged."""
    if isinstance(said, bytes):
        return said
    content = said.encode() if isinstance(said, str) else _json(said)
    return event(content) if kind == SSE else content.removesuffix(b"\n") + b"\n"


def _json(said: Any) -> bytes:
    """JSON as UTF-8, unescaped. A lone surrogate, which UTF-8 can't encode, becomes a ?."""
    return json.dumps(said, ensure_ascii=False).encode(errors="replace")
