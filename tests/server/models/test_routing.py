"""Which model a request reaches, as whom, and with what."""

import json
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

from hotspan.server.principal import PRINCIPAL

from .rig import ADMIN_TOKEN, KEYS, Store, bearer, served_by, store

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def open_store() -> AsyncIterator[Store]:
    """Two models that no test ends."""
    async with store("alpha", "beta", names={"beta": ("llama",)}) as running:
        yield running


async def test_named_by_path_query_and_body(open_store: Store) -> None:
    """A model is meant by the path, then the query, then the body; by its aliases, too; nothing else is guessed."""
    ask = open_store.ask
    replies = [
        await ask("/predictions/beta", model="alpha"),
        await ask("/models/alpha/invoke", inputs="x"),
        await ask("/invocations?model_name=beta", model="alpha"),
        await ask("/v1/chat/completions", model="alpha"),
        await ask("/v1/completions", model="llama"),
        await ask("/predictions/llama"),
    ]
    assert served_by(replies) == ["beta", "alpha", "beta", "alpha", "beta", "beta"]
    nobody = await ask(inputs="x")
    assert nobody.status_code == 400 and "alpha, beta" in nobody.json()["error"]["message"]
    assert nobody.json()["error"]["param"] == "model"
    for unknown in (await ask(model="gamma"), await ask("/predictions/gamma"), await ask("/invocations?model_name=g")):
        assert unknown.status_code == 404 and "alpha, beta" in unknown.json()["error"]["message"]


async def test_default_model_takes_what_names_none() -> None:
    """The default answers requests without a name, and those with one that may be its adapter's; paths stay exact."""
    async with store("alpha", "beta", default="beta") as running:
        replies = [
            await running.ask(inputs="x"),
            await running.ask(model="an-adapter"),
            await running.ask(model="alpha"),
        ]
        assert served_by(replies) == ["beta", "beta", "alpha"]
        assert (await running.ask("/predictions/gamma")).status_code == 404
        version = await running.http.get("/version")
        assert version.json()["served_by"] == "beta"


async def test_request_reaches_the_model_as_it_was(open_store: Store) -> None:
    """Method, path, query, headers and body arrive unchanged, less what was the front's; so does the id."""
    reply = await open_store.http.post(
        "/models/alpha/adapters?name=a%2Fb&name=c&model_name=alpha",
        json={"text": "größe"},
        headers=bearer(ADMIN_TOKEN) | {"x-request-id": "r-1", "x-custom": "kept", "connection": "keep-alive"},
    )
    said = reply.json()
    assert said["query"] == "name=a%2Fb&name=c" and said["path"] == "/models/alpha/adapters"
    assert said["body"] == {"text": "größe"} and said["is_admin"]
    assert said["headers"]["x-custom"] == "kept" and said["headers"]["x-request-id"] == "r-1"
    assert reply.headers["x-request-id"] == "r-1"
    plain = await open_store.http.post("/predictions/alpha?x=%41+b&y=", content=b'{"a":  1}')
    assert plain.json()["query"] == "x=%41+b&y=" and plain.json()["body"] == {"a": 1}
    assert [name for name, _ in plain.headers.multi_items()].count("date") == 1


async def test_a_browsers_preflight_needs_no_name(open_store: Store) -> None:
    """OPTIONS, which has no body to name a model in, is answered by a model."""
    headers = {"origin": "http://page", "access-control-request-method": "POST"}
    reply = await open_store.http.options("/v1/chat/completions", headers=headers)
    assert reply.status_code == 200 and reply.json()["method"] == "OPTIONS"


async def test_errors_of_a_model_are_handed_on(open_store: Store) -> None:
    """A model's error keeps its status, its words and its headers."""
    reply = await open_store.ask("/predictions/alpha", do="fail")
    assert reply.status_code == 422 and reply.headers["retry-after"] == "7"
    assert reply.json()["error"] == {"message": "alpha refuses", "type": "BadRequestError", "param": "x", "code": 422}


async def test_adapters_of_the_model_that_the_path_names(open_store: Store) -> None:
    """/models/{m}/adapters and ?model_name= reach that model's; without a name it is said that one is missing."""
    admin = bearer(ADMIN_TOKEN)
    for model in ("alpha", "beta"):
        under = await open_store.http.post(f"/models/{model}/adapters", json={}, headers=admin)
        beside = await open_store.http.post(f"/adapters?model_name={model}", json={}, headers=admin)
        assert served_by([under, beside]) == [model, model]
    assert (await open_store.http.post("/adapters", json={}, headers=admin)).status_code == 400
    assert (await open_store.http.post("/adapters?model_name=alpha", json={})).status_code == 401


async def test_tenants_are_carried_and_credentials_are_not() -> None:
    """A model learns whose a request is from the front alone: keys stay outside, and forged headers are nothing."""
    async with store("alpha", has_keys=True) as running:
        forged = {
            PRINCIPAL: json.dumps({"tenant": "zeta", "has_key": True, "is_admin": True}),
            "x-api-key": "guess",
        }
        reply = await running.http.post("/predictions/alpha", json={}, headers=bearer(KEYS["acme"]) | forged)
        said = reply.json()
        assert (said["tenant"], said["has_key"], said["is_admin"]) == ("acme", True, False)
        assert KEYS["acme"] not in reply.text and "guess" not in reply.text and "zeta" not in reply.text
        assert (await running.http.post("/predictions/alpha", json={}, headers=forged)).status_code == 401
        assert (await running.http.get("/models/alpha/adapters")).status_code == 401
        admin = await running.http.post("/predictions/alpha", json={}, headers=bearer(ADMIN_TOKEN))
        assert admin.json()["is_admin"] and ADMIN_TOKEN not in admin.text
        names = (await running.http.get("/ping")).json()
        assert names == {"status": "Healthy"}
        with_key = await running.http.get("/ping", headers=bearer(KEYS["zeta"]))
        assert with_key.json()["models"] == {"alpha": "Healthy"}


async def test_nobody_but_the_front_reaches_a_model() -> None:
    """Over its own socket a model answers nobody who lacks the secret, or who shows it and names nobody."""
    async with store("alpha", "beta") as running:
        link, other = running["alpha"].link, running["beta"].link
        principal = json.dumps({"tenant": "zeta", "has_key": True, "is_admin": True})
        transport = httpx.AsyncHTTPTransport(uds=link.path)
        async with httpx.AsyncClient(transport=transport, base_url="http://alpha") as direct:
            for headers in (
                {},
                {PRINCIPAL: principal},
                bearer(other.secret) | {PRINCIPAL: principal},
                bearer(ADMIN_TOKEN) | {PRINCIPAL: principal},
                bearer(link.secret),
            ):
                assert (await direct.post("/predictions/alpha", json={}, headers=headers)).status_code == 401, headers
            right = await direct.post(
                "/predictions/alpha", json={}, headers=bearer(link.secret) | {PRINCIPAL: principal}
            )
            assert right.json()["tenant"] == "zeta"
        assert link.secret not in repr(running["alpha"].link) and link.secret not in repr(running["alpha"]._command)
