"""The chat in a body of Anthropic's schema, as vLLM makes it of one before its template is rendered.

What vLLM leaves out is left out here: Claude Code's first line, which changes with each request, and what it does not
know. vLLM is followed in `entrypoints/anthropic/serving.py`; tests compare this with it.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

Json = dict[str, Any]

_CHANGES: Final = "x-anthropic-billing-header"
"""Begins a text that Claude Code puts in front of its system prompt, with a hash of the request."""

_EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def messages_of(body: Mapping[str, Any]) -> list[object]:
    """The messages of the chat, up to the first that is none; of a conversation with system prompts in between, too."""
    found: list[object] = []
    system = _system(body.get("system"), is_first=True)
    if system:
        found.append({"role": "system", "content": system})
    for message in _listed(body.get("messages")):
        if not isinstance(message, dict):
            found.append(None)
            break
        found += _of_message(message)
    return found


def merged(messages: Sequence[Json]) -> list[Json]:
    """The same chat for templates that take a system prompt in front alone: what is in between is joined to it."""
    texts = [each.get("content") for each in messages if each.get("role") == "system"]
    whole = "".join(text for text in texts if isinstance(text, str))
    others = [each for each in messages if each.get("role") != "system"]
    return [{"role": "system", "content": whole}, *others] if whole else others


def tools_of(tools: Sequence[object]) -> list[Json]:
    """Tools as functions."""
    return [_tool(each) for each in tools]


def options_of(body: Mapping[str, Any]) -> Json:
    """What else of the body changes the prompt."""
    options: Json = {}
    thinking, output = body.get("thinking"), body.get("output_config")
    effort = output.get("effort") if isinstance(output, dict) else None
    if isinstance(thinking, dict) and thinking.get("type") == "disabled":
        options["reasoning_effort"] = "none"
    elif effort in _EFFORTS:
        options["reasoning_effort"] = effort
    return options


# -- inside ------------------------------------------------------------------------------------------------------------


def _system(content: object, *, is_first: bool) -> str:
    """The text of a system prompt. is_first: it is the body's own, of which vLLM keeps a plain text as it is."""
    if isinstance(content, str):
        return "" if not is_first and content.startswith(_CHANGES) else content
    return "".join(text for each in _listed(content) if (text := _text(each)) and not text.startswith(_CHANGES))


def _of_message(message: Json) -> list[Json]:
    """A message, behind what its tools' results are."""
    role, content = message.get("role"), message.get("content")
    if role == "system":
        text = _system(content, is_first=False)
        return [{"role": "system", "content": text}] if text else []
    shown: Json = {"role": role}
    found: list[Json] = []
    if isinstance(content, list):
        _add_blocks(content, shown, found)
    else:
        shown["content"] = content
    return [*found, shown] if role != "user" or "content" in shown else found


def _add_blocks(blocks: Sequence[object], shown: Json, found: list[Json]) -> None:
    """Mutates: `shown`, the message of these blocks, and `found`, what comes before it."""
    parts: list[Json] = []
    calls: list[Json] = []
    thoughts: list[str] = []
    for block in blocks:
        if not isinstance(block, dict):
            continue
        kind = block.get("type")
        if kind == "text" and block.get("text"):
            parts.append({"type": "text", "text": block["text"]})
        elif kind == "image" and block.get("source"):
            parts.append({"type": "image_url"})
        elif kind == "thinking" and isinstance(block.get("thinking"), str):
            thoughts.append(block["thinking"])
        elif kind == "tool_use":
            function = {"name": block.get("name") or "", "arguments": json.dumps(block.get("input") or {})}
            calls.append({"id": block.get("id") or "", "type": "function", "function": function})
        elif kind == "tool_result" and shown["role"] == "user":
            found += _of_result(block)
        elif kind == "tool_result":
            result = block.get("content")
            parts.append({"type": "text", "text": f"Tool result: {result or ''}"})
    if thoughts:
        shown["reasoning"] = "".join(thoughts)
    if calls:
        shown["tool_calls"] = calls
    if parts:
        shown["content"] = parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _of_result(block: Json) -> list[Json]:
    """The messages of a tool's result: its text, its images, and tools that it names."""
    call, content = block.get("tool_use_id") or "", block.get("content")
    text, images, named = content if isinstance(content, str) else "", list[Json](), list[Json]()
    if isinstance(content, list):
        items = [each for each in content if isinstance(each, dict)]
        text = "\n".join(str(each.get("text", "")) for each in items if each.get("type") == "text")
        images = [{"type": "image_url"} for each in items if each.get("type") == "image"]
        names = [each.get("tool_name") or each.get("name") for each in items if each.get("type") == "tool_reference"]
        named = [{"type": "tool_reference", "name": name} for name in names if name]
    found: list[Json] = [{"role": "tool", "tool_call_id": call, "content": text}]
    if images:
        found.append({"role": "user", "content": images})
    if named:
        found.append({"role": "tool", "tool_call_id": call, "content": named})
    return found


def _tool(tool: object) -> Json:
    if not isinstance(tool, dict):
        return {}
    schema = tool.get("input_schema")
    if isinstance(schema, dict) and "type" not in schema:
        schema = {**schema, "type": "object"}
    function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": schema}
    function |= {name: tool[name] for name in ("strict", "defer_loading") if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _text(block: object) -> str:
    text = block.get("text") if isinstance(block, dict) and block.get("type", "text") == "text" else None
    return text if isinstance(text, str) else ""


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
