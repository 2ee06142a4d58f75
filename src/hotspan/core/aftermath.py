"""A second process that cleans up after this one if this one is killed: ends its children, removes its directories.

    with Aftermath() as aftermath:        # starts `python -m hotspan.core.aftermath`, in a session of its own
        aftermath.end(child.pid)
        aftermath.remove(directory)
        aftermath.sweep(copies)           # as core/held.py has it: what others hold stays
        aftermath.unlink_shared()         # shared memory of multiprocessing, such as vLLM's message buffers

It is told through a pipe, one JSON object a line. If the pipe closes and "done" was not the last line, this process
died (SIGKILL, out of memory): each child gets SIGTERM, then SIGKILL after its grace period, then directories go.
"""

import contextlib
import json
import multiprocessing
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, Self

from hotspan.core.held import sweep
from hotspan.core.message_buffers import mapped
from hotspan.core.threads import start

_DONE = {"done": True}
_LOOK_AGAIN_S = 1.0
"""How often the group of a child that has ended is looked for: somebody has to wait for the child first."""

_UNTOLD = "resource_tracker"
"""Of multiprocessing: it ends by itself with the last process that uses it, and unlinks shared memory then."""


class Aftermath:
    """Use it as a context manager. From one thread at a time; never raises for a second process that is gone."""

    def __enter__(self) -> Self:
        self._told: set[int] = set()
        self._shared: set[tuple[str, int]] = set()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hotspan.core.aftermath"], stdin=subprocess.PIPE, start_new_session=True
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tell(_DONE)
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        self._process.wait()

    def end(self, pid: int, grace_s: float = 15.0, *, is_group: bool = False) -> None:
        """End the child `pid` should this process be killed. is_group: SIGKILL goes to its process group."""
        self._told.add(pid)
        self._tell({"pid": pid, "grace_s": grace_s, "is_group": is_group})

    def end_children(self, grace_s: float = 15.0) -> None:
        """The same of all children that this process has now, and that were not told yet."""
        import psutil

        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                if child.pid not in {self._process.pid, *self._told} and _UNTOLD not in " ".join(child.cmdline()):
                    self.end(child.pid, grace_s)

    def remove(self, directory: Path) -> None:
        """Remove `directory` should this process be killed, after its children have ended."""
        self._tell({"directory": str(directory.absolute())})

    def sweep(self, root: Path, *, is_whole: bool) -> None:
        """Should this process be killed, remove what nobody holds any more in `root` (core/held.py), and, with
        `is_whole`, the directory itself."""
        self._tell({"root": str(root.absolute()), "is_whole": is_whole})

    def unlink_shared(self) -> None:
        """Unlink the shared memory of multiprocessing that this process and those below it have mapped now, should this
        process be killed: its own tracker does it, but for when that is killed with all others."""
        import psutil

        processes = [os.getpid()]
        with contextlib.suppress(psutil.Error):
            processes += [child.pid for child in psutil.Process().children(recursive=True)]
        for name, inode in sorted(set().union(*map(_mapped, processes)) - self._shared):
            self._shared.add((name, inode))
            self._tell({"shared": name, "inode": inode})

    def _tell(self, line: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.write(json.dumps(line).encode() + b"\n")
                self._process.stdin.flush()


def _mapped(pid: int) -> set[tuple[str, int]]:
    """The message buffers that a process has mapped; none of one that may not be looked into."""
    try:
        return mapped(pid)
    except PermissionError:
        return set()


def _unlink(name: str, inode: int) -> None:
    """Unlink a file, unless another has its name by now."""
    with contextlib.suppress(OSError):
        if os.lstat(name).st_ino == inode:
            os.unlink(name)


@contextlib.contextmanager
def stopping_in_order() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP end this process as Ctrl-C does: `with` blocks are left, and clean up.

    Where somebody ignores one of them (nohup), or handles it, that stays so. Call it from the main thread.
    """

    def stop(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    taken = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in taken:
            if signal.getsignal(number) is stop:
                signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Inside, SIGTERM, SIGHUP and SIGINT do nothing: what ends here ends whole, and must not take long.

    An orchestrator's signal often comes while the process already ends. Call it from the main thread.
    """
    before = {each: signal.signal(each, signal.SIG_IGN) for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def end_with_parent() -> None:
    """Kill this process, which multiprocessing started, as soon as the one that started it has ended.

    For a process that has nobody to work for then, and would hold memory, files and ports until it is ended.
    """
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os.kill(os.getpid(), signal.SIGKILL)

    start("parent", watch)


# -- the second process ------------------------------------------------------------------------------------------------


class _Child(NamedTuple):
    pidfd: int
    pid: int
    grace_s: float
    is_group: bool

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self.pidfd, number)

    def has_ended(self, within_s: float) -> bool:
        return bool(select.select([self.pidfd], [], [], max(0.0, within_s))[0])

    def has_group(self) -> bool:
        """Whether its process group is there; while it is, the kernel gives its number to nobody else."""
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return False
        except OSError:  # another user's, so it is not ours any more
            return False
        return self.is_group


def main() -> None:
    """Read what to do until the pipe closes, then do it, unless all is done."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # its life is that of the pipe
    children: list[_Child] = []
    directories: list[str] = []
    roots: list[tuple[Path, bool]] = []
    shared: list[tuple[str, int]] = []
    for line in _lines(sys.stdin.fileno(), children):
        told = json.loads(line)
        if told == _DONE:
            return
        if "directory" in told:
            directories.append(told["directory"])
        elif "shared" in told:
            shared.append((told["shared"], told["inode"]))
        elif "root" in told:
            roots.append((Path(told["root"]), told["is_whole"]))
        else:
            with contextlib.suppress(OSError):  # it has ended already
                children.append(_Child(os.pidfd_open(told["pid"]), told["pid"], told["grace_s"], told["is_group"]))
    _end(children)
    for name, inode in shared:
        _unlink(name, inode)
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)
    for root, is_whole in roots:
        sweep(root, is_whole=is_whole)


def _lines(fd: int, children: list[_Child]) -> Iterator[bytes]:
    """The lines that come through a pipe, until it closes.

    Mutates: `children`, of which those are taken out that ended meanwhile, with their groups: their numbers will be
    others'.
    """
    rest = b""
    while True:
        ended = [child for child in children if child.has_ended(0.0)]
        gone = [child for child in ended if not child.has_group()]
        for child in gone:
            children.remove(child)
            os.close(child.pidfd)
        living = [child.pidfd for child in children if child not in ended]
        ready, _, _ = select.select([fd, *living], [], [], _LOOK_AGAIN_S if len(gone) < len(ended) else None)
        if fd not in ready:
            continue
        data = os.read(fd, 1 << 16)
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        yield from lines


def _end(children: list[_Child]) -> None:
    for child in children:
        child.signal(signal.SIGTERM)
    began_s = time.monotonic()
    for child in children:
        is_late = not child.has_ended(began_s + child.grace_s - time.monotonic())
        if child.is_group:
            with contextlib.suppress(OSError):
                os.killpg(child.pid, signal.SIGKILL)
        if is_late:
            child.signal(signal.SIGKILL)
            child.has_ended(child.grace_s)


if __name__ == "__main__":
    main()
