"""A demo that is stopped or killed leaves no server, no shared memory and no directory of KV."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from kit.waiting import until

FAKE = Path(__file__).parent / "fake_hotspan.py"
DEMO = f"""
import sys
from hotspan.cli.main import main
from hotspan.demo import run
run.serve_command = lambda model, arguments: (sys.executable, {str(FAKE)!r}, "serve", str(model), *arguments)
main()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_a_demo_that_is_ended_takes_its_server_along(tmp_path: Path, number: signal.Signals) -> None:
    """While a mode with a disk tier starts, the demo is killed: its server is stopped in order, its KV is removed."""
    options = [
        "--output",
        str(tmp_path),
        "--model",
        "made",
        "--model-size",
        "tiny",
        "--mode",
        "disk",
        "--document-tokens",
        "300",
    ]
    demo = subprocess.Popen(
        [sys.executable, "-c", DEMO, "demo", *options], env=os.environ | {"FAKE_LOADS": "1"}, stdout=subprocess.DEVNULL
    )
    log = tmp_path / "server-disk.log"
    until(lambda: log.exists() and "pid " in log.read_text(), "no server was started")
    assert len(list(tmp_path.glob("kv-*"))) == 1
    (pid,) = [int(line.split()[1]) for line in log.read_text().splitlines() if line.startswith("pid ")]
    server = psutil.Process(pid)
    demo.send_signal(number)
    assert demo.wait(60) == {signal.SIGTERM: 143, signal.SIGHUP: 129}.get(number, -number)
    until(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE, "the server lives on")
    assert "stopped in order" in log.read_text()
    until(lambda: not list(tmp_path.glob("kv-*")), "the directory of KV is still there")
