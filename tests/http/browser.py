"""Headless Chromium over its DevTools protocol: a page, what its script finds, and what the console says."""

import asyncio
import base64
import contextlib
import itertools
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


class Tab:
    """One page. problems: errors of the console, exceptions, and what the page's policy blocked."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.problems: list[str] = []
        self._socket = socket
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            told = message.json()
            if "id" in told:
                self._waiting.pop(told["id"]).set_result(told)
            elif told["method"] == "Runtime.exceptionThrown":
                self.problems.append(str(told["params"]["exceptionDetails"]))
            elif told["method"] == "Log.entryAdded" and told["params"]["entry"]["level"] == "error":
                self.problems.append(told["params"]["entry"]["text"])

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a command."""
        number = next(self._ids)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        told = await self._waiting_for(number)
        assert "error" not in told, told
        result: dict[str, Any] = told["result"]
        return result

    async def _waiting_for(self, number: int) -> dict[str, Any]:
        async with asyncio.timeout(60):
            return await self._waiting[number]

    async def run(self, script: str) -> Any:
        """The value of an expression, awaited if it is a promise."""
        told = await self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    async def until(self, script: str) -> None:
        """Wait until an expression is true; the page looks at each of its changes. What throws is not true yet."""
        found = f"""new Promise(done => {{ const is = () => {{ try {{ return {script} }} catch {{ return false }} }};
            const look = () => is() && (seen.disconnect(), done(true));
            const seen = new MutationObserver(look);
            seen.observe(document, {{subtree: true, childList: true, attributes: true, characterData: true}}); look();
            }})"""
        assert await self.run(found)

    async def accessible(self) -> list[tuple[str, str]]:
        """Role and name of all that a screen reader is told of, in its order."""
        nodes = (await self.send("Accessibility.getFullAXTree"))["nodes"]
        shown = [each for each in nodes if not each["ignored"]]
        return [(each["role"]["value"], each.get("name", {}).get("value", "")) for each in shown]

    async def press(self, key: str) -> None:
        """Press and release a key."""
        codes = {"Tab": 9, "Enter": 13}
        for kind in ("rawKeyDown", "keyUp"):
            await self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key])

    async def shot(self, path: Path, width: int, scheme: str) -> None:
        """Write a screenshot of the whole page."""
        await self.sized(width, scheme)
        drawn = await self.run("history_.at(-1).at")
        await self.until(f"history_.at(-1).at > {drawn}")
        height = await self.run("document.documentElement.scrollHeight")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        told = await self.send("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(told["data"]))

    async def sized(self, width: int, scheme: str) -> None:
        """Set the width and the preferred colours."""
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.send("Emulation.setEmulatedMedia", features=features)


@contextlib.asynccontextmanager
async def browsing(url: str, directory: Path, *more: str) -> AsyncIterator[Tab]:
    """A browser that has opened `url`. directory: of its profile. more: options."""
    assert CHROMIUM is not None
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    options += ["--remote-debugging-port=0", f"--user-data-dir={directory}", "--disable-background-networking"]
    null = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        CHROMIUM, *options, *more, "about:blank", stdout=null, stderr=asyncio.subprocess.PIPE
    )
    try:
        assert process.stderr is not None
        while b"DevTools listening on ws://" not in (line := await process.stderr.readline()):
            assert line, "the browser ended"
        address = line.decode().split("ws://")[1].split("/")[0]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://{address}/json/list") as answer:
                (page, *_) = [each for each in await answer.json() if each["type"] == "page"]
            async with session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=1 << 28) as socket:
                tab = Tab(socket)
                for domain in ("Runtime", "Log", "Page"):
                    await tab.send(f"{domain}.enable")
                await tab.send("Page.navigate", url=url)
                try:
                    yield tab
                finally:
                    await tab.send("Browser.close")  # it removes its temporary files, as it does not at a signal
                    await process.wait()
                    tab.reader.cancel()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
