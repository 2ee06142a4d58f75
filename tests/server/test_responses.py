"""Stored responses: each tenant has its own, and a bounded number of them."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from hotspan.engine.responses import MAX_STORED_RESPONSES, TenantStore, keep_apart
from hotspan.server.principal import Principal, asking, current_tenant

STORES = ("msg_store", "response_store", "event_store", "background_tasks")


@pytest.fixture
def serving() -> Any:
    """vLLM's handler, as far as it keeps responses."""
    handler = SimpleNamespace(**{name: {} for name in STORES})
    keep_apart(handler, current_tenant)
    return handler


@pytest.mark.parametrize("name", STORES)
def test_an_id_is_its_tenants(serving: Any, name: str) -> None:
    """What one tenant keeps under an id is neither found nor replaced by another tenant's use of it."""
    store = getattr(serving, name)
    with asking(Principal("acme")):
        serving.msg_store["resp_1"] = store["resp_1"] = "acme's"
    with asking(Principal("globex")):
        assert store.get("resp_1") is None and "resp_1" not in store and store.pop("resp_1", None) is None
        serving.msg_store["resp_1"] = store["resp_1"] = "globex's"
    with asking(Principal("acme")):
        assert store["resp_1"] == "acme's" and len(store) == 1


def test_the_oldest_of_the_tenant_is_forgotten(serving: Any) -> None:
    """One tenant's many responses cost no other tenant any, and their number is bounded; tasks that run are kept."""
    with asking(Principal("globex")):
        serving.msg_store["resp_0"] = serving.response_store["resp_0"] = "globex's"
    with asking(Principal("acme")):
        for number in range(MAX_STORED_RESPONSES + 3):
            for name in STORES:
                getattr(serving, name)[f"resp_{number}"] = number
        kept = list(range(3, MAX_STORED_RESPONSES + 3))
        for name in ("response_store", "msg_store", "event_store"):
            assert list(getattr(serving, name).values()) == kept
        assert len(serving.background_tasks) == MAX_STORED_RESPONSES + 3
    with asking(Principal("globex")):
        assert list(serving.response_store) == ["resp_0"]


def test_nothing_is_continued_without_what_was_said(serving: Any) -> None:
    """Requests that never end take places too; a response whose messages had to go meanwhile is not stored."""
    with asking(Principal("acme")):
        for number in range(MAX_STORED_RESPONSES + 1):
            serving.msg_store[f"resp_{number}"] = "said"
        serving.response_store["resp_0"] = serving.event_store["resp_0"] = "late"
        serving.response_store["resp_1"] = "in time"
        assert dict(serving.response_store) == {"resp_1": "in time"} and not serving.event_store


def test_a_task_in_the_background_works_for_its_tenant() -> None:
    """A response that is computed after its request was answered is stored as its tenant's, whoever asks meanwhile."""
    store: TenantStore[str] = TenantStore(current_tenant)

    async def background(go: asyncio.Event) -> None:
        await go.wait()
        store["resp_1"] = "acme's"

    async def serve() -> None:
        go = asyncio.Event()
        with asking(Principal("acme")):
            task = asyncio.create_task(background(go))
        with asking(Principal("globex")):
            go.set()
            await task
            assert not store
        with asking(Principal("acme")):
            assert store["resp_1"] == "acme's"

    asyncio.run(serve())


def test_a_vllm_that_keeps_responses_elsewhere_is_noticed() -> None:
    """A handler without one of the stores, or with one in use, is refused at the start."""
    with pytest.raises(AttributeError, match="event_store"):
        keep_apart(SimpleNamespace(response_store={}, msg_store={}, background_tasks={}), current_tenant)
    with pytest.raises(ValueError, match="msg_store is in use"):
        keep_apart(SimpleNamespace(**{name: {} for name in STORES} | {"msg_store": {"a": 1}}), current_tenant)
