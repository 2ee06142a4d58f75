"""Directories with formatters in them."""

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Makes a directory of files: `write("adapter", model="...", yaml="...", rules="...")`."""

    def written(directory: str = "base", yaml: str | None = None, **modules: str) -> Path:
        path = tmp_path / directory
        path.mkdir(exist_ok=True)
        for name, code in modules.items():
            (path / f"{name}.py").write_text(textwrap.dedent(code))
        if yaml is not None:
            (path / "formatter.yaml").write_text(textwrap.dedent(yaml))
        return path

    return written
