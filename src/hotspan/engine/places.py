"""Where the parts of a chat are in its prompt: found by rendering it without its later messages, or without its tools.

Only for requests that ask to be explained: it renders a chat up to 10 times.
"""

import itertools
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from hotspan.core.directives import Places

Tokens = Callable[[Mapping[str, Any]], Awaitable[list[int]]]
"""The tokens of a chat. Raises: ValueError for one that its template refuses."""

_FIELDS = {"messages", "tools", "chat_template", "chat_template_kwargs", "add_generation_prompt"}
_ENDS = 4
"""Messages at the begin and at the end of a chat whose ends are looked for."""

_FORM = ("chat_template", "chat_template_kwargs", "reasoning_effort", "documents")
_MAX_CHARS = 400_000


def form_of(request: Any) -> int:
    """What stands for the options of a request's template; 0 if it has none of its own."""
    given = [getattr(request, name, None) for name in _FORM]
    return zlib.crc32(repr(given).encode(errors="replace")) | 1 if any(given) else 0


async def places_of(request: Any, tokens: Tokens) -> Places:
    """Where the parts of a chat end; none of those that can't be told, and none at all for a prompt that is no chat."""
    body = request.model_dump(include=_FIELDS, exclude_none=True, mode="json")
    messages = body.get("messages")
    if not messages or len(str(body)) > _MAX_CHARS:
        return ()
    try:
        whole = await tokens(body)
    except ValueError:
        return ()
    found, before = list[tuple[str, int]](), 0
    for count in _counts(len(messages)):
        end = len(whole)
        if count < len(messages):
            try:
                shorter = await tokens(body | {"messages": messages[:count], "add_generation_prompt": False})
            except ValueError:
                continue  # a template may want a question
            end = _common(whole, shorter)
        found.append((_name(messages, before, count), end))
        before = count
    return tuple(await _with_tools(found, body, whole, tokens))


def _counts(messages: int) -> list[int]:
    """How many messages are rendered each time."""
    counts = range(1, messages + 1)
    return sorted({*counts[:_ENDS], *counts[-_ENDS:]})


def _name(messages: Sequence[Mapping[str, Any]], first: int, last: int) -> str:
    if last - first > 1:
        return f"messages {first + 1} to {last}"
    role = messages[first].get("role")
    return "system prompt" if not first and role in ("system", "developer") else f"message {last} ({role})"


async def _with_tools(
    found: list[tuple[str, int]], body: Mapping[str, Any], whole: list[int], tokens: Tokens
) -> list[tuple[str, int]]:
    """The same, and where the tools are, which are in or before one of the messages."""
    if not body.get("tools"):
        return found
    try:
        bare = await tokens({name: value for name, value in body.items() if name != "tools"})
    except ValueError:
        return found
    begin = _common(whole, bare)
    end = max(begin, len(whole) - _common(whole[begin:][::-1], bare[begin:][::-1]))
    cut = list[tuple[str, int]]()
    for name, until in found:
        if end > begin and (not cut or cut[-1][1] <= begin) and until > begin:
            cut += [(name, begin), ("tools", end)]
        cut.append((name, until))
    return cut


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two texts have in common at the front."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
