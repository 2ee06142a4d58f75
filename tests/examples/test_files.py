"""The files of examples/: commands, options and metrics that exist, and files that are what they claim to be."""

import ast
import json
import re
import shlex
from pathlib import Path

import yaml

from hotspan.config.tenants import load_tenants
from hotspan.formatters.declared import load_declared

from ..docs.test_pages import COMMANDS, engine_options, unknown_metrics

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
COMPOSE = EXAMPLES / "compose"


def test_programs_ask_no_proxy() -> None:
    """What uses requests has a session that ignores http_proxy: its server is on this machine if nobody names one."""
    programs = [each for each in EXAMPLES.rglob("*.py") if re.search(r"^import requests$", each.read_text(), re.M)]
    assert len(programs) == 2
    for each in programs:
        text = each.read_text()
        assert ".trust_env = False" in text and not re.search(r"\brequests\.(get|post|request)\(", text), each


def test_commands_of_compose_exist() -> None:
    """Each service of hotspan's image has a command with options that exist."""
    services = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]
    own = [each for each in services.values() if each["image"] == "hotspan:cpu" and "command" in each]
    assert len(own) == 3
    for service in own:
        words = shlex.split(service["command"])
        known = {flag for each in COMMANDS[f"hotspan {words[0]}"].params for flag in (*each.opts, *each.secondary_opts)}
        known |= engine_options() if words[0] == "serve" else set()
        assert not [word for word in words if word.startswith("--") and word not in known]


def test_files_of_compose_are_there() -> None:
    """Each file that a service mounts is in the directory, and is YAML or JSON."""
    services = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]
    mounted = [
        COMPOSE / volume.split(":")[0]
        for service in services.values()
        for volume in service.get("volumes", ())
        if volume.startswith("./")
    ]
    assert len(mounted) == 5
    for path in mounted:
        assert yaml.safe_load(path.read_text())


def test_dashboard_and_alerts_name_metrics_that_exist() -> None:
    """Every expression names metrics that the code has, and the alerts are those of the page on monitoring."""
    board = json.loads((COMPOSE / "grafana" / "hotspan.json").read_text())
    panels = [inner for panel in board["panels"] for inner in panel.get("panels", [panel])]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    alerts = (COMPOSE / "alerts.yml").read_text()
    assert len(expressions) > 100
    assert not unknown_metrics("\n".join([*expressions, alerts]))
    page = (ROOT / "docs" / "guides" / "monitoring.md").read_text()
    assert yaml.safe_load(alerts) in [
        yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    ]
    assert all(expression in page for expression in expressions[:10])


def test_the_file_of_tenants_is_valid(tmp_path: Path) -> None:
    """The server takes it, once it is private."""
    file = tmp_path / "tenants.yaml"
    file.write_text((EXAMPLES / "multi_tenant" / "tenants.yaml").read_text())
    file.chmod(0o600)
    assert load_tenants(file).has_keys


def test_the_formatter_is_valid() -> None:
    """It has both phases."""
    assert len(load_declared(EXAMPLES / "lora" / "support" / "formatter.yaml")) == 2


def test_the_notebook_is_one() -> None:
    """Its cells are Python that parses, and its commands exist."""
    notebook = json.loads((EXAMPLES / "notebook" / "benchmark.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(cells) == 3
    text = "\n".join(cells)
    ast.parse(text)
    known = {flag for each in COMMANDS["hotspan bench engine"].params for flag in each.opts}
    assert not [flag for flag in re.findall(r'"(--[a-z-]+)"', text) if flag not in known]


def test_every_example_is_listed() -> None:
    """README.md of the examples links to a file of each directory."""
    page = (EXAMPLES / "README.md").read_text()
    links = dict(re.findall(r"\[(\w+)/\]\(([^)]+)\)", page))
    assert set(links) == {path.name for path in EXAMPLES.iterdir() if path.is_dir()}
    assert all((EXAMPLES / target).is_file() for target in links.values())
