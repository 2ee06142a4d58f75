"""The dashboard of a real server in Chromium: its figures are those of `/metrics` and `/hotspan/cache`."""

import json
import os
import urllib.request
from pathlib import Path
from typing import Any

import openai
import pytest

from hotspan.bench.prose import prose
from hotspan.config.admin_token import VARIABLE
from hotspan.core.types import Tier
from hotspan.router.caches import contents_in, figures_in
from tests.http.browser import CHROMIUM, browsing

from .conftest import serving

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]

TOKEN = "a-token-of-at-least-thirty-two-characters"


async def test_the_page_of_a_real_server(tiny_model: Path, tmp_path: Path) -> None:
    """Tiers, chunks, hit rate and time to first token are there, as the server counted them; the console is silent."""
    disk = ("--ram-gib", "0.1", "--disk", str(tmp_path / "kv"), "--disk-gib", "0.5")
    with serving(tiny_model, tmp_path / "log", *disk, variables={VARIABLE: TOKEN}) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        for _ in range(3):
            client.completions.create(model=server.model, prompt=prose(1, 1500), max_tokens=2)
        async with browsing(server.url + "/dashboard", tmp_path / "profile") as tab:
            await tab.until("!document.querySelector('#login').hidden")
            await tab.send("Input.insertText", text=TOKEN)
            await tab.press("Tab")
            await tab.run("document.activeElement.click()")
            await tab.until("document.querySelectorAll('#tiers tbody tr').length === 3")
            contents, metrics = (read(server.url + path) for path in ("/hotspan/cache", "/metrics"))
            (replica,) = json.loads(contents)["replicas"]
            check_as_of_a_router(contents, metrics, replica)
            rows = await tab.run(
                "[...document.querySelectorAll('#tiers tbody tr')].map(row => [...row.cells].map(c => c.textContent))"
            )
            assert [row[:2] for row in rows] == [["Engine", "\N{EN DASH}"], ["RAM", "up"], ["Disk", "up"]]
            assert rows[1][6] == str(replica["tiers"]["ram"]["chunks"]) != "0"
            cards = await tab.run("[...document.querySelectorAll('#cards dd:nth-of-type(1)')].map(c => c.textContent)")
            assert len(cards) == 5 and all(
                any(digit in card for digit in "0123456789") for card in (cards[0], cards[1], cards[4])
            ), cards
            await tab.shot(Path(os.environ.get("SHOTS", tmp_path)) / "real-1280-light.png", 1280, "light")
            assert "LoRA" in await tab.run("document.querySelector('#adapters .note').textContent")
            # 401 before the token; 400 of /adapters, as LoRA is off.
            unexpected = [problem for problem in tab.problems if "401" not in problem and "400" not in problem]
            assert not unexpected, unexpected


def read(url: str) -> bytes:
    """What the administrator gets."""
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return bytes(answer.read())


def check_as_of_a_router(contents: bytes, metrics: bytes, replica: dict[str, Any]) -> None:
    """A router in front finds the same in both answers, the engine's own cache included."""
    figures, stored = figures_in(metrics), contents_in(contents)
    assert figures is not None and stored is not None
    assert list(figures.tiers) == [Tier.GPU, Tier.RAM, Tier.DISK]
    ram = figures.tiers[Tier.RAM]
    assert (ram.used_bytes, ram.capacity_bytes) == tuple(
        replica["tiers"]["ram"][part] for part in ("bytes", "capacity_bytes")
    )
    gpu = figures.tiers[Tier.GPU]
    assert gpu.capacity_bytes > gpu.used_bytes >= 0 and figures.lookup_tokens > gpu.hit_tokens > 0
    assert stored.tenants["default"].ram_bytes == replica["tiers"]["ram"]["bytes"] > 0
