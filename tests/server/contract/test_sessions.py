"""Sessions on a real server: opened, used, expired, closed; what they cached is found by their ids."""

import time
from datetime import UTC, datetime
from typing import Any

import pytest

from hotspan.bench.prose import prose

from .rig import SESSION, SESSION_S, Container

pytestmark = pytest.mark.engine

NEW, CLOSED = "X-Amzn-SageMaker-New-Session-Id", "X-Amzn-SageMaker-Closed-Session-Id"


def opened(container: Container) -> str:
    """The id of a new session."""
    reply = container.invoke({"requestType": "NEW_SESSION"}, **{SESSION: "NEW_SESSION"})
    assert reply.status_code == 200, reply.text
    session, _, ends = reply.headers[NEW].partition("; Expires=")
    assert reply.json() == {"session_id": session} and reply.headers[SESSION] == reply.headers[NEW]
    left = datetime.strptime(ends, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC) - datetime.now(UTC)
    assert SESSION_S - 60 < left.total_seconds() <= SESSION_S
    return session


def forgotten(container: Container, session: str) -> int:
    """How many chunks were cached under a session, of which none is left now."""
    receipt = container.admin.post("/hotspan/cache/invalidate", json={"session": session}).json()
    return sum(receipt["removed"].values())


def ask(container: Container, session: str, seed: int) -> Any:
    """The answer to a prompt of more than a chunk, asked in a session, once something of it is stored."""
    body = {"inputs": prose(seed, 500), "parameters": {"max_new_tokens": 2}}
    before = container.gauge("hotspan_cache_store_bytes_total")
    reply = container.invoke(body, **{SESSION: session})
    assert reply.status_code == 200, reply.text
    deadline = time.monotonic() + 60
    while container.gauge("hotspan_cache_store_bytes_total") == before:
        assert time.monotonic() < deadline, "nothing was stored"
        container.generate("Hello")
    return reply


def test_a_session_owns_what_it_caches(container: Container) -> None:
    """What a request in a session caches goes with an invalidation of that session, and of no other."""
    first, second = opened(container), opened(container)
    ask(container, first, 101)
    assert forgotten(container, second) == 0
    assert forgotten(container, first) > 0
    assert forgotten(container, first) == 0


def test_new_session_beside_a_prompt(container: Container) -> None:
    """The header alone opens a session for the request that carries it."""
    reply = ask(container, "NEW_SESSION", 102)
    assert forgotten(container, reply.headers[NEW].partition(";")[0]) > 0
