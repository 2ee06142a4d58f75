"""What a directory would be worth as a disk tier: where it lies, what is free, and how fast it reads and writes.

The file that is measured with has no name (O_TMPFILE, or unlinked at once): however this process ends, nothing is left.
"""

import contextlib
import errno
import functools
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from hotspan.core.threads import start
from hotspan.core.types import GIB, MIB
from hotspan.plan.memory import memory_of_files
from hotspan.plan.mounts import Medium, medium_of, mount_of, read_mounts
from hotspan.tiers.files import Files

MAX_WRITTEN: Final = 256 * MIB
_PASS_S: Final = 0.4
"""How long writing may take, and reading."""

_PATIENCE_S: Final = 3.0
"""How long the last I/Os may take beyond that, on a busy machine; then the disk is given up."""

_IO_BYTES: Final = 4 * MIB
_THREADS: Final = 4
_MIN_FREE: Final = GIB
"""Below that nothing is measured: the disk is too small anyway."""


@dataclass(frozen=True, slots=True)
class DiskProbe:
    """What was found out about a directory.

    kind:       of the file system, as the kernel calls it.
    free_bytes: for this user. held_bytes: what a disk tier that is already there takes; it may keep that.
    is_direct:  whether O_DIRECT works.
    read_gb_s, write_gb_s: None where it was not measured.
    problem:    why it can't be a disk tier; None if it can.
    """

    directory: Path
    kind: str = "unknown"
    medium: Medium = Medium.UNKNOWN
    free_bytes: int = 0
    held_bytes: int = 0
    is_direct: bool = False
    read_gb_s: float | None = None
    write_gb_s: float | None = None
    problem: str | None = None

    def describe(self) -> str:
        """What it lies on and what it does, in words."""
        words = [f"{self.kind} on {self.medium.value}", f"{self.free_bytes / GIB:,.1f} GiB free"]
        if self.held_bytes:
            words.append(f"{self.held_bytes / GIB:,.1f} GiB held already")
        if self.read_gb_s is not None and self.write_gb_s is not None:
            words.append(f"reads {self.read_gb_s:.2f} GB/s, writes {self.write_gb_s:.2f} GB/s")
            words.append("direct I/O" if self.is_direct else "no direct I/O: takes page cache")
        return ", ".join(words)


@dataclass(frozen=True, slots=True)
class _Rates:
    is_direct: bool
    write_gb_s: float
    read_gb_s: float
    is_memory: bool


def probe_disk(directory: Path, *, is_measured: bool = True) -> DiskProbe:
    """What a disk tier in `directory`, which need not exist yet, would find. Never raises for what the disk does.

    Writes:  256 MiB at most, to a file without a name; nothing if not `is_measured`.
    Blocks:  about a second; a disk that hangs is given up after four. Network file systems are never touched.
    """
    path = Path(os.path.abspath(directory.expanduser()))
    probe = DiskProbe(path)
    try:
        probe = _placed(path, path)  # as it is written first: to resolve links on a dead server would hang
        if probe.problem is None:
            probe = _placed(path, path.resolve())
        if probe.problem is not None:
            return probe
        base = next(parent for parent in (path, *path.parents) if parent.exists())
        stat = os.statvfs(base)
        probe = replace(probe, free_bytes=stat.f_bavail * stat.f_frsize, held_bytes=_held_bytes(path))
        problem = _occupied(path) or _refused(base)
        if problem is not None or not is_measured or probe.free_bytes < _MIN_FREE:
            return replace(probe, problem=problem)
        rates = _measure(base)
    except OSError as error:
        return replace(probe, problem=f"it can't be used ({error.strerror})")
    if rates is None:
        return replace(probe, problem=f"it hangs: an I/O took more than {_PATIENCE_S:g} s")
    if probe.medium is Medium.OVERLAY and rates.is_memory:
        return replace(probe, medium=Medium.MEMORY, problem="files there are kept in memory")
    return replace(probe, is_direct=rates.is_direct, read_gb_s=rates.read_gb_s, write_gb_s=rates.write_gb_s)


def _placed(path: Path, where: Path) -> DiskProbe:
    """What the mount says that `where` lies on."""
    mounts = read_mounts()
    mount = mount_of(where, mounts)
    if mount is None:
        return DiskProbe(path, problem="its mount is unknown")
    medium = medium_of(mount, mounts)
    problem = {
        Medium.MEMORY: "it is in memory: use the RAM tier instead",
        Medium.NETWORK: "it is on a network file system: share it between replicas with --l2 file:// instead",
    }.get(medium)
    return DiskProbe(path, mount.kind, medium, problem=problem)


def _held_bytes(path: Path) -> int:
    """What the slabs of a disk tier take, those of data-parallel replicas included."""
    slabs = [path / "slab", *path.glob("*/slab")]
    return sum(slab.stat().st_blocks * 512 for slab in slabs if slab.is_file())


def _occupied(path: Path) -> str | None:
    """Why a directory that exists can't become a disk tier, if it can't: another server's, or somebody's files."""
    if not path.exists():
        return None
    if not path.is_dir():
        return "it is not a directory"
    lock = path / "lock"
    if lock.is_file():
        files = Files()
        fd = files.open(lock, os.O_RDWR)
        try:
            if not files.lock(fd):
                return "another server uses it"
        finally:
            files.close(fd)
    foreign = sorted(entry.name for entry in path.iterdir() if not (entry / "table").exists())  # else a replica's
    foreign = [name for name in foreign if name not in ("lock", "lost+found")]
    if foreign and not (path / "table").exists():
        return f"it holds other files ({', '.join(foreign[:3])}): give an empty directory"
    return None


def _refused(base: Path) -> str | None:
    """Why this user can't write there, if that is so."""
    if not base.is_dir():
        return f"{base} is not a directory"
    if os.statvfs(base).f_flag & os.ST_RDONLY:
        return "it is on a read-only file system"
    return None if os.access(base, os.W_OK | os.X_OK) else "it can't be written by this user"


# -- measuring -----------------------------------------------------------------------------------------------------


def _measure(base: Path) -> _Rates | None:
    """Rates of 4 MiB I/Os from four threads; None if one did not come back. Raises: OSError."""
    with contextlib.ExitStack() as stack:
        plain = _nameless(base)
        stack.callback(os.close, plain)
        direct = _direct(plain)
        if direct is not None:
            stack.callback(os.close, direct)
        fd = plain if direct is None else direct
        before = memory_of_files()
        wrote = _Pass(lambda buffer, at: os.pwrite(fd, buffer, at), MAX_WRITTEN)
        done = wrote.run(lambda: os.fdatasync(fd))
        is_memory = memory_of_files() - before > 0.8 * wrote.moved_bytes
        if done and direct is None:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        read = _Pass(lambda buffer, at: os.preadv(fd, [buffer], at), wrote.moved_bytes)
        if not (done and read.run(lambda: None)):
            stack.pop_all()  # a thread is still in there: the file goes with the process
            return None
        return _Rates(direct is not None, wrote.gb_s, read.gb_s, is_memory)


def _nameless(base: Path) -> int:
    """A new file without a name. Raises: OSError."""
    try:
        return os.open(base, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT):
            raise
    fd, path = tempfile.mkstemp(prefix=".hotspan-probe-", dir=base)
    os.unlink(path)
    return fd


def _direct(plain: int) -> int | None:
    """The same file for direct I/O; None if its file system refuses that, at the opening or at the first write."""
    try:
        fd = os.open(f"/proc/self/fd/{plain}", os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
    except OSError:
        return None
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        try:
            os.pwrite(fd, page, 0)
        except OSError:
            os.close(fd)
            return None
    return fd


class _Pass:
    """Four threads that move a file once from its beginning, until its end or until time is up."""

    def __init__(self, move: Callable[[memoryview, int], int], max_bytes: int) -> None:
        self._move = move
        self._places: Iterator[int] = iter(range(0, max_bytes, _IO_BYTES))
        self._buffers = [_buffer() for _ in range(_THREADS)]
        self._lock = threading.Lock()
        self._errors: list[Exception] = []
        self._until_s = self._began_s = 0.0
        self._took_s = 0.0
        self.moved_bytes = 0

    @property
    def gb_s(self) -> float:
        return self.moved_bytes / max(self._took_s, 1e-9) / 1e9

    def run(self, finish: Callable[[], None]) -> bool:
        """Move, then `finish`; False if that did not end in time. Raises: OSError."""
        self._began_s = time.perf_counter()
        self._until_s = self._began_s + _PASS_S
        done = threading.Event()

        def all_of_it() -> None:
            for thread in [start("probe-io", functools.partial(self._work, each)) for each in self._buffers]:
                thread.join()
            with self._keeping():
                if not self._errors:
                    finish()
            done.set()

        start("probe", all_of_it)
        if not done.wait(_PASS_S + _PATIENCE_S):
            return False
        self._took_s = time.perf_counter() - self._began_s
        if self._errors:
            raise self._errors[0]
        return self.moved_bytes > 0

    def _work(self, buffer: memoryview) -> None:
        with self._keeping():
            while time.perf_counter() < self._until_s:
                with self._lock:
                    at = next(self._places, None)
                if at is None:
                    return
                if self._move(buffer, at) != _IO_BYTES:
                    raise OSError(errno.EIO, "a transfer was short")
                with self._lock:
                    self.moved_bytes += _IO_BYTES

    @contextlib.contextmanager
    def _keeping(self) -> Iterator[None]:
        """An error of a thread, kept for who waits for it."""
        try:
            yield
        except Exception as error:
            self._errors.append(error)


def _buffer() -> memoryview:
    """Page-aligned memory for one I/O, of random bytes: zeros would be compressed, or not be written at all."""
    pages = mmap.mmap(-1, _IO_BYTES)
    pages.write(os.urandom(_IO_BYTES))
    return memoryview(pages)
