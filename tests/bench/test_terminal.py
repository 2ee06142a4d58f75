import io
import sys

import pytest

from hotspan.bench.terminal import stdout_console


class Terminal(io.StringIO):
    """A stdout that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_files_and_pipes_get_100_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where stdout is no terminal the width is 100; a terminal has its own."""
    monkeypatch.setenv("COLUMNS", "61")
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert stdout_console().width == 100
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert stdout_console().width == 61
