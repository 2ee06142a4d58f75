"""Where commands write: what is not there is an error before any work, and nothing is made on the way."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from hotspan.cli.main import app


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, [*words], env={"COLUMNS": "500"})
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


@pytest.mark.parametrize(
    "words",
    [
        ("simulate", "--requests", "10", "--output"),
        ("simulate", "--requests", "10", "--report"),
        ("simulate", "--requests", "10", "--write-trace"),
        ("bench", "storage", "--size-gib", "0.02", "--output"),
        ("plan", "/nosuch/model", "--output"),
        ("plan", "/nosuch/model", "--report"),
        ("trace", "record", "--server", "http://127.0.0.1:9"),
    ],
)
def test_a_file_in_no_directory_is_refused_at_once(words: tuple[str, ...], tmp_path: Path) -> None:
    """The directory of a result is not made: its name may be a mistake."""
    status, output = run(*words, str(tmp_path / "missing" / "x.json"))
    assert status == 2 and f"there is no directory {tmp_path / 'missing'}" in output, output
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_not_there_is_not_measured(tmp_path: Path) -> None:
    """Another disk would be: that of the directory above."""
    status, output = run("bench", "storage", "--size-gib", "0.02", "--directory", str(tmp_path / "nvme"))
    assert status == 2 and f"--directory {tmp_path / 'nvme'} is no directory" in output, output
    assert not list(tmp_path.iterdir())


def test_a_model_that_can_not_be_made_is_an_error() -> None:
    """Where no directory can be made, whatever the reason."""
    status, output = run("demo-model", "/proc/x", "--size", "tiny")
    assert status == 2 and "/proc/x can't be made" in output, output


@pytest.mark.parametrize(("server", "port"), [("localhost", 80), ("https://localhost", 443)])
def test_the_port_that_was_tried_is_named(server: str, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A URL without a port has that of its scheme, which is not the one of `hotspan serve`."""
    from hotspan.cli import admin_client

    def refuse(*given: object) -> None:
        raise ConnectionRefusedError("refused")

    monkeypatch.setattr(admin_client, "open_url", refuse)
    status, output = run("cache", "stats", "--server", server)
    assert status == 2 and f"at port {port}, as --server names none" in output and "8080" in output, output
    status, output = run("cache", "stats", "--server", "http://localhost:8080")
    assert status == 2 and "at port" not in output, output
    status, output = run("cache", "stats", "--server", "unix:/nosuch.sock")
    assert status == 2 and "at port" not in output, output
