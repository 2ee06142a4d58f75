"""The budget of retries, on a simulated clock, and what one tenant leaves of it to another."""

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from hotspan.router.retries import RetryBudget
from hotspan.router.settings import HealthSettings
from hotspan.testing.clock import SimulatedClock

from .rig import replicas, routed, say_ok

A, B = {"authorization": "Bearer key-a"}, {"authorization": "Bearer key-b"}
PATIENT = HealthSettings(interval_s=60.0, failures=100_000)


@given(st.lists(st.tuples(st.floats(0, 5), st.booleans()), max_size=300), st.integers(0, 20))
def test_retries_stay_within_their_budget(steps: list[tuple[float, bool]], reserve: int) -> None:
    """In any run: retries <= reserve + a tenth of the requests + what a minute refills, and never below nothing."""
    clock = SimulatedClock()
    budget = RetryBudget(0.1, reserve, clock)
    requests = retries = 0
    began_s = clock.monotonic()
    for wait_s, is_request in steps:
        clock.advance(wait_s)
        if is_request:
            requests += 1
            budget.asked()
        else:
            retries += budget.spend()
        allowed = reserve + 0.1 * requests + (clock.monotonic() - began_s) * max(reserve, 1) / 60
        assert retries <= allowed + 1e-6 and budget.left() >= -1e-9


def test_no_budget_no_retry() -> None:
    """With share and reserve 0 nothing is tried again until the reserve's minimum has filled up."""
    budget = RetryBudget(0.0, 0, SimulatedClock())
    assert not budget.spend()


@given(st.lists(st.sampled_from("abcd"), max_size=100), st.integers(2, 256))
def test_who_has_used_nothing_has_a_retry(spending: list[str], reserve: int) -> None:
    """However many retries others have made; and all of one minute stay near the reserve."""
    budget = RetryBudget(0.0, reserve, SimulatedClock())
    made = sum(budget.spend(owner) for owner in spending)
    assert budget.spend("new") or reserve < 10
    assert made <= 2 * reserve


def test_one_owner_alone_has_all_and_leaves_a_part() -> None:
    """With 256 in reserve one tenant may make 256 retries; then another one may make its part, and has it after a
    minute again, whatever the first one does."""
    clock = SimulatedClock()
    budget = RetryBudget(0.0, 256, clock)
    assert sum(budget.spend("a") for _ in range(1000)) == 256
    assert sum(budget.spend("b") for _ in range(1000)) == 64
    for _ in range(59):
        clock.advance(1.0)
        while budget.spend("a"):
            pass
    clock.advance(1.0)
    assert 60 <= sum(budget.spend("b") for _ in range(1000)) <= 70


def test_made_up_owners_are_bounded() -> None:
    """100,000 owners in a second take bounded memory, and few retries; the one that was there keeps one of its own."""
    budget = RetryBudget(0.0, 256, SimulatedClock())
    assert budget.spend("b")
    made = sum(budget.spend(f"{number}") for number in range(100_000) if budget.left("b") >= 0)
    assert len(budget._parts) <= 1024 and made <= 1024 and budget.spend("b")


@pytest.mark.parametrize("is_ready", [True, False])
async def test_invented_models_leave_retries_to_others_and_to_failures(is_ready: bool) -> None:
    """Requests of one tenant for models that no replica has, or that are not ready, are sent on within a budget of
    their own: where one replica of two is ill, another tenant's requests are answered by the other one."""

    def refused(body: bytes) -> web.Response | None:
        if b"invented" not in body:
            return None
        if not is_ready:
            return web.json_response({}, status=503, headers={"x-hotspan-refused": "model"})
        error = {"message": "The model does not exist.", "type": "NotFoundError", "param": "model", "code": 404}
        return web.json_response({"error": error}, status=404)

    async def well(request: web.Request, body: bytes) -> web.StreamResponse:
        return refused(body) or await say_ok(request, body)

    async def ill(request: web.Request, body: bytes) -> web.StreamResponse:
        return refused(body) or web.json_response({}, status=502)

    budget = {"retry_share": 0.1, "retry_reserve": 20}
    async with (
        replicas(well, ill) as fakes,
        routed(fakes, health=PATIENT, clock=SimulatedClock(), **budget) as at,
    ):
        for number in range(60):
            await at.status({"prompt": f"x{number}", "model": f"invented-{number}"}, headers=A)
        assert await at.metric("retries_refused_total") > 0
        assert [await at.status({"prompt": f"q{n}", "model": "m"}, headers=B) for n in range(10)] == [200] * 10
        assert [await at.status({"prompt": f"p{n}", "model": "m"}, headers=A) for n in range(10)] == [200] * 10


async def test_a_tenants_retries_leave_others_theirs() -> None:
    """While one replica of two is ill, a tenant with very many requests uses up its retries; another has its own."""

    async def ill(request: web.Request, body: bytes) -> web.StreamResponse:
        return web.json_response({}, status=502)

    budget = {"retry_share": 0.0, "retry_reserve": 20}
    async with (
        replicas(say_ok, ill) as fakes,
        routed(fakes, health=PATIENT, clock=SimulatedClock(), **budget) as at,
    ):
        statuses = [await at.status({"prompt": f"x{number}"}, headers=A) for number in range(80)]
        assert 502 in statuses[40:]
        assert [await at.status({"prompt": f"q{n}"}, headers=B) for n in range(5)] == [200] * 5
