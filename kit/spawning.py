"""Programs from a nursery: how a process that it forked runs one, and how processes start others from theirs.

Those are what multiprocessing's "spawn" starts, as vLLM starts engine cores and workers, and servers (`_SERVES`), if
their environment is one in which the nursery's imports would have done the same. All others start as ever.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import multiprocessing.util
import os
import runpy
import subprocess
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from kit.nursery import NotForked, Nursery, Program, limit_files

TITLE_BYTES: Final = 2000
_SPAWNED: Final = "--multiprocessing-fork"
_SERVES: Final = (["-m", "hotspan", "serve"], ["-m", "hotspan.cli.serve"])
_PIPES: Final = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
_ARGUMENTS: Final = (
    *("args", "executable", "preexec_fn", "close_fds", "pass_fds", "cwd", "env", "startupinfo", "creationflags"),
    *("shell", *_PIPES, "restore_signals", "gid", "gids", "uid", "umask", "start_new_session", "process_group"),
)
"""Of `Popen._execute_child` in Python 3.11 to 3.14."""

_EARLY: Final = ("GOMP_", "KMP_", "LD_", "LC_", "MALLOC_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON", "TZ")
"""Beginnings of variables that an interpreter and libraries read when they are loaded."""

_LATE: Final = {
    "PATH": "for programs that imports start",
    "TMPDIR": "imports leave nothing there",
    "XDG_CACHE_HOME": "of what hubs have; hotspan reads it when it uses it",
}
"""Variables that imports read to no effect on what a server does."""


class Imports:
    """What a process has imported in an environment. read: the variables that the imports have read."""

    def __init__(self, environment: Mapping[str, str], read: Iterable[str]) -> None:
        self._environment = dict(environment)
        self._read = frozenset(read) - _LATE.keys()

    def fit(self, environment: Mapping[str, str]) -> bool:
        """Whether they would have done the same in this environment."""
        names = self._read.union(
            *([each for each in one if each.startswith(_EARLY)] for one in (environment, self._environment))
        )
        return all(environment.get(name) == self._environment.get(name) for name in names)


Chosen = Callable[[Sequence[str]], bool]
"""Whether a command is to be forked."""


def is_server(command: Sequence[str]) -> bool:
    """Whether this starts a server, by the Python that runs here."""
    words = list(command)
    return words[:1] == [sys.executable] and any(words[1 : 1 + len(each)] == each for each in _SERVES)


def is_program(command: Sequence[str]) -> bool:
    """Whether this runs a module or a file, by the Python that runs here."""
    words = list(command)
    return words[:1] == [sys.executable] and len(words) > 1 and (words[1] == "-m" or words[1].endswith(".py"))


def run(program: Program, nursery: Nursery, imports: Imports) -> None:
    """Run a program as `python WORDS` does, in this process."""
    _entitle(program)
    multiprocessing.util.spawnv_passfds = _spawning(nursery)  # type: ignore[assignment]
    subprocess.Popen._execute_child = executing(nursery, imports)  # type: ignore[attr-defined]
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # as one that was just imported; Python's own does so by itself
    how, rest = ("-", program.words) if program.words[0] not in ("-m", "-c") else (program.words[0], program.words[1:])
    what, main = rest[0], types.ModuleType("__main__")
    sys.argv = [how if how == "-c" else what, *rest[1:]]
    sys.modules["__main__"] = main
    if how == "-m":
        sys.path[0] = program.directory
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    elif how == "-c":
        sys.path[0] = ""
        exec(compile(what, "<string>", "exec"), main.__dict__)
    else:
        sys.path[0], main.__file__ = os.path.dirname(os.path.abspath(what)), what
        with open(what) as source:
            exec(compile(source.read(), what, "exec"), main.__dict__)


def _entitle(program: Program) -> None:
    """Have ps and psutil show its own command, as far as there is room (kit/preloaded.py makes it)."""
    with contextlib.suppress(ModuleNotFoundError):
        title = importlib.import_module("setproctitle")
        title.setproctitle(" ".join([sys.executable, *program.words])[:TITLE_BYTES])
        title.setthreadtitle(os.path.basename(sys.executable))


def _spawning(nursery: Nursery) -> Callable[[bytes, Sequence[str], Sequence[int]], int]:
    """multiprocessing's own function, with what "spawn" starts from a nursery."""
    spawn = multiprocessing.util.spawnv_passfds

    def spawnv_passfds(path: bytes, words: Sequence[str], passed: Sequence[int]) -> int:
        if os.fsdecode(path) == sys.executable and words[-1] == _SPAWNED and words[-3] == "-c":
            fds = [0, 1, 2, *passed]
            try:
                return nursery.fork(Program(words[-3:], dict(os.environ), os.getcwd(), fds), fds)
            except NotForked:
                pass
        return spawn(path, words, passed)

    return spawnv_passfds


def executing(
    nursery: Nursery,
    imports: Imports,
    max_files: int | None = None,
    shared: str | None = None,
    chosen: Chosen = is_server,
) -> Callable[..., None]:
    """subprocess's own method, with the chosen programs from a nursery. max_files, shared: as in `Program`.

    What is to have a /dev/shm of its own and can't be forked raises NotForked.
    """
    execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]

    def execute_child(self: Any, *arguments: Any) -> None:
        given = dict(zip(_ARGUMENTS, arguments, strict=True))
        words = [os.fspath(each) for each in given["args"]] if isinstance(given["args"], (list, tuple)) else []
        environment = dict(os.environ) if given["env"] is None else given["env"]
        if not chosen(words) or not _is_plain(given) or not imports.fit(environment):
            if shared is not None:
                raise NotForked(f"in another environment, or no program that is forked: {words}")
            _execute_limited(execute, self, given, max_files)
            return
        ends = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        fds = [number if end == -1 else end for number, end in enumerate(ends)] + list(given["pass_fds"])
        numbers = [0, 1, 2, *given["pass_fds"]]
        group = -1 if given["process_group"] is None else given["process_group"]
        program = Program(
            words[1:],
            environment,
            os.fspath(given["cwd"] or os.getcwd()),
            numbers,
            given["start_new_session"],
            group,
            max_files,
            shared,
        )
        try:
            self.pid = nursery.fork(program, fds)
        except NotForked:
            if shared is not None:
                raise
            _execute_limited(execute, self, given, max_files)
            return
        self._child_created = True
        self._close_pipe_fds(*(given[name] for name in _PIPES))

    return execute_child


def _execute_limited(execute: Callable[..., None], self: Any, given: dict[str, Any], max_files: int | None) -> None:
    if max_files is not None:
        given["preexec_fn"] = functools.partial(limit_files, max_files)
    execute(self, *given.values())


def _is_plain(given: Mapping[str, Any]) -> bool:
    """Whether nothing is asked for that a nursery can't do."""
    changes = ("preexec_fn", "executable", "shell", "gid", "gids", "uid")
    return not any(given[name] for name in changes) and given["umask"] == -1 and bool(given["close_fds"])
