"""What a client's own limits, or one model, make a replica refuse is no sign that the replica is ill."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

import hotspan.server
from hotspan.core.errors import FormatterError
from hotspan.http.errors import LIMIT, MODEL, REFUSED, HttpError
from hotspan.router.settings import HealthSettings, Replica
from hotspan.router.unready import UnreadyModels
from hotspan.testing.clock import SimulatedClock
from kit.waiting import until_async
from tests.server.lmi.fake_engine import FakeEngine
from tests.server.lmi.serving import serving
from tests.server.lmi.test_gate import gated

from .rig import Answering, Routed, replicas, routed, say_ok

STRICT = HealthSettings(interval_s=60.0, failures=1, open_s=600.0)
"""One failure opens a breaker until the end of the test."""

A, B = {"authorization": "Bearer key-a"}, {"authorization": "Bearer key-b"}
SMALL = {"prompt": "hello", "max_tokens": 1}


def refuse(status: int, about: str, retry_s: int = 5) -> Answering:
    """A refusal that says what it is about."""

    async def answer(request: web.Request, body: bytes) -> web.StreamResponse:
        return web.json_response({}, status=status, headers={REFUSED: about, "retry-after": str(retry_s)})

    return answer


@contextlib.asynccontextmanager
async def real(count: int, **settings: Any) -> AsyncIterator[tuple[Routed, list[FakeEngine]]]:
    """A router before real gates and fronts, whose engines are small; their tenants are a and b."""
    async with contextlib.AsyncExitStack() as stack:
        engines = [FakeEngine() for _ in range(count)]
        ports = [await stack.enter_async_context(serving(gated(each, **settings))) for each in engines]
        behind = tuple(Replica(f"http://127.0.0.1:{port}") for port in ports)
        at = await stack.enter_async_context(routed([], behind=behind, health=STRICT))
        await until_async(lambda: len(at.router.fleet.up) == count)
        yield at, engines


async def opened(at: Routed) -> float:
    return await at.metric("breaker_opened_total")


@pytest.mark.parametrize("compat", ["none", "lmi"])
async def test_a_tenant_without_places_closes_nobodys_replica(compat: str) -> None:
    """A tenant whose requests take all its places is refused, once each, with LMI's 503 where that is asked for;
    another tenant is answered by the same replicas, whose breakers stay closed."""
    async with real(2, compat=compat, job_queue_size=4, principals=3) as (at, engines):
        for engine in engines:
            engine.delay_s = 3600.0
        body = SMALL | {"stream": True}
        held = [asyncio.create_task(at.status(body, path="/v1/chat/completions", headers=A)) for _ in range(6)]
        try:
            await until_async(lambda: sum(engine.running for engine in engines) == 6)
            refused = [await at.status(SMALL, path="/v1/chat/completions", headers=A) for _ in range(12)]
            assert set(refused) == {503 if compat == "lmi" else 429}
            assert await opened(at) == 0 and await at.metric("retries_total") == 0
            for engine in engines:
                engine.delay_s = 0.0
            assert [await at.status(SMALL, path="/v1/chat/completions", headers=B) for _ in range(8)] == [200] * 8
        finally:
            for task in held:
                task.cancel()
            await asyncio.gather(*held, return_exceptions=True)


@pytest.mark.parametrize("compat", ["none", "lmi"])
async def test_a_tenant_without_memory_closes_nobodys_replica(compat: str) -> None:
    """The same for a tenant whose bodies take all the memory that it may have."""
    async with real(2, compat=compat, held_bytes=4000, principals=4) as (at, _):
        large = {"prompt": "a" * 10_000}
        refused = [await at.status(large, path="/v1/chat/completions", headers=A) for _ in range(12)]
        assert set(refused) == {503 if compat == "lmi" else 429}
        assert await opened(at) == 0 and await at.metric("retries_total") == 0
        assert [await at.status(SMALL, path="/v1/chat/completions", headers=B) for _ in range(8)] == [200] * 8


@pytest.mark.parametrize("status", [429, 502, 503, 504])
async def test_a_marked_refusal_is_passed_on_and_counts_for_nothing(status: int) -> None:
    """Whatever its status, it is answered as it came, without a retry, and no breaker learns of it."""
    async with replicas(refuse(status, LIMIT), say_ok) as fakes, routed(fakes, health=STRICT) as at:
        await at.client.post(at.url + "/router/replicas/drain", json={"replica": fakes[1].url})
        async with at.post() as answer:
            assert answer.status == status and answer.headers[REFUSED] == LIMIT
        assert fakes[0].works == 1 and fakes[1].works == 0 and await opened(at) == 0


async def test_a_half_open_breaker_learns_nothing_from_a_refused_client() -> None:
    """The one trial of a replica that failed goes back when its client is over its own limit: the next one decides."""
    async with replicas(refuse(503, LIMIT)) as (fake,), routed([fake], health=STRICT, attempts=1) as at:
        clock = SimulatedClock()
        breaker = at.router.health[fake.url].breaker
        breaker._clock = clock
        breaker.failed()
        clock.advance(700.0)
        at.router.health[fake.url]._changed()
        for _ in range(3):
            assert await at.status() == 503 and breaker.state.value == "half-open"
        fake.answer = say_ok
        assert await at.status() == 200 and breaker.state.value == "closed"


async def test_an_ill_model_counts_for_that_model() -> None:
    """A replica of several models that refuses one of them is avoided by that model's requests until it may be ready,
    and by no others; its breaker stays closed, and where no other has the model it is asked."""

    async def store(request: web.Request, body: bytes) -> web.StreamResponse:
        return await (refuse(503, MODEL)(request, body) if b"loads" in body else say_ok(request, body))

    async with replicas(store, say_ok) as (loading, whole), routed([loading, whole], health=STRICT) as at:
        assert [await at.status({"model": "loads", "prompt": "x"}) for _ in range(20)] == [200] * 20
        assert loading.works <= 1 and await at.metric("retries_total") == loading.works
        assert [await at.status({"model": "well", "prompt": f"{n}"}) for n in range(20)] == [200] * 20
        assert loading.works > 1 and await opened(at) == 0
        await at.client.post(at.url + "/router/replicas/drain", json={"replica": whole.url})
        assert await at.status({"model": "loads", "prompt": "x"}) == 503 and await opened(at) == 0


async def test_what_is_not_ready_is_tried_again_and_names_are_bounded() -> None:
    """A refusal holds as long as its Retry-After, at most a minute; names that clients make up take bounded memory."""
    clock = SimulatedClock()
    unready = UnreadyModels(clock)
    for after, lasts_s in (("5", 5.0), ("9" * 50, 60.0), ("no", 1.0)):
        unready.note("r", "m", _Answer(after))  # type: ignore[arg-type]
        clock.advance(lasts_s - 0.5)
        assert unready.of("m") == {"r"} and not unready.of("other")
        clock.advance(1.0)
        assert not unready.of("m")
    for number in range(5000):
        unready.note("r", f"{number}" + "x" * 10_000, _Answer("5"))  # type: ignore[arg-type]
    assert len(unready._until_s) == 4096 and {len(name) for name in unready._until_s} == {16}


class _Answer:
    def __init__(self, after: str) -> None:
        self._after = after

    def header(self, name: str) -> str:
        return {"retry-after": self._after}[name]


# -- every refusal that a replica makes ---------------------------------------------------------------------------

ILL = {
    "server/admission.py": 2,  # it stops
    "server/admin.py": 1,  # the engine gave an error
    "server/forgetting.py": 3,  # a session's texts could not be forgotten
    "server/control_app.py": 1,  # the engine gave an error, or none in time
    "server/exchange.py": 1,  # the engine makes no step
    "server/warming.py": 1,  # it has not started
    "server/loading.py": 1,  # the only model loads
    "server/adapters/loader.py": 1,  # the engine has stopped
    "router/gateway.py": 2,  # no replica is up; the router stops
    "router/ray/relay.py": 2,  # the replica's server does not answer
}
"""How many refusals with 502 or 503 each module has that are a sign of the server's own health."""


def test_every_503_is_told_apart() -> None:
    """Each `HttpError(503` in the code is a sign of the server's health, as counted above, or says what it is about:
    whoever adds one decides."""
    root = Path(hotspan.server.__file__).parents[1]
    found: dict[str, int] = {}
    for path in sorted(root.rglob("*.py")):
        calls = re.findall(r"HttpError\(\s*50[23]\b.*?(?=HttpError\(|\Z)", path.read_text(), re.DOTALL)
        bare = sum("about=" not in _call(each) for each in calls)
        if bare:
            found[path.relative_to(root).as_posix()] = bare
    assert found == ILL


def _call(text: str) -> str:
    """The arguments of the call that a text begins with."""
    depth = 0
    for at, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if character == ")" and not depth:
            return text[:at]
    return text


def test_refusals_that_are_no_signs() -> None:
    """429 is always about a limit; a formatter's failure is about the model or adapter that it belongs to."""
    assert HttpError(429, "x").headers[REFUSED] == LIMIT and REFUSED not in HttpError(503, "x").headers
    hung = FormatterError("hangs", phase="input", name="f", status=503)
    assert HttpError.of(hung).headers[REFUSED] == MODEL
