"""What becomes of requests when replicas fail: tried again before the first byte, kept away from what is ill."""

import asyncio
import contextlib
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from xxhash import xxh3_128_digest

from hotspan.router.routes import OWN_ROUTES
from hotspan.router.session import Split
from hotspan.router.settings import HealthSettings, Replica
from hotspan.router.types import Strategy
from hotspan.testing.clock import SimulatedClock
from kit.waiting import until_async

from .rig import QUICK, Answering, Held, Routed, die, hang, replicas, routed, say, say_ok


async def dies_early(request: web.Request, body: bytes) -> web.StreamResponse:
    """Sends the head of a stream, and dies before its first byte."""
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    await asyncio.sleep(0.02)
    assert request.transport is not None
    request.transport.abort()
    return response


async def dies_late(request: web.Request, body: bytes) -> web.StreamResponse:
    """Sends some of a stream, and dies."""
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b"data: 1\n\n")
    await asyncio.sleep(0.02)
    return await die(request, body)


@pytest.mark.parametrize("bad", [die, dies_early, say(502), say(503), say(504)])
async def test_what_fails_before_the_first_byte_goes_elsewhere(bad: Answering) -> None:
    """A replica that dies before its head or its first byte, or says 502, 503 or 504, costs no client its answer."""
    async with replicas(bad, say_ok) as (ill, well), routed([ill, well], is_exposing=True) as at:
        while not ill.works or well.works < 10:
            async with at.post() as answer:
                assert answer.status == 200 and answer.headers["x-hotspan-replica"] == well.url
        assert ill.works < well.works
        assert await at.metric("retries_total") == ill.works
        assert not at.in_flight


async def test_what_is_sent_again_says_for_how_long_it_was_held() -> None:
    """The next replica is told for how long a request was held; the first one, which gets it at once, is not."""
    async with replicas(say(503), say_ok) as (ill, well), routed([ill, well]) as at:
        while not ill.works:
            assert await at.status() == 200
        held = [headers.get("x-hotspan-held-ms") for fake in (ill, well) for *_, headers, _ in fake.asked]
        assert [value for value in held if value is not None] and all(int(value or 0) >= 0 for value in held)
        assert sum(value is None for value in held) == ill.works + well.works - await at.metric("retries_total")


async def test_replicas_that_are_not_there_are_left_alone() -> None:
    """A replica that refuses connections is out after the first question, and no request goes there."""
    async with replicas(say_ok) as (well,):
        gone = Replica("http://127.0.0.1:9")
        async with routed([well], behind=(gone, Replica(well.url))) as at:
            assert [await at.status() for _ in range(5)] == [200] * 5
            assert await at.metric("retries_total") == 0
            assert await at.metric("replica_can_take", replica=gone.url) == 0


async def test_attempts_end() -> None:
    """A request is tried three times, each at another replica, and then told what the last one said."""
    async with replicas(*[say(503, "full")] * 5) as fakes, routed(fakes) as at:
        async with at.post() as answer:
            assert (answer.status, await answer.text()) == (503, "full")
        assert sorted(fake.works for fake in fakes) == [0, 0, 1, 1, 1]


async def test_all_dead_is_a_bad_gateway() -> None:
    """Where nobody answers, the client is told 502 in OpenAI's shape, with when to try again."""
    async with replicas(die, die) as fakes, routed(fakes) as at, at.post() as answer:
        assert answer.status == 502 and answer.headers["retry-after"] == "1"
        assert (await answer.json())["error"]["code"] == 502


async def test_retries_have_a_budget() -> None:
    """When half of the replicas fail for long, retries stay within their share and reserve: load does not double."""
    settings = HealthSettings(interval_s=60, failures=10_000)
    budget = {"retry_share": 0.1, "retry_reserve": 5}
    async with (
        replicas(say(503), say_ok) as fakes,
        routed(fakes, health=settings, clock=SimulatedClock(), **budget) as at,
    ):
        statuses = [await at.status() for _ in range(60)]
        retries = await at.metric("retries_total")
        assert 5 <= retries <= 5 + 0.1 * 60
        assert statuses.count(503) == fakes[0].works - retries
        assert await at.metric("retries_refused_total") == statuses.count(503) > 0


async def test_the_breaker_opens_and_closes_again() -> None:
    """After three failures in a row a replica gets nothing until one request tries it, and all once that went well."""
    clock = SimulatedClock()
    async with replicas(die, say_ok) as (ill, well), routed([ill, well], clock=clock) as at:
        await until_opened(at, ill.url)
        ill.answer = say_ok
        assert [await at.status() for _ in range(20)] == [200] * 20
        assert ill.works == 3 and await at.metric("breaker_state", replica=ill.url, state="open") == 1
        clock.advance(0.2)
        assert await at.metric("breaker_state", replica=ill.url, state="closed") == 0
        assert [await at.status() for _ in range(20)] == [200] * 20
        assert ill.works > 3 and await at.metric("breaker_state", replica=ill.url, state="closed") == 1


@pytest.mark.parametrize("bad", [dies_early, dies_late])
async def test_the_breaker_opens_for_answers_that_break_off(bad: Answering) -> None:
    """A head alone is no success: who dies after it, or after some of its answer, soon gets few requests."""
    async with (
        replicas(bad, say_ok) as (ill, well),
        routed([ill, well], strategy=Strategy.ROUNDROBIN, health=replace(QUICK, open_s=600)) as at,
    ):
        for _ in range(20):
            with contextlib.suppress(aiohttp.ClientError):
                await at.status()
        assert ill.works == 3 and await at.metric("breaker_opened_total", replica=ill.url) == 1
        assert well.works >= 17


async def until_opened(at: Routed, url: str) -> None:
    for _ in range(100):
        assert await at.status() == 200
        if await at.metric("breaker_opened_total", replica=url):
            return
    raise AssertionError("the breaker never opened")


async def test_killing_one_in_mid_run_fails_nobody() -> None:
    """A replica that dies with 40 requests before their first byte: all are answered by the other."""
    dead = asyncio.Event()

    async def slow(request: web.Request, body: bytes) -> web.StreamResponse:
        await dead.wait()
        return await die(request, body)

    async with replicas(slow, say_ok) as fakes, routed(fakes, strategy=Strategy.ROUNDROBIN) as at:
        tasks = [asyncio.create_task(at.status({"prompt": f"{n}"})) for n in range(80)]
        await until_async(lambda: fakes[0].open == 40)
        dead.set()
        assert set(await asyncio.gather(*tasks)) == {200}
        assert not at.in_flight


async def test_overdue_replicas_are_not_asked_again_elsewhere() -> None:
    """A replica that took the request and says nothing in time is a 504: it may be computing still."""
    async with replicas(hang, hang) as fakes, routed(fakes, read_timeout_s=0.2) as at:
        asked = works = 0
        while not works:  # on a slow machine the time may be over before the replica is asked at all
            assert await at.status() == 504
            asked, works = asked + 1, sum(fake.works for fake in fakes)
        assert works <= asked and await at.metric("retries_total") == 0


async def test_a_replica_that_leaves_checks_unanswered_gets_nothing() -> None:
    """One that does not answer a health check in time is down; it is back when it does."""
    impatient = replace(QUICK, timeout_s=2.0)
    async with replicas(say_ok, say_ok) as (ill, well), routed([ill, well], health=impatient) as at:
        ill.ping_s = 60.0
        await until_async(lambda: ill.url not in at.router.fleet.up and well.url in at.router.fleet.up, within_s=60)
        before, answered = ill.works, 0
        async with asyncio.timeout(60):
            while answered < 10:  # a machine that stands still makes the other one late as well
                answered += await at.status() == 200
        assert ill.works == before
        ill.ping_s = 0.0
        await until_async(lambda: ill.url in at.router.fleet.up, within_s=60)


async def test_a_replica_that_drains_gets_nothing_new() -> None:
    """One that says it is draining keeps what it has in work, and gets no more; when it is back it is used again."""
    waits = Held()
    async with replicas(waits, say_ok) as (old, new), routed([old, new], strategy=Strategy.ROUNDROBIN) as at:
        tasks = [asyncio.create_task(at.status()) for _ in range(10)]
        await until_async(lambda: old.open > 0)
        old.ping = (503, {"status": "Draining"})
        await until_async(lambda: old.url not in at.router.fleet.up)
        await until_async(lambda: old.works + new.works == 10)
        had = old.works
        assert await at.metric("replica_health", replica=old.url, state="draining") == 1
        assert [await at.status() for _ in range(5)] == [200] * 5
        waits.go.set()
        assert set(await asyncio.gather(*tasks)) == {200}
        assert old.works == had
        old.ping = (200, {"status": "Healthy"})
        await until_async(lambda: old.url in at.router.fleet.up)


async def test_the_operator_drains() -> None:
    """POST /router/replicas/drain takes one out, resume takes it back; what asks for another site is refused."""
    async with replicas(say_ok, say_ok) as (one, two), routed([one, two]) as at:
        drain, resume = "/router/replicas/drain", "/router/replicas/resume"
        assert await at.status({"replica": one.url}, drain) == 200
        assert [await at.status() for _ in range(6)] == [200] * 6
        assert (one.works, two.works) == (0, 6)
        async with at.client.get(at.url + "/router/replicas") as answer:
            shown = {row["replica"]: row for row in (await answer.json())["replicas"]}
        assert shown[one.url]["is_drained"] and not shown[two.url]["is_drained"]
        assert await at.status({"replica": one.url}, resume) == 200
        for _ in range(20):
            await at.status()
        assert one.works > 0
        assert await at.status({"replica": "http://nobody"}, drain) == 404
        assert await at.status({}, drain) == 400
        async with at.client.post(at.url + drain, data=b'{"replica": "x"}') as answer:
            assert answer.status == 415
        assert await at.status({"replica": one.url}, drain, headers={"x-forwarded-for": "10.0.0.1"}) == 403


async def test_the_operator_drains_while_clients_hold_all_memory() -> None:
    """Bodies of clients leave room for the operator's."""
    async with replicas(say_ok, say_ok) as (one, two), routed([one, two], held_bytes=1 << 20) as at:
        assert at.router._bodies._held.take(b"", 1 << 20)
        assert await at.status() == 429
        assert await at.status({"replica": one.url}, "/router/replicas/drain") == 200


@pytest.mark.parametrize("route", OWN_ROUTES)
async def test_every_route_of_the_table_is_answered(route: str) -> None:
    """The reference lists no path or method that the router does not have; of another it says what there is."""
    method, _, path = route.partition(" ")
    async with replicas(say_ok) as (fake,), routed([fake]) as at:
        body = {"json": {"replica": fake.url, "group": "none"}} if method == "POST" else {}
        async with at.client.request(method, at.url + path, **body) as answer:
            assert "there are GET" not in await answer.text()
        async with at.client.request("DELETE", at.url + path) as answer:
            assert answer.status == 404 and route in await answer.text()


async def test_administration_takes_a_token() -> None:
    """With a token, the router's own routes and /metrics answer nobody without it."""
    async with replicas(say_ok) as (fake,), routed([fake], admin_token="t" * 20) as at:
        right, wrong = {"authorization": "Bearer " + "t" * 20}, {"authorization": "Bearer nope"}
        for path in ("/router/replicas", "/metrics"):
            for headers, status in ((right, 200), (wrong, 401), ({}, 401)):
                async with at.client.get(at.url + path, headers=headers) as answer:
                    assert answer.status == status


async def test_the_router_drains_itself() -> None:
    """Told to stop, it refuses new work with 503, says so at /ping, and ends when the last request has."""
    waits = Held()
    async with replicas(waits) as (fake,), routed([fake]) as at:
        task = asyncio.create_task(at.status())
        await until_async(lambda: fake.open == 1)
        gateway = at.router
        gateway.drain()
        assert await at.status() == 503
        async with at.client.get(at.url + "/ping") as answer:
            assert answer.status == 503 and await answer.json() == {"status": "Draining"}
        assert not await gateway.drained(0.05)
        waits.go.set()
        assert await gateway.drained(60) and await task == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/hotspan/cache/clear"),
        ("POST", "/hotspan/cache/invalidate"),
        ("POST", "/adapters"),
        ("DELETE", "/adapters/law"),
        ("POST", "/models/m/adapters/law/update"),
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/reset_prefix_cache"),
        ("PUT", "/whatever/comes"),
        ("GET", "/hotspan/cache"),
    ],
)
async def test_what_all_must_hear_reaches_all(method: str, path: str) -> None:
    """Invalidations, adapters and whatever else may change something go to every replica, with the client's rights."""
    async with replicas(say_ok, say_ok, say_ok) as fakes, routed(fakes) as at:
        headers = {"authorization": "Bearer admin"}
        async with at.client.request(method, at.url + path, json={"tenant": "a"}, headers=headers) as answer:
            said = await answer.json()
        assert answer.status == 200 and said["is_complete"]
        assert [row["replica"] for row in said["replicas"]] == [fake.url for fake in fakes]
        for fake in fakes:
            ((got, _, sent, body),) = fake.asked
            assert (got, sent["authorization"], body) == (method, "Bearer admin", b'{"tenant": "a"}')


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        ({"prompt": "a long text. " * 100}, {}),
        ({"messages": [{"role": "user", "content": "a long text. " * 100}]}, {}),
        ({"session": "chat"}, {"x-session-id": "chat"}),
    ],
)
async def test_an_announcement_goes_where_its_request_will(body: dict[str, Any], headers: dict[str, str]) -> None:
    """One replica gets the announcement, and the request after it."""
    async with replicas(say_ok, say_ok, say_ok) as fakes, routed(fakes) as at:
        assert await at.status({"prompt": "another"}) == await at.status({"prompt": "and another"}) == 200
        for fake in fakes:
            fake.asked.clear()
        assert await at.status(body, "/hotspan/cache/prefetch", headers=headers) == 200
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        request = {"prompt": "of the chat. " * 1000} | body if "session" in body else body
        assert await at.status(request, path, headers=headers) == 200
        assert sorted(len(fake.asked) for fake in fakes) == [0, 0, 2] and not at.in_flight


async def test_an_announcement_of_tags_goes_to_all() -> None:
    """Nobody knows on whose disk a document is."""
    async with replicas(say_ok, say_ok) as fakes, routed(fakes) as at:
        assert await at.status({"tags": ["manual"]}, "/hotspan/cache/prefetch") == 200
        assert [len(fake.asked) for fake in fakes] == [1, 1]


async def test_replicas_that_share_a_log_write_one_entry() -> None:
    """The first replica's receipt says where its entry is, and the others are told; what a client says of it is not
    passed on, and nothing is said where the first did not do it or shares no log."""
    log = {"epoch": "ab" * 8, "generation": 7, "namespace": "cd" * 32}

    async def receipt(request: web.Request, body: bytes) -> web.StreamResponse:
        return web.json_response({"is_durable": True, "log": log})

    told = f"{log['epoch']}:7:{log['namespace']}"
    lie = {"X-Hotspan-Logged": "00:99999:00"}
    for path, first, said in (
        ("/hotspan/cache/invalidate", receipt, told),
        ("/hotspan/cache/clear", receipt, told),
        ("/hotspan/cache/invalidate", say(503, "not durable"), None),
        ("/hotspan/cache/invalidate", say_ok, None),
        ("/hotspan/keys/shred", receipt, None),
    ):
        async with replicas(first, receipt, receipt) as fakes, routed(fakes) as at:
            async with at.client.post(at.url + path, json={"tenant": "a"}, headers=lie) as answer:
                await answer.read()
            heads = [fake.asked[0][2].get("x-hotspan-logged") for fake in fakes]
            assert heads == [None, said, said], path


async def test_a_fan_out_that_missed_one_says_so() -> None:
    """If one replica fails or is down, the answer is no 2xx, names it, and still says what the others did."""
    async with replicas(say_ok, say(500, "broken"), die) as fakes, routed(fakes) as at:
        async with at.post({}, "/hotspan/cache/clear") as answer:
            said = await answer.json()
        assert answer.status == 502 and not said["is_complete"]
        assert [row["status"] for row in said["replicas"]] == [200, 500, 503]
        assert fakes[1].url in said["error"]["message"] and fakes[0].url not in said["error"]["message"]
    async with replicas(say(401), say(401)) as fakes, routed(fakes) as at:
        assert await at.status({}, "/hotspan/cache/clear") == 401


async def test_sessions_stay_where_they_were_made() -> None:
    """NEW_SESSION goes anywhere; its id, and CLOSE, go to the replica that made it, and headers pass both ways."""

    async def sessions(request: web.Request, body: bytes) -> web.StreamResponse:
        named = request.headers.get("x-amzn-sagemaker-session-id")
        if named == "NEW_SESSION":
            new = f"s-{request.url.port}-{len(body)}; Expires=2099-01-01T00:00:00Z"
            return web.Response(
                headers={"X-Amzn-SageMaker-Session-Id": new, "X-Amzn-SageMaker-New-Session-Id": new}, text="{}"
            )
        closed = {"X-Amzn-SageMaker-Closed-Session-Id": named or ""} if b"CLOSE" in body else {}
        return web.Response(headers=closed, text="{}")

    async with replicas(*[sessions] * 4) as fakes, routed(fakes) as at:
        for number in range(8):
            start = {"requestType": "NEW_SESSION", "n": "x" * number}
            async with at.post(start, "/invocations", headers={"x-amzn-sagemaker-session-id": "NEW_SESSION"}) as answer:
                name = answer.headers["X-Amzn-SageMaker-Session-Id"].partition(";")[0]
                assert "Expires=" in answer.headers["X-Amzn-SageMaker-New-Session-Id"]
            home = next(fake for fake in fakes if fake.url.endswith(name.split("-")[1]))
            before = home.works
            for body in ({"prompt": "a"}, {"prompt": "completely different"}, {"requestType": "CLOSE"}):
                async with at.post(body, "/invocations", headers={"x-amzn-sagemaker-session-id": name}) as answer:
                    assert answer.status == 200
            assert answer.headers["X-Amzn-SageMaker-Closed-Session-Id"] == name
            assert home.works == before + 3
        assert await at.metric("stateful_sessions") == 0


async def test_sessions_of_a_dead_replica_go_elsewhere() -> None:
    """A session whose replica died is taken to another one, and counted as lost."""

    async def opens(request: web.Request, body: bytes) -> web.StreamResponse:
        return web.Response(headers={"X-Amzn-SageMaker-New-Session-Id": "s1"}, text="{}")

    async with replicas(opens, opens) as fakes, routed(fakes) as at:
        assert await at.status({}, "/invocations", headers={"x-amzn-sagemaker-session-id": "NEW_SESSION"}) == 200
        home, other = sorted(fakes, key=lambda fake: -fake.works)
        home.answer, other.answer = die, say_ok
        assert await at.status({}, "/invocations", headers={"x-amzn-sagemaker-session-id": "s1"}) == 200
        assert home.works == 2 and await at.metric("lost_sessions_total") == 1


@pytest.mark.parametrize("is_stream", [False, True])
async def test_stored_responses_stay_where_they_were_made(is_stream: bool) -> None:
    """What continues or reads a response goes to the replica that has it; without that replica, to another one."""

    async def respond(request: web.Request, body: bytes) -> web.StreamResponse:
        said = b'{"id":"resp_%d-%d","output":[]}' % (request.url.port or 0, len(body))
        if is_stream:
            said = b'event: response.created\ndata: {"response":%b}\n\n' % said
        return web.Response(body=said, content_type="text/event-stream" if is_stream else "application/json")

    async with replicas(*[respond] * 4) as fakes, routed(fakes) as at:
        for number in range(4):
            async with at.post({"input": "x" * number}, "/v1/responses") as answer:
                name = (await answer.text()).partition("resp_")[2].partition('"')[0]
            home = next(fake for fake in fakes if f":{name.partition('-')[0]}" in fake.url)
            before = home.works
            assert await at.status({"previous_response_id": f"resp_{name}", "input": "y"}, "/v1/responses") == 200
            async with at.client.get(f"{at.url}/v1/responses/resp_{name}") as answer:
                assert answer.status == 200
            assert await at.status({}, f"/v1/responses/resp_{name}/cancel") == 200
            assert home.works == before + 3
        home.answer = die
        assert await at.status({"previous_response_id": f"resp_{name}", "input": "y"}, "/v1/responses") == 200
        assert await at.metric("stateful_sessions") == 0
        home.answer, before = respond, home.works
        for number in range(8):  # it still has them
            sent = {"previous_response_id": f"resp_{name}", "input": f"again {number}"}
            assert await at.status(sent, "/v1/responses") == 200
        assert home.works == before + 8


async def test_canaries_get_their_share_of_sessions_and_keep_it() -> None:
    """Each session always goes where its share puts it (test_session.py); when the canary is down, to the others."""
    options = {"shares": {"canary": 0.1}, "is_exposing": True}
    split, names = Split({"canary": 0.1}), [f"s{number}" for number in range(60)]
    expected = [split.group(xxh3_128_digest(name.encode())) == "canary" for name in names]
    async with replicas(*[say_ok] * 3) as fakes, routed(fakes, {fakes[0].url: "canary"}, **options) as at:
        new = fakes[0]

        async def where(name: str) -> bool:
            async with at.post(headers={"x-session-id": name}) as answer:
                assert answer.status == 200
                return answer.headers["x-hotspan-replica"] == new.url

        for _ in range(2):
            assert [await where(name) for name in names] == expected
        new.ping = (500, {})
        await until_async(lambda: new.url not in at.router.fleet.up)
        assert not any([await where(name) for name in names])
        assert await at.metric("split_fallbacks_total") == sum(expected) > 0


async def test_who_waits_for_a_canary_that_goes_down_goes_to_the_others() -> None:
    """Requests in the queue whose group has nobody left are answered by the rest, not refused."""
    async with (
        replicas(hang, say_ok) as fakes,
        routed(fakes, {fakes[0].url: "canary"}, shares={"canary": 0.9}, max_in_flight=1) as at,
    ):
        tasks = [asyncio.create_task(at.status(headers={"x-session-id": f"s{n}"})) for n in range(20)]
        await until_async(lambda: fakes[0].open == 1 and len(at.router.dispatcher.queue) + fakes[1].works >= 19)
        waiting = len(at.router.dispatcher.queue)
        fakes[0].ping = (503, {"status": "Unhealthy"})
        await until_async(lambda: sum(task.done() for task in tasks) == 19)
        assert waiting > 10 and {task.result() for task in tasks if task.done()} == {200}
        assert await at.metric("split_fallbacks_total") == waiting
        await ended(tasks)


async def test_who_waits_for_its_sessions_replica_goes_elsewhere_when_that_is_down() -> None:
    """As one that came a moment later would."""
    named = {"X-Amzn-SageMaker-Session-Id": "abc"}

    async def begin(request: web.Request, body: bytes) -> web.StreamResponse:
        if b"NEW_SESSION" in body:
            return web.json_response({}, headers=named)
        return await hang(request, body)

    async with replicas(begin, say_ok) as (home, other), routed([home, other], max_in_flight=1) as at:
        while not home.works:
            asks = {"X-Amzn-SageMaker-Session-Id": "NEW_SESSION"}
            await at.status({"requestType": "NEW_SESSION"}, "/invocations", headers=asks)
        tasks = [asyncio.create_task(at.status({"inputs": "x"}, "/invocations", headers=named)) for _ in range(4)]
        await until_async(lambda: len(at.router.dispatcher.queue) == 3)
        home.ping = (503, {"status": "Unhealthy"})
        await until_async(lambda: sum(task.done() for task in tasks) == 3)
        assert {task.result() for task in tasks if task.done()} == {200}
        await ended(tasks)


async def ended(tasks: list[asyncio.Task[int]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_waiting_requests_are_served_by_turns() -> None:
    """While one tenant has 40 requests waiting, another one's request is not behind them."""
    waits = Held()
    async with replicas(waits) as (fake,), routed([fake], max_in_flight=1, queue_size=100) as at:
        spelled = ("Bearer a", "bearer a", "bEaReR  a")
        crowd = [asyncio.create_task(at.status(headers={"authorization": spelled[n % 3]})) for n in range(40)]
        await until_async(lambda: len(at.router.dispatcher.queue) == 39)
        other = asyncio.create_task(at.status(headers={"authorization": "Bearer b"}))
        await until_async(lambda: len(at.router.dispatcher.queue) == 40)
        waits.go.set()
        assert set(await asyncio.gather(other, *crowd)) == {200}
        served = [headers["authorization"] for _, _, headers, _ in fake.asked]
        assert len(served) == 41 and served.index("Bearer b") <= 2
        assert len(at.router.dispatcher.queue) == 0
        async with at.client.get(at.url + "/metrics") as answer:
            assert "Bearer" not in await answer.text()


async def test_the_queue_has_an_end() -> None:
    """Who finds the queue full is told 429, who waits for too long 503, both with when to try again."""
    waits = Held()
    async with replicas(waits) as (fake,), routed([fake], max_in_flight=1, queue_size=2, queue_timeout_s=4.0) as at:
        tasks = [asyncio.create_task(at.status()) for _ in range(3)]
        await until_async(lambda: len(at.router.dispatcher.queue) == 2)
        async with at.post() as answer:
            assert answer.status == 429 and int(answer.headers["retry-after"]) >= 1
        assert (await at.metric("queue_refused_total"), await at.metric("queue_overdue_total")) == (1, 0)
        await until_async(lambda: len(at.router.dispatcher.queue) == 0)
        waits.go.set()
        assert sorted(await asyncio.gather(*tasks)) == [200, 503, 503]
        assert (await at.metric("queue_refused_total"), await at.metric("queue_overdue_total")) == (1, 2)


async def test_waiting_ends_with_the_client() -> None:
    """A client that hangs up while it waits leaves the queue and takes no place."""
    waits = Held()
    async with replicas(waits) as (fake,), routed([fake], max_in_flight=1) as at:
        first = asyncio.create_task(at.status())
        await until_async(lambda: fake.open == 1)
        second = asyncio.create_task(at.status())
        await until_async(lambda: len(at.router.dispatcher.queue) == 1)
        second.cancel()
        await until_async(lambda: len(at.router.dispatcher.queue) == 0)
        waits.go.set()
        assert await first == 200 and await at.status() == 200
        assert fake.works == 2


async def test_waiting_ends_when_all_are_gone() -> None:
    """Requests that wait are answered 503 as soon as no replica is up, and not after the time to wait."""
    async with replicas(say_ok) as (fake,), routed([fake], max_in_flight=1, queue_timeout_s=600) as at:
        waits = fake.answer = Held()
        first = asyncio.create_task(at.status())
        await until_async(lambda: fake.open == 1)
        second = asyncio.create_task(at.status())
        await until_async(lambda: len(at.router.dispatcher.queue) == 1)
        fake.ping = (500, {})
        assert await asyncio.wait_for(second, 60) == 503
        waits.go.set()
        assert await first == 200
