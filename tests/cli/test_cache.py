"""`hotspan cache`: what a command line asks of a server."""

from pathlib import Path
from typing import Any

import click.testing
import pytest
import typer
from typer.testing import CliRunner

from hotspan.cli import admin_client, main
from hotspan.cli.cache import CheckOptions, cache
from hotspan.cli.invalidate import InvalidateOptions, Invalidation
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


def behind_a_router(body: Any) -> dict[str, Any]:
    down = {"replica": "http://b", "status": 503, "body": {"error": "no answer"}}
    rows = [{"replica": "http://a", "status": 200, "body": body}, down]
    return {"is_complete": True, "replicas": rows, "follows": ["http://b"]}


def test_a_router_is_asked_like_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """What each replica said is shown under its name, and who follows later."""
    receipt = {"removed": {"ram_chunks": 1}, "requests_in_flight": 0, "receipt": "r", "replicas": ["core-0"]}
    answers = {
        "/hotspan/cache": {"replicas": [{"replica": "core-0", "is_encrypted": False, "tiers": {}}]},
        "/hotspan/cache/invalidate": receipt,
    }

    def said(self: admin_client.Admin, path: str, *rest: Any) -> Any:
        return behind_a_router(answers[path])

    monkeypatch.setattr(admin_client.Admin, "get", said)
    monkeypatch.setattr(admin_client.Admin, "post", said)
    status, output = run("stats", "--server", "http://router")
    assert status == 0 and "http://a core-0: not encrypted" in output
    status, output = run("invalidate", "--tag", "a", "--server", "http://router")
    assert status == 0 and "http://a:" in output and "receipt r" in output and "http://b is down" in output


COMMAND = typer.main.get_command(main.app)

OTHERS: tuple[Any, ...] = (
    *(None, [], {}, 1, [1], {"ok": 1}),
    *({"replicas": each} for each in (None, 3, [], [{}])),
    {"replicas": [{"replica": "a", "found": {}, "requests": 1, "started": {"tokens": "x"}, "removed": []}]},
    {"replicas": [1], "adapters": [1], "data": []},
)
"""Answers of other programs, each with status 200."""

ASKING = (
    *(("cache", "stats"), ("cache", "check"), ("cache", "health"), ("cache", "explain"), ("cache", "clear", "--yes")),
    *(("cache", name, "--tag", "a") for name in ("invalidate", "lookup", "prefetch", "pin")),
    *(("cache", "pin", "--tag", "a", "--gib", "0"), ("cache", "warm", __file__)),
    ("cache", "warm", __file__, "--model", "m", "--no-wait-for-idle"),
    *(
        ("adapters", "list"),
        ("adapters", "register", "a", "b"),
        ("adapters", "update", "a"),
        ("adapters", "remove", "a"),
    ),
    *(("route", "replicas"), ("route", "drain", "http://a"), ("route", "resume", "http://a")),
    *(("keys", "rotate", "--tenant", "t"), ("keys", "shred", "--tenant", "t", "--yes")),
)
"""Every command that prints what a server answered."""

BOTH = {
    *("cache stats", "cache check", "cache health", "cache explain", "cache clear", "cache invalidate", "cache lookup"),
    *("cache prefetch", "cache pin", "cache warm", "adapters list", "route replicas"),
}
"""Those with --json."""


@pytest.mark.parametrize("answer", OTHERS, ids=str)
@pytest.mark.parametrize("words", ASKING, ids=" ".join)
def test_each_command_tells_that_another_server_answered(
    words: tuple[str, ...], answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line, with exit status 2, and nothing printed before it: neither success, nor the answer as JSON."""
    monkeypatch.setattr(admin_client.Admin, "_call", lambda self, *rest: answer)
    if words == ("route", "replicas") and answer == {"replicas": []}:
        return  # a router that has found none yet
    for more in ((), ("--json",)) if " ".join(words[:2]) in BOTH else ((),):
        given = [*words, "--server", "http://x:1", *more]
        done = click.testing.CliRunner().invoke(COMMAND, given, env={"COLUMNS": "500"})
        assert done.exit_code == 2 and "http://x:1 does not answer as hotspan does" in done.output, (more, done.output)
        assert not done.stdout


def test_every_command_that_asks_a_server_is_in_the_table() -> None:
    """By the option that names it, and --json by the option of that name; others than these have tests of their own."""
    elsewhere = {"trace record", "plan"}  # what they collect; a page of metrics
    found: dict[str, bool] = {}

    def look(group: Any, path: tuple[str, ...]) -> None:
        for name, command in getattr(group, "commands", {}).items():
            look(command, (*path, name))
        flags = {flag for each in group.params for flag in each.opts}
        if "--server" in flags:
            found[" ".join(path)] = "--json" in flags

    look(COMMAND, ())
    assert found.keys() - elsewhere == {" ".join(words[:2]) for words in ASKING}
    assert {name for name, has_json in found.items() if has_json} - elsewhere == BOTH


def test_stats_have_the_tokens_of_a_chunk_and_no_made_up_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that says how many bytes it has and not how many chunks is not said to have none."""
    tier = {"chunks": 0, "capacity_chunks": 0, "bytes": 161061273, "capacity_bytes": 0, "tenants": {}}
    ram = tier | {"bytes": 0, "capacity_chunks": 1234}
    told = {"replica": "a", "is_encrypted": False, "chunk_tokens": 256, "tiers": {"ram": ram, "l2": tier}}
    monkeypatch.setattr(admin_client.Admin, "get", lambda self, path: {"replicas": [told]})
    status, output = run("stats", "--server", "http://a")
    assert status == 0 and "a: not encrypted, chunks of 256 tokens" in output
    rows = [[cell.strip() for cell in line.split("│")] for line in output.splitlines() if "│" in line]
    found = {row[1]: row[2:4] for row in rows if row[1] in ("ram", "l2")}
    assert found == {"ram": ["0", "1,234"], "l2": ["-", "-"]}
