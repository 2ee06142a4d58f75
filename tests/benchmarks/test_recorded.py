"""What `make recorded` asks of a server, in each of its ways."""

import asyncio
import json

import httpx
import pytest

from benchmarks import recorded
from benchmarks.recorded import Asking


@pytest.mark.parametrize(("way", "sessions"), [("alone", {None}), ("clients", {"client-0", "client-1"})])
def test_each_way_asks_all_questions(way: str, sessions: set[str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each client waits for its answer; the questions are about the texts, and sessions are named where clients are."""
    bodies, running, most = list[dict[str, object]](), 0, 0

    async def answer(request: httpx.Request) -> httpx.Response:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        bodies.append(json.loads(request.content))
        running -= 1
        return httpx.Response(200, json={})

    real = httpx.AsyncClient
    monkeypatch.setattr(httpx, "AsyncClient", lambda timeout: real(transport=httpx.MockTransport(answer)))
    monkeypatch.setattr(recorded, "CLIENTS", 2)
    asyncio.run(Asking("http://x", "m", ["one", "two"], 1).run(way, 8, 1.0))
    asked = [body.get("kv_transfer_params") or {} for body in bodies]
    assert len(bodies) == 8 and {each.get("session") for each in asked} == sessions  # type: ignore[attr-defined]
    assert most == len(sessions)
    assert {str(body["messages"][0]["content"])[:3] for body in bodies} == {"one", "two"}  # type: ignore[index]
