"""The base install: what it needs, and what a command without its extra answers."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from hotspan.core.errors import ConfigError
from hotspan.core.extras import EXTRAS, naming_extra

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WITHOUT = (
    "import sys\n"
    "class Absent:\n"
    "    def find_spec(self, name, path=None, target=None):\n"
    f"        if name in {sorted(EXTRAS)!r}: raise ModuleNotFoundError(name, name=name)\n"
    "sys.meta_path.insert(0, Absent())\n"
)


def without_extras(code: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process in which no package of an extra can be imported."""
    return subprocess.run([sys.executable, "-c", WITHOUT + code], capture_output=True, text=True, timeout=120)


def test_router_and_daemon_need_no_extra() -> None:
    """The whole router and daemon, and every command's module, import without any package of an extra."""
    names = [
        ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
        for part in ("router", "daemon", "l2", "tiers", "cache", "keyring", "core", "config", "cli")
        for path in sorted((ROOT / "src" / "hotspan" / part).rglob("*.py"))
        if part != "router" or "ray" not in path.parts
    ]
    done = without_extras(f"import importlib\nfor name in {names!r}: importlib.import_module(name)")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", ["serve", "config check"])
def test_a_command_without_the_engine_names_the_extra(command: str, tmp_path: Path) -> None:
    """Without vLLM, a command that needs it ends with one line that names the extra, and status 2."""
    (tmp_path / "config.json").write_text("{}")
    words = ["hotspan", *command.split(), str(tmp_path)]
    done = without_extras(f"sys.argv = {words!r}\nfrom hotspan.cli.main import main\nmain()")
    assert done.returncode == 2
    assert "hotspan[cpu]" in done.stderr
    assert "Traceback" not in done.stderr


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
    named = " ".join(extras["server"] + extras["bench"])
    assert {"fastapi", "jsonschema", "safetensors", "plotly"} <= {name for name in EXTRAS if name in named}
    assert all("hotspan[bench,server]" in extras[engine] for engine in ("cpu", "gpu"))


def test_commands_are_completed() -> None:
    """The shell completes a command's name: `hotspan da<TAB>` gives daemon."""
    words = {"_HOTSPAN_COMPLETE": "complete_bash", "COMP_WORDS": "hotspan da", "COMP_CWORD": "1"}
    run = "sys.argv = ['hotspan']\nfrom hotspan.cli.main import main\nmain()"
    done = without_extras(f"import os, sys\nos.environ.update({words!r})\n{run}")
    assert done.stdout.split() == ["daemon"], done.stderr
