"""The prompt in a request's body, in each of the schemas that replicas take."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hotspan.router import anthropic
from hotspan.router.template import Json

MAX_TEXT = 1 << 22
"""Characters of a prompt that are compared, about a million tokens. A longer chat is not read."""

MAX_MESSAGES, MAX_NODES = 4096, 1 << 15
"""Of a chat that is read: its messages, and the objects, lists and fields in them and in its tools."""

MAX_COPIED = 1 << 31
"""Messages times characters: what a template copies that adds one message after the other to its text."""

_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens", "max_new_tokens")


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of a body: a text, token ids or messages; none of these if it is unknown.

    bytes:  of its text, roughly. max_tokens: of the answer; 0 if there is no limit.
    others:  bytes of further prompts in the same body.
    options: fields for the template that the body has under other names.
    """

    text: str = ""
    ids: Sequence[int] = ()
    messages: Sequence[Json] | None = None
    tools: Sequence[Json] = ()
    bytes: int = 0
    max_tokens: int = 0
    others: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)


def prompt_of(path: str, body: Mapping[str, Any]) -> Prompt:
    """The prompt of a request; an empty one if it has none, or none that can be known here.

    Raises: TooMuchError.
    """
    max_tokens = _max_tokens(body)
    if path.endswith("/responses"):
        return _chat(_of_responses(body), [_flat_tool(tool) for tool in _few(body.get("tools"))], max_tokens)
    if path.endswith("/messages"):
        flat([body.get("system"), body.get("messages")])
        tools = anthropic.tools_of(_few(body.get("tools")))
        return replace(_chat(anthropic.messages_of(body), tools, max_tokens), options=anthropic.options_of(body))
    if path.endswith("/completions") and not path.endswith("/chat/completions"):
        return _plain(body.get("prompt"), max_tokens)
    for name in ("prompt", "inputs"):  # as replicas tell schemas apart
        if name in body and not path.endswith("/chat/completions"):
            return _plain(body[name], max_tokens)
    messages = body.get("messages")
    if not isinstance(messages, list):
        return Prompt(max_tokens=max_tokens)
    if messages and isinstance(messages[0], list):
        first, *others = (_list(each) for each in messages[: MAX_MESSAGES + 1])
        if sum(map(len, others), len(messages)) > MAX_MESSAGES:
            raise TooMuchError(f"more than {MAX_MESSAGES} messages")
        return replace(_chat(first, (), max_tokens), others=sum(_chat(each, (), max_tokens).bytes for each in others))
    return _chat(messages, [tool for tool in _few(body.get("tools")) if isinstance(tool, dict)], max_tokens)


def path_of(body: Mapping[str, Any]) -> str:
    """A path that takes such bodies."""
    paths = {"messages": "/v1/chat/completions", "prompt": "/v1/completions", "input": "/v1/responses"}
    return next((path for name, path in paths.items() if name in body), "/invocations")


def _plain(prompt: object, max_tokens: int) -> Prompt:
    """A text, token ids, or the first of several."""
    if isinstance(prompt, str):
        return Prompt(text=prompt, bytes=len(prompt), max_tokens=max_tokens)
    if not isinstance(prompt, list) or not prompt:
        return Prompt(max_tokens=max_tokens)
    if set(map(type, prompt)) == {int}:
        return Prompt(ids=prompt, bytes=4 * len(prompt), max_tokens=max_tokens)
    if len(prompt) > MAX_MESSAGES:
        raise TooMuchError(f"more than {MAX_MESSAGES} prompts")
    first = _plain(prompt[0], max_tokens) if isinstance(prompt[0], str | list) else Prompt(max_tokens=max_tokens)
    sizes = (len(each) * (4 if isinstance(each, list) else 1) for each in prompt[1:] if isinstance(each, str | list))
    return replace(first, others=sum(sizes))


class TooMuchError(Exception):
    """A prompt has more than is read here."""


def flat(roots: Iterable[object], limit: int = MAX_NODES) -> list[str]:
    """All strings in some values, names of fields too, in one order. Raises: TooMuchError beyond `limit` nodes."""
    found: list[str] = []
    stack = [*roots]
    while stack:
        value = stack.pop()
        if isinstance(value, str):
            found.append(value)
            continue
        inner = value if isinstance(value, dict | list) else ()
        limit -= 1 + len(inner)
        if limit < 0:
            raise TooMuchError(f"more than {MAX_NODES} objects, lists and fields")
        stack += inner
        if isinstance(value, dict):
            stack += value.values()
    return found


def _check_size(messages: Sequence[Json], tools: Sequence[Json]) -> None:
    """Raise TooMuchError for a chat whose reading would take long: all later steps are linear in what is counted."""
    if len(messages) > MAX_MESSAGES:
        raise TooMuchError(f"more than {MAX_MESSAGES} messages")
    others = [{name: value for name, value in message.items() if name != "content"} for message in messages]
    # Strings may be parsed or written as JSON, as a tool call's arguments are.
    strings = flat([*others, *tools])
    nested = sum(text.count(opening) for text in strings for opening in ",[{")
    flat([message.get("content") for message in messages], MAX_NODES - min(nested, MAX_NODES + 1))
    size = sum(map(len, strings)) + sum(map(_text_size, messages))
    if size > MAX_TEXT or size * len(messages) > MAX_COPIED:
        raise TooMuchError(f"{size} characters in {len(messages)} messages")


def check_options(body: Mapping[str, Any]) -> None:
    """The same for what else a template is given of a body."""
    strings = flat(body.get(name) for name in ("tools", "documents", "chat_template_kwargs"))
    if sum(map(len, strings)) > MAX_TEXT:
        raise TooMuchError("tools, documents or settings of the template are too long")


def _chat(messages: Sequence[object], tools: Sequence[Json], max_tokens: int) -> Prompt:
    """A prompt of messages, up to the first item that is no message. Raises: TooMuchError."""
    if len(messages) > MAX_MESSAGES:
        raise TooMuchError(f"more than {MAX_MESSAGES} messages")
    known: list[Json] = []
    for message in messages:
        if not isinstance(message, dict):
            break
        known.append(message)
    if not known:
        return Prompt(max_tokens=max_tokens)
    _check_size(known, tools)
    return Prompt(messages=known, tools=tools, bytes=sum(map(_size, known)), max_tokens=max_tokens)


def _size(message: Json) -> int:
    """Bytes of a message's text and of its other fields, which a template may write, too."""
    size = _text_size(message)
    others = (value for name, value in message.items() if name not in ("role", "content"))
    return size + sum(
        len(value) if isinstance(value, str) else len(repr(value)) for value in others if value is not None
    )


def _text_size(message: Json) -> int:
    """Characters of a message's text."""
    content = message.get("content")
    if not isinstance(content, list):
        return len(content) if isinstance(content, str) else 0
    texts = (part.get("text") if isinstance(part, dict) else part for part in content)
    return sum(len(text) for text in texts if isinstance(text, str))


def _of_responses(body: Mapping[str, Any]) -> list[object]:
    """The messages of a request for a response; none if it continues one that only the replica knows."""
    if body.get("previous_response_id") is not None or body.get("prompt") is not None:
        return []
    instructions, given = body.get("instructions"), body.get("input")
    messages: list[object] = [{"role": "system", "content": instructions}] if isinstance(instructions, str) else []
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    for item in _list(given)[: MAX_MESSAGES + 1]:
        message = _of_item(item)
        messages.append(message)
        if message is None:
            break
    return messages


def _of_item(item: object) -> Json | None:
    """The message of one item of a response's input; None for what is not mapped."""
    if not isinstance(item, dict):
        return None
    kind = item.get("type", "message")
    if kind == "message" and "role" in item:
        return {"role": item["role"], "content": item.get("content")}
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind == "function_call_output" and isinstance(item.get("output"), str):
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": item["output"]}
    return None


def _flat_tool(tool: object) -> Json:
    """A tool of a response's: its function's fields beside its type."""
    if not isinstance(tool, dict) or "function" in tool:
        return tool if isinstance(tool, dict) else {}
    return {"type": tool.get("type"), "function": {name: value for name, value in tool.items() if name != "type"}}


def _max_tokens(body: Mapping[str, Any]) -> int:
    parameters = body.get("parameters")
    for fields in (body, parameters) if isinstance(parameters, dict) else (body,):
        for name in _LIMITS:
            value = fields.get(name)
            if type(value) is int and value > 0:
                return value
    return 0


def _few(value: object) -> list[Any]:
    """A list; an empty one for any other value. Raises: TooMuchError for a long one."""
    if len(found := _list(value)) > MAX_MESSAGES:
        raise TooMuchError(f"more than {MAX_MESSAGES} tools or parts")
    return found


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
