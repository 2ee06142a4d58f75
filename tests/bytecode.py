"""Bytecode of the tests, which the workers of xdist write together.

pytest rewrites the asserts of each module before it imports it, which takes half of the CPU time of a worker's start in
a fresh clone. What one worker has written the others read, but workers come to the same module at the same time. So
each rewrites its own part of all modules first.
"""

import importlib.util
import sys
from pathlib import Path

import pytest
from _pytest.assertion import rewrite

from tests.groups import is_left_out

_FLAGS = b"\x03\x00\x00\x00"  # a hash of the source, which is checked


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """In a worker: write its part."""
    worker = getattr(session.config, "workerinput", None)
    if worker is None or sys.dont_write_bytecode:
        return
    number = int(worker["workerid"].removeprefix("gw"))
    modules = sorted((session.config.rootpath / "tests").rglob("test_*.py"))
    for module in [each for each in modules if not is_left_out(each, session.config)][number :: worker["workercount"]]:
        write(module, session.config)


def write(module: Path, config: pytest.Config) -> None:
    """Write a module's bytecode where pytest looks for it, unless it is there."""
    cached = rewrite.get_cache_dir(module) / f"{module.stem}{rewrite.PYC_TAIL}"
    source = module.read_bytes()
    head = importlib.util.MAGIC_NUMBER + _FLAGS + importlib.util.source_hash(source)
    if cached.is_file() and cached.read_bytes()[: len(head)] == head:
        return
    if rewrite.try_makedirs(cached.parent):
        digest, code = rewrite._rewrite_test(module, config)
        rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, digest, cached)
