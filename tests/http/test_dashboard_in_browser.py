"""The dashboard in Chromium: the figures that were served, the token, the keyboard, and no error in the console."""

import contextlib
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from aiohttp import web

from hotspan.http.dashboard import dashboard
from kit.waiting import until_async
from tests.router.rig import Answering, Fake, replicas, routed, say_ok

from .browser import CHROMIUM, Tab, browsing
from .figures import ADAPTERS, CACHE, MIB, Figures

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
            ["L2", "down", "0 KiB"],
        ]
        assert [row[6] for row in rows] == ["\N{EN DASH}", "3,317", "57,920", "0"]
        evicted = [row[7] for row in rows]
        assert evicted[0] == evicted[3] == "\N{EN DASH}", "nobody counts these"
        assert 3 * int(evicted[2]) == 2 * int(evicted[1]) > 0
        assert "engine's own cache 10.0 %, tiers" in cards
        assert "Engine 10.0 %" in await tab.run("document.querySelector('#rate-chart svg').ariaLabel")
        tenants = await tab.run("document.querySelector('#tenants tbody').innerText")
        texts = await tab.run("document.querySelector('#texts tbody').innerText")
        assert "handbook@7" in texts and "412" in texts and "untagged, first chunk 5f3a9c0011d2e4b7" in texts
        assert [row.split("\t") for row in tenants.splitlines()] == [
            ["acme", "28.7 GiB", "561 GiB", "589 GiB", "5.1 M"],
            ["globex", "16.6 GiB", "231 GiB", "248 GiB", "9,216"],
        ]
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


HOSTILE = "<img src=x onerror=document.title='hit'>"
ROWS = "[...document.querySelectorAll('#{} tbody tr')].map(row => [...row.cells].map(each => each.textContent))"
NOTE = "document.querySelector('#{} .note').textContent"

READ = [
    """{replicas: [{replica: "a", missing: "", lookup_tokens: 100, hit_tokens: {ram: 50}},
        {replica: "restarted", missing: "", lookup_tokens: 9000, hit_tokens: {ram: 9000}},
        {replica: "fell", missing: "", lookup_tokens: 900, hit_tokens: {ram: 90}},
        {replica: "came", missing: "down"}]}""",
    """{replicas: [{replica: "a", missing: "", lookup_tokens: 200, hit_tokens: {ram: 75}},
        {replica: "restarted", missing: "", lookup_tokens: 10, hit_tokens: {ram: 10}},
        {replica: "fell", missing: "down"},
        {replica: "came", missing: "", lookup_tokens: 9000, hit_tokens: {ram: 9000}}]}""",
]
"""Two readings, between which replicas restarted, failed and came: they do not count."""


def growing(figures: Figures) -> Callable[[], str]:
    """The page of metrics of a server that works two seconds between two readings."""

    def page() -> str:
        figures.step()
        return figures.page().decode()

    return page


def holding(store: str, **tenants: int) -> Answering:
    """A replica whose RAM has so many chunks of 1 MiB of each tenant, with an L2."""
    tiers = {"ram": {"chunks": sum(tenants.values()), "bytes": sum(tenants.values()) * MIB, "tenants": tenants}}
    contents = {"tiers": {**tiers, "l2": {"store": store}}, "hit_tokens": dict.fromkeys(tenants, 256)}

    async def answer(request: web.Request, body: bytes) -> web.StreamResponse:
        is_contents = request.path == "/hotspan/cache"
        return web.json_response({"replicas": [contents]}) if is_contents else await say_ok(request, body)

    return answer


async def test_a_routers_dashboard(tmp_path: Path) -> None:
    """A real router's: its replicas, the requests that it has forwarded, and the tiers and tenants of all replicas."""
    shots = Path(os.environ.get("SHOTS", tmp_path))
    many = {f"tenant-{number:02}": 10 for number in range(30)}
    one, two = holding("store", acme=2048, **{HOSTILE: 1024}), holding("store", acme=1024, globex=512, **many)
    async with replicas(one, two, say_ok) as fakes:
        for fake in fakes[:2]:
            fake.metrics = growing(Figures())
        gone = Fake(url="http://127.0.0.1:1")
        async with routed([*fakes, gone]) as at:
            await until_async(lambda: at.router.health[gone.url].health.value == "down")
            for _ in range(5):
                assert await at.status() == 200
            async with browsing(at.url + "/dashboard", tmp_path / "profile") as tab:
                await tab.until("document.querySelectorAll('#fleet tbody tr').length === 4")
                await tab.until("history_.length >= 3")
                names = await tab.run("[...document.querySelectorAll('#fleet tbody th')].map(each => each.textContent)")
                assert names == [fake.url for fake in [*fakes, gone]]
                assert await tab.run("document.querySelector('#cards dd').textContent") == "3 of 4"
                outcomes = await tab.run("document.querySelector('#outcomes tbody').innerText")
                assert "ok\t5\t5" in outcomes, outcomes
                await check_sums(tab, [*fakes, gone])
                for width, scheme in ((1280, "light"), (1280, "dark"), (400, "dark"), (400, "light")):
                    await tab.shot(shots / f"router-{width}-{scheme}.png", width, scheme)
                    assert await tab.run("document.documentElement.scrollWidth <= innerWidth")
                parts = await tab.accessible()
                named = {role: [name for found, name in parts if found == role] for role, _ in parts}
                for role in ("image", "meter", "region", "rowheader"):
                    assert named[role] and "" not in named[role], (role, named[role])
                assert [name for name in named["image"] if name.startswith("Hit rate by tier, all replicas, now: Eng")]
                assert "Tiers, all replicas" in named["region"] and "Tenants" in named["region"]
                assert not tab.problems


async def check_sums(tab: Tab, fakes: list[Fake]) -> None:
    """Of two replicas that tell, one without metrics and one that is gone."""
    rows = await tab.run(ROWS.format("tiers"))
    assert [row[:4] + row[5:6] for row in rows] == [
        ["Engine", "2", "\N{EN DASH}", "22.4 GiB", "53.4 GiB"],
        ["RAM", "2", "up", "93 GiB", "128 GiB"],
        ["Disk", "2", "up", "1,624 GiB", "2,048 GiB"],
        ["L2, shared", "2", "down at 2", "0 KiB", "\N{EN DASH}"],
    ]
    assert [rows[0][8], rows[2][8], rows[3][8]] == ["10.0 %", "15.0 %", "2.0 %"]
    assert rows[0][6] == rows[3][6] == "\N{EN DASH}" and 3 * int(rows[2][6]) == 2 * int(rows[1][6]) > 0
    note = await tab.run(NOTE.format("tiers"))
    left_out = "2 of 4 replicas count. Left out: {} {}; {} is down.\n"
    assert note.startswith(left_out.format(fakes[2].url, "answers with status 404", fakes[3].url))
    hit = "document.querySelector('#tier-chart svg').ariaLabel"
    assert await tab.run(f"ratesOfAll({READ[1]}, {READ[0]})") == {"ram": 0.25}
    assert "Engine 10.0 %, RAM" in await tab.run(hit) and "Disk 15.0 %, L2 2.0 %" in await tab.run(hit)
    rates = await tab.run(ROWS.format("fleet"))
    assert rates[0][2].endswith(" %") and [row[2] for row in rates[2:]] == 2 * ["\N{EN DASH}"]
    tenants, empty = await tab.run(ROWS.format("tenants")), "0 KiB"
    assert tenants[:2] == [
        ["acme", "3 GiB", empty, "3 GiB", "512"],
        [HOSTILE, "1 GiB", empty, "1 GiB", "256"],
    ]
    note, why = await tab.run(NOTE.format("tenants")), "sent no contents, or those of too many tenants"
    assert note.startswith(left_out.format(fakes[2].url, why, fakes[3].url))
    assert len(tenants) == 20 and note.endswith("The largest 20 of 33.")
    assert not await tab.run("document.querySelectorAll('img').length") and "hit" not in await tab.run("document.title")
