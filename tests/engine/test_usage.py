"""What was cached and blended of an answer's prompts is in its usage, and in nobody else's."""

import asyncio
import itertools
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.serve.engine.protocol import PromptTokenUsageInfo

from hotspan.engine.usage import report_counts
from hotspan.http.exchange import COUNTED, Counted

BLEND = {"mode": "first_k", "reused": 1536, "recomputed": 48, "fresh": 135}

_NAMES = itertools.count()


class Client:
    """An engine's client, whose outputs are given."""

    def __init__(self) -> None:
        self.closed = 0

    async def generate(self, params: list[Any], sampling: Any, request_id: str) -> AsyncGenerator[Any]:
        try:
            for each in params:
                await asyncio.sleep(0)
                cached = each.get("cached", 128) if each else 128
                yield SimpleNamespace(kv_transfer_params=each, num_cached_tokens=cached)
        finally:
            self.closed += 1


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(PromptTokenUsageInfo, "__init__", PromptTokenUsageInfo.__init__)  # put back afterwards
    made: Any = Client()
    report_counts(made)
    return made


async def answered(client: Any, params: list[Any]) -> dict[str, Any]:
    """The details that vLLM makes behind the last output of a request."""
    async for _ in client.generate(params, None, f"cmpl-{next(_NAMES)}-0"):
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
        counted = Counted()
        COUNTED.set(counted)
        await asyncio.gather(*(answered(client, [None, {"blend": BLEND}]) for _ in range(prompts)))
        return counted.blended

    async def run() -> list[dict[str, int]]:
        return await asyncio.gather(*map(request, (1, 2, 0)))

    one = {"reused": 1536, "recomputed": 48, "fresh": 135}
    assert asyncio.run(run()) == [one, {what: 2 * tokens for what, tokens in one.items()}, {}]


def test_a_client_that_leaves_ends_its_request(client: Any) -> None:
    """As without it: the engine's generator is closed with the one that is given out."""

    async def run() -> None:
        outputs = client.generate([None, None], None, "cmpl-0")
        await anext(outputs)
        await outputs.aclose()

    asyncio.run(run())
    assert client.closed == 1


@pytest.mark.parametrize("is_late", [False, True])
def test_an_answer_adds_up_what_was_cached_of_its_prompts(client: Any, is_late: bool) -> None:
    """As vLLM's completions make it: the prompts of a request begin in its task and run in others; whichever ends last.
    The next request of the task begins anew."""

    async def heard(outputs: AsyncGenerator[Any]) -> None:
        async for _ in outputs:
            pass

    async def request(name: str, cached: list[int]) -> dict[str, Any]:
        begun = [client.generate([{"cached": n}], None, f"{name}-{i}") for i, n in enumerate(cached)]
        for outputs in reversed(begun) if is_late else begun:
            await asyncio.create_task(heard(outputs))
        return PromptTokenUsageInfo(cached_tokens=cached[-1]).model_dump(exclude_none=True)

    async def run() -> list[dict[str, Any]]:
        return [await request("cmpl-1", [512, 0, 1024, 511]), await request("cmpl-2", [256])]

    assert asyncio.run(run()) == [{"cached_tokens": 2047}, {"cached_tokens": 256}]


def test_an_answer_adds_up_what_was_blended_of_its_prompts(client: Any) -> None:
    """Its usage has the tokens of all of them."""

    async def run() -> dict[str, Any]:
        begun = [client.generate([{"blend": BLEND}], None, f"cmpl-1-{i}") for i in range(2)]

        async def heard(outputs: AsyncGenerator[Any]) -> None:
            async for _ in outputs:
                pass

        await asyncio.gather(*(asyncio.create_task(heard(outputs)) for outputs in begun))
        return PromptTokenUsageInfo(cached_tokens=128).model_dump(exclude_none=True)

    assert asyncio.run(run()) == {"cached_tokens": 256, "blend_reused_tokens": 3072, "blend_recomputed_tokens": 96}


def test_details_that_are_not_asked_for_stay_away(client: Any) -> None:
    """Where vLLM tells no cached tokens, several prompts have none either."""
    asyncio.run(answered(client, [None]))
    assert PromptTokenUsageInfo().model_dump(exclude_none=True) == {}


def test_what_warmed_the_engine_is_in_no_answer(client: Any) -> None:
    """Prompts that a request's task has from before it are none of its own, and neither are those of other requests."""

    async def streamed(cached: list[int], name: str) -> dict[str, Any]:
        """As vLLM streams: one task begins with the prompts, another hears the outputs and makes the usage."""
        COUNTED.set(Counted())

        async def begin() -> list[AsyncGenerator[Any]]:
            return [client.generate([{"cached": n}], None, f"{name}-{i}") for i, n in enumerate(cached)]

        for outputs in await asyncio.create_task(begin()):
            async for _ in outputs:
                pass
        return PromptTokenUsageInfo(cached_tokens=cached[0]).model_dump(exclude_none=True)

    async def run() -> list[dict[str, Any]]:
        for turn in range(3):
            async for _ in client.generate([{"cached": 512}], None, f"hotspan-warm-{turn}"):
                pass
        tasks = [asyncio.create_task(streamed(each, name)) for name, each in (("a", [7]), ("b", [1, 2, 3]), ("a", [0]))]
        return await asyncio.gather(*tasks)

    assert asyncio.run(run()) == [{"cached_tokens": n} for n in (7, 6, 0)]
