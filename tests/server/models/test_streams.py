"""Answers while they are made: no part waits for the next, and a client that leaves or lags is felt by the model."""

import asyncio
from pathlib import Path

import httpx

from kit.waiting import until_async
from tests.server.lmi.serving import post

from .fake_child import PART
from .rig import store


async def test_parts_come_as_they_are_made(tmp_path: Path) -> None:
    """Each event of a stream is there before the next is made."""
    (paced := tmp_path / "paced").touch()
    async with store("alpha") as running:
        body = {"do": "stream", "steps": 10, "paced": str(paced)}
        text = ""
        async with running.http.stream("POST", "/predictions/alpha", json=body) as reply:
            assert reply.headers["content-type"].startswith("text/event-stream")
            async for part in reply.aiter_text():
                text += part
                paced.write_text("." * text.count("\n\n"))
        assert text.count("data: ") == 11 and text.endswith("data: [DONE]\n\n")


async def test_hanging_up_ends_the_generation() -> None:
    """When a client goes in the middle of a stream, its model stops at once."""
    async with store("alpha") as running:
        body = {"do": "stream", "steps": 10_000}
        async with running.http.stream("POST", "/predictions/alpha", json=body) as reply:
            await anext(reply.aiter_raw())
            assert running.front.admission.in_flight == 1
        await until_async(lambda: "alpha stream aborted" in running.book)
        await until_async(lambda: running.front.admission.in_flight == 0)


async def test_a_client_that_does_not_read_holds_its_model_back() -> None:
    """What nobody reads is not made: a model writes little more than the buffers on the way can take."""
    async with store("alpha") as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port, limit=4096)
        parts = 4000
        writer.write(post({"do": "flood", "parts": parts}, "/predictions/alpha"))
        made = -1
        while made != (made := len(running.book)) or made < 5:
            await asyncio.sleep(0.3)
        assert made < parts / 4
        size, end = 0, b""
        while not end.endswith(b"0\r\n\r\n"):
            content = await reader.read(1 << 20)
            assert content
            size, end = size + len(content), (end + content)[-5:]
        assert size >= parts * len(PART) and len(running.book) == parts + 1
        writer.close()


async def test_a_stream_that_breaks_says_so() -> None:
    """A model that dies in the middle of a stream leaves an error as its last event; before it, a 503."""
    async with store("alpha") as running:
        text = ""
        body = {"do": "stream", "steps": 10_000}
        async with running.http.stream("POST", "/predictions/alpha", json=body) as reply:
            async for part in reply.aiter_text():
                if not text:
                    with_error = asyncio.create_task(running.ask("/predictions/alpha", do="die"))
                text += part
        assert '"error"' in text and text.endswith("data: [DONE]\n\n") and "alpha stopped" in text
        dead = await with_error
        assert dead.status_code == 503 and dead.headers["retry-after"]


async def test_many_streams_at_once() -> None:
    """A hundred streams of two models run beside each other, each with its own answer."""
    async with (
        store("alpha", "beta") as running,
        httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{running.port}", timeout=60, limits=httpx.Limits(max_connections=None)
        ) as http,
    ):

        async def ask(number: int) -> str:
            model = ("alpha", "beta")[number % 2]
            reply = await http.post(
                f"/predictions/{model}", json={"do": "stream", "steps": number + 1, "pause_s": 0.001}
            )
            return reply.text

        texts = await asyncio.gather(*(ask(number) for number in range(100)))
        assert [text.count("data: ") for text in texts] == [number + 2 for number in range(100)]
