"""Counts of drafted tokens in every answer's `usage`, by the names that OpenAI's API has for them.

vLLM 0.32 and later counts for each sequence. The counts of all sequences of a request (several choices, prompts, or
turns with tools) are added up where the engine's outputs pass, and put into the details of `usage`, in answers, in
streams, and in stored responses.
"""

import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from contextvars import ContextVar
from functools import wraps
from typing import Any

from fastapi import FastAPI
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesResponse, AnthropicUsage
from vllm.v1.engine.async_llm import AsyncLLM

from hotspan.engine.guard import CREATES

_MARK = '"usage":{'
"""Of an event with usage; generated text in JSON has its quotes escaped, so it never looks so."""

Counts = dict[tuple[str, int], tuple[int, int]]
"""Accepted and drafted tokens by sequence: the engine's request and the choice's index."""

_counts: ContextVar[Counts | None] = ContextVar("drafts", default=None)
"""Of the request that the current task works for."""


class _Usage(AnthropicUsage):
    output_tokens_details: dict[str, int]


class _Message(AnthropicMessagesResponse):
    """A message that keeps the details in its usage."""

    usage: _Usage | None = None


def report_drafts(app: FastAPI, client: AsyncLLM) -> None:
    """Put the counts into each answer's usage. Mutates: the client's `generate`, and the app's handlers."""
    client.generate = _counted(client.generate)
    for handler, method in CREATES.items():
        serving = getattr(app.state, handler, None)
        if serving is not None:
            setattr(serving, method, _reporting(getattr(serving, method)))
    responses: Any = getattr(app.state, "openai_serving_responses", None)
    if responses is not None:  # the ends of streams, and answers in the background, which are stored, are made there
        responses.responses_full_generator = _ending(responses.responses_full_generator)


def _counted(generate: Callable[..., AsyncGenerator[Any]]) -> Callable[..., AsyncGenerator[Any]]:
    @wraps(generate)
    def counted(*given: Any, **options: Any) -> AsyncGenerator[Any]:
        outputs, counts = generate(*given, **options), _counts.get()
        return outputs if counts is None else _count(outputs, counts)

    return counted


async def _count(outputs: AsyncGenerator[Any], counts: Counts) -> AsyncGenerator[Any]:
    async with aclosing(outputs):
        async for output in outputs:
            for one in output.outputs:
                if (found := getattr(one, "spec_decode_metrics", None)) is not None:
                    accepted = sum(accepted * steps for accepted, steps in enumerate(found.histogram))
                    counts[output.request_id, one.index] = (accepted, found.num_draft_tokens)
            yield output


def _reporting(create: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    @wraps(create)
    async def reporting(*given: Any, **options: Any) -> Any:
        counts = Counts()
        _counts.set(counts)
        answer = await create(*given, **options)
        return _stream(answer, counts) if isinstance(answer, AsyncGenerator) else _whole(answer, counts)

    return reporting


def _ending(end: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    @wraps(end)
    async def ending(*given: Any, **options: Any) -> Any:
        return _whole(await end(*given, **options), _counts.get() or {})

    return ending


def _whole(answer: Any, counts: Counts) -> Any:
    """An answer with the counts in its usage. Mutates: `answer`, which may be stored, unless it is a message."""
    usage = getattr(answer, "usage", None)
    if not counts or usage is None:
        return answer
    changed = _with_drafts(usage.model_dump(), counts)
    if isinstance(answer, AnthropicMessagesResponse):
        return _Message.model_validate(answer.model_dump(exclude_unset=True) | {"usage": changed})
    answer.usage = type(usage).model_validate(changed)
    return answer


async def _stream(events: AsyncGenerator[Any], counts: Counts) -> AsyncGenerator[Any]:
    _counts.set(counts)  # vLLM has the handler run in a task of its own, and the stream in this one
    async with aclosing(events):
        async for event in events:
            yield _event(event, counts) if counts and isinstance(event, str) and _MARK in event else event


def _event(event: str, counts: Counts) -> str:
    """A server-sent event with the counts in its usage, if it is that of the whole answer."""
    head, data, content = event.partition("data: ")
    body = json.loads(content)
    if "usage" not in body:  # Anthropic's message_start has it in the message
        return event
    body["usage"] = _with_drafts(body["usage"], counts)
    return f"{head}{data}{json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


def _with_drafts(usage: dict[str, Any], counts: Counts) -> dict[str, Any]:
    """A usage with a request's counts; what else it has stays."""
    accepted, drafted = (sum(each) for each in zip(*counts.values(), strict=True))
    name = "completion_tokens_details" if "completion_tokens" in usage else "output_tokens_details"
    found = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
    return usage | {name: (usage.get(name) or {}) | found}
