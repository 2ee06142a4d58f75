"""The RAM tier's memory: one preallocated slab of equal slots, shared by the scheduler's process and the workers'.

The slab is a file in /dev/shm with mode 0600. Whoever comes first makes it, the others wait until it has its size, and
the last to map it (the scheduler's process) unlinks it: no way to die leaves memory behind, no name is left to open.
Where an engine has ranks on other hosts, each host has such a file, and a rank unlinks it (engine/hosts.py).
"""

import contextlib
import os
import time
from pathlib import Path
from types import TracebackType

from hotspan.core.deadline import Deadline
from hotspan.core.errors import ConfigError
from hotspan.core.private import SHARED, let_go, lock
from hotspan.core.shared_memory import SHARED_MEMORY, Mapping, check_room
from hotspan.core.types import PAGE_BYTES

_PREFIX = "hotspan-slab-"


def sweep_dead_slabs(directory: Path = SHARED_MEMORY) -> int:
    """Unlink slabs whose processes died before they could; returns how many.

    A living slab is known by the shared lock that each process which maps it holds.
    """
    swept = 0
    for path in directory.glob(_PREFIX + "*"):
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            if lock(fd):  # else it is in use
                path.unlink()
                swept += 1
        except OSError:
            pass  # another sweeper was first
        finally:
            let_go(fd)
    return swept


class SharedSlab:
    """`slots` x `slot_bytes` of shared memory, every page of it there from the start.

    Raises: ConfigError if /dev/shm has no room. (Running out later would be a SIGBUS in the middle of a request.)
    """

    def __init__(self, name: str, slots: int, slot_bytes: int, directory: Path = SHARED_MEMORY) -> None:
        if slots < 1 or slot_bytes < 1 or slot_bytes % PAGE_BYTES:
            raise ValueError(f"a slab needs slots of whole {PAGE_BYTES}-byte pages, not {slots} x {slot_bytes}")
        self.slots = slots
        self.slot_bytes = slot_bytes
        self.bytes = slots * slot_bytes
        self.path = directory / (_PREFIX + name)
        self._fd = self._open(directory)
        try:
            lock(self._fd, SHARED, timeout_s=None)
            self._map = Mapping(self._fd, self.bytes)
            if self._creator:
                self._map.populate()
        except BaseException:
            if self._creator:
                self.unlink()
            let_go(self._fd)
            raise
        self._view = self._map.view

    def _open(self, directory: Path) -> int:
        """Make the file, or open the one that another process made and wait until it has its size."""
        while True:
            try:
                fd = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
                self._creator = True
            except FileExistsError:
                try:
                    fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
                except FileNotFoundError:
                    continue
                self._creator = False
            try:
                if self._give_size(fd, directory) if self._creator else self._await_size(fd):
                    return fd
            except BaseException:
                let_go(fd)
                raise
            let_go(fd)

    def _give_size(self, fd: int, directory: Path) -> bool:
        """Lock the new file, then size it; False if a sweep took it before it was locked."""
        lock(fd, SHARED, timeout_s=None)
        if os.fstat(fd).st_nlink == 0:
            return False
        try:
            check_room(self.bytes, directory)
            os.ftruncate(fd, self.bytes)
        except BaseException:
            self.path.unlink(missing_ok=True)
            raise
        return True

    def _await_size(self, fd: int, timeout_s: float = 30.0) -> bool:
        """Wait until its maker gave the file its size; False if the file was taken away before."""
        deadline = Deadline(timeout_s)
        while (stat := os.fstat(fd)).st_size < self.bytes:
            if stat.st_nlink == 0:
                return False
            if not deadline.rest_s():
                raise ConfigError(f"the process that makes {self.path} died or is stuck: see its log, then start again")
            time.sleep(0.005)
        return True

    @property
    def view(self) -> memoryview:
        """The whole slab, uint8[bytes], page-aligned."""
        return self._view

    def slot(self, index: int) -> memoryview:
        """Slot `index`, uint8[slot_bytes], page-aligned; no copy."""
        return self._view[index * self.slot_bytes : (index + 1) * self.slot_bytes]

    def unlink(self) -> None:
        """Drop the name, unless it is another slab's by now; the memory lives until the last process unmaps it."""
        with contextlib.suppress(FileNotFoundError):
            if self._fd < 0 or os.path.samestat(self.path.stat(), os.fstat(self._fd)):
                self.path.unlink()

    def close(self) -> None:
        """Unmap, as far as no view of it is left anywhere; the rest goes with the process."""
        if self._fd < 0:
            return
        self._map.close()
        let_go(self._fd)
        self._fd = -1

    def __enter__(self) -> "SharedSlab":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.unlink()
        self.close()
