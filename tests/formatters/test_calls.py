"""Formatters that fail, block and hang: named errors, and nobody else waits."""

import asyncio
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from hotspan.core.errors import FormatterError
from hotspan.formatters import Formatters, load_formatters
from hotspan.formatters.calls import MAX_HUNG, MAX_OF_ALL, MAX_RUNNING, Threads
from tests.bench.simulated import in_stepped_time, pass_time
from tests.formatters.conftest import Write

LIMIT_S = 4.0

GATED = """
import threading, time
from djl_python.input_parser import input_formatter
from djl_python.output_formatter import output_formatter

gate, running, most, lock = threading.Event(), 0, 0, threading.Lock()

@input_formatter
def hang(payload):
    global running, most
    with lock:
        running += 1
        most = max(most, running)
    if payload.get("hangs", True):
        gate.wait(600)
    with lock:
        running -= 1
    return {"most": most}

@output_formatter
def fast(answer):
    gate.set() if answer == "open" else None
    return answer
"""


@pytest.fixture
def gated(write: Write) -> Iterator[Formatters]:
    """Formatters whose input hangs until the output is told to open the gate."""
    formatters = load_formatters(
        write(model=GATED), {"other": write("other", model=GATED)}, is_secure=False, timeout_s=LIMIT_S
    )
    yield formatters
    for adapter in (None, "other"):
        asyncio.run(formatters.output(adapter, "open"))


def one(write: Write, code: str, phase: str = "input", **options: Any) -> Formatters:
    module = {"input": "input_parser", "output": "output_formatter"}[phase]
    text = f"from djl_python.{module} import {phase}_formatter\n@{phase}_formatter\n{code}\n"
    return load_formatters(write(model=text), {}, is_secure=False, **options)


async def failure(formatters: Formatters, phase: str = "input", value: Any = None, owner: str = "") -> FormatterError:
    with pytest.raises(FormatterError) as failed:
        if phase == "input":
            await formatters.input(None, {} if value is None else value, {}, owner)
        else:
            await formatters.output(None, {} if value is None else value)
    return failed.value


@pytest.mark.parametrize(
    ("phase", "body", "status", "text"),
    [
        ("input", "raise ValueError('topic is missing')", 400, "refuses this request: topic is missing"),
        ("output", "raise ValueError('odd')", 500, "failed in line 3: ValueError: odd"),
        ("input", "return payload['topic']", 500, "failed in line 3: KeyError: 'topic'"),
        ("input", "raise StopIteration", 500, "failed.*StopIteration"),
        ("input", "import sys; sys.exit(1)", 500, "failed in line 3: SystemExit: 1"),
        ("input", "import asyncio; raise asyncio.CancelledError", 500, "CancelledError|cancelled itself"),
        ("input", "return None", 500, "returned NoneType: let it return dict"),
        ("input", "return 'text'", 500, "returned str: let it return dict"),
        ("output", "return [payload]", 500, "returned list: let it return dict or str or bytes"),
        ("output", "return {'at': {1, 2}}", 500, "returned a dict that is no JSON"),
    ],
)
@pytest.mark.parametrize("kind", ["def", "async def"])
async def test_named_errors(write: Write, kind: str, phase: str, body: str, status: int, text: str) -> None:
    """Whatever comes of a formatter, the error names phase, file and function, and has a status; the loop lives on."""
    error = await failure(one(write, f"{kind} f(payload): {body}", phase), phase)
    assert (error.phase, error.name, error.status) == (phase, "base/model.py:f", status)
    assert str(error).startswith(f"{phase} formatter base/model.py:f ")
    assert re.search(text, str(error))


async def test_cause(write: Write) -> None:
    """What the user's code raised is the error's cause."""
    error = await failure(one(write, "def f(payload): return payload['topic']"))
    assert isinstance(error.__cause__, KeyError)


async def test_pydantic_models(write: Write) -> None:
    """A formatter may return a Pydantic model."""
    code = "def f(x):\n    import pydantic\n    return pydantic.create_model('M', a=(int, 1))()"
    assert await one(write, code, "output").output(None, {}) == {"a": 1}


async def test_mid_stream(write: Write) -> None:
    """Each chunk is a call of its own: those before the failing one came through, and its error is raised at once."""
    code = "def f(chunk):\n    if chunk['i'] == 3: raise RuntimeError('at three')\n    return str(chunk['i'])"
    formatters = one(write, code, "output", timeout_s=60.0)
    sent = []
    with pytest.raises(FormatterError, match="at three"):
        for index in range(9):
            sent.append(await formatters.output(None, {"i": index}))
    assert sent == ["0", "1", "2"]


async def test_blocking_formatters_block_nobody(write: Write) -> None:
    """While a formatter waits in its thread, the event loop turns."""
    formatters = one(write, "def f(payload):\n    payload['gate'].wait(60)\n    return {}", timeout_s=120.0)
    gate = threading.Event()
    call = asyncio.create_task(formatters.input(None, {"gate": gate}, {}))
    for _ in range(6):
        await asyncio.sleep(0.005)
    assert not call.done()
    gate.set()
    assert await call == {}


async def test_async_formatters_run_on_the_loop(write: Write) -> None:
    """An async formatter is awaited where the server runs, and stopped when its time is over."""
    code = (
        "async def f(payload):\n"
        "    import asyncio, threading\n"
        "    try: await asyncio.sleep(payload['s'])\n"
        "    finally: payload['thread'] = threading.get_ident()\n"
        "    return payload"
    )
    patient = one(write, code, timeout_s=60.0)
    assert (await patient.input(None, {"s": 0}, {}))["thread"] == threading.get_ident()
    payload: dict[str, Any] = {"s": 600}
    assert (await failure(one(write, code, timeout_s=0.1), value=payload)).status == 504
    await asyncio.sleep(0)
    assert payload["thread"] == threading.get_ident()


@pytest.mark.parametrize("is_stubborn", [False, True])
async def test_time_limit(write: Write, is_stubborn: bool) -> None:
    """A formatter that hangs is an error after its time, even an async one that won't be cancelled."""
    code = (
        "async def f(payload):\n    import asyncio\n    while not payload['gate'].is_set():\n"
        "        try: await payload['gate'].wait()\n        except asyncio.CancelledError: pass\n    return {}"
        if is_stubborn
        else "def f(payload):\n    payload['gate'].wait(600)\n    return {}"
    )
    formatters = one(write, code, timeout_s=0.1)
    gate = asyncio.Event() if is_stubborn else threading.Event()
    error = await failure(formatters, value={"gate": gate})
    assert (error.status, str(error)) == (504, "input formatter base/model.py:f did not end within 0.1 s")
    gate.set()


@in_stepped_time
async def test_hanging_is_refused_at_once_and_hurts_nobody(gated: Formatters) -> None:
    """A formatter that hangs takes a bounded number of threads, is refused then, and others answer as ever."""
    threads = threading.active_count()
    hung = [asyncio.create_task(gated.input(None, {}, {})) for _ in range(5 * MAX_RUNNING)]
    assert await gated.input("other", {"hangs": False}, {}) == {"most": 1}
    assert await gated.output(None, "chunk") == "chunk"
    assert not any(call.done() for call in hung)
    await pass_time(LIMIT_S + 0.1)
    errors = list(await asyncio.gather(*hung, return_exceptions=True))
    statuses = [error.status for error in errors if isinstance(error, FormatterError)]
    assert sorted(statuses) == [503] * 4 * MAX_RUNNING + [504] * MAX_RUNNING
    assert f"had no turn within {LIMIT_S:g} s: 8 other calls of it run" in {str(e).split(":hang ")[1] for e in errors}
    assert threading.active_count() <= threads + MAX_RUNNING + 2
    error = await failure(gated)  # no time passes
    assert error.status == 503 and "8 earlier calls hang" in str(error)
    assert await gated.input("other", {"hangs": False}, {}) == {"most": 1}


@in_stepped_time
async def test_a_tenants_slow_inputs_leave_others_their_turns(gated: Formatters) -> None:
    """However many of them hang: another tenant's are formatted, before and after they are over their time; what finds
    no turn is refused for its own tenant's limit, what hangs for its formatter."""
    theirs = [asyncio.create_task(gated.input(None, {}, {}, "a")) for _ in range(5 * MAX_RUNNING)]
    await asyncio.sleep(0)
    assert await gated.input(None, {"hangs": False}, {}, "b") == {"most": MAX_RUNNING + 1}
    await pass_time(LIMIT_S + 0.1)
    found = await asyncio.gather(*theirs, return_exceptions=True)
    errors = [error for error in found if isinstance(error, FormatterError)]
    assert {(error.status, error.about) for error in errors} == {(503, "limit"), (504, "model")}
    assert (await failure(gated, owner="a")).about == "model"
    for _ in range(3 * MAX_RUNNING):
        assert await gated.input(None, {"hangs": False}, {}, "b") == {"most": MAX_RUNNING + 1}


@in_stepped_time
async def test_hung_calls_of_all_tenants_are_refused_to_the_next_at_once(gated: Formatters) -> None:
    """When every turn hangs, it is the formatter that is ill, not the tenant that asks next."""
    hung = [asyncio.create_task(gated.input(None, {}, {}, owner)) for owner in "abcd" for _ in range(MAX_HUNG)]
    await asyncio.sleep(0)
    await pass_time(LIMIT_S + 0.1)
    await asyncio.gather(*hung, return_exceptions=True)
    error = await failure(gated, owner="e")  # no time passes
    assert (error.status, error.about) == (503, "model") and f"{MAX_OF_ALL} earlier calls hang" in str(error)


@in_stepped_time
async def test_called_again_when_calls_end(gated: Formatters) -> None:
    """What hung may end after all: then the formatter is called again, never by more than its bound at a time."""
    hung = [asyncio.create_task(failure(gated)) for _ in range(MAX_HUNG)]
    await asyncio.sleep(0)
    await pass_time(LIMIT_S + 0.1)
    assert [error.status for error in await asyncio.gather(*hung)] == [504] * 4
    assert (await failure(gated)).status == 503
    await gated.output(None, "open")
    deadline = time.monotonic() + 60
    while True:
        try:
            assert await gated.input(None, {}, {}) == {"most": MAX_HUNG}
            break
        except FormatterError:
            assert time.monotonic() < deadline
            await pass_time(0)
    results = await asyncio.gather(*(gated.input(None, {}, {}) for _ in range(100)))
    assert max(result["most"] for result in results) <= MAX_RUNNING


async def test_clients_that_leave_free_no_thread(gated: Formatters) -> None:
    """A client that hangs up does not make room for another call while its own still runs in a thread."""
    threads = threading.active_count()
    for _ in range(4):
        calls = [asyncio.create_task(gated.input(None, {}, {})) for _ in range(MAX_RUNNING)]
        await asyncio.sleep(0.01)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
    assert threading.active_count() <= threads + MAX_RUNNING


def test_process_ends_though_a_formatter_hangs(write: Write) -> None:
    """A hung formatter does not keep the server from ending."""
    directory = write(model=GATED.replace("gate.wait(600)", "time.sleep(600)"))
    code = (
        "import asyncio; from pathlib import Path; from hotspan.formatters import load_formatters\n"
        f"f = load_formatters(Path({str(directory)!r}), {{}}, is_secure=False, timeout_s=0.05)\n"
        "try: asyncio.run(f.input(None, {}, {}))\n"
        "except Exception as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert "did not end within 0.05 s" in done.stdout and not done.stderr


def test_threads_are_reused_and_end() -> None:
    """Jobs one after the other take one thread, jobs at once take one each, and idle ones end."""
    used: list[threading.Thread] = []
    threads = Threads(idle_s=60)
    for _ in range(20):
        threads.start(lambda: used.append(threading.current_thread()))
        deadline = time.monotonic() + 60
        while not threads._free:  # it is about to wait for the next one
            assert time.monotonic() < deadline
            time.sleep(0.001)
    assert len(used) == 20 and len(set(used)) == 1
    threads = Threads(idle_s=0.05)
    meeting = threading.Barrier(4)
    for _ in range(3):
        threads.start(lambda: (used.append(threading.current_thread()), meeting.wait(60), None)[-1])
    meeting.wait(60)
    for thread in used[20:]:
        thread.join(60)
        assert not thread.is_alive()
