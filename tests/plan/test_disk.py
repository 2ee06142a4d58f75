"""Real directories, probed: disks, memory, and what can't be used."""

import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hotspan.core.types import GIB, MIB, PAGE_BYTES
from hotspan.plan import disk as module
from hotspan.plan.disk import MAX_WRITTEN, DiskProbe, probe_disk
from hotspan.plan.mounts import Medium
from hotspan.tiers.directory import open_directory

from ..tiers.mounts import mounted


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stands still makes no disk one that hangs: all of what is measured with is moved."""
    monkeypatch.setattr(module, "_PASS_S", 60.0)
    monkeypatch.setattr(module, "_PATIENCE_S", 60.0)


@pytest.fixture
def on_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory on a disk, which tests that need one are skipped without."""
    if probe_disk(tmp_path, is_measured=False).medium in (Medium.MEMORY, Medium.NETWORK):
        pytest.skip("the temporary directory lies in memory or on a network")
    yield tmp_path


def written_bytes() -> int:
    """What this process has had written."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar"))


@pytest.mark.usefixtures("patient")
def test_a_disk_is_measured_and_left_as_it_was(on_disk: Path) -> None:
    """Rates, free space and direct I/O of a directory that does not exist yet; nothing is made or left there."""
    directory = on_disk / "deep" / "down"
    before = written_bytes()
    probe = probe_disk(directory)
    assert probe.problem is None, probe
    assert probe.read_gb_s is not None and probe.write_gb_s is not None
    assert 0.001 < probe.read_gb_s < 100 and 0.001 < probe.write_gb_s < 100
    stat = os.statvfs(on_disk)
    assert probe.free_bytes == pytest.approx(stat.f_bavail * stat.f_frsize, rel=0.05, abs=GIB)
    assert written_bytes() - before <= MAX_WRITTEN + MIB
    assert list(on_disk.iterdir()) == []


def test_a_disk_may_be_looked_at_without_a_write(on_disk: Path) -> None:
    """Not measured, nothing is written and no rate is said."""
    before = written_bytes()
    probe = probe_disk(on_disk, is_measured=False)
    assert written_bytes() - before < MIB
    assert (probe.problem, probe.read_gb_s, probe.write_gb_s) == (None, None, None)
    assert probe.free_bytes > 0


def test_memory_is_never_a_disk() -> None:
    """What lies in /dev/shm is refused before anything is written."""
    before = written_bytes()
    probe = probe_disk(Path("/dev/shm/hotspan-no-such"))
    assert probe.medium is Medium.MEMORY and probe.problem is not None and "memory" in probe.problem
    assert written_bytes() - before < MIB


def test_a_link_into_memory_is_memory(tmp_path: Path) -> None:
    """A directory is where its links lead."""
    (tmp_path / "link").symlink_to("/dev/shm")
    assert probe_disk(tmp_path / "link" / "kv").medium is Medium.MEMORY


@pytest.mark.usefixtures("patient")
def test_a_layer_over_memory_is_memory_though_it_can_not_be_seen(on_disk: Path) -> None:
    """A container's layer whose upper directory is hidden and in memory is found out by measuring."""
    with mounted(on_disk / "ram", "tmpfs", "size=512m") as memory:
        for name in ("upper", "work", "lower"):
            (memory / name).mkdir()
        options = ",".join(f"{name}dir={memory / name}" for name in ("lower", "upper", "work"))
        with mounted(on_disk / "over", "overlay", options) as over:
            assert probe_disk(over).medium is Medium.MEMORY, "its upper directory can be seen"
            subprocess.run(["umount", "-l", str(memory)], check=True)
            assert probe_disk(over, is_measured=False).medium is Medium.OVERLAY
            whole, module._MIN_FREE = module._MIN_FREE, MIB  # type: ignore[misc]
            try:
                probe = probe_disk(over)
            finally:
                module._MIN_FREE = whole  # type: ignore[misc]
            assert probe.medium is Medium.MEMORY and probe.problem is not None
        subprocess.run(["mount", "-t", "tmpfs", "none", str(memory)], check=True)  # for `mounted` to take away


def test_a_small_file_system_is_not_filled(on_disk: Path) -> None:
    """With less than a GiB free nothing is written at all."""
    with mounted(on_disk / "small", "tmpfs", "size=64m") as small:
        image = on_disk / "image"
        image.write_bytes(b"")
        os.truncate(image, 64 * MIB)
        subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
        done = subprocess.run(["mount", "-o", "loop", str(image), str(small)], capture_output=True)
        if done.returncode:
            pytest.skip("no loop devices here")
        try:
            probe = probe_disk(small)
            assert (probe.kind, probe.problem, probe.read_gb_s) == ("ext4", None, None)
            assert 0 < probe.free_bytes < 64 * MIB
        finally:
            subprocess.run(["umount", str(small)], check=True)


def test_a_read_only_file_system_says_so(on_disk: Path) -> None:
    """What can't be written is a problem with its reason, not an error."""
    with mounted(on_disk / "ro", "tmpfs") as memory:
        (memory / "x").mkdir()
        lower = f"lowerdir={memory / 'x'}:{on_disk}"
        with mounted(on_disk / "over", "overlay", lower) as over:
            assert probe_disk(over / "kv").problem == "it is on a read-only file system"


def test_what_is_no_place_for_a_tier_says_why(on_disk: Path) -> None:
    """A file, a directory below a file, and somebody's files are named."""
    (on_disk / "file").write_text("x")
    assert probe_disk(on_disk / "file").problem == "it is not a directory"
    assert "file is not a directory" in str(probe_disk(on_disk / "file" / "below").problem)
    assert "holds other files (file)" in str(probe_disk(on_disk).problem)


def test_a_tier_that_is_there_keeps_its_bytes_unless_it_is_in_use(on_disk: Path) -> None:
    """An earlier server's slab counts as its own; a directory that a server has open is left alone."""
    directory = on_disk / "kv"
    held = open_directory(directory, PAGE_BYTES * 4, 8 * MIB)
    try:
        assert probe_disk(directory, is_measured=False).problem == "another server uses it"
    finally:
        held.close()
    probe = probe_disk(directory, is_measured=False)
    assert probe.problem is None
    assert probe.held_bytes == pytest.approx(8 * MIB, rel=0.05)
    held = open_directory(directory, PAGE_BYTES * 4, 8 * MIB)  # the probe gave its lock back
    held.close()


def test_replicas_in_one_directory_keep_theirs(on_disk: Path) -> None:
    """Directories of data-parallel replicas below one are a tier's, and their slabs count."""
    for name in ("replica-0", "replica-1"):
        open_directory(on_disk / name, PAGE_BYTES * 4, 4 * MIB).close()
    probe = probe_disk(on_disk, is_measured=False)
    assert probe.problem is None
    assert probe.held_bytes == pytest.approx(8 * MIB, rel=0.05)


def test_a_disk_that_hangs_is_given_up(on_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An I/O that never ends is waited for so long and no longer."""
    release = threading.Event()
    monkeypatch.setattr(module, "_PATIENCE_S", 0.2)
    monkeypatch.setattr(module.os, "pwrite", lambda fd, data, at: release.wait() and len(data))
    monkeypatch.setattr(module, "_direct", lambda fd: None)
    probe = probe_disk(on_disk)
    release.set()
    assert "it hangs" in str(probe.problem)


@pytest.mark.parametrize("error", [28, 5])
def test_a_disk_that_fails_says_how(error: int, on_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full or broken disk is a problem with the kernel's words."""

    def fail(*of: object) -> int:
        raise OSError(error, os.strerror(error))

    open_before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(module, "_direct", lambda fd: None)
    monkeypatch.setattr(module.os, "pwrite", fail)
    assert os.strerror(error) in str(probe_disk(on_disk).problem)
    assert len(os.listdir("/proc/self/fd")) == len(open_before)


@pytest.mark.usefixtures("patient")
def test_without_direct_io_it_is_measured_through_the_page_cache(
    on_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that refuses O_DIRECT still has rates, and says that it has no direct I/O."""
    monkeypatch.setattr(module, "_direct", lambda fd: None)
    probe = probe_disk(on_disk)
    assert probe.problem is None and probe.read_gb_s is not None and not probe.is_direct
    assert "no direct I/O" in probe.describe()


@pytest.mark.usefixtures("patient")
def test_without_nameless_files_the_name_goes_at_once(on_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that knows no O_TMPFILE is measured as well, and nothing is left there."""
    real = os.open

    def no_tmpfile(path: object, flags: int, *more: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "not supported")
        return real(path, flags, *more)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(module.os, "open", no_tmpfile)
    probe = probe_disk(on_disk)
    assert probe.problem is None and probe.read_gb_s is not None
    assert list(on_disk.iterdir()) == []


def test_killed_in_the_middle_it_leaves_nothing(on_disk: Path) -> None:
    """A process that is killed while it measures leaves no file, and gives its space back."""
    code = (
        "import sys; from pathlib import Path; from hotspan.plan import disk\n"
        "disk._PASS_S = 30; disk.MAX_WRITTEN = 1 << 40\n"
        "real = disk.os.pwrite\n"
        "def slow(fd, data, at):\n"
        "    if at == 4 << 20: print('writing', flush=True)\n"
        "    import time; time.sleep(0.05 if at else 0); return real(fd, data, at)\n"
        "disk.os.pwrite = slow\n"
        "disk.probe_disk(Path(sys.argv[1]))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(on_disk)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "writing\n"
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    process.stdout.close()
    assert list(on_disk.iterdir()) == []


def test_a_lock_is_only_tried(on_disk: Path) -> None:
    """Probing a tier's directory does not take its lock away from who has it."""
    open_directory(on_disk / "kv", PAGE_BYTES * 4, 4 * MIB).close()
    with (on_disk / "kv" / "lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert probe_disk(on_disk / "kv", is_measured=False).problem == "another server uses it"


def test_it_says_what_it_is() -> None:
    """The description has the file system, the device, the space and the rates."""
    probe = DiskProbe(Path("/x"), "xfs", Medium.NVME, 100 * GIB, 5 * GIB, True, 6.5, 2.25)
    assert probe.describe() == (
        "xfs on NVMe, 100.0 GiB free, 5.0 GiB held already, reads 6.50 GB/s, writes 2.25 GB/s, direct I/O"
    )
