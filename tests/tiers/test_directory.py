"""A disk tier's directory: owned by one process, and every way in which it can't be used says what to do."""

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hotspan.core.errors import DirectoryError
from hotspan.core.types import MIB
from hotspan.testing.chunks import key_of
from hotspan.tiers.directory import check_directory, open_directory
from hotspan.tiers.table import Record

from .mounts import mounted

SLOT = 8192
HOLD = """
import sys
from pathlib import Path
from hotspan.tiers.directory import open_directory
held = open_directory(Path(sys.argv[1]), 8192, 8 * 8192)
print("held", flush=True)
sys.stdin.read()
"""


def record(name: str) -> Record:
    """A record that a test calls `name`."""
    return Record(key_of(name), None, bytes(32), 4096)


def test_another_process_is_named(tmp_path: Path) -> None:
    """A directory that another process owns is refused with that process's number, and free once it died."""
    path = tmp_path / "disk"
    command = [sys.executable, "-c", HOLD, str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    for attempt in (lambda: open_directory(path, SLOT, 8 * SLOT), lambda: check_directory(path, 8 * SLOT)):
        with pytest.raises(DirectoryError, match=rf"in use by process {process.pid}\b.*another"):
            attempt()
    process.kill()
    process.wait()
    open_directory(path, SLOT, 8 * SLOT).close()


def test_the_same_process_can_not_open_it_twice(tmp_path: Path) -> None:
    """Two tiers of one process can't share a directory either; after `close` it is free."""
    held = open_directory(tmp_path / "disk", SLOT, 8 * SLOT)
    with pytest.raises(DirectoryError, match=f"in use by process {os.getpid()}"):
        open_directory(tmp_path / "disk", SLOT, 8 * SLOT)
    held.close()
    open_directory(tmp_path / "disk", SLOT, 8 * SLOT).close()


def test_modes(tmp_path: Path) -> None:
    """The directory is 0700 and its files are 0600, whatever the umask, also when the directory was there before."""
    (tmp_path / "old").mkdir(mode=0o777)
    umask = os.umask(0)
    try:
        for name in ("new", "old"):
            open_directory(tmp_path / name, SLOT, 8 * SLOT).close()
            assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o700
            files = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / name).iterdir()}
            assert files == {"lock": 0o600, "table": 0o600, "slab": 0o600}
    finally:
        os.umask(umask)


def test_all_space_is_taken_at_the_start(tmp_path: Path) -> None:
    """The slab's blocks are allocated when the directory is opened."""
    held = open_directory(tmp_path / "disk", SLOT, 100 * SLOT)
    assert os.fstat(held.slab_fd).st_blocks * 512 >= 100 * SLOT == os.fstat(held.slab_fd).st_size
    assert held.direct
    held.close()


def test_a_read_only_file_system_is_explained(tmp_path: Path) -> None:
    """On a read-only file system the error says so and names --disk."""
    with mounted(tmp_path / "ro", "tmpfs", "ro,size=4m") as mount:
        for attempt in (lambda: open_directory(mount, SLOT, 8 * SLOT), lambda: check_directory(mount, 8 * SLOT)):
            with pytest.raises(DirectoryError, match=r"read-only.*--disk"):
                attempt()


def test_a_full_file_system_is_explained(tmp_path: Path) -> None:
    """Where the slab does not fit, the error gives both figures and --disk-gib, and the space is not used up."""
    with mounted(tmp_path / "small", "tmpfs", "size=2m") as mount:
        for attempt in (lambda: open_directory(mount, SLOT, 64 * MIB), lambda: check_directory(mount, 64 * MIB)):
            with pytest.raises(DirectoryError, match=r"0\.00 GiB free and needs 0\.06 GiB.*--disk-gib"):
                attempt()
        open_directory(mount, SLOT, MIB).close()


def test_a_quota_that_bites_late_gives_the_space_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the allocation itself fails, the error names --disk-gib and what was allocated is given back."""
    path = tmp_path / "disk"
    open_directory(path, SLOT, 8 * SLOT).close()
    real = os.posix_fallocate

    def fallocate(fd: int, at: int, length: int) -> None:
        real(fd, at, length // 2)
        raise OSError(errno.EDQUOT, "quota")

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    with pytest.raises(DirectoryError, match=r"quota.*--disk-gib"):
        open_directory(path, SLOT, 800 * SLOT)
    assert os.stat(path / "slab").st_blocks * 512 == 8 * SLOT == os.stat(path / "slab").st_size


def test_a_file_in_its_place_is_explained(tmp_path: Path) -> None:
    """A path that is a file, or leads through one, is refused and stays as it is."""
    file = tmp_path / "disk"
    file.write_text("mine")
    for path in (file, file / "below"):
        with pytest.raises(DirectoryError, match=r"not a directory.*--disk"):
            open_directory(path, SLOT, 8 * SLOT)
    assert file.read_text() == "mine"


def test_a_directory_of_others_is_left_alone(tmp_path: Path) -> None:
    """A directory with foreign files is refused by name and nothing is written into it."""
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(DirectoryError, match=r"thesis\.tex.*empty directory"):
        open_directory(tmp_path, SLOT, 8 * SLOT)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_links_are_not_followed(tmp_path: Path) -> None:
    """A slab that is a symbolic link is refused, and what it points to is not written."""
    target = tmp_path / "target"
    target.write_text("mine")
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "slab").symlink_to(target)
    with pytest.raises(DirectoryError):
        open_directory(tmp_path / "disk", SLOT, 8 * SLOT)
    assert target.read_text() == "mine"


def test_smaller_slots_are_refused_larger_ones_taken(tmp_path: Path) -> None:
    """A slab made for smaller slots can't hold this model's chunks and says so; one made for larger slots can."""
    path = tmp_path / "disk"
    open_directory(path, SLOT, 8 * SLOT).close()
    with pytest.raises(DirectoryError, match=rf"slots of {SLOT} bytes.*{2 * SLOT}.*another directory"):
        open_directory(path, 2 * SLOT, 8 * SLOT)
    held = open_directory(path, SLOT // 2, 8 * SLOT)
    assert (held.geometry.slot_bytes, held.geometry.slots) == (SLOT, 8)
    held.close()


def test_less_than_one_slot_is_refused(tmp_path: Path) -> None:
    """A --disk-gib that holds no chunk is refused."""
    with pytest.raises(DirectoryError, match="--disk-gib"):
        open_directory(tmp_path / "disk", SLOT, SLOT - 1)


@pytest.mark.parametrize("slots", [4, 8, 32])
def test_growing_and_shrinking_keep_what_fits(tmp_path: Path, slots: int) -> None:
    """With another size the records and bytes of the slots that remain stay, and the files have the new size."""
    held = open_directory(tmp_path / "disk", SLOT, 8 * SLOT)
    for slot in (1, 6):
        held.table.write(slot, record(str(slot)))
        os.pwrite(held.slab_fd, memoryview(_page(slot)), slot * SLOT)
    held.close()
    held = open_directory(tmp_path / "disk", SLOT, slots * SLOT)
    expected = {slot: record(str(slot)) for slot in (1, 6) if slot < slots}
    assert held.table.read_all() == expected
    assert os.fstat(held.slab_fd).st_size == slots * SLOT
    for slot in expected:
        page = _page(0)
        os.preadv(held.slab_fd, [page], slot * SLOT)
        assert bytes(page) == bytes([slot]) * 4096
    held.close()


def _page(fill: int) -> Any:
    import mmap

    page = mmap.mmap(-1, 4096)
    page[:] = bytes([fill]) * 4096
    return page


def test_without_direct_io_it_is_buffered_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """On a real file system without O_DIRECT (ramfs) the slab works buffered, and one warning says so."""
    with mounted(tmp_path / "ramfs", "ramfs") as mount:
        held = open_directory(mount, SLOT, 8 * SLOT)
        assert not held.direct
        assert os.pwrite(held.slab_fd, b"odd", 1) == 3
        held.close()
    assert ["disk_not_direct" in entry.getMessage() for entry in caplog.records] == [True]


def _refuse_open(flags_refused: int) -> Callable[..., int]:
    real = os.open

    def refuse(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & flags_refused:
            raise OSError(errno.EINVAL, "no direct I/O")
        return real(path, flags, *rest, **named)

    return refuse


def _refuse_read(*_: Any) -> int:
    raise OSError(errno.EINVAL, "no direct reads")


@pytest.mark.parametrize("where", ["open", "preadv"])
def test_a_refusal_of_direct_io_at_open_or_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Whether a file system refuses the flag or the first read with EINVAL, the slab falls back and leaks nothing."""
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, where, _refuse_open(os.O_DIRECT) if where == "open" else _refuse_read)
    held = open_directory(tmp_path / "disk", SLOT, 8 * SLOT)
    assert not held.direct
    held.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("call", ["preadv", "pread", "pwrite", "ftruncate", "posix_fallocate", "statvfs"])
def test_any_failing_call_is_a_directory_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """EIO from any system call while the directory is opened is a DirectoryError, and no descriptor stays open."""
    before = len(os.listdir("/proc/self/fd"))

    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(DirectoryError, match="Input/output error"):
            open_directory(tmp_path / "disk", SLOT, 8 * SLOT)
    assert len(os.listdir("/proc/self/fd")) == before
    open_directory(tmp_path / "disk", SLOT, 8 * SLOT).close()


def test_a_lock_that_fails_is_not_blamed_on_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without locks is reported as that, not as a directory in use."""
    import fcntl

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(DirectoryError, match="No locks available"):
        open_directory(tmp_path / "disk", SLOT, 8 * SLOT)
    assert len(os.listdir("/proc/self/fd")) == before
