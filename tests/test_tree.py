"""What must not stand anywhere in the package."""

import ast
from pathlib import Path

from tests.real_time import judging_tests

SOURCES = sorted((Path(__file__).parents[1] / "src" / "hotspan").rglob("*.py"))

FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
UNSAFE_YAML = {"unsafe_load", "full_load", "UnsafeLoader", "FullLoader"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}


def test_nothing_is_executed_that_was_loaded() -> None:
    """No pickle, torch.load, eval or exec in any module."""
    found = [
        f"{path.relative_to(SOURCES[0].parents[1])}:{node.lineno}: {what}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if (what := executing(node))
    ]
    assert not found


def executing(node: ast.AST) -> str:
    """What it is that may run what was loaded; nothing if it can't."""
    match node:
        case ast.Import(names=names):
            return ", ".join({name.name.split(".")[0] for name in names} & FORBIDDEN_MODULES)
        case ast.ImportFrom(module=module) if module:
            return ", ".join({module.split(".")[0]} & FORBIDDEN_MODULES)
        case ast.Call(func=ast.Name(id=name)) if name in FORBIDDEN_CALLS:
            return name
        case ast.Attribute(attr=name) if name in UNSAFE_YAML:
            return "YAML that makes objects of any kind"
        case ast.Attribute(attr="load", value=ast.Name(id="torch" | "np" | "numpy")):
            return "loads what may run code"
    return ""


def test_only_one_place_reads_the_environment() -> None:
    """os.environ stands in config/, and where the launcher sets what the engine reads nowhere else."""
    allowed = {"config/environment.py", "server/run.py", "demo/server.py"}
    found = set()
    for path in SOURCES:
        if "os.environ" in path.read_text() or "os.getenv" in path.read_text():
            found.add(str(path.relative_to(SOURCES[0].parents[0])) if path != SOURCES[0] else path.name)
    assert {name.split("hotspan/")[-1] for name in found} <= allowed


JUDGES = {
    "tests/server/test_admin.py::test_after_the_end",
    "tests/server/test_admin.py::test_command_line",
    "tests/server/test_admin.py::test_invalidation_by_tag",
    "tests/server/test_admin.py::test_stats_name_the_tenants",
    "tests/server/test_replicas.py::test_two_nodes_share_redis",
    "tests/server/test_replicas.py::test_two_replicas_of_a_node_share_its_daemon",
}
"""Wait until nothing has changed for some seconds."""


def test_no_test_of_the_gate_judges_real_time() -> None:
    """What compares readings of a clock has the mark `timing`, or `slow`; `real_time.py` lists what is not seen."""
    assert judging_tests(Path(__file__).parent) <= JUDGES
