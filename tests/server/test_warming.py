"""POST /hotspan/cache/warm: whose requests it makes, when, and what it says of them. The engine is simulated."""

import asyncio
import json
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from pydantic import ValidationError

from hotspan.config.server_settings import ServerSettings
from hotspan.core.directives import RetentionRule
from hotspan.http.connections import HttpLimits
from hotspan.http.errors import HttpError
from hotspan.server.admission import Admission
from hotspan.server.exchange import AppExchange
from hotspan.server.principal import Principal, asking, current_held_since_s, current_tenant
from hotspan.server.warm_requests import WarmRequest
from hotspan.server.warming import (
    KEPT_JOBS,
    MAX_FAILED,
    MAX_HELD_CHARS,
    MAX_JOBS,
    MAX_KEPT_JOBS,
    Job,
    Warming,
    warming_router,
)
from hotspan.testing.clock import SimulatedClock
from kit.waiting import until_async
from tests.operations import in_one_go, operations

PAGE = b'hotspan_cache_token_bytes{engine="0"} 10.0\nhotspan_cache_capacity_bytes{engine="0",tier="ram"} 500.0\n'


class Engine:
    """Answers a text when `gate` lets it. asked: tenant and prompt of each; withdrawn: those whose client went away."""

    def __init__(self) -> None:
        self.admission = Admission(ServerSettings(), HttpLimits())
        self.gate = asyncio.Semaphore(1000)
        self.asked: list[tuple[str, str]] = []
        self.bodies: list[dict[str, Any]] = []
        self.withdrawn: list[str] = []
        self.together = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        exchange = AppExchange(scope, receive, send, is_lmi=False)
        async with exchange.answered():
            if exchange.path == "/metrics":
                await exchange.respond(200, PAGE)
            elif exchange.path == "/tokenize":
                await exchange.respond(200, b'{"count": 7}')
            else:
                await self.admission.run(exchange, lambda body: self.compute(exchange, body))

    async def compute(self, exchange: AppExchange, body: bytes) -> None:
        said = json.loads(body)
        prompt = str(said.get("prompt") or said["messages"])
        self.asked.append((current_tenant(), prompt))
        self.bodies.append(said)
        if prompt == "wrong":
            raise HttpError(400, "no such thing")
        self.together = max(self.together, self.admission.in_flight)
        free, gone = asyncio.create_task(self.gate.acquire()), asyncio.create_task(exchange.gone.wait())
        await asyncio.wait({free, gone}, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not free.done():
            free.cancel()
            self.withdrawn.append(prompt)
            return
        usage = {"prompt_tokens": len(prompt), "prompt_tokens_details": {"cached_tokens": 1}}
        await exchange.respond(200, json.dumps({"usage": usage}).encode())


@pytest.fixture
async def engine() -> Engine:
    return Engine()


@pytest.fixture
async def warming(engine: Engine) -> Warming:
    made = Warming(has_keys=True, clock=SimulatedClock())
    made.attach(engine, engine.admission)
    return made


def request(*prompts: str, **more: Any) -> WarmRequest:
    return WarmRequest.model_validate({"texts": [{"prompt": prompt} for prompt in prompts], **more})


async def ended(job: Job) -> Job:
    assert job.task is not None
    await asyncio.wait({job.task}, timeout=60)
    assert job.is_over
    return job


async def test_texts_are_computed_one_by_one_for_their_tenant(engine: Engine, warming: Warming) -> None:
    """With tags, time to live and one token each; the result counts tokens, and bytes by the server's metrics."""
    asked = request("first", "second", tags=["all"], ttl="1h")
    with asking(Principal("admin's", has_key=True, is_admin=True)):
        job = await ended(warming.begin(asked, "a"))
    assert engine.asked == [("a", "first"), ("a", "second")] and engine.together == 1
    assert all(body["max_tokens"] == 1 for body in engine.bodies)
    assert engine.bodies[0]["kv_transfer_params"] == {"ttl": "1h", "tags": ["all"]}
    shown = await warming.told(job)
    assert shown["state"] == "done" and (shown["texts"], shown["warmed"], shown["failed"]) == (2, 2, 0)
    assert shown["tokens"] == 11 and shown["cached_tokens"] == 2
    assert shown["bytes"] == 110 and shown["largest_tier_bytes"] == 500 and shown["ttl_s"] == 3600


async def test_what_it_says_of_their_life_is_what_rules_leave(engine: Engine) -> None:
    """The shortest time to live of all texts; what a rule forbids to store is refused before anything is computed."""
    rules = RetentionRule(tag="news", ttl_s=60), RetentionRule(tag="secret", no_store=True)
    made = Warming(has_keys=True, retention=rules, clock=SimulatedClock())
    made.attach(engine, engine.admission)
    for tags, ttl, left_s in (
        (["manual"], None, None),
        (["manual"], "1h", 3600),
        (["news"], "1h", 60),
        (["news"], 9, 9),
    ):
        job = await ended(made.begin(request("one", tags=tags, **({} if ttl is None else {"ttl": ttl})), "a"))
        assert (await made.told(job))["ttl_s"] == left_s
    asked = len(engine.asked)
    with pytest.raises(HttpError, match="forbids to store"):
        made.begin(request("two", tags=["secret"]), "a")
    assert len(engine.asked) == asked


async def test_documents_go_into_the_template(engine: Engine, warming: Warming) -> None:
    """What is before the document carries no tags: an invalidation of the document leaves it."""
    asked = WarmRequest.model_validate({"texts": [{"text": "D", "tags": ["d"]}], "template": "x{document}y{question}z"})
    await ended(warming.begin(asked, "a"))
    [body] = engine.bodies
    assert body["prompt"] == "xDy" and body["kv_transfer_params"] == {"tags": ["d"], "tags_from": 7}


async def test_other_requests_come_first(engine: Engine, warming: Warming) -> None:
    """None is sent beside another request; one that arrives has the text in work withdrawn, which is sent again."""
    engine.gate = asyncio.Semaphore(0)
    other = asyncio.create_task(warming._ask("/v1/completions", {"prompt": "user 1"}))
    await until_async(lambda: len(engine.asked) == 1)
    job = warming.begin(request("text"), "a")
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(engine.asked) == 1, "sent beside another request"
    engine.gate.release()
    await other
    await until_async(lambda: engine.asked[-1] == ("a", "text"))
    other = asyncio.create_task(warming._ask("/v1/completions", {"prompt": "user 2"}))
    await until_async(lambda: engine.withdrawn == ["text"])
    await until_async(lambda: engine.admission.in_flight == 1)
    assert engine.asked[-1][1] == "user 2" and not job.is_over
    engine.gate.release()
    await other
    await until_async(lambda: engine.asked[-1] == ("a", "text"))
    engine.gate.release()
    assert (await ended(job)).done.texts == 1


async def test_a_text_that_is_refused_does_not_end_the_others(engine: Engine, warming: Warming) -> None:
    """It is named, with the reason."""
    job = await ended(warming.begin(request("wrong", "right"), "a"))
    shown = await warming.told(job)
    assert shown["state"] == "done" and shown["warmed"] == 1
    assert shown["failures"] == ["1: no such thing"] and shown["failed"] == 1


async def test_what_is_wrong_is_refused_at_once(engine: Engine, warming: Warming) -> None:
    """No text is computed of a request that has a wrong one."""
    wrong: list[dict[str, Any]] = [
        {"texts": [{"prompt": "a", "text": "b"}]},
        {"texts": [{"prompt": "a"}, {"tags": ["a"]}]},
        {"texts": [{"text": "a"}], "template": "without"},
        {"texts": [{"text": "a"}], "ttl": "soon"},
        {"texts": [{"text": "a", "tags": ["x" * 600]}]},
    ]
    for each in wrong:
        with pytest.raises(HttpError) as caught:
            warming.begin(WarmRequest.model_validate(each), "a")
        assert caught.value.status == 400
    assert not engine.asked


async def test_a_cancelled_warm_up_ends(engine: Engine, warming: Warming) -> None:
    """Its text is withdrawn, and the next one has its turn; so is one that waits."""
    engine.gate = asyncio.Semaphore(0)
    first, second, third = (warming.begin(request(name), "a") for name in ("one", "two", "three"))
    await until_async(lambda: engine.asked == [("a", "one")])
    await warming.cancel(second)
    await warming.cancel(first)
    assert first.state == second.state == "cancelled" and engine.withdrawn == ["one"]
    engine.gate.release()
    await ended(third)
    assert [prompt for _, prompt in engine.asked] == ["one", "three"]
    await warming.close()


@pytest.mark.parametrize(
    ("command", "left"),
    [
        ({"do": "invalidate", "tags": ["manual"]}, ["three", "four"]),
        ({"do": "invalidate", "tags": ["manual", "old"]}, ["two", "three", "four"]),
        ({"do": "invalidate", "session": "s"}, ["two", "four"]),
        ({"do": "invalidate", "tenant": "b"}, ["two", "three", "four"]),
        ({"do": "invalidate", "adapter": "x"}, ["two", "three", "four"]),
        ({"do": "invalidate", "tenant": "a", "tokens": [1]}, ["two", "three", "four"]),
        ({"do": "invalidate", "model": True}, []),
        ({"do": "shred", "tenant": "a"}, []),
        ({"do": "invalidate"}, []),
    ],
)
async def test_an_invalidated_text_is_not_sent(
    engine: Engine, warming: Warming, command: dict[str, Any], left: list[str]
) -> None:
    """Once an invalidation is carried out no text that it takes is sent any more, nor again; the others are."""
    engine.gate = asyncio.Semaphore(0)
    texts = [{"prompt": "one", "tags": ["manual@1", "old"], "session": "s"}, {"prompt": "two", "tags": ["manual"]}]
    texts += [{"prompt": "three", "session": "s"}, {"prompt": "four"}]
    job = warming.begin(WarmRequest.model_validate({"texts": texts}), "a")
    await until_async(lambda: len(engine.asked) == 1)
    is_taken = (
        "one" not in left and command.get("tenant") != "b" and "adapter" not in command and "tokens" not in command
    )
    await warming.forget([command])
    assert engine.withdrawn == (["one"] if is_taken else [])
    before = len(engine.asked)
    engine.gate.release()
    for _ in range(4):
        engine.gate.release()
    await ended(job)
    assert [prompt for _, prompt in engine.asked[before:]] == left
    shown = await warming.told(job)
    assert shown["state"] == "done" and shown["warmed"] == len(left) + (not is_taken)
    assert all("was invalidated" in each for each in shown["failures"]) and shown["failed"] == 4 - shown["warmed"]


async def test_a_text_says_since_when_it_is_held(engine: Engine, warming: Warming) -> None:
    """Each text's request says since when the server has it: since its warm-up was accepted, however long ago."""
    since: list[float | None] = []
    compute = engine.compute

    async def seen(exchange: AppExchange, body: bytes) -> None:
        since.append(current_held_since_s())
        await compute(exchange, body)

    engine.compute = seen  # type: ignore[method-assign]
    await ended(warming.begin(request("one", "two"), "a"))
    assert len(since) == 2 and None not in since and since[0] == since[1]


async def test_a_mistake_of_ours_ends_its_job_alone(engine: Engine, warming: Warming) -> None:
    """An error that nobody expected ends its warm-up as failed; its place is free, and the next one is computed."""
    compute = engine.compute

    async def fail(exchange: AppExchange, body: bytes) -> None:
        raise ZeroDivisionError

    engine.compute = fail  # type: ignore[method-assign]
    broken = await ended(warming.begin(request("one"), "a"))
    assert broken.state == "failed" and not broken.chars and broken.reason
    engine.compute = compute  # type: ignore[method-assign]
    assert (await ended(warming.begin(request("two"), "a"))).state == "done"


async def test_a_server_that_stops_does_not_wait_for_texts(engine: Engine, warming: Warming) -> None:
    """The text in work is withdrawn, so that draining ends."""
    engine.gate = asyncio.Semaphore(0)
    job = warming.begin(request("text", "more"), "a")
    await until_async(lambda: len(engine.asked) == 1)
    engine.admission.drain()
    await engine.admission.drained(within_s=60)
    assert (await ended(job)).state == "failed" and job.reason == "the server stops"
    assert len(engine.asked) == 1


async def test_tenants_see_their_own(warming: Warming) -> None:
    """Another's warm-up does not exist; results go after an hour."""
    job = await ended(warming.begin(request("text"), "a"))
    own, administrator = Principal("a", has_key=True), Principal(has_key=True, is_admin=True)
    assert warming.find(job.id, own) is warming.find(job.id, administrator) is job
    for name, principal in ((job.id, Principal("b", has_key=True)), ("0" * 16, own)):
        with pytest.raises(HttpError) as caught:
            warming.find(name, principal)
        assert caught.value.status == 404
    clock = warming._clock
    assert isinstance(clock, SimulatedClock)
    clock.advance(3601)
    await ended(warming.begin(request("text"), "a"))
    with pytest.raises(HttpError):
        warming.find(job.id, administrator)


async def test_the_routes(warming: Warming) -> None:
    """202 with an id, by which progress is asked for; a tenant names no other, and sees no other's."""
    app = FastAPI()
    app.include_router(warming_router(warming))
    body = {"texts": [{"text": "x"}]}
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        with asking(Principal("a", has_key=True)):
            begun = await client.post("/hotspan/cache/warm", json=body)
            assert begun.status_code == 202 and begun.json()["texts"] == 1
            path = f"/hotspan/cache/warm/{begun.json()['id']}"
            await ended(warming.find(begun.json()["id"], Principal("a")))
            assert (await client.get(path)).json()["state"] == "done"
            assert (await client.delete(path)).json()["warmed"] == 1
            assert (await client.post("/hotspan/cache/warm", json=body | {"tenant": "b"})).status_code == 403
            for wrong in ({"texts": []}, {"texts": [{"text": "x", "tag": "y"}]}, {}):
                assert (await client.post("/hotspan/cache/warm", json=wrong)).status_code == 422
        with asking(Principal("b", has_key=True)):
            assert (await client.get(path)).status_code == (await client.delete(path)).status_code == 404


async def test_a_tenant_leaves_room_for_others(engine: Engine, warming: Warming) -> None:
    """It has at most half of the warm-ups that are not over."""
    engine.gate = asyncio.Semaphore(0)
    for _ in range(MAX_JOBS // 2):
        warming.begin(request("text"), "a")
    with pytest.raises(HttpError) as caught:
        warming.begin(request("text"), "a")
    assert caught.value.status == 429
    for _ in range(MAX_JOBS // 2):
        warming.begin(request("text"), "b")
    with pytest.raises(HttpError):
        warming.begin(request("text"), "c")
    await warming.close()
    assert not engine.admission.in_flight


async def test_what_a_template_multiplies_is_counted_before(engine: Engine, warming: Warming) -> None:
    """A template has a bound, and each document counts with it: what would take too much is refused, and no text is
    made of it."""
    with pytest.raises(ValidationError):
        WarmRequest.model_validate({"texts": [{"text": "x"}], "template": "x" * 70_000 + "{document}"})
    large = {"texts": [{"text": "x"}] * 1000, "template": "x" * 65_000 + "{document}"}
    made = len(WarmRequest.model_validate(large).texts) * 65_000
    asked = WarmRequest.model_validate(large)
    assert sum(asked.chars()) > made
    assert tracemalloc_peak(lambda: warming.begin(asked, "a")) < 1.1 * MAX_HELD_CHARS
    assert tracemalloc_peak(lambda: refused(warming, asked)) < 1 << 20
    await warming.close()
    assert not warming._held.used


def refused(warming: Warming, asked: WarmRequest, owner: str = "a") -> None:
    with pytest.raises(HttpError) as caught:
        for _ in range(9):
            warming.begin(asked, owner)
    assert caught.value.status in (413, 429)


async def until_asked(engine: Engine, count: int) -> None:
    await until_async(lambda: len(engine.asked) == count)


def tracemalloc_peak(act: Callable[[], object]) -> int:
    """Bytes that are allocated at most."""
    tracemalloc.start()
    try:
        act()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("texts", [1, 500])
async def test_a_large_warm_up_leaves_room_for_other_tenants(engine: Engine, texts: int) -> None:
    """A tenant's texts take its own part of the memory, and what is done is given back text by text; texts of two
    tenants are computed in turn."""
    made = Warming(has_keys=True, tenants=2, clock=SimulatedClock())
    made.attach(engine, engine.admission)
    engine.gate = asyncio.Semaphore(0)
    most = made._held.most
    first = made.begin(request(*["x" * (most // texts - 2048)] * texts), "a")
    refused(made, request("x" * (1 << 20)))
    second = made.begin(request("y" * 100, "z" * (MAX_HELD_CHARS // 8)), "b")
    await until_async(lambda: len(engine.asked) == 1)
    if texts > 1:
        held = made._held.used
        for count in range(2, 6):
            engine.gate.release()
            await until_asked(engine, count)
        assert {tenant for tenant, _ in engine.asked[1:]} == {"a", "b"} and made._held.used < held
    await made.cancel(first)
    await made.cancel(second)
    assert not made._held.used and not made._own_turns
    await made.close()


async def cancelled(warming: Warming, owner: str) -> Job:
    """A warm-up of a tenant that is over."""
    job = warming.begin(request("text"), owner)
    await asyncio.sleep(0)  # it has begun to wait
    await warming.cancel(job)
    return job


async def test_results_are_kept_of_each_tenant(warming: Warming) -> None:
    """However many another tenant has: the last of each stay, and of many tenants' those of who has fewest."""
    own, mine = Principal("b", has_key=True), await cancelled(warming, "b")
    jobs = [await cancelled(warming, "a") for _ in range(300)]
    await cancelled(warming, "a")  # forgets what is too much
    assert warming.find(mine.id, own) is mine
    kept = [job for job in warming._jobs.values() if job.owner == "a" and job.is_over]
    assert len(kept) <= KEPT_JOBS + 1 and jobs[-1] in kept and jobs[0] not in kept
    for n in range(MAX_KEPT_JOBS):
        await cancelled(warming, f"made up {n}")
    assert len(warming._jobs) <= MAX_KEPT_JOBS + 1
    with pytest.raises(HttpError):
        warming.find(jobs[-1].id, Principal("a", has_key=True))


async def test_a_result_is_small(engine: Engine, warming: Warming) -> None:
    """Whatever its texts are called and their errors say: what is kept of a job that is over has a bound, and the
    failures beyond it are counted."""
    engine.gate = asyncio.Semaphore(0)
    names = [chr(0x1F600) * 505 + f"{n:04d}" for n in range(1000)]
    texts = [{"prompt": "text", "tags": ["tag"], "name": name} for name in names]
    job = warming.begin(WarmRequest.model_validate({"texts": texts}), "a")
    await warming.forget([{"do": "invalidate", "tags": ["tag"]}])
    await ended(job)
    shown = await warming.told(job)
    assert shown["failed"] == 1000 and len(shown["failures"]) == MAX_FAILED and not warming._held.used
    assert all("was invalidated" in each and len(each) < 300 for each in shown["failures"])
    assert sum(map(sys.getsizeof, job.done.failed)) < 1 << 17

    async def refuse(exchange: AppExchange, body: bytes) -> None:
        raise HttpError(400, "no " * 100_000)

    engine.compute = refuse  # type: ignore[method-assign]
    refused = await ended(warming.begin(request("text"), "a"))
    assert refused.done.count == 1 and len(refused.done.failed[0]) < 300


def test_tags_count_with_their_text() -> None:
    """Those of its own; what holds the texts of a warm-up has no more characters than were counted."""
    few, many = ({"texts": [{"prompt": "x", "tags": tags}]} for tags in (["a"], ["a" * 500] * 64))
    [small], [large] = (WarmRequest.model_validate(each).chars() for each in (few, many))
    assert large - small == 500 * 64 - 1


async def test_an_invalidation_costs_what_a_warm_up_has(engine: Engine, warming: Warming) -> None:
    """Letting go of a thousand texts costs ten times as much as of a hundred, not a hundred times."""

    async def cost(count: int) -> int:
        engine.gate = asyncio.Semaphore(0)
        texts = [{"prompt": "in work"}, *[{"prompt": "text", "tags": ["tag"]}] * count]
        job = warming.begin(WarmRequest.model_validate({"texts": texts}), "a")
        await until_async(lambda: job.current is not None)
        steps = operations(lambda: in_one_go(warming.forget([{"do": "invalidate", "tenant": "a", "tags": ["tag"]}])))
        await warming.cancel(job)
        return steps

    assert await cost(900) < 15 * await cost(90)
