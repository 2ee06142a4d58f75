"""An L2 in a directory that all replicas mount: NFS, a parallel file system, or one machine's own disk.

    objects/EPOCH/KEY/object    an object: record, life and zeros up to 4096; then the frame
    objects/EPOCH/KEY/HEX       its metadata: an empty file per update, whose name is the update
    epochs/, log/, replicas/    blob_log.py
    names/                      written_under.py
    tmp/RANDOM                  what is being written, or deleted

Metadata is names because creating one is atomic on every file system, and may be repeated; appending over NFS is not.
To delete a chunk its directory is renamed away: object and metadata go at once. Nothing below the root is reached by a
link (tree.py).

On NFS, what another machine wrote is seen as late as the mount caches names and attributes (`actimeo`): mount with
`actimeo=1` or less, or an invalidation takes that long to be read.
"""

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from hotspan.core.buffers import parts_of
from hotspan.core.clock import Clock, SystemClock
from hotspan.core.threads import start
from hotspan.core.types import GIB
from hotspan.l2.base import StoreUsage
from hotspan.l2.blob_log import BlobLog
from hotspan.l2.blobs import Addition, Part
from hotspan.l2.file_room import OBJECT, OBJECTS, FileRoom
from hotspan.l2.log import SharedInvalidationLog
from hotspan.l2.metadata import ENTRY_BYTES, MAX_BYTES, MAX_UPDATES, NO_LIFE
from hotspan.l2.objects import BlobStore
from hotspan.l2.options import FileOptions
from hotspan.l2.shared_files import Calls, FileCall, SharedFiles
from hotspan.l2.tree import READ, Enter, is_gone, names_in
from hotspan.tiers.io import IO_BYTES
from hotspan.tiers.record import RECORD_BYTES, unpack

logger = logging.getLogger(__name__)

_MAX_NAMES = 4 * MAX_UPDATES
"""In the directory of one chunk."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EMLINK)
"""EMLINK: some file systems limit the directories in one directory, ext3 to 31,998 of them."""


class FileBlobs:
    """Blobs in a directory, whose names can be listed.

    timeout_s: how long a call may wait for the file system to get on: with 4 MiB, or with one file.
    """

    batch = 16

    def __init__(self, directory: Path, timeout_s: float, capacity_bytes: int | None, clock: Clock) -> None:
        self.calls = Calls(str(directory), timeout_s)
        self.files = SharedFiles(directory)
        self.room = FileRoom(self.files, capacity_bytes, clock)
        self.sweeper: threading.Thread | None = None
        self._is_sweeping = self._is_asked = False
        self._lock = threading.Lock()

    def read(self, parts: Sequence[Part]) -> list[bytes | None]:
        def read(call: FileCall) -> list[bytes | None]:
            with self.files.walk() as enter:
                return [_read_part(part, enter, call) for part in parts]

        return self.calls.run(read)

    def read_into(self, name: str, into: Sequence[memoryview]) -> bool:
        def read(call: FileCall) -> bool:
            try:
                with self.files.opened(_path(name)) as fd:
                    if os.fstat(fd).st_size != sum(map(len, into)) or not _read_all(fd, into, call):
                        return False
                    self.room.touch(fd, _place_in_text(os.pread(fd, RECORD_BYTES, 0)))
            except OSError as error:
                if not is_gone(error):
                    raise
                return False
            return True

        return self.calls.run(read)

    def create(self, name: str, data: Sequence[memoryview | bytes]) -> bool:
        try:
            return self.calls.run(lambda call: self._create_object(_path(name), data, call))
        except OSError as error:
            if error.errno in _FULL:
                self.sweep_soon(is_full=True)
            raise

    def create_durable(self, name: str, data: bytes) -> bool:
        return self.calls.run(lambda call: self.files.publish(_path(name), [data], call, is_durable=True))

    def append(self, additions: Sequence[Addition]) -> None:
        def append(call: FileCall) -> None:
            for addition in additions:
                self._append(addition, call)

        self.calls.run(append)

    def delete(self, names: Sequence[str]) -> None:
        paths = {name: _path(name) for name in names}
        chunks = {path.parent if path.name == OBJECT else path for path in paths.values() if path.parts[0] == OBJECTS}

        def delete(call: FileCall) -> None:
            for path in chunks:
                self.files.remove(path, call)
            for path in paths.values():
                if path.parts[0] != OBJECTS:
                    call.step()
                    self.files.unlink(path)

        self.calls.run(delete)

    def overwrite(self, name: str, data: bytes) -> None:
        self.calls.run(lambda call: self.files.replace(_path(name), data, call))

    def written_s(self, name: str) -> float | None:
        """As who serves the file system dates it."""

        def look(call: FileCall) -> float | None:
            try:
                return self.files.facts(_path(name)).st_mtime
            except OSError as error:
                if not is_gone(error):
                    raise
                return None

        return self.calls.run(look)

    def list(self, directory: str, limit: int) -> list[str]:
        return self.calls.run(lambda call: self.files.listed(Path(directory), limit))

    def usage(self) -> StoreUsage:
        """As of the last sweep, and what was put here since. Blocks, the first time, for a look at every object."""
        return self.room.usage or self.calls.run(self.room.look)

    def sweep(self, *, is_full: bool = False) -> None:
        """Delete objects until the rest fits, and what was left behind. Called when it is due.

        is_full:  delete some in any case.
        Blocks:   for a look at every object.
        """
        self.calls.run(lambda call: self.room.sweep(call, is_full=is_full))

    def sweep_soon(self, *, is_full: bool = False) -> None:
        """Sweep on a thread of its own; while one is at it, once more after it, if that is due then."""
        with self._lock:
            self._is_asked = True
            if not self._is_sweeping:
                self._is_sweeping = True
                self.sweeper = start("l2-sweep", lambda: self._sweep_while_asked(is_full))

    def close(self) -> None:
        self.calls.close()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _sweep_while_asked(self, is_full: bool) -> None:
        is_done = False
        try:
            while not is_done:
                self._is_asked = False
                try:
                    self.sweep(is_full=is_full)
                except OSError as error:
                    logger.warning("l2_sweep_failed error=%s", error)
                is_full = False
                with self._lock:
                    is_done = not (self._is_asked and self.room.is_due)
                    self._is_sweeping = not is_done
        finally:
            if not is_done:  # a mistake of ours must not end all sweeps
                self._is_sweeping = False

    def _create_object(self, path: Path, data: Sequence[memoryview | bytes], call: FileCall) -> bool:
        is_ours = False
        self.room.begin(path.parent)
        try:
            is_ours = self.files.publish(path, data, call)
            if is_ours:  # before a sweep sees it: as old as its last use
                with contextlib.suppress(FileNotFoundError), self.files.opened(path) as fd:
                    self.room.touch(fd, _place_in_text(bytes(data[0][:RECORD_BYTES])), is_new=True)
        except FileNotFoundError:
            return True  # deleted each time that it was written
        finally:
            if self.room.end(path.parent, sum(map(len, data)) if is_ours else 0):
                self.sweep_soon()
        return is_ours

    def _append(self, addition: Addition, call: FileCall) -> None:
        directory, data = _path(addition.name), addition.data
        for at in range(0, len(data), ENTRY_BYTES):
            self.files.create(directory / data[at : at + ENTRY_BYTES].hex(), call)


class FileStore(BlobStore):
    """An ObjectStore with a log. An acknowledged entry is on the disk of whoever serves the directory.

    directory: made if it is not there. A mount that hangs keeps threads of this process, but no caller.
    """

    blobs: FileBlobs
    log: SharedInvalidationLog

    def __init__(self, directory: str | Path, options: FileOptions = FileOptions(), clock: Clock | None = None) -> None:  # noqa: B008
        clock = clock or SystemClock()
        capacity_bytes = None if options.capacity_gib is None else int(options.capacity_gib * GIB)
        blobs = FileBlobs(Path(directory), options.timeout_s, capacity_bytes, clock)
        super().__init__(blobs, SharedInvalidationLog(BlobLog(blobs, clock), options.log_entries, clock))


def _path(name: str) -> Path:
    """Of a blob, under the root; of metadata, its directory."""
    kind, *between, last = name.split("/")
    if kind == "objects":
        return Path(OBJECTS, between[0], last, OBJECT)
    if kind == "metadata":
        return Path(OBJECTS, between[0], last)
    return Path(name)


def _read_part(part: Part, enter: Enter, call: FileCall) -> bytes | None:
    call.step()
    path = _path(part.name)
    try:
        if part.name.startswith("metadata/"):
            return _metadata_in(names_in(enter(path), _MAX_NAMES))[: part.limit]
        fd = os.open(path.name, READ, dir_fd=enter(path.parent))
        try:
            return os.pread(fd, min(part.limit, os.fstat(fd).st_size), 0)
        finally:
            os.close(fd)
    except OSError as error:
        if not is_gone(error):
            raise
        return None


def _metadata_in(names: Sequence[str]) -> bytes:
    """Metadata from the names of its updates; other names are passed over, unless there are far too many."""
    if len(names) == _MAX_NAMES:
        return bytes(MAX_BYTES + 1)
    updates = [name for name in names if len(name) == 2 * ENTRY_BYTES and not set(name) - set("0123456789abcdef")]
    return NO_LIFE + b"".join(map(bytes.fromhex, updates))


def _place_in_text(data: bytes) -> int:
    record = unpack(data) if len(data) == RECORD_BYTES else None
    return 0 if record is None else record.place


def _read_all(fd: int, into: Sequence[memoryview], call: FileCall) -> bool:
    """By way of the thread's own memory: a read that hangs must not end in a buffer that has gone to another use."""
    at = 0
    for views in parts_of(into, IO_BYTES):
        part = call.staging[: sum(map(len, views))]
        got = 0
        while got < len(part):
            count = os.preadv(fd, [part[got:]], at + got)
            if not count:
                return False
            got += count
            call.step()
        call.copy(part, views)
        at += got
    return True
