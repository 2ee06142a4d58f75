"""Counts of drafted tokens in `usage`, put there between the engine, vLLM's handlers and the client."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.entrypoints.anthropic.protocol import AnthropicMessagesResponse
from vllm.entrypoints.openai.completion.protocol import CompletionResponse
from vllm.entrypoints.openai.responses.protocol import ResponseUsage
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

from hotspan.engine.drafts import report_drafts

USAGE = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12, "prompt_tokens_details": {"cached_tokens": 4}}
ANSWER = {"id": "1", "created": 1, "model": "m", "choices": [], "usage": USAGE}
MESSAGE_USAGE = {"input_tokens": 3, "cache_read_input_tokens": 4, "output_tokens": 5}
RESPONSE_USAGE = {
    "input_tokens": 7,
    "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
    "output_tokens": 5,
    "output_tokens_details": {"reasoning_tokens": 2},
    "total_tokens": 12,
}
TWO_SEQUENCES = [(0, None), (1, ([0, 1, 1], 4)), (0, ([1, 0, 2], 6))]
"""The choice of each output, and at its end its histogram of accepted tokens a step, and its drafted ones."""

REPORTED = {"accepted_prediction_tokens": 7, "rejected_prediction_tokens": 3}


class Engine:
    """An engine of which each request has the outputs `made`."""

    def __init__(self, made: list[Any]) -> None:
        self.made = made
        self.open = 0

    async def generate(self, name: str) -> AsyncGenerator[Any]:
        self.open += 1
        try:
            for index, counts in self.made:
                found = None if counts is None else RequestSpecDecodeMetrics(2, *counts)
                yield SimpleNamespace(
                    request_id=name, outputs=[SimpleNamespace(index=index, spec_decode_metrics=found)]
                )
        finally:
            self.open -= 1


def reporting(engine: Engine, handler: str, **methods: Callable[..., Awaitable[Any]]) -> Any:
    """A handler with these methods, as report_drafts leaves it."""
    serving = SimpleNamespace(**methods)
    report_drafts(SimpleNamespace(state=SimpleNamespace(**{handler: serving})), engine)  # type: ignore[arg-type]
    return serving


def whole(made: list[Any], handler: str, method: str, answer: Any, *, requests: int = 1) -> Any:
    """What the client gets of `answer`."""
    engine = Engine(made)

    async def create(asked: object) -> Any:
        for number in range(requests):
            async for _ in engine.generate(f"r-{number}"):
                pass
        return answer

    serving = reporting(engine, handler, **{method: create})
    return asyncio.run(getattr(serving, method)(None))


def completed(made: list[Any], requests: int = 1) -> Any:
    answer = CompletionResponse(**ANSWER)
    return whole(made, "openai_serving_completion", "create_completion", answer, requests=requests).model_dump()


def test_usage_of_an_answer() -> None:
    """The counts of all choices and prompts are added up; all else stays, also of an answer for which none drafted."""
    before = CompletionResponse(**ANSWER).model_dump()
    for requests in (1, 2):
        after = completed(TWO_SEQUENCES, requests)
        details = after["usage"].pop("completion_tokens_details")
        assert details == {name: requests * count for name, count in REPORTED.items()} | {"reasoning_tokens": 0}
        assert after["usage"].items() <= before["usage"].items()
        assert after | {"usage": None} == before | {"usage": None}
    assert completed([(0, None)]) == before


def test_a_repeated_output_counts_once() -> None:
    """An engine may give the outputs of all choices again with each that ends."""
    assert completed(TWO_SEQUENCES * 2) == completed(TWO_SEQUENCES)


def test_usage_of_a_message() -> None:
    """The Messages API's answer has them in its output's details, and otherwise what vLLM gave it."""
    content = [{"type": "text", "text": "yes"}]
    answer = AnthropicMessagesResponse(id="1", model="m", content=content, usage=MESSAGE_USAGE)
    before = answer.model_dump(exclude_none=True)
    found = whole(TWO_SEQUENCES, "anthropic_serving_messages", "create_messages", answer)
    assert isinstance(found, AnthropicMessagesResponse)
    changed = before["usage"] | {"output_tokens_details": REPORTED}
    assert found.model_dump(exclude_none=True) == before | {"usage": changed}


@pytest.mark.parametrize("way", ["whole", "stream", "background"])
def test_usage_of_a_response(way: str) -> None:
    """The Responses API's response has them however it is asked for; a stored one is that which was answered."""
    engine, stored = Engine(TWO_SEQUENCES), []

    async def full(asked: object, outputs: AsyncGenerator[Any]) -> Any:
        async for _ in outputs:
            pass
        stored.append(SimpleNamespace(usage=ResponseUsage.model_validate(RESPONSE_USAGE)))
        return stored[0]

    async def stream(outputs: AsyncGenerator[Any]) -> AsyncGenerator[Any]:
        async for _ in outputs:
            yield SimpleNamespace(type="response.output_text.delta")
        yield SimpleNamespace(type="response.completed", response=await serving.responses_full_generator(None, outputs))

    async def create(asked: object) -> Any:
        outputs = lazily()
        if way == "background":
            return SimpleNamespace(
                usage=None, task=asyncio.create_task(serving.responses_full_generator(None, outputs))
            )
        return stream(outputs) if way == "stream" else await serving.responses_full_generator(None, outputs)

    async def lazily() -> AsyncGenerator[Any]:
        async for output in engine.generate("r_0"):
            yield output

    async def asked() -> Any:
        answer = await asyncio.create_task(serving.create_responses(None))  # a task of its own, as in vLLM's routes
        if way == "background":
            assert answer.usage is None
            return await answer.task
        return [event async for event in answer][-1].response if way == "stream" else answer

    serving = reporting(engine, "openai_serving_responses", create_responses=create, responses_full_generator=full)
    found = asyncio.run(asked())
    assert found is stored[0]
    details = {"reasoning_tokens": 2, **REPORTED}
    after = found.usage.model_dump(exclude_unset=True)
    assert after.pop("output_tokens_details").items() >= details.items()
    assert after.items() >= {k: v for k, v in RESPONSE_USAGE.items() if not k.endswith("_details")}.items()


def event(body: Any, name: str | None = None) -> str:
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {json.dumps(body, separators=(',', ':'))}\n\n"


def streamed(
    handler: str, method: str, events: list[str], most: int | None = None, *, is_short: bool = False
) -> tuple[list[str], Engine]:
    """What the client gets of a stream, of which it reads so many events; and the engine when it is closed.

    is_short: the engine's first output is its last one.
    """
    engine = Engine(TWO_SEQUENCES)

    async def chunks() -> AsyncGenerator[str]:
        outputs = engine.generate("r")
        try:
            if not is_short:
                yield events[0]
            async for _ in outputs:
                pass
            for one in events if is_short else events[1:]:
                yield one
        finally:
            await outputs.aclose()

    async def create(asked: object) -> Any:
        return chunks()

    async def read() -> list[str]:
        stream = await getattr(serving, method)(None)
        found = [await anext(stream) for _ in range(most or len(events))]
        await stream.aclose()
        return found

    serving = reporting(engine, handler, **{method: create})
    return asyncio.run(read()), engine


def test_usage_of_a_stream() -> None:
    """Only events with usage change, once a sequence has ended, also where a text looks like one; the engine's request
    is closed with the stream."""
    early = event({"model": "m", "choices": [{"index": 0, "text": ""}], "usage": USAGE})
    text = event({"model": "m", "choices": [{"index": 0, "text": '"usage":{'}]})
    events = [early, text, event(ANSWER), "data: [DONE]\n\n"]
    found, engine = streamed("openai_serving_chat", "create_chat_completion", events)
    changed = event(ANSWER | {"usage": USAGE | {"completion_tokens_details": REPORTED}})
    assert found == [early, text, changed, events[3]]
    assert engine.open == 0
    _, engine = streamed("openai_serving_chat", "create_chat_completion", events, most=1)
    assert engine.open == 0


@pytest.mark.parametrize("is_short", [False, True])
def test_usage_of_a_streamed_message(is_short: bool) -> None:
    """An event that has a name keeps it; the counts are in the last usage, not in the first."""
    start = event(
        {"type": "message_start", "message": {"usage": MESSAGE_USAGE | {"output_tokens": 0}}}, "message_start"
    )
    last = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": MESSAGE_USAGE}
    stop = event({"type": "message_stop"}, "message_stop")
    events = [start, event(last, "message_delta"), stop]
    found, _ = streamed("anthropic_serving_messages", "create_messages", events, is_short=is_short)
    changed = last | {"usage": MESSAGE_USAGE | {"output_tokens_details": REPORTED}}
    assert found == [start, event(changed, "message_delta"), stop]


def test_a_refusal_of_the_engine_comes_at_once() -> None:
    """What `generate` raises before the first output, it raises before a stream begins."""

    def refuses(name: str) -> Any:
        raise ValueError(name)

    async def create(asked: object) -> Any:
        return engine.generate("r")

    engine: Any = SimpleNamespace(generate=refuses)
    serving = reporting(engine, "openai_serving_chat", create_chat_completion=create)
    with pytest.raises(ValueError, match="r"):
        asyncio.run(serving.create_chat_completion(None))
