"""--json, --output and --model are the same in every command, and so are the spellings that they had before."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from hotspan.cli.main import app
from hotspan.config.options import json_option
from hotspan.demo.model import make_demo_model

JSON_HELP = json_option().metadata["option"]["help"]
FORMER = {"--output-dir", "--output-file", "--out", "--html", "--json-file", "--save"}


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command and group, by its words."""
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*path, name))


ROOT = typer.main.get_command(app)
COMMANDS = dict(commands(ROOT))


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_each_option_has_its_one_meaning(path: tuple[str, ...]) -> None:
    """--json: a flag for JSON on stdout. --output: a path. --model: a model's name or directory."""
    shown = [each for each in COMMANDS[path].params if not getattr(each, "hidden", False)]
    declared = {flag: each for each in shown for flag in each.opts}
    assert not FORMER & declared.keys()
    if (found := declared.get("--json")) is not None:
        assert found.is_flag and found.help == JSON_HELP
    if (found := declared.get("--output")) is not None:
        assert not found.is_flag and found.metavar == "path"
    if (found := declared.get("--model")) is not None:
        assert not found.is_flag and found.help.startswith(("Model name", "Directory with the model's"))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("simulate", "--json", "/dev/stdout"), {"output": "/dev/stdout", "json": False}),
        (("simulate", "--json"), {"output": None, "json": True}),
        (("ab", "--json", "ab.json", "--same", "http://a"), {"output": "ab.json", "json": False}),
        (("ab", "--same", "http://a", "--json=ab.json"), {"output": "ab.json", "json": False}),
        (
            ("plan", "m", "--json", "p.json", "--html", "p.html"),
            {"output": "p.json", "json": False, "report": "p.html"},
        ),
        (("plan", "--json", "m", "--html=p.html"), {"model": "m", "json": True, "output": None, "report": "p.html"}),
        (("plan", "--max-model-len", "4096", "--json", "m"), {"json": True, "output": None}),
        (("bench", "engine", "--output-dir", "runs", "--json"), {"output": "runs", "json": True}),
        (("bench", "compare", "a.json", "b.json", "--json", "c.json"), {"output": "c.json", "json": False}),
        (("bench", "compare", "--json", "a.json", "b.json"), {"a": "a.json", "b": "b.json", "json": True}),
        (("bench", "compare", "--report", "r.html", "--json", "a.json", "b.json"), {"json": True, "output": None}),
        (("cache", "invalidate", "--model", "--json"), {"this_model": True, "json": True}),
    ],
)
def test_former_spellings_are_accepted(words: tuple[str, ...], expected: dict[str, Any]) -> None:
    """`--json FILE` is --output FILE where no argument takes the file; renamed options act."""
    path = words[:2] if words[:2] in COMMANDS else words[:1]
    context = COMMANDS[path].make_context(path[-1], list(words[len(path) :]))
    assert {name: context.params[name] for name in expected} == expected


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
