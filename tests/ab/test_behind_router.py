"""Both sides of a canary split, behind a router of ours on a real socket."""

import asyncio
import json
from pathlib import Path

import pytest
from aiohttp import web
from rich.console import Console

from hotspan.ab import behind_router
from hotspan.ab.result import Verdict
from hotspan.ab.run import run_ab
from hotspan.ab.settings import AbSettings
from hotspan.core.errors import ConfigError
from tests.router.rig import Answering, Fake, replicas, routed

from .answers import Silent
from .test_cli import questions


def streams(text: str) -> Answering:
    """A chat completion of one token, as a stream; also the list of models."""

    async def answer(request: web.Request, body: bytes) -> web.StreamResponse:
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "small"}]})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        event = {"choices": [{"delta": {"content": text}, "finish_reason": "stop"}], "usage": {"completion_tokens": 1}}
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        return response

    return answer


async def compared(fakes: list[Fake], path: Path, share: float, *, exposes: bool = True) -> tuple[Verdict | None, str]:
    """The verdict and why, with the last of the replicas as the canary; None and the error, if there is one."""
    canary = fakes[-1].url
    async with routed(fakes, {canary: "canary"}, shares={"canary": share}, is_exposing=exposes) as at:
        asked = Path(questions(path / "s.jsonl", 25))
        settings = AbSettings(router=at.url, canary=(canary,), set=asked, max_drift=0.2, detect=0.6, quiet=True)
        try:
            result = await asyncio.to_thread(run_ab, settings, Console(quiet=True), Silent())
        except ConfigError as error:
            return None, str(error)
        return result.verdict, result.why


async def test_the_canary_is_compared_with_the_rest(tmp_path: Path) -> None:
    """A's requests reach the rest alone and B's the canary alone; what the canary says otherwise is a drift."""
    async with replicas(streams("as ever"), streams("as ever"), streams("as ever")) as fakes:
        verdict, why = await compared(fakes, tmp_path, 0.3)
        assert verdict is Verdict.PASS, why
        asked = [sum(b"question" in body for *_, body in fake.asked) for fake in fakes]
        assert asked[0] + asked[1] == asked[2] == 50
        fakes[2].answer = streams("otherwise")
        verdict, why = await compared(fakes, tmp_path, 0.3)
        assert verdict is Verdict.DRIFT, why


async def test_without_names_of_replicas_there_are_no_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A router that does not name replicas, and a canary that gets no sessions, are said to be what is missing."""
    monkeypatch.setattr(behind_router, "_MAX_PROBES", 50)
    async with replicas(streams("x"), streams("x")) as fakes:
        assert "--expose" in (await compared(fakes, tmp_path, 0.3, exposes=False))[1]
        assert "no session of 50 lives at --canary" in (await compared(fakes, tmp_path, 0.0))[1]
