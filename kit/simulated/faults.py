"""Disks that fail, fall short, are slow, hang, or go away: stand in for hotspan.tiers.files.Files."""

import contextlib
import errno
import mmap
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hotspan.core.types import PAGE_BYTES
from hotspan.tiers.files import Buffer, Files

SHORT = 0
"""In the place of an errno: a read or write moves too few bytes; other calls succeed."""

DATA_CALLS = ("preadv", "pwritev")
"""The calls that move frames."""

_SECTOR = 512


class HookedFiles(Files):
    """System calls that ask `before` first. Derive from it.

    calls:    how many of each kind there were; `open_fds` of them are open now.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.open_fds: set[int] = set()
        self._lock = threading.Lock()

    def before(self, kind: str) -> bool:
        """Called with each call's kind; may wait, or raise OSError. Returns whether the call shall fall short."""
        return False

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        self._count("open")
        fd = super().open(path, flags, mode)
        with self._lock:
            self.open_fds.add(fd)
        return fd

    def close(self, fd: int) -> None:
        super().close(fd)
        with self._lock:
            self.open_fds.remove(fd)

    def pread(self, fd: int, size: int, at: int) -> bytes:
        return super().pread(fd, size // 2 if self._count("pread") else size, at)

    def pwrite(self, fd: int, data: Buffer, at: int) -> int:
        return super().pwrite(fd, data[: len(data) // 2] if self._count("pwrite") else data, at)

    def preadv(self, fd: int, buffers: Sequence[memoryview], at: int) -> int:
        with _maybe_cut(buffers, self._count("preadv")) as moved:
            return super().preadv(fd, moved, at) if moved else 0

    def pwritev(self, fd: int, buffers: Sequence[memoryview], at: int) -> int:
        with _maybe_cut(buffers, self._count("pwritev")) as moved:
            return super().pwritev(fd, moved, at) if moved else 0

    def truncate(self, fd: int, size: int) -> None:
        self._count("truncate")
        super().truncate(fd, size)

    def allocate(self, fd: int, size: int, at: int = 0) -> None:
        self._count("allocate")
        super().allocate(fd, size, at)

    def punch(self, fd: int, size: int, at: int) -> None:
        self._count("punch")
        super().punch(fd, size, at)

    def space(self, fd: int) -> os.statvfs_result:
        self._count("space")
        return super().space(fd)

    def sync(self, fd: int) -> None:
        self._count("sync")
        super().sync(fd)

    def stat(self, fd: int) -> os.stat_result:
        self._count("stat")
        return super().stat(fd)

    def replace(self, source: Path, target: Path) -> None:
        self._count("replace")
        super().replace(source, target)

    def lock(self, fd: int) -> bool:
        self._count("lock")
        return super().lock(fd)

    def _count(self, kind: str) -> bool:
        with self._lock:
            self.calls[kind] += 1
        return self.before(kind)


class FaultyFiles(HookedFiles):
    """The nth call, counted from `arm` on, fails; or every call from it on.

    error: an errno, or SHORT. kinds: which calls are counted and fail; None for all. hits: how many failed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.hits = 0
        self._kinds: Sequence[str] | None = None
        self._disarm()

    def arm(
        self, nth: int, error: int = errno.EIO, *, kinds: Sequence[str] | None = None, lasting: bool = False
    ) -> None:
        """Let the nth call from now on fail (1 is the next). lasting: and all after it, until `disarm`."""
        with self._lock:
            self._nth, self._error, self._kinds, self._lasting, self._seen = nth, error, kinds, lasting, 0
            self.hits = 0

    def disarm(self) -> None:
        """No call fails any more."""
        with self._lock:
            self._disarm()

    def before(self, kind: str) -> bool:
        with self._lock:
            if not self._nth or (self._kinds is not None and kind not in self._kinds):
                return False
            self._seen += 1
            if self._seen != self._nth and not (self._lasting and self._seen > self._nth):
                return False
            self.hits += 1
            error = self._error
        if error == SHORT:
            return True
        raise OSError(error, os.strerror(error))

    def _disarm(self) -> None:
        self._nth, self._error, self._lasting, self._seen = 0, errno.EIO, False, 0
        self._kinds = None


@dataclass(frozen=True, slots=True)
class BadPlace:
    """Bytes of one file that fail for good, in one of the ways in PLACE_KINDS."""

    kind: str
    start: int
    stop: int
    name: str = "slab"


PLACE_KINDS = ("read", "write", "torn", "slow", "slow_write")
"""read, write: EIO. torn: a write says that it is done, and its second half is not. slow: any I/O takes `slow_s`.
slow_write: writes do.
"""


def bad_slots(
    rng: random.Random, slots: int, slot_bytes: int, part: float, kinds: Sequence[str] = PLACE_KINDS
) -> list[BadPlace]:
    """Bad places in so many of the slots, at random: a page of each, in one of these ways."""
    places = []
    for slot in rng.sample(range(slots), max(1, round(part * slots))):
        at = slot * slot_bytes + rng.randrange(slot_bytes // PAGE_BYTES) * PAGE_BYTES
        places.append(BadPlace(rng.choice(kinds), at, at + PAGE_BYTES))
    return places


class BadPlaces(FaultyFiles):
    """A disk with bad places besides. `places` may be changed at any time; `met` counts the calls that met one."""

    def __init__(
        self, places: list[BadPlace] | None = None, slow_s: float = 8.0, wait: Callable[[float], None] = time.sleep
    ) -> None:
        super().__init__()
        self.places = [] if places is None else places
        self.met: Counter[str] = Counter()
        self._names: dict[int, str] = {}
        self._slow_s = slow_s
        self._wait = wait

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        fd = super().open(path, flags, mode)
        self._names[fd] = path.name
        return fd

    def redirect(self, fd: int, to: int) -> None:
        self._names[fd] = self._names[to]
        super().redirect(fd, to)

    def replace(self, source: Path, target: Path) -> None:
        super().replace(source, target)  # the new file lies elsewhere
        self._names = {fd: target.name if name == source.name else name for fd, name in self._names.items()}
        self.places[:] = [place for place in self.places if place.name != target.name]

    def pread(self, fd: int, size: int, at: int) -> bytes:
        self._meet(fd, at, size, "read")
        return super().pread(fd, size, at)

    def preadv(self, fd: int, buffers: Sequence[memoryview], at: int) -> int:
        self._meet(fd, at, sum(map(len, buffers)), "read")
        return super().preadv(fd, buffers, at)

    def pwrite(self, fd: int, data: Buffer, at: int) -> int:
        torn = self._meet(fd, at, len(data), "write")
        moved = super().pwrite(fd, data, at)
        self._tear(fd, torn)
        return moved

    def pwritev(self, fd: int, buffers: Sequence[memoryview], at: int) -> int:
        torn = self._meet(fd, at, sum(map(len, buffers)), "write")
        moved = super().pwritev(fd, buffers, at)
        self._tear(fd, torn)
        return moved

    def _meet(self, fd: int, at: int, size: int, call: str) -> list[tuple[int, bytes]]:
        """Fail, or wait, if a call meets a bad place; else what is to stand in what it tears, and where."""
        torn = []
        for place in [place for place in self.places if self.is_met(place, fd, at, size)]:
            if place.kind == call:
                self.met[call] += 1
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            if place.kind == "slow" or (place.kind == "slow_write" and call == "write"):
                self.met[place.kind] += 1
                self._wait(self._slow_s)
            if place.kind == "torn" and call == "write":
                self.met["torn"] += 1
                half = (place.start + place.stop) // 2
                torn.append((half, self._before(fd, half, place.stop - half)))
        return torn

    def is_met(self, place: BadPlace, fd: int, at: int, size: int) -> bool:
        """Whether a call that moves these bytes meets a place."""
        return place.name == self._names.get(fd) and at < place.stop and at + size > place.start

    def _before(self, fd: int, at: int, size: int) -> bytes:
        """What stands there now: a file of its own, since direct I/O takes aligned memory only."""
        with open(f"/proc/self/fd/{fd}", "rb") as file:
            file.seek(at)
            return file.read(size).ljust(size, b"\0")

    def _tear(self, fd: int, torn: list[tuple[int, bytes]]) -> None:
        for at, data in torn:
            with memoryview(mmap.mmap(-1, len(data))) as pages:
                pages[:] = data
                super().pwritev(fd, [pages], at)


class HidingPlaces(BadPlaces):
    """Places that can't be read, in a page cache: what was written is read back until `forget`, as without O_DIRECT."""

    def __init__(self, places: list[BadPlace] | None = None) -> None:
        super().__init__(places)
        self._cached: set[BadPlace] = set()

    def forget(self) -> None:
        """The kernel needs its memory for something else."""
        self._cached.clear()

    def _meet(self, fd: int, at: int, size: int, call: str) -> list[tuple[int, bytes]]:
        met = [place for place in self.places if self.is_met(place, fd, at, size)]
        if call == "write":
            self._cached.update(met)
        elif self._cached.issuperset(met):
            return []
        return super()._meet(fd, at, size, call)


def slots_bytes(status: os.stat_result, slot_bytes: int) -> int:
    """Bytes of the whole slots that have space in a file.

    What ext4 adds to a file in many pieces, a page of its own for the list of its extents, is left out: whether it
    does depends on how fragmented the machine's file system is.
    """
    return status.st_blocks * 512 // slot_bytes * slot_bytes


class SmallDisk(FaultyFiles):
    """A file system of so many bytes, of which others take `others_bytes`: allocations beyond that are ENOSPC.

    What a slab takes is what the slots of its real file take.
    """

    _BLOCK = 4096

    def __init__(self, total_bytes: int, slot_bytes: int) -> None:
        super().__init__()
        self.total_bytes = total_bytes
        self.slot_bytes = slot_bytes
        self.others_bytes = 0

    def allocate(self, fd: int, size: int, at: int = 0) -> None:
        if size > self._free(fd):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().allocate(fd, size, at)

    def space(self, fd: int) -> os.statvfs_result:
        super().space(fd)
        blocks, free = 1 << 40, max(0, self._free(fd)) // self._BLOCK
        return os.statvfs_result((self._BLOCK, self._BLOCK, blocks, free, free, 0, 0, 0, 0, 255))

    def _free(self, fd: int) -> int:
        return self.total_bytes - self.others_bytes - slots_bytes(os.fstat(fd), self.slot_bytes)


class VanishedFiles(HookedFiles):
    """Between `go_away` and `come_back` every call fails with EIO, as on a drive that was pulled."""

    def __init__(self) -> None:
        super().__init__()
        self._is_away = False

    def go_away(self) -> None:
        self._is_away = True

    def come_back(self) -> None:
        self._is_away = False

    def before(self, kind: str) -> bool:
        if self._is_away:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return False


class SlowFiles(HookedFiles):
    """Data calls take `delay_s` longer, or hang from `hang` until `release`.

    kinds:   which calls are slow. hanging: how many hang now.
    """

    def __init__(
        self,
        delay_s: float = 0.0,
        kinds: Sequence[str] = DATA_CALLS,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__()
        self.delay_s = delay_s
        self.kinds = tuple(kinds)
        self._sleep = sleep
        self._moving = threading.Event()
        self._moving.set()
        self._change = threading.Condition(self._lock)
        self.hanging = 0

    def hang(self) -> None:
        """From now on slow calls don't return."""
        self._moving.clear()

    def release(self) -> None:
        """All that hangs goes on."""
        self._moving.set()

    def wait_hanging(self, calls: int = 1, timeout_s: float = 60.0) -> None:
        """Wait until so many calls hang. Raises: AssertionError if they don't."""
        with self._change:
            if not self._change.wait_for(lambda: self.hanging >= calls, timeout_s):
                raise AssertionError(f"{self.hanging} calls hang, not {calls}")

    def before(self, kind: str) -> bool:
        if kind not in self.kinds:
            return False
        if self.delay_s:
            self._sleep(self.delay_s)
        if not self._moving.is_set():
            with self._change:
                self.hanging += 1
                self._change.notify_all()
            self._moving.wait(60.0)
            with self._change:
                self.hanging -= 1
        return False


@contextlib.contextmanager
def _maybe_cut(buffers: Sequence[memoryview], short: bool) -> Iterator[list[memoryview]]:
    """The buffers, or about half of them: whole pages where there are several, so that direct I/O takes them."""
    if not short:
        yield list(buffers)
        return
    total = sum(map(len, buffers))
    left = total // 2 // PAGE_BYTES * PAGE_BYTES or total // 2 // _SECTOR * _SECTOR
    parts: list[memoryview] = []
    for buffer in buffers:
        if left:
            parts.append(buffer[: min(left, len(buffer))])
            left -= len(parts[-1])
    try:
        yield parts
    finally:
        for part in parts:
            part.release()
