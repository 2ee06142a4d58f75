"""Private copies of adapters' files, named by what they hold.

    ROOT/                     0700; a lock on it is held while names under it change
    ROOT/<sha256 in hex>/     adapter_config.json, adapter_model.safetensors; locked by each who uses it

The engine reads an adapter's files again whenever it has evicted the adapter and a request needs it, in the middle of a
step, where a missing or half-written file would end it. So it reads none that anybody else can change. A link would
not do: a file that is written in place changes under all its names. The path is the same in every life of a server
and on every replica, since the engine makes it part of the names of an adapter's KV.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from hotspan.core.errors import ConfigError
from hotspan.server.adapters.errors import AdapterError
from hotspan.server.adapters.source import CONFIG, WEIGHTS, Sources

_PART_BYTES = 1 << 22
_PART = "part-"
_OURS = re.compile(rf"[0-9a-f]{{64}}|{_PART}[a-z0-9_]+")


class Snapshot:
    """One adapter's files as they were, there until the last who holds them lets go."""

    def __init__(self, store: "SnapshotStore", path: Path, hold: int) -> None:
        self.path = path
        self._store = store
        self._hold = hold

    @property
    def digest(self) -> str:
        """64 hex digits over what the files hold."""
        return self.path.name

    def close(self) -> None:
        """Let go; the files are removed if nobody else holds them. Blocks: for removing two files."""
        self._store._let_go(self.path, self._hold)


class SnapshotStore:
    """Snapshots under one directory, which servers of one user may share.

    Raises: ConfigError if the directory can't be had for this user alone.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = root.lstat()
        except OSError as error:
            raise ConfigError(
                f"{root} can't hold copies of adapters ({error.strerror}): name another with --adapter-copies"
            ) from error
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise ConfigError(
                f"{root} holds copies of adapters, so it must be a directory of this user's alone (mode 0700): make it "
                "one, or name another with --adapter-copies"
            )
        with self._changing():
            for path in root.iterdir():
                if _OURS.fullmatch(path.name):  # left by servers that were killed; all else is somebody's
                    self._remove_unheld(path)

    def take(self, sources: Sources, directory: Path, check: Callable[[Path], None]) -> Snapshot:
        """A copy of the adapter in `directory`, if `check` raises nothing about it. Blocks: for copying it.

        Raises: AdapterError; nothing is left behind then.
        """
        try:
            with self._changing():
                part = Path(tempfile.mkdtemp(prefix=_PART, dir=self._root))
                hold = _hold(part)
        except OSError as error:
            raise self._no_room(error) from error
        try:
            try:
                digest = _copy(sources, directory, part)
            except OSError as error:
                raise self._no_room(error) from error
            check(part)
        except BaseException:
            self._let_go(part, hold)
            raise
        return self._publish(part, hold, self._root / digest)

    def _publish(self, part: Path, hold: int, path: Path) -> Snapshot:
        with self._changing():
            if not path.exists():
                part.rename(path)
                return Snapshot(self, path, hold)
            found = _hold(path)
        self._let_go(part, hold)
        return Snapshot(self, path, found)

    def _let_go(self, path: Path, hold: int) -> None:
        with self._changing():
            os.close(hold)
            self._remove_unheld(path)

    def _remove_unheld(self, path: Path) -> None:
        with contextlib.suppress(OSError):  # held by another, or not ours: it stays
            mine = _hold(path, fcntl.LOCK_EX)
            shutil.rmtree(path, ignore_errors=True)
            os.close(mine)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Nobody else makes, renames or removes snapshots meanwhile."""
        lock = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def _no_room(self, error: OSError) -> AdapterError:
        return AdapterError(507, f"the adapter can't be copied to {self._root} ({error.strerror}): make room there")


def _hold(path: Path, kind: int = fcntl.LOCK_SH) -> int:
    """A descriptor that holds a directory. Raises: OSError if another holds it against that."""
    hold = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(hold, kind | fcntl.LOCK_NB)
    except OSError:
        os.close(hold)
        raise
    return hold


def _copy(sources: Sources, directory: Path, into: Path) -> str:
    """Copy an adapter's two files; the digest of exactly the bytes that were written."""
    digest = hashlib.sha256(b"hotspan-adapter-files-1")
    for name in (CONFIG, WEIGHTS):
        part = hashlib.sha256()
        with (
            open(sources.open(directory, name), "rb", buffering=0) as source,
            open(into / name, "xb", buffering=0, opener=_private) as copy,
        ):
            while data := source.read(_PART_BYTES):
                part.update(data)
                view = memoryview(data)
                while view:
                    view = view[copy.write(view) :]
        digest.update(part.digest())
    return digest.hexdigest()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
