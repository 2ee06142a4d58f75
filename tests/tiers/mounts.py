"""Real file systems for tests that need a small, a read-only or a simple one."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def mounted(path: Path, kind: str, options: str = "") -> Iterator[Path]:
    """A fresh file system at `path`; the test is skipped where mounting is not allowed."""
    path.mkdir()
    command = ["mount", "-t", kind, *(["-o", options] if options else []), "none", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        pytest.skip(f"no mount command: {error}")
    if done.returncode:
        pytest.skip(f"can't mount {kind} here (needs root): {done.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)
