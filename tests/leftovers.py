"""What a run leaves behind: nothing, or it fails; and how much room its temporary files took.

A run has one directory for all of its temporary files, TMPDIR of its processes too, and removes it. It fails when a
file is left in TMPDIR outside all `tmp_path`s, when a file in /dev/shm that nobody has open, or a process, is
left at the end, and when more than 2 GiB were in use. That is what lies there after each test; what a test itself has
removed is not seen. Of /dev/shm only hotspan's own files count, and none while another run is under way.
"""

import contextlib
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import psutil
import pytest

MAX_BYTES = 2 << 30
PATIENCE_S = 60.0
SHARED = Path("/dev/shm")
PREFIX = "tests-of-hotspan-"
ALLOWED = re.compile(
    r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|torchinductor_.*|vllm_dist_.*|ray|hotspan-(store-)?[a-z0-9_]{8}|gw\d+"
)
"""In TMPDIR: what vLLM, torch and Ray leave, the directory of a killed server, and those of workers."""


class Leftovers:
    """Of one process of a run, the only one or a worker.

    base: the run's directory. temporary: this process's TMPDIR. files: its `tmp_path`s.
    """

    def __init__(self, base: Path, temporary: Path, files: Path) -> None:
        self.base, self.temporary, self.files = base, temporary, files
        self.most_bytes = 0
        self.left: list[str] = []
        self._seen: dict[str, str] = {}
        self._shared = dict.fromkeys(shared_files(), "")

    def measure(self) -> None:
        """Before a test's files are removed: how much is in use."""
        self.most_bytes = max(self.most_bytes, used_bytes(self.files) + used_bytes(self.temporary))

    def look(self, test: str) -> None:
        """After a test: what is there that was not there before; a fixture of the module may have it still."""
        for name in self._temporary_files():
            self._seen.setdefault(name, test)
        for name in shared_files():
            self._shared.setdefault(name, test)

    def end(self) -> None:
        """After the last test: what is left of what was there."""
        self.left += [
            f"{self._seen.get(name, 'a test')} left {self.temporary / name}" for name in self._temporary_files()
        ]

    def _temporary_files(self) -> list[str]:
        names = sorted(os.listdir(self.temporary)) if self.temporary.is_dir() else []
        return [name for name in names if not ALLOWED.fullmatch(name)]

    def wait(self) -> None:
        """Until all that was started has ended, or will not end."""
        until_s = time.monotonic() + PATIENCE_S
        while (rest := self._rest()) and time.monotonic() < until_s:
            time.sleep(0.5)
        self.left += rest

    def _rest(self) -> list[str]:
        """Processes and files in /dev/shm that are left."""
        gone = [f"process {each.pid}: {each.name()}" for each in processes(self.base)]
        if is_another_under_way(self.base):
            return gone
        opened = open_files()
        new = [(name, self._shared.get(name, "a test")) for name in shared_files()]
        return gone + [
            f"{test} left {SHARED / name}" for name, test in new if test and str(SHARED / name) not in opened
        ]


def shared_files() -> list[str]:
    """What hotspan has in /dev/shm, besides the directory of sessions, which all servers share."""
    return [path.name for path in SHARED.glob("hotspan*") if path.name != "hotspan_sessions"]


def processes(base: Path) -> list[psutil.Process]:
    """The processes that were started with TMPDIR below this directory, or have files there open, and still run.

    One that has given itself a title, as an engine core does, shows no environment any more.
    """
    found = []
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            is_ours = process.environ().get("TMPDIR", "").startswith(f"{base}/") or has_open(process.pid, base)
            if (
                is_ours
                and process.pid not in own
                and process.status() != psutil.STATUS_ZOMBIE
                and "multiprocessing" not in " ".join(process.cmdline())
            ):
                found.append(process)
    return found


def has_open(pid: int, base: Path) -> bool:
    """Whether a process has a file below this directory open, removed or not, or works there."""
    links = [*Path(f"/proc/{pid}/fd").iterdir(), Path(f"/proc/{pid}/cwd")]
    for link in links:
        with contextlib.suppress(OSError):
            if os.readlink(link).startswith(f"{base}/"):
                return True
    return False


def is_another_under_way(base: Path) -> bool:
    """Whether another run has its directory beside this one. What runs that were killed have left is removed."""
    others = [(path, path.name.removeprefix(PREFIX).partition("-")[0]) for path in base.parent.glob(f"{PREFIX}*")]
    for path, number in others:
        if number.isdigit() and not psutil.pid_exists(int(number)):
            shutil.rmtree(path, ignore_errors=True)
    return any(path != base and path.is_dir() for path, _ in others)


def open_files() -> set[str]:
    """The files in /dev/shm that a process has open or mapped, and the sockets that it listens on."""
    found = set(re.findall(r" (/dev/shm/.*)$", Path("/proc/net/unix").read_text(), re.MULTILINE))
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found |= {os.readlink(fd) for fd in (process / "fd").iterdir()}
            found |= set(re.findall(r" (/dev/shm/.*)$", (process / "maps").read_text(), re.MULTILINE))
    return found


def used_bytes(directory: Path) -> int:
    """What the files below a directory take of the disk."""
    total = 0
    for parent, _, files in os.walk(directory):
        for name in files:
            with contextlib.suppress(OSError):
                status = os.lstat(os.path.join(parent, name))
                total += status.st_blocks * 512 if stat.S_ISREG(status.st_mode) else 0
    return total


_KEY = pytest.StashKey[Leftovers]()
_WORKERS = pytest.StashKey[list[tuple[int, list[str]]]]()


def worker_of(config: pytest.Config) -> str:
    """The name of xdist's worker that this process is; none, if it is no worker."""
    return getattr(config, "workerinput", {}).get("workerid", "")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """One directory for everything; a worker has its own in its parent's."""
    worker = worker_of(config)
    if worker:
        base = Path(os.environ["TMPDIR"]).parent
    else:
        base = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-")).resolve()
    temporary = base / "t" / worker
    temporary.mkdir()
    os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
    runtime = base / "r" / worker
    runtime.mkdir(parents=True, exist_ok=True)
    os.environ["XDG_RUNTIME_DIR"] = str(runtime)  # so that no test finds another worker's engines and tokens
    config.option.basetemp = config.option.basetemp or str(base / "p")
    config.stash[_KEY] = Leftovers(base, temporary, Path(config.option.basetemp))
    config.stash[_WORKERS] = []


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Measure while a test's files are there."""
    item.config.stash[_KEY].measure()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Look after each test."""
    result = yield
    item.config.stash[_KEY].look(item.nodeid)
    return result


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Take over what a worker found."""
    if found := getattr(node, "workeroutput", {}).get("leftovers"):
        node.config.stash[_WORKERS].append(found)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail if something is left."""
    leftovers = session.config.stash[_KEY]
    leftovers.end()
    if worker_of(session.config):
        session.config.workeroutput["leftovers"] = (leftovers.most_bytes, leftovers.left)  # type: ignore[attr-defined]
        return
    leftovers.wait()
    for most_bytes, left in session.config.stash[_WORKERS]:
        leftovers.most_bytes += most_bytes
        leftovers.left += left
    if (leftovers.left or leftovers.most_bytes > MAX_BYTES) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say how much there was, and what is left."""
    leftovers = config.stash[_KEY]
    terminalreporter.section("leftovers")
    terminalreporter.line(f"temporary files: up to {leftovers.most_bytes / (1 << 20):.0f} MiB of {MAX_BYTES >> 20} MiB")
    for line in leftovers.left:
        terminalreporter.line(f"LEFT {line}", red=True)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the directory."""
    if not worker_of(config):
        shutil.rmtree(config.stash[_KEY].base, ignore_errors=True)
