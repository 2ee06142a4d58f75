"""--json, --output and --model are the same in every command."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.text import Text
from typer.testing import CliRunner

from hotspan.cli.main import app
from hotspan.config.options import json_option
from hotspan.demo.model import make_demo_model

JSON_HELP = json_option().metadata["option"]["help"]
OTHERS = {"--output-file", "--out", "--json-file", "--save"}


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command and group, by its words."""
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*path, name))


ROOT = typer.main.get_command(app)
COMMANDS = dict(commands(ROOT))


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_each_option_has_its_one_meaning(path: tuple[str, ...]) -> None:
    """--json: a flag for JSON on stdout. --output: a path. --model: a model's name or directory, or which one."""
    shown = [each for each in COMMANDS[path].params if not getattr(each, "hidden", False)]
    declared = {flag: each for each in shown for flag in each.opts}
    assert not OTHERS & declared.keys()
    if (found := declared.get("--json")) is not None:
        assert found.is_flag and found.help == JSON_HELP
    if (found := declared.get("--output")) is not None:
        assert not found.is_flag and found.metavar == "path"
    if (found := declared.get("--model")) is not None:
        assert not found.is_flag and found.help.startswith(
            ("Model name", "Directory with the model's", "Model to serve")
        )


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_no_help_loses_its_brackets(path: tuple[str, ...]) -> None:
    """Rich, which prints help, takes [word] for markup: every text is printed as it is written."""
    texts = [COMMANDS[path].help, *(getattr(each, "help", None) for each in COMMANDS[path].params)]
    for text in filter(None, texts):
        assert Text.from_markup(text).plain == text


@pytest.mark.parametrize("command", ["plan MODEL --no-measure", "doctor MODEL", "config explain MODEL"])
def test_json_is_all_that_is_on_stdout(command: str, tmp_path: Path) -> None:
    """Of commands that start nothing; those that ask servers: tests/ab, tests/bench, tests/server."""
    model = make_demo_model(tmp_path / "model", "tiny").path
    done = CliRunner().invoke(app, [*command.replace("MODEL", str(model)).split(), "--json"])
    assert json.loads(done.stdout), done.stderr


def test_files_are_written_beside_json_on_stdout(tmp_path: Path) -> None:
    """What says where they are goes to stderr."""
    output = tmp_path / "r.json"
    few = ("--requests", "40", "--trace", "synthetic", "--strategy", "auto")
    done = CliRunner().invoke(app, ["simulate", *few, "--json", "--output", str(output)])
    assert json.loads(done.stdout)["results"] == json.loads(output.read_text())["results"]
    assert str(output) in done.stderr.replace("\n", "")
