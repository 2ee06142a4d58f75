"""What was blended of a prompt is in its answer's usage, and in nobody else's."""

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.serve.engine.protocol import PromptTokenUsageInfo

from hotspan.engine.usage import report_blends
from hotspan.http.exchange import BLENDED

BLEND = {"mode": "first_k", "reused": 1536, "recomputed": 48, "fresh": 135}


class Client:
    """An engine's client, whose outputs are given."""

    def __init__(self) -> None:
        self.closed = 0

    async def generate(self, params: list[Any]) -> AsyncGenerator[Any]:
        try:
            for each in params:
                await asyncio.sleep(0)
                yield SimpleNamespace(kv_transfer_params=each)
        finally:
            self.closed += 1


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(PromptTokenUsageInfo, "__init__", PromptTokenUsageInfo.__init__)  # put back afterwards
    made: Any = Client()
    report_blends(made)
    return made


async def answered(client: Any, params: list[Any]) -> dict[str, Any]:
    """The details that vLLM makes behind the last output of a request."""
    async for _ in client.generate(params):
        pass
    return PromptTokenUsageInfo(cached_tokens=128).model_dump(exclude_none=True)


def test_the_last_output_says_it(client: Any) -> None:
    """Requests of one task, one behind the other, and of several at a time."""

    async def run() -> list[dict[str, Any]]:
        first, second = await answered(client, [None, {"blend": BLEND}]), await answered(client, [None, {"x": 1}])
        return [first, second, *await asyncio.gather(answered(client, [{"blend": BLEND}]), answered(client, [None]))]

    blended = {"cached_tokens": 128, "blend_reused_tokens": 1536, "blend_recomputed_tokens": 48}
    assert asyncio.run(run()) == [blended, {"cached_tokens": 128}, blended, {"cached_tokens": 128}]


def test_a_request_adds_up_its_prompts(client: Any) -> None:
    """For its head: in the tasks of one request, and in no other's; nothing where nobody asks."""

    async def request(prompts: int) -> dict[str, int]:
        total: dict[str, int] = {}
        BLENDED.set(total)
        await asyncio.gather(*(answered(client, [None, {"blend": BLEND}]) for _ in range(prompts)))
        return total

    async def run() -> list[dict[str, int]]:
        return await asyncio.gather(*map(request, (1, 2, 0)))

    one = {"reused": 1536, "recomputed": 48, "fresh": 135}
    assert asyncio.run(run()) == [one, {what: 2 * tokens for what, tokens in one.items()}, {}]


def test_a_client_that_leaves_ends_its_request(client: Any) -> None:
    """As without it: the engine's generator is closed with the one that is given out."""

    async def run() -> None:
        outputs = client.generate([None, None])
        await anext(outputs)
        await outputs.aclose()

    asyncio.run(run())
    assert client.closed == 1
