"""The table of promises by ways to run: a test in each cell, and each test is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
WAYS = (
    "`hotspan serve`",
    "a store of models",
    "behind `hotspan route`",
    "your own `vllm serve`",
    "`LLM()`",
    "Ray Serve",
)
_TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(test_\w+))?`")


def rows() -> dict[str, dict[str, str]]:
    """The cells of the table, by promise and way."""
    page = (ROOT / "docs" / "guarantees.md").read_text()
    table = page.split("## Where each promise holds")[1].split("\n## ")[0]
    lines = [line.strip("|").split(" | ") for line in table.splitlines() if line.startswith("|") and "---" not in line]
    head, *rest = [[cell.strip() for cell in line] for line in lines]
    assert tuple(head[1:]) == WAYS
    return {promise: dict(zip(WAYS, cells, strict=True)) for promise, *cells in rest}


def test_each_cell_has_a_test_that_is_there() -> None:
    """A file, and where one is named the function in it."""
    found = rows()
    assert [promise[:2] for promise in found][:4] == ["G1", "G2", "G3", "G4"]
    for promise, cells in found.items():
        for way, cell in cells.items():
            tests = _TEST.findall(cell)
            assert tests, f"{promise}, {way}: no test"
            for file, test in tests:
                assert (ROOT / file).is_file(), file
                assert not test or f"def {test}(" in (ROOT / file).read_text(), f"{file}::{test}"


def test_each_way_has_a_test_of_its_own() -> None:
    """No cell stands on the test of another way of that promise alone."""
    for promise, cells in rows().items():
        named = [frozenset(_TEST.findall(cell)) for cell in cells.values()]
        assert len(set(named)) == len(named), promise
