"""Models that load, die and come back, each for itself."""

import asyncio
import errno
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from hotspan.core.errors import EngineError
from hotspan.http.errors import MODEL, REFUSED
from hotspan.server.models.served import ChildCommand, ModelState, Pauses, ServedModel
from hotspan.server.principal import Link
from kit.waiting import until_async

from .rig import Store, served_by, store


async def died(running: Store, name: str) -> None:
    """It is gone, and does not come back before it is let go."""
    running.hold(name)
    assert (await running.ask(f"/predictions/{name}", do="die")).status_code == 503
    await until_async(lambda: running[name].state is not ModelState.READY)


async def test_a_dead_model_comes_back_and_the_others_go_on() -> None:
    """While one model is started again it alone answers 503 with Retry-After; /ping stays healthy and says which."""
    async with store("alpha", "beta") as running:
        await died(running, "alpha")
        gone = await running.ask("/predictions/alpha")
        assert gone.status_code == 503 and int(gone.headers["retry-after"]) >= 1
        assert "alpha" in gone.json()["error"]["message"]
        assert served_by([await running.ask("/predictions/beta")]) == ["beta"]
        ping = await running.http.get("/ping")
        assert ping.status_code == 200
        assert ping.json() == {"status": "Healthy", "models": {"alpha": "Restarting", "beta": "Healthy"}}
        running.let_go("alpha")
        await running.ready()
        assert served_by([await running.ask("/predictions/alpha")]) == ["alpha"]
        assert running["alpha"].starts == 2 and running["beta"].starts == 1


async def test_a_stalled_model_alone_is_ill(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose engine makes no steps answers 503 about that model; the others, and /ping, go on until all stall."""
    monkeypatch.setattr("hotspan.server.models.served._CHECK_S", 0.01)
    async with store("alpha", "beta") as running:
        stalled = running.book_file.with_name("alpha.stalled")
        stalled.touch()
        await until_async(lambda: running["alpha"].state is ModelState.STALLED)
        ill = await running.ask("/predictions/alpha")
        assert ill.status_code == 503 and ill.headers["retry-after"] and ill.headers[REFUSED] == MODEL
        assert "no steps" in ill.json()["error"]["message"]
        assert served_by([await running.ask("/predictions/beta")]) == ["beta"]
        ping = await running.http.get("/ping")
        assert (ping.status_code, ping.json()["models"]) == (200, {"alpha": "Stalled", "beta": "Healthy"})
        running.book_file.with_name("beta.stalled").touch()
        await until_async(lambda: running["beta"].state is ModelState.STALLED)
        ping = await running.http.get("/ping")
        assert (ping.status_code, ping.json()["status"]) == (503, "Stalled")
        stalled.unlink()
        await until_async(lambda: running["alpha"].state is ModelState.READY)
        assert served_by([await running.ask("/predictions/alpha")]) == ["alpha"] and running["alpha"].starts == 1


async def test_a_model_whose_server_does_not_answer_is_stalled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's whole process that is stopped is ill once its time to answer is over, and well when it goes on."""
    monkeypatch.setattr("hotspan.server.models.served._CHECK_S", 0.01)
    async with store("alpha", answer_s=0.2) as running:
        process = running["alpha"]._process
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        await until_async(lambda: running["alpha"].state is ModelState.STALLED)
        process.send_signal(signal.SIGCONT)
        await until_async(lambda: running["alpha"].state is ModelState.READY)


async def test_a_model_that_can_not_be_started_again_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the machine has no process for it for a while, it alone is away; the others answer."""
    async with store("alpha", "beta") as running:
        create, failures = asyncio.create_subprocess_exec, 0

        async def fails(*words: Any, **options: Any) -> Any:
            nonlocal failures
            if failures < 2:
                failures += 1
                raise BlockingIOError(errno.EAGAIN, "no more processes")
            return await create(*words, **options)

        monkeypatch.setattr(asyncio, "create_subprocess_exec", fails)
        assert (await running.ask("/predictions/alpha", do="die")).status_code == 503
        await until_async(lambda: failures == 1)
        assert served_by([await running.ask("/predictions/beta")]) == ["beta"]
        await until_async(lambda: failures == 2)
        await running.ready()
        assert served_by([await running.ask("/predictions/alpha")]) == ["alpha"] and not running.keepers[0].done()


async def test_without_any_model_it_is_not_healthy() -> None:
    """When no model can answer, /ping and /health are 503."""
    async with store("alpha") as running:
        await died(running, "alpha")
        ping = await running.http.get("/ping")
        assert (ping.status_code, ping.json()["status"]) == (503, "Unhealthy") and ping.headers["retry-after"]
        health = await running.http.get("/health")
        assert health.status_code == 503 and health.headers["retry-after"]


async def test_loading_is_said_and_one_at_a_time() -> None:
    """Until all are loaded /ping is 503 Loading; what is loaded answers already, and no two load at once."""
    async with store("alpha", "beta", at_once=1, is_waited_for=False, held=("alpha", "beta")) as running:
        early = await running.ask("/predictions/alpha")
        assert early.status_code == 503 and early.headers["retry-after"] == "5"
        assert (await running.http.get("/ping")).json()["status"] == "Loading"
        await until_async(lambda: "alpha started" in running.book)
        assert running["beta"].starts == 0
        running.let_go("alpha")
        await until_async(lambda: running["alpha"].state is ModelState.READY)
        assert running["beta"].state is ModelState.LOADING
        ping = await running.http.get("/ping")
        assert (ping.status_code, ping.json()["status"]) == (503, "Loading") and ping.headers["retry-after"]
        assert served_by([await running.ask("/predictions/alpha")]) == ["alpha"]
        running.let_go("beta")
        await running.ready()
        assert (await running.http.get("/ping")).status_code == 200


async def test_a_model_that_can_not_be_loaded_ends_the_store() -> None:
    """Its reason is the error, and names the model."""
    async with store("alpha", "beta", is_waited_for=False, FAKE_BROKEN="beta") as running:
        await until_async(lambda: any(keeper.done() for keeper in running.keepers), within_s=120)
        with pytest.raises(EngineError, match="the model beta can't be served: beta has no weights"):
            await running.keepers[1]


async def test_a_partial_store_serves_what_loads() -> None:
    """With --partial the others are served and /ping is healthy; the broken one is tried again and again."""
    async with store("alpha", "beta", is_partial=True, is_waited_for=False, FAKE_BROKEN="beta") as running:
        await until_async(
            lambda: running["beta"].starts >= 2 and running["alpha"].state is ModelState.READY, within_s=120
        )
        ping = await running.http.get("/ping")
        assert ping.json() == {"status": "Healthy", "models": {"alpha": "Healthy", "beta": "Restarting"}}
        assert (await running.ask("/predictions/beta")).status_code == 503


async def test_a_model_that_never_loads_is_given_up() -> None:
    """After the startup timeout its process is gone, and the error says what to raise."""
    async with store("alpha", is_waited_for=False, startup_timeout_s=1.0, FAKE_SLOW_S="600") as running:
        await until_async(lambda: running["alpha"]._process)
        process = running["alpha"]._process
        with pytest.raises(EngineError, match="--startup-timeout-s"):
            await asyncio.wait_for(asyncio.shield(running.keepers[0]), 60)
        assert process is not None and process.returncode is not None


async def test_a_model_is_stopped_after_its_last_request(tmp_path: Path) -> None:
    """Draining waits for every request that is in work, not only for one."""
    command = ChildCommand(("true",), b"", {}, tmp_path / "reason")
    model = ServedModel(("a",), Link(str(tmp_path / "a"), "a-secret-of-some-length"), command, startup_timeout_s=1)
    with model.asked():
        with model.asked():
            drain = asyncio.create_task(model.drain())
        await asyncio.sleep(0.05)
        assert not drain.done()
    await asyncio.wait_for(drain, 60)


COUNTS = """\
import pathlib, signal, sys, time
book = pathlib.Path(sys.argv[1])
signal.signal(signal.SIGTERM, lambda *_: book.write_text(book.read_text() + "told "))
book.write_text("")
while not book.read_text():
    time.sleep(0.01)
time.sleep(0.3)
"""


async def test_a_model_is_told_to_stop_once(tmp_path: Path) -> None:
    """A second signal would cut off what the first lets end: draining and stopping are one signal together."""
    book = tmp_path / "book"
    command = ChildCommand((sys.executable, "-c", COUNTS, str(book)), b"", {}, tmp_path / "reason")
    model = ServedModel(("a",), Link(str(tmp_path / "a"), "a-secret-of-some-length"), command, startup_timeout_s=120)
    pids: list[int] = []
    model.on_start = pids.append
    keeper = asyncio.create_task(model.keep(asyncio.Semaphore(1)))
    await until_async(
        lambda: pids and book.exists(), within_s=120
    )  # one that is given up while it is started is killed
    keeper.cancel()
    await model.drain()
    await until_async(book.read_text)
    await model.stop(10)
    assert book.read_text() == "told "


def test_pauses_grow_and_start_anew_after_a_long_life() -> None:
    """Pauses double up to a minute; a model that lived for a minute begins with the shortest again."""
    pauses = Pauses()
    assert [pauses.after(0.5) for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert [pauses.after(61.0), pauses.after(1.0)] == [1, 2]
