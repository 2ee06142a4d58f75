"""The guard between vLLM's routes and its engine: every request of every route gets its tenant here.

    routes -> create_completion, ...            refuse wrong directives before any work
           -> client.renderer                   media parts get their identities (engine/media.py)
           -> client.generate                   refuse what other routes made of theirs, before a stream begins
           -> engine_core.add_request_async     salt, directives and place in the queue, for whatever comes this far

What a client may say of its tenant is nothing: the salt that keeps tenants apart in the engine's prefix cache, and the
directives that tell hotspan's tiers whose a request is, are set here from the authenticated principal.
"""

import copy
import dataclasses
import json
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from contextvars import ContextVar
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM

from hotspan.core.breakpoints import Holds, holds_of, retention_s
from hotspan.core.directives import Directives, Places, parse_directives
from hotspan.core.fair import FairOrder
from hotspan.core.namespace import engine_salt
from hotspan.core.system_lines import SystemLines
from hotspan.engine.entrypoints import create_error_response
from hotspan.engine.media import bind_media
from hotspan.engine.places import Tokens, form_of, places_of
from hotspan.engine.requests import SERVER_DIRECTIVES
from hotspan.engine.responses import keep_apart
from hotspan.engine.system_lines import ChangedLines, rewrite
from hotspan.engine.traces import Traces
from hotspan.http.exchange import note_read

if TYPE_CHECKING:
    from hotspan.engine.tracing import RequestTracing

_PARAMS = "kv_transfer_params"
CREATES = {
    "openai_serving_completion": "create_completion",
    "openai_serving_chat": "create_chat_completion",
    "openai_serving_responses": "create_responses",
    "anthropic_serving_messages": "create_messages",
    "serving_tokens": "serve_tokens",
}
"""Handlers that see the whole request, before its text is tokenised and the answer begins."""

_TRIPS = (AttributeError, KeyError, IndexError)
"""What a check raises that takes a value for one of another type, as in `"structured_outputs": false`."""


_Told = tuple[Places, int, Holds, int]
_NOTHING: _Told = ((), 0, (), 0)
_ASKED: ContextVar[_Told] = ContextVar("hotspan_asked", default=_NOTHING)
"""Where the parts of the current task's prompt are, if that is asked for, its template's options, what it pins, and
which line of its system prompt its session has changed."""

_PLACES: ContextVar[list[int] | None] = ContextVar("hotspan_places", default=None)
"""Places in the queue of what the current task asks for and no token has come of."""


class _Checked(dict[str, Any]):
    """kv_transfer_params that were found right, and the directives in them. No JSON of a client's makes one."""

    def __init__(self, given: Mapping[str, Any], directives: Directives) -> None:
        super().__init__(given)
        self.directives = directives

    def __deepcopy__(self, memo: object) -> "_Checked":
        return self  # nobody changes it


class RequestGuard:
    """Gives each request its tenant.

    tenant:      whose request the current task works for. held_since_s: since when the server holds its text.
    is_isolated: tenants never hit each other's prefixes.
    is_cached:   the engine has hotspan's tiers and understands directives.
    order:       in which the engine begins tenants' prompts, where its queue is one of priorities.
    lines:       of system prompts that are dropped or moved, as they change in each request.

    `traces` records requests while somebody fetches them. chat_tokens: the engine's, once there is one.
    """

    def __init__(
        self,
        tenant: Callable[[], str],
        held_since_s: Callable[[], float | None] = lambda: None,
        *,
        is_isolated: bool = True,
        is_cached: bool = True,
        order: FairOrder | None = None,
        lines: SystemLines | None = None,
    ) -> None:
        self._tenant = tenant
        self._held_since_s = held_since_s
        self._is_isolated = is_isolated
        self._is_cached = is_cached
        self._order = order
        self._lines = lines
        self._changed = ChangedLines()
        self.traces = Traces()
        self.chat_tokens: Tokens | None = None

    def salt(self, tenant: str, salt: str | None) -> str | None:
        """What the engine salts a tenant's prefixes with, given the client's own salt."""
        return engine_salt(tenant, salt or "") if self._is_isolated else salt

    def admit(self, request: EngineCoreRequest) -> None:
        """Give a request its salt, its directives and its place in the queue.

        Mutates: `request`, but not the parameters that it may share with others.
        Raises:  VLLMValidationError if the client's directives are wrong.
        """
        request.cache_salt = self.salt(self._tenant(), request.cache_salt)
        params = request.sampling_params
        if self._order is not None:
            request.priority = 0 if params is None else self._place(request)
        if params is None:
            return  # pooling parameters carry no directives
        extra = dict(params.extra_args or {})
        directives = self.directives(extra.pop(_PARAMS, None))
        if self._is_cached:
            extra[_PARAMS] = {SERVER_DIRECTIVES: directives.to_json()}
        if extra != (params.extra_args or {}):
            request.sampling_params = copy.copy(params)
            request.sampling_params.extra_args = extra

    def _place(self, request: EngineCoreRequest) -> int:
        """The place of a prompt, behind those of its tenant; what a client gives as priority does not count."""
        if self._order is None:
            return 0
        place = self._order.place(self._tenant(), len(request.prompt_token_ids or ()))
        if (places := _PLACES.get()) is not None:
            places.append(place)
        return place

    async def _begun(self, outputs: AsyncGenerator[Any, None], order: FairOrder) -> AsyncGenerator[Any, None]:
        """The outputs of a request, whose first one tells that its prompt was computed."""
        places: list[int] = []
        _PLACES.set(places)
        async with aclosing(outputs):
            async for output in outputs:
                if places:
                    order.began(max(places))
                    places.clear()
                yield output

    def directives(self, params: object) -> Directives:
        """What a client asks for its request, as its tenant's. Raises: VLLMValidationError that says what would do."""
        if isinstance(params, _Checked):
            return self._owned(params.directives)
        if params is not None and not isinstance(params, Mapping):
            raise VLLMValidationError(f"{_PARAMS} is {params!r:.80}: give an object", parameter=_PARAMS)
        try:
            asked = parse_directives(params or {})
            for name in (*asked.tags, asked.session or ""):
                if not name.isascii():
                    name.encode()  # JSON can hold half a character, which the engine's wire can't
        except UnicodeEncodeError as error:
            message = "tags and session must be Unicode text: one holds half a surrogate pair"
            raise VLLMValidationError(message, parameter=_PARAMS) from error
        except ValueError as error:
            raise VLLMValidationError(str(error), parameter=_PARAMS) from error
        return self._owned(asked)

    def _owned(self, asked: Directives) -> Directives:
        places, form, holds, changed = _ASKED.get()
        told = dataclasses.replace(asked, places=places, form=form, holds=holds, changed_line=changed)
        return dataclasses.replace(told, tenant=self._tenant(), held_since_s=self._held_since_s())

    def protect(self, client: AsyncLLM) -> None:
        """Let nothing reach the engine but through here. Mutates: `client`."""
        bind_media(client.renderer, lambda: self.salt(self._tenant(), None) or "")
        core = client.engine_core
        add_request, generate = core.add_request_async, client.generate
        tracing = _request_tracing(client)

        async def admitted(request: EngineCoreRequest) -> None:
            self.admit(request)
            self.traces.admitted(request)
            await add_request(request)
            note_read()

        @wraps(generate)
        def checked(prompt: Any, sampling_params: Any, *rest: Any, **options: Any) -> Any:
            # Not a generator itself: it raises here and now, and not when a stream is first read.
            asked = self.directives((sampling_params.extra_args or {}).get(_PARAMS))
            session = None if asked.session is None else f"{asked.tenant}|{asked.session}"
            if tracing is None:
                outputs = generate(prompt, sampling_params, *rest, **options)
            else:
                headers = options.pop("trace_headers", None)
                begin = partial(generate, prompt, sampling_params, *rest, **options)
                outputs = tracing.followed(lambda carried: begin(trace_headers=carried), headers)
            if self._order is not None:
                outputs = self._begun(outputs, self._order)
            return self.traces.followed(outputs, sampling_params.output_kind, session)

        core.add_request_async = admitted
        client.generate = checked

    def protect_routes(self, app: FastAPI) -> None:
        """Answer 400 to wrong directives before a route does any work; keep tenants' stored responses apart.

        Mutates: the app's handlers.
        """
        for handler, method in CREATES.items():
            serving = getattr(app.state, handler, None)
            if serving is not None:
                setattr(serving, method, self._checked(getattr(serving, method)))
        responses = getattr(app.state, "openai_serving_responses", None)
        if responses is not None:
            keep_apart(responses, self._tenant)

    def _checked(self, create: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        @wraps(create)
        async def checked(request: Any, *rest: Any, **options: Any) -> Any:
            asked = getattr(request, _PARAMS, None)
            try:
                directives = self.directives(asked)
                holds = await _holds(request, (*rest, *options.values()))
                if getattr(request, "features", None) is not None:
                    message = "features name their media as they like: send the media as content_parts"
                    raise VLLMValidationError(message, parameter="features")
                if asked and getattr(request, "use_beam_search", False):
                    message = f"{_PARAMS} can't be kept in a beam search: leave one of them out"
                    raise VLLMValidationError(message, parameter=_PARAMS)
            except VLLMValidationError as error:
                return create_error_response(error)
            if self._lines:
                rewrite(request, self._lines)
            places: Places = ()
            if directives.explain and self.chat_tokens is not None:
                places = await places_of(request, self.chat_tokens)
            session = directives.session
            changed = 0 if session is None else self._changed.note(directives.tenant, session, request)
            told = (places, form_of(request), holds, changed)
            _ASKED.set(told)
            if asked:
                setattr(request, _PARAMS, _Checked(asked, directives))
            answer = await create(request, *rest, **options)
            is_stream = isinstance(answer, AsyncGenerator)
            return _telling(answer, told) if is_stream and told != _NOTHING else answer

        return checked


async def _telling(stream: AsyncGenerator[Any], told: _Told) -> AsyncGenerator[Any]:
    """A stream whose request is made when it is first read, by another task than its route's."""
    _ASKED.set(told)
    async with aclosing(stream):
        async for part in stream:
            _ASKED.set(_NOTHING)  # it is made: what the same task asks for next is another
            yield part


async def _holds(request: Any, others: tuple[Any, ...]) -> Holds:
    """What a request says of keeping its prompt in the words of other APIs. Raises: VLLMValidationError."""
    retention, raw = getattr(request, "prompt_cache_retention", None), None
    if whole := next((each for each in others if isinstance(each, Request)), None):
        raw = await whole.body()
    try:
        holds = holds_of(json.loads(raw)) if raw and b'"cache_control"' in raw else ()
        if retention is not None and (hold_s := retention_s(retention)):
            holds = (*holds, (1.0, hold_s))
    except (ValueError, RecursionError) as error:
        raise VLLMValidationError(str(error), parameter="cache_control") from error
    return holds


def _request_tracing(client: AsyncLLM) -> "RequestTracing | None":
    """Where requests are traced; None where vLLM traces none."""
    if not client.vllm_config.observability_config.otlp_traces_endpoint:
        return None
    from hotspan.engine.tracing import RequestTracing

    return RequestTracing()


def refuse_bodies(app: FastAPI) -> None:
    """Answer 400 where reading a body fails in such a way; the same errors from anywhere else stay 500s.

    Mutates: the app, before its first request.
    """
    for kind in _TRIPS:
        app.add_exception_handler(kind, _refused)
    app.middleware_stack = None  # made anew, should it have been made: it has its own copy of the handlers


async def _refused(request: Request, error: Exception) -> JSONResponse:
    names = {frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)}
    if "request_body_to_args" not in names:
        raise error
    message = f"the body can't be read: a value is not of the type that its name asks for ({error})"
    said: Any = create_error_response(message)
    return JSONResponse(said.model_dump(), status_code=400)
