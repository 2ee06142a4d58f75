"""Servers without the seconds of their imports: forked from a process that has imported what a server imports.

    preloaded = Preloaded(environment)      # starts the process at the first server; one for each environment
    process = preloaded.popen([sys.executable, "-m", "hotspan", "serve", ...], env=environment)

`popen` is subprocess.Popen, and gives a child of this process like that of Popen (kit/nursery.py). A server whose
environment differs in what the imports have read, and every other command, is started by Popen.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from kit.inspection import inspect_in_process
from kit.nursery import Nursery, limit_files, live, pair
from kit.spawning import TITLE_BYTES, Chosen, Imports, executing, is_server, run

MODULES: Final = (
    "hotspan.cli.main",
    "hotspan.cli.serve",
    "hotspan.server.run",
    "hotspan.server.headless",
    "hotspan.engine.spec",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.model_executor.models.qwen2",
)


class _Listed(str):
    """A variable's name in a list of all of them, as for a copy of the environment: a look at its value is no use."""


class _Recording(os._Environ):  # type: ignore[type-arg]
    """os.environ that keeps which variables were read."""

    names: Final[set[str]] = set()

    def __getitem__(self, name: Any) -> Any:
        if isinstance(name, str) and not isinstance(name, _Listed):
            self.names.add(name)
        return super().__getitem__(name)

    def __iter__(self) -> Iterator[str]:
        return map(_Listed, super().__iter__())


class Preloaded:
    """A process with a server's imports in this environment, started when it is first needed.

    modules: what is imported. chosen: which commands are forked.
    """

    def __init__(
        self, environment: Mapping[str, str], modules: Sequence[str] = MODULES, chosen: Chosen = is_server
    ) -> None:
        self._environment, self._modules, self._chosen = dict(environment), modules, chosen
        self._started: tuple[subprocess.Popen[bytes], Nursery, Imports] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def popen(
        self, command: Sequence[str], max_files: int | None = None, shared: Path | None = None, **how: Any
    ) -> subprocess.Popen[Any]:
        """As subprocess.Popen. max_files: a limit of its own for open files. shared: what it has as /dev/shm.

        Raises: NotForked if it is to have a /dev/shm of its own, and can't be forked.
        """
        _, nursery, imports = self._started = self._started or self._start()
        own = None if shared is None else os.fspath(shared)
        execute_child = executing(nursery, imports, max_files, own, self._chosen)
        forked: type[subprocess.Popen[Any]] = type("Forked", (subprocess.Popen,), {"_execute_child": execute_child})
        return forked(command, **how)

    def close(self) -> None:
        """End the process. Servers go on."""
        if self._started is not None:
            process, nursery, _ = self._started
            nursery.close()
            process.wait()
            self._started = None

    def _start(self) -> tuple[subprocess.Popen[bytes], Nursery, Imports]:
        sent, received = pair()
        command = [
            sys.executable,
            "-m",
            "kit.preloaded",
            str(received.fileno()),
            "-" * TITLE_BYTES,
            *self._modules,
        ]
        with received:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=self._environment,
                cwd=Path(__file__).parents[1],
                pass_fds=[received.fileno()],
            )
        read = sent.recv(1 << 20)
        if not read:
            raise RuntimeError(f"the process with the imports of servers ended with {process.wait()}")
        return process, Nursery(sent), Imports(self._environment, json.loads(read))


class Servers:
    """Servers of a run of tests. Outside of `forked` each is a program of its own, as in benchmarks.

    A run has one process with imports: those of the environment of its first server.
    """

    def __init__(self) -> None:
        self._is_forked = False
        self._preloaded: Preloaded | None = None

    @contextlib.contextmanager
    def forked(self) -> Iterator[None]:
        """Inside, servers are forked."""
        self._is_forked = True
        try:
            yield
        finally:
            self._is_forked = False
            if self._preloaded is not None:
                self._preloaded.close()

    def popen(
        self, usual: Mapping[str, str], command: Sequence[str], max_files: int | None = None, **how: Any
    ) -> subprocess.Popen[Any]:
        """As subprocess.Popen. usual: the environment of most servers. max_files: a limit of its own for open files."""
        if self._is_forked and is_server(command):
            self._preloaded = self._preloaded or Preloaded(usual)
            return self._preloaded.popen(command, max_files, **how)
        if max_files is not None:
            how["preexec_fn"] = functools.partial(limit_files, max_files)
        process: subprocess.Popen[Any] = subprocess.Popen(command, **how)
        return process


SERVERS: Final = Servers()


def main() -> None:
    """Import, and fork what is asked for."""
    received, environment = socket.socket(fileno=int(sys.argv[1])), dict(os.environ)
    received.set_inheritable(False)
    os.environ.__class__ = _Recording
    inspect_in_process()
    for module in sys.argv[3:]:
        with contextlib.suppress(ModuleNotFoundError):  # in another release of vLLM
            importlib.import_module(module)
    os.environ.__class__ = type(os.environ).__base__  # type: ignore[assignment]
    if len(os.listdir("/proc/self/task")) > 1:
        raise SystemExit("an import has started a thread: what that holds would be held for ever in a fork")
    with contextlib.suppress(ModuleNotFoundError):  # it finds where the title is by variables that a fork has no more
        importlib.import_module("setproctitle").getproctitle()
    gc.collect()
    gc.freeze()
    received.send(json.dumps(sorted(_Recording.names)).encode())
    imports = Imports(environment, _Recording.names)
    live(received, lambda program, nursery: run(program, nursery, imports))


if __name__ == "__main__":
    main()
