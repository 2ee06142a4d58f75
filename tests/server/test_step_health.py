"""Health checks of one's own `vllm serve` with hotspan's middleware: a real one is in tests/engine/test_control.py."""

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from hotspan.core.errors import ConfigError
from hotspan.server.step_health import StepHealth
from hotspan.testing.clock import SimulatedClock
from tests.server.lmi.fake_engine import FakeEngine
from tests.server.lmi.serving import client

from .test_liveness import Engine


async def get(app: Any, path: str) -> httpx.Response:
    async with client(app) as http:
        return await http.get(path)


@pytest.mark.parametrize("limit", ["60", "5"])
async def test_an_engine_that_makes_no_step_is_503(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the limit, with the reason, and well again with the first step; other routes are the application's."""
    monkeypatch.setenv("HOTSPAN_STEP_TIMEOUT_S", limit)
    clock, engine = SimulatedClock(), Engine()
    health = StepHealth(FakeEngine().app(), clock)
    liveness = health.watch(engine, on_cpu=False)

    async def goes_on(seconds: int) -> None:
        for _ in range(seconds):
            clock.advance(1.0)
            liveness.tick()
            for _ in range(3):
                await asyncio.sleep(0)

    engine.has_work = True
    engine.steps.clear()
    await goes_on(int(limit))
    assert (await get(health, "/health")).status_code == 200
    await goes_on(2)
    for path in ("/health", "/ping"):
        ill = await get(health, path)
        assert ill.status_code == 503 and ill.json()["status"] == "Stalled" and f"{limit} s" in ill.json()["reason"]
        assert ill.headers["retry-after"]
    assert (await get(health, "/receipt")).status_code == 405
    engine.steps.set()
    await goes_on(2)
    assert (await get(health, "/health")).status_code == 200


@pytest.mark.parametrize("has_plugin", [True, False])
async def test_the_engine_is_that_of_the_application(has_plugin: bool) -> None:
    """As vLLM adds middleware: the engine's client is in the application's state; without one nothing is watched. A
    core without hotspan's plugin is asked for no more than a step.
    """
    app = FakeEngine().app()
    app.add_middleware(StepHealth)
    assert (await get(app, "/health")).status_code == 200
    asked: list[str] = []

    class Core:
        async def call_utility_all_async(self, method: str) -> list[int]:
            asked.append(method)
            if method == "hotspan_progress" and not has_plugin:
                raise ValueError("no such method")
            return [0]

    has_work = SimpleNamespace(has_unfinished_requests=lambda: True)
    app.state.engine_client = SimpleNamespace(output_processor=has_work, engine_core=Core())
    assert (await get(app, "/health")).status_code == 200
    for _ in range(5):
        await asyncio.sleep(0)
    assert asked == (["hotspan_progress"] if has_plugin else ["hotspan_progress", "is_sleeping"])


def test_a_wrong_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the variable and what would do."""
    monkeypatch.setenv("HOTSPAN_STEP_TIMEOUT_S", "soon")
    with pytest.raises(ConfigError, match="HOTSPAN_STEP_TIMEOUT_S is 'soon': give seconds"):
        StepHealth(FakeEngine().app())
