"""Requests that end early: hang-ups, deadlines, full queues, a server that stops; over real sockets where needed.

All in simulated time: what ends first is decided by what is said here, and not by the machine.
"""

import asyncio
import contextlib
import json
from typing import Any

import pytest

from hotspan.http.errors import HttpError
from hotspan.server.admission import Admission
from hotspan.server.exchange import AppExchange
from hotspan.server.principal import Principal, asking
from hotspan.testing.clock import SimulatedClock
from kit.waiting import until_async
from tests.bench.simulated import in_simulated_time

from .fake_engine import FakeEngine, Step
from .serving import client, front, invoke, post, rows, serving_a_file, split, sse

ENDLESS = (*[Step(((1, "a"),), "a")] * 100_000, Step((), "", "length"))


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"inputs": "Say"}, "/invocations"),
        ({"inputs": "Say"}, "/predictions/lmi"),
        ({"inputs": "Say", "stream": True}, "/invocations"),
        ({"messages": [], "stream": True}, "/invocations"),
        ({"prompt": "Say"}, "/v1/completions"),
        ({"prompt": "Say", "stream": True}, "/v1/completions"),
    ],
)
@in_simulated_time
async def test_a_hang_up_aborts(body: Any, path: str) -> None:
    """A client that hangs up ends its generation at once, streaming or not, on each route."""
    engine = FakeEngine(ENDLESS, delay_s=0.005)
    app = front(engine)
    async with serving_a_file(app) as file:
        reader, writer = await asyncio.open_unix_connection(file)
        writer.write(post(body, path))
        if body.get("stream"):
            await reader.readuntil(b"\r\n\r\n")
        await until_async(lambda: engine.running == 1)
        writer.close()
        await until_async(lambda: engine.aborted == 1 and engine.running == 0, within_s=0.5)
        await until_async(lambda: app.admission.in_flight == 0, within_s=0.5)


@pytest.mark.parametrize("accept", [b"application/jsonlines", b"text/event-stream"])
@in_simulated_time
async def test_a_slow_reader_slows_the_engine(accept: bytes) -> None:
    """Rows are sent as they are made, and not piled up: the conversion takes no more than the client reads."""
    engine = FakeEngine(ENDLESS)
    made = 0

    async def slow_send(message: Any) -> None:
        nonlocal made
        made += 1
        await asyncio.sleep(0.001)

    inbox: asyncio.Queue[Any] = asyncio.Queue()
    body = json.dumps({"inputs": "Say", "stream": True}).encode()
    inbox.put_nowait({"type": "http.request", "body": body})
    headers = [(b"content-type", b"application/json"), (b"accept", accept)]
    scope = {"type": "http", "method": "POST", "path": "/invocations", "headers": headers, "query_string": b""}
    task = asyncio.create_task(front(engine)(scope, inbox.get, slow_send))
    await until_async(lambda: made > 50)
    assert engine.running == 1 and engine.stepped <= made + 5
    inbox.put_nowait({"type": "http.disconnect"})
    await asyncio.wait_for(task, 5)
    await until_async(lambda: engine.aborted == 1 and engine.running == 0)


@pytest.mark.parametrize("path", ["/invocations", "/v1/completions"])
@in_simulated_time
async def test_overdue_before_the_first_byte(path: str) -> None:
    """An answer that does not begin in time is a 504, and the engine stops."""
    engine = FakeEngine(delay_s=30)
    answer = await invoke(front(engine, predict_timeout_s=0.05), {"prompt": "Say", "stream": True}, path)
    assert answer.status_code == 504 and answer.json()["error"]["type"] == "GatewayTimeoutError"
    assert engine.aborted == 1 and engine.running == 0


@pytest.mark.parametrize("body", [{"inputs": "Say"}, {"prompt": "Say"}])
@in_simulated_time
async def test_overdue_in_a_stream(body: Any) -> None:
    """An answer that does not end in time ends with the error as its last event, and the engine stops."""
    engine = FakeEngine(ENDLESS, delay_s=0.001)
    answer = await invoke(front(engine, predict_timeout_s=0.1), body | {"stream": True})
    told = rows(answer) if "inputs" in body else [json.loads(event) for event in sse(answer)[:-1]]
    assert answer.status_code == 200 and len(told) > 2
    assert told[-1]["error"]["code"] == 504 and "predict_timeout" in told[-1]["error"]["message"]
    await until_async(lambda: engine.aborted == 1 and engine.running == 0)


@pytest.mark.parametrize(("compat", "status"), [("none", 429), ("lmi", 503)])
@in_simulated_time
async def test_a_full_queue(compat: str, status: int) -> None:
    """As many requests as places; one more is refused with a time to come back, and there is room again after."""
    engine = FakeEngine(ENDLESS, delay_s=0.01)
    app = front(engine, job_queue_size=2, compat=compat)
    async with client(app) as http:
        running = [asyncio.create_task(http.post("/invocations", json={"inputs": "Say"})) for _ in range(2)]
        await until_async(lambda: engine.running == 2)
        refused = await http.post("/invocations", json={"inputs": "Say"})
        assert refused.status_code == refused.json()["error"]["code"] == status
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert (await http.get("/ping")).status_code == (await http.get("/health")).status_code == 200
        for task in running:
            task.cancel()
        await until_async(lambda: app.admission.in_flight == 0)
        engine.steps, engine.delay_s = engine.steps[-1:], 0
        assert (await http.post("/invocations", json={"inputs": "Say"})).status_code == 200


def exchange() -> AppExchange:
    """A request without a body, whose client stays."""
    coming: asyncio.Queue[Any] = asyncio.Queue()
    coming.put_nowait({"type": "http.request", "body": b"", "more_body": False})
    return AppExchange({"type": "http", "headers": []}, coming.get, asyncio.Queue[Any]().put, is_lmi=False)


@in_simulated_time
async def test_no_principal_takes_every_place() -> None:
    """A principal with more requests than its share is refused while places are left, which others then get."""
    admission = Admission(*split(job_queue_size=8, principals=4))  # two tenants, the administrator, no key
    ending = asyncio.Event()

    async def work() -> None:
        await ending.wait()

    def ask(tenant: str) -> asyncio.Task[None]:
        with asking(Principal(tenant, has_key=True)):
            return asyncio.create_task(admission.run(exchange(), lambda body: work()))

    noisy = [ask("noisy") for _ in range(20)]
    await until_async(lambda: sum(task.done() for task in noisy) == 14)
    assert {task.exception().status for task in noisy if task.done()} == {429}  # type: ignore[union-attr]
    quiet = ask("quiet")
    await until_async(lambda: admission.in_flight == 7)
    assert not quiet.done()
    ending.set()
    await asyncio.gather(quiet, *(task for task in noisy if not task.done()))
    assert admission.in_flight == 0
    await asyncio.gather(*(ask("noisy") for _ in range(6)))


@in_simulated_time
async def test_retry_after_is_measured() -> None:
    """A client that is refused is told to come back when those before it are expected to have ended."""
    clock = SimulatedClock()
    admission = Admission(*split(job_queue_size=1), clock)

    async def work(seconds: float) -> None:
        clock.advance(seconds)

    async def refused() -> None:
        with pytest.raises(HttpError) as error:
            await admission.run(exchange(), lambda body: work(0))
        told.append(error.value.retry_s)

    told: list[int | None] = []
    for seconds in (0.01, 20.0, 1000.0):
        for _ in range(60):
            await admission.run(exchange(), lambda body, seconds=seconds: work(seconds))
        await admission.run(exchange(), lambda body: refused())
    assert told == [1, 20, 60]


@in_simulated_time
async def test_drain() -> None:
    """A server that stops refuses what is new, lets what is short end, and ends what is long in time with an error."""
    engine = FakeEngine((*[Step(((1, "a"),), "a")] * 20, Step((), "", "length")), delay_s=0.01)
    app = front(engine)
    body = {"inputs": "Say", "stream": True}
    async with client(app) as http:
        short = asyncio.create_task(http.post("/invocations", json=body))
        await until_async(lambda: engine.running == 1)
        engine.steps = ENDLESS
        long = asyncio.create_task(http.post("/invocations", json=body))
        await until_async(lambda: engine.running == 2)
        app.admission.drain()
        new = await http.post("/v1/completions", json={"prompt": "Say"})
        assert new.status_code == 503 and new.headers["retry-after"] == "1"
        await asyncio.wait_for(app.admission.drained(0.6), 0.7)
        assert rows(await short)[-1]["generated_text"] == "a" * 20
        assert rows(await long)[-1]["error"]["code"] == 503
        assert engine.running == app.admission.in_flight == 0


@in_simulated_time
async def test_drained_at_once() -> None:
    """A server without requests stops without waiting."""
    app = front(FakeEngine())
    app.admission.drain()
    await asyncio.wait_for(app.admission.drained(30), 0.5)


# -- bodies ------------------------------------------------------------------------------------------------------------


async def raw(path: str, *parts: bytes, pause_s: float = 0.0) -> bytes:
    """What is answered to these bytes; the client reads while it sends."""
    reader, writer = await asyncio.open_unix_connection(path)

    async def send() -> None:
        with contextlib.suppress(ConnectionError):
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(pause_s)

    sending = asyncio.create_task(send())
    try:
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        return head + await reader.readexactly(size)
    finally:
        sending.cancel()
        writer.close()


HEAD = b"POST /invocations HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\n"


@in_simulated_time
async def test_a_body_that_is_announced_too_large() -> None:
    """It is refused before a byte of it is read: nobody is told to go on."""
    engine = FakeEngine()
    async with serving_a_file(front(engine, max_request_bytes=1000)) as path:
        answer = await raw(path, HEAD + b"content-length: 1001\r\nexpect: 100-continue\r\n\r\n")
        fits = await raw(path, post({"inputs": "a" * 986}))  # 1,000 bytes
    assert answer.startswith(b"HTTP/1.1 413 ") and b"larger than" in answer
    assert fits.startswith(b"HTTP/1.1 200 ") and len(engine.seen) == 1


@in_simulated_time
async def test_a_body_that_turns_out_too_large() -> None:
    """Chunks are counted while they come, and no more of them is kept than may be."""
    engine = FakeEngine()
    app = front(engine, max_request_bytes=1000)
    chunk = b"80\r\n" + b" " * 128 + b"\r\n"
    async with serving_a_file(app) as path:
        answer = await raw(path, HEAD + b"transfer-encoding: chunked\r\n\r\n", *[chunk] * 9, pause_s=0.01)
    assert answer.startswith(b"HTTP/1.1 413 ") and not engine.seen


@in_simulated_time
async def test_all_bodies_together() -> None:
    """A client's bodies that are held have a limit together, which ends with its requests."""
    engine = FakeEngine(ENDLESS, delay_s=0.01)
    app = front(engine, held_bytes=1000)
    async with client(app) as http:
        held = asyncio.create_task(http.post("/invocations", json={"inputs": "a" * 700}))
        await until_async(lambda: engine.running == 1)
        refused = await http.post("/invocations", json={"inputs": "a" * 700})
        assert refused.status_code == 429 and "try again" in refused.json()["error"]["message"]
        held.cancel()
        await until_async(lambda: engine.running == 0)
        engine.steps = engine.steps[-1:]
        assert (await http.post("/invocations", json={"inputs": "a" * 700})).status_code == 200


@pytest.mark.parametrize(("stall_s", "rate", "pause_s"), [(0.1, 1.0, 3.0), (0.2, 1e4, 0.02)])
@in_simulated_time
async def test_a_body_that_comes_too_slowly(stall_s: float, rate: float, pause_s: float) -> None:
    """One that stalls, and one that drips just fast enough not to, are given up, and take no place in the queue."""
    engine = FakeEngine()
    app = front(engine, stall_s=stall_s, least_rate=rate, job_queue_size=1)
    async with serving_a_file(app) as path:
        begun = HEAD + b"content-length: 500\r\n\r\n" + b" " * 50
        slow = asyncio.create_task(raw(path, begun, *[b" "] * 200, pause_s=pause_s))
        await asyncio.sleep(0.05)
        assert (await raw(path, post({"inputs": "Say"}))).startswith(b"HTTP/1.1 200 ")
        answer = await asyncio.wait_for(slow, 0.8)
    assert answer.startswith(b"HTTP/1.1 408 ")


@in_simulated_time
async def test_a_body_that_never_ends_for_its_client_is_gone() -> None:
    """A client that hangs up in the middle of its body leaves nothing behind."""
    engine = FakeEngine()
    app = front(engine)
    async with serving_a_file(app) as path:
        _, writer = await asyncio.open_unix_connection(path)
        writer.write(HEAD + b"content-length: 500\r\n\r\n{")
        await until_async(lambda: app.admission._bodies._held.used == 1)
        writer.close()
        await until_async(lambda: app.admission._bodies._held.used == 0, within_s=0.5)
        assert not engine.seen


def test_settings_are_the_pages() -> None:
    """The limits that users know are the defaults."""
    settings, limits = split()
    assert (settings.job_queue_size, settings.predict_timeout_s, settings.session_expiry_s) == (1000, 240, 1200)
    assert limits.max_request_bytes == settings.max_request_bytes == 64 * 2**20
