"""The base install: what it needs, and what a command without its extra answers."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from hotspan.core.errors import ConfigError
from hotspan.core.extras import EXTRAS, naming_extra

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PARTS = ("router", "daemon", "tiers", "keyring", "core", "config", "cli")
"""What a router or a daemon imports, and every command's module."""

MODULES = [
    ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
    for part in PARTS
    for path in sorted((ROOT / "src" / "hotspan" / part).rglob("*.py"))
    if (part != "router" or "ray" not in path.parts)
    and path.name not in ("compression.py", "packer.py")  # of an engine's tiers
]
CODE = """
import importlib, json, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in absent:
            raise ModuleNotFoundError(name, name=name)

absent, modules, model = json.load(sys.stdin)
sys.meta_path.insert(0, Absent())
for name in modules:
    importlib.import_module(name)

from typer.testing import CliRunner
from hotspan.cli.main import app

def run(words, **variables):
    done = CliRunner().invoke(app, words, env=variables, prog_name="hotspan")
    return done.exit_code, done.output, type(done.exception).__name__

json.dump({
    "serve": run(["serve", model]),
    "config check": run(["config", "check", model]),
    "doctor": run(["doctor", model]),
    "route --model": run(["route", "--replica", "http://127.0.0.1:1", "--port", "0", "--model", model]),
    "completion": run([], _HOTSPAN_COMPLETE="complete_bash", COMP_WORDS="hotspan da", COMP_CWORD="1"),
}, sys.stdout)
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, str]]:
    """Status, output and exception of commands, in one process in which no package of an extra can be imported."""
    model = tmp_path_factory.mktemp("model")
    (model / "config.json").write_text("{}")
    told = json.dumps([sorted(EXTRAS), MODULES, str(model)])
    done = subprocess.run([sys.executable, "-c", CODE], input=told, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return {name: tuple(outcome) for name, outcome in json.loads(done.stdout).items()}


def test_router_and_daemon_need_no_extra(outcomes: dict[str, tuple[int, str, str]]) -> None:
    """The whole router and daemon, and every command's module, import without any package of an extra."""
    assert outcomes


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        ("serve", "hotspan[cpu]"),
        ("config check", "hotspan[cpu]"),
        ("doctor", "hotspan[cpu]"),
        ("route --model", "hotspan[tokens]"),
    ],
)
def test_a_command_without_its_extra_names_it(
    command: str, extra: str, outcomes: dict[str, tuple[int, str, str]]
) -> None:
    """Without vLLM or tokenizers, a command that needs it ends with one line that names the extra, and status 2."""
    status, output, exception = outcomes[command]
    assert (status, exception) == (2, "SystemExit")
    assert extra in output
    assert "Traceback" not in output


def test_a_package_that_lacks_its_own_module_is_a_defect() -> None:
    """Only a missing package is explained; what an installed one can't import keeps its traceback."""
    with pytest.raises(ConfigError, match="bench"), naming_extra():
        raise ModuleNotFoundError("plotly", name="plotly")
    with pytest.raises(ModuleNotFoundError), naming_extra():
        raise ModuleNotFoundError("vllm.gone", name="vllm.gone")


def test_extras_bring_what_their_message_promises() -> None:
    """Every package that a message names is of no base install, and of the extra that the message names."""
    base = " ".join(PROJECT["dependencies"])
    extras = PROJECT["optional-dependencies"]
    assert not [name for name in EXTRAS if name in base]
    engine = {name for name, how in EXTRAS.items() if "hotspan[cpu]" in how} - {"vllm", "torch", "transformers"}
    brought = {name for name in EXTRAS if name in " ".join(extras["server"])}
    assert engine - {"starlette"} <= brought  # FastAPI brings it
    assert "hotspan[tokens]" in extras["server"]
    for extra, package in (("bench", "plotly"), ("tokens", "tokenizers")):
        assert package in " ".join(extras[extra]) and f"hotspan[{extra}]" in EXTRAS[package]
    assert all("hotspan[bench,server]" in extras[engine] for engine in ("cpu", "gpu"))


def test_commands_are_completed(outcomes: dict[str, tuple[int, str, str]]) -> None:
    """The shell completes a command's name: `hotspan da<TAB>` gives daemon."""
    _status, output, _exception = outcomes["completion"]
    assert output.split() == ["daemon"]
