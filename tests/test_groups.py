"""Which modules a run does not import."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.groups import Scheduling, check_marks, is_left_out

MODULES = {
    "none": "def test(): ...\n",
    "some": "@pytest.mark.engine\ndef test(): ...\n",
    "all": "pytestmark = pytest.mark.engine\n",
    "all, and more": "pytestmark = [pytest.mark.engine, pytest.mark.slow]\n",
    "another mark": "pytestmark = pytest.mark.engines\n",
}
WITH, WITHOUT = {"none", "another mark"}, {"all", "all, and more"}
"""What is left out of a run of the tests with an engine, and of those without."""


@pytest.mark.parametrize(
    ("asked", "left_out"),
    [
        ("", set()),
        ("slow", set()),
        ("engine", WITH),
        ("not slow and engine", WITH),
        ("not slow and not engine", WITHOUT),
        ("not engine", WITHOUT),
        ("slow or engine", set()),
        ("not (slow or engine)", set()),
        ("not (engine and slow)", set()),
        ("engine and not engine", set()),
    ],
)
def test_a_module_is_left_out_if_none_of_its_tests_can_be_selected(
    tmp_path: Path, asked: str, left_out: set[str]
) -> None:
    """By what its text says of marks; none is where the expression is not one of the usual ones."""
    config: Any = SimpleNamespace(option=SimpleNamespace(markexpr=asked))
    found = set()
    for name, text in MODULES.items():
        path = tmp_path / f"test_{len(name)}.py"
        path.write_text(text)
        if is_left_out(path, config):
            found.add(name)
    assert found == left_out


def test_a_mark_that_is_written_elsewhere_is_an_error(tmp_path: Path) -> None:
    """A test whose mark comes from what its module imports would be in no run with engines."""
    path = tmp_path / "test_it.py"
    path.write_text("from .others import *\n")
    item: Any = SimpleNamespace(path=path, get_closest_marker=lambda name: name == "engine")
    with pytest.raises(pytest.UsageError, match=r"test_it\.py has tests with an engine"):
        check_marks([item])
    path.write_text(MODULES["some"])
    check_marks([item])


class Worker:
    """One of xdist's: the numbers of the tests that it was given."""

    shutting_down = False

    def __init__(self) -> None:
        self.given: list[int] = []
        self.gateway = SimpleNamespace(id="gw", spec="popen")

    def send_runtest_some(self, numbers: list[int]) -> None:
        self.given += numbers

    def shutdown(self) -> None:
        self.shutting_down = True


def test_the_test_that_ended_its_worker_is_not_run_again() -> None:
    """It has failed; the rest of its group goes to another worker."""
    config: Any = SimpleNamespace(getvalue=lambda name: ["popen"] * 2, option=SimpleNamespace(loadscopereorder=False))
    scheduling = Scheduling(config, None)
    tests = [f"test_{module}.py::test_{number}" for module in "abc" for number in range(3)]
    workers: list[Any] = [Worker(), Worker()]
    for worker in workers:
        scheduling.add_node(worker)
        scheduling.add_node_collection(worker, tests)
    scheduling.schedule()
    assert [worker.given for worker in workers] == [[0, 1, 2], [3, 4, 5]]
    scheduling.mark_test_complete(workers[0], 0)
    assert scheduling.remove_node(workers[0]) == tests[1]
    assert [worker.given for worker in workers] == [[0, 1, 2], [3, 4, 5]]
    given = workers[1].given
    while (done := len(given)) < 7:
        for number in given[:]:
            scheduling.mark_test_complete(workers[1], number)
        assert len(given) > done, "what is left is given"
    assert given == [3, 4, 5, 6, 7, 8, 2]
