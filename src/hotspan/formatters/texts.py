"""Where a payload's and an answer's text stands, in each schema that the server speaks."""

from collections.abc import Callable
from typing import Any

_TEXT_FIELDS = ("prompt", "inputs")  # the server looks for them in this order too
FIELDS = (*_TEXT_FIELDS, "messages")


def with_text(payload: dict[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """A copy of `payload` whose text went through `change`.

    Its text is that of `prompt` or `inputs`, each one if there are several, or else the last user message.
    A payload without text comes back as it is.
    Raises: ValueError if `prompt` or `inputs` holds something else, such as token ids.
    """
    for field in _TEXT_FIELDS:
        if field in payload:
            return payload | {field: _changed(field, payload[field], change)}
    messages = payload.get("messages")
    if not isinstance(messages, list):
        return payload
    for place in reversed(range(len(messages))):
        message = messages[place]
        if isinstance(message, dict) and message.get("role") == "user" and "content" in message:
            content = _changed_content(message["content"], change)
            return payload | {"messages": [*messages[:place], message | {"content": content}, *messages[place + 1 :]]}
    return payload


def _changed(field: str, value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list) and all(isinstance(text, str) for text in value):
        return [change(text) for text in value]
    raise ValueError(f"{field} is neither a text nor a list of texts")


def _changed_content(content: Any, change: Callable[[str], str]) -> Any:
    """A message's content: a text, or parts of which the first text is the one."""
    if isinstance(content, str):
        return change(content)
    if isinstance(content, list):
        for place, part in enumerate(content):
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                return [*content[:place], part | {"text": change(part["text"])}, *content[place + 1 :]]
    return content


def answer_text(answer: Any) -> str:
    """The text that an answer or a streamed chunk brings; "" if it brings none."""
    if isinstance(answer, str):
        return answer
    if not isinstance(answer, dict):
        return ""
    choices = answer.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    places = (
        (answer.get("token"), "text"),  # LMI, streamed: the last chunk has the whole text in generated_text besides
        (answer, "generated_text"),
        (choice, "text"),
        (choice.get("delta"), "content"),
        (choice.get("message"), "content"),
    )
    for holder, field in places:
        if isinstance(holder, dict) and isinstance(holder.get(field), str):
            return str(holder[field])
    return ""
