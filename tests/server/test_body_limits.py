"""How large a body may be on each route, refused by what its head says: of a prompt, no more than its text can need."""

import json
import re
from typing import Any

import pytest

from hotspan.core.types import MIB
from hotspan.http.bodies import LOG, MAX_TEXT_BYTES
from hotspan.http.json_size import DEFAULT_LIMIT
from hotspan.http.paths import (
    ADAPTER_WRITES,
    AUDIO,
    BY_NAME,
    CANCEL,
    EXPLAIN,
    INVOCATIONS,
    LOOKUP,
    MAX_SMALL_BYTES,
    PIN,
    PREFETCH,
    STATELESS,
    WARM,
    WARM_UP,
    WORK,
    is_small,
)
from hotspan.server.front import PING
from hotspan.server.policy import CLIENT
from hotspan.server.sizes import BodyLimit, TextLimit

from .lmi.fake_engine import FakeEngine
from .lmi.serving import client, front

LIMIT = TextLimit(tokens=4096, chars=40_000).of_bodies()
PROMPTS = {*WORK, *STATELESS, INVOCATIONS, *BY_NAME, PREFETCH, LOOKUP} - {*AUDIO}
"""Routes whose body is one prompt."""

OTHERS = {
    **dict.fromkeys(AUDIO, "sound"),
    WARM: "texts of many prompts",
    "/hotspan/cache/invalidate": "texts of many prompts",
}
"""Routes of clients that have max_request_bytes alone, and what their bodies have."""

NAMES = {
    *("/v1/models", "/tokenizer_info", "/load", "/version"),
    *(PIN, EXPLAIN, WARM_UP, "/v1/responses/{response_id}", CANCEL),
}
"""Routes that need names in their bodies, or none."""

BODILESS = {"/v1/realtime", "/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc", "/static"}
"""Routes that take no POST: their body is not read, and nobody parses it."""


def asked(path: str) -> str:
    return path.replace("{model}", "lmi")


def test_what_text_can_need() -> None:
    """1 MiB and JSON's longest escape of each character; a message, a part or a tool is at least a token."""
    assert LIMIT.bytes == MIB + 6 * 40_000
    assert LIMIT.json.containers == 1024 + 4096 and LIMIT.json.values == (1 << 16) + 16 * 4096
    assert LIMIT.json.fields == (1 << 16) + 4 * 4096
    longest = json.dumps({"messages": [{"role": "user", "content": "\u0316" * 40_000}]})
    assert len(longest) <= LIMIT.bytes
    large = TextLimit(tokens=1 << 20, chars=1 << 24).of_bodies()
    assert large.json == DEFAULT_LIMIT


@pytest.mark.parametrize("path", sorted(PROMPTS))
async def test_a_body_beyond_it_is_not_read(path: str) -> None:
    """On each route whose body is a prompt: 413 by its content-length alone, and nothing reaches the engine."""
    engine = FakeEngine()
    app = front(engine, plugs={"body_limit": LIMIT})
    async with client(app) as http:
        head = {"content-length": str(LIMIT.bytes + 1), "content-type": "application/json"}
        answer = await http.post(asked(path), content=unread(), headers=head)
    assert answer.status_code == 413 and "max_text_bytes" in answer.text and not engine.seen


async def unread() -> Any:
    """A body that must not be asked for."""
    raise AssertionError("the body is read")
    yield b""


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
async def test_more_values_than_text_can_need(path: str) -> None:
    """Messages and tokens are counted before they are parsed."""
    app = front(FakeEngine(), plugs={"body_limit": LIMIT})
    async with client(app) as http:
        many = await http.post(path, json={"messages": [{"role": "user", "content": ""}] * (LIMIT.json.containers - 2)})
        more = await http.post(path, json={"messages": [{"role": "user", "content": ""}] * LIMIT.json.containers})
        tokens = await http.post(path, json={"prompt": [1] * LIMIT.json.values})
    assert many.status_code != 413 and more.status_code == tokens.status_code == 413


@pytest.mark.parametrize("path", sorted(OTHERS))
async def test_other_bodies_have_the_limit_of_all(path: str) -> None:
    """What is no prompt may be as large as max_request_bytes says."""
    app = front(FakeEngine(), plugs={"body_limit": LIMIT}, max_request_bytes=2 * LIMIT.bytes)
    async with client(app) as http:
        large = await http.post(path, content=b" " * (LIMIT.bytes + 1))
        larger = await http.post(path, content=b" " * (2 * LIMIT.bytes + 1))
    assert large.status_code != 413 and larger.status_code == 413


@pytest.mark.parametrize("path", sorted({*NAMES, *ADAPTER_WRITES, "/hotspan/cache/clear", "/hotspan/keys/shred"}))
@pytest.mark.parametrize("method", ["POST", "DELETE"])
async def test_what_names_are_enough_for_has_a_small_body(path: str, method: str) -> None:
    """More than 256 KiB are refused by the head, whatever the request; the error says that it needs less."""
    target, length = re.sub(r"\{\w+\}", "a", path), MAX_SMALL_BYTES + 1
    async with client(front(FakeEngine(), plugs={"body_limit": LIMIT})) as http:
        head = {"content-length": str(length), "content-type": "application/json"}
        answer = await http.request(method, target, content=unread(), headers=head)
        small = await http.request(method, target, content=b" " * MAX_SMALL_BYTES)
    assert answer.status_code == 413 and "a request of this kind" in answer.text and small.status_code != 413


def test_each_route_of_clients_is_in_a_table() -> None:
    """A new route of clients says what its bodies may have."""
    assert set(CLIENT) - PROMPTS == set(OTHERS) | NAMES | BODILESS, "a new route: is its body one prompt, or names?"
    assert not {path for path in (*PROMPTS, *OTHERS) if is_small("POST", asked(path))}
    assert all(is_small("POST", re.sub(r"\{\w+\}", "a", path)) for path in NAMES)


async def test_a_health_check_tells_the_limit() -> None:
    """To routers, which refuse then what no replica would take."""
    for limit, told in ((LIMIT, LIMIT.bytes), (BodyLimit(), None)):
        async with client(front(FakeEngine(), plugs={"body_limit": limit})) as http:
            assert (await http.get(PING)).json().get(MAX_TEXT_BYTES) == told


async def test_a_health_check_tells_the_log_and_if_asked_how_far_it_is_read() -> None:
    """To routers, which know then who follows an invalidation that did not reach it, and when it has."""
    asked = []

    async def log(*, is_asked: bool) -> dict[str, Any] | None:
        asked.append(is_asked)
        return {"name": "a"} | ({"generation": 7} if is_asked else {})

    async with client(front(FakeEngine(), plugs={"log": log})) as http:
        assert (await http.get(PING)).json()[LOG] == {"name": "a"}
        assert (await http.get(f"{PING}?{LOG}")).json()[LOG] == {"name": "a", "generation": 7}
    assert asked == [False, True]
