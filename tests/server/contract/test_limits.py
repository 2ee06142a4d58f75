"""What a real server does with too many requests, with clients that hang up, and with clients that never finish."""

import asyncio
import statistics
import time

import httpx
import pytest

from .rig import GREEDY, PLACES, Container, the_error
from .slow_sockets import slow_sockets

pytestmark = pytest.mark.engine

LONG = {"inputs": "Say", "parameters": GREEDY | {"max_new_tokens": 2000, "ignore_eos_token": True}}
LONG_OPENAI = {"prompt": "Say", "max_tokens": 2000, "temperature": 0, "ignore_eos": True}
SEQUENCES = 32
SLOW = 1000
REQUESTS, ROUNDS = 60, 10
GOAL = 1.2


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


def p99(seconds: list[float]) -> float:
    return statistics.quantiles(seconds, n=100)[98]


def timed(container: Container) -> list[float]:
    """Seconds of short requests, one after the other."""
    found = []
    for _ in range(REQUESTS):
        began = time.perf_counter()
        container.generate("Say", parameters={"max_new_tokens": 2})
        found.append(time.perf_counter() - began)
    return found


@pytest.mark.timing
def test_slow_clients_slow_nobody_else(container: Container) -> None:
    """Beside a thousand of them, who hold their connections, a healthy client's p99 is what it was.

    Of alternating rounds, for the machine has its own moments: in some of them the least of each kind tell, in others
    the median of the rounds' ratios. Whoever is slowed down is by both.
    """
    container.wait_until_idle()
    timed(container)
    alone: list[float] = []
    beside: list[float] = []

    def are_slowed() -> bool:
        ratio = statistics.median(b / a for a, b in zip(alone, beside, strict=True))
        return min(beside) > GOAL * min(alone) and ratio > GOAL

    while not beside or (are_slowed() and len(beside) < ROUNDS):
        alone.append(p99(timed(container)))
        with slow_sockets(container.server.port, SLOW) as sockets:
            beside.append(p99(timed(container)))
            assert sockets.open > 0.8 * SLOW
    assert not are_slowed(), (beside, alone)
