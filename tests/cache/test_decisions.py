"""Whoever waits for a lower tier has the cost model's decision: chunks, encoder outputs, windows."""

import ast
from collections.abc import Iterator
from pathlib import Path

SRC = Path(__file__).parents[2] / "src" / "hotspan"

DECIDED = {
    "engine/manager.py": ("choose", "engine/manager.py"),
    "engine/encoder/outputs.py": ("weigh", "engine/encoder/outputs.py"),
    "engine/blend/store.py": ("weigh", "engine/blend/planner.py"),
}
"""The modules that look up what may have to be promoted, and where what is loaded is decided before."""


def calls(path: Path, owner: str) -> Iterator[str]:
    """The methods that a module calls of something of that name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of = node.func.value
            name = of.attr if isinstance(of, ast.Attribute) else of.id if isinstance(of, ast.Name) else ""
            if name.lstrip("_") == owner:
                yield node.func.attr


def test_every_look_up_is_decided() -> None:
    """A module that begins to look chunks up for requests has to say where the cost model decides for it."""
    found = {
        str(path.relative_to(SRC))
        for path in SRC.rglob("*.py")
        if path.parent.name != "cache" and "lookup" in calls(path, "cache")
    }
    assert found == set(DECIDED)
    for method, module in DECIDED.values():
        owners = ("cache", "decisions")
        assert any(method in calls(SRC / module, owner) for owner in owners), f"{module} decides nothing by {method}"
