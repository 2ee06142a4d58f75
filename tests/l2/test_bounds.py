"""The bounds of what a store states: every back end has them, and nothing in the L2 is read without one."""

import ast
from pathlib import Path

import pytest

import hotspan.l2
from hotspan.core.clock import SystemClock
from hotspan.core.terms import Terms
from hotspan.core.types import MIB
from hotspan.l2 import bounds, open
from hotspan.l2.base import Found, StoreUsage, updated, updates_of
from hotspan.l2.position import read_position
from hotspan.l2.view import LogView, readable
from hotspan.testing.chunks import chain
from hotspan.tiers.directory import POSITION_FILE
from tests.l2.kit.bounds import StoreBoundsTests
from tests.l2.kit.stores import NAMESPACE, TERMS, record_of
from tests.l2.test_daemon import TestDaemonBounds
from tests.l2.test_file import TestFileStoreBounds
from tests.l2.test_redis import TestRedisStoreBounds
from tests.l2.test_s3 import TestS3StoreBounds

BACK_ENDS: dict[str, type[StoreBoundsTests]] = {
    "sagemaker-hyperpod": TestDaemonBounds,  # over HTTP it keeps no log; tests/l2/hyperpod has its metadata's bounds
    "redis": TestRedisStoreBounds,
    "rediss": TestRedisStoreBounds,
    "file": TestFileStoreBounds,
    "s3": TestS3StoreBounds,
}
for _tests in (TestDaemonBounds, TestFileStoreBounds, TestRedisStoreBounds, TestS3StoreBounds):
    del globals()[_tests.__name__]  # they run where they are

UNBOUNDED = {
    "read_bytes",
    "read_text",
    "readall",
    "readlines",
    "listdir",
    "iterdir",
    "glob",
    "rglob",
    "collect",
    "bytes",
}
"""Calls that take as much as there is, whatever that is."""

NOW_S = SystemClock().unix()


def test_every_back_end_has_its_bounds_tested() -> None:
    """A new scheme of `--l2` comes with the bounds' part of the kit."""
    assert BACK_ENDS.keys() == open._KINDS.keys()
    assert all(issubclass(tests, StoreBoundsTests) for tests in BACK_ENDS.values())


@pytest.mark.parametrize("path", sorted(Path(hotspan.l2.__file__).parent.glob("*.py")), ids=lambda path: path.name)
def test_nothing_is_read_without_a_bound(path: Path) -> None:
    """No module of the L2 reads all that a store, a file or a directory has: each read has a limit."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            is_whole = node.func.attr == "read" and not node.args and not node.keywords
            if is_whole or node.func.attr in UNBOUNDED:
                found.append(f"{path.name}:{node.lineno} {node.func.attr}")
    assert not found, "give each a limit of bounds.py, or a size that the caller knows"


@pytest.mark.parametrize("generation", [(1 << 64) - 1, 3 * int(NOW_S * 1000)], ids=["largest", "far ahead"])
@pytest.mark.parametrize("place", ["record", "update"])
def test_a_chunk_of_a_generation_that_can_not_be_is_no_hit(place: str, generation: int) -> None:
    """A record, or an update, that claims to be later than any log could be does not outlive invalidations."""
    (chunk,) = chain("a", 1)
    record = record_of(chunk, MIB, terms=TERMS.at(generation if place == "record" else 7))
    terms = record.terms
    if place == "update":
        terms = updated(terms, updates_of(Terms(is_wild=True), generation))
    found = {chunk.key: Found(record, terms)}
    alive, _ = readable([chunk], found, LogView(), NAMESPACE, MIB, NOW_S)
    assert not alive
    honest = {chunk.key: Found(record_of(chunk, MIB), TERMS)}
    assert readable([chunk], honest, LogView(), NAMESPACE, MIB, NOW_S).__getitem__(0) == list(honest.values())


@pytest.mark.parametrize("figure", [-1, 1 << 63, 10**400])
def test_figures_of_use_that_can_not_be(figure: int) -> None:
    """A store that says nonsense of its size is one that says nothing."""
    assert StoreUsage(*map(bounds.usage_figure, (figure, 3, figure))) == StoreUsage(0, 3, 0)


@pytest.mark.parametrize("now_s", [-1e9, 0.0, NOW_S], ids=["before", "beginning", "now"])
def test_a_clock_that_was_never_set_doubts_no_honest_log(now_s: float) -> None:
    """What a log says now is honest to a replica whose clock stands at its beginning; the end of numbers never is."""
    assert bounds.is_honest(int(NOW_S * 1000), now_s) and not bounds.is_honest(1 << 62, now_s)


@pytest.mark.parametrize("text", ['{"epoch": "", "generation": 18446744073709551616, "check": ""}', "x" * 100_000])
def test_a_position_that_can_not_be(tmp_path: Path, text: str) -> None:
    """A replica that finds a position that no log can have trusts nothing of its directory."""
    (tmp_path / POSITION_FILE).write_text(text)
    assert read_position(tmp_path) is None
