"""The disk tier's index on disk: one fixed 256-byte record a slot. It is the truth; a dict in RAM mirrors it.

    table file: [ superblock 4096 ][ record 0 ][ record 1 ] ... [ record slots-1 ]

A record names the chunk in the slot of the same number, and the terms on which it is kept. It is written after the
chunk's bytes; every read verifies the frame against the key, so a record that outlived its bytes (a crash, a lost
write) costs a miss and no more. A record lies within one sector: it is there whole or not at all.
"""

import errno
import logging
import os
import struct
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from hotspan.core.frame import HEADER_BYTES
from hotspan.core.types import PAGE_BYTES, round_up
from hotspan.tiers.files import Files, read_all, read_sound, whole
from hotspan.tiers.record import RECORD_BYTES
from hotspan.tiers.slot_records import SlotRecords

logger = logging.getLogger(__name__)

_BAD_PLACE = (errno.EIO, errno.ENODATA)
_MAX_RENEWALS = 4
"""Of one opening: a disk that goes on failing is given up."""

SUPERBLOCK_BYTES = PAGE_BYTES
_MAGIC = b"HOTSPANT"
_VERSION = 2
_SUPER = struct.Struct("<8sIIQQ")  # magic, version, record bytes, slot bytes, slots; then xxh3-64 of those


@dataclass(frozen=True, slots=True)
class Geometry:
    """The shape of a slab on disk: equal slots, each one frame."""

    slot_bytes: int
    slots: int

    def slots_for(self, payload_bytes: int) -> int:
        """How many slots a frame with such a payload takes."""
        return -(-(HEADER_BYTES + round_up(payload_bytes, PAGE_BYTES)) // self.slot_bytes)

    @property
    def slab_bytes(self) -> int:
        return self.slot_bytes * self.slots

    @property
    def table_bytes(self) -> int:
        return SUPERBLOCK_BYTES + RECORD_BYTES * self.slots


def is_table(files: Files, fd: int) -> bool:
    """Whether a file was made for a table, of whatever version."""
    return read_all(files, fd, 0, len(_MAGIC)) == _MAGIC


def read_geometry(files: Files, fd: int) -> Geometry | None:
    """The geometry that an existing table was made for, or None if it is no whole table.

    Raises: OSError unless it is only this page that can't be read: then what the table had is lost.
    """
    data = read_sound(files, fd, 0, SUPERBLOCK_BYTES + 1)[: _SUPER.size + 8]
    if len(data) < _SUPER.size + 8:
        return None
    magic, version, record_bytes, slot_bytes, slots = _SUPER.unpack_from(data)
    is_whole = xxhash.xxh3_64_digest(data[: _SUPER.size]) == data[_SUPER.size :]
    if not is_whole or magic != _MAGIC or version != _VERSION or record_bytes != RECORD_BYTES:
        return None
    return Geometry(slot_bytes, slots)


class DiskTable(SlotRecords):
    """The table file, and its records as they are on disk or about to be.

    One thread (the scheduler's) changes what is in memory; `write` puts a slot's record on disk as it is by then, and
    may be called from any thread: whatever the order of writes, the last one says what memory says.
    """

    def __init__(self, files: Files, fd: int, geometry: Geometry, path: Path | None = None) -> None:
        """path: of the file, which is written anew, beside itself, where the disk does not take a record."""
        super().__init__(geometry.slots)
        self.geometry = geometry
        self._files = files
        self._fd = fd
        self._path = path
        self._renewals = 0
        self._writing = threading.Lock()
        self._unwritten: set[int] = set()  # slots of which the file may say something else
        self._is_synced = True

    def format(self) -> None:
        """Write the superblock. Records stay, if the table was made for slots of this size; new slots are free."""
        found = read_geometry(self._files, self._fd)
        if found is None or found.slot_bytes != self.geometry.slot_bytes:
            self._files.truncate(self._fd, 0)
        self._files.truncate(self._fd, self.geometry.table_bytes)
        data = self._head()
        try:
            whole(self._files.pwrite(self._fd, data, 0), len(data))
        except OSError as error:
            self._load()
            if not self._renewed(error.errno):
                raise

    def read(self) -> None:
        """Take over what the file says; a torn or foreign record is a free slot.

        Blocks: for one sequential read and about 0.3 microseconds a live record.
        """
        self._load()
        self._look()

    def _load(self) -> None:
        data = read_sound(self._files, self._fd, SUPERBLOCK_BYTES, len(self._memory))
        self._memory[: len(data)] = data
        self._memory[len(data) :] = bytes(len(self._memory) - len(data))

    def _head(self) -> bytes:
        fields = _SUPER.pack(_MAGIC, _VERSION, RECORD_BYTES, self.geometry.slot_bytes, self.geometry.slots)
        return fields + xxhash.xxh3_64_digest(fields)

    def _change(self, slots: Iterable[int]) -> None:
        self._unwritten.update(slots)
        super()._change(slots)

    def write(self, slot: int) -> None:
        """Put a slot's record on disk, unsynced. Raises: OSError."""
        self.write_all([slot])

    def write_all(self, slots: Iterable[int]) -> None:
        """Put the records of slots on disk, unsynced; those of adjacent slots in one write. Raises: OSError."""
        for run in _runs(slots):
            with self._writing:
                self._unwritten.difference_update(run)
                self._is_synced = False
                data = bytes(self._memory[run.start * RECORD_BYTES : run.stop * RECORD_BYTES])
                try:
                    whole(self._files.pwrite(self._fd, data, SUPERBLOCK_BYTES + run.start * RECORD_BYTES), len(data))
                except OSError as error:
                    self._unwritten.update(run)
                    if not self._renewed(error.errno):
                        raise

    @property
    def is_dirty(self) -> bool:
        """Whether a power loss now would leave something else on the disk than memory says."""
        return bool(self._unwritten) or not self._is_synced

    def flush(self) -> None:
        """Put all on disk that memory says, durably. From any thread. Raises: OSError.

        The record of a chunk whose bytes are still being written may get there before them: it costs a miss.
        """
        with self._writing:  # a write that has begun on another thread ends first: if it fails, it is one of these
            unwritten = list(self._unwritten)
        for slot in unwritten:
            self.write(slot)
        self.sync()

    def clear(self) -> None:
        """Nothing stands anywhere, durably. What is set aside stays so."""
        aside = self.aside()
        self._memory[:] = bytes(len(self._memory))
        self._heads[:] = False
        self._windows.clear()
        self._files.truncate(self._fd, SUPERBLOCK_BYTES)
        self._files.truncate(self._fd, self.geometry.table_bytes)
        self.set_aside(aside)
        self.write_all(aside)
        self.sync()

    def sync(self) -> None:
        """Make all records durable against a power loss. Raises: OSError; then `flush` will write every one again.

        What a failed sync left unwritten, the kernel would call written at the next one.
        """
        with self._writing:  # not between the two halves of a write
            self._is_synced = True
        try:
            self._files.sync(self._fd)
        except OSError as error:
            self._is_synced = False
            self._unwritten.update(range(self.geometry.slots))
            with self._writing:
                if not self._renewed(error.errno):
                    raise

    def _renewed(self, number: int | None) -> bool:
        """Whether all that memory says was written, durably, into a new file in the place of this one.

        It is after an error by which the disk may have a bad place here, and if it takes the new file.
        """
        if self._path is None or number not in _BAD_PLACE or self._renewals >= _MAX_RENEWALS:
            return False
        self._renewals += 1
        fresh = self._path.with_name(self._path.name + ".new")
        try:
            self._write_anew(fresh, self._path)
        except OSError:
            self._unwritten.update(range(self.geometry.slots))
            return False
        logger.warning("disk_table_moved path=%s errno=%d", self._path, number or 0)
        return True

    def _write_anew(self, fresh: Path, path: Path) -> None:
        fd = self._files.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            self._unwritten.clear()
            data = self._head().ljust(SUPERBLOCK_BYTES, b"\0") + bytes(self._memory)
            whole(self._files.pwrite(fd, data, 0), len(data))
            self._files.sync(fd)
            self._files.replace(fresh, path)
        except BaseException:
            if fresh.exists():
                self._files.close(fd)
            else:  # it has the name already
                self._files.redirect(self._fd, fd)
            raise
        self._files.redirect(self._fd, fd)
        self._is_synced = True


def _runs(slots: Iterable[int]) -> Iterator[range]:
    """Slots in their order, adjacent ones together."""
    run = range(0)
    for slot in slots:
        if run and slot != run.stop:
            yield run
            run = range(0)
        run = range(run.start if run else slot, slot + 1)
    if run:
        yield run
