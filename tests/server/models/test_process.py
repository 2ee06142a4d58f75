"""The store as a process: it starts its models, drains, and leaves none behind, however it ends."""

import asyncio
import contextlib
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from kit.ports import free_port
from kit.waiting import until_async
from tests.certificates import make_certificate

from .rig import ROOT, child_variables, served_by


@dataclass
class Process:
    """A running store."""

    process: "subprocess.Popen[bytes]"
    http: httpx.AsyncClient
    log: Path
    book_file: Path

    @property
    def book(self) -> list[str]:
        return self.book_file.read_text().splitlines() if self.book_file.exists() else []

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    async def ended(self, seconds: float) -> int:
        await until_async(lambda: self.process.poll() is not None, within_s=seconds)
        return self.process.wait()


@contextlib.asynccontextmanager
async def process(
    directory: Path, *words: str, is_waited_for: bool = True, certificate: Path | None = None, **variables: str
) -> AsyncIterator[Process]:
    store, log, book, port = directory / "store", directory / "log", directory / "book", free_port()
    for name in ("alpha", "beta"):
        (store / name).mkdir(parents=True)
        (store / name / "config.json").write_text("{}")
    with log.open("wb") as output:
        started = subprocess.Popen(
            [sys.executable, "-m", "tests.server.models.fake_store", str(store), str(port), *words],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=child_variables(book, **variables),
            start_new_session=True,
        )
    try:
        url = f"{'https' if certificate else 'http'}://127.0.0.1:{port}"
        verify = ssl.create_default_context(cafile=certificate) if certificate else False
        async with httpx.AsyncClient(base_url=url, timeout=60, verify=verify) as http:
            running = Process(started, http, log, book)
            if is_waited_for:
                await until_async(
                    lambda: "hotspan is ready" in log.read_text() or started.poll() is not None, within_s=120
                )
                assert started.poll() is None, log.read_text()
            yield running
    finally:
        if started.poll() is None:
            started.kill()
            started.wait()


async def test_sigterm_lets_streams_end_and_leaves_nobody(tmp_path: Path) -> None:
    """On SIGTERM an idle model stops at once, a busy one when its stream has ended; meanwhile newcomers get 503."""
    async with process(tmp_path, "--shutdown-timeout", "300") as running:
        children = running.children()
        assert len(children) == 3, "a process a model, and one that cleans up after a kill"
        (paced := tmp_path / "paced").touch()
        body = {"do": "stream", "steps": 20, "paced": str(paced)}
        text = ""
        async with running.http.stream("POST", "/predictions/alpha", json=body) as reply:
            async for part in reply.aiter_text():
                if not text:
                    running.process.send_signal(signal.SIGTERM)
                    await until_async(lambda: "beta stopped" in running.book)
                    late = await running.http.post("/predictions/alpha", json={})
                    ping = await running.http.get("/ping")
                    assert "alpha stopped" not in running.book
                    paced.write_text("." * 20)
                text += part
        assert late.status_code == 503 and late.headers["retry-after"] == "1"
        assert (ping.status_code, ping.json()["status"]) == (503, "Draining")
        assert text.endswith("data: [DONE]\n\n") and "alpha stream ended" in running.book
        assert await running.ended(60) == 0
        assert "alpha stopped" in running.book and psutil.wait_procs(children, 60)[1] == []


async def test_a_second_signal_cuts_off(tmp_path: Path) -> None:
    """Whoever is in a hurry signals twice: streams are cut, and nobody is left."""
    async with process(tmp_path, "--shutdown-timeout", "300") as running:
        children = running.children()
        body = {"do": "stream", "steps": 10_000}
        with contextlib.suppress(httpx.HTTPError):
            async with running.http.stream("POST", "/predictions/alpha", json=body) as reply:
                parts = reply.aiter_raw()
                await anext(parts)
                running.process.send_signal(signal.SIGTERM)
                await until_async(lambda: "beta stopped" in running.book)
                began = time.monotonic()
                running.process.send_signal(signal.SIGTERM)
                async for _ in parts:
                    pass
        await running.ended(60)
        assert "alpha stream ended" not in running.book
        assert time.monotonic() - began < 60
        assert psutil.wait_procs(children, 60)[1] == []


async def test_a_model_that_can_not_be_loaded_is_the_exit(tmp_path: Path) -> None:
    """The store ends with status 2 and one sentence that names the model; the others end, too."""
    async with process(tmp_path, is_waited_for=False, FAKE_BROKEN="beta") as running:
        assert await running.ended(120) == 2
        assert "the model beta can't be served: beta has no weights" in running.log.read_text()
        assert "Traceback" not in running.log.read_text()


async def test_tls_turns_and_a_kill(tmp_path: Path) -> None:
    """The store's port speaks TLS; its models load one after the other on a CPU; they end with it.

    After SIGKILL the store can tell nobody: its models see that it is gone.
    """
    pair = make_certificate(tmp_path)
    words = ("--ssl-certfile", str(pair.certificate), "--ssl-keyfile", str(pair.key))
    slow = {"CUDA_VISIBLE_DEVICES": "", "FAKE_SLOW_S": "0.2"}
    async with process(tmp_path, *words, certificate=pair.certificate, **slow) as running:
        log = running.log.read_text()
        assert "hotspan is ready on https://" in log and "2 models, 1 at a time" in log
        replies = await asyncio.gather(
            *(running.http.post(f"/predictions/{name}", json={}) for name in ("alpha", "beta"))
        )
        assert served_by(replies) == ["alpha", "beta"]
        children = running.children()
        os.kill(running.process.pid, signal.SIGKILL)
        await until_async(lambda: psutil.wait_procs(children, 0)[1] == [], within_s=60)
