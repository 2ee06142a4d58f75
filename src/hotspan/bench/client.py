"""A client of any OpenAI-compatible server that times what it streams."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from types import MappingProxyType, TracebackType
from typing import Any, Final, Self

import aiohttp

from hotspan.bench.records import RequestRecord
from hotspan.bench.workloads.base import Prompt
from hotspan.core.errors import ConfigError
from hotspan.http.sse import events

# Servers drop idle connections (uvicorn after 5 s). Dropping ours first keeps a request from being sent into one.
_KEEPALIVE_S: Final = 4.0
_ERROR_BODY_CHARS: Final = 500
_REFUSED: Final = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)


@dataclass(frozen=True, slots=True)
class ModelCard:
    """An entry of /v1/models.

    root:       where the server says it loaded the model from.
    max_tokens: that a request may have, prompt and answer; None if the server does not say.
    """

    name: str
    root: str = ""
    max_tokens: int | None = None

    @classmethod
    def of(cls, listed: Mapping[str, Any]) -> Self:
        """Raises: KeyError if it has no name."""
        most = listed.get("max_model_len")
        return cls(str(listed["id"]), str(listed.get("root") or ""), most if type(most) is int and most > 0 else None)


class StreamError(Exception):
    """The server answered, but not with a whole answer."""


class OpenAIClient:
    """One connection pool to one server. Use it as an async context manager.

    admin_token: for the page of metrics alone, once a server refuses that without it.
    is_refused:  whether it refused the page, whatever it was sent.
    """

    def __init__(
        self, base_url: str, api_key: str, timeout_s: float, clock: Callable[[], float], *, admin_token: str = ""
    ) -> None:
        self.is_refused = False
        self._admin_headers = {"Authorization": f"Bearer {admin_token}"} if admin_token else {}
        self._base_url = base_url
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=timeout_s)
        self._clock = clock

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
            headers=self._headers,
            timeout=self._timeout,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def models(self) -> list[ModelCard]:
        """What the server lists.

        Raises: ConfigError if it can't be reached or its list can't be read.
        """
        url = f"{self._base_url}/v1/models"
        try:
            async with self._session.get(url) as response:
                response.raise_for_status()
                listed = (await response.json(content_type=None))["data"]
                return [ModelCard.of(card) for card in listed]
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{url} can't be read ({_describe(error)}); is the server up, its URL "
                "(of `bench`: --engine-url) right, and --api-key its key?"
            ) from error

    async def count_tokens(self, model: str, text: str) -> int | None:
        """The text's tokens without special ones, or None if the server has no /tokenize."""
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        answer = await self.page("/tokenize", "POST", json=body)
        try:
            return None if answer is None else int(json.loads(answer)["count"])
        except (ValueError, KeyError, TypeError):
            return None

    async def metrics(self) -> str | None:
        """The server's Prometheus page, or None if it has none, or refuses it."""
        try:
            status, text = await self._metrics({})
            if status in _REFUSED and self._admin_headers:
                status, text = await self._metrics(self._admin_headers)
        except (aiohttp.ClientError, TimeoutError, UnicodeDecodeError):
            return None
        self.is_refused = status in _REFUSED
        return text if status == HTTPStatus.OK else None

    async def _metrics(self, headers: Mapping[str, str]) -> tuple[int, str]:
        async with self._session.get(f"{self._base_url}/metrics", headers=headers) as response:
            return response.status, await response.text()

    async def page(self, path: str, method: str = "GET", **more: Any) -> str | None:
        """What a path answers that not every server has, or None. `more` is aiohttp's."""
        try:
            async with self._session.request(method, self._base_url + path, **more) as response:
                return await response.text() if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, UnicodeDecodeError):
            return None

    async def chat(
        self,
        prompt: Prompt,
        order: int,
        model: str,
        *,
        ignore_eos: bool,
        salt: str = "",
        more: Mapping[str, Any] = MappingProxyType({}),
    ) -> RequestRecord:
        """Stream one answer and time it. A failure of any kind is a record with its error.

        salt: vLLM's `cache_salt`: what was stored under another one is not found. more: of the request's body.
        """
        body: dict[str, Any] = {
            **more,
            "model": model,
            "messages": [message._asdict() for message in prompt.messages],
            "max_tokens": prompt.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if ignore_eos:
            body["ignore_eos"] = True
        if salt:
            body["cache_salt"] = salt
        return prompt.scored(await self.stream(body, StreamedAnswer(), prompt.request_id, order))

    async def stream(
        self,
        body: Mapping[str, Any],
        answer: "StreamedAnswer",
        request_id: str,
        order: int,
        headers: Mapping[str, str] | None = None,
    ) -> RequestRecord:
        """`chat` with any body of a streaming chat completion; `answer` takes what the server sends."""
        answer.submit_time = self._clock()
        url = f"{self._base_url}/v1/chat/completions"
        try:
            async with self._session.post(url, json=body, headers=headers) as response:
                answer.headers = response.headers
                if response.status != 200:
                    text = (await response.text(errors="replace"))[:_ERROR_BODY_CHARS]
                    raise StreamError(f"HTTP {response.status}: {text}")
                # Raw chunks: aiohttp's own line reader refuses long lines.
                async for event in events(response.content.iter_any()):
                    if not isinstance(event, dict):
                        raise StreamError(f"the stream holds something other than JSON objects: {event!r:.80}")
                    answer.take(event, self._clock())
            return answer.record(request_id, order)
        except (aiohttp.ClientError, TimeoutError, ValueError, TypeError, AttributeError, StreamError) as error:
            # ValueError, TypeError, AttributeError: an event that isn't shaped as the protocol says.
            return answer.failure(request_id, order, _describe(error), self._clock())


def _describe(error: Exception) -> str:
    if isinstance(error, StreamError):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _text(parts: Iterable[str]) -> str:
    """The parts as one text. Servers that cut a character in two send half of a UTF-16 pair in each part."""
    return "".join(parts).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


@dataclass(slots=True)
class StreamedAnswer:
    """An answer that is still arriving. headers: the response's."""

    submit_time: float = 0.0
    headers: Mapping[str, str] = field(default_factory=dict)
    parts: list[str] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    finish_reason: str = ""
    finish_event_time: float = 0.0
    usage: dict[str, Any] = field(default_factory=dict)

    def take(self, event: dict[str, Any], now: float) -> None:
        if "error" in event:
            raise StreamError(f"the server broke off: {json.dumps(event['error'])[:_ERROR_BODY_CHARS]}")
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            text = "".join(delta.get(key) or "" for key in ("reasoning_content", "reasoning", "content"))
            if text:
                self.parts.append(text)
                self.arrivals.append(now)
            if choice.get("finish_reason"):
                self.finish_reason = choice["finish_reason"]
                self.finish_event_time = now

    def record(self, request_id: str, order: int) -> RequestRecord:
        """The finished answer.

        An answer without visible text is one only if the server counts tokens for it (half a character, or the end
        of the text at once); its first token is then the event that ended it.

        Raises: StreamError if the answer isn't whole.
        """
        if not self.finish_reason:
            raise StreamError("the stream ended before the answer did (no finish_reason)")
        output_tokens = int(self.usage.get("completion_tokens") or 0) or len(self.parts)
        if output_tokens == 0:
            raise StreamError("the server sent no tokens")
        details = self.usage.get("prompt_tokens_details") or {}
        return RequestRecord(
            request_id=request_id,
            order=order,
            successful=True,
            submit_time=self.submit_time,
            first_token_time=self.arrivals[0] if self.arrivals else self.finish_event_time,
            # The usage event comes after the last token; it isn't part of the answer's latency.
            finish_time=self.finish_event_time,
            num_input_tokens=int(self.usage.get("prompt_tokens") or 0),
            num_output_tokens=output_tokens,
            cached_tokens=details.get("cached_tokens"),
            inter_token_s=tuple(b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)),
            answer=_text(self.parts),
            finish_reason=self.finish_reason,
        )

    def failure(self, request_id: str, order: int, error: str, now: float) -> RequestRecord:
        """The request as a failure; what had arrived of an answer is not kept, so that it can't pass for one."""
        first = self.arrivals[0] if self.arrivals else 0.0
        return RequestRecord(request_id, order, False, self.submit_time, first, now, error=error)
