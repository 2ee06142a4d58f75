"""What a real server does with too many requests, with clients that hang up, and with clients that never finish."""

import asyncio
import time

import httpx
import pytest

from .rig import GREEDY, PLACES, Container, the_error

pytestmark = pytest.mark.engine

LONG = {"inputs": "Say", "parameters": GREEDY | {"max_new_tokens": 2000, "ignore_eos_token": True}}
LONG_OPENAI = {"prompt": "Say", "max_tokens": 2000, "temperature": 0, "ignore_eos": True}
SEQUENCES = 32


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/invocations", LONG | {"stream": True}),
        ("/invocations", LONG),
        ("/v1/completions", LONG_OPENAI | {"stream": True}),
        ("/v1/completions", LONG_OPENAI),
    ],
)
async def test_a_client_that_hangs_up_ends_its_generation(
    container: Container, path: str, body: dict[str, object]
) -> None:
    """Streaming or not, on our routes and on the engine's: the engine does not compute the answer to its end."""
    await asyncio.to_thread(container.wait_until_idle)
    before = container.gauge("vllm:generation_tokens_total")
    async with httpx.AsyncClient(base_url=container.server.url, timeout=60) as http:
        asked = asyncio.create_task(http.post(path, json=body))
        deadline = time.monotonic() + 60
        while not await asyncio.to_thread(container.gauge, "vllm:num_requests_running"):
            assert time.monotonic() < deadline, "it does not begin"
            await asyncio.sleep(0.01)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
    await asyncio.to_thread(container.wait_until_idle)
    assert container.gauge("vllm:generation_tokens_total") - before < 2000


async def test_as_many_as_may_be_and_one_more(container: Container) -> None:
    """All places taken: the next one is a 429 that says when; those that hang up make room, and all is as before."""
    container.wait_until_idle()
    limits = httpx.Limits(max_connections=PLACES)
    async with httpx.AsyncClient(base_url=container.server.url, limits=limits, timeout=60) as http:
        held = [asyncio.create_task(http.post("/invocations", json=LONG)) for _ in range(PLACES)]
        running = waiting = 0.0
        deadline = time.monotonic() + 60
        while running + waiting < PLACES:
            assert time.monotonic() < deadline, f"{running:g} run and {waiting:g} wait"
            await asyncio.sleep(0.05)
            running, waiting = await asyncio.to_thread(
                lambda: (container.gauge("vllm:num_requests_running"), container.gauge("vllm:num_requests_waiting"))
            )
        assert running <= SEQUENCES and running > 4  # serving.properties, and not OPTION_MAX_ROLLING_BATCH_SIZE
        refused = await asyncio.to_thread(container.invoke, {"inputs": "Say"})
        assert "120 requests" in the_error(refused, 429)["message"] and int(refused.headers["retry-after"]) > 0
        assert (await asyncio.to_thread(container.http.get, "/ping")).status_code == 200
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)
    await asyncio.to_thread(container.wait_until_idle)
