"""Directories that several processes use at once: nothing is removed that somebody holds, and nothing is left."""

import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hotspan.core.held import changing, hold, remove_unheld, sweep

A, B = "a" * 64, "b" * 64

HOLDER = """
import sys, time
from pathlib import Path
from hotspan.core.aftermath import Aftermath
from hotspan.core.held import changing, hold
root = Path(sys.argv[1])
with Aftermath() as aftermath:
    aftermath.sweep(root, is_whole=True)
    with changing(root):
        (root / sys.argv[2]).mkdir()
        (root / sys.argv[2] / "file").touch()
        held = hold(root / sys.argv[2])
    print(0, flush=True)
    time.sleep(600)
"""


def holder(root: Path, name: str) -> subprocess.Popen[str]:
    """A process that holds a directory of that name, and has told a second one to sweep."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(root), name], stdout=subprocess.PIPE, text=True, process_group=0
    )
    assert process.stdout is not None and process.stdout.readline()
    return process


def test_who_is_killed_leaves_nothing_and_takes_nothing_of_others(tmp_path: Path) -> None:
    """Two processes are killed: with the first its own directory goes, and with the second all of it."""
    root = tmp_path / "root"
    first, second = holder(root, A), holder(root, B)
    for process, left in ((first, [B]), (second, None)):
        process.send_signal(signal.SIGKILL)
        process.wait(60)
        assert process.stdout is not None
        assert process.stdout.read() == "", "the second process has ended, too: nobody holds the pipe any more"
        process.stdout.close()
        assert (os.listdir(root) if root.exists() else None) == left


def test_a_directory_that_goes_while_another_waits_for_it_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits for the lock of a directory that its last user removes gets a new one."""
    root, asked, lock = tmp_path / "root", threading.Event(), fcntl.flock

    def asking(fd: int, kind: int) -> None:
        if threading.current_thread() is waiting:
            asked.set()
        lock(fd, kind)

    def enter() -> None:
        with changing(root):
            (root / A).mkdir()

    monkeypatch.setattr(fcntl, "flock", asking)
    waiting = threading.Thread(target=enter)
    with changing(root):
        waiting.start()
        assert asked.wait(60)  # it has opened the directory
        root.rmdir()
    waiting.join(60)
    assert os.listdir(root) == [A]


def test_a_sweep_makes_nothing_and_leaves_what_is_somebodys(tmp_path: Path) -> None:
    """A root that is not there, one that is open to others, one with a foreign file, one with a copy that is held."""
    sweep(tmp_path / "none", is_whole=True)
    assert not (tmp_path / "none").exists()
    for name, mode in (("open", 0o755), ("foreign", 0o700), ("held", 0o700)):
        (tmp_path / name / A).mkdir(parents=True)
        (tmp_path / name).chmod(mode)
    (tmp_path / "foreign" / "file").touch()
    mine = hold(tmp_path / "held" / A)
    for name, left in (("open", [A]), ("foreign", ["file"]), ("held", [A])):
        sweep(tmp_path / name, is_whole=True)
        assert os.listdir(tmp_path / name) == left
    os.close(mine)
    sweep(tmp_path / "held", is_whole=True)
    assert not (tmp_path / "held").exists()


def test_what_is_held_is_held_by_many(tmp_path: Path) -> None:
    """Two may hold a directory; while one does it is not removed, and nobody gets it for itself."""
    (tmp_path / A).mkdir()
    both = [hold(tmp_path / A) for _ in range(2)]
    for fd in both:
        remove_unheld(tmp_path / A)
        assert (tmp_path / A).is_dir()
        with pytest.raises(BlockingIOError):
            hold(tmp_path / A, fcntl.LOCK_EX)
        os.close(fd)
    remove_unheld(tmp_path / A)
    assert not (tmp_path / A).exists()
