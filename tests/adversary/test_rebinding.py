"""A page in a browser that leads its own name to this machine (DNS rebinding) asks those who need no key.

An engine's own server is attacked so in tests/server/test_serve.py, in a browser in tests/http/test_hosts.py.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kit.ports import free_port
from tests.server.models.rig import ROOT, child_variables

from .conftest import HTTP, House, routing, wait_for_router
from .rebinding import EVIL, Request, check_refusal
from .wire import exchange

pytestmark = pytest.mark.engine

COMPLETION = Request("POST", "/v1/completions", b'{"model": "m", "prompt": "hello", "max_tokens": 1}')


def test_a_router_without_keys(well: House, tmp_path: Path) -> None:
    """It is asked for nothing and drained of nothing by a foreign name; this machine's names are served as ever."""
    (tmp_path / "run").mkdir(mode=0o700)
    drain = Request("POST", "/router/replicas/drain", json.dumps({"replica": well.server.url}).encode())
    reads = (Request("GET", path) for path in ("/router/replicas", "/router/cache", "/hotspan/cache"))
    with routing(well.server, tmp_path / "log") as port:
        wait_for_router(port, tmp_path / "log")
        check_refusal(port, drain, COMPLETION, *reads)
        (shown,) = HTTP.get(f"http://127.0.0.1:{port}/router/replicas").json()["replicas"]
        assert shown["can_take"] and not shown["is_drained"], shown


def test_a_router_with_keys_and_no_admin_token(well: House, tmp_path: Path) -> None:
    """What only this machine may ask is refused to a foreign name, although clients need a key."""
    (tmp_path / "run").mkdir(mode=0o700)
    drain = Request("POST", "/router/replicas/drain", json.dumps({"replica": well.server.url}).encode())
    with routing(well.server, tmp_path / "log", "--api-keys-file", str(well.directory / "keys.txt")) as port:
        wait_for_router(port, tmp_path / "log")
        for host in EVIL:
            for request in (drain, Request("GET", "/router/replicas"), Request("GET", "/metrics")):
                assert [answer.status for answer in exchange(port, request.to(host))] == [421], request
        (shown,) = HTTP.get(f"http://127.0.0.1:{port}/router/replicas").json()["replicas"]
        assert not shown["is_drained"], shown


def test_the_daemon(well: House) -> None:
    """A value that this machine stored is neither read, leased, replaced nor deleted by a foreign name, at no port."""
    value = f"http://127.0.0.1:{well.daemon.port}/v1/kv/rebinding/k"
    assert HTTP.put(value, content=b"value").status_code == 200
    before = well.daemon.stats()
    put = Request("PUT", "/v1/kv/rebinding/other", b"planted", ("Content-Type: text/plain",))
    lease = Request("POST", "/v1/kv/rebinding/k/leases?timeout_ms=0")
    for port in (well.daemon.port, well.monitor_port):
        check_refusal(port, put, lease, Request("DELETE", "/v1/kv/rebinding/k"), Request("GET", "/v1/stats"))
    after = well.daemon.stats()
    assert after["objects"] == before["objects"] and after["leases"] == before["leases"]
    assert HTTP.delete(value).status_code == 200


def test_a_store_of_models(tmp_path: Path) -> None:
    """The front of a store, in a process of its own, is asked for nothing by a foreign name."""
    port, log = free_port(), tmp_path / "log"
    for name in ("alpha", "beta"):
        (tmp_path / "store" / name).mkdir(parents=True)
        (tmp_path / "store" / name / "config.json").write_text("{}")
    with log.open("wb") as output:
        front = subprocess.Popen(
            [sys.executable, "-m", "tests.server.models.fake_store", str(tmp_path / "store"), str(port)],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=child_variables(tmp_path / "book"),
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 120
        while "hotspan is ready" not in log.read_text():
            assert front.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        check_refusal(port, COMPLETION, Request("GET", "/hotspan/cache"), Request("POST", "/predictions/alpha", b"{}"))
    finally:
        front.terminate()
        front.wait(60)
