"""Chats as clients send them, drawn from a seed: tools, thoughts, lists of content, many scripts, odd white space."""

import json
from collections.abc import Iterator
from random import Random
from typing import Any

Json = dict[str, Any]

TEXTS = (
    "What does the contract say about damages, and in which section?",
    "def f(x):\n    return {'a': x, \"b\": [1, 2]}\n\n\n# 12345.678",
    "  two spaces in front, a tab\tand the end  \n",
    "\u5951\u7d04\u66f8\u306e\u7b2c\u4e09\u6761\u3092\u8aac\u660e\u3057\u3066\u304f\u3060\u3055\u3044\u3002\u30c6\u30b9\u30c8\uff01",
    "\u0645\u0631\u062d\u0628\u0627\u064b\u060c \u0643\u064a\u0641 \u062d\u0627\u0644\u0643\u0645\u061f",
    "\u05e9\u05b8\u05dc\u05d5\u05b9\u05dd \u05e2\u05d5\u05b9\u05dc\u05b8\u05dd",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0926\u0941\u0928\u093f\u092f\u093e",
    "cafe\u0301 caf\u00e9 \ufb01ne \u212bngstr\u00f6m \u00bd \u1e9b\u0323",
    "\U0001f389\U0001f468\u200d\U0001f469\u200d\U0001f467 \u2764\ufe0f \U0001f1eb\U0001f1f7",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440! \u0395\u03bb\u03bb\u03b7\u03bd\u03b9\u03ba\u03ac",
    "\uac00\ub098\ub2e4 \u1100\u1161 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35",
    "A <b>tag</b> & 'quotes' \"double\" {{ braces }} {% percent %} \\ back",
    "line\r\nline\u00a0no-break\u2003em\u200bzero\u3000wide",
    "",
    "word " * 120,
)
PARAMETERS: tuple[Json | None, ...] = (
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "The city, e.g. \u6771\u4eac", "default": "Paris"},
            "days": {"type": "integer", "default": 3},
            "unit": {"type": "string", "enum": ["c", "f"], "default": "c"},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["city"],
    },
    {"type": "object", "properties": {}},
    {
        "type": "object",
        "description": "what is looked for",
        "properties": {
            "where": {
                "type": "object",
                "description": "a place",
                "properties": {"lat": {"type": ["number", "null"]}, "on": {"type": "boolean", "default": True}},
                "required": ["lat"],
            },
            "either": {
                "description": "one of two",
                "oneOf": [{"type": "string", "description": "text"}, {"type": "number", "default": 2}],
            },
            "same": {"oneOf": [{"type": "integer", "description": "a number"}], "description": "a number"},
            "plain": {"oneOf": [{"type": "string", "enum": ["a", "b"], "default": "a"}, {"type": "object"}]},
            "more": {"type": "array", "items": {"oneOf": [{"type": "string"}, {"type": "number", "description": "n"}]}},
            "any": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "name": {"type": "string", "title": "Name", "examples": ["Ada", "\u00c9mile"], "nullable": True},
            "list": {"type": "array", "default": [1, "b"]},
            "nothing": {},
        },
    },
    None,
)


def chats(seed: int) -> Iterator[Json]:
    """Bodies of chat completions, without end."""
    rng = Random(seed)
    while True:
        body: Json = {"model": "m", "messages": _messages(rng)}
        if rng.random() < 0.4:
            body["tools"] = [_tool(rng, number) for number in range(rng.randint(1, 3))]
        if rng.random() < 0.2:
            body["chat_template_kwargs"] = {"enable_thinking": rng.random() < 0.5}
        if rng.random() < 0.15:
            body["reasoning_effort"] = rng.choice(("low", "medium", "high"))
        if rng.random() < 0.1:
            body["add_generation_prompt"] = False
        yield json.loads(json.dumps(body))


def _text(rng: Random) -> str:
    return "\n\n".join(rng.choice(TEXTS) for _ in range(rng.randint(1, 3)))


def _content(rng: Random) -> Any:
    if rng.random() < 0.3:
        return [{"type": "text", "text": _text(rng)} for _ in range(rng.randint(1, 3))]
    return _text(rng)


def _messages(rng: Random) -> list[Json]:
    found: list[Json] = []
    if rng.random() < 0.6:
        found.append({"role": "system", "content": _content(rng)})
    for turn in range(rng.randint(0, 3)):
        found.append({"role": "user", "content": _content(rng)})
        if rng.random() < 0.35:
            call = {"id": f"call{turn:05}", "type": "function"}
            arguments = json.dumps({"city": rng.choice(TEXTS)[:20], "n": turn}, ensure_ascii=rng.random() < 0.5)
            function = {"name": f"tool_{turn}", "arguments": arguments}
            content = _text(rng) if rng.random() < 0.3 else None
            found.append({"role": "assistant", "content": content, "tool_calls": [{**call, "function": function}]})
            found.append({"role": "tool", "tool_call_id": call["id"], "content": _text(rng)})
        answer: Json = {"role": "assistant", "content": _text(rng)}
        if rng.random() < 0.3:
            answer["reasoning"] = _text(rng)
        found.append(answer)
    return [*found, {"role": "user", "content": _content(rng)}]


def _tool(rng: Random, number: int) -> Json:
    function: Json = {"name": f"tool_{number}"}
    if rng.random() < 0.8:
        function["description"] = rng.choice(("Looks something up.", "Two\nlines, \u00e9", ""))
    if (parameters := rng.choice(PARAMETERS)) is not None:
        function["parameters"] = parameters
    if rng.random() < 0.2:
        function["strict"] = True
    return {"type": "function", "function": function}
