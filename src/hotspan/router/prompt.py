"""The prompt in a request's body, in each of the schemas that replicas take."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hotspan.router.template import Json

_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens", "max_new_tokens")


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of a body: a text, token ids or messages; none of these if it is unknown.

    bytes:  of its text, roughly. max_tokens: of the answer; 0 if there is no limit.
    others: bytes of further prompts in the same body.
    """

    text: str = ""
    ids: Sequence[int] = ()
    messages: Sequence[Json] | None = None
    tools: Sequence[Json] = ()
    bytes: int = 0
    max_tokens: int = 0
    others: int = 0


def prompt_of(path: str, body: Mapping[str, Any]) -> Prompt:
    """The prompt of a request; an empty one if it has none, or none that can be known here."""
    max_tokens = _max_tokens(body)
    if path.endswith("/responses"):
        return _chat(_of_responses(body), [_flat_tool(tool) for tool in _list(body.get("tools"))], max_tokens)
    if path.endswith("/messages"):
        return _chat(_of_messages(body), [_named_tool(tool) for tool in _list(body.get("tools"))], max_tokens)
    if path.endswith("/completions") and not path.endswith("/chat/completions"):
        return _plain(body.get("prompt"), max_tokens)
    for name in ("prompt", "inputs"):  # as replicas tell schemas apart
        if name in body and not path.endswith("/chat/completions"):
            return _plain(body[name], max_tokens)
    messages = body.get("messages")
    if not isinstance(messages, list):
        return Prompt(max_tokens=max_tokens)
    if messages and isinstance(messages[0], list):
        chats = [_chat(_list(each), (), max_tokens) for each in messages]
        return replace(chats[0], others=sum(chat.bytes for chat in chats[1:]))
    return _chat(messages, [tool for tool in _list(body.get("tools")) if isinstance(tool, dict)], max_tokens)


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
    if all(type(each) is int for each in prompt):
        return Prompt(ids=prompt, bytes=4 * len(prompt), max_tokens=max_tokens)
    first = _plain(prompt[0], max_tokens) if isinstance(prompt[0], str | list) else Prompt(max_tokens=max_tokens)
    sizes = (len(each) * (4 if isinstance(each, list) else 1) for each in prompt[1:] if isinstance(each, str | list))
    return replace(first, others=sum(sizes))


def _chat(messages: Sequence[object], tools: Sequence[Json], max_tokens: int) -> Prompt:
    """A prompt of messages, up to the first item that is no message."""
    known: list[Json] = []
    for message in messages:
        if not isinstance(message, dict):
            break
        known.append(message)
    if not known:
        return Prompt(max_tokens=max_tokens)
    return Prompt(messages=known, tools=tools, bytes=sum(map(_size, known)), max_tokens=max_tokens)


def _size(message: Json) -> int:
    """Bytes of a message's text and of its other fields, which a template may write, too."""
    content = message.get("content")
    size = len(content) if isinstance(content, str) else 0
    if isinstance(content, list):
        size = sum(
            len(part["text"]) for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)
        )
    others = (value for name, value in message.items() if name not in ("role", "content"))
    return size + sum(
        len(value) if isinstance(value, str) else len(repr(value)) for value in others if value is not None
    )


def _of_responses(body: Mapping[str, Any]) -> list[object]:
    """The messages of a request for a response; none if it continues one that only the replica knows."""
    if body.get("previous_response_id") is not None or body.get("prompt") is not None:
        return []
    instructions, given = body.get("instructions"), body.get("input")
    messages: list[object] = [{"role": "system", "content": instructions}] if isinstance(instructions, str) else []
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    for item in _list(given):
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


def _of_messages(body: Mapping[str, Any]) -> list[object]:
    """The messages of Anthropic's schema, where the system prompt is a field of its own."""
    system, messages = body.get("system"), _list(body.get("messages"))
    if isinstance(system, list):
        system = "\n".join(str(part.get("text", "")) for part in system if isinstance(part, dict))
    return [{"role": "system", "content": system}, *messages] if system else messages


def _flat_tool(tool: object) -> Json:
    """A tool of a response's: its function's fields beside its type."""
    if not isinstance(tool, dict) or "function" in tool:
        return tool if isinstance(tool, dict) else {}
    return {"type": tool.get("type"), "function": {name: value for name, value in tool.items() if name != "type"}}


def _named_tool(tool: object) -> Json:
    """A tool of Anthropic's schema."""
    if not isinstance(tool, dict):
        return {}
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
    }
    return {"type": "function", "function": function}


def _max_tokens(body: Mapping[str, Any]) -> int:
    parameters = body.get("parameters")
    for fields in (body, parameters) if isinstance(parameters, dict) else (body,):
        for name in _LIMITS:
            value = fields.get(name)
            if type(value) is int and value > 0:
                return value
    return 0


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
