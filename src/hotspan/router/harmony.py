"""Prompts of gpt-oss models: Harmony, which vLLM writes itself in place of the model's chat template.

The format: https://cookbook.openai.com/articles/openai-harmony. What vLLM makes of a chat's messages is in its
`entrypoints/openai/parser/harmony_utils.py`; tests compare both on the same bodies.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from hotspan.core.clock import Clock, SystemClock
from hotspan.router.template import Json, texts_of

_IDENTITY: Final = "You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06"
_CHANNELS: Final = "# Valid channels: analysis, commentary, final. Channel must be included for every message."
_FOR_TOOLS: Final = "\nCalls to these tools must go to the commentary channel: 'functions'."
_EFFORTS: Final = ("low", "medium", "high")
_NAMES: Final = {"integer": "number", "number": "number", "boolean": "boolean", "string": "string"}

_Message = tuple[str, str, str, str]
"""Whose it is, with a recipient; its channel, with a content type; its text; what ends it."""


def is_harmony(directory: Path) -> bool:
    """Whether the engine renders the chats of a model's directory so."""
    try:
        return bool(json.loads((directory / "config.json").read_bytes()).get("model_type") == "gpt_oss")
    except (OSError, ValueError, AttributeError):
        return False


class Harmony:
    """Renders chats as the engine does for gpt-oss.

    overhead: bytes of a prompt without any text.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self.overhead = len((self.render([], {}) or "").encode())

    def render(self, messages: Sequence[Json], body: Mapping[str, Any]) -> str | None:
        """The prompt of a chat; None where the engine refuses it. body: of the request, for tools and effort."""
        effort = _effort(body)
        if effort not in _EFFORTS:
            return None
        tools = [tool["function"] for tool in body.get("tools") or () if isinstance(tool.get("function"), Mapping)]
        first, rest = messages[0] if messages else {}, messages[1:]
        if first.get("role") not in ("system", "developer"):
            first, rest = {}, messages
        instructions = _flat(first.get("content"))
        channels = _CHANNELS + (_FOR_TOOLS if tools else "")
        date = datetime.fromtimestamp(self._clock.unix()).strftime("%Y-%m-%d")
        found = [_said("system", f"{_IDENTITY}\nCurrent date: {date}\n\nReasoning: {effort}\n\n{channels}")]
        if instructions or tools:
            found.append(_said("developer", _developer(instructions, tools)))
        names = {call.get("id"): _function(call).get("name") for each in rest for call in each.get("tool_calls") or ()}
        for message in rest:
            found += _messages(message, names)
        shown = (f"<|start|>{who}{channel}<|message|>{text}{end}" for who, channel, text, end in _without_old(found))
        return "".join(shown) + "<|start|>assistant"


def _messages(message: Json, names: Mapping[Any, Any]) -> Iterator[_Message]:
    """Those that the engine makes of one message of a chat."""
    role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls") or ()
    thought = message.get("reasoning")
    if role == "tool":
        name = names.get(message.get("tool_call_id", ""), "")
        yield (f"functions.{name}", "<|channel|>commentary to=assistant", _flat(content) or "", "<|end|>")
    elif role in ("system", "developer"):
        if (instructions := _flat(content)) is not None:
            yield _said("developer", _developer(instructions, ()))
    elif role != "assistant":
        yield _said(str(role), "".join(texts_of(content)[0]))
    elif calls:
        if said := _flat(content):
            yield _said("assistant", said, "commentary")
        if thought:
            yield _said("assistant", thought, "analysis")
        for call in calls:
            function = _function(call)
            to = f"assistant to=functions.{function.get('name', '')}"
            yield (to, "<|channel|>commentary json", function.get("arguments") or "", "<|call|>")
    else:
        if thought:
            yield _said("assistant", thought, "analysis")
        texts = texts_of(content)[0]
        if texts and texts[0]:
            yield _said("assistant", "".join(texts), "final")


def _without_old(messages: Sequence[_Message]) -> Iterator[_Message]:
    """Without what was thought before the last answer."""
    channels = [channel for who, channel, _, _ in messages]
    last = max((at for at, channel in enumerate(channels) if channel == "<|channel|>final"), default=-1)
    return (each for at, each in enumerate(messages) if at >= last or channels[at] != "<|channel|>analysis")


def _said(role: str, text: str, channel: str = "") -> _Message:
    return role, f"<|channel|>{channel}" if channel else "", text, "<|end|>"


def _effort(body: Mapping[str, Any]) -> object:
    reasoning = body.get("reasoning")
    found = body.get("reasoning_effort") or (reasoning.get("effort") if isinstance(reasoning, Mapping) else None)
    return found or "medium"


def _flat(content: object) -> str | None:
    """A content's texts in one; None without any."""
    if isinstance(content, str):
        return content
    texts = texts_of(content)[0]
    return "".join(texts) if texts else None


def _function(call: object) -> Mapping[str, Any]:
    found = call.get("function") if isinstance(call, Mapping) else None
    return found if isinstance(found, Mapping) else {}


# -- tools, as types of TypeScript -------------------------------------------------------------------------------------


def _developer(instructions: str | None, tools: Sequence[Mapping[str, Any]]) -> str:
    parts = [] if instructions is None else ["# Instructions", instructions]
    if tools:
        types = "\n".join(line for tool in tools for line in _tool(tool))
        parts += ["# Tools", f"## functions\n\nnamespace functions {{\n\n{types}\n}} // namespace functions"]
    return "\n\n".join(parts)


def _tool(tool: Mapping[str, Any]) -> Iterator[str]:
    text = (tool.get("description") or "").removesuffix("\n")
    yield from (f"// {line.removesuffix(chr(13))}" for line in (text.split("\n") if text else ()))
    parameters = tool.get("parameters")
    taken = f"(_: {_type(parameters, '')})" if parameters is not None else "()"
    yield f"type {tool.get('name')} = {taken} => any;\n"


def _type(schema: Any, indent: str) -> str:
    """The type of what a JSON schema describes."""
    if not isinstance(schema, Mapping):
        return "any"
    if isinstance(variants := schema.get("oneOf"), list):
        return "".join(f"\n{indent} | {_variant(each, indent, '')}" for each in variants)
    kind = schema.get("type")
    if isinstance(kind, list):
        return " | ".join("number" if each == "integer" else each for each in kind) or "any"
    if kind == "object":
        return _object(schema, indent)
    if kind == "array":
        return f"{_type(schema['items'], indent)}[]" if "items" in schema else "Array<any>"
    if kind == "string" and isinstance(values := schema.get("enum"), list):
        return " | ".join(f'"{value}"' for value in values if isinstance(value, str)) or "string"
    return _NAMES.get(str(kind), "any")


def _object(schema: Mapping[str, Any], indent: str) -> str:
    required = schema.get("required") or ()
    fields = schema.get("properties") or {}
    lines = [
        line
        for name, field in fields.items()
        for line in _field(name if name in required else f"{name}?", field, indent)
    ]
    return "\n".join([*_comment(schema.get("description"), indent), "{", *lines, f"{indent}}}"])


def _field(name: str, field: Any, indent: str) -> Iterator[str]:
    """The lines of one property."""
    field = field if isinstance(field, Mapping) else {}
    said = field.get("description")
    if isinstance(title := field.get("title"), str):
        yield from (f"{indent}// {title}", f"{indent}//")
    variants = field.get("oneOf")
    if "oneOf" not in field:
        yield from _comment(said, indent)
    if isinstance(examples := field.get("examples"), list) and examples:
        yield f"{indent}// Examples:"
        yield from (f'{indent}// - "{each}"' for each in examples if isinstance(each, str))
    if not isinstance(variants, list):
        default = f" // {shown}" if (shown := _default(field)) and "oneOf" not in field else ""
        yield f"{indent}{name}: {_nullable(field, _type(field, f'{indent}    '))},{default}"
        return
    is_above = isinstance(said, str) and not (variants and _said_of(variants[0]) == said)
    if is_above:
        yield from _comment(said, indent)
    if shown := _default(field):
        yield f"{indent}// {shown}"
    yield f"{indent}{name}:"
    for number, each in enumerate(variants):
        hidden = _said_of(each) if number == 0 and is_above else said
        yield f"{indent} | {_variant(each, indent, hidden)}"
    yield f"{indent},"


def _variant(schema: Any, indent: str, hidden: Any) -> str:
    """One type of several, with its comment behind it; `hidden` is a description that is left out."""
    said = _said_of(schema)
    shown = [*([said] if isinstance(said, str) and said != hidden else []), _default(schema)]
    comment = " ".join(filter(None, shown))
    return _nullable(schema, _type(schema, f"{indent}   ")) + (f" // {comment}" if comment else "")


def _said_of(schema: Any) -> Any:
    return schema.get("description") if isinstance(schema, Mapping) else None


def _comment(said: object, indent: str) -> list[str]:
    return [f"{indent}// {said}"] if isinstance(said, str) else []


def _nullable(schema: Any, shown: str) -> str:
    is_null = isinstance(schema, Mapping) and schema.get("nullable") is True
    return f"{shown} | null" if is_null and "null" not in shown else shown


def _default(schema: Any) -> str:
    """What a schema's default is shown as; "" without one."""
    if not isinstance(schema, Mapping) or "default" not in schema:
        return ""
    value = schema["default"]
    if isinstance(value, str):
        return f"default: {value}" if schema.get("enum") else f'default: "{value}"'
    return f"default: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}"
