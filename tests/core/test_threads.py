"""Threads have a net: what one raises is told, and workers go on. No thread of the product is made without it."""

import ast
import logging
import threading
from collections import Counter
from pathlib import Path

import pytest

import hotspan
from hotspan.core.threads import go_on, start, start_worker
from hotspan.tiers.io import IoThreads

SOURCE = Path(hotspan.__file__).parent

EXECUTORS = {
    "server/source.py": "pool.map raises in the caller",
    "server/python_control.py": "result() in the caller",
    "engine/fingerprint.py": "pool.map raises in the caller",
    "engine/admin.py": "futures are answers, or their job catches what it raises (_submit)",
    "l2/s3.py": "wait, then result() of each in the caller",
}
"""Executors keep what a job raises in its future: who looks at that."""

TASKS = {
    "server/warming.py": (3, "_run ends its job as failed; asked and other are awaited, or gathered"),
    "server/admission.py": (1, "awaited by the request"),
    "server/models/relay.py": (2, "awaited by the request"),
    "server/models/served.py": (1, "the watch goes on"),
    "server/models/run.py": (3, "ends wait for their models; a keeper that fails stops the store; the watch goes on"),
    "server/run.py": (3, "both watches go on; the warm-up is awaited"),
    "server/liveness.py": (1, "an engine that fails is no engine that hangs: what it raises is dropped"),
    "server/step_health.py": (1, "the watch goes on"),
    "server/adapters/loader.py": (1, "shielded and awaited by who asked"),
    "http/serving.py": (1, "lets the server exit however it ends"),
    "http/exchange.py": (1, "its callback sees that it is done"),
    "router/gateway.py": (1, "each goes on"),
    "router/shadow.py": (2, "a TaskGroup raises in the gateway; who waits for a comparison logs what it raises"),
    "router/ray/policy.py": (1, "awaited by each choice"),
    "daemon/unix_server.py": (1, "a client whose answer raises is ignored from then on"),
    "formatters/calls.py": (1, "waited for by run, which judges its outcome"),
    "bench/runner.py": (1, "samples are missing from the report"),
    "bench/workloads/base.py": (4, "a TaskGroup raises in the caller"),
    "bench/workloads/sessions.py": (1, "a TaskGroup raises in the caller"),
    "ab/asking.py": (1, "a TaskGroup raises in the caller"),
}
"""Tasks: how many are made, and who sees what one raises."""


def calls() -> list[tuple[str, str]]:
    """Each call in the product that makes a thread, an executor or a task: where, and of what."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                found.append((str(path.relative_to(SOURCE)), name))
    return found


def test_every_thread_has_the_net() -> None:
    """Threads are made by core/threads.py alone; whoever makes an executor or a task says who sees its exceptions."""
    made = Counter(calls())
    threads = {where for where, name in made if name in ("Thread", "Timer")}
    assert threads == {"core/threads.py"}, "use hotspan.core.threads: a thread without a net ends unseen"
    assert {where for where, name in made if name == "ThreadPoolExecutor"} == EXECUTORS.keys()
    tasks = Counter[str]()
    for (where, name), count in made.items():
        if name in ("create_task", "ensure_future"):
            tasks[where] += count
    assert tasks == {where: count for where, (count, _) in TASKS.items()}


def test_what_a_thread_raises_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """An exception is logged with the thread's name, and its owner gets it."""
    failures: list[Exception] = []

    def fail() -> None:
        raise MemoryError("none left")

    start("test", fail, failed=failures.append).join()
    assert [type(each) for each in failures] == [MemoryError]
    assert "thread_failed name=test" in caplog.text


def test_a_worker_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """A loop that raises is begun anew after a pause, until it returns, or is over."""
    runs, pauses = list[int](), list[float]()

    def loop() -> None:
        runs.append(1)
        if len(runs) < 3:
            raise ValueError("a mistake")

    start_worker("test", loop, is_over=lambda: False, wait=pauses.append).join()
    assert len(runs) == 3 and pauses == [1.0, 1.0]
    runs.clear()
    start_worker("test", loop, is_over=lambda: True, wait=pauses.append).join()
    assert len(runs) == 1 and len(pauses) == 2


async def test_a_task_goes_on(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same of a task: it is begun anew, until it returns or is cancelled."""
    monkeypatch.setattr("hotspan.core.threads.AGAIN_S", 0.0)
    runs = list[int]()

    async def loop() -> None:
        runs.append(1)
        if len(runs) < 3:
            raise ValueError("a mistake")

    await go_on("test", loop)
    assert len(runs) == 3 and caplog.text.count("task_failed name=test") == 2


@pytest.mark.parametrize("error", [MemoryError, KeyError, RuntimeError, RecursionError])
def test_an_io_thread_outlives_any_exception(error: type[Exception]) -> None:
    """A job that raises is reported as dropped; the thread does the next one, and the queue drains and closes."""
    queue, dropped, done = IoThreads("test", 1), list[str](), threading.Event()

    def fail(scratch: memoryview) -> None:
        raise error("a mistake")

    def not_told() -> None:
        dropped.append("second")
        raise error("another")

    queue.submit(fail, lambda: dropped.append("first"), urgent=True)
    queue.submit(fail, not_told, urgent=True)
    queue.submit(lambda scratch: done.set(), lambda: None, urgent=False)
    assert done.wait(60) and queue.drain(60)
    assert dropped == ["first", "second"] and queue.close(60)


@pytest.fixture(autouse=True)
def loud(caplog: pytest.LogCaptureFixture) -> None:
    """What is logged is looked at."""
    caplog.set_level(logging.WARNING)
