"""The admin token: every command that asks a server takes it in one way, and says in one way that there is none."""

import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import typer

from docsite.reference import commands
from hotspan.cli.admin_client import Admin
from hotspan.cli.main import app
from hotspan.config.admin_token import HOW_TO_GIVE, VARIABLE, AdminToken
from hotspan.core.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
CODE = ROOT / "src" / "hotspan"
COMMANDS = dict(commands(typer.main.get_command(app)))
ASKS = {"--server", "--engine-url", "--from-metrics", "--token", "--router", "--a", "--b"}
"""Options that name a server, or give its token. A command with one asks a server."""

CLIENTS_ONLY = {"hotspan ab": "sends completions and asks for the list of models, both with an API key"}
READERS = {
    "cli/admin_client.py": "sends it",
    "cli/bench.py": "for the page of metrics",
    "cli/checking.py": "the server's own, which it would be started with",
    "cli/keys.py": "hands it to the admin client",
    "cli/plan.py": "hands it to the admin client",
    "cli/plan_options.py": "has the option",
    "cli/route.py": "the router's own, which it is started with",
    "bench/client.py": "sends it for the page of metrics",
    "bench/config.py": "carries it there",
    "bench/runner.py": "says what to give",
}
"""Modules of commands that know of the token. One that reads it by itself would have a way of its own."""

OPENERS = {
    "bench/client.py": "the load client, with the token for the metrics",
    "cli/admin_client.py": "the administrator's calls",
    "cli/plan.py": "the metrics page, first without the token",
    "demo/fit.py": "a server of its own",
    "demo/server.py": "a server of its own",
}
"""Modules of commands that open connections."""

TOKEN, OTHER, FILED = "given-on-the-command-line", "out-of-the-environment", "out-of-a-file-0600"


def options(name: str) -> set[str]:
    return {flag for each in COMMANDS[name].params for flag in each.opts}


def documented() -> set[str]:
    """The commands of the table in docs/usage.md."""
    text = (ROOT / "docs" / "usage.md").read_text()
    section = text[text.index("## The admin token") :].split("\n## ")[0]
    return {
        name for row in section.splitlines() if row.startswith("| `") for name in re.findall(r"`(hotspan [^`]+)`", row)
    }


def test_each_command_that_asks_a_server_takes_the_token_in_each_way() -> None:
    """An option, a file, and the variable; the table of the docs has these commands, and no others."""
    asking = {name for name in COMMANDS if options(name) & ASKS or name == "hotspan bench compare"}
    taking = {name for name in COMMANDS if {"--token", "--admin-token-file"} <= options(name)}
    assert asking - taking == CLIENTS_ONLY.keys(), "give the new command `AdminToken`, or its reason here"
    assert documented() == taking
    for name in taking:
        (help,) = [each.help for each in COMMANDS[name].params if "--token" in each.opts]
        assert VARIABLE in help and "--admin-token-file" in help


def test_no_command_has_a_way_of_its_own() -> None:
    """A module of the commands that reads the token, or opens connections, is one that is known here."""
    files = [
        path for part in ("cli", "bench", "demo", "plan", "simulate", "ab") for path in (CODE / part).rglob("*.py")
    ]
    found = {str(path.relative_to(CODE)): path.read_text() for path in files}
    assert {name for name, text in found.items() if re.search(r"admin_token|ADMIN_TOKEN", text)} == READERS.keys()
    opening = re.compile(r"\b(open_url|urlopen|ClientSession|httpx|requests\.(get|post))\b")
    assert {name for name, text in found.items() if opening.search(text)} == OPENERS.keys()


def test_what_is_nearer_to_the_command_comes_first(tmp_path: Path) -> None:
    """The option, then the file, then the variable, then what a server on this host has left; never abroad."""
    file = tmp_path / "token"
    file.write_text(f"{FILED}\n")
    file.chmod(0o600)
    here, abroad = urlsplit("http://127.0.0.1:8123"), urlsplit("http://cache.example:8123")
    left = tmp_path / "hotspan"
    left.mkdir(mode=0o700)
    (left / "8123.token").write_text("left-by-a-server")
    (left / "8123.token").chmod(0o600)
    surroundings = {"XDG_RUNTIME_DIR": str(tmp_path)}
    given = surroundings | {VARIABLE: OTHER}
    assert AdminToken(token=TOKEN, admin_token_file=file).of(here, given) == TOKEN
    assert AdminToken(admin_token_file=file).of(abroad, given) == FILED
    assert AdminToken().of(abroad, given) == OTHER
    assert AdminToken().of(here, surroundings) == "left-by-a-server"
    assert AdminToken().of(abroad, surroundings) is None
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="open to other users"):
        AdminToken(admin_token_file=file).of(here, given)
    with pytest.raises(ConfigError, match="no header can carry"):
        AdminToken(token="with space").of(here, {})
    assert TOKEN not in repr(Admin(token=TOKEN))


def test_the_hint_names_each_way() -> None:
    """The one text of all commands."""
    assert all(each in HOW_TO_GIVE for each in ("--token", "--admin-token-file", VARIABLE))
