"""The guard between a replica's actor and its server: the server never outlives the actor."""

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

CHILD = """
import pathlib, signal, sys, time
place = pathlib.Path(sys.argv[1])
if sys.argv[2] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
place.write_text("up")
time.sleep(600)
"""


def guarded(place: Path, manner: str = "") -> tuple[subprocess.Popen[bytes], psutil.Process]:
    """A guard, and the process that it runs."""
    command = [sys.executable, "-c", CHILD, str(place), manner]
    seconds = "0.5" if manner else "60"
    guard = subprocess.Popen(
        [sys.executable, "-m", "hotspan.router.ray.guard", seconds, *command], stdin=subprocess.PIPE
    )
    deadline = time.monotonic() + 60
    while not place.exists():
        assert time.monotonic() < deadline and guard.poll() is None
        time.sleep(0.02)
    [child] = psutil.Process(guard.pid).children()
    return guard, child


def is_gone(process: psutil.Process, seconds: float = 50) -> bool:
    """Whether it ended in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.02)
                continue
        return True
    return False


@pytest.mark.parametrize("manner", ["", "stubborn"])
def test_it_ends_when_nobody_holds_on(tmp_path: Path, manner: str) -> None:
    """When the other end of its input is gone, the process gets SIGTERM, and SIGKILL if it does not heed it."""
    guard, child = guarded(tmp_path / "up", manner)
    assert guard.stdin is not None
    guard.stdin.close()
    assert is_gone(child) and guard.wait(60) == (-signal.SIGKILL if manner else -signal.SIGTERM) % 256


def test_it_ends_when_the_guard_is_killed(tmp_path: Path) -> None:
    """A guard that is killed takes its process along."""
    guard, child = guarded(tmp_path / "up")
    guard.kill()
    guard.wait(60)
    assert is_gone(child)


def test_its_status_is_the_commands() -> None:
    """A command that ends by itself gives its status, without a word on stderr."""
    command = [sys.executable, "-c", "import sys; sys.exit(3)"]
    guard = subprocess.Popen(
        [sys.executable, "-m", "hotspan.router.ray.guard", "5", *command],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert guard.stdin is not None and guard.stderr is not None
    assert guard.wait(120) == 3 and guard.stderr.read() == b""
    guard.stdin.close()
    guard.stderr.close()
