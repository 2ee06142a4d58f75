"""A plugin of pytest's: which lines of some packages each test runs in its own process, and how long it takes.

    MUTANTS_TRACE=FILE MUTANTS_ROOT=DIR python -m pytest -p tests.mutants.trace ...

FILE.PID gets a JSON object a line: {"test": its id, "seconds": its time, "lines": {path below DIR: [lines]}}.
"""

import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import pytest

_ROOT = os.environ.get("MUTANTS_ROOT", "/nowhere") + "/src/"
_OUTPUT = os.environ.get("MUTANTS_TRACE")
_ENOUGH = 64
"""Calls of a function in one test that are followed: a function that is called more often has run what it runs."""

_seen: set[tuple[str, int]] = set()
_calls: Counter[CodeType] = Counter()


def _called(frame: FrameType, event: str, argument: Any) -> Any:
    code = frame.f_code
    if not code.co_filename.startswith(_ROOT):
        return None
    _calls[code] += 1
    if _calls[code] > _ENOUGH:
        return None
    _seen.add((code.co_filename, frame.f_lineno))
    return _ran


def _ran(frame: FrameType, event: str, argument: Any) -> Any:
    _seen.add((frame.f_code.co_filename, frame.f_lineno))
    return _ran


def _begin() -> None:
    threading.settrace(_called)
    sys.settrace(_called)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Record what runs from a test's first fixture to the end of its last."""
    if _OUTPUT is None:
        return (yield)
    _seen.clear()
    _calls.clear()
    began_s = time.monotonic()
    _begin()
    try:
        return (yield)
    finally:
        sys.settrace(None)
        _write(item.nodeid, time.monotonic() - began_s)


def _write(test: str, seconds: float) -> None:
    lines: dict[str, list[int]] = {}
    for path, line in sorted(_seen.copy()):
        lines.setdefault("src/" + path.removeprefix(_ROOT), []).append(line)
    with open(f"{_OUTPUT}.{os.getpid()}", "a") as file:  # of each worker of xdist
        file.write(json.dumps({"test": test, "seconds": round(seconds, 3), "lines": lines}) + "\n")
