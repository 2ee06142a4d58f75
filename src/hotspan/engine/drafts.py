"""Counts of drafted tokens in an answer's `usage`, under the names that OpenAI's API has for them.

vLLM 0.32 and later put a request's counts into `metrics.speculative_decoding`. `usage.completion_tokens_details` gets
`accepted_prediction_tokens` and `rejected_prediction_tokens` from there, in answers and in the last chunk of streams.
"""

import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import wraps
from typing import Any

from fastapi import FastAPI

_CREATES = {"openai_serving_completion": "create_completion", "openai_serving_chat": "create_chat_completion"}
_MARK = '"speculative_decoding":{'
"""Of a chunk with counts; generated text in JSON has its quotes escaped, so it never looks so."""


def report_drafts(app: FastAPI) -> None:
    """Put the counts into each answer's usage. Mutates: the app's handlers of completions and chats."""
    for handler, method in _CREATES.items():
        serving = getattr(app.state, handler, None)
        if serving is not None:
            setattr(serving, method, _reporting(getattr(serving, method)))


def _reporting(create: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    @wraps(create)
    async def reporting(*given: Any, **options: Any) -> Any:
        answer = await create(*given, **options)
        if isinstance(answer, AsyncGenerator):
            return _stream(answer)
        counts = getattr(getattr(answer, "metrics", None), "speculative_decoding", None)
        if counts is None:
            return answer
        usage = answer.usage
        changed = with_drafts(usage.model_dump(), counts.model_dump())
        answer.usage = type(usage).model_validate(changed)
        return answer

    return reporting


async def _stream(chunks: AsyncGenerator[str]) -> AsyncGenerator[str]:
    async with aclosing(chunks):
        async for chunk in chunks:
            yield _chunk(chunk) if _MARK in chunk else chunk


def _chunk(event: str) -> str:
    """An SSE event with the counts in its usage."""
    body = json.loads(event.removeprefix("data: "))
    body["usage"] = with_drafts(body["usage"], body["metrics"]["speculative_decoding"])
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


def with_drafts(usage: dict[str, Any], counts: dict[str, Any]) -> dict[str, Any]:
    """A usage with vLLM's counts of one request; what else it has stays."""
    accepted = counts["num_accepted_draft_tokens"]
    details = {
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": counts["num_draft_tokens"] - accepted,
    }
    return usage | {"completion_tokens_details": (usage.get("completion_tokens_details") or {}) | details}
