"""Which of the engine's routes a formatter stands before: none that computes passes it by."""

from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.responses import JSONResponse, Response

from hotspan.formatters import Formatters, load_formatters
from hotspan.http.paths import OPENAI, WORK

from .fake_engine import FakeEngine
from .serving import client, front, invoke
from .test_routes import FakeAdapters

GUARD = "{input: {schema: {required: [badge]}}, output: {metadata: {seen: true}}}"
REFUSED = {"/v1/responses", "/v1/messages"}


def formatters(directory: Path, *adapters: str, base: bool = True) -> Formatters:
    """Formatters that let nobody in without a badge, and mark what they let out."""
    (directory / "formatter.yaml").write_text(GUARD)
    return load_formatters(directory if base else None, dict.fromkeys(adapters, directory), is_secure=True)


class EveryRoute(FakeEngine):
    """Has all routes that compute, and answers each with what it was asked."""

    def app(self) -> FastAPI:
        app = FastAPI()
        for path in (*WORK, "/invocations"):
            app.add_api_route(path, self._echo, methods=["POST"])
        return app

    async def _echo(self) -> JSONResponse:
        self.stepped += 1
        return JSONResponse({"data": []})


@pytest.mark.parametrize("path", sorted({*WORK, "/invocations"}))
@pytest.mark.parametrize("kind", ["application/json", "Application/JSON", "application/json;charset=utf-8"])
async def test_no_route_passes_a_formatter_by(tmp_path: Path, path: str, kind: str) -> None:
    """What the guard does not let in never reaches the engine, however its kind is spelt; what it lets in is marked."""
    engine = EveryRoute()
    app = front(engine, plugs={"formatters": formatters(tmp_path)})
    async with client(app) as http:
        refused = await http.post(path, content=b'{"input": "Say"}', headers={"content-type": kind})
        assert refused.status_code == 400 and engine.stepped == 0
        let_in = await http.post(path, content=b'{"input": "Say", "badge": 1}', headers={"content-type": kind})
    if path in REFUSED or path not in (*OPENAI, "/invocations"):
        message = let_in.json()["error"]["message"]
        assert let_in.status_code == 400 and path in message and "/v1/chat/completions" in message
        assert engine.stepped == 0
    else:
        assert let_in.json() == {"data": [], "metadata": {"seen": True}}


@pytest.mark.parametrize("path", sorted(REFUSED))
async def test_an_adapters_formatter_is_its_own(tmp_path: Path, path: str) -> None:
    """A formatter of one adapter keeps nobody from asking another, or the base model, on any of OpenAI's routes."""
    plugs = {"adapters": FakeAdapters("a", "b"), "formatters": formatters(tmp_path, "a", base=False)}
    app = front(EveryRoute(), plugs=plugs)
    answers = [(await invoke(app, {"model": name}, path)).status_code for name in ("a", "b", "lmi")]
    assert answers == [400, 200, 200]


async def test_routes_that_know_no_adapters(tmp_path: Path) -> None:
    """Where nobody can tell which adapter is meant, any adapter's formatter closes the route, until it is gone."""
    loaded = formatters(tmp_path, "a", base=False)
    app = front(EveryRoute(), plugs={"adapters": FakeAdapters("a"), "formatters": loaded})
    assert (await invoke(app, {"model": "a@0123"}, "/generative_scoring")).status_code == 400
    loaded.remove("a")
    assert (await invoke(app, {"model": "a@0123"}, "/generative_scoring")).status_code == 200


@pytest.mark.parametrize("has_formatter", [True, False])
async def test_websockets(tmp_path: Path, has_formatter: bool) -> None:
    """No formatter can take part in one, so it is closed before it opens where there is one."""
    opened: list[str] = []
    sent: list[Any] = []

    class Realtime(FakeEngine):
        def app(self) -> Any:
            async def app(scope: Any, receive: Any, send: Any) -> None:
                opened.append(scope["path"])

            return app

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    app = front(Realtime(), plugs={"formatters": formatters(tmp_path, base=has_formatter)})
    await app({"type": "websocket", "path": "/v1/realtime", "headers": []}, receive, send)
    assert opened == ([] if has_formatter else ["/v1/realtime"])
    assert [message["type"] for message in sent] == (["websocket.close"] if has_formatter else [])


async def test_vectors_in_bytes(tmp_path: Path) -> None:
    """An answer that is no JSON is formatted as bytes, and keeps the header that says what the bytes are."""

    class Bytes(EveryRoute):
        async def _echo(self) -> Any:
            return Response(b"\x00\xff", media_type="application/octet-stream", headers={"metadata": '{"data": []}'})

    (tmp_path / "model.py").write_text(
        "from hotspan.formatters import output_formatter\n"
        "@output_formatter\n"
        "def longer(output: bytes) -> bytes:\n"
        "    return output + b'!'\n"
    )
    app = front(Bytes(), plugs={"formatters": load_formatters(tmp_path, {}, is_secure=False)})
    answer = await invoke(app, {"input": "Say", "encoding_format": "bytes"}, "/v1/embeddings")
    assert (answer.content, answer.headers["metadata"]) == (b"\x00\xff!", '{"data": []}')
    assert answer.headers["content-type"] == "application/octet-stream"
