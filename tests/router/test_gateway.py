"""The router on real sockets: what goes through it, byte for byte and header for header."""

import asyncio
import gzip
import json
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from hotspan.core.errors import ConfigError
from hotspan.http.connections import HttpLimits
from hotspan.router.settings import Replica
from hotspan.router.types import Strategy
from kit.waiting import until_async

from .rig import Held, Routed, die, replicas, routed, say, say_ok


async def test_bodies_and_heads_go_through() -> None:
    """A replica gets the body and the client's headers as they were sent, and where it came from; hops keep theirs."""
    async with replicas(say_ok) as (fake,), routed([fake]) as at:
        raw = b'{"prompt":  "h\\u00e9llo",\n "x": 1}'
        headers = {
            "content-type": "application/json",
            "authorization": "Bearer k",
            "x-amzn-sagemaker-adapter-identifier": "law",
            "x-forwarded-for": "10.9.8.7",
            "te": "trailers",
            "proxy-authorization": "Basic x",
            "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "x-request-id": "mine-1",
        }
        async with at.client.post(
            URL(at.url + "/v1/completions?a=%2F&b=1", encoded=True), data=raw, headers=headers
        ) as answer:
            assert answer.status == 200
            assert answer.headers["x-request-id"] == "mine-1"
            assert "x-hotspan-replica" not in answer.headers
        ((method, path, got, body),) = fake.asked
        assert (method, path, body) == ("POST", "/v1/completions?a=%2F&b=1", raw)
        assert got["authorization"] == "Bearer k" and got["x-amzn-sagemaker-adapter-identifier"] == "law"
        assert got["x-forwarded-for"] == "10.9.8.7, 127.0.0.1" and got["x-forwarded-proto"] == "http"
        assert got["x-forwarded-host"] == at.url.removeprefix("http://") and got["x-request-id"] == "mine-1"
        assert got["traceparent"] == headers["traceparent"]
        assert "te" not in got and "proxy-authorization" not in got
        assert got["host"] == fake.url.removeprefix("http://")


async def test_the_router_writes_nothing_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither a prompt nor a key is in a file or in the log, whether a replica answers or none does."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    caplog.set_level("DEBUG")
    marker, key = "zanzibarquillfeather", "sk-0123456789-of-a-client"
    body = {"model": "m", "prompt": marker * 2000, "kv_transfer_params": {"tags": [marker]}}
    headers = {"authorization": f"Bearer {key}"}
    async with replicas(say_ok, die) as fakes, routed(fakes) as at:
        assert [await at.status(body, headers=headers) for _ in range(6)] == [200] * 6
    async with replicas(die, die) as fakes, routed(fakes) as at:
        assert await at.status(body, headers=headers) == 502
    assert not list(tmp_path.rglob("*"))
    assert marker not in caplog.text and key not in caplog.text


async def test_an_id_is_made_where_none_was_sent() -> None:
    """A request without an id gets one, which replica and client both see."""
    async with replicas(say_ok) as (fake,), routed([fake]) as at, at.post() as answer:
        assert answer.headers["x-request-id"] == fake.asked[0][2]["x-request-id"] != ""


async def test_a_stream_is_not_held_back() -> None:
    """Every chunk of a stream arrives before the next is made, and the bytes are the same, whatever they are."""
    chunks = [b'data: {"n": %d}\n\n' % n for n in range(8)] + [
        b"data: h\xc3",
        b"\xa9\n\n",
        b"\x00\xff half",
        b"data: [DONE]\n\n",
    ]
    ready = asyncio.Event()

    async def stream(request: web.Request, body: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream", "x-of-replica": "1"})
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
            await asyncio.wait_for(ready.wait(), 60)
            ready.clear()
        return response

    async with replicas(stream) as (fake,), routed([fake]) as at, at.post({"prompt": "x", "stream": True}) as answer:
        assert answer.headers["content-type"] == "text/event-stream" and answer.headers["x-of-replica"] == "1"
        for chunk in chunks:
            assert await answer.content.readany() == chunk  # the next one is not made before this one was read
            ready.set()
        assert await answer.content.readany() == b""


async def test_compressed_answers_stay_so() -> None:
    """The router neither packs nor unpacks what a replica sends."""
    packed = gzip.compress(b"text" * 100)

    async def answer(request: web.Request, body: bytes) -> web.StreamResponse:
        return web.Response(body=packed, headers={"content-encoding": "gzip"})

    async with replicas(answer) as (fake,), routed([fake]) as at, at.post() as got:
        assert await got.read() == packed and got.headers["content-encoding"] == "gzip"


async def test_large_prompts_go_through_whole() -> None:
    """220 KB and 3 MB of prompt arrive as they were sent; what is over the limit is refused with 413."""
    async with replicas(say_ok) as (fake,), routed([fake], max_request_bytes=4_000_000) as at:
        for size in (220_000, 3_000_000):
            body = json.dumps({"prompt": "word " * (size // 5)}).encode()
            async with at.client.post(at.url + "/v1/completions", data=body) as answer:
                assert answer.status == 200
            assert fake.asked[-1][3] == body
        async with at.client.post(at.url + "/v1/completions", data=b"x" * 4_000_001) as answer:
            assert answer.status == 413
        assert fake.works == 2


async def test_a_prompt_that_no_replica_would_take_is_not_read() -> None:
    """Where all replicas tell how large bodies of text may be, the largest of these holds; sound and lists of texts
    have the router's own limit, and so has everything where one replica does not tell."""
    for limits, status in (((1000, 2000), 413), ((1000, None), 200), ((1000, True), 200)):
        async with replicas(say_ok, say_ok) as fakes:
            for fake, limit in zip(fakes, limits, strict=True):
                fake.ping = (200, {"status": "Healthy", "max_text_bytes": limit})
            async with routed(fakes) as at:
                assert await at.status({"prompt": "a" * 1900}) == 200
                assert await at.status({"prompt": "a" * 2000}) == status
                assert await at.status({"prompt": "a" * 2000}, "/hotspan/cache/prefetch") == status
                assert await at.status({"prompt": "a" * 2000}, "/v1/audio/transcriptions") == 200
                assert await at.status({"each": ["a" * 2000]}, "/hotspan/cache/invalidate") == 200


async def test_statuses_of_clients_and_of_failed_requests_are_handed_on() -> None:
    """400, 404, 429 and 500 come from the replica as they are, once: nothing is tried again."""
    for status in (400, 404, 429, 500):
        async with replicas(say(status, "why"), say(status, "why")) as fakes, routed(fakes) as at:
            async with at.post() as answer:
                assert (answer.status, await answer.text()) == (status, "why")
            assert sum(fake.works for fake in fakes) == 1


async def test_answers_without_a_body_end() -> None:
    """An empty answer, one to HEAD, a 204 and a 304 end at once, and the connection is good for the next request."""

    async def empty(request: web.Request, body: bytes) -> web.StreamResponse:
        return web.Response(status=int(request.query.get("status", "200")))

    async with replicas(empty) as (fake,), routed([fake]) as at, asyncio.timeout(60):
        for method, status in (("POST", 200), ("GET", 200), ("HEAD", 200), ("GET", 204), ("GET", 304), ("POST", 400)):
            async with at.client.request(method, f"{at.url}/v1/completions?status={status}") as answer:
                assert (answer.status, await answer.read()) == (status, b"")
        assert await at.metric("requests_total", outcome="failed") == 0


async def test_hang_up_reaches_the_replica() -> None:
    """A client that goes away, before the first byte or within a stream, ends the request at its replica."""

    async def slow(request: web.Request, body: bytes) -> web.StreamResponse:
        if b"stream" not in body:
            await asyncio.sleep(600)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        while True:
            await response.write(b"data: x\n\n")
            await asyncio.sleep(0.01)

    async with replicas(slow) as (fake,), routed([fake]) as at:
        waits = asyncio.create_task(at.status())
        await until_async(lambda: fake.open == 1)
        waits.cancel()
        await until_async(lambda: fake.hung_up == 1)
        answer = await at.post({"stream": True, "prompt": "x"})
        assert await answer.content.readany()
        answer.close()
        await until_async(lambda: fake.hung_up == 2 and fake.open == at.router.active == 0)
        assert not at.in_flight
        assert await at.metric("requests_total", outcome="gone") == 2
        assert await at.metric("breaker_opened_total") == 0


async def test_broken_streams_do_not_look_whole() -> None:
    """An answer that breaks off after its first byte ends the client's abruptly, and is not tried elsewhere."""
    is_read = asyncio.Event()

    async def breaks(request: web.Request, body: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: half\n\n")
        await is_read.wait()
        assert request.transport is not None
        request.transport.abort()
        return response

    async with replicas(breaks, breaks) as fakes, routed(fakes) as at:
        async with at.post() as answer:
            assert answer.status == 200
            assert await answer.content.readany() == b"data: half\n\n"
            is_read.set()
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.content.readany()
        assert sum(fake.works for fake in fakes) == 1
        assert await at.metric("broken_answers_total") == 1


async def test_own_answers() -> None:
    """/ping and /health say whether a replica is up, /v1/models is what all list, metrics are the router's own."""

    async def models(request: web.Request, body: bytes) -> web.StreamResponse:
        return web.json_response({"data": [{"id": "m"}]})

    async with replicas(models, models) as fakes, routed(fakes) as at:
        for path in ("/ping", "/health"):
            async with at.client.get(at.url + path) as answer:
                assert answer.status == 200 and await answer.json() == {"status": "Healthy"}
        async with at.client.get(at.url + "/v1/models") as answer:
            assert await answer.json() == {"object": "list", "data": [{"id": "m"}]}
        assert [fake.works for fake in fakes] == [1, 1]
        for fake in fakes:
            fake.ping = (500, {})
        await until_async(lambda: not at.router.fleet.up)
        async with at.client.get(at.url + "/ping") as answer:
            assert answer.status == 503
        async with at.post() as answer:
            assert answer.status == 503 and answer.headers["retry-after"] == "1"
            assert (await answer.json())["error"]["code"] == 503


async def test_exposed_answers_name_their_replica() -> None:
    """With --expose, and only then, an answer says where it comes from and what was expected to be cached."""
    async with replicas(say_ok) as (fake,), routed([fake], is_exposing=True) as at:
        for expected in (False, True):
            async with at.post({"prompt": "a long text " * 500}) as answer:
                assert answer.headers["x-hotspan-replica"] == fake.url
                assert (int(answer.headers["x-hotspan-cached-tokens"]) > 1000) is expected


async def test_two_hundred_at_once() -> None:
    """200 streams at a time each get their own bytes, and nothing is left afterwards."""

    async def echo(request: web.Request, body: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        name = json.loads(body)["prompt"].encode()
        for number in range(5):
            await response.write(b"data: %b %d\n\n" % (name, number))
            await asyncio.sleep(0.01)
        return response

    async def one(at: Routed, number: int) -> None:
        async with at.post({"prompt": f"p{number}", "stream": True}) as answer:
            assert await answer.read() == b"".join(b"data: p%d %d\n\n" % (number, part) for part in range(5))

    async with replicas(echo, echo, echo) as fakes, routed(fakes) as at:
        await asyncio.gather(*(one(at, number) for number in range(200)))
        assert not at.in_flight and at.router.active == 0
        assert at.in_flight == 0
        assert all(fake.works > 20 for fake in fakes)  # nobody herds


async def test_usage_is_learnt() -> None:
    """The router learns bytes per token from the end of answers, without touching them."""

    async def answer(request: web.Request, body: bytes) -> web.StreamResponse:
        return web.json_response({"usage": {"prompt_tokens": len(body) // 8, "completion_tokens": 5}})

    async with replicas(answer) as (fake,), routed([fake]) as at:
        before = await at.metric("bytes_per_token")
        for number in range(20):
            assert await at.status({"prompt": f"{number} " + "words " * 1000}) == 200
        assert before == 4 and 4.5 < await at.metric("bytes_per_token") < 8


async def test_slow_bodies_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body that stops coming is answered 408 and takes no place at a replica."""
    async with replicas(say_ok) as (fake,), routed([fake]) as at:
        monkeypatch.setattr(at.router._bodies, "_limits", HttpLimits(stall_s=0.1))
        host, port = at.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\ncontent-length: 100\r\n\r\n{")
        async with asyncio.timeout(60):
            assert b" 408 " in await reader.readline()
        assert fake.works == 0
        writer.close()


async def test_bodies_of_one_key_leave_room_for_others() -> None:
    """Uploads of one key that fill all the memory that it can have: another key's requests are answered."""
    import hashlib

    keys = {hashlib.sha256(key).digest(): "" for key in (b"sk-1", b"sk-2")}
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nauthorization: Bearer sk-1\r\ncontent-length: 100000\r\n\r\n"
    async with replicas(say_ok) as (fake,), routed([fake], keys=keys, held_bytes=4000) as at:
        host, port = at.url.removeprefix("http://").split(":")
        slow = [await asyncio.open_connection(host, int(port)) for _ in range(6)]
        for _, writer in slow:
            writer.write(head + b" " * 900)
        answers = [asyncio.create_task(reader.readline()) for reader, _ in slow]
        async with asyncio.timeout(60):
            for answer in asyncio.as_completed(answers):
                assert b" 429 " in await answer
                break
        assert await at.status({"prompt": "a" * 800}, headers={"authorization": "Bearer sk-2"}) == 200
        for answer in answers:
            answer.cancel()
        for _, writer in slow:
            writer.close()


async def test_keys_are_checked_here_where_they_are_given() -> None:
    """With keys, a request without one is a 401 that reaches no replica; health stays open, the key is handed on."""
    import hashlib

    keys = {hashlib.sha256(b"sk-1").digest(): ""}
    async with replicas(say_ok) as (fake,), routed([fake], keys=keys) as at:
        assert await at.status() == 401
        assert await at.status(headers={"authorization": "Bearer sk-2"}) == 401
        assert fake.works == 0
        assert await at.status(headers={"authorization": "Bearer sk-1"}) == 200
        assert await at.status(headers={"x-api-key": "sk-1"}) == 200
        assert fake.asked[0][2]["authorization"] == "Bearer sk-1"
        async with at.client.get(at.url + "/ping") as answer:
            assert answer.status == 200
        async with at.client.get(at.url + "/hotspan/cache") as answer:
            assert answer.status == 401


async def test_the_threshold_is_the_one_that_was_set() -> None:
    """Under `prefixaware` with a threshold of 2 the third request of the same text goes elsewhere, and no sooner."""
    waits = Held()
    body = {"prompt": "a long text " * 500}
    async with replicas(waits, waits) as fakes, routed(fakes, strategy=Strategy.PREFIXAWARE, threshold=2) as at:
        asking = []
        for number in range(1, 4):
            asking.append(asyncio.create_task(at.status(body)))
            await until_async(lambda number=number: sum(fake.works for fake in fakes) == number)  # type: ignore[misc]
        assert sorted(fake.works for fake in fakes) == [1, 2]
        waits.go.set()
        assert await asyncio.gather(*asking) == [200] * 3


async def test_without_events_it_is_said_so() -> None:
    """A replica without events is not exact, for a reason that the metrics name."""
    async with replicas(say_ok) as (fake,), routed([fake]) as at:
        assert await at.metric("replica_is_exact", replica=fake.url) == 0
        assert await at.metric("events_state", replica=fake.url, reason="no_events") == 1


async def test_events_need_a_model() -> None:
    """Events name tokens: without a tokenizer they are refused, and not silently useless."""
    async with replicas(say_ok) as (fake,):
        behind = (Replica(fake.url, events="tcp://127.0.0.1:5557"),)
        with pytest.raises(ConfigError, match="--model"):
            async with routed([fake], behind=behind):
                pass


async def test_adapters_have_texts_of_their_own() -> None:
    """The same prompt for another adapter, by header or by `model`, is not taken to be cached."""
    body = {"model": "m", "prompt": "a long text " * 500}
    law = {"x-amzn-sagemaker-adapter-identifier": "law"}
    async with replicas(say_ok) as (fake,), routed([fake], is_exposing=True) as at:
        seen = []
        for asked, headers in ((body, {}), (body, {}), (body | {"model": "n"}, {}), (body, law), (body, law)):
            async with at.post(asked, headers=headers) as answer:
                seen.append(int(answer.headers["x-hotspan-cached-tokens"]) > 0)
        assert seen == [False, True, False, False, True]
