"""System prompts in requests of each schema: lines are dropped or moved in them, and the one that changed is found."""

from types import SimpleNamespace
from typing import Any

from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

from hotspan.core.system_lines import SystemLines
from hotspan.engine import system_lines
from hotspan.engine.system_lines import ChangedLines, rewrite

LINES = {"drop": ["id: "], "move": ["Today"]}
PROMPT, LEFT = "id: 7\nYou are.\nToday is Monday.\nBe brief.", "You are.\nBe brief.\nToday is Monday."
USER = {"role": "user", "content": "id: 8\nToday?"}


def test_a_chat_is_rewritten() -> None:
    """In system and developer messages, texts or lists of parts; what users and tools say stays."""
    parts = [{"type": "text", "text": PROMPT}, {"type": "text", "text": "More."}]
    messages: list[Any] = [{"role": "system", "content": PROMPT}, {"role": "developer", "content": parts}, USER]
    request = ChatCompletionRequest.model_validate({"model": "m", "messages": messages})
    rewrite(request, SystemLines(**LINES))
    first, second, user = request.model_dump()["messages"]
    assert first["content"] == LEFT and user["content"] == USER["content"]
    assert [part["text"] for part in second["content"]] == ["You are.\nBe brief.", "More.\nToday is Monday."]


def test_other_schemas_are_rewritten() -> None:
    """Anthropic's system prompt, as a text or as blocks, and a response's instructions."""
    for system in (PROMPT, [{"type": "text", "text": PROMPT}]):
        request = AnthropicMessagesRequest(model="m", max_tokens=3, system=system, messages=[USER])
        rewrite(request, SystemLines(**LINES))
        shown: Any = request.system
        assert (shown if isinstance(shown, str) else shown[0].text) == LEFT
    response = ResponsesRequest(model="m", instructions=PROMPT, input="id: 8")
    rewrite(response, SystemLines(**LINES))
    assert response.instructions == LEFT and response.input == "id: 8"
    rewrite(SimpleNamespace(prompt=PROMPT), SystemLines(**LINES))


def chat(system: str) -> Any:
    return SimpleNamespace(messages=[{"role": "system", "content": system}, USER])


def test_the_line_that_a_session_changed_is_found() -> None:
    """From its second request on, by its own last one; a line more or less counts where it begins or would."""
    changed = ChangedLines()
    assert changed.note("t", "s", chat("a\nb\nc")) == 0
    assert changed.note("t", "s", chat("a\nb\nc")) == 0
    assert changed.note("t", "s", chat("a\nx\nc")) == 2
    assert changed.note("t", "s", chat("a\nx\nc\nd")) == 4
    assert changed.note("t", "s", chat("a")) == 2
    assert changed.note("t", "other", chat("z")) == changed.note("u", "s", chat("z")) == 0


def test_what_is_kept_to_find_it_is_bounded(monkeypatch: Any) -> None:
    """So many sessions, the oldest forgotten first, and so many lines of each; no text."""
    monkeypatch.setattr(system_lines, "MAX_SESSIONS", 3)
    monkeypatch.setattr(system_lines, "MAX_LINES", 4)
    changed = ChangedLines()
    for n in range(10):
        changed.note("t", f"s{n}", chat("line\n" * 9))
    assert [session for _, session in changed._seen] == ["s7", "s8", "s9"]
    assert all(each.typecode == "q" and len(each) == 4 for each in changed._seen.values())
