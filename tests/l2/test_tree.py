"""How paths below a directory are opened: in few calls, and as errors that say what is wrong."""

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hotspan.core.types import ChunkKey
from hotspan.l2.file import FileStore
from hotspan.l2.options import FileOptions
from hotspan.l2.tree import Tree
from hotspan.testing.chunks import chain
from kit.waiting import PATIENCE_S
from tests.l2.kit.stores import put

CHUNKS = chain("a", 4)
SIZE = 4096


@pytest.fixture
def files(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_a_look_up_opens_two_files_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The object's directory and the object: not a directory for each level."""
    store, keys = FileStore(tmp_path, FileOptions(timeout_s=PATIENCE_S)), [chunk.key for chunk in CHUNKS]
    for chunk in CHUNKS:
        put(store, chunk, SIZE)
    assert store.blobs.sweeper is not None
    store.blobs.sweeper.join()
    opened, os_open = list[Any](), os.open

    def counted(path: Any, *arguments: Any, **keywords: Any) -> int:
        opened.append(path)
        return os_open(path, *arguments, **keywords)

    def opens(some: Sequence[ChunkKey]) -> int:
        opened.clear()
        assert all(store.find(some))
        return len(opened)

    monkeypatch.setattr(os, "open", counted)
    assert opens(keys) - opens(keys[:1]) == 2 * (len(keys) - 1), opened
    monkeypatch.undo()
    store.close()


def test_directories_are_made_on_the_way(tmp_path: Path, files: Tree) -> None:
    """All levels, if asked to; else what is not there is FileNotFoundError."""
    with pytest.raises(FileNotFoundError), files.entered(Path("a/b/c")):
        pass
    with files.entered(Path("a/b/c"), make=True) as made, files.entered(Path("a/b/c")) as found:
        assert os.path.samestat(os.fstat(made), os.fstat(found))
    assert (tmp_path / "a/b/c").is_dir()


@pytest.mark.parametrize("path", ["link", "link/c", "a/link", "a/link/c", "file", "file/c"])
def test_what_is_no_directory_is_named(tmp_path: Path, files: Tree, path: str) -> None:
    """A link, also one to a directory below the root, and a file: on every level."""
    (tmp_path / "a/b/c").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "a/b")
    (tmp_path / "a/link").symlink_to("b")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError) as raised, files.entered(Path(path)):
        pass
    assert raised.value.errno == errno.ENOTDIR and raised.value.filename == str(tmp_path / path)


def test_no_descriptor_stays_open(tmp_path: Path, files: Tree) -> None:
    """Whether a path can be opened or not."""
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/link").symlink_to("b")
    before = os.listdir("/proc/self/fd")
    for path in ("a/b", "a/b/c", "a/link/c", "a", "."):
        try:
            with files.entered(Path(path)):
                pass
        except OSError:
            continue
    assert os.listdir("/proc/self/fd") == before
