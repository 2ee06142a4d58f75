"""What is about all models: lists, metrics, and receipts that hold only if every model's does."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from .rig import ADMIN_TOKEN, Store, bearer, store
from .test_life import died

pytestmark = pytest.mark.asyncio(loop_scope="module")

ADMIN = bearer(ADMIN_TOKEN)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def open_store() -> AsyncIterator[Store]:
    """Two models that no test ends."""
    async with store("alpha", "beta") as running:
        yield running


async def test_models_are_listed_also_while_they_are_away() -> None:
    """/v1/models has what each model's server lists, and by its name a model that can't say."""
    async with store("alpha", "beta") as running:
        assert [row["id"] for row in (await running.http.get("/v1/models")).json()["data"]] == ["alpha", "beta"]
        await died(running, "alpha")
        rows = (await running.http.get("/v1/models")).json()["data"]
        assert [row["id"] for row in rows] == ["alpha", "beta"] and rows[0]["owned_by"] == "hotspan"


async def test_metrics_have_their_model() -> None:
    """/metrics is one page that parsers take, each sample labelled; models that are down are counted as such."""
    async with store("alpha", "beta") as running:
        await died(running, "beta")
        reply = await running.http.get("/metrics", headers=ADMIN)
        families = {family.name: family for family in text_string_to_metric_families(reply.text)}
        tokens = families["fake_tokens"]
        assert (tokens.type, [(one.name, one.labels, one.value) for one in tokens.samples]) == (
            "counter",
            [("fake_tokens_total", {"engine": "0", "model": "alpha"}, 5.0)],
        )
        up = {one.labels["model"]: one.value for one in families["hotspan_model_up"].samples}
        assert up == {"alpha": 1.0, "beta": 0.0}
        assert reply.text.count("# TYPE fake_busy gauge") == 1
        assert (await running.http.get("/metrics")).status_code == 401


async def test_invalidation_goes_to_all_and_is_one_receipt(open_store: Store) -> None:
    """One receipt adds up all models', and has each one's; a model in the query is asked alone."""
    reply = await open_store.http.post("/hotspan/cache/invalidate", json={"tenant": "acme"}, headers=ADMIN)
    said = reply.json()
    assert reply.status_code == 200 and said["is_durable"] and said["removed"] == {"ram": 4}
    assert said["receipt"] == "alpha+beta" and said["replicas"] == ["alpha", "beta"]
    assert said["scope"] == {"tenant": "acme"} and list(said["models"]) == ["alpha", "beta"]
    assert [line for line in open_store.book if "acme" in line] != []
    alone = await open_store.http.post("/hotspan/cache/invalidate?model_name=beta", json={"tenant": "z"}, headers=ADMIN)
    assert alone.json()["receipt"] == "beta" and "alpha invalidated z" not in open_store.book


async def test_no_receipt_without_every_model() -> None:
    """While one model can't be asked, an invalidation is an error that names it, though the others did it."""
    async with store("alpha", "beta") as running:
        await died(running, "beta")
        reply = await running.http.post("/hotspan/cache/invalidate", json={"tenant": "acme"}, headers=ADMIN)
        assert reply.status_code == 503 and "not done for beta" in reply.json()["error"]["message"]
        assert "receipt" not in reply.json() and "alpha invalidated acme" in running.book


async def test_what_one_model_knows_is_enough(open_store: Store) -> None:
    """An adapter of one model is not missed at the others; one that nobody has is a 404."""
    known = await open_store.http.post("/hotspan/cache/invalidate", json={"adapter": "beta"}, headers=ADMIN)
    assert known.status_code == 200 and list(known.json()["models"]) == ["beta"]
    unknown = await open_store.http.post("/hotspan/cache/invalidate", json={"adapter": "x"}, headers=ADMIN)
    assert unknown.status_code == 404 and "no such adapter" in unknown.json()["error"]["message"]


async def test_stats_say_which_model(open_store: Store) -> None:
    """/hotspan/cache lists every model's replicas with the model's name."""
    replicas = (await open_store.http.get("/hotspan/cache", headers=ADMIN)).json()["replicas"]
    assert [(row["model"], row["replica"]) for row in replicas] == [
        ("alpha", "alpha-replica"),
        ("beta", "beta-replica"),
    ]
