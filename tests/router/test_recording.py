"""`hotspan trace record` through a router: its real command line, a router on a real socket, small replicas."""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, STDOUT
from pathlib import Path
from typing import Any

from aiohttp import web

from .rig import Answering, replicas, routed


def recording(replica: int, counts: dict[int, int]) -> Answering:
    """A replica that has one row at each look, at times of its own."""

    async def answer(request: web.Request, body: bytes) -> web.StreamResponse:
        assert request.path == "/hotspan/trace" and request.method == "POST"
        number = counts[replica] = counts.get(replica, 0) + 1
        row: dict[str, Any] = {
            "timestamp": 1000 * number + replica,
            "input_length": 600,
            "output_length": 2,
            "hash_ids": [replica, number],
            "cached_length": 300,
            "ttft_ms": 20.0,
        }
        return web.json_response({"rows": [row], "running": 0, "dropped": 0, "said": json.loads(body)["recording"]})

    return answer


async def test_all_replicas_behind_a_router_are_recorded(tmp_path: Path) -> None:
    """Rows of both, by their time, in one recording; how many were lost, and who did not answer, is said."""
    counts: dict[int, int] = {}
    output = tmp_path / "trace.jsonl"
    async with replicas(recording(1, counts), recording(2, counts)) as fakes, routed(fakes) as at:
        words = ["trace", "record", str(output), "--server", at.url, "--seconds", "0.05", "--token", "a" * 32]
        command = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "hotspan", *words, stdout=PIPE, stderr=STDOUT
        )
        said = (await command.communicate())[0].decode()
    assert command.returncode == 0, said
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(rows) == sum(counts.values()) and {row["hash_ids"][0] for row in rows} == {1, 2}
    times = [row["timestamp"] for row in rows]
    assert times == sorted(times) and times[0] == 0
    names = {json.loads(body)["recording"] for fake in fakes for *_, body in fake.asked}
    assert len(names) == 1 and "hit rate 50.0%" in said and "did not always answer" not in said
