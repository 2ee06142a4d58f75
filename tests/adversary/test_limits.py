"""A tenant that does the worst that its limits allow, on the server's and the router's routes: others are answered."""

import contextlib
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from hotspan.bench.prose import prose
from kit.waiting import until

from .conftest import ADMIN_TOKEN, KEYS, House

pytestmark = pytest.mark.engine

MIB = 1 << 20
GROWTH = 512 * MIB
"""That an attack may leave in a process: bodies in work have a budget, and what parsers freed is not all given back."""


def post(well: House, entry: str, who: str, path: str, body: bytes) -> int:
    """The status of a tenant's post, or 0 where the connection was ended."""
    url = f"http://127.0.0.1:{well.ports[entry]}{path}"
    headers = {"authorization": f"Bearer {KEYS[who]}", "content-type": "application/json"}
    try:
        return httpx.post(url, content=body, headers=headers, timeout=120).status_code
    except httpx.TransportError:
        return 0


def completion(well: House, **more: Any) -> bytes:
    """The body of a completion of one token."""
    return json.dumps({"model": well.server.model, "prompt": "hello", "max_tokens": 1} | more).encode()


def answered(well: House, entry: str) -> bool:
    """Whether the other tenant is answered."""
    return post(well, entry, "acme", "/v1/completions", completion(well)) == 200


def resident(well: House) -> int:
    """Bytes of all processes of the server and the router."""
    everyone = [psutil.Process(well.server.process.pid), psutil.Process(os.getpid())]
    found = {each.pid: each for one in everyone for each in (one, *one.children(recursive=True))}
    found.pop(os.getpid())
    total = 0
    for process in found.values():
        with contextlib.suppress(psutil.Error):
            total += process.memory_info().rss
    return total


@pytest.mark.parametrize("entry", ["server", "router"])
def test_a_tenant_over_its_limits_closes_no_replica(well: House, entry: str) -> None:
    """More requests than a tenant has places are refused or answered; others are answered meanwhile and after."""
    body = completion(well, max_tokens=8, ignore_eos=True, n=4)
    with ThreadPoolExecutor(64) as pool:
        flood = [pool.submit(post, well, entry, "globex", "/v1/completions", body) for _ in range(192)]
        assert all(answered(well, entry) for _ in range(8))
        assert {each.result() for each in flood} <= {200, 429, 503}
    assert answered(well, entry)


def test_text_that_can_not_fit_is_refused(well: House) -> None:
    """Texts of 8 MB are refused before they are tokenised; the other tenant's token is counted meanwhile."""
    body = completion(well, prompt="a b " * (2 * MIB))
    with ThreadPoolExecutor(12) as pool:
        flood = [pool.submit(post, well, "server", "globex", "/tokenize", body) for _ in range(12)]
        assert post(well, "server", "acme", "/tokenize", completion(well)) == 200
        assert {each.result() for each in flood} <= {400, 413, 429}


def test_large_prompts_in_work_hold_up_no_other(well: House) -> None:
    """Their turn is over once the engine has them: it computes four at a time, of which two are parsed at a time."""
    body = completion(well, user="x" * (300 * 1024), ignore_eos=True, max_tokens=2000)

    def in_work() -> float:
        page = well.call("GET", "/metrics", ADMIN_TOKEN).text
        return sum(float(each) for each in re.findall(r"^vllm:num_requests_running\{.*\} (.*)", page, re.MULTILINE))

    with ThreadPoolExecutor(4) as pool:
        flood = [pool.submit(post, well, "server", "globex", "/v1/completions", body) for _ in range(4)]
        until(lambda: in_work() == 4 or any(each.done() for each in flood))
        assert not any(each.done() for each in flood)
        assert {each.result() for each in flood} == {200}


def test_announcements_hold_up_no_invalidation(well: House) -> None:
    """While a tenant announces 200 texts, another's invalidation by its text is done and durable."""
    text = prose(40, 700)
    well.ask("acme", text)
    with ThreadPoolExecutor(16) as pool:
        bodies = [completion(well, prompt=prose(100 + n, 700)) for n in range(200)]
        flood = [pool.submit(post, well, "server", "globex", "/hotspan/cache/prefetch", body) for body in bodies]
        done = well.call("POST", "/hotspan/cache/invalidate", KEYS["acme"], {"prompt": text})
        assert done.status_code == 200 and done.json()["is_durable"], done.text
        assert {each.result() for each in flood} <= {200, 202, 429}
    assert well.ask("acme", text).cached == 0


def test_a_body_that_multiplies_is_refused(well: House) -> None:
    """A warm-up whose template is large, or becomes large in all of its texts, is refused before it is made."""
    before = resident(well)
    template = "x" * (4 * MIB) + "{document}"
    body = json.dumps({"model": well.server.model, "template": template, "texts": [{"text": "a"}] * 1000}).encode()
    assert post(well, "server", "globex", "/hotspan/cache/warm", body) in (400, 413, 422)
    assert resident(well) - before < GROWTH and answered(well, "server")


SLOW = {
    "combining marks": {"messages": [{"role": "user", "content": "a" + "\u0316\u0301" * 32768}]},
    "empty messages": {"messages": [{"role": "user", "content": ""}] * 300_000},
    "tool calls": {
        "messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": ""}}] * 200_000}]
    },
    "nodes": {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 300_000}]},
}


@pytest.mark.parametrize("name", SLOW)
def test_a_body_that_is_slow_to_read_stops_nobody(well: House, name: str) -> None:
    """Bodies that a careless parser needs seconds for get an answer; the other tenant's are answered meanwhile."""
    body = json.dumps({"model": well.server.model, "max_tokens": 1} | SLOW[name]).encode()
    with ThreadPoolExecutor(4) as pool:
        flood = [pool.submit(post, well, "router", "globex", "/v1/chat/completions", body) for _ in range(4)]
        assert all(answered(well, "router") for _ in range(4))
        assert all(each.result() != 500 for each in flood)


def test_made_up_names_leave_nothing(well: House) -> None:
    """Salts of 4 MB and long targets that never come again are not kept: 100 of each leave no more than a bound."""
    before = resident(well)
    for number in range(100):
        post(well, "router", "globex", "/v1/completions", completion(well, cache_salt=f"{number}" + "s" * (4 * MIB)))
        post(well, "router", "globex", f"/v1/completions?q={number}{'q' * 4000}", completion(well))
    assert resident(well) - before < GROWTH and answered(well, "router")


@pytest.mark.parametrize("entry", ["server", "router"])
@pytest.mark.parametrize("field", ["prompt", "session_id", "stop", "user"])
def test_half_a_surrogate_pair_is_an_error_of_the_client(well: House, entry: str, field: str) -> None:
    """A lone surrogate anywhere in a body is a 400."""
    body = completion(well, **{field: "\ud800"})
    assert post(well, entry, "globex", "/v1/completions", body) == 400


def test_sparse_files_in_the_shared_directory_take_no_memory(well: House) -> None:
    """Files of 1 GiB that take no space, beside every kind of file there is, cost the server no memory."""
    before = resident(well)
    planted = []
    for directory in {each.parent for each in well.shared.rglob("*") if each.is_file()}:
        for number in range(4):
            path = directory / f"{number:016x}"
            with contextlib.suppress(OSError), path.open("xb") as file:
                file.truncate(1 << 30)
                planted.append(path)
    assert planted
    for seed in range(4):
        well.ask("acme", prose(200 + seed, 700))
    done = well.call("POST", "/hotspan/cache/invalidate", KEYS["globex"], {"tags": ["sparse"]})
    assert done.status_code == 200, done.text
    assert resident(well) - before < GROWTH
    for path in planted:
        path.unlink(missing_ok=True)
