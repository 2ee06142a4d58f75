"""Counts of drafted tokens in `usage`, put there between vLLM's handlers and the client."""

import asyncio
import json
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.entrypoints.openai.completion.protocol import CompletionResponse

from hotspan.engine.drafts import report_drafts

COUNTS = {
    "mean_acceptance_length": 2.5,
    "draft_acceptance_rate": 0.5,
    "acceptance_histogram": [0, 1, 1],
    "num_spec_steps": 2,
    "num_accepted_draft_tokens": 3,
    "num_draft_tokens": 4,
    "num_spec_tokens": 2,
}
USAGE = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12, "prompt_tokens_details": {"cached_tokens": 4}}
REPORTED = {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 1}
ANSWER = {"model": "m", "choices": [], "usage": USAGE}


def create_of(answer: Any) -> Any:
    """A handler that gives `answer`, as report_drafts leaves it."""

    async def create(asked: object) -> Any:
        return answer

    state = SimpleNamespace(openai_serving_chat=SimpleNamespace(create_chat_completion=create))
    report_drafts(SimpleNamespace(state=state))  # type: ignore[arg-type]
    return state.openai_serving_chat.create_chat_completion


def test_usage_of_an_answer() -> None:
    """An answer with counts has them in its usage too; everything else stays, and so does an answer without."""
    drafted = CompletionResponse(**ANSWER, metrics={"speculative_decoding": COUNTS})
    before = drafted.model_dump()
    after = asyncio.run(create_of(drafted)(None)).model_dump()
    assert after["usage"].pop("completion_tokens_details") == REPORTED | {"reasoning_tokens": 0}
    assert before["usage"].pop("completion_tokens_details") is None
    assert after == before
    plain = CompletionResponse(**ANSWER)
    before = plain.model_dump()
    assert asyncio.run(create_of(plain)(None)).model_dump() == before


def test_usage_of_a_stream() -> None:
    """Only the chunk with counts changes, also if a text looks like one; the handler's stream is closed with ours."""
    text = {"model": "m", "choices": [{"index": 0, "text": '"speculative_decoding":{'}]}
    last = ANSWER | {"metrics": {"speculative_decoding": COUNTS}}
    events = [f"data: {json.dumps(one, separators=(',', ':'))}\n\n" for one in (text, last)] + ["data: [DONE]\n\n"]
    closed: list[bool] = []

    async def chunks() -> AsyncGenerator[str]:
        try:
            for event in events:
                yield event
        finally:
            closed.append(True)

    async def read(most: int) -> list[str]:
        stream = await create_of(chunks())(None)
        found = [await anext(stream) for _ in range(most)]
        await stream.aclose()
        return found

    first, changed, end = asyncio.run(read(3))
    assert (first, end) == (events[0], events[2])
    usage = USAGE | {"completion_tokens_details": REPORTED}
    assert json.loads(changed.removeprefix("data: ")) == last | {"usage": usage}
    assert changed.endswith("\n\n")
    asyncio.run(read(1))
    assert closed == [True, True]
