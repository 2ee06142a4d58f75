"""The RAM tier's memory: shared, whole, and gone with its processes."""

import fcntl
import mmap
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from hotspan.core.errors import ConfigError
from hotspan.core.types import PAGE_BYTES
from hotspan.testing.chunks import content, key_of
from hotspan.tiers.slab import SharedSlab, sweep_dead_slabs

from .mounts import mounted

SLOT = 8192
ATTACH = """
import sys
from pathlib import Path
from hotspan.tiers.slab import SharedSlab
slab = SharedSlab(sys.argv[1], 4, 8192, Path(sys.argv[2]))
print("mapped", flush=True)
for line in sys.stdin:
    slot, byte = map(int, line.split())
    print(slab.slot(slot)[0], flush=True)
    slab.slot(slot)[:] = bytes([byte]) * 8192
    print("written", flush=True)
"""


def attach(name: str, directory: Path) -> "subprocess.Popen[str]":
    """Another process that maps the slab; it writes what it is told to."""
    command = [sys.executable, "-c", ATTACH, name, str(directory)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "mapped\n"
    return process


def tell(process: "subprocess.Popen[str]", slot: int, byte: int) -> int:
    """Let the other process fill a slot; returns the first byte it saw there before."""
    assert process.stdin is not None and process.stdout is not None
    print(slot, byte, file=process.stdin, flush=True)
    seen = int(process.stdout.readline())
    assert process.stdout.readline() == "written\n"
    return seen


def test_two_processes_share_it_without_its_name(tmp_path: Path) -> None:
    """What one process writes the other reads, also after the name is gone, and no third can open it."""
    with SharedSlab("shared", 4, SLOT, tmp_path) as slab:
        process = attach("shared", tmp_path)
        slab.unlink()
        assert not slab.path.exists()
        slab.slot(2)[:] = b"\x2a" * SLOT
        assert tell(process, 2, 7) == 42
        assert slab.slot(2) == b"\x07" * SLOT
        assert slab.slot(1) == bytes(SLOT) and slab.slot(3) == bytes(SLOT)
        process.kill()
        process.wait()
        assert slab.slot(2) == b"\x07" * SLOT


def test_the_first_makes_it_and_the_others_wait_for_its_size(tmp_path: Path) -> None:
    """A process that comes while the file is still empty waits until it has its size, and then sees the same memory."""
    with SharedSlab("size", 4, SLOT, tmp_path) as model:
        path = model.path
        path_of_early = path.with_name(path.name.replace("size", "early"))
    fd = os.open(path_of_early, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    grower = threading.Timer(0.1, lambda: os.ftruncate(fd, 4 * SLOT))
    grower.start()
    with SharedSlab("early", 4, SLOT, tmp_path) as slab:
        assert len(slab.view) == 4 * SLOT
        os.pwrite(fd, b"x", 3 * SLOT)
        assert slab.slot(3)[0] == ord("x")
    grower.join()
    os.close(fd)


def test_only_the_owner_may_open_it(tmp_path: Path) -> None:
    """The file has mode 0600, whatever the umask."""
    old = os.umask(0)
    try:
        with SharedSlab("mode", 1, SLOT, tmp_path) as slab:
            assert stat.S_IMODE(slab.path.stat().st_mode) == 0o600
    finally:
        os.umask(old)


@pytest.mark.parametrize(("slots", "slot_bytes"), [(0, 4096), (1, 0), (4, 4095), (-1, 4096)])
def test_odd_shapes_are_refused(tmp_path: Path, slots: int, slot_bytes: int) -> None:
    """Slots are whole pages and there is at least one; nothing is left behind by the refusal."""
    with pytest.raises(ValueError):
        SharedSlab("odd", slots, slot_bytes, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_slots_are_aligned_and_apart(tmp_path: Path) -> None:
    """Each slot begins on a page, has its size, and shares no byte with another."""
    with SharedSlab("slots", 5, SLOT, tmp_path) as slab:
        for n in range(5):
            slab.slot(n)[:] = content(key_of(str(n)), SLOT)
        for n in range(5):
            assert slab.slot(n) == content(key_of(str(n)), SLOT)
            array = np.frombuffer(slab.slot(n), np.uint8)
            assert array.ctypes.data % 4096 == 0
            del array


def test_every_page_is_there_from_the_start(tmp_path: Path) -> None:
    """After construction the file has all its blocks: no write can fail later for want of memory."""
    with mounted(tmp_path / "shm", "tmpfs", "size=4m") as shm, SharedSlab("full", 32, SLOT, shm) as slab:
        assert os.stat(slab.path).st_blocks * 512 == slab.bytes


def test_too_little_shared_memory_is_explained(tmp_path: Path) -> None:
    """A slab that does not fit raises ConfigError naming --ram-gib and the container's setting, and leaves no file."""
    with mounted(tmp_path / "shm", "tmpfs", "size=1m") as shm:
        with pytest.raises(ConfigError, match=r"--ram-gib.*--shm-size"):
            SharedSlab("big", 512, SLOT, shm)
        assert list(shm.iterdir()) == []
        with SharedSlab("small", 64, SLOT, shm):
            pass


def test_views_that_live_on_do_not_break_closing(tmp_path: Path) -> None:
    """`close` neither raises nor leaks its descriptor while numpy still looks at the memory, whole or in part."""
    slab = SharedSlab("views", 2, SLOT, tmp_path)
    whole, part = np.frombuffer(slab.view, np.uint8), np.frombuffer(slab.slot(1), np.uint8)
    before = len(os.listdir("/proc/self/fd"))
    slab.close()
    slab.close()
    assert len(os.listdir("/proc/self/fd")) == before - 1
    slab.unlink()
    assert whole[0] == part[0] == 0


def test_with_closes_and_unlinks(tmp_path: Path) -> None:
    """Leaving the `with` leaves no file and no descriptor."""
    before = len(os.listdir("/proc/self/fd"))
    with SharedSlab("with", 2, SLOT, tmp_path):
        pass
    assert list(tmp_path.iterdir()) == [] and len(os.listdir("/proc/self/fd")) == before


def test_sweep_takes_only_the_dead(tmp_path: Path) -> None:
    """A slab whose process was killed is removed; one that lives, and files of others, stay."""
    (tmp_path / "psm_other").write_bytes(b"x")
    with SharedSlab("alive", 4, SLOT, tmp_path) as alive:
        process = attach("dead", tmp_path)
        assert sweep_dead_slabs(tmp_path) == 0
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert sweep_dead_slabs(tmp_path) == 1
        assert sorted(tmp_path.iterdir()) == [alive.path, tmp_path / "psm_other"]
        assert sweep_dead_slabs(tmp_path) == 0


def test_a_newborn_slab_survives_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep that strikes between the making of a slab and its lock leaves two processes with one memory, not two."""
    real, struck = fcntl.flock, []

    def flock(fd: int, operation: int) -> None:
        if operation == fcntl.LOCK_SH and not struck:
            struck.append(True)
            sweep_dead_slabs(tmp_path)
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with SharedSlab("newborn", 4, SLOT, tmp_path) as slab:
        assert struck and slab.path.exists()
        process = attach("newborn", tmp_path)
        slab.slot(0)[0] = 5
        assert tell(process, 0, 6) == 5
        process.kill()
        process.wait()


def test_a_swept_file_is_not_waited_for(tmp_path: Path) -> None:
    """A process that opened a slab which was swept before it had its size goes on with the one that took its name."""
    path = tmp_path / "hotspan-slab-late"
    fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)

    def sweep() -> None:
        time.sleep(0.1)
        path.unlink()
        os.close(fd)

    sweeper = threading.Thread(target=sweep)
    sweeper.start()
    with SharedSlab("late", 4, SLOT, tmp_path) as slab:
        sweeper.join()
        assert os.stat(slab.path).st_size == slab.bytes
        with mmap.mmap(os.open(slab.path, os.O_RDWR), 4 * SLOT) as other:
            slab.slot(1)[0] = 9
            assert other[SLOT] == 9


def test_a_slab_drops_its_own_name_only(tmp_path: Path) -> None:
    """Another engine may have one of that name by now."""
    with SharedSlab("engine", 1, PAGE_BYTES, tmp_path) as first:
        first.unlink()
        with SharedSlab("engine", 1, PAGE_BYTES, tmp_path) as second:
            first.unlink()
            assert second.path.exists()
        assert not second.path.exists()
