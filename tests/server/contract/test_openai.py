"""OpenAI's own client against a real server: chats, streams, tools, structured output, adapters, errors."""

import json
from typing import Any

import openai
import pytest

from hotspan.bench.config import BenchConfig
from hotspan.bench.runner import run_rounds
from hotspan.bench.workloads.long_doc_qa import LongDocQaOptions

from .rig import Container

pytestmark = pytest.mark.engine

MESSAGES: Any = [{"role": "user", "content": "Where does the river begin?"}]
PLACE = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "is_far": {"type": "boolean"}},
    "required": ["city", "is_far"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "find_place", "parameters": PLACE, "strict": True}}


def is_place(text: str) -> bool:
    found = json.loads(text)
    return found.keys() == {"city", "is_far"} and found["city"] in ("Oslo", "Rome") and found["is_far"] in (True, False)


def test_a_stream_is_real_sse(container: Container) -> None:
    """Events with `data:`, [DONE] at the end, usage before it; the deltas add up to the whole answer."""
    asked: Any = {"model": "lmi", "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    whole = container.openai.chat.completions.create(**asked).choices[0].message.content
    stream = container.openai.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole
    assert not chunks[-1].choices and chunks[-1].usage and chunks[-1].usage.completion_tokens == 12
    reply = container.http.post("/v1/chat/completions", json=asked | {"stream": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = reply.text.split("\n\n")
    assert events.pop() == "" and events.pop() == "data: [DONE]"
    assert all(json.loads(event.removeprefix("data: "))["object"] == "chat.completion.chunk" for event in events)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_tool_that_the_model_chooses(container: Container, is_stream: bool) -> None:
    """tool_choice=auto: a call as the model's parser (hermes) knows it becomes a call, and is no content.

    The model has nothing to say of its own: structured output has it write one.
    """
    call = '<tool_call>\n{"name": "find_place", "arguments": {"city": "Oslo", "is_far": true}}\n</tool_call>'
    tool: Any = {"type": "function", "function": {"name": "find_place", "parameters": PLACE}}
    asked: Any = {"model": "lmi", "messages": MESSAGES, "max_tokens": 200, "tools": [tool], "tool_choice": "auto"}
    asked["extra_body"] = {"structured_outputs": {"choice": [call]}}
    if is_stream:
        chunks = [
            chunk.choices[0]
            for chunk in container.openai.chat.completions.create(**asked, stream=True)
            if chunk.choices
        ]
        calls = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
        name, arguments = (
            "".join(getattr(call.function, part) or "" for call in calls) for part in ("name", "arguments")
        )
        content, reason = "".join(chunk.delta.content or "" for chunk in chunks), chunks[-1].finish_reason
    else:
        (choice,) = container.openai.chat.completions.create(**asked).choices
        (made,) = choice.message.tool_calls or ()
        name, arguments = made.function.name, made.function.arguments
        content, reason = choice.message.content or "", choice.finish_reason
    assert (name, json.loads(arguments)) == ("find_place", {"city": "Oslo", "is_far": True})
    assert not content.strip() and reason == "tool_calls"


def test_structured_output(container: Container) -> None:
    """response_format with a JSON schema, and the engine's own choice and regex, hold for every sampled text."""
    asked: Any = {"model": "lmi", "messages": MESSAGES, "max_tokens": 60, "temperature": 1.5}
    schema: Any = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE, "strict": True}}
    answer = container.openai.chat.completions.create(**asked, response_format=schema)
    assert is_place(answer.choices[0].message.content or "")
    for wanted, fits in (({"choice": ["yes", "no"]}, ("yes", "no")), ({"regex": "(12|34)56"}, ("1256", "3456"))):
        answer = container.openai.chat.completions.create(**asked, extra_body={"structured_outputs": wanted})
        assert answer.choices[0].message.content in fits
    reply = container.invoke({"inputs": "Say", "parameters": {"response_format": schema, "max_new_tokens": 60}})
    assert is_place(reply.json()["generated_text"])


def test_the_benchmarks_check(container: Container) -> None:
    """`bench engine --check`: answers that come from a cache are those of the same texts under a salt of their own."""
    options = LongDocQaOptions(document_length=400, num_documents=2, num_inflight_requests=1, max_output_length=6)
    config = BenchConfig(options=options, engine_url=container.server.url, model="lmi", check=3, ignore_eos=True)
    check = run_rounds(config).check
    assert check is not None and check.is_passed and (check.asked, check.hits) == (3, 3), str(check)


@pytest.mark.parametrize("is_stream", [False, True])
def test_usage_adds_up_what_was_cached_of_all_prompts(container: Container, is_stream: bool) -> None:
    """Of three prompts, one of them new, a completion's cached tokens are those of all; of the next one, its own."""
    options: Any = {"stream": True, "stream_options": {"include_usage": True}} if is_stream else {}

    def cached(prompt: Any) -> int:
        asked: Any = {"model": "lmi", "prompt": prompt, "max_tokens": 2, "extra_body": {"cache_salt": f"{is_stream}"}}
        answer = container.openai.completions.create(**asked, **options)
        usage = list(answer)[-1].usage if is_stream else answer.usage
        assert usage is not None and usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens or 0

    long, other, new = ([first + n % 50 for n in range(tokens)] for first, tokens in ((3, 700), (4, 420), (5, 600)))
    assert [cached(long), cached(other)] == [0, 0]
    alone = [cached(long), cached(other)]
    assert all(alone) and alone[0] > alone[1]
    assert cached([long, other, new]) == sum(alone)
    assert cached(other) == alone[1]


def test_errors_are_openais(container: Container) -> None:
    """The client raises what it raises for OpenAI, with the message."""
    asked: Any = {"messages": MESSAGES, "max_tokens": 4}
    with pytest.raises(openai.NotFoundError, match="no adapter 'gpt'"):
        container.openai.chat.completions.create(model="gpt", **asked)
    with pytest.raises(openai.BadRequestError, match="2048"):
        container.openai.chat.completions.create(model="lmi", messages=MESSAGES, max_tokens=100_000)
    with pytest.raises(openai.BadRequestError):
        container.openai.chat.completions.create(
            model="lmi", **asked, extra_body={"kv_transfer_params": {"tenant": "x"}}
        )
