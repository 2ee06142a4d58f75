"""A child process of the kit: it is waited for, says lines, and is ended with what it started."""

import signal
import sys
from pathlib import Path

import psutil
import pytest

from kit.child import Child
from kit.ports import free_port
from kit.waiting import until

SERVES = "import http.server, sys; http.server.test(http.server.SimpleHTTPRequestHandler, port=int(sys.argv[1]))"
STARTS = """
import subprocess, sys, signal, time
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(other.pid, flush=True)
time.sleep(600)
"""


def test_it_is_waited_for_and_ended(tmp_path: Path) -> None:
    """A server answers once `wait` has returned; after the block its process is gone, and its log has what it said."""
    port, log = free_port(), tmp_path / "log"
    command = (sys.executable, "-c", SERVES, str(port))
    with Child(command, port, log, environment={"PYTHONUNBUFFERED": "1"}) as child:
        child.wait().wait("/")
        assert psutil.pid_exists(child.pid)
    assert not psutil.pid_exists(child.pid)
    assert "GET / " in log.read_text()


def test_one_that_ends_is_not_ready(tmp_path: Path) -> None:
    """A process that ends before it serves is named, with its log."""
    command = (sys.executable, "-c", "raise SystemExit(3)")
    with (
        Child(command, free_port(), tmp_path / "log") as child,
        pytest.raises(SystemExit, match=r"(?s)not ready: .*log"),
    ):
        child.wait()


def test_sigkill_takes_what_it_started() -> None:
    """Its group goes with it, also what ignores SIGTERM; a line that never comes is empty."""
    with Child((sys.executable, "-c", STARTS), is_read=True) as child:
        other = int(child.line())
        assert psutil.pid_exists(other)
        assert child.line(within_s=0.0) == ""
        until(lambda: not psutil.pid_exists(other) or psutil.Process(other).status() == psutil.STATUS_ZOMBIE)
        child.end(signal.SIGKILL)
