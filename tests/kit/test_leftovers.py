"""What a run of tests leaves behind is seen."""

import subprocess
import sys
from pathlib import Path

from tests.leftovers import processes

_ENTITLED = """
import os, sys
import setproctitle
setproctitle.setproctitle("a title that is longer than the command, " + "-" * 4000)
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_process_that_hides_its_environment_is_seen(tmp_path: Path) -> None:
    """An engine core overwrites its environment with its title: it is known by the files that it has open."""
    with (tmp_path / "log").open("wb") as log:
        command = [sys.executable, "-c", _ENTITLED]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
    assert child.stdin is not None and child.stdout is not None
    try:
        assert child.stdout.readline() == b"ready\n"
        assert not Path(f"/proc/{child.pid}/environ").read_bytes().strip(b"\0").startswith(b"TMPDIR")
        assert child.pid in [each.pid for each in processes(tmp_path)]
    finally:
        child.stdin.close()
        child.wait()
    assert child.pid not in [each.pid for each in processes(tmp_path)]
