"""Private copies of adapters' files, named by the digest of their contents.

    ROOT/                     0700; a lock on it is held while names under it change
    ROOT/<sha256 in hex>/     adapter_config.json, adapter_model.safetensors; locked by each who uses it

The engine reads an adapter's files again whenever it has evicted the adapter and a request needs it, in the middle of a
step, where a missing or half-written file would end it. So it reads none that anybody else can change. A link would
not do: a file that is written in place changes under all its names. The path is the same in every life of a server
and on every replica, since the engine makes it part of the names of an adapter's KV.
"""

import contextlib
import hashlib
import logging
import os
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

from hotspan.core.errors import ConfigError
from hotspan.core.held import PART, changing, hold, remove_unheld, sweep
from hotspan.core.private import let_go, private_directory
from hotspan.core.types import GIB
from hotspan.http.errors import HttpError
from hotspan.server.adapters.source import CONFIG, WEIGHTS, Sources

logger = logging.getLogger(__name__)

_ANYWHERE = Sources([Path("/")])
"""For adapters of the command line: the operator names the files, which may be links, as in the hub's cache."""

_PART_BYTES = 1 << 22
_RESERVE_BYTES = GIB
_RESERVE_PART = 20
"""Of the file system 1 GiB stays free, or a twentieth of one that is smaller than 20 GiB."""


class Snapshot:
    """A copy of one adapter's files; it is removed when its last holder closes it."""

    def __init__(self, store: "SnapshotStore", path: Path, held: int) -> None:
        self.path = path
        self._store = store
        self._held = held

    @property
    def digest(self) -> str:
        """64 hex digits over the contents of the files."""
        return self.path.name

    def close(self) -> None:
        """Release the copy; it is removed if no other holder is left. Blocks: for removing two files."""
        self._store._let_go(self.path, self._held)


class SnapshotStore:
    """Snapshots under one directory, which servers of one user may share.

    max_bytes: of one file that is copied.
    Raises: ConfigError if the directory can't be had for this user alone.
    """

    def __init__(self, root: Path, max_bytes: int = 1 << 62) -> None:
        self._root = root
        self._max_bytes = max_bytes
        private_directory(root, "copies of adapters", "name another with --adapter-copies")
        sweep(root, is_whole=False)  # what servers left that were killed

    def take(self, sources: Sources, directory: Path, check: Callable[[Path], None]) -> Snapshot:
        """A copy of the adapter in `directory`, if `check` raises nothing about it. Blocks: for copying it.

        Raises: HttpError; nothing is left behind then.
        """
        try:
            with changing(self._root):
                part = Path(tempfile.mkdtemp(prefix=PART, dir=self._root))
                held = hold(part)
        except OSError as error:
            raise self._no_room(error) from error
        try:
            try:
                digest = self._copy(sources, directory, part)
            except OSError as error:
                raise self._no_room(error) from error
            check(part)
        except BaseException:
            self._let_go(part, held)
            raise
        return self._publish(part, held, self._root / digest)

    def _publish(self, part: Path, held: int, path: Path) -> Snapshot:
        with changing(self._root):
            if not path.exists():
                part.rename(path)
                return Snapshot(self, path, held)
            found = hold(path)
        self._let_go(part, held)
        return Snapshot(self, path, found)

    def _let_go(self, path: Path, held: int) -> None:
        with changing(self._root):
            let_go(held)
            remove_unheld(path)

    def _copy(self, sources: Sources, directory: Path, into: Path) -> str:
        """Copy an adapter's two files; the digest of exactly the bytes that were written."""
        digest = hashlib.sha256(b"hotspan-adapter-files-1")
        for name in (CONFIG, WEIGHTS):
            part = hashlib.sha256()
            with (
                open(sources.open(directory, name), "rb", buffering=0) as source,
                open(into / name, "xb", buffering=0, opener=_private) as copy,
            ):
                left = self._checked_size(name, os.fstat(source.fileno()).st_size)
                while data := source.read(min(_PART_BYTES, left)):  # what is appended meanwhile is not read
                    left -= len(data)
                    part.update(data)
                    view = memoryview(data)
                    while view:
                        view = view[copy.write(view) :]
            digest.update(part.digest())
        return digest.hexdigest()

    def _checked_size(self, name: str, size: int) -> int:
        """The size. A file without contents (a sparse one) may be of any size. Raises: HttpError."""
        if size > self._max_bytes:
            raise HttpError(
                400, f"{name} has {size / GIB:.2f} GiB, and an adapter may have {self._max_bytes / GIB:.2f} GiB here"
            )
        disk = shutil.disk_usage(self._root)
        reserve = min(_RESERVE_BYTES, disk.total // _RESERVE_PART)
        if size > disk.free - reserve:
            raise HttpError(
                507,
                f"the adapter can't be copied to {self._root}: {name} has {size / GIB:.2f} GiB, "
                f"{disk.free / GIB:.2f} GiB are free and {reserve / GIB:.2f} GiB of that stay free: make room there",
            )
        return size

    def _no_room(self, error: OSError) -> HttpError:
        return HttpError(507, f"the adapter can't be copied to {self._root} ({error.strerror}): make room there")


@contextlib.contextmanager
def pinned_adapters(arguments: Namespace, store: Path) -> Iterator[None]:
    """Let the engine load --lora-modules from copies of their files as they are now, kept until the end.

    The engine reads an adapter's files again whenever it has evicted it: files that were overwritten meanwhile would
    answer under the KV of the old ones. What is no local directory of safetensors stays where it is; its KV is not
    cached any more once its files change (engine/fingerprint.py).

    Mutates: the paths in `arguments.lora_modules`.
    Blocks:  for copying the files.
    Raises:  ConfigError if they can't be copied to `store`.
    """
    with contextlib.ExitStack() as held:
        copies: SnapshotStore | None = None
        for adapter in getattr(arguments, "lora_modules", None) or ():
            directory = Path(adapter.path).expanduser()
            if not all((directory / name).is_file() for name in (CONFIG, WEIGHTS)):
                continue
            copies = copies or SnapshotStore(store)
            try:
                snapshot = copies.take(_ANYWHERE, directory.resolve(), lambda path: None)
            except HttpError as error:
                raise ConfigError(f"--lora-modules {adapter.name}: {error}") from error
            held.callback(snapshot.close)
            logger.info("adapter_copied name=%s digest=%s", adapter.name, snapshot.digest[:12])
            adapter.path = str(snapshot.path)
        yield


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
