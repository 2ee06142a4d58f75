"""`hotspan cache`: what a command line asks of a server."""

from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from hotspan.cli import admin_client
from hotspan.cli.cache import CheckOptions, InvalidateOptions, Invalidation, cache
from hotspan.core.errors import ConfigError


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, Any]]:
    """What is sent, instead of sending it: server, path and body."""
    calls: list[tuple[str, str, Any]] = []
    receipt = {"removed": {"ram_chunks": 1}, "requests_in_flight": 0, "receipt": "r", "replicas": ["a"]}

    def post(self: admin_client.Admin, path: str, body: dict[str, Any], timeout_s: float = 60) -> Any:
        calls.append((self.server, path, body))
        return receipt

    monkeypatch.setattr(admin_client.Admin, "post", post)
    return calls


def run(*words: str) -> tuple[int, str]:
    app = typer.Typer()
    app.add_typer(cache, name="cache")
    done = CliRunner().invoke(app, ["cache", *words])
    return done.exit_code, done.output


def test_an_invalidation_is_what_was_given(asked: list[tuple[str, str, Any]], tmp_path: Path) -> None:
    """Flags, both spellings of --tag, and files become the body; what is not given is not in it."""
    (tmp_path / "prompt").write_text("a text")
    (tmp_path / "tokens").write_text("[1, 2]")
    files = ("--prompt-file", str(tmp_path / "prompt"), "--tokens-file", str(tmp_path / "tokens"))
    words = ("--tag", "a", "--tags", "b", "--this-model", "--tokens-from", "256", "--server", "http://x:1", *files)
    status, output = run("invalidate", *words)
    assert status == 0 and "1 ram chunks" in output, output
    body = {"tags": ("a", "b"), "model": True, "tokens_from": 256, "prompt": "a text", "tokens": [1, 2]}
    assert asked == [("http://x:1", "/hotspan/cache/invalidate", body)]
    assert InvalidateOptions(scope=Invalidation(tenant="t")).body() == {"tenant": "t"}


@pytest.mark.parametrize(
    ("flag", "text", "message"),
    [
        ("tokens_file", "[1, true]", "write \\[1, 2, 3\\]"),
        ("tokens_file", "{}", "no JSON list of whole numbers"),
        ("batch_file", "[]", "no JSON list of objects"),
        ("batch_file", "[1]", "no JSON list of objects"),
        ("batch_file", "nonsense", "no JSON list of objects"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, flag: str, text: str, message: str) -> None:
    """A file that does not hold what its flag says is an error with an example."""
    (tmp_path / "file").write_text(text)
    with pytest.raises(ConfigError, match=message):
        InvalidateOptions(**{flag: tmp_path / "file"}).body()  # type: ignore[arg-type]


def test_what_can_not_be_undone_is_confirmed(asked: list[tuple[str, str, Any]]) -> None:
    """Without a terminal and --yes nothing is sent."""
    status, output = run("clear")
    assert status == 2 and "confirm with --yes" in output and not asked
    assert run("clear", "--yes")[0] == 0 and len(asked) == 1


@pytest.mark.parametrize("given", [{"kek": "file:x"}, {"disk": Path("kv"), "kek": "file:x"}])
def test_keys_go_with_a_directory(given: dict[str, Any]) -> None:
    """A key-encryption key needs its key store, and both need --disk."""
    with pytest.raises(ConfigError, match="--kek and --key-store go"):
        CheckOptions(**given)
