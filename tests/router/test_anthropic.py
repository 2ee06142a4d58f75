"""Bodies of Anthropic's schema: the router reads the chat that vLLM makes of them."""

import json
from random import Random
from typing import Any

import pytest
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

from hotspan.router.anthropic import merged, messages_of, options_of, tools_of
from hotspan.router.prompt import MAX_NODES, TooMuchError, prompt_of
from hotspan.router.template import ChatTemplate
from hotspan.router.text import Prompts

Json = dict[str, Any]

HEADER = "x-anthropic-billing-header: cc_version=2.1.8; cch={};"
"""The first text of Claude Code's system prompt, with a hash that changes with each request."""

SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
ANYWHERE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def of_engine(body: Json, *, merges: bool = False) -> tuple[list[Json], list[Json]]:
    """The messages and tools that vLLM makes of a body."""
    asked = AnthropicMessagesRequest.model_validate(body)
    made = AnthropicServingMessages.to_chat_completion_request(asked, merge_inline_system=merges)
    shown: Any = json.loads(made.model_dump_json(exclude_none=True))
    return shown["messages"], shown.get("tools") or []


def known(messages: list[Any]) -> list[Json]:
    """Messages without what the router does not read: the bytes of images."""
    found: list[Json] = json.loads(json.dumps(messages))
    for message in found:
        for part in message["content"] if isinstance(message.get("content"), list) else ():
            part.pop("image_url", None)
    return found


def read(body: Json) -> list[Json]:
    """The messages that the router makes of a body."""
    found: Any = messages_of(body)
    return list(found)


def drawn(rng: Random) -> Json:
    """A conversation of an agent, with all kinds of blocks."""
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    blocks: dict[str, list[Json]] = {
        "user": [
            {"type": "text", "text": "what is there?"},
            {"type": "text", "text": ""},
            image,
            {"type": "tool_result", "tool_use_id": "t1", "content": "12 files"},
            {"type": "tool_result", "tool_use_id": "t1"},
            {
                "type": "tool_result",
                "tool_use_id": "t2",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, image],
            },
            {"type": "tool_result", "tool_use_id": "t3", "content": [{"type": "tool_reference", "tool_name": "ls"}]},
        ],
        "assistant": [
            {"type": "text", "text": "I look."},
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "tool_use", "id": "t1", "name": "ls", "input": {"path": "/", "n": [1, {"a": None}]}},
            {"type": "tool_use", "id": "t2", "name": "pwd", "input": {}},
        ],
        "system": [
            {"type": "text", "text": "remember"},
            {"type": "text", "text": HEADER.format(rng.random())},
        ],
    }
    system: Any = [
        {"type": "text", "text": HEADER.format(rng.random())},
        {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Be brief."},
    ]
    body: Json = {"model": "m", "max_tokens": 8, "messages": []}
    if (how := rng.randrange(4)) < 3:
        body["system"] = ("plain", HEADER.format(1), system)[how]
    for role in rng.choices(("user", "assistant", "system"), weights=(4, 4, 1), k=rng.randint(1, 6)):
        some = rng.sample(blocks[role], rng.randint(1, len(blocks[role])))
        body["messages"].append({"role": role, "content": some if rng.random() < 0.8 else f"plain {role}"})
    return body


def test_the_chat_is_that_of_vllm() -> None:
    """Of 300 conversations with all kinds of blocks: the same messages, in the same order."""
    seen = set[str]()
    for seed in range(300):
        body = drawn(Random(seed))
        messages, _ = of_engine(body)
        assert known(messages_of(body)) == known(messages), body
        seen |= {message["role"] for message in messages}
    assert seen == {"system", "user", "assistant", "tool"}


def test_system_prompts_in_between_are_joined_as_vllm_does() -> None:
    """For a template that takes one in front alone; a template that takes them anywhere gets them where they are."""
    joined = 0
    for seed in range(300):
        body = drawn(Random(seed))
        if "system" in {message["role"] for message in body["messages"]}:
            joined += 1
            assert known(merged(read(body))) == known(of_engine(body, merges=True)[0]), body
    assert joined > 50
    text = "long " * 300
    body = {"messages": [{"role": "user", "content": text}, {"role": "system", "content": "now"}]}
    first, anywhere = (Prompts(template=ChatTemplate(each, {})) for each in (SYSTEM_FIRST, ANYWHERE))
    for prompts, rendered in ((first, f"[system]now[user]{text}"), (anywhere, f"[user]{text}[system]now")):
        plain = Prompts().ask("/v1/completions", {}, {"prompt": rendered})
        assert prompts.ask("/v1/messages", {}, body).keys == plain.keys != []


def test_tools_are_those_of_vllm() -> None:
    """With the type of a schema that has none."""
    tools: list[Json] = [
        {"name": "ls", "description": "lists", "input_schema": {"type": "object", "properties": {}}},
        {"name": "pwd", "input_schema": {"properties": {"a": {"type": "string"}}}, "strict": True},
    ]
    body = {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": "x"}], "tools": tools}
    shown = [
        {**tool, "function": {name: value for name, value in tool["function"].items() if value is not None}}
        for tool in tools_of(tools)
    ]
    assert shown == of_engine(body)[1]


def test_what_changes_with_each_request_changes_no_key() -> None:
    """Two turns of Claude Code begin with the same keys, whatever the hash in its first line."""
    text = "rule " * 300
    turns = [
        {
            "system": [{"type": "text", "text": HEADER.format(n)}, {"type": "text", "text": text}],
            "messages": [{"role": "user", "content": "x"}],
        }
        for n in range(2)
    ]
    prompts = Prompts(template=ChatTemplate(ANYWHERE, {}))
    first, second = (prompts.ask("/v1/messages", {}, turn).keys for turn in turns)
    assert first == second != []


@pytest.mark.parametrize(
    ("body", "effort"),
    [
        ({"thinking": {"type": "disabled"}}, "none"),
        ({"output_config": {"effort": "low"}}, "low"),
        ({"thinking": {"type": "adaptive"}}, None),
        ({"output_config": {"effort": 3}, "thinking": "no"}, None),
    ],
)
def test_effort_is_what_the_template_gets(body: Json, effort: str | None) -> None:
    """As `reasoning_effort`, where the body has it."""
    assert options_of(body).get("reasoning_effort") == effort


def test_odd_bodies_are_bounded_and_raise_nothing_else() -> None:
    """What is no block, no message or no list is passed over, as is what has too many of them."""
    odd: Any
    for odd in (None, 1, "x", [1], [None], [{}], [{"role": 3, "content": 4}], [{"role": "user", "content": [1, {}]}]):
        prompt_of("/v1/messages", {"messages": odd, "system": odd, "tools": odd})
    with pytest.raises(TooMuchError):
        prompt_of("/v1/messages", {"messages": [{"role": "user", "content": [{}] * MAX_NODES}]})
