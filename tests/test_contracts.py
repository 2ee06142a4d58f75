"""The contracts of pyproject.toml see every module, and their exceptions only become fewer."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYPROJECT = (ROOT / "pyproject.toml").read_text()
CONTRACTS = tomllib.loads(PYPROJECT)["tool"]["importlinter"]

EXCEPTIONS = 29
"""Imports between proofs, benchmarks, tests and docsite that are left. Lower it with each that goes."""


def test_contracts_see_every_module() -> None:
    """Each directory with modules is a package below a root of the contracts; import-linter reads no other."""
    tops = [ROOT / "src", *(ROOT / name for name in CONTRACTS["root_packages"] if (ROOT / name).is_dir())]
    assert {"kit", "proofs", "benchmarks", "tests", "docsite"} <= {top.name for top in tops}
    directories = {path.parent for top in tops for path in top.rglob("*.py")} - {ROOT / "src"}
    assert not [str(each.relative_to(ROOT)) for each in directories if not (each / "__init__.py").is_file()]
    assert set(CONTRACTS["root_packages"]) >= {each.name for each in (ROOT / "src").iterdir() if each.is_dir()} - {
        "hotspan.egg-info"
    }


def test_exceptions_become_fewer_and_have_reasons() -> None:
    """No contract but one ignores imports; each line of it has a reason, and there are as many as are written here."""
    ignoring = [each for each in CONTRACTS["contracts"] if "ignore_imports" in each or "unmatched_ignore" in str(each)]
    assert [each["type"] for each in ignoring] == ["independence"]
    (block,) = re.findall(r"^ignore_imports = \[\n(.*?)^\]", PYPROJECT, re.DOTALL | re.MULTILINE)
    lines = block.splitlines()
    assert not [line for line in lines if not re.fullmatch(r'  "[\w.*]+ -> [\w.*]+",  # \w.{9,}', line)]
    assert len(lines) == len(ignoring[0]["ignore_imports"]) == EXCEPTIONS
    assert sum("*" in line for line in lines) == 3, "only the folders of tests for proofs, benchmarks and the site"
