"""An L2 in a directory that all replicas mount: NFS, a parallel file system, or one machine's own disk.

    objects/EPOCH/K/E/KEY/object    record, padded to 4096; then the frame
    objects/EPOCH/K/E/KEY/MARK      an empty file a mark, its bytes as its name: creating it twice does no harm
    tmp/RANDOM                      what is being written, or deleted
    epochs/, log/, replicas/        l2/file_log.py

Nothing below the directory is reached by a link (l2/tree.py).

An object and its marks lie in one directory, which is renamed away to delete it: nobody finds an object without its
marks.
"""

import contextlib
import errno
import logging
import os
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from hotspan.core.clock import Clock, SystemClock
from hotspan.core.errors import ConfigError
from hotspan.core.types import GIB, ChunkKey
from hotspan.l2.base import PREAMBLE_BYTES, Found, Landed, StoreUsage, marked
from hotspan.l2.file_log import FileEpochs, FileLog
from hotspan.l2.file_room import OBJECT, FileRoom, directory_of, objects_of, place_of
from hotspan.l2.parts import parts_of
from hotspan.l2.shared_files import Calls, SharedFiles, Turn
from hotspan.l2.tree import READ, is_gone, open_below
from hotspan.tiers.io import IO_BYTES
from hotspan.tiers.record import RECORD_BYTES, Record, pack, unpack

logger = logging.getLogger(__name__)

_MARK = re.compile("(?:[0-9a-f]{2})+")


class FileStore:
    """An ObjectStore with a log.

    directory:    made if it is not there.
    timeout_s:    how long a call may wait for the file system to get on: with 4 MiB, or with one file. A mount that
                  hangs keeps threads of this process, but no caller.
    capacity_gib: of objects; about as many are kept, for each writer counts what it wrote itself, and looks at the
                  others' from time to time. None: as many as there is room for.
    Raises:       ConfigError from the constructor, which touches no file.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        timeout_s: float = 5.0,
        capacity_gib: float | None = None,
        log_entries: int = 1 << 14,
        clock: Clock | None = None,
    ) -> None:
        if timeout_s <= 0 or (capacity_gib is not None and capacity_gib <= 0):
            raise ConfigError(f"a timeout of {timeout_s} s, a capacity of {capacity_gib} GiB: give more than 0")
        capacity_bytes = None if capacity_gib is None else int(capacity_gib * GIB)
        clock = clock or SystemClock()
        self._calls = Calls(str(directory), timeout_s)
        self._files = SharedFiles(Path(directory))
        self._epochs = FileEpochs(self._files, clock)
        self._room = FileRoom(self._files, self._epochs, capacity_bytes, clock)
        self.log = FileLog(self._calls, self._files, self._epochs, log_entries, clock)
        self._lock = threading.Lock()
        self._sweeper: threading.Thread | None = None

    def find(self, keys: Sequence[ChunkKey], tenant: int = 0, *, is_chain: bool = True) -> list[Found | None]:
        """As ObjectStore says; of a chain, None for all keys after the first that is not there."""

        def look(turn: Turn) -> list[Found | None]:
            epoch = self._epochs.current(turn)
            found: list[Found | None] = []
            try:
                with self._files.entered(objects_of(epoch)) as objects:
                    for key in keys:
                        turn.step()
                        found.append(_found(objects, key))
                        if is_chain and found[-1] is None:
                            break
            except OSError as error:
                if not is_gone(error):
                    raise
            return found + [None] * (len(keys) - len(found))

        return self._calls.run(look)

    def get(self, found: Found, into: Sequence[memoryview], landed: Landed | None = None) -> bool:
        def read(turn: Turn) -> bool:
            path = directory_of(self._epochs.current(turn), found.record.key) / OBJECT
            try:
                with self._files.opened(path) as fd:
                    if os.fstat(fd).st_size != PREAMBLE_BYTES + sum(map(len, into)):
                        return False
                    if unpack(os.pread(fd, RECORD_BYTES, 0)) != found.record or not _read_frame(fd, into, turn):
                        return False
                    self._room.touch(fd, found.record)
            except OSError as error:
                if not is_gone(error):
                    raise
                return False
            return True

        return self._calls.run(read)

    def put(self, record: Record, frame: Sequence[memoryview]) -> bool:
        preamble = memoryview(pack(record).ljust(PREAMBLE_BYTES, b"\0"))
        size = PREAMBLE_BYTES + sum(map(len, frame))

        def write(turn: Turn) -> bool:
            directory = directory_of(self._epochs.current(turn), record.key)
            path = directory / OBJECT
            try:
                if self._files.is_there(path):
                    return False
            except NotADirectoryError:  # a link in its place, unless one above it is none, which is a fault
                self._files.remove(directory, turn)
            is_ours = False
            self._room.begin(directory)
            try:
                is_ours = self._files.publish(path, [preamble, *frame], turn)
                if is_ours:  # before a sweep sees it: as old as its last use
                    with contextlib.suppress(FileNotFoundError), self._files.opened(path) as fd:
                        self._room.touch(fd, record, is_new=True)
            finally:
                if self._room.end(directory, size if is_ours else 0):
                    self._sweep_soon()
            return is_ours

        try:
            return self._calls.run(write)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                self._sweep_soon(is_full=True)
            raise

    def mark(self, marks: Mapping[ChunkKey, Sequence[bytes]]) -> None:
        def write(turn: Turn) -> None:
            epoch = self._epochs.current(turn)
            for key, added in marks.items():
                for mark in added:
                    self._files.create(directory_of(epoch, key) / mark.hex(), turn)

        self._calls.run(write)

    def delete(self, keys: Sequence[ChunkKey], tenant: int = 0) -> None:
        def remove(turn: Turn) -> None:
            epoch = self._epochs.current(turn)
            for key in keys:
                self._files.remove(directory_of(epoch, key), turn)

        self._calls.run(remove)

    def sweep(self, *, is_full: bool = False) -> None:
        """Delete objects until the rest fits, and what was left behind. Called by `put` when it is due.

        is_full:  delete some in any case.
        Blocks:   for a look at every object.
        """
        self._calls.run(lambda turn: self._room.sweep(turn, is_full=is_full))

    def usage(self) -> StoreUsage:
        """As of the last sweep, and what was put here since. Blocks, the first time, for a look at every object."""
        return self._room.usage or self._calls.run(self._room.look)

    def close(self) -> None:
        self._calls.close()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _sweep_soon(self, *, is_full: bool = False) -> None:
        """Sweep on a thread of its own, unless one is at it."""

        def sweep() -> None:
            try:
                self.sweep(is_full=is_full)
            except OSError as error:
                logger.warning("l2_sweep_failed error=%s", error)

        with self._lock:
            if self._sweeper is None or not self._sweeper.is_alive():
                self._sweeper = threading.Thread(target=sweep, name="hotspan-l2-sweep", daemon=True)
                self._sweeper.start()


def _found(objects: int, key: ChunkKey) -> Found | None:
    try:
        place = open_below(objects, place_of(key), READ | os.O_DIRECTORY)
        try:
            fd = os.open(OBJECT, READ, dir_fd=place)
            try:
                record = unpack(os.pread(fd, RECORD_BYTES, 0))
            finally:
                os.close(fd)
            names = os.listdir(place)  # of the directory that the object is in, even if it was renamed away
        finally:
            os.close(place)
    except OSError as error:
        if not is_gone(error):
            raise
        return None
    if record is None or record.key != key:
        return None
    return Found(record, marked(record.terms, [bytes.fromhex(name) for name in names if _MARK.fullmatch(name)]))


def _read_frame(fd: int, into: Sequence[memoryview], turn: Turn) -> bool:
    """By way of the thread's own memory: a read that hangs must not end in a buffer that has gone to another use."""
    at = PREAMBLE_BYTES
    for views in parts_of(into, IO_BYTES):
        part = turn.staging[: sum(map(len, views))]
        got = 0
        while got < len(part):
            count = os.preadv(fd, [part[got:]], at + got)
            if not count:
                return False
            got += count
            turn.step()
        turn.copy(part, views)
        at += got
    return True
