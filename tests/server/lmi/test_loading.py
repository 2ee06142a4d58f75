"""What is answered while the model loads, and how the server takes over."""

import asyncio
import json
import urllib.error
import urllib.request

import pytest

from hotspan.http.serving import bind
from hotspan.server.loading import answering_while_loading

from .fake_engine import FakeEngine
from .serving import front


def asked(port: int, path: str) -> tuple[int, object, str | None]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
            return answer.status, json.load(answer), None
    except urllib.error.HTTPError as error:
        return error.code, json.load(error), error.headers["retry-after"]


def test_loading_then_serving() -> None:
    """While the event loop is blocked by the load, everybody is told to wait; then the same socket serves."""
    import uvicorn

    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    with answering_while_loading(listener):
        assert asked(port, "/ping") == (503, {"status": "Loading"}, "5")
        status, body, retry = asked(port, "/v1/models")
        assert status == 503 and retry == "5" and "loading" in body["error"]["message"]  # type: ignore[index]

    async def serve() -> None:
        server = uvicorn.Server(uvicorn.Config(front(FakeEngine()), lifespan="off", log_level="critical"))
        task = asyncio.create_task(server.serve(sockets=[listener]))
        assert await asyncio.to_thread(asked, port, "/ping") == (200, {"status": "Healthy"}, None)
        server.should_exit = True
        await task

    asyncio.run(serve())


def test_a_load_that_fails() -> None:
    """An error of the load passes, and nobody answers after it."""
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    with pytest.raises(RuntimeError, match="no such model"), answering_while_loading(listener):
        raise RuntimeError("no such model")
    listener.close()
    with pytest.raises(OSError):
        asked(port, "/ping")
