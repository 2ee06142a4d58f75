"""The daemon's shared memory: one file in /dev/shm, of which every page is there before anybody is told its name.

    [ page 0: "HOTSPAN-SEGMENT", version ][ values ... ]

Whoever lives holds a lock on it. A segment of a daemon that was killed is replaced by a new file, never written over: a
client that still maps the old one reads what it was promised. A file that hotspan did not make is left alone.

The file has two names, NAME and .NAME.hotspan. Clients know the first, and some remove it: Python's resource tracker
(before 3.13) unlinks every segment that its process attached by name. It is put back as another link to the same file.
"""

import ctypes
import logging
import os
import stat
import struct
from collections.abc import Callable
from pathlib import Path

from hotspan.core.errors import ConfigError
from hotspan.core.private import let_go, lock
from hotspan.core.shared_memory import SHARED_MEMORY, Mapping, check_room
from hotspan.core.types import GIB, MIB, PAGE_BYTES

logger = logging.getLogger(__name__)

HEADER_BYTES = PAGE_BYTES
LEAST_BYTES = MIB
_HEADER = struct.Struct("<16sQQ")
_MAGIC = b"HOTSPAN-SEGMENT\0"
_PIECE_BYTES = 256 * MIB
_IN_ATTRIB = 0x4  # as <sys/inotify.h> has them; it comes with a change of the number of links
_IN_MOVE_SELF = 0x800
_MAX_EVENTS_BYTES = 4096


class SharedSegment:
    """`size` bytes of shared memory under a name.

    restored:    how often a name was put back. is_named: whether clients find it by its name.
    is_stopping: asked every 256 MiB while the pages are made (1 s for 2-8 GiB); True ends it with InterruptedError.
    Raises:      ConfigError if the name is in use, or there is no room.
    """

    def __init__(
        self,
        name: str,
        size: int,
        *,
        mode: int = 0o600,
        directory: Path = SHARED_MEMORY,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        if size < LEAST_BYTES:
            raise ConfigError(f"a cache of {size} bytes holds nothing: give --size-gib {LEAST_BYTES / GIB:.3f} or more")
        self.path = directory / file_name(name)
        self.kept = directory / f".{self.path.name}.hotspan"
        self.bytes = size // PAGE_BYTES * PAGE_BYTES
        self.restored = 0
        self.is_named = True
        self._fd = self._create(mode)
        try:
            self._take_name()
            check_room(self.bytes, directory, what="the cache", option="--size-gib")
            os.ftruncate(self._fd, self.bytes)
            os.pwrite(self._fd, _HEADER.pack(_MAGIC, 1, self.bytes), 0)
            self._map = Mapping(self._fd, self.bytes)
            self._populate(is_stopping)
        except BaseException:
            self._drop_names()
            let_go(self._fd)
            raise
        self.view = self._map.view

    def open_again(self) -> int:
        """A descriptor of the segment to give away: the daemon's own would carry its lock along."""
        return os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR | os.O_CLOEXEC)

    def keep_names(self) -> None:
        """Put back a name that somebody removed. One that another file has taken is that file's."""
        why = "another file has it: remove that"
        for path in (self.path, self.kept):
            if os.path.lexists(path):
                continue
            try:
                self._link(path)
            except OSError as error:
                why = f"it can't be put back ({error.strerror}): start the daemon again"
                continue
            self.restored += 1
            logger.info("segment_name_restored path=%s: a client removed it", path)
        was_named, self.is_named = self.is_named, self._is_ours(self.path)
        if was_named and not self.is_named:
            logger.warning("segment_name_lost path=%s: new clients miss everything, and %s", self.path, why)

    def close(self) -> None:
        """Drop the names and unmap; clients keep what they have mapped."""
        if self._fd < 0:
            return
        self._drop_names()
        self._map.close()
        let_go(self._fd)
        self._fd = -1

    def __enter__(self) -> "SharedSegment":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _create(self, mode: int) -> int:
        """A new, locked file under the name that clients don't know."""
        while True:
            try:
                fd = os.open(self.kept, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
            except FileExistsError:
                self._remove_stale(self.kept)
                continue
            except OSError as error:
                raise ConfigError(
                    f"{self.path} can't be made ({error.strerror}): give another --shared-memory-name"
                ) from error
            try:
                if lock(fd, timeout_s=1.0) and os.fstat(fd).st_nlink:  # else another start took it for stale
                    os.fchmod(fd, mode)
                    return fd
            except BaseException:
                let_go(fd)
                raise
            let_go(fd)

    def _take_name(self) -> None:
        """Give the file the name that clients know."""
        while True:
            try:
                self._link(self.path)
                return
            except FileExistsError:
                self._remove_stale(self.path)

    def _link(self, path: Path) -> None:
        """Give the file that is open another name: not what happens to have its name now."""
        directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:  # with a descriptor Python calls linkat, which follows the link in /proc
            os.link(f"/proc/self/fd/{self._fd}", path.name, dst_dir_fd=directory, follow_symlinks=True)
        finally:
            os.close(directory)

    def _is_ours(self, path: Path) -> bool:
        try:
            return os.path.samestat(os.lstat(path), os.fstat(self._fd))
        except FileNotFoundError:
            return False

    def _drop_names(self) -> None:
        for path in (self.path, self.kept):
            if self._is_ours(path):
                path.unlink(missing_ok=True)

    def _remove_stale(self, path: Path) -> None:
        """Unlink the segment of a daemon that is gone. Only who holds a file's lock unlinks it."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return
        except OSError as error:
            raise ConfigError(
                f"{path} exists and can't be opened ({error.strerror}): remove it, or give another --shared-memory-name"
            ) from error
        try:
            if not lock(fd):
                raise ConfigError(
                    f"{self.path} belongs to a daemon that runs: stop that one, or give another --shared-memory-name"
                )
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or (found.st_size and os.pread(fd, len(_MAGIC), 0) != _MAGIC):
                raise ConfigError(
                    f"{path} was not made by hotspan, and something else may be using it: if not, remove it; or "
                    "give another --shared-memory-name"
                )
            if found.st_nlink:
                path.unlink(missing_ok=True)
        finally:
            let_go(fd)

    def _populate(self, is_stopping: Callable[[], bool]) -> None:
        for start in range(0, self.bytes, _PIECE_BYTES):
            if is_stopping():
                raise InterruptedError("stopped while the shared memory was made")
            size = min(_PIECE_BYTES, self.bytes - start)
            try:
                self._map.populate(start, size, threads=min(8, os.cpu_count() or 1))
            except OSError as error:
                raise ConfigError(
                    f"there is no memory for {self.bytes / GIB:.2f} GiB in {self.path} ({error.strerror}): lower "
                    "--size-gib, or the container's memory limit is too low"
                ) from error


class NameWatch:
    """`fd` can be read when a name of the file at `path` was made, removed or renamed (inotify, by the C library).

    Raises: OSError where the kernel gives no watch (fs.inotify.max_user_instances, max_user_watches).
    """

    def __init__(self, path: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self.fd = _checked(libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK))
        try:
            _checked(libc.inotify_add_watch(self.fd, os.fsencode(path), _IN_ATTRIB | _IN_MOVE_SELF))
        except OSError:
            os.close(self.fd)
            raise

    def clear(self) -> None:
        """Forget the events so far."""
        try:
            while os.read(self.fd, _MAX_EVENTS_BYTES):
                pass
        except BlockingIOError:
            return

    def close(self) -> None:
        """End the watch."""
        os.close(self.fd)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def file_name(name: str) -> str:
    """The file of a POSIX shared memory name. Raises: ConfigError if it can't be one."""
    plain = name.removeprefix("/")
    if not plain or plain in (".", "..") or {"/", "\0"} & set(plain) or len(plain.encode()) > 200:
        raise ConfigError(f"--shared-memory-name {name!r} is no name: give one like ai_toolkit_cache")
    return plain
