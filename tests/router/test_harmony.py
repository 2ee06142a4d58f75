"""Harmony's prompts, byte for byte as vLLM writes them; the engine's own are compared in test_families.py."""

import json
from pathlib import Path
from typing import Any

import pytest

from hotspan.router.harmony import Harmony, is_harmony
from hotspan.testing.clock import SimulatedClock

USER = {"role": "user", "content": "Hi"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "default": "Paris"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "look", "description": "Look\nup.", "parameters": PARAMETERS}}


def rendered(*messages: dict[str, Any], **body: Any) -> str:
    return Harmony(SimulatedClock()).render(messages, body) or ""


def test_instructions_and_tools_are_the_developers() -> None:
    """The first system message and the tools make one message, after the one of the system."""
    text = rendered({"role": "system", "content": "Be brief."}, USER, tools=[TOOL], reasoning_effort="low")
    assert "\n\nReasoning: low\n\n# Valid channels: " in text
    assert "Calls to these tools must go to the commentary channel: 'functions'.<|end|><|start|>developer" in text
    assert text.endswith(
        "<|message|># Instructions\n\nBe brief.\n\n# Tools\n\n## functions\n\nnamespace functions {\n\n"
        "// Look\n// up.\n"
        'type look = (_: {\ncity: string, // default: "Paris"\n}) => any;\n\n} // namespace functions<|end|>'
        "<|start|>user<|message|>Hi<|end|><|start|>assistant"
    )


def test_calls_thoughts_and_answers_have_channels() -> None:
    """What was thought before the last answer is dropped; calls and results name each other."""
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    text = rendered(
        USER,
        {"role": "assistant", "reasoning": "old", "content": "Hello."},
        USER,
        {"role": "assistant", "reasoning": "new", "content": None, "tool_calls": [call]},
        {
            "role": "tool",
            "tool_call_id": "1",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        },
    )
    assert text.endswith(
        "<|start|>assistant<|channel|>final<|message|>Hello.<|end|><|start|>user<|message|>Hi<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>new<|end|>"
        "<|start|>assistant to=functions.look<|channel|>commentary json<|message|>{}<|call|>"
        "<|start|>functions.look<|channel|>commentary to=assistant<|message|>ab<|end|><|start|>assistant"
    )
    assert "old" not in text


def test_an_effort_that_the_engine_refuses_has_no_prompt() -> None:
    """There is nothing to compare then."""
    assert Harmony(SimulatedClock()).render([USER], {"reasoning_effort": "none"}) is None


@pytest.mark.parametrize(("config", "found"), [({"model_type": "gpt_oss"}, True), ({}, False), ([], False)])
def test_it_is_taken_by_the_models_type(tmp_path: Path, config: object, found: bool) -> None:
    """gpt-oss alone, whatever template its directory has; a directory without a configuration is none."""
    assert not is_harmony(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert is_harmony(tmp_path) is found
