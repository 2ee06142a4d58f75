"""What touches a request that asks for nothing of hotspan's: the gate, the limits, and the way to the engine's app."""

import sys
from collections import Counter
from typing import Any

import pytest

from hotspan.server import policy
from tests.server.asgi import sent_by

from .fake_engine import FakeEngine
from .serving import client, front
from .test_gate import ACME, gated
from .test_routes import FakeAdapters


@pytest.mark.parametrize(
    ("content", "is_same"),
    [
        (b'{"prompt":  "Say", "x": 1e400}', True),
        (b'{"model": "base",\n "prompt": "Say"}', True),
        (b'{"model": "lmi",  "prompt": "Say"}', False),
        (b'{"model": "legal",  "prompt": "Say"}', False),
        (b'{"adapters": ["legal"],  "prompt": "Say"}', False),
    ],
)
async def test_plain_bodies_go_as_they_came(content: bytes, is_same: bool) -> None:
    """Where adapters are served, a body in which nothing is to be changed reaches the engine byte for byte."""
    engine = FakeEngine()
    app = front(engine, plugs={"adapters": FakeAdapters("legal"), "names": ["base"]})
    async with client(app) as http:
        headers = {"content-type": "application/json"}
        assert (await http.post("/v1/completions", content=content, headers=headers)).status_code == 200
    assert (engine.raw == [content]) is is_same


async def test_routes_are_matched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy of routes and the front look a request's route up once between them."""
    matches: list[str] = []
    found = policy._match
    monkeypatch.setattr(policy, "_match", lambda routes, scope: matches.append(scope["path"]) or found(routes, scope))
    async with client(gated(FakeEngine())) as http:
        headers = {"authorization": "Bearer key-a"}
        assert (await http.post("/v1/completions", json={"prompt": "Say"}, headers=headers)).status_code == 200
        assert (await http.get("/ping")).status_code == 200
    assert matches == ["/v1/completions", "/ping"]


class Told:
    """An app that answers with these messages, and remembers what it was sent."""

    routes = FakeEngine().app().routes
    root_path = ""

    def __init__(self, parts: list[bytes]) -> None:
        self.scope: Any = None
        self.body = b""
        kind = (b"content-type", b"text/event-stream")
        self.parts = [{"type": "http.response.body", "body": part, "more_body": True} for part in parts]
        self.head = {"type": "http.response.start", "status": 200, "headers": [kind]}
        self.end = {"type": "http.response.body", "body": b"", "more_body": False}

    def app(self) -> Any:
        return self

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scope, self.body = scope, (await receive())["body"]
        for message in (self.head, *self.parts, self.end):
            await send(message)


def touched(parts: int, body: bytes) -> tuple[Told, list[Any], Counter[str]]:
    """A plain request: the app, what its client was sent, and how often each function of hotspan's or json's ran."""
    app, calls = Told([b"data: {}\n\n"] * parts), Counter[str]()
    served = gated(app)

    def called(frame: Any, event: str, argument: object) -> None:
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.startswith(("hotspan.", "json")):
            calls[f"{module}.{frame.f_code.co_qualname}"] += 1

    sys.setprofile(called)
    try:
        sent = sent_by(served, "POST", "/v1/completions", {"authorization": ACME}, body)
    finally:
        sys.setprofile(None)
    return app, sent, calls


def test_a_plain_request_is_touched_by_gate_and_limits_alone() -> None:
    """Its body and the parts of its response are the same objects; nothing parses them, and a part costs two calls."""
    body = b'{"prompt":  "Say", "stream": true}'
    app, sent, calls = touched(10, body)
    assert app.body is body
    assert [(name, value) for name, value in app.scope["headers"] if name != b"x-request-id"] == [
        *((b"host", b"h"), (b"content-type", b"application/json"), (b"authorization", b"Bearer key-a"))
    ]
    assert all(one is told for one, told in zip(sent[1:], [*app.parts, app.end], strict=True))
    assert not [name for name in calls if name.startswith("json")]
    dialect = {name.removeprefix("hotspan.server.lmi.routes.") for name in calls if ".server.lmi." in name}
    assert dialect == {"Dialect.answer", "Dialect._is_plain"}
    assert touched(110, body)[2] - calls == {
        "hotspan.server.exchange.AppExchange.send": 100,
        "hotspan.server.exchange.AppExchange._pass": 100,
    }
