"""Processes that begin where another has finished its imports: forked, and otherwise like `python WORDS`.

A nursery is a process that has imported much, has started no thread, and waits. On request it forks a process that gets
the arguments, environment, directory, descriptors and session of the request, and runs as a new interpreter would. That
process is a child of who asked, not of the nursery: the nursery forks twice, and the process between ends while who
asked is the reaper of orphans (PR_SET_CHILD_SUBREAPER). So it is waited for and killed as any child, and its exit
status is its own.

Each such process has a nursery of its own, forked before it runs anything (kit/spawning.py uses it). A nursery ends
with the process that it belongs to.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_CLONE_NEWNS: Final = 0x00020000
_MS_PRIVATE_ALL: Final = (1 << 18) | (1 << 14)
"""MS_PRIVATE | MS_REC."""

_MS_BIND: Final = 1 << 12
_MAX_BYTES: Final = 1 << 20
_MAX_FDS: Final = 200
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


class NotForked(Exception):
    """The nursery is gone, or can't start this."""


@dataclass(frozen=True, slots=True)
class Program:
    """`python WORDS`.

    fds: the numbers that its descriptors get; it has no others. group: its process group, as Popen has it.
    max_files: a limit of its own for open files. shared: a directory that it has as /dev/shm, with all that it starts,
    as on a host of its own; that needs root.
    """

    words: Sequence[str]
    environment: Mapping[str, str]
    directory: str
    fds: Sequence[int] = (0, 1, 2)
    is_session: bool = False
    group: int = -1
    max_files: int | None = None
    shared: str | None = None


class Nursery:
    """The client's side. Threads may share it; a fork of the client may not use it."""

    def __init__(self, sent: socket.socket) -> None:
        self._sent = sent
        self._lock = threading.Lock()
        self._owner = os.getpid()

    def fork(self, program: Program, fds: Sequence[int]) -> int:
        """Start a program as a child of this process; its number. fds: what it gets. Raises: NotForked."""
        message = json.dumps(asdict(program)).encode("utf-8", "surrogateescape")
        if self._owner != os.getpid() or len(message) > _MAX_BYTES or len(fds) > _MAX_FDS:
            raise NotForked("another process's nursery, or too much for one message")
        with self._lock:
            _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._sent, [message], list(fds))
                answer = self._sent.recv(64)
            except OSError as error:
                raise NotForked(str(error)) from error
            finally:
                _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        if not answer:
            raise NotForked("it has ended")
        return int(answer)

    def move(self, above: int) -> None:
        """Give its socket a number above this one."""
        number = fcntl.fcntl(self._sent.fileno(), fcntl.F_DUPFD_CLOEXEC, above + 1)
        self._sent.close()
        self._sent = socket.socket(fileno=number)

    def close(self) -> None:
        """End the nursery."""
        self._sent.close()


def pair() -> tuple[socket.socket, socket.socket]:
    """The ends of client and nursery."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, option, _MAX_BYTES)
    return ends


def live(received: socket.socket, run: Callable[[Program, Nursery], None]) -> None:
    """Fork programs as they are asked for; the process ends when the other end is closed.

    `run` is called in each process that is forked, with its own nursery; when it returns, so does this function, there.
    """
    while True:
        program, fds = _serve(received)
        if program.shared is not None:
            _mount(program.shared)  # before its nursery is forked, so that what comes from that has it too
        sent, inner = pair()
        parent = os.getpid()
        if os.fork():
            inner.close()
            nursery = Nursery(sent)
            run(_begin(program, fds, nursery), nursery)
            return
        sent.close()
        for fd in fds:
            os.close(fd)
        _end_with(parent)
        received = inner


def _serve(received: socket.socket) -> tuple[Program, list[int]]:
    """Fork a process for each request, in which this returns."""
    while True:
        message, fds, _, _ = socket.recv_fds(received, _MAX_BYTES, _MAX_FDS)
        if not message:
            os._exit(0)
        waits, goes = os.pipe()
        reads, writes = os.pipe()
        between = os.fork()
        if not between:
            _fork_again(writes)
            received.close()
            for fd in (goes, reads, writes):
                os.close(fd)
            os.read(waits, 1)  # until the process between is gone, and who asked is the parent
            os.close(waits)
            return Program(**json.loads(message)), fds
        for fd in (waits, writes, *fds):
            os.close(fd)
        os.waitpid(between, 0)
        number = os.read(reads, 64)
        os.close(reads)
        with contextlib.suppress(OSError):  # who asked is gone
            received.send(number)
        os.close(goes)


def _fork_again(writes: int) -> None:
    """Return in a child; the process itself ends, once it has written the child's number."""
    child = os.fork()
    if child:
        os.write(writes, str(child).encode())
        os._exit(0)


def _end_with(parent: int) -> None:
    """End this process with its parent, and at Ctrl-C without a word."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def _mount(shared: str) -> None:
    """Have this directory as /dev/shm, in this process and its children. Raises: OSError."""
    own, root = os.fsencode(shared), b"/"
    failed = (
        _LIBC.unshare(_CLONE_NEWNS)
        or _LIBC.mount(b"none", root, None, _MS_PRIVATE_ALL, None)
        or _LIBC.mount(own, b"/dev/shm", None, _MS_BIND, None)
    )
    if failed:
        raise OSError(ctypes.get_errno(), f"{shared} as /dev/shm: {os.strerror(ctypes.get_errno())}")


def _begin(program: Program, fds: Sequence[int], nursery: Nursery) -> Program:
    """Be the process that was asked for."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if program.is_session:
        os.setsid()
    if program.group >= 0:
        os.setpgid(0, program.group)
    highest = max(*program.fds, *fds)
    nursery.move(highest)
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, highest + 1) for fd in fds]
    for fd in fds:
        os.close(fd)
    for number, fd in zip(program.fds, moved, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(program.directory)
    os.environ.clear()
    os.environ.update(program.environment)
    if program.max_files is not None:
        limit_files(program.max_files)
    return program


def limit_files(number: int) -> None:
    """Let this process have as many open files at a time."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
