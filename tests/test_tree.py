"""What must not stand anywhere in the package."""

import ast
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from proofs.__main__ import NAMES
from tests.real_time import judging_tests

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src" / "hotspan").rglob("*.py"))

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


def test_the_package_imports_no_proofs_benchmarks_or_tests() -> None:
    """What is installed runs alone: nothing in src/ imports proofs/, benchmarks/ or tests/, also inside a function."""
    apart = {"proofs", "benchmarks", "tests"}
    found = [
        f"{path}:{node.lineno}"
        for path in (ROOT / "src").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Import) and {name.name.split(".")[0] for name in node.names} & apart)
        or (isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in apart)
    ]
    assert not found


def test_the_wheel_holds_the_package_alone(tmp_path: Path) -> None:
    """A wheel built from this tree has hotspan and djl_python; no proofs, benchmarks or tests."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("src", "proofs", "benchmarks", "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "results"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), "."]
    subprocess.run(build, cwd=copy, check=True, timeout=300)
    (wheel,) = tmp_path.glob("hotspan-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.split("/")[0] for name in archive.namelist()}
        assert "hotspan/testing/conformance.py" in archive.namelist()
    assert {top for top in tops if not top.endswith(".dist-info")} == {"hotspan", "djl_python"}


def test_only_one_place_reads_the_environment() -> None:
    """os.environ stands in config/, and where the launcher sets what the engine reads nowhere else."""
    allowed = {"config/environment.py", "server/run.py", "demo/server.py"}
    found = set()
    for path in SOURCES:
        if "os.environ" in path.read_text() or "os.getenv" in path.read_text():
            found.add(str(path.relative_to(SOURCES[0].parents[0])) if path != SOURCES[0] else path.name)
    assert {name.split("hotspan/")[-1] for name in found} <= allowed


def test_no_test_of_the_gate_judges_real_time() -> None:
    """What compares readings of a clock has the mark `slow`; `real_time.py` lists what is not seen."""
    assert judging_tests(Path(__file__).parent) == set()


def test_what_make_runs_exists() -> None:
    """Each module and proof that the Makefile names is in the tree."""
    makefile = (ROOT / "Makefile").read_text()
    modules = set(re.findall(r"-m ((?:proofs|benchmarks|tests)[\w.]*)", makefile))
    assert len(modules) > 10
    paths = [ROOT / module.replace(".", "/") for module in modules]
    assert not [
        path for path in paths if not path.with_suffix(".py").is_file() and not (path / "__main__.py").is_file()
    ]
    assert set(re.findall(r"-m proofs (\w+)", makefile)) == set(NAMES)
