"""Where the parts of a chat are in its prompt, with a template and a tokenizer of one token a letter."""

from collections.abc import Mapping
from typing import Any

import pytest
from pydantic import BaseModel

from hotspan.engine.places import form_of, places_of


class Asked(BaseModel):
    """A chat request."""

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


async def tokens(body: Mapping[str, Any]) -> list[int]:
    """The tools stand behind the first message's text, as in many templates; a chat without a question is refused."""
    if all(each["role"] == "system" for each in body["messages"]):
        raise ValueError("no question")
    text, tools = "", "".join(each["name"] for each in body.get("tools", ()))
    for each in body["messages"]:
        is_first, tools_after = not text, f"[{tools}]" if tools else ""
        text += f"<{each['content']}{tools_after if is_first else ''}>"
    return list((text + ("?" if body.get("add_generation_prompt", True) else "")).encode())


def chat(*contents: str) -> list[dict[str, str]]:
    roles = ["system", *("user", "assistant") * len(contents)]
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]


async def test_messages_end_where_the_next_begins() -> None:
    """Each message is found; what a template refuses to render alone belongs to the message behind it."""
    asked = Asked(messages=chat("rules", "one", "two", "three"))
    whole = await tokens(asked.model_dump(exclude_none=True))
    assert bytes(whole) == b"<rules><one><two><three>?"
    assert await places_of(asked, tokens) == (
        *(("messages 1 to 2", 12), ("message 3 (assistant)", 17)),
        ("message 4 (user)", len(whole)),
    )


async def test_tools_are_found_within_the_system_prompt() -> None:
    """The tools are what is not there without them; the text before them keeps the name of its message."""
    asked = Asked(messages=[{"role": "user", "content": "one"}, *chat("x", "y")[1:]], tools=[{"name": "look_up"}])
    assert bytes(await tokens(asked.model_dump(exclude_none=True))) == b"<one[look_up]><y>?"
    assert await places_of(asked, tokens) == (
        *(("message 1 (user)", 4), ("tools", 13), ("message 1 (user)", 14)),
        ("message 2 (user)", 18),
    )


async def test_the_middle_of_a_long_chat_is_one_part() -> None:
    """However long a chat is, it is rendered at most ten times."""
    asked, calls = Asked(messages=chat(*("text" for _ in range(101)))), list[int]()

    async def counted(body: Mapping[str, Any]) -> list[int]:
        calls.append(len(body["messages"]))
        return await tokens(body)

    places = await places_of(asked, counted)
    assert "messages 5 to 98" in [name for name, _ in places] and len(calls) <= 10
    assert [end for _, end in places] == sorted(end for _, end in places)


@pytest.mark.parametrize("asked", [Asked(), Asked(messages=[]), Asked(messages=chat("x" * 500_000, "y"))])
async def test_what_is_no_chat_or_too_long_has_no_places(asked: Asked) -> None:
    """Nothing is rendered of it."""

    async def never(body: Mapping[str, Any]) -> list[int]:
        raise AssertionError("rendered")

    assert await places_of(asked, never) == ()


def test_options_of_the_template_are_told_apart() -> None:
    """0 for the model's own; the same options are the same, others are others."""
    thinks, quick = ({"enable_thinking": on} for on in (True, False))
    assert form_of(Asked()) == 0 == form_of(object())
    forms = [form_of(Asked(chat_template_kwargs=each)) for each in (thinks, dict(thinks), quick)]
    assert forms[0] == forms[1] != forms[2] and 0 not in forms
