"""A copy of the checkout in which mutants are tried, one after the other, by a process that has imported the rest.

    with House(root) as house:
        house.trial(mutant, source, tests)

Each trial is a fork of this process, which has imported what tests import and hotspan is not: it reads the copy's
modules, and so do the programs that it starts.
"""

import contextlib
import gc
import importlib
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.mutants.mutate import Mutant

_COPIED = ("src", "tests", "kit", "docs", "docsite", "proofs", "benchmarks", "examples", "deploy")
_PRELOADED = (
    *("pytest", "hypothesis", "xdist", "pytest_asyncio", "pydantic", "fastapi", "typer", "rich", "yaml", "jinja2"),
    *("httpx", "uvicorn", "aiohttp", "numpy", "psutil", "safetensors", "tokenizers", "plotly.graph_objects"),
    *("multiprocessing.pool", "concurrent.futures", "cryptography", "openai", "redis", "requests", "zmq"),
    *(
        "torch",
        "transformers",
        "ray.serve",
        "vllm.engine.arg_utils",
        "vllm.v1.core.kv_cache_utils",
        "opentelemetry.sdk.trace",
    ),
)
_OWN = ("hotspan", "djl_python", "tests", "kit", "docsite", "proofs", "benchmarks")
_POLL_S = 0.02


class Outcome(StrEnum):
    """What became of a mutant. BROKEN: pytest could not run the tests that were named."""

    KILLED = "killed"
    SURVIVED = "survived"
    ENDLESS = "endless"
    BROKEN = "broken"


_BY_STATUS = {0: Outcome.SURVIVED, 1: Outcome.KILLED, 2: Outcome.KILLED, 4: Outcome.BROKEN, 5: Outcome.BROKEN}
"""pytest's exit status; 2: a module that can't be imported."""


class House:
    """The copy. root: the checkout."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._place = tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True)
        self.path = Path(self._place.name).resolve() / "tree"
        self._writes = 0

    def __enter__(self) -> Self:
        self.path.mkdir()
        for name in _COPIED:
            shutil.copytree(self._root / name, self.path / name, ignore=shutil.ignore_patterns("__pycache__"))
        for file in self._root.iterdir():
            if file.is_file():
                shutil.copy2(file, self.path / file.name)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._place.cleanup()

    def trial(self, mutant: Mutant | None, tests: Sequence[str], cpu_s: float, wall_s: float) -> tuple[Outcome, str]:
        """What tests say of a mutant, or of the copy as it is; and the first test that failed, if one did."""
        if mutant is None:
            return self._forked(tests, cpu_s, wall_s)
        file = self.path / mutant.path
        source = file.read_text()
        self._write(file, mutant.applied(source))
        try:
            return self._forked(tests, cpu_s, wall_s)
        finally:
            self._write(file, source)

    def _write(self, file: Path, text: str) -> None:
        """With a time of change that no other version has: bytecode is found by it."""
        self._writes += 1
        file.write_text(text)
        at = 1_000_000_000 + self._writes * 10
        os.utime(file, (at, at))

    def _forked(self, tests: Sequence[str], cpu_s: float, wall_s: float) -> tuple[Outcome, str]:
        output = self.path.parent / "output"
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            _become_pytest(self.path, output, tests, int(cpu_s) + 1)
        until_s = time.monotonic() + wall_s
        status = None
        while status is None and time.monotonic() < until_s:
            found, raw = os.waitpid(child, os.WNOHANG)
            status = raw if found else None
            time.sleep(_POLL_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # with the programs that it started
        if status is None:
            os.waitpid(child, 0)
            return Outcome.ENDLESS, ""
        said = output.read_text(errors="replace")
        failed = next((line for line in said.splitlines() if line.startswith(("FAILED", "ERROR"))), "")
        if os.WIFSIGNALED(status):
            return (Outcome.ENDLESS if os.WTERMSIG(status) == signal.SIGXCPU else Outcome.KILLED), failed
        outcome = _BY_STATUS.get(os.WEXITSTATUS(status), Outcome.KILLED)
        is_told = outcome is Outcome.BROKEN and "\nERROR " in said  # a module that can't be imported any more
        return Outcome.KILLED if is_told else outcome, failed[:200]


def preload() -> None:
    """Import what tests import, but for what is in the copy."""
    from kit.environment import prepare_environment

    prepare_environment()
    for name in _PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for name in [each for each in sys.modules if each.split(".")[0] in _OWN and not each.startswith("tests.mutants")]:
        del sys.modules[name]
    gc.collect()
    gc.freeze()  # or each fork's first collection would copy all that is preloaded


def _become_pytest(tree: Path, output: Path, tests: Sequence[str], cpu_s: int) -> None:
    """In the forked process: run the tests in the copy, and end with pytest's status."""
    status = 3
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 5))
        out = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for standard in (1, 2):
            os.dup2(out, standard)
        os.chdir(tree)
        paths = [str(tree / "src"), str(tree)]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        for name in [each for each in sys.modules if each.split(".")[0] in _OWN]:
            del sys.modules[name]
        sys.path[:] = paths + [each for each in sys.path if Path(each or ".").resolve() not in map(Path, paths)]
        sys.path_importer_cache.clear()
        import pytest

        options = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:schemathesis"]
        status = int(pytest.main([*options, *tests]))
    finally:
        sys.stdout.flush()
        os._exit(status)
