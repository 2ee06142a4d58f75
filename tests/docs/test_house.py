"""The map of the house, docs/design/house.md, agrees with the tree, and its measures only become better."""

import pytest

from docsite.house import (
    GROWTH,
    PAGE,
    ROOT,
    arrows,
    budgets,
    forms,
    long_files,
    long_functions,
    outgrown,
    rooms,
    with_lines,
)

FORMS, ARROWS = 116, 26
"""Lower them with each form or import that goes."""

LONG_FILES = {
    "src/hotspan/cache/cost.py",
    "src/hotspan/cache/tiered.py",
    "src/hotspan/config/settings.py",
    "src/hotspan/daemon/pool.py",
    "src/hotspan/engine/blend/admission.py",
    "src/hotspan/engine/connector.py",
}
LONG_FUNCTIONS = {"src/hotspan/tiers/directory.py:open_directory"}


@pytest.fixture(scope="module")
def page() -> str:
    return (ROOT / PAGE).read_text()


def test_no_package_outgrew_the_map(page: str) -> None:
    """Each package has at most 5 % more lines than the map says; who lets it grow writes the new figure there."""
    assert not outgrown(rooms(ROOT), budgets(page)), "python -m docsite.house --write"


def test_the_map_has_the_packages_that_there_are(page: str) -> None:
    """Each package of hotspan and each part beside it is on the map, and nothing else."""
    assert budgets(page).keys() == rooms(ROOT).keys()


def test_growth_is_found(page: str) -> None:
    """A package that is larger by more than 5 %, or new, is named; one at the bound is not; the map takes new lines."""
    lines = {"core": int(1000 * GROWTH), "http": int(1000 * GROWTH) + 1, "fresh": 1}
    assert outgrown(lines, {"core": 1000, "http": 1000}) == {"http": (1051, 1000), "fresh": (1, 0)}
    assert budgets(with_lines(page, {"core": 123_456})) == budgets(page) | {"core": 123_456}


def test_forms_and_arrows_become_fewer() -> None:
    """No idea gets another form, and no part imports another that it did not; each idea's pattern still finds one."""
    found = forms(ROOT)
    assert sum(map(len, found.values())) <= FORMS, "use the form that there is: python -m docsite.house --places"
    assert len(arrows(ROOT)) <= ARROWS, "import from kit/: python -m docsite.house --places"
    assert all(found.values())


def test_rooms_are_small() -> None:
    """No other file of src has over 400 lines, and no other function over 60."""
    assert long_files(ROOT).keys() <= LONG_FILES
    assert long_functions(ROOT).keys() <= LONG_FUNCTIONS
