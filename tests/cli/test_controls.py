"""`hotspan cache lookup`, `prefetch`, `pin` and `health`, and the places where `invalidate` asks no server."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hotspan.cli import admin_client
from hotspan.cli.cache import cache
from hotspan.cli.invalidate import InvalidateOptions, Invalidation
from hotspan.core.errors import ConfigError
from hotspan.core.terms import Scope, adapter_label, tag_labels, tenant_label

ASKED = {"chunks": 4, "tokens": 512}
REPLICA: dict[str, Any] = {
    "replica": "a",
    "asked": ASKED,
    "found": {"ram": {"chunks": 1, "tokens": 128}, "l2": {"chunks": 2, "tokens": 256}},
    "started": ASKED | {"bytes": 1},
    "hold_s": 30.0,
    "bytes": 1 << 30,
    "tiers": {"ram": {"is_up": True}, "disk": {"is_up": False}},
}


class Server:
    """What is sent, and the answer in place of a server's."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.answer: Any = {"replicas": [REPLICA]}

    def post(self, path: str, body: Any = None) -> Any:
        self.asked.append((path, body))
        return self.answer


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    found = Server()
    monkeypatch.setattr(admin_client.Admin, "post", lambda self, path, body, timeout_s=60: found.post(path, body))
    monkeypatch.setattr(admin_client.Admin, "get", lambda self, path, timeout_s=30: found.post(path))
    return found


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(cache, [*words, "--server", "http://x:1"], env={"COLUMNS": "120"})
    return done.exit_code, done.output


def test_a_lookup_shows_each_tier(server: Server, tmp_path: Path) -> None:
    """Of a text by its tokens: what each tier has of how much; exit status 1 if none has anything."""
    (tmp_path / "tokens").write_text("[1, 2]")
    status, output = run("lookup", "--tokens-file", str(tmp_path / "tokens"), "--tenant", "t", "--cache-salt", "s")
    assert status == 0, output
    assert server.asked == [("/hotspan/cache/lookup", {"tenant": "t", "cache_salt": "s", "prompt": [1, 2]})]
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if "│" in line]
    assert rows == [["a", "ram", "1", "128", "512"], ["a", "l2", "2", "256", "512"]], output
    server.answer = {"replicas": [REPLICA | {"found": {}}]}
    status, output = run("lookup", "--tag", "a", "--json")
    assert status == 1 and json.loads(output) == server.answer


def test_a_prefetch_says_what_is_moved(server: Server, tmp_path: Path) -> None:
    """A prompt's text, or tags, with the time that it is held."""
    (tmp_path / "prompt").write_text("a text")
    status, output = run("prefetch", "--prompt-file", str(tmp_path / "prompt"), "--hold-s", "60")
    assert status == 0 and "512 tokens are moved into RAM, and held there for 30 s" in output, output
    assert server.asked == [("/hotspan/cache/prefetch", {"prompt": "a text", "hold_s": 60.0})]


def test_a_pin_has_tags_and_an_end(server: Server) -> None:
    """Without a tag nothing is sent; 0 GiB ends it."""
    status, output = run("pin")
    assert status == 2 and "give --tag" in output and not server.asked
    status, output = run("pin", "--tag", "a", "--gib", "2.5", "--hold-s", "60")
    assert status == 0 and "pinned: a, at most 2.5 GiB in each tier, for 60 s" in output, output
    assert server.asked == [("/hotspan/cache/pin", {"tags": ["a"], "gib": 2.5, "hold_s": 60.0})]
    assert "no longer pinned: a" in run("pin", "--tag", "a", "--gib", "0")[1]


def test_health_is_that_of_each_tier(server: Server) -> None:
    """Exit status 1 while a tier is down, behind a router too."""
    status, output = run("health")
    assert status == 1 and "a: answers; ram up, disk down" in output, output
    assert server.asked == [("/hotspan/cache", None)]
    well = REPLICA | {"tiers": {"ram": {"is_up": True}}}
    server.answer = {"replicas": [{"replica": "http://r:1", "status": 200, "body": {"replicas": [well]}}]}
    status, output = run("health", "--json")
    assert status == 0
    assert json.loads(output) == [{"server": "http://r:1", "replica": "a", "tiers": {"ram": "up"}}]


def test_two_names_of_a_text_are_one_too_many(server: Server, tmp_path: Path) -> None:
    """A prompt and tokens; nothing is sent."""
    status, output = run("lookup", "--prompt-file", "a", "--tokens-file", "b")
    assert status == 2 and "both name a text" in output.replace("\n", " ") and not server.asked


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--l2", "redis://x", "--directory", "/kv", "--tag", "a"), "all places to invalidate at"),
        (("--l2", "redis://x", "--server", "http://x:1", "--tag", "a"), "all places to invalidate at"),
        (("--l2-option", "a=b", "--tag", "a"), "belongs to an L2"),
        (("--directory", "/kv"), "names nothing to forget"),
        (("--directory", "/kv", "--this-model"), "running engine alone"),
        (("--directory", "/kv", "--tag", "a", "--tokens-from", "1"), "running engine alone"),
        (("--directory", "/nonexistent/kv", "--tag", "a"), "no disk tier's directory"),
        (("--l2", "http://x", "--tag", "a"), "give one of"),
    ],
)
def test_what_can_not_be_told_without_a_server_is_refused(words: tuple[str, ...], message: str) -> None:
    """Two places, nothing named, or what only an engine can name; exit status 2."""
    done = CliRunner().invoke(cache, ["invalidate", *words], env={"COLUMNS": "500"})
    assert done.exit_code == 2 and message in " ".join(done.output.split()), done.output


def test_scopes_are_those_of_the_engine(tmp_path: Path) -> None:
    """Names become the same labels; of a batch each has what stands beside it."""
    one = InvalidateOptions(scope=Invalidation(tag=("a",), session="s", tenant="t", adapter="d")).scopes()
    assert one == [Scope(tenant=tenant_label("t"), adapter=adapter_label("d"), labels=tag_labels(["a"], "s"))]
    (tmp_path / "batch").write_text('[{"tags": ["a"]}, {"session": "s"}]')
    two = InvalidateOptions(scope=Invalidation(tenant="t"), batch_file=tmp_path / "batch").scopes()
    assert two == [Scope(tenant=tenant_label("t"), labels=tag_labels(*each)) for each in ((["a"], None), ((), "s"))]
    (tmp_path / "batch").write_text('[{"tags": 5}]')
    with pytest.raises(ConfigError, match="are names"):
        InvalidateOptions(batch_file=tmp_path / "batch").scopes()
