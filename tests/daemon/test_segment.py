"""The daemon's shared memory: whose it is, and what is left of it."""

import fcntl
import mmap
import os
import secrets
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hotspan.core.errors import ConfigError
from hotspan.core.shared_memory import SHARED_MEMORY
from hotspan.core.types import MIB, PAGE_BYTES
from hotspan.daemon.segment import SharedSegment, file_name

SIZE = 4 * MIB

HOLDER = """
import sys, time
from hotspan.daemon.segment import SharedSegment
segment = SharedSegment(sys.argv[1], int(sys.argv[2]))
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def name() -> Iterator[str]:
    """Of a segment that nobody has."""
    name = f"hotspan-test-{secrets.token_hex(6)}"
    yield name
    for file in (name, f".{name}.hotspan"):
        (SHARED_MEMORY / file).unlink(missing_ok=True)


def test_all_pages_are_there(name: str) -> None:
    """The file has its size and all its memory from the start, its mode, and is gone when it is closed."""
    with SharedSegment(name, SIZE + 100, mode=0o640) as segment:
        found = segment.path.stat()
        assert segment.path == SHARED_MEMORY / name
        assert found.st_size == SIZE == len(segment.view) and found.st_blocks * 512 >= SIZE
        assert stat.S_IMODE(found.st_mode) == 0o640
    assert not segment.path.exists() and not segment.kept.exists()
    segment.close()


def test_a_living_daemons_name_is_refused(name: str) -> None:
    """As long as a segment's daemon lives nobody else has its name; nothing happens to it."""
    with SharedSegment(name, SIZE) as segment:
        segment.view[PAGE_BYTES : PAGE_BYTES + 4] = b"mine"
        with pytest.raises(ConfigError, match="belongs to a daemon that runs"):
            SharedSegment(name, SIZE)
        assert segment.path.read_bytes()[PAGE_BYTES : PAGE_BYTES + 4] == b"mine"


def test_a_dead_daemons_segment_is_replaced_and_not_written(name: str) -> None:
    """After a kill the next one has a file of its own; who maps the old one reads what was there."""
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, name, str(SIZE)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "ready\n"
    path = SHARED_MEMORY / name
    with path.open("r+b") as file:
        old = mmap.mmap(file.fileno(), 0)
    old[PAGE_BYTES:] = b"o" * (SIZE - PAGE_BYTES)
    before = path.stat().st_ino
    with pytest.raises(ConfigError, match="belongs to a daemon that runs"):
        SharedSegment(name, SIZE)
    holder.kill()
    holder.wait()
    holder.stdout.close()
    with SharedSegment(name, SIZE) as segment:
        segment.view[PAGE_BYTES:] = b"n" * (SIZE - PAGE_BYTES)
        assert path.stat().st_ino != before and old[PAGE_BYTES:] == b"o" * (SIZE - PAGE_BYTES)


def test_a_descriptor_that_is_given_away_holds_no_lock(name: str) -> None:
    """A client that keeps the segment's descriptor does not keep its name from the next daemon."""
    with SharedSegment(name, SIZE) as segment:
        given = segment.open_again()
        try:
            with pytest.raises(BlockingIOError):  # the lock is another's: a copy of the daemon's own would have it
                fcntl.flock(given, fcntl.LOCK_EX | fcntl.LOCK_NB)
            assert os.fstat(given).st_ino == segment.path.stat().st_ino
        finally:
            os.close(given)


@pytest.mark.parametrize("kind", ["file", "pipe", "link", "directory"])
def test_what_hotspan_did_not_make_is_left_alone(name: str, kind: str, tmp_path: Path) -> None:
    """A file of something else under the name, or what is no file, is neither used nor removed."""
    path = tmp_path / name
    if kind == "file":
        path.write_bytes(b"of another daemon" * 1000)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.mkdir()
    with pytest.raises(ConfigError, match="remove it"):
        SharedSegment(name, SIZE, directory=tmp_path)
    assert os.path.lexists(path) and os.listdir(tmp_path) == [name]


def test_a_removed_name_is_put_back(name: str) -> None:
    """Either name is another link to the same file again, however it went; nothing is done while both are there."""
    with SharedSegment(name, SIZE) as segment:
        segment.view[PAGE_BYTES : PAGE_BYTES + 4] = b"mine"
        segment.keep_names()
        assert segment.restored == 0
        for count, path in enumerate((segment.path, segment.kept), 1):
            path.unlink()
            segment.keep_names()
            assert path.read_bytes()[PAGE_BYTES : PAGE_BYTES + 4] == b"mine" and segment.restored == count
        assert segment.is_named and segment.path.stat().st_nlink == 2


def test_a_name_that_another_file_has_taken_is_its_own(name: str, tmp_path: Path) -> None:
    """A foreign file, or a link, is neither replaced nor removed, now or at the end; without it the name is back."""
    with SharedSegment(name, SIZE, directory=tmp_path) as segment:
        for make in (lambda: segment.path.write_bytes(b"theirs"), lambda: segment.path.symlink_to("nowhere")):
            segment.path.unlink()
            make()
            theirs = segment.path.lstat()
            segment.keep_names()
            assert not segment.is_named and os.path.samestat(segment.path.lstat(), theirs)
            segment.path.unlink()
            segment.keep_names()
            assert segment.is_named
        segment.path.unlink()
        segment.path.write_bytes(b"theirs")
    assert segment.path.read_bytes() == b"theirs" and os.listdir(tmp_path) == [name]


def test_without_any_name_the_segment_lives_on(name: str) -> None:
    """Both names gone at once can't be put back: whoever has the file goes on with it, and that it is lost is known."""
    with SharedSegment(name, SIZE) as segment:
        segment.path.unlink()
        segment.kept.unlink()
        segment.keep_names()
        assert not segment.is_named and segment.restored == 0
        segment.view[PAGE_BYTES : PAGE_BYTES + 4] = b"mine"


@pytest.mark.parametrize("left", ["both", "known", "kept"])
def test_what_a_crash_left_is_taken_away(name: str, left: str) -> None:
    """Names of a daemon that was killed, or what clients left of them, are gone with the next one's start and end."""
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, name, str(SIZE)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "ready\n"
    holder.kill()
    holder.wait()
    holder.stdout.close()
    known, kept = SHARED_MEMORY / name, SHARED_MEMORY / f".{name}.hotspan"
    before = known.stat().st_ino
    if left != "both":
        (known if left == "kept" else kept).unlink()
    with SharedSegment(name, SIZE) as segment:
        assert segment.path.stat().st_ino == segment.kept.stat().st_ino != before
    assert not known.exists() and not kept.exists()


def test_half_a_start_is_stale(name: str, tmp_path: Path) -> None:
    """A file that was made and never got its size is replaced."""
    (tmp_path / name).touch()
    with SharedSegment(name, SIZE, directory=tmp_path) as segment:
        assert segment.path.stat().st_size == SIZE


def test_no_room_is_said_and_leaves_nothing(name: str) -> None:
    """More than /dev/shm has is an error that says what to do, and no file stays."""
    for size, hint in ((1 << 50, "lower --size-gib"), (0, "--size-gib"), (-5, "--size-gib")):
        with pytest.raises(ConfigError, match=hint):
            SharedSegment(name, size)
    assert not (SHARED_MEMORY / name).exists()


def test_a_signal_while_it_is_made_ends_it(name: str) -> None:
    """Who is told to stop while the pages are made stops, and no file stays."""
    with pytest.raises(InterruptedError):
        SharedSegment(name, SIZE, is_stopping=lambda: True)
    assert not (SHARED_MEMORY / name).exists()


@pytest.mark.parametrize("name", ["", "/", ".", "..", "a/b", "/a/b", "x" * 201, "a\0b"])
def test_names_that_are_none(name: str) -> None:
    """What can't be the name of shared memory is refused."""
    with pytest.raises(ConfigError, match="--shared-memory-name"):
        file_name(name)


def test_posix_names_may_begin_with_a_slash() -> None:
    """As shm_open takes them."""
    assert file_name("/ai_toolkit_cache") == file_name("ai_toolkit_cache") == "ai_toolkit_cache"
