"""The adapters' routes in all their spellings."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from hotspan.http.paths import ADAPTER_READS, ADAPTER_WRITES
from hotspan.server.adapters.routes import adapter_router

from .rig import Rig


@pytest.fixture
async def rig(tmp_path: Path) -> Rig:
    rig = Rig(tmp_path)
    rig.write("a"), rig.write("b", 1)
    return rig


@pytest.fixture
async def client(rig: Rig) -> AsyncIterator[httpx.AsyncClient]:
    app = FastAPI()
    app.include_router(adapter_router(rig.registry, {"lmi", "model"}, is_open=True))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        yield client


@pytest.mark.parametrize("prefix", ["", "/models/lmi", "/models/model"])
@pytest.mark.parametrize("is_body", [False, True])
async def test_the_life_of_an_adapter(client: httpx.AsyncClient, rig: Rig, prefix: str, is_body: bool) -> None:
    """Registered, listed, described, updated and deleted, with and without the model, by query and by body."""

    def said(**arguments: Any) -> dict[str, Any]:
        return {"json": arguments} if is_body else {"params": {n: str(v).lower() for n, v in arguments.items()}}

    reply = await client.post(f"{prefix}/adapters", **said(name="x", src="a", preload=False))
    assert (reply.status_code, reply.json()) == (200, {"status": "Adapter x registered"})
    described = (await client.get(f"{prefix}/adapters/x")).json()
    digest = described.pop("digest")
    assert described == {"name": "x", "src": "a", "preload": False, "pin": False, "loaded": False}
    reply = await client.post(f"{prefix}/adapters/x/update", **said(src="b", preload=True, pin=True))
    assert (reply.status_code, reply.json()) == (200, {"status": "Adapter x updated"})
    (listed,) = (await client.get(f"{prefix}/adapters")).json()["adapters"]
    assert listed.pop("digest") != digest
    assert listed == {"name": "x", "src": "b", "preload": True, "pin": True, "loaded": True}
    reply = await client.delete(f"{prefix}/adapters/x")
    assert (reply.status_code, reply.json()) == (200, {"status": "Adapter x unregistered"})
    assert (await client.get(f"{prefix}/adapters/x")).status_code == 404


async def test_the_platforms_name(client: httpx.AsyncClient) -> None:
    """Where the platform calls the adapter something else, the answer does so too."""
    alias = {"X-Amzn-SageMaker-Adapter-Alias": "component-7"}
    reply = await client.post("/adapters", json={"name": "x", "src": "a"}, headers=alias)
    assert reply.json() == {"status": "Adapter component-7 registered"}


@pytest.mark.parametrize(
    ("method", "path", "arguments", "status"),
    [
        ("POST", "/models/other/adapters", {"name": "x", "src": "a"}, 404),
        ("GET", "/models/other/adapters", {}, 404),
        ("POST", "/adapters", {"name": "there", "src": "a"}, 409),
        ("POST", "/adapters", {"name": "x", "src": "a", "preload": "false", "pin": "true"}, 400),
        ("POST", "/adapters", {"name": "x"}, 400),
        ("POST", "/adapters", {"src": "a"}, 400),
        ("POST", "/adapters", {"name": "x", "src": "../a"}, 400),
        ("POST", "/adapters", {"name": "x", "src": "s3://b/a"}, 400),
        ("POST", "/adapters", {"name": "x", "src": "a", "preload": "maybe"}, 400),
        ("POST", "/adapters", {"name": "x", "src": "a", "prelaod": "false"}, 400),
        ("POST", "/adapters/none/update", {}, 404),
        ("POST", "/adapters/there/update", {"name": "x"}, 400),
        ("POST", "/adapters/there/update", {"src": ""}, 400),
        ("DELETE", "/adapters/none", {}, 404),
        ("GET", "/adapters/none", {}, 404),
        ("GET", "/adapters", {"limit": "0"}, 400),
        ("GET", "/adapters", {"limit": "ten"}, 400),
        ("GET", "/adapters", {"next_page_token": "-1"}, 400),
    ],
)
async def test_refusals(
    client: httpx.AsyncClient, method: str, path: str, arguments: dict[str, str], status: int
) -> None:
    """Each has its status, and a message in the one shape of errors."""
    await client.post("/adapters", params={"name": "there", "src": "a", "preload": "false"})
    reply = await client.request(method, path, params=arguments)
    assert reply.status_code == status
    error = reply.json()["error"]
    assert error["code"] == status and error["message"] and error["type"]


async def test_an_engine_that_stopped(client: httpx.AsyncClient, rig: Rig) -> None:
    """An adapter that can't be loaded since the engine has stopped is 503, which says when to try again."""
    rig.engine.fails, rig.engine.is_dead = "it has ended", True
    reply = await client.post("/adapters", json={"name": "x", "src": "a"})
    assert reply.status_code == 503 and int(reply.headers["retry-after"]) > 0
    assert "retry-after" not in (await client.get("/adapters/x")).headers


async def test_pins_run_out(client: httpx.AsyncClient) -> None:
    """The pin that would take the last slot is 507."""
    statuses = [
        (await client.post("/adapters", json={"name": f"x{n}", "src": "a", "pin": True})).status_code for n in range(4)
    ]
    assert statuses == [200, 200, 200, 507]


async def test_bodies_that_are_none(client: httpx.AsyncClient) -> None:
    """What is no object, too long, or contradicts the query is refused."""
    for body, status in ((b"{", 400), (b"[]", 400), (b"1", 400), (b"[" * 60_000, 400), (b" " * 70_000, 413)):
        assert (await client.post("/adapters", content=body)).status_code == status
    reply = await client.post("/adapters", params={"name": "x"}, json={"name": "y", "src": "a"})
    assert reply.status_code == 400 and "'x'" in reply.json()["error"]["message"]
    assert (await client.post("/adapters", params={"name": "x"}, json={"src": "a"})).status_code == 200


async def test_pages(client: httpx.AsyncClient) -> None:
    """A page's token asks for the next one; the last has none."""
    for n in range(5):
        await client.post("/adapters", json={"name": f"x{n}", "src": "a", "preload": False})
    first = (await client.get("/adapters", params={"limit": 3, "next_page_token": 0})).json()
    rest = (await client.get("/adapters", params={"limit": 3, "next_page_token": first["nextPageToken"]})).json()
    assert [adapter["name"] for adapter in first["adapters"] + rest["adapters"]] == [f"x{n}" for n in range(5)]
    assert "nextPageToken" not in rest


async def test_without_lora() -> None:
    """On an engine without LoRA every route says how to have it."""
    app = FastAPI()
    app.include_router(adapter_router(None, {"lmi"}))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        for method, path in (("GET", "/adapters"), ("POST", "/models/lmi/adapters"), ("DELETE", "/adapters/a")):
            reply = await client.request(method, path)
            assert reply.status_code == 400 and "--enable-lora" in reply.json()["error"]["message"]


def test_every_route_is_in_the_lists(tmp_path: Path) -> None:
    """What a policy reads off the lists are the paths as the router has them, and GET is all that ADAPTER_READS may."""
    app = FastAPI(openapi_url=None)
    app.include_router(adapter_router(None, {"lmi"}))
    methods: dict[str, set[str]] = {}
    for route in app.routes:
        methods.setdefault(route.path, set()).update(route.methods)  # type: ignore[attr-defined]
    assert set(methods) == set(ADAPTER_WRITES)
    assert {path for path, found in methods.items() if "GET" in found} == set(ADAPTER_READS)
