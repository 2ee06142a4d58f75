"""vLLM's message buffers in /dev/shm, should all processes that could unlink them be killed: the next start does.

    /dev/shm/psm_1a2b...            a buffer: its name tells nobody whose it is
    /dev/shm/hotspan-buffers-...    a note, locked and mapped by the process that made it: names and inodes of buffers

A note that nobody has locked is that of a process which has ended. What it names is unlinked if it is the same file,
this user's, and no process has it mapped. One that may not be looked into counts as if it had, unless it is older than
all that had it mapped when it was noted. The second process (aftermath.py) unlinks notes as it does buffers.
"""

import contextlib
import json
import mmap
import os
import re
import secrets
import stat
from pathlib import Path
from typing import Final

from hotspan.core.errors import MALFORMED
from hotspan.core.private import SHARED, let_go, lock
from hotspan.core.shared_memory import SHARED_MEMORY

_PREFIX: Final = "hotspan-buffers-"
_BUFFER: Final = re.compile(r"psm_[0-9a-f]+")
"""As multiprocessing.shared_memory names what it makes."""

_MAX_BYTES: Final = 1 << 20


def mapped(pid: int, directory: Path = SHARED_MEMORY) -> set[tuple[str, int]]:
    """Message buffers, and notes of them, that a process has mapped, with their inodes; none if it has ended.

    Raises: PermissionError for a process that this one may not look into.
    """
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return set()
    rows = (line.split(maxsplit=5) for line in lines)
    found = {(Path(row[5]), int(row[4])) for row in rows if len(row) == 6}
    return {(str(path), inode) for path, inode in found if path.parent == directory and _is_ours(path.name)}


class BufferNote:
    """What this process has mapped when it is made, noted until `close`. There is no file if that is nothing."""

    def __init__(self, directory: Path = SHARED_MEMORY) -> None:
        self._path: Path | None = None
        buffers = sorted((Path(path).name, inode) for path, inode in mapped(os.getpid(), directory))
        buffers = [each for each in buffers if _BUFFER.fullmatch(each[0])]
        since = _oldest(set(buffers), directory) if buffers else 0
        while buffers:
            path = directory / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
            fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
            lock(fd, SHARED, timeout_s=None)
            if not os.fstat(fd).st_nlink:  # a sweep came before the lock
                let_go(fd)
                continue
            os.write(fd, json.dumps({"since": since, "buffers": buffers}).encode())
            self._path, self._fd, self._map = path, fd, mmap.mmap(fd, 0, prot=mmap.PROT_READ)
            break

    def close(self) -> None:
        """The process that has noted ends in order: who made the buffers unlinks them."""
        path, self._path = self._path, None
        if path is not None:
            path.unlink(missing_ok=True)
            self._map.close()
            let_go(self._fd)


def sweep_buffers(directory: Path = SHARED_MEMORY) -> int:
    """Unlink buffers whose processes have all ended without doing so; how many."""
    swept = 0
    for path in directory.glob(_PREFIX + "*"):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                if os.fstat(fd).st_uid == os.geteuid() and lock(fd):
                    since, noted = _read(fd)
                    used = _used(since, directory) if noted else set()
                    swept += sum(_unlink(directory / name, inode) for name, inode in noted - used)
                    if not noted & used:
                        path.unlink()
            finally:
                let_go(fd)
    return swept


def _is_ours(name: str) -> bool:
    return name.startswith(_PREFIX) or _BUFFER.fullmatch(name) is not None


def _read(fd: int) -> tuple[int, set[tuple[str, int]]]:
    """What a note says: since when its buffers are in use, and which they are; nothing if it can't be read."""
    try:
        said = json.loads(os.read(fd, _MAX_BYTES))
        noted = {(str(name), int(inode)) for name, inode in said["buffers"]}
        return int(said["since"]), {(name, inode) for name, inode in noted if _BUFFER.fullmatch(name)}
    except MALFORMED:
        return 0, set()


def _processes() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def _began(pid: int) -> int:
    """When a process was started, in ticks since this machine was. Raises: OSError if it has ended."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def _oldest(buffers: set[tuple[str, int]], directory: Path) -> int:
    """When the first of the processes that have one of these mapped was started."""
    began = [_began(os.getpid())]
    for pid in _processes():
        with contextlib.suppress(OSError):
            if {(Path(path).name, inode) for path, inode in mapped(pid, directory)} & buffers:
                began.append(_began(pid))
    return min(began)


def _used(since: int, directory: Path) -> set[tuple[str, int]]:
    """What any process has mapped. Raises: PermissionError if one of this user's, no older, can't be looked into."""
    used: set[tuple[str, int]] = set()
    for pid in _processes():
        try:
            used |= mapped(pid, directory)
        except PermissionError:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if os.stat(f"/proc/{pid}").st_uid == os.geteuid() and _began(pid) >= since:
                    raise
    return {(Path(path).name, inode) for path, inode in used}


def _unlink(path: Path, inode: int) -> bool:
    """Unlink a buffer, unless another file has its name by now."""
    try:
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode) or (found.st_ino, found.st_uid) != (inode, os.geteuid()):
            return False
        path.unlink()
    except FileNotFoundError:
        return False
    return True
