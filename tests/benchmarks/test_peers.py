"""The comparison with other systems: what it does to their files, and what its table says."""

from pathlib import Path

import pytest

from benchmarks.peers.__main__ import ALONE, table
from benchmarks.peers.measure import PAGE, flip
from benchmarks.peers.systems import SYSTEMS, Place, Sizes
from hotspan.demo.plan import DemoSizes

SIZES = Sizes.of(DemoSizes(documents=4, document_tokens=8192, in_flight=1), 20480)


def test_one_bit_of_every_page_is_flipped(tmp_path: Path) -> None:
    """Each page of a large file differs in one bit, of a byte that holds an exponent; small files are as they were."""
    large, small = tmp_path / "data" / "large", tmp_path / "small"
    large.parent.mkdir()
    before = bytes(range(256)) * (5 * PAGE)
    large.write_bytes(before)
    small.write_bytes(b"small")
    assert flip(tmp_path) == len(before) // PAGE
    changed = [at for at, (old, new) in enumerate(zip(before, large.read_bytes(), strict=True)) if old != new]
    assert [at // PAGE for at in changed] == list(range(len(before) // PAGE))
    assert all(at % 2 == 1 for at in changed)
    assert small.read_bytes() == b"small"


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_system_keeps_its_files_in_its_store(name: str, tmp_path: Path) -> None:
    """What is damaged is what the system reads: those with files name the store, the others don't."""
    place = Place(tmp_path / "model", tmp_path, SIZES, {"beside": 1234, "beside page": 1235})
    system = SYSTEMS[name]
    beside = system.beside(place)[0] if system.beside else ()
    words = " ".join((*system.arguments(place), *system.environment(place).values(), *beside))
    assert (str(place.store) in words) == system.has_store


def test_the_table_has_a_row_for_each_system() -> None:
    """A system that does not start is said to, and a system without files has no figures of them."""
    query = {"cpu_over_bound": 1.1, "ttft_over_bound": 1.2, "ttft_none_over": 9.0}
    found = {"cached": 50, "cached_bound": 100, "wrong_answers": 1, "answers": 4}
    rows = table(
        {
            "a": {"title": "A", "query": query, "restart": found, "flipped": found, "killed": found},
            "b": {"title": "B", "query": query},
            "c": {"title": "C", "error": "not ready"},
        }
    ).splitlines()
    assert rows[2] == "| A | 1.1 | 1.2 | 9.0 | 50% | 50 (1 of 4 answers wrong) | 1 of 4 |"
    assert rows[3].startswith("| B | 1.1 | 1.2 | 9.0 |  |") and "does not start" in rows[4]
    assert len({row.count("|") for row in rows}) == 1


def test_the_engine_alone_is_what_others_are_compared_with() -> None:
    """It is started with vLLM's own server in both of its pools."""
    assert all(not SYSTEMS[name].by_hotspan for name in ALONE)
    assert [SYSTEMS[name].whole_pool for name in ALONE] == [False, True]
