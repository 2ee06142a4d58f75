"""What must not stand anywhere in the package."""

import ast
from pathlib import Path

import pytest

from tests.real_time import judging_tests

SOURCES = sorted((Path(__file__).parents[1] / "src" / "hotspan").rglob("*.py"))

FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
UNSAFE_YAML = {"unsafe_load", "full_load", "UnsafeLoader", "FullLoader"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(SOURCES[0].parents[1])))
def test_nothing_is_executed_that_was_loaded(path: Path) -> None:
    """No pickle, torch.load, eval or exec in any module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not {name.name.split(".")[0] for name in node.names} & FORBIDDEN_MODULES
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in FORBIDDEN_MODULES
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in FORBIDDEN_CALLS
        elif isinstance(node, ast.Attribute) and node.attr in UNSAFE_YAML:
            raise AssertionError("YAML that makes objects of any kind")
        elif isinstance(node, ast.Attribute) and node.attr == "load" and isinstance(node.value, ast.Name):
            assert node.value.id not in ("torch", "np", "numpy"), "loads what may run code"


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
