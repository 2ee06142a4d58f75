"""Somebody who writes the shared directory puts links into it: nothing outside is read, made, changed or deleted."""

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hotspan.core.terms import Scope, Terms
from hotspan.l2.base import updates_of
from hotspan.l2.file import FileStore
from hotspan.l2.options import FileOptions
from hotspan.l2.tree import Tree
from hotspan.testing.chunks import chain
from hotspan.testing.clock import SimulatedClock
from kit.waiting import PATIENCE_S
from tests.l2.kit.stores import found, put

(A,), (B,) = chain("a", 1), chain("b", 1)
SIZE = 8192
DAYS_S = 30 * 86400.0


@pytest.fixture
def clock() -> SimulatedClock:
    return SimulatedClock(unix_s=time.time())


@pytest.fixture
def store(tmp_path: Path, clock: SimulatedClock) -> Iterator[FileStore]:
    """A store with an object, a log and a replica's report; `tmp/left` was left by somebody."""
    store = FileStore(tmp_path / "l2", FileOptions(timeout_s=PATIENCE_S, capacity_gib=1.0), clock=clock)
    put(store, A, SIZE)
    store.log.append([Scope(tenant=1)], "me")
    store.log.report("me", 1, 5.0)
    (tmp_path / "l2" / "tmp" / "left").mkdir()
    yield store
    store.close()


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A directory of somebody's with files of the names that the store gives."""
    victim = tmp_path / "victim"
    (victim / "inner" / "deeper").mkdir(parents=True)
    for place in (victim, victim / "inner", victim / "inner" / "deeper"):
        for name in ("object", "data", f"{1:020d}", "r-me"):
            (place / name).write_bytes(b"precious")
    return victim


def contents(directory: Path) -> dict[str, tuple[int, bytes]]:
    """Every file below, with its modification time."""
    return {
        str(path.relative_to(directory)): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in sorted(directory.rglob("*"))
    }


LEVELS: dict[str, Callable[[Path, Path], Path]] = {
    "objects": lambda root, place: root / "objects",
    "epoch": lambda root, place: place.parent,
    "key": lambda root, place: place,
    "object": lambda root, place: place / "object",
    "foreign epoch": lambda root, place: root / "objects" / ("0" * 32),
    "foreign key": lambda root, place: place.parent / ("0" * 64),
    "tmp": lambda root, place: root / "tmp",
    "in tmp": lambda root, place: root / "tmp" / "planted",
    "below tmp": lambda root, place: root / "tmp" / "left" / "planted",
    "epochs": lambda root, place: root / "epochs",
    "the epoch's file": lambda root, place: next((root / "epochs").iterdir()),
    "log": lambda root, place: root / "log",
    "the log's epoch": lambda root, place: next((root / "log").iterdir()),
    "foreign log": lambda root, place: root / "log" / ("0" * 32),
    "entry": lambda root, place: next(root.glob("log/*/*")),
    "replicas": lambda root, place: root / "replicas",
    "report": lambda root, place: next((root / "replicas").iterdir()),
}


@pytest.mark.parametrize("kind", ["directory", "file"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_planted_link_leads_nowhere(
    tmp_path: Path, store: FileStore, clock: SimulatedClock, victim: Path, level: str, kind: str
) -> None:
    """Whatever the store does, in whatever place the link is, the files that it leads to stay as they are."""
    (place,) = (tmp_path / "l2").glob("objects/*/*")
    planted = LEVELS[level](tmp_path / "l2", place)
    if planted.is_dir():
        shutil.rmtree(planted)
    planted.unlink(missing_ok=True)
    planted.symlink_to(victim if kind == "directory" else victim / "data")
    before = contents(victim)
    update = updates_of(Terms(labels=frozenset([5])), 9)[0]
    for _ in range(3):
        for call in (
            lambda: found(store, A),
            lambda: store.add_updates({A.key: [update], B.key: [update]}),
            lambda: put(store, A, SIZE),
            lambda: put(store, B, SIZE),
            lambda: store.log.append([Scope(tenant=1)], "me"),
            lambda: store.log.read(0),
            lambda: store.log.report("me", 1, 5.0),
            lambda: store.log.replicas(),
            lambda: store.blobs.sweep(is_full=True),
            lambda: store.delete([A.key]),
            lambda: store.usage(),
            lambda: store.log.forget("me"),
        ):
            with contextlib.suppress(OSError):
                call()
        clock.advance(DAYS_S)
    assert contents(victim) == before


@pytest.mark.parametrize("level", ["epoch", "key", "object"])
def test_a_link_among_the_objects_does_not_stay(tmp_path: Path, store: FileStore, victim: Path, level: str) -> None:
    """A link in the place of an object is a miss, a sweep or a store removes it, and the object can be stored again."""
    (place,) = (tmp_path / "l2").glob("objects/*/*")
    planted = LEVELS[level](tmp_path / "l2", place)
    shutil.rmtree(planted) if planted.is_dir() else planted.unlink()
    planted.symlink_to(victim)
    assert found(store, A) is None
    store.blobs.sweep(is_full=True)
    assert put(store, A, SIZE) and found(store, A) is not None and not planted.is_symlink()


def test_a_link_that_comes_while_a_tree_is_deleted(tmp_path: Path, victim: Path) -> None:
    """A directory that is replaced by a link in the middle of its deletion: only what was in it goes."""
    files = Tree(tmp_path / "root")
    doomed = tmp_path / "root" / "doomed"
    (doomed / "inner").mkdir(parents=True)
    for name in ("a", "b", "c"):
        (doomed / "inner" / name).touch()
    before, steps = contents(victim), 0

    def step() -> None:
        nonlocal steps
        steps += 1
        if steps == 4:
            (doomed / "inner").rename(tmp_path / "aside")
            (doomed / "inner").symlink_to(victim)

    files.delete(Path("doomed"), step)
    assert contents(victim) == before and not list((tmp_path / "aside").iterdir())
    files.delete(Path("doomed"), lambda: None)
    assert not doomed.exists() and contents(victim) == before


@pytest.mark.parametrize("path", ["/etc", "../x", "a/../../x"])
def test_paths_stay_below_the_root(tmp_path: Path, path: str) -> None:
    """A path that leads out is a bug of the caller."""
    with pytest.raises(ValueError, match="no path from the root"):
        Tree(tmp_path).listed(Path(path) / "x", 1)
