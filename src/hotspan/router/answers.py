"""Which answers can be compared, and what an answer says."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import orjson

from hotspan.http.exchange import Exchange
from hotspan.http.head import SESSION_HEADER
from hotspan.http.json_size import most_containers
from hotspan.http.sse import Events
from hotspan.router.prompt import MAX_NODES

_PATHS = frozenset(("/v1/chat/completions", "/v1/completions"))
MAX_BYTES = 256 * 1024
"""Of a request, and of an answer, that is copied."""

_DIRECTIVES = "kv_transfer_params"
_LEAVES_NOTHING = {"no_store": True, "renew": False}
"""Directives of a copy: what its client has invalidated since, or no longer wants kept, must not be stored again."""

Said = Mapping[str, str]
"""What an answer says: text, reasoning and tool calls, and why it ended."""


def answer_of(content: bytes, *, is_stream: bool) -> Said | None:
    """What an answer of one choice says, streamed or whole; None if it is not whole, or no such answer."""
    try:
        parts = Events().of(content + b"\n") if is_stream else [orjson.loads(content)]
        said: defaultdict[str, str] = defaultdict(str)
        for part in parts:
            for choice in part.get("choices") or ():
                _add(choice, said)
    except (ValueError, TypeError, AttributeError):
        return None
    return dict(said) if said.get("end") else None


def _add(choice: Mapping[str, Any], said: defaultdict[str, str]) -> None:
    part = choice.get("message") or choice.get("delta") or choice
    found = {
        "text": part.get("content") or choice.get("text"),
        "reasoning": part.get("reasoning") or part.get("reasoning_content"),
        "end": choice.get("finish_reason"),
    }
    for at, call in enumerate(part.get("tool_calls") or ()):
        function, number = call.get("function") or {}, call.get("index", at)
        found |= {f"tool {number}": function.get("name"), f"arguments {number}": function.get("arguments")}
    for name, text in found.items():
        if text:
            said[name] += text


def comparable(exchange: Exchange, body: bytes) -> bytes | None:
    """The body of a copy, whose answer comes as a whole; None for a request whose answers can't be compared."""
    if exchange.path not in _PATHS or len(body) > MAX_BYTES or SESSION_HEADER in exchange.headers:
        return None
    if most_containers(body) > MAX_NODES:  # as no body that is read has
        return None
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(parsed, dict) or parsed.get("temperature") != 0 or isinstance(parsed["temperature"], bool):
        return None
    is_several = isinstance(parsed.get("prompt"), list) and any(not isinstance(each, int) for each in parsed["prompt"])
    if parsed.get("n") not in (None, 1) or parsed.get("best_of") not in (None, 1) or is_several:
        return None
    asked = parsed.get(_DIRECTIVES) or {}
    if not isinstance(asked, dict) or parsed.get("use_beam_search"):  # a replica refuses directives beside that
        return None
    parsed.pop("stream_options", None)
    try:
        return orjson.dumps(parsed | {"stream": False, _DIRECTIVES: asked | _LEAVES_NOTHING})
    except orjson.JSONEncodeError:  # it can be nested more deeply than it can be written
        return None
