"""What a client's own limits, or one model, make a replica refuse is no sign that the replica is ill."""

import ast
import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

import hotspan.server
from hotspan.config.settings import CacheOptions
from hotspan.core.errors import EngineError, FormatterError
from hotspan.http.errors import LIMIT, MODEL, REFUSED, REQUEST, HttpError
from hotspan.http.paths import BY_NAME
from hotspan.router.settings import HealthSettings, Replica
from hotspan.router.unready import UnreadyModels
from hotspan.server.admin import CacheAdmin, admin_router
from hotspan.server.forgetting import forget_sessions
from hotspan.server.front import Front
from hotspan.server.models.merging import parts
from hotspan.server.models.relay import ModelAnswer
from hotspan.server.policy import Access, Gate, access_table
from hotspan.server.principal import Credentials
from hotspan.testing.clock import SimulatedClock
from kit.waiting import until_async
from tests.server.lmi.fake_engine import FakeEngine
from tests.server.lmi.serving import serving, split
from tests.server.lmi.test_gate import gated
from tests.server.test_admin_routes import FakeEngine as Cores
from tests.server.test_admin_routes import receipt
from tests.server.test_principal import ADMIN_TOKEN, known

from .rig import Answering, Routed, die, replicas, routed, say, say_ok

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
    engines = [FakeEngine() for _ in range(count)]
    async with before(*(gated(each, **settings) for each in engines)) as at:
        yield at, engines


@contextlib.asynccontextmanager
async def before(*apps: Any) -> AsyncIterator[Routed]:
    """A router before servers."""
    async with contextlib.AsyncExitStack() as stack:
        ports = [await stack.enter_async_context(serving(each)) for each in apps]
        behind = tuple(Replica(f"http://127.0.0.1:{port}") for port in ports)
        at = await stack.enter_async_context(routed([], behind=behind, health=STRICT))
        await until_async(lambda: len(at.router.fleet.up) == len(apps))
        yield at


def administered(cores: Cores, sessions_path: Path | None = None) -> Gate:
    """A server with the routes of a cache whose engine cores answer commands so; its inference is well.

    sessions_path: it has sessions, which are forgotten when they are closed.
    """
    engine, tenants = FakeEngine().app(), known(acme="key-a", globex="key-b")
    admin = CacheAdmin(cores, CacheOptions(ram_gib=1).settings(), tenants)
    engine.include_router(admin_router(admin))
    settings = {} if sessions_path is None else {"sessions_path": sessions_path, "forget_closed_sessions": True}
    front = Front(engine, *split(**settings), is_alive=lambda: True, forget=forget_sessions(admin))
    table = {**access_table(has_keys=True, has_given_token=False), **dict.fromkeys(BY_NAME, Access.CLIENT)}
    return Gate(front, table, Credentials(tenants, ADMIN_TOKEN))


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
    assert len(unready._until_s) == 4096 and {len(name) for name in unready._until_s._entries[b""]} == {16}
    unready._until_s.check()


async def test_a_tenants_names_are_not_another_tenants() -> None:
    """An adapter that a replica does not have for one tenant is asked there for another one that has its own of that
    name; and names that one tenant makes up push out nothing of what is known for another."""
    clock = SimulatedClock()
    unready = UnreadyModels(clock)
    unready.lacks("r", "mine", b"a")
    assert unready.of("mine", b"a") == {"r"} and not unready.of("mine", b"b")
    for number in range(5000):
        unready.lacks("r", f"{number}", b"b")
    assert unready.of("mine", b"a") == {"r"}


class _Answer:
    def __init__(self, after: str) -> None:
        self._after = after

    def header(self, name: str) -> str:
        return {"retry-after": self._after}[name]


# -- what an engine does not do in time, or not at all ----------------------------------------------------------------


@pytest.mark.parametrize("failure", [TimeoutError(), EngineError("it failed")])
@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("prefetch", {"prompt": "x" * 2000}),
        ("prefetch", {"tags": ["x"]}),
        ("lookup", {"prompt": "x" * 2000}),
        ("pin", {"tags": ["x"], "gib": 1.0}),
        ("explain", {"request": "mine"}),
        ("invalidate", {"session": "mine"}),
    ],
)
async def test_a_command_that_is_not_carried_out_closes_nobodys_replica(
    name: str, body: dict[str, Any], failure: Exception
) -> None:
    """However often a tenant asks engines for what they do not do in time: it is refused, others are answered."""
    apps = [administered(Cores(fails=failure)) for _ in range(2)]
    async with before(*apps) as at:
        for _ in range(4):
            async with at.post(body, f"/hotspan/cache/{name}", headers=A) as answer:
                assert answer.status == 503 and answer.headers[REFUSED] == REQUEST
        assert await opened(at) == 0 and await at.metric("retries_total") == 0
        assert [await at.status(SMALL, path="/v1/chat/completions", headers=B) for _ in range(4)] == [200] * 4


@pytest.mark.parametrize(
    "cores",
    [
        Cores(fails=TimeoutError()),
        Cores(fails=EngineError("it failed")),
        Cores(receipt("a", 1), receipt("b", 1, durable=False)),
    ],
)
async def test_a_session_that_is_not_forgotten_closes_nobodys_replica(tmp_path: Path, cores: Cores) -> None:
    """A tenant that closes sessions while the log is down is told to close them again; others are answered."""
    async with before(*(administered(cores, tmp_path / name) for name in "ab")) as at:
        for number in range(4):
            named = A | {"x-amzn-sagemaker-session-id": f"s{number}"}
            async with at.post({"requestType": "CLOSE"}, "/invocations", headers=named) as answer:
                assert answer.status == 503 and answer.headers[REFUSED] == REQUEST
        assert await opened(at) == 0 and await at.metric("retries_total") == 0
        assert [await at.status(SMALL, path="/v1/chat/completions", headers=B) for _ in range(4)] == [200] * 4


@pytest.mark.parametrize("answer", [say(503), say(504), die])
async def test_an_announcement_is_tried_once_and_counts_for_nothing(answer: Answering) -> None:
    """Whatever a replica makes of it, also one that does not tell what its refusals are about."""
    async with replicas(answer, answer) as fakes, routed(fakes, health=STRICT) as at:
        for number in range(6):
            assert await at.status({"prompt": f"{number}" + "x" * 2000}, "/hotspan/cache/prefetch") >= 502
        assert sum(fake.works for fake in fakes) == 6 and await at.metric("retries_total") == 0
        assert await opened(at) == 0 and len(at.router.fleet.up) == 2


async def test_an_announcement_is_no_trial_of_a_replica_that_failed() -> None:
    """A half-open breaker is neither closed nor opened by one: the next request decides."""
    async with replicas(say_ok) as (fake,), routed([fake], health=STRICT) as at:
        clock = SimulatedClock()
        breaker = at.router.health[fake.url].breaker
        breaker._clock = clock
        breaker.failed()
        clock.advance(700.0)
        at.router.health[fake.url]._changed()
        assert await at.status({"prompt": "x" * 2000}, "/hotspan/cache/prefetch") == 200
        assert breaker.state.value == "half-open" and at.router.health[fake.url].can_take
        assert await at.status() == 200 and breaker.state.value == "closed"


async def test_what_one_replica_or_model_did_not_do_is_no_sign_of_who_asked_it() -> None:
    """A router that asked all, and a store that asked all its models, are well themselves."""
    async with (
        replicas(say(503), say_ok) as fakes,
        routed(fakes, health=STRICT) as at,
        at.post({}, "/hotspan/cache/clear") as answer,
    ):
        assert answer.status == 502 and answer.headers[REFUSED] == REQUEST
    ill, well = ModelAnswer("a", 503, b"{}"), ModelAnswer("b", 200, b"{}")
    for answers in ([ill], [ill, well]):
        with pytest.raises(HttpError) as found:
            parts(answers)
        assert found.value.refused == REQUEST


# -- every refusal that a replica makes ---------------------------------------------------------------------------

SIGNS = {
    "daemon/routes.py:Routes._delete": (1, "no router asks the daemon"),
    "daemon/routes.py:Routes._leased": (1, "no router asks the daemon"),
    "formatters/calls.py:Calls.run": (1, "a FormatterError is about its model, unless it is told another"),
    "http/connections.py:": (1, "all connections have a request in work"),
    "router/fan_out.py:_ask": (1, "how the answer of all tells of one that gave none"),
    "router/fan_out.py:fan_out": (1, "marked where it is sent"),
    "router/gateway.py:Gateway.__call__": (1, "no replica is up"),
    "router/gateway.py:Gateway._health": (1, "no replica is up, or the router stops"),
    "router/gateway.py:Gateway._work": (1, "the router stops"),
    "router/proxy.py:Proxy._attempt": (1, "the replica gave no answer"),
    "router/ray/picker.py:Picker._answer": (2, "no replica is up"),
    "router/ray/relay.py:Relay._pass_on": (2, "the replica's server does not answer"),
    "server/adapters/loader.py:AdapterLoader._load_once": (1, "the engine has stopped"),
    "server/admission.py:Admission._enter": (1, "it stops"),
    "server/admission.py:Admission._overdue": (1, "it stops"),
    "server/exchange.py:lmi_status": (1, "of a 429, which has its mark"),
    "server/front.py:tell_health": (1, "a health check"),
    "server/loading.py:loading": (2, "the only model loads"),
    "server/step_health.py:_refuse": (1, "a health check"),
    "server/warming.py:Warming._client": (1, "it has not started"),
}
"""Where the code has a status of 502 or 503 without what it is about: how many times, and why."""


def test_every_503_is_told_apart() -> None:
    """Each answer with 502 or 503 in the code says what it is about, or is a sign of the server's health and listed
    above with its reason: whoever adds one decides."""
    root = Path(hotspan.server.__file__).parents[1]
    found: dict[str, int] = {}
    for path in sorted(root.rglob("*.py")):
        for place in _bare(ast.parse(path.read_text())):
            name = f"{path.relative_to(root).as_posix()}:{place}"
            found[name] = found.get(name, 0) + 1
    assert found == {name: count for name, (count, _) in SIGNS.items()}


_STATUSES = {HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE}
_READS = (ast.Compare, ast.Set, ast.Tuple, ast.List)
"""In these a status is looked for, and not answered."""


def _bare(tree: ast.AST, names: tuple[str, ...] = (), *, is_told: bool = False) -> Iterator[str]:
    """The function of each literal status 502 or 503 that is neither compared nor in a call with `about`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, _READS):
            continue
        inner = (
            (*names, node.name) if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) else names
        )
        if not is_told and _is_status(node):
            yield ".".join(names)
        has_about = isinstance(node, ast.Call) and any(each.arg == "about" for each in node.keywords)
        yield from _bare(node, inner, is_told=is_told or has_about)


def _is_status(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in {each.name for each in _STATUSES}
    if not isinstance(node, ast.Constant) or isinstance(node.value, bool):
        return False
    return node.value in _STATUSES or str(node.value).startswith(("b'HTTP/1.1 502", "b'HTTP/1.1 503"))


def test_refusals_that_are_no_signs() -> None:
    """429 is always about a limit; a formatter's failure is about the model or adapter that it belongs to."""
    assert HttpError(429, "x").headers[REFUSED] == LIMIT and REFUSED not in HttpError(503, "x").headers
    hung = FormatterError("hangs", phase="input", name="f", status=503)
    assert HttpError.of(hung).headers[REFUSED] == MODEL
