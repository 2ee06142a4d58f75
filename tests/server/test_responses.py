"""Stored responses: each tenant has its own, and a bounded number of them."""

import asyncio
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

pytest.importorskip("vllm")

from hotspan.engine import responses
from hotspan.engine.responses import EVENT_BYTES, MAX_STORED_RESPONSES, TenantStore, keep_apart, size_of
from hotspan.server.principal import Principal, asking, current_tenant
from tests.operations import operations

STORES = ("msg_store", "response_store", "event_store", "background_tasks")


class Answer(BaseModel):
    """A response, as far as its size goes."""

    text: str


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


def test_large_responses_are_bounded_by_their_bytes(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest of the tenant are forgotten, with all that is stored of them; another tenant's stay. One that is too
    large by itself is not stored.
    """
    monkeypatch.setattr(responses, "MAX_STORED_BYTES", 100_000)
    with asking(Principal("globex")):
        serving.msg_store["resp_0"] = serving.response_store["resp_0"] = ["globex's"]
    with asking(Principal("acme")):
        for number in range(20):
            serving.msg_store[f"resp_{number}"] = [{"role": "user", "content": f"{number}" * 10_000}]
            serving.response_store[f"resp_{number}"] = Answer(text="y" * 10_000)
        kept = list(serving.msg_store)
        assert 3 <= len(kept) <= 6 and kept[-1] == "resp_19" and list(serving.response_store) == kept
        serving.msg_store["large"] = [{"content": [{"text": "x" * 100_001}]}]
        serving.response_store["large"] = Answer(text="y")
        assert "large" not in serving.msg_store and "large" not in serving.response_store
        serving.msg_store["again"] = ["small"]
        assert list(serving.msg_store) == ["again"]
    with asking(Principal("globex")):
        assert list(serving.response_store) == ["resp_0"]


def test_events_that_come_later_count(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream in the background grows after it was stored: the next that is stored finds how large it is."""
    monkeypatch.setattr(responses, "MAX_STORED_BYTES", 100 * EVENT_BYTES)
    with asking(Principal("acme")):
        serving.msg_store["resp_0"] = ["text"]
        events = deque[str]()
        serving.event_store["resp_0"] = (events, asyncio.Event())
        events.extend(["event"] * 101)
        serving.msg_store["resp_1"] = ["text"]
        assert list(serving.msg_store) == ["resp_1"] and not serving.event_store


def test_what_is_counted() -> None:
    """Text in dicts, lists, models and dataclasses; nothing that leads elsewhere is walked, and no more than may be
    stored.
    """
    text = "x" * 5000

    @dataclass
    class Part:
        text: str

    for value in ([{"a": {"b": text}}], (deque([text]),), Answer(text=text), {"a": Part(text)}, {text: 1}):
        assert 5000 < size_of(value) < 7000
    assert size_of((asyncio.Event(), SimpleNamespace(text=text))) < 1000
    assert operations(lambda: size_of([[1] * 1000, text * 30_000])) < 100


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
