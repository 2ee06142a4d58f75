"""What a process leaves behind: nothing, however it ends."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest

from hotspan.core.aftermath import Aftermath, _Child, _end, _lines, end_with_parent, stopping_in_order
from kit.waiting import until

PARENT = """
import subprocess, sys, tempfile, time
from pathlib import Path
from hotspan.core.aftermath import Aftermath, stopping_in_order
from contextlib import suppress
CHILD = "import signal, time; signal.signal(signal.SIGTERM, {}); print(0, flush=True); time.sleep(600)"
with stopping_in_order(), Aftermath() as aftermath, tempfile.TemporaryDirectory(dir=sys.argv[1]) as directory:
    aftermath.remove(Path(directory))
    children = []
    try:
        for action in ("signal.SIG_DFL", "signal.SIG_IGN"):
            children.append(subprocess.Popen([sys.executable, "-c", CHILD.format(action)], stdout=subprocess.PIPE))
            children[-1].stdout.readline()
        aftermath.end(children[0].pid, 0.2)
        aftermath.end_children(0.2)
        print(directory, *(child.pid for child in children), flush=True)
        time.sleep(600)
    finally:
        for child in children:
            child.kill()
            child.wait()
"""


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has waited for has, too."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def heeds_signals() -> None:
    """In a child: as a terminal starts it. Who runs the tests may ignore these, as nohup and a shell's `&` do."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_nothing_is_left(tmp_path: Path, number: signal.Signals) -> None:
    """However a process is ended, its children end, also one that ignores SIGTERM, and its directory is removed."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=heeds_signals,
    )
    assert parent.stdout is not None
    directory, *pids = parent.stdout.readline().split()
    assert Path(directory).is_dir() and not any(gone(int(pid)) for pid in pids)
    parent.send_signal(number)
    status = parent.wait(60)
    for pid in pids:
        until(lambda pid=pid: gone(int(pid)), f"process {pid} lives on")
    until(lambda: not Path(directory).exists(), "the directory is still there")
    assert parent.stdout.read() == "", "the second process has ended, too: nobody holds the pipe any more"
    assert status == {signal.SIGTERM: 143, signal.SIGHUP: 129}.get(number, status)


def test_who_ended_before_is_forgotten() -> None:
    """The numbers of a child that ended long before its parent, and of its group, may be others' by then: nothing is
    sent to them. While somebody of its group lives, the number is the group's, and it is ended with its parent."""
    ends = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)
        for code in ("input()", "import subprocess; p = subprocess.Popen(['sleep', '600']); print(p.pid); input()")
    ]
    reading, writing = os.pipe()
    children = [_Child(os.pidfd_open(each.pid), each.pid, 0.1, True) for each in ends]
    known = list(children)
    listener = threading.Thread(target=lambda: list(_lines(reading, children)))
    listener.start()
    assert ends[1].stdout is not None and ends[1].stdout.readline()
    for each in ends:
        assert each.stdin is not None
        each.stdin.write(b"\n")
        each.stdin.close()
        each.wait(60)
    until(lambda: known[0] not in children, "the first is still known")
    assert children == known[1:]
    os.close(writing)
    listener.join(60)
    os.close(reading)
    _end(children)
    until(lambda: not known[1].has_group(), "its group lives on")
    for each in ends:
        assert each.stdout is not None
        each.stdout.close()


def test_what_ends_by_itself_is_left_alone(tmp_path: Path) -> None:
    """A process that leaves the block has cleaned up itself: what it keeps stays."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with Aftermath() as aftermath:
        aftermath.end(child.pid)
        aftermath.remove(tmp_path)
    assert tmp_path.is_dir() and child.poll() is None
    assert child.stdin is not None
    child.stdin.close()
    child.wait(60)


def test_signals_that_are_ignored_stay_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under nohup a hang-up ends nothing, and handlers are as they were afterwards."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stopping_in_order():
            os.kill(os.getpid(), signal.SIGHUP)
            assert callable(signal.getsignal(signal.SIGTERM))
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


def _parent(told: Connection) -> None:
    child = multiprocessing.get_context("spawn").Process(target=_child, args=(told,))
    child.start()
    child.join()


def _child(told: Connection) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent()
    told.send("watching")
    threading.Event().wait()


def test_who_watches_its_parent_ends_with_it() -> None:
    """A process whose parent was killed has ended without a signal from anybody else: nobody holds its pipe."""
    context = multiprocessing.get_context("spawn")
    told, tells = context.Pipe(duplex=False)
    parent = context.Process(target=_parent, args=(tells,))
    parent.start()
    tells.close()
    assert told.recv() == "watching"
    parent.kill()
    parent.join(60)
    assert told.poll(60), "the child lives on"
    with pytest.raises(EOFError):
        told.recv()


SHARING = """
import subprocess, sys, time
from multiprocessing.shared_memory import SharedMemory
from hotspan.core.aftermath import Aftermath
CHILD = "import time; from multiprocessing.shared_memory import SharedMemory; " \
        "m = SharedMemory(create=True, size=9999); print(m.name, flush=True); time.sleep(600)"
with Aftermath() as aftermath:
    own, freed = (SharedMemory(create=True, size=9999) for _ in range(2))
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True)
    name = child.stdout.readline().strip()
    aftermath.end_children(0.2)
    aftermath.unlink_shared()
    aftermath.unlink_shared()
    freed.unlink()
    print(own.name, name, freed.name, aftermath._process.pid, flush=True)
    time.sleep(600)
"""


def test_no_shared_memory_is_left_when_all_are_killed() -> None:
    """SIGKILL of a process, its child and their trackers: what these had in /dev/shm is unlinked; a file
    that has one of the names by then is somebody's, and stays."""
    parent = subprocess.Popen([sys.executable, "-c", SHARING], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    *names, second = parent.stdout.readline().split()
    files = [Path("/dev/shm") / name for name in names]
    files[2].touch()
    try:
        for process in [*psutil.Process(parent.pid).children(recursive=True), psutil.Process(parent.pid)]:
            if process.pid != int(second):
                process.kill()
        parent.wait(60)
        until(lambda: gone(int(second)), "the second process lives on")
        assert [file.exists() for file in files] == [False, False, True]
    finally:
        for file in files:
            file.unlink(missing_ok=True)
