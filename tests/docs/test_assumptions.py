"""docs/design/assumptions.md: each assumption has a place, a check and a test that violates it, and these exist."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "design" / "assumptions.md"


def rows(page: str) -> list[list[str]]:
    """The cells of each row of the page's first table, without its headings."""
    table = page[page.index("| Assumption |") :].split("\n\n")[0]
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return [cells for cells in found if any(cells[1:])]


def named(cell: str) -> list[str]:
    """What a cell names in code's type: files and tests."""
    return re.findall(r"`([^`]+)`", cell)


@cache
def functions() -> set[str]:
    """The names of all tests and methods of the tree."""
    files = [path for part in ("tests", "src") for path in (ROOT / part).rglob("*.py")]
    trees = [ast.parse(path.read_text()) for path in files]
    return {
        each.name
        for tree in trees
        for each in ast.walk(tree)
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def exists(name: str) -> bool:
    """Whether a file or a test is there. Names are as the page has them: below the root, `tests/` or `src/hotspan/`."""
    if name.startswith("python -m "):
        parts = name.split()
        module = Path(*parts[2].split("."))
        if parts[2] == "proofs":
            return len(parts) == 3 or (ROOT / "proofs" / f"{parts[3]}.py").is_file()
        return (ROOT / module.with_suffix(".py")).is_file()
    if name.startswith("make "):
        return re.search(rf"^{name.split()[1]}:", (ROOT / "Makefile").read_text(), re.M) is not None
    path, _, function = name.partition("::")
    if not path.endswith(".py"):
        return path.removesuffix("*").rstrip("_") in functions() or any(
            each.startswith(path[:-1]) for each in functions()
        )
    places = [ROOT / path, ROOT / "src" / "hotspan" / path, ROOT / "tests" / path]
    found = any(place.is_file() for place in places) or bool(list((ROOT / "tests").rglob(path)))
    return found and (not function or function in functions())


def problems(page: str) -> list[str]:
    """What is wrong with a page's table."""
    found = []
    for cells in rows(page):
        if len(cells) != 4 or not all(cells):
            found.append(f"not four cells: {cells}")
            continue
        name, _, _, tests = cells
        if re.search(r"\bopen\*\*|\*\*open|^open\b|^none\b", "\n".join(cells), re.M):
            found.append(f"{name}: open, and nothing may be")
        if not any(re.search(r"\.py|^test_|^make |^python -m ", each) for each in named(tests)):
            found.append(f"{name}: no test")
        for each in named(tests):
            if re.search(r"\.py|^test_|^make |^python -m ", each) and not exists(each):
                found.append(f"{name}: there is no {each}")
        for each in named(cells[1]):
            if each.endswith(".py") and not exists(each):
                found.append(f"{name}: there is no {each}")
    return found


def test_each_assumption_has_a_place_a_check_and_a_test() -> None:
    """Every cell is filled, every test and file is there, and no row is open."""
    assert problems(PAGE.read_text()) == []
    assert len(rows(PAGE.read_text())) > 30


@pytest.mark.parametrize(
    "row",
    [
        "| Disks are green | `tiers/disk.py` | The paint |",
        "| Disks are green | `tiers/disk.py` | The paint | |",
        "| Disks are green | `tiers/disk.py` | **open** | none |",
        "| Disks are green | `tiers/disk.py` | The paint. **open**: spots | `tests/tiers/test_places.py` |",
        "| Disks are green | `tiers/disk.py` | none | `tests/tiers/test_places.py` |",
        "| Disks are green | `tiers/disk.py` | The paint | none |",
        "| Disks are green | `tiers/disk.py` | The paint | `test_that_is_not_there_at_all` |",
        "| Disks are green | `tiers/disk.py` | The paint | `tests/tiers/test_paint.py` |",
        "| Disks are green | `tiers/paint.py` | The paint | `tests/tiers/test_places.py` |",
    ],
)
def test_an_assumption_without_one_of_these_is_found(row: str) -> None:
    """A row that lacks a cell, is open, or names what is not there."""
    table = "| Assumption | Place | Check | Test |\n|---|---|---|---|\n" + row + "\n\n"
    assert problems(table)


def test_a_row_with_all_of_these_is_none() -> None:
    """So the others are found for what they lack."""
    test = "tests/tiers/test_places.py::test_one_bad_slot_costs_one_slot"
    row = f"| Disks are green | `tiers/disk.py` | The paint | `{test}` |"
    assert problems("| Assumption | Place | Check | Test |\n|---|---|---|---|\n" + row + "\n\n") == []
