"""Shadow requests: what is copied, what is compared, and what is rolled back."""

import asyncio
import json
import logging
import random
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from hotspan.core.errors import ConfigError
from hotspan.router.answers import answer_of
from hotspan.router.evidence import Evidence
from hotspan.router.settings import Replica, RouterSettings
from kit.waiting import until_async

from .rig import Answering, Fake, Routed, hang, replicas, routed, say

CHAT = "/v1/chat/completions"


def body(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hello"}], "temperature": 0, **more}


def chats(*texts: str) -> Answering:
    """Completions with these texts in turn, from the first again at the end; as a stream where one is asked for."""
    count = 0

    async def answer(request: web.Request, sent: bytes) -> web.StreamResponse:
        nonlocal count
        text, count = texts[count % len(texts)], count + 1
        if not json.loads(sent).get("stream"):
            choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
            return web.json_response({"choices": [choice]})
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        deltas: list[dict[str, Any]] = [{"delta": {"content": each}} for each in text]
        for choice in (*deltas, {"delta": {}, "finish_reason": "stop"}):
            await response.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    return answer


def copied(sent: dict[str, Any]) -> dict[str, Any]:
    """The body of its copy."""
    directives = sent.get("kv_transfer_params", {}) | {"no_store": True, "renew": False}
    return sent | {"stream": False, "kv_transfer_params": directives}


def shadowed(fakes: list[Fake], **options: Any) -> Any:
    """A router whose last replica is a candidate that gets shadow requests, of all requests unless it is said."""
    return routed(fakes, {fakes[-1].url: "canary"}, **{"shadow": {"canary": 1.0}, **options})


async def outcomes(at: Routed, count: int) -> dict[str, float]:
    """The outcomes of shadow requests, once there are so many."""
    names = ("same", "different", "dropped", "failed", "not_comparable", "no_replica")

    async def read() -> dict[str, float]:
        return {name: found for name in names if (found := await at.metric("shadows_total", outcome=name))}

    async with asyncio.timeout(60):
        while sum((found := await read()).values()) < count:
            await asyncio.sleep(0.01)
    return found


async def test_a_candidate_answers_copies_that_no_client_sees() -> None:
    """Clients get the others' answers alone; the candidate and the same replica get the request again, not streamed."""
    async with replicas(chats("abc"), chats("abc")) as (main, canary), shadowed([main, canary]) as at:
        for stream in (False, True):
            async with at.post(body(stream=stream, stream_options={}), CHAT, headers={"x-request-id": "r1"}) as answer:
                assert answer.status == 200 and await answer.read()
        assert await outcomes(at, 2) == {"same": 2.0}
        assert (main.works, canary.works) == (4, 2)
        for _, path, headers, sent in canary.asked:
            assert path == CHAT and headers["x-request-id"] == "r1-shadow"
            assert json.loads(sent) == copied(body())
        assert await at.metric("rolled_back") == 0


async def test_copies_leave_nothing_in_caches() -> None:
    """They come later than the request that they copy: what was invalidated meanwhile is not stored again, and nothing
    lives longer for them."""
    sent = body(kv_transfer_params={"tags": ["manual"], "ttl": "1m", "renew": True})
    async with replicas(chats("abc"), chats("abc")) as (main, canary), shadowed([main, canary]) as at:
        assert await at.status(sent, CHAT) == 200
        assert await outcomes(at, 1) == {"same": 1.0}
        assert [json.loads(each) for *_, each in (*main.asked, *canary.asked)] == [sent, copied(sent), copied(sent)]


@pytest.mark.parametrize("path", ["/hotspan/cache/invalidate", "/hotspan/cache/clear", "/hotspan/keys/shred"])
async def test_an_invalidation_withdraws_copies(path: str) -> None:
    """Before it is acknowledged copies that wait are dropped and those under way end; later requests are copied."""
    hangs = asyncio.Event()

    async def answer(request: web.Request, sent: bytes) -> web.StreamResponse:
        if request.path != CHAT:
            return web.json_response({"is_durable": True})
        if json.loads(sent).get("kv_transfer_params", {}).get("no_store"):
            await hangs.wait()
        return await chats("abc")(request, sent)

    async with replicas(answer, answer) as (main, canary), shadowed([main, canary], shadow_in_flight=1) as at:
        for number in range(3):  # one copy is under way, two wait
            assert await at.status(body(user=str(number)), CHAT) == 200
        await until_async(lambda: canary.works == 1)
        before = [len(fake.asked) for fake in (main, canary)]
        assert await at.status({"tenant": "a"}, path) == 200
        assert await outcomes(at, 3) == {"dropped": 3.0}
        hangs.set()
        assert [len(fake.asked) for fake in (main, canary)] == [count + 1 for count in before]
        assert await at.status(body(), CHAT) == 200
        assert await outcomes(at, 4) == {"dropped": 3.0, "same": 1.0}


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("path", ["/hotspan/cache/invalidate", "/hotspan/cache/clear", "/hotspan/keys/shred"])
async def test_no_copy_is_made_of_a_request_from_before_an_invalidation(path: str, is_late: bool) -> None:
    """Also if its answer had not begun, whether it came before the invalidation or during it (is_late)."""
    go, done, began, withdraws = (asyncio.Event() for _ in range(4))

    async def answer(request: web.Request, sent: bytes) -> web.StreamResponse:
        if request.path != CHAT:
            withdraws.set()
            await done.wait()
            return web.json_response({"is_durable": True})
        began.set()
        await go.wait()
        return await chats("abc")(request, sent)

    async with replicas(answer, answer) as (main, canary), shadowed([main, canary]) as at:
        tasks = [lambda: at.status(body(), CHAT), lambda: at.status({"tenant": "a"}, path)]
        events = [began, withdraws]
        running = []
        for begin, event in (
            reversed([*zip(tasks, events, strict=True)]) if is_late else zip(tasks, events, strict=True)
        ):
            running.append(asyncio.create_task(begin()))
            await event.wait()
        if is_late:
            go.set()
            assert await running[1] == 200
        done.set()
        assert await running[not is_late] == 200
        go.set()
        assert await asyncio.gather(*running) == [200, 200]
        assert await outcomes(at, 1) == {"dropped": 1.0}
        assert await at.status(body(), CHAT) == 200 and await outcomes(at, 2) == {"dropped": 1.0, "same": 1.0}
        assert [path for _, path, *_ in canary.asked].count(CHAT) == 1


async def test_what_has_no_prompt_is_not_comparable() -> None:
    """It is no copy that was dropped, whatever is invalidated."""
    async with replicas(chats("abc"), chats("abc")) as (main, canary), shadowed([main, canary]) as at:
        async with at.client.get(f"{at.url}/v1/responses/resp_1") as answer:
            await answer.read()
        assert await outcomes(at, 1) == {"not_comparable": 1.0}


async def test_a_candidate_that_drifts_is_rolled_back(caplog: pytest.LogCaptureFixture) -> None:
    """It gets no request any more, of its share of the split neither; metric, log and admin say so; a reset ends it."""
    split = {"shares": {"canary": 0.5}}
    async with replicas(chats("abc"), chats("abd")) as (main, canary), shadowed([main, canary], **split) as at:
        sent = 0
        with caplog.at_level(logging.ERROR):
            async with asyncio.timeout(60):
                while not await at.metric("rolled_back", group="canary"):
                    assert await at.status(body(user=str(sent)), CHAT, headers={"x-session-id": str(sent)}) == 200
                    sent += 1
        assert "canary_rolled_back group=canary" in caplog.text
        assert await at.metric("shadow_drift_low", group="canary") > 0.01
        works = canary.works
        for number in range(20):
            assert await at.status(body(), CHAT, headers={"x-session-id": f"after {number}"}) == 200
        assert canary.works == works
        async with at.client.get(at.url + "/router/canary") as answer:
            (group,) = (await answer.json())["groups"]
        assert group["is_rolled_back"] and group["different"] == group["compared"] > 5 and group["noise"] == 0
        assert await at.status({"group": "x"}, "/router/canary/reset") == 404
        assert await at.status({"group": "canary"}, "/router/canary/reset") == 200
        canary.answer = chats("abc")
        await until_async(lambda: canary.url in at.router.fleet.up)
        assert await at.metric("rolled_back") == 0
        await at.status(body(), CHAT, headers={"x-session-id": "0"})
        for number in range(20):
            await at.status(body(), CHAT, headers={"x-session-id": f"again {number}"})
        assert canary.works > works


async def test_noise_is_not_drift() -> None:
    """A candidate that differs as often as the replicas differ from themselves stays."""
    main, candidate = chats("a", "b", "c"), chats("b", "a", "c")
    async with replicas(main, candidate) as fakes, shadowed(fakes, shadow_in_flight=1) as at:
        for number in range(15):
            assert await at.status(body(), CHAT) == 200
            await until_async(lambda count=number: at.router.shadows.shown()[0]["compared"] > count)
        (group,) = at.router.shadows.shown()
        assert group["noise"] > 10 and group["different"] > 10 and not group["is_rolled_back"]


async def test_a_candidate_that_hangs_costs_clients_nothing() -> None:
    """Clients are answered; copies wait in a queue that is bounded, and what finds it full is dropped and counted."""
    async with replicas(chats("abc"), hang) as fakes, shadowed(fakes, shadow_in_flight=2) as at:
        for _ in range(80):
            assert await at.status(body(), CHAT) == 200
        assert await outcomes(at, 14) == {"dropped": 14.0}, "80, less 64 in the queue and 2 at the candidate"


@pytest.mark.parametrize(
    "sent, path",
    [
        (body(temperature=0.7), CHAT),
        ({"messages": []}, CHAT),
        (body(n=2), CHAT),
        (body(use_beam_search=True), CHAT),
        (body(kv_transfer_params="odd"), CHAT),
        ({"prompt": ["a", "b"], "temperature": 0}, "/v1/completions"),
        ({"input": "a", "temperature": 0}, "/v1/responses"),
        (body(user="x" * 300_000), CHAT),
    ],
)
async def test_what_can_not_be_compared_is_not_copied(sent: dict[str, Any], path: str) -> None:
    """Sampled answers, several answers, other routes and large bodies go to nobody else."""
    async with replicas(chats("abc"), chats("abc")) as (main, canary), shadowed([main, canary]) as at:
        assert await at.status(sent, path) == 200
        assert await outcomes(at, 1) == {"not_comparable": 1.0}
        assert (main.works, canary.works) == (1, 0)


async def test_failures_of_a_candidate_are_counted_and_not_compared() -> None:
    """A candidate that refuses or is down says nothing of drift; a client's error is not copied."""
    async with replicas(chats("abc"), say(500)) as (main, canary), shadowed([main, canary]) as at:
        assert await at.status(body(), CHAT) == 200
        assert await outcomes(at, 1) == {"failed": 1.0}
        canary.ping = (503, {})
        await until_async(lambda: canary.url not in at.router.fleet.up)
        assert await at.status(body(), CHAT) == 200
        assert await outcomes(at, 2) == {"failed": 1.0, "no_replica": 1.0}
        main.answer = say(400)
        assert await at.status(body(), CHAT) == 400
        assert at.router.shadows.shown()[0]["compared"] == 0


async def test_a_share_of_the_requests_is_copied() -> None:
    """--shadow 30% copies about so many, drawn request by request."""
    share = {"canary": 0.3}
    async with replicas(chats("abc"), chats("abc")) as (main, canary), shadowed([main, canary], shadow=share) as at:
        for _ in range(40):
            await at.status(body(), CHAT)
        await until_async(lambda: main.works == 40 + canary.works)
        assert 5 <= canary.works <= 20


async def test_two_candidates_have_a_share_each_and_are_not_compared_with_each_other() -> None:
    """Each group gets copies by its own share, of what no candidate answered: one that drifts does not say that the
    other one does."""
    async with replicas(chats("good"), chats("bad"), chats("good")) as (main, bad, good):
        groups = {bad.url: "bad", good.url: "good"}
        shares = {"shadow": {"bad": 1.0, "good": 1.0}, "shares": {"bad": 0.5}, "max_drift": 1.0}
        async with routed([main, bad, good], groups, **shares) as at:
            for number in range(20):
                await at.status(body(), CHAT, headers={"x-session-id": str(number)})
            answered = sum("-shadow" not in headers["x-request-id"] for _, _, headers, _ in main.asked)
            assert 0 < answered < 20
            assert await outcomes(at, 2 * answered) == {"same": answered, "different": answered}
            by_group = {each["group"]: each for each in at.router.shadows.shown()}
            assert by_group["bad"]["different"] == answered == by_group["good"]["compared"]
            assert by_group["good"]["different"] == 0


async def test_the_replicas_of_a_candidate_take_turns() -> None:
    """Copies go to all of them, not to the first one alone."""
    async with replicas(*[chats("abc")] * 3) as (main, one, other):
        groups = {one.url: "canary", other.url: "canary"}
        async with routed([main, one, other], groups, shadow={"canary": 1.0}) as at:
            for _ in range(20):
                await at.status(body(), CHAT)
            await outcomes(at, 20)
            assert one.works and other.works


async def test_waiting_copies_take_no_more_memory_than_their_requests() -> None:
    """They are kept as text: objects made of a body can be 20 times as large. One that can't be written is no copy."""
    async with replicas(chats("abc"), hang) as fakes, shadowed(fakes, shadow_in_flight=1) as at:
        sent = body(tools=[{}] * 30_000)
        for _ in range(2):
            assert await at.status(sent, CHAT) == 200
        waiting = at.router.shadows._queue
        await until_async(lambda: waiting.qsize() == 1)
        assert json.loads(waiting.get_nowait().body) == copied(sent)
        deep: Any = []
        for _ in range(300):
            deep = [deep]
        assert await at.status(body(x=deep), CHAT) == 200
        assert await outcomes(at, 1) == {"not_comparable": 1.0}


def test_settings_that_do_not_fit() -> None:
    """A group that no replica is in, and one without any other replica to be compared with."""
    with pytest.raises(ConfigError, match="--shadow canary: no replica is in that group"):
        RouterSettings(replicas=(Replica("http://a"),), shadow={"canary": 0.1})
    with pytest.raises(ConfigError, match="no other replica answers"):
        RouterSettings(replicas=(Replica("http://a", "canary"),), shadow={"canary": 0.1})
    both = (Replica("http://a", "a"), Replica("http://b", "b"))
    for more in ({"shadow": {"a": 0.1, "b": 0.1}, "shares": {"a": 0.5, "b": 0.5}}, {"shares": {"a": 1.0}}):
        with pytest.raises(ConfigError, match="no other replica answers"):
            RouterSettings(**{"replicas": both, "shadow": {"a": 0.1}} | more)


# -- evidence ----------------------------------------------------------------------------------------------------------


def drawn(seed: int, drift: float, noise: float, count: int, limit: float) -> bool:
    """Whether a candidate is ever rolled back within so many comparisons, which are looked at one by one."""
    rng, evidence = random.Random(seed), Evidence()
    for _ in range(count):
        differs = rng.random() < drift or rng.random() < noise
        evidence.note(differs=differs, control_differs=rng.random() < noise)
        if (differs or evidence.compared == count) and evidence.is_above(limit):
            return True
    return False


def test_identical_servers_are_seldom_rolled_back_however_long_one_looks() -> None:
    """With 5 % noise on both sides, at most 5 of 100 runs of 2,000 comparisons are; without noise none."""
    assert sum(drawn(seed, 0.0, 0.05, 2000, 0.01) for seed in range(100)) <= 5
    assert not any(drawn(seed, 0.0, 0.0, 2000, 0.01) for seed in range(10))


def test_drift_at_the_limit_is_within_it() -> None:
    """A drift of just the limit is rolled back in at most 5 of 100 runs."""
    assert sum(drawn(seed, 0.02, 0.0, 2000, 0.02) for seed in range(100)) <= 5


def test_drift_above_the_limit_is_found() -> None:
    """5 % against a limit of 1 % is found within 500 comparisons in at least 95 of 100 runs."""
    assert sum(drawn(seed, 0.05, 0.0, 500, 0.01) for seed in range(100)) >= 95


@given(st.integers(0, 300), st.integers(0, 300), st.integers(0, 300))
def test_the_lower_limit_is_what_the_evidence_is_above(worse: int, equal: int, better: int) -> None:
    """It lies below the estimate; any limit below it is exceeded, none above it."""
    evidence = Evidence()
    evidence.worse, evidence.equal, evidence.better = worse, equal, better
    low = evidence.low
    assert -1 <= low <= max(evidence.drift, -1) + 1e-6
    assert evidence.is_above(low - 1e-4) and not evidence.is_above(low + 1e-4)


# -- answers -----------------------------------------------------------------------------------------------------------


def test_streams_and_whole_answers_say_the_same() -> None:
    """Text, reasoning, tool calls and the end of an answer are compared, however it was sent."""
    whole = {
        "message": {
            "content": "It is",
            "reasoning": "hm, well",
            "tool_calls": [{"function": {"name": "find", "arguments": '{"a": 1}'}}],
        },
        "finish_reason": "tool_calls",
    }
    deltas: list[dict[str, Any]] = [
        {"reasoning": "hm, "},
        {"reasoning_content": "well", "content": ""},
        {"content": "It"},
        {"content": " is"},
        {"tool_calls": [{"index": 0, "function": {"name": "find", "arguments": '{"a"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]},
    ]
    choices = [*({"delta": delta} for delta in deltas), {"delta": {}, "finish_reason": "tool_calls"}]
    stream = b"".join(b"data: " + json.dumps({"choices": [each]}).encode() + b"\n\n" for each in choices)
    found = answer_of(stream + b"data: [DONE]\n\n", is_stream=True)
    assert found is not None and found == answer_of(json.dumps({"choices": [whole]}).encode(), is_stream=False)
    plain = {"choices": [{"text": "It is", "finish_reason": "stop"}]}
    assert answer_of(json.dumps(plain).encode(), is_stream=False) == {"text": "It is", "end": "stop"}


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"choices": [{"text": "cut"}]}', b'{"choices": 3}', b"null"])
def test_what_is_no_answer_says_nothing(content: bytes) -> None:
    """Broken JSON, other shapes and answers without an end are not compared."""
    assert answer_of(content, is_stream=False) is None
