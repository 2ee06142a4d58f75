"""Which mutants a module has, what they are called, and which of them are tried."""

import pytest

from tests.mutants import __main__ as run
from tests.mutants.mutate import Mutant, mutants

SOURCE = """
def total(a: int, b: int = 1) -> int:
    if a < 1 and b < 1:
        return 1
    return a + b
"""


def test_each_mutant_has_its_own_name_and_changes_one_thing() -> None:
    """Two of the same texts in one function are told apart: an outcome that is kept belongs to one of them."""
    found = mutants("m.py", SOURCE)
    assert len({each.name for each in found}) == len(found)
    assert [each.name for each in found if each.before == "1"] == [
        f"m.py total: 1 -> 2{which}" for which in ("", " (2)", " (3)", " (4)")
    ]
    assert len({each.applied(SOURCE) for each in found}) == len(found)
    assert SOURCE not in {each.applied(SOURCE) for each in found}


def test_lines_that_are_added_rename_nothing() -> None:
    """An outcome, or the reason of an equivalent one, stays with its mutant."""
    longer = SOURCE.replace("    if a", "    # why\n\n    if a")
    assert [each.name for each in mutants("m.py", SOURCE)] == [each.name for each in mutants("m.py", longer)]


def test_a_change_of_one_module_leaves_the_choice_among_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is drawn is the same each time, and differs only by the mutants that another source has."""
    before = {each.name for each in run.drawn(20, 1)}
    assert before == {each.name for each in run.drawn(20, 1)}
    assert len(before) == 20 * len(run.PACKAGES)

    def other(path: str, source: str) -> list[Mutant]:
        return mutants(path, f"SPARE = 7\n{source}" if path.endswith("plan/worth.py") else source)

    monkeypatch.setattr(run, "mutants", other)
    assert len(before - {each.name for each in run.drawn(20, 1)}) <= 1
