"""A directory that others may write, entered without following a link.

A path is opened by one call of openat2(2) that follows no link, or, where the kernel or a sandbox has none, each part
in the part before it. What is read, made or deleted is named relative to an open directory. So nothing outside of the
root is touched, whatever links somebody puts there, and at whatever moment. What is no directory where one belongs is
NotADirectoryError.
"""

import contextlib
import ctypes
import errno
import functools
import io
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

from hotspan.core.private import LIST

READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # an open of a pipe must not wait
_ENTER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_DEPTH = 16

_OPENAT2 = 437  # on every architecture that Linux runs on, but one
_AT_CWD = -100
_NO_LINKS = 0x04  # RESOLVE_NO_SYMLINKS


class Tree:
    """Files under `root`, by their paths from there. Methods raise OSError."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @contextlib.contextmanager
    def entered(self, directory: Path, *, make: bool = False) -> Iterator[int]:
        """A descriptor of a directory, to be given as `dir_fd`. make: it is made, with all above it, if need be."""
        if directory.is_absolute() or ".." in directory.parts:
            raise ValueError(f"{directory} is no path from the root on")
        fd = self._open_root(make=make)
        try:
            if directory.parts:
                fd, root = _entered(fd, directory, make=make), fd
                os.close(root)
            yield fd
        except NotADirectoryError as error:
            raise NotADirectoryError(errno.ENOTDIR, "is a link, or no directory", str(self.root / directory)) from error
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def opened(self, path: Path, flags: int = READ) -> Iterator[int]:
        """A descriptor of a file."""
        with self.entered(path.parent) as parent:
            fd = os.open(path.name, flags, dir_fd=parent)
        try:
            yield fd
        finally:
            os.close(fd)

    def listed(self, directory: Path) -> list[str]:
        """The names in a directory; none if there is no directory."""
        try:
            with self.opened(directory, LIST) as fd:
                return os.listdir(fd)
        except FileNotFoundError:
            return []

    def read(self, path: Path) -> bytes:
        """All of a file."""
        with (
            self.entered(path.parent) as parent,
            # By this name of `open` faults are injected (proofs/l2_files.py).
            io.open(path.name, "rb", opener=lambda name, _: os.open(name, READ, dir_fd=parent)) as file,  # noqa: UP020
        ):
            data: bytes = file.read()
            return data

    def facts(self, path: Path) -> os.stat_result:
        """What the file system says of a file, or of a link itself."""
        with self.entered(path.parent) as parent:
            return os.stat(path.name, dir_fd=parent, follow_symlinks=False)

    def unlink(self, path: Path) -> None:
        """Delete a file, or a link itself, if it is there."""
        with contextlib.suppress(FileNotFoundError), self.entered(path.parent) as parent:
            os.unlink(path.name, dir_fd=parent)

    def delete(self, path: Path, step: Callable[[], None]) -> None:
        """Delete a file or a directory with all that is in it, if it is there. step: called before each."""
        with contextlib.suppress(FileNotFoundError), self.entered(path.parent) as parent:
            delete_in(parent, path.name, step)

    def check_place(self, directory: Path, fd: int) -> None:
        """Raise FileNotFoundError if a directory that was entered is no longer there: it was renamed away."""
        with self.entered(directory) as found:
            if not os.path.samestat(os.fstat(found), os.fstat(fd)):
                raise FileNotFoundError(errno.ENOENT, "is another directory now", str(self.root / directory))

    def _open_root(self, *, make: bool) -> int:
        try:
            return os.open(self.root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            if not make:
                raise
        self.root.mkdir(0o700, parents=True, exist_ok=True)
        return os.open(self.root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


def delete_in(parent: int, name: str, step: Callable[[], None], depth: int = _MAX_DEPTH) -> None:
    """Delete what has this name in an open directory: of a link the link, of a directory all that is in it."""
    step()
    try:
        os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        return
    except IsADirectoryError:
        try:
            fd = os.open(name, LIST, dir_fd=parent)
        except (FileNotFoundError, NotADirectoryError):  # another sweep was faster
            return
        try:
            for each in os.listdir(fd) if depth else ():
                delete_in(fd, each, step, depth - 1)
        finally:
            os.close(fd)
        with contextlib.suppress(OSError):  # something is still open (NFS keeps it), or another sweep is at it, too
            os.rmdir(name, dir_fd=parent)


def is_gone(error: OSError) -> bool:
    """Whether it says that a file is not there, any more (ESTALE: on NFS), or that something else has its name."""
    return error.errno in (errno.ENOENT, errno.ESTALE, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ESPIPE)


def open_below(root: int, path: str, flags: int = _ENTER) -> int:
    """A file below an open directory, reached by no link; `path` may not lead up."""
    open_at_once = _opener()
    if open_at_once is not None:
        return open_at_once(root, path, flags)
    *above, name = path.split("/")
    fd = os.dup(root)
    for each, how in [*((each, _ENTER) for each in above), (name, flags)]:
        try:
            inner = os.open(each, how, dir_fd=fd)
        finally:
            os.close(fd)
        fd = inner
    return fd


def _entered(root: int, directory: Path, *, make: bool) -> int:
    """A directory below an open one; made, with all above it, if need be."""
    try:
        return open_below(root, str(directory))
    except FileNotFoundError:
        if not make:
            raise
    fd = os.dup(root)
    for name in directory.parts:
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=fd)
            inner = os.open(name, _ENTER, dir_fd=fd)
        finally:
            os.close(fd)
        fd = inner
    return fd


@functools.cache
def _opener() -> Callable[[int, str, int], int] | None:
    """Opens a file below a directory by openat2(2); None if there is no such call, or it is forbidden."""
    try:
        call = ctypes.CDLL(None, use_errno=True).syscall
    except (OSError, AttributeError):
        return None
    call.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t)
    call.restype = ctypes.c_long

    def open_at_once(root: int, path: str, flags: int) -> int:
        how, name = struct.pack("QQQ", flags, 0, _NO_LINKS), os.fsencode(path)  # flags, mode, resolve
        while (fd := call(_OPENAT2, root, name, how, len(how))) < 0:
            number = ctypes.get_errno()
            if number != errno.EINTR:
                number = errno.ENOTDIR if number == errno.ELOOP else number
                raise OSError(number, os.strerror(number), path)
        return int(fd)

    try:
        os.close(open_at_once(_AT_CWD, "/", _ENTER))
    except OSError:
        return None
    return open_at_once
