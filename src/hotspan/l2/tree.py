"""A directory that others may write, entered without following a link.

Each directory of a path is opened in the one before it, and what is read, made or deleted is named relative to an open
directory. So nothing outside of the root is touched, whatever links somebody puts there, and at whatever moment. What
is no directory where one belongs is NotADirectoryError.
"""

import contextlib
import errno
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from hotspan.core.private import LIST

READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # an open of a pipe must not wait
_ROOT = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_MAX_DEPTH = 16

Enter = Callable[[Path], int]
"""Opens a directory, by its path from the root; the descriptor is valid until the next call."""


class Tree:
    """Files under `root`, by their paths from there. Methods raise OSError."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @contextlib.contextmanager
    def walk(self, *, make: bool = False) -> Iterator[Enter]:
        """Enter one directory after the other; what two in a row share is opened once. make: what is missing."""
        names: list[str] = []
        fds: list[int] = []

        def enter(directory: Path) -> int:
            if directory.is_absolute() or ".." in directory.parts:
                raise ValueError(f"{directory} is no path from the root on")
            if not fds:
                fds.append(self._open_root(make=make))
            while names and tuple(names) != directory.parts[: len(names)]:
                names.pop()
                os.close(fds.pop())
            for name in directory.parts[len(names) :]:
                try:
                    fds.append(_open_directory(fds[-1], name, make=make))
                except NotADirectoryError as error:
                    where = str(self.root / directory)
                    raise NotADirectoryError(errno.ENOTDIR, "is a link, or no directory", where) from error
                names.append(name)
            return fds[-1]

        try:
            yield enter
        finally:
            for fd in fds:
                os.close(fd)

    @contextlib.contextmanager
    def entered(self, directory: Path, *, make: bool = False) -> Iterator[int]:
        """A descriptor of a directory, to be given as `dir_fd`. make: it is made, with all above it, if need be."""
        with self.walk(make=make) as enter:
            yield enter(directory)

    @contextlib.contextmanager
    def opened(self, path: Path) -> Iterator[int]:
        """A descriptor of a file."""
        with self.entered(path.parent) as parent:
            fd = os.open(path.name, READ, dir_fd=parent)
        try:
            yield fd
        finally:
            os.close(fd)

    def listed(self, directory: Path, limit: int) -> list[str]:
        """The names in a directory, any `limit` of them if there are more; none if there is no directory."""
        try:
            with self.entered(directory) as fd:
                return names_in(fd, limit)
        except FileNotFoundError:
            return []

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
            return os.open(self.root, _ROOT)
        except FileNotFoundError:
            if not make:
                raise
        self.root.mkdir(0o700, parents=True, exist_ok=True)
        return os.open(self.root, _ROOT)


def names_in(fd: int, limit: int) -> list[str]:
    """Names in an open directory, `limit` at most: whoever writes there may make any number."""
    with os.scandir(fd) as entries:
        return [entry.name for entry in itertools.islice(entries, limit)]


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
            with os.scandir(fd) as entries:
                for each in entries if depth else ():
                    delete_in(fd, each.name, step, depth - 1)
        finally:
            os.close(fd)
        with contextlib.suppress(OSError):  # something is still open (NFS keeps it), or another sweep is at it, too
            os.rmdir(name, dir_fd=parent)


def is_gone(error: OSError) -> bool:
    """Whether it says that a file is not there, any more (ESTALE: on NFS), or that something else has its name."""
    return error.errno in (errno.ENOENT, errno.ESTALE, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ESPIPE)


def _open_directory(parent: int, name: str, *, make: bool) -> int:
    try:
        return os.open(name, LIST, dir_fd=parent)
    except FileNotFoundError:
        if not make:
            raise
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=parent)
    return os.open(name, LIST, dir_fd=parent)
