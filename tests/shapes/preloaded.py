"""Processes of engines out of an interpreter that has imported vLLM: a start costs its own work, and no imports.

    test --asks--> Preloaded --fork--> an engine's first process --asks--> its template --fork--> engine core, workers

`multiprocessing` starts its children by `spawn`, as ever; but what it would start as a new interpreter is forked from a
process that has done nothing but import (a template, forked before its owner did anything). Such a child belongs to the
process that asked, has the descriptors that it was given, and no others.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import inspect
import io
import json
import os
import re
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import spawn, util
from pathlib import Path
from typing import Any

import psutil

from kit.child import Child

MODULES = (
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.llm",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen2",
    "hotspan.cli.serve",
    "hotspan.server.run",
    "hotspan.server.control",
    "hotspan.engine.launch",
    "hotspan.engine.connector",
    "hotspan.engine.worker",
)
PATIENCE_S = 60.0
_MAX_MESSAGE, _MAX_FDS = 1 << 17, 200
_HIGH = 700
"""Descriptors from here on are free while those that were sent are put in their places."""

_LOOK_S = 0.05
_SUBREAPER, _NEW_MOUNTS = 36, 0x00020000
_SPAWNED = re.compile(r"spawn_main\(tracker_fd=(\d+), pipe_handle=(\d+)\)")
_ROOT = Path(__file__).parents[2]


class Started:
    """A process that was forked, as subprocess.Popen has it where tests use it."""

    def __init__(self, pid: int, stdin: io.TextIOBase | None, stdout: io.TextIOBase | None) -> None:
        self.pid = pid
        self.stdin, self.stdout = stdin, stdout
        self._process = psutil.Process(pid)

    def poll(self) -> int | None:
        """None while it runs."""
        with contextlib.suppress(psutil.Error):
            if self._process.is_running() and self._process.status() != psutil.STATUS_ZOMBIE:
                return None
        return 0

    def wait(self, timeout_s: float) -> None:
        """Raises: subprocess.TimeoutExpired."""
        until = time.monotonic() + timeout_s
        while self.poll() is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(str(self.pid), timeout_s)
            time.sleep(_LOOK_S)

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(psutil.Error):
            self._process.send_signal(number)


class Preloaded:
    """An interpreter with vLLM, from which engines' first processes are forked. Ends at `close`, and they with it."""

    def __init__(self, environment: Mapping[str, str], log: Path) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.shapes.preloaded", str(theirs.fileno()), json.dumps(dict(environment))]
        self._process = Child(command, log=log, pass_fds=[theirs.fileno()])
        theirs.close()
        if self._socket.recv(_MAX_MESSAGE) != b"ready":
            raise OSError(log.read_text())

    def start(
        self, target: str, words: Sequence[str], out: int, *, shared: Path | None = None, has_pipes: bool = False
    ) -> Started:
        """Run `target`, a module or a script's path.

        shared:    what the process has as /dev/shm, a host of its own; None for that of this host.
        has_pipes: its stdin and stdout are pipes; else `out` has what it prints.
        """
        ends: list[int] = [*os.pipe(), *os.pipe()] if has_pipes else []
        fds = [ends[0], ends[3], out] if ends else [os.open(os.devnull, os.O_RDONLY), out, out]
        told = {
            "target": target,
            "argv": [target, *words],
            "env": None,
            "shared": None if shared is None else str(shared),
        }
        socket.send_fds(self._socket, [json.dumps(told | {"fds": [0, 1, 2]}).encode()], fds)
        pid = int(self._socket.recv(_MAX_MESSAGE))
        for each in (ends[0], ends[3]) if ends else fds[:1]:
            os.close(each)
        if not ends:
            return Started(pid, None, None)
        return Started(pid, os.fdopen(ends[1], "w"), os.fdopen(ends[2]))

    def close(self) -> None:
        below = psutil.Process(self._process.pid).children(recursive=True)
        self._socket.close()
        self._process.__exit__(None, None, None)
        for each in below:  # such as a cluster of Ray's, whose engine did not start
            with contextlib.suppress(psutil.Error):
                each.kill()


# -- in those processes ------------------------------------------------------------------------------------------------

Job = Callable[[], None]


def _serve(asked: socket.socket, forked: Callable[[], tuple[int, int]]) -> dict[str, Any]:
    """Fork a process for each request, until nobody is there to ask; returns in a forked process only.

    forked: as os.fork(), and the process that is to be named.
    """
    while True:
        while not select.select([asked], [], [], 1.0)[0]:
            _reap()
        message, fds, _, _ = socket.recv_fds(asked, _MAX_MESSAGE, _MAX_FDS)
        _reap()
        if not message:
            os._exit(0)
        pid, named = forked()
        if pid == 0:
            asked.close()
            told: dict[str, Any] = json.loads(message)
            high = [fcntl.fcntl(each, fcntl.F_DUPFD, _HIGH) for each in fds]
            os.closerange(3, _HIGH)
            for each, place in zip(high, told["fds"], strict=True):
                os.dup2(each, place)
                os.close(each)
            return told
        for each in fds:
            os.close(each)
        asked.send(str(named).encode())


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _direct() -> tuple[int, int]:
    pid = os.fork()
    return pid, pid


def _orphan() -> tuple[int, int]:
    """Fork a process whose parent has ended, so that it belongs to the nearest process above that takes orphans."""
    pids, tell = os.pipe()
    between = os.fork()
    if between == 0:
        if (pid := os.fork()) == 0:
            return 0, 0
        os.write(tell, str(pid).encode())
        os._exit(0)
    os.close(tell)
    named = int(os.read(pids, 32))
    os.close(pids)
    os.waitpid(between, 0)
    return between, named


def _template() -> socket.socket | None:
    """Fork a template of this process as it is now; None in what is forked from that, whose job is then in `_job`."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork():
        theirs.close()
        return ours
    kept = fcntl.fcntl(theirs.fileno(), fcntl.F_DUPFD_CLOEXEC, _HIGH)
    ours.close()
    theirs.close()
    os.closerange(3, _HIGH)
    nothing = os.open(os.devnull, os.O_RDWR)
    for each in range(3):
        os.dup2(nothing, each)
    _job.clear()
    _job.update(_serve(socket.socket(fileno=kept), _orphan))
    return None


_job: dict[str, Any] = {}


def _run() -> None:
    """Do what this process was forked for."""
    while (template := _template()) is None:  # in a process that was forked from the template, which has its own
        pass
    told = dict(_job)
    if told["env"] is not None:
        os.environ.clear()
        os.environ.update(told["env"])
    _spawn_from(template)
    sys.argv = told["argv"]
    if "pipe_handle" in told:
        os.chdir(told["cwd"])
        spawn.spawn_main(tracker_fd=told["tracker_fd"], pipe_handle=told["pipe_handle"])
    elif told["target"].endswith(".py"):
        runpy.run_path(told["target"], run_name="__main__")
    else:
        runpy.run_module(told["target"], run_name="__main__", alter_sys=True)


def _spawn_from(template: socket.socket) -> None:
    """Have multiprocessing's `spawn` in this process fork from a template."""
    module: Any = util
    owner, started, libc = os.getpid(), module.spawnv_passfds, ctypes.CDLL(None)

    def spawned(path: Any, words: Sequence[Any], fds: Sequence[int]) -> int:
        found = next(filter(None, (_SPAWNED.search(os.fsdecode(each)) for each in words)), None)
        if found is None or os.getpid() != owner:  # not a worker; or a child by os.fork(), which has no template
            return int(started(path, words, fds))
        told = {"target": "", "argv": ["-c", "--multiprocessing-fork"], "env": dict(os.environ), "cwd": os.getcwd()}
        told |= {"fds": [0, 1, 2, *fds], "tracker_fd": int(found[1]), "pipe_handle": int(found[2])}
        libc.prctl(_SUBREAPER, 1)
        try:
            socket.send_fds(template, [json.dumps(told).encode()], told["fds"])
            return int(template.recv(_MAX_MESSAGE))
        finally:
            libc.prctl(_SUBREAPER, 0)

    module.spawnv_passfds = spawned


def _be_patient() -> None:
    """Let requests wait for what tiers have, however slow this machine is: what is loaded is not a matter of time."""
    from hotspan.config.settings import CacheSettings

    given = inspect.signature(CacheSettings).parameters.values()
    optional = [each.name for each in given if each.default is not inspect.Parameter.empty]
    initializer: Any = CacheSettings.__init__
    defaults = dict(zip(optional, initializer.__defaults__, strict=True)) | {"patience_s": PATIENCE_S}
    initializer.__defaults__ = tuple(defaults.values())


def _mount(shared: str) -> None:
    """Let this process have `shared` as /dev/shm."""
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_MOUNTS):
        raise OSError(ctypes.get_errno(), "unshare")
    for words in (["--make-rprivate", "/"], ["--bind", shared, "/dev/shm"]):
        subprocess.run(["mount", *words], check=True)


def main(asked: socket.socket, environment: Mapping[str, str]) -> None:
    """Import, then fork what is asked for. environment: instead of this process's."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(_ROOT)
    for name in MODULES:
        importlib.import_module(name)
    _be_patient()
    gc.collect()
    gc.freeze()
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise OSError(f"the imports started {threads - 1} threads, which a forked process does not have")
    ctypes.CDLL(None).prctl(_SUBREAPER, 1)  # what engines leave behind is found below this process
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    asked.send(b"ready")
    _job.update(_serve(asked, _direct))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if _job["shared"] is not None:
        _mount(_job["shared"])
    _run()


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2]))
