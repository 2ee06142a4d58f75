"""The dashboard in Chromium: the figures that were served, the token, the keyboard, and no error in the console."""

import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from hotspan.http.dashboard import dashboard
from tests.router.rig import replicas, routed, say_ok

from .browser import CHROMIUM, browsing
from .figures import ADAPTERS, CACHE, Figures

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]

TOKEN = "0123456789abcdef"
FOCUS = "document.activeElement.id || document.activeElement.tagName"


@contextlib.asynccontextmanager
async def served(figures: Figures) -> AsyncIterator[tuple[str, web.AppRunner]]:
    """A server that requires the token for all but the page; two seconds of work before each answer."""

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/dashboard":
            return web.Response(body=dashboard().content, headers={**dashboard().headers, "content-type": "text/html"})
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return web.json_response({"error": {"message": "this is for the administrator"}}, status=401)
        if request.path == "/metrics":
            figures.step()
            return web.Response(body=figures.page(), content_type="text/plain")
        return web.json_response({"/hotspan/cache": CACHE, "/adapters": ADAPTERS}[request.path])

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/dashboard", runner
    finally:
        await runner.cleanup()


async def test_a_servers_dashboard(tmp_path: Path) -> None:
    """It asks for the token, refuses a wrong one in words, shows what was served, and says when the server is gone."""
    figures = Figures()
    shots = Path(os.environ.get("SHOTS", tmp_path))
    async with served(figures) as (url, runner), browsing(url, tmp_path / "profile") as tab:
        await tab.until("!document.querySelector('#login').hidden")
        assert await tab.run(FOCUS) == "token"
        assert await tab.run("document.querySelector('#figures').hidden")
        await tab.send("Input.insertText", text="wrong")
        await tab.press("Tab")
        await tab.run("document.activeElement.click()")
        await tab.until("document.querySelector('#state').textContent.startsWith('The token was refused')")
        refused = [problem for problem in tab.problems if "401" not in problem]
        assert not refused, refused
        tab.problems.clear()
        await tab.send("Input.insertText", text=TOKEN)
        await tab.press("Tab")
        await tab.run("document.activeElement.click()")
        await tab.until("history_.length >= 4")
        rate = figures.hit_rate
        assert await tab.run("document.querySelector('#cards dd').textContent") == f"{100 * rate:.1f} %"
        cards = await tab.run("document.querySelector('#cards').innerText")
        assert "GPU utilization" in cards and "80.0 %" in cards and "of GPU per request" in cards
        rows = await tab.run(
            "[...document.querySelectorAll('#tiers tbody tr')].map(row => [...row.cells].map(each => each.textContent))"
        )
        assert [row[:6] for row in rows[:1]] == [["Engine", "\N{EN DASH}", "42.0 %", "", "26.7 GiB", "500,000"]]
        assert [row[:3] for row in rows[1:]] == [
            ["RAM", "up", "46.5 GiB"],
            ["Disk", "up", "812 GiB"],
            ["L2", "given up", "0 KiB"],
        ]
        assert [row[6] for row in rows] == ["\N{EN DASH}", "3,317", "57,920", "0"]
        assert "engine's own cache 10.0 %, tiers" in cards
        assert "Engine 10.0 %" in await tab.run("document.querySelector('#rate-chart svg').ariaLabel")
        tenants = await tab.run("document.querySelector('#tenants tbody').innerText")
        texts = await tab.run("document.querySelector('#texts tbody').innerText")
        assert "handbook@7" in texts and "412" in texts and "untagged, first chunk 5f3a9c0011d2e4b7" in texts
        assert tenants.split() == ["acme", "2,100", "41,000", "0", "globex", "1,217", "16,920", "0"]
        for width, scheme in ((1280, "light"), (1280, "dark"), (400, "light")):
            await tab.shot(shots / f"server-{width}-{scheme}.png", width, scheme)
            assert await tab.run("document.documentElement.scrollWidth <= innerWidth")
        await tab.run("document.querySelector('#forget').focus()")
        order = []
        for _ in range(4):
            await tab.press("Tab")
            order.append(await tab.run("document.activeElement.tagName"))
        assert order[:3] == ["SUMMARY"] * 3 and order[3] == "DIV"
        unnamed = "[...document.querySelectorAll('svg, meter')].filter(each => !each.getAttribute('aria-label')).length"
        assert await tab.run(unnamed) == 0
        parts = await tab.accessible()
        names = {role: [name for found, name in parts if found == role] for role, _ in parts}
        for role in ("image", "meter", "region", "button", "columnheader", "rowheader"):
            empty = 1 if role == "columnheader" else 0  # above the meters, which have names of their own
            assert names[role] and names[role].count("") == empty, (role, names[role])
        assert names["heading"][:5] == [
            *("hotspan server", "Hit rate by tier", "Time to first token", "Flows between tiers", "Tiers")
        ]
        assert [name for name in names["image"] if name.startswith("Time to first token, now: median ")]
        assert names["status"] and "Live: every 2 seconds." in names["StaticText"]
        assert not tab.problems
        await runner.cleanup()
        await tab.until("document.querySelector('#state').textContent.startsWith('Offline')")


async def test_a_routers_dashboard(tmp_path: Path) -> None:
    """A real router's: its replicas, and the requests that it has forwarded."""
    shots = Path(os.environ.get("SHOTS", tmp_path))
    async with replicas(say_ok, say_ok) as fakes, routed(list(fakes)) as at:
        for _ in range(5):
            async with at.post() as answer:
                await answer.read()
        async with browsing(at.url + "/dashboard", tmp_path / "profile") as tab:
            await tab.until("document.querySelectorAll('#fleet tbody tr').length === 2")
            names = await tab.run("[...document.querySelectorAll('#fleet tbody th')].map(each => each.textContent)")
            assert names == [fake.url for fake in fakes]
            assert await tab.run("document.querySelector('#cards dd').textContent") == "2 of 2"
            outcomes = await tab.run("document.querySelector('#outcomes tbody').innerText")
            assert "ok\t5\t5" in outcomes, outcomes
            for width, scheme in ((1280, "light"), (400, "dark")):
                await tab.shot(shots / f"router-{width}-{scheme}.png", width, scheme)
                assert await tab.run("document.documentElement.scrollWidth <= innerWidth")
            assert not tab.problems
