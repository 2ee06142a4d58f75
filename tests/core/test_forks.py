"""A child of os.fork() has the locked files of its parent open, too: locks end with who took them all the same."""

import ast
import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

import hotspan
from hotspan.core.held import changing, hold
from hotspan.core.private import EXCLUSIVE, let_go, lock, locked, open_lock
from hotspan.daemon.segment import SharedSegment
from hotspan.keyring.store import KeyStore, StoreHeader, create_store
from hotspan.tiers.directory import check_directory, open_directory
from hotspan.tiers.slab import SharedSlab, sweep_dead_slabs

SLOT = 1 << 20


@contextlib.contextmanager
def child() -> Iterator[None]:
    """A forked process, which lives until the block is left and has all that is open now."""
    told, tell = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(tell)
        os.read(told, 1)
        os._exit(0)
    os.close(told)
    try:
        yield
    finally:
        os.close(tell)
        os.waitpid(pid, 0)


def directory(path: Path) -> AbstractContextManager[object]:
    return contextlib.closing(open_directory(path / "disk", SLOT, 4 * SLOT))


def segment(path: Path) -> AbstractContextManager[object]:
    return SharedSegment("fork", SLOT, directory=path)


def key_store(path: Path) -> AbstractContextManager[object]:
    if not (path / "keys").exists():
        create_store(path / "keys", StoreHeader("file:/nowhere", 0.0))
    return contextlib.closing(KeyStore(path / "keys", exclusive=True))


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    fd = hold(path, EXCLUSIVE)
    yield
    let_go(fd)


HOLDERS: list[Callable[[Path], AbstractContextManager[object]]] = [
    directory,
    segment,
    key_store,
    held,
    lambda path: changing(path / "root"),
    lambda path: locked(path / "lock", 0.0),
]


@pytest.mark.parametrize("holder", HOLDERS, ids=["directory", "segment", "keys", "held", "changing", "locked"])
def test_a_child_does_not_keep_a_lock(tmp_path: Path, holder: Callable[[Path], AbstractContextManager[object]]) -> None:
    """Open, fork, close, open again: the child, which lives, holds nothing against it."""
    with contextlib.ExitStack() as stack:
        with holder(tmp_path):
            stack.enter_context(child())
        with holder(tmp_path):
            pass


def test_a_check_of_a_directory_leaves_nothing_to_a_child(tmp_path: Path) -> None:
    """The check before a start ends its lock, as the tier does."""
    with directory(tmp_path):
        pass
    check_directory(tmp_path / "disk", 4 * SLOT)
    with child(), directory(tmp_path):
        pass


def test_a_slab_is_swept_while_a_child_lives(tmp_path: Path) -> None:
    """A slab that its process has closed, and not unlinked, is no living one because of a child of it."""
    slab = SharedSlab("fork", 1, SLOT, tmp_path)
    with child():
        assert sweep_dead_slabs(tmp_path) == 0
        slab.close()
        assert sweep_dead_slabs(tmp_path) == 1


def test_a_child_that_closes_takes_no_lock_from_its_parent(tmp_path: Path) -> None:
    """A child that lets go of what it inherited closes its copy only."""
    fd = open_lock(tmp_path / "lock")
    assert lock(fd)
    pid = os.fork()
    if not pid:
        let_go(fd)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    other = open_lock(tmp_path / "lock")
    assert not lock(other)
    let_go(fd)
    assert lock(other)
    let_go(other)


def test_every_lock_is_let_go() -> None:
    """Whoever locks files closes none of them with os.close, which would leave the lock to a child."""
    root = Path(hotspan.__file__).parent
    takers = {"lock", "hold", "open_lock"}
    plain = {  # descriptors that nothing locks: of a directory, an inotify watch, a key's file
        "core/private.py": ["fd", "fd"],
        "daemon/segment.py": ["directory", "self.fd", "self.fd"],
        "keyring/store.py": ["fd", "old"],
    }
    found: dict[str, list[str]] = {}
    for path in sorted(root.rglob("*.py")):
        tree = ast.parse(path.read_text())
        names = {name.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for name in node.names}
        names |= {
            node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and path.parent.name == "core"
        }
        if not names & takers:
            continue
        closed = [
            ast.unparse(node.args[0])
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "os.close"
        ]
        if closed:
            found[str(path.relative_to(root))] = sorted(closed)
    assert found == plain
