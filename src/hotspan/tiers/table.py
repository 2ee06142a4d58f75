"""The disk tier's index on disk: one fixed 256-byte record a slot. It is the truth; a dict in RAM mirrors it.

    table file: [ superblock 4096 ][ record 0 ][ record 1 ] ... [ record slots-1 ]

A record names the chunk in the slot of the same number, and the terms on which it is kept. It is written after the
chunk's bytes; every read verifies the frame against the key, so a record that outlived its bytes (a crash, a lost
write) costs a miss and no more. A record lies within one sector: it is there whole or not at all.
"""

import errno
import logging
import math
import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from hotspan.core.frame import HEADER_BYTES
from hotspan.core.terms import WINDOW, Scope
from hotspan.core.types import PAGE_BYTES, ChunkKey, round_up
from hotspan.tiers.files import Files, read_all, read_sound, whole
from hotspan.tiers.log import Invalidation
from hotspan.tiers.record import (
    ASIDE,
    CHECK_AT,
    HAS_PARENT,
    IS_WILD,
    LIVE,
    PART_BITS_AT,
    RECORD_BYTES,
    RECORD_LABELS,
    SIZE_BITS,
    Flaw,
    Record,
    pack_aside,
    pack_parts,
    unpack,
)

logger = logging.getLogger(__name__)

_Slots = np.ndarray[Any, Any]
_BAD_PLACE = (errno.EIO, errno.ENODATA)
_MAX_RENEWALS = 4
"""Of one opening: a disk that goes on failing is given up."""

SUPERBLOCK_BYTES = PAGE_BYTES
_MAGIC = b"HOTSPANT"
_FEW_LABELS = 4
_VERSION = 2
_SUPER = struct.Struct("<8sIIQQ")  # magic, version, record bytes, slot bytes, slots; then xxh3-64 of those

_DTYPE = np.dtype(
    {
        "names": [
            "magic",
            "flags",
            "key",
            "parent",
            "namespace",
            "payload_bytes",
            "generation",
            "expires_s",
            "tenant",
            "adapter",
            "stamp",
            "labels",
            "check",
        ],
        "formats": ["<u4", "<u2", "V32", "V32", "V32", *["<u8"] * 6, f"({RECORD_LABELS},)<u8", ">u8"],
        "offsets": [0, 4, 8, 40, 72, 104, 112, 120, 128, 136, 144, 152, CHECK_AT],
        "itemsize": RECORD_BYTES,
    }
)


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


class DiskTable:
    """The table file, and its records as they are on disk or about to be.

    One thread (the scheduler's) changes what is in memory; `write` puts a slot's record on disk as it is by then, and
    may be called from any thread: whatever the order of writes, the last one says what memory says.
    """

    def __init__(self, files: Files, fd: int, geometry: Geometry, path: Path | None = None) -> None:
        """path: of the file, which is written anew, beside itself, where the disk does not take a record."""
        self.geometry = geometry
        self._files = files
        self._fd = fd
        self._path = path
        self._renewals = 0
        self._memory = bytearray(RECORD_BYTES * geometry.slots)
        self._records: np.ndarray[Any, Any] = np.frombuffer(self._memory, _DTYPE)
        self._is_head = bytearray(geometry.slots)  # whether a slot holds the first part of a chunk
        self._heads: np.ndarray[Any, Any] = np.frombuffer(self._is_head, bool)
        self._writing = threading.Lock()
        self._windows: set[int] = set()  # the first slots of windows
        self._unwritten: set[int] = set()  # slots of which the file may say something else
        self._is_synced = True
        self._soonest_s = 0.0  # before that nothing expires

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
        self._soonest_s = 0.0
        view, digest = memoryview(self._memory), xxhash.xxh3_64_intdigest
        slots = np.flatnonzero(np.isin(self._records["magic"], (LIVE, ASIDE))).tolist()
        for slot, check in zip(slots, self._records["check"][slots].tolist(), strict=True):
            at = slot * RECORD_BYTES
            if digest(view[at : at + CHECK_AT]) != check:
                self._records["magic"][slot] = 0
        self._heads[:] = (self._records["magic"] == LIVE) & (self._records["flags"] >> PART_BITS_AT == 0)
        is_window = (self._records["labels"] == WINDOW).any(axis=1)
        self._windows = set(np.flatnonzero(self._heads & is_window).tolist())

    def _load(self) -> None:
        data = read_sound(self._files, self._fd, SUPERBLOCK_BYTES, len(self._memory))
        self._memory[: len(data)] = data
        self._memory[len(data) :] = bytes(len(self._memory) - len(data))

    def _head(self) -> bytes:
        fields = _SUPER.pack(_MAGIC, _VERSION, RECORD_BYTES, self.geometry.slot_bytes, self.geometry.slots)
        return fields + xxhash.xxh3_64_digest(fields)

    def slots(self) -> list[int]:
        """The slots that hold a chunk, in order."""
        found: list[int] = np.flatnonzero(self._records["magic"] == LIVE).tolist()
        return found

    def empty(self) -> list[int]:
        """The slots that hold nothing and may be used, in order."""
        found: list[int] = np.flatnonzero(~np.isin(self._records["magic"], (LIVE, ASIDE))).tolist()
        return found

    def aside(self) -> dict[int, Flaw]:
        """The slots that are set aside."""
        slots = np.flatnonzero(self._records["magic"] == ASIDE).tolist()
        known = {flaw.value for flaw in Flaw}
        flaws = (flags if flags in known else Flaw.READ for flags in self._records["flags"][slots].tolist())
        return dict(zip(slots, map(Flaw, flaws), strict=True))

    def set_aside(self, flaws: Mapping[int, Flaw]) -> None:
        """Say in memory that these slots hold nothing and are not to be used."""
        self.free(flaws)
        for slot, flaw in flaws.items():
            self._memory[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES] = pack_aside(flaw)

    def heads(self) -> list[int]:
        """The first slots of all chunks, in order."""
        found: list[int] = np.flatnonzero(self._heads).tolist()
        return found

    def summaries(self) -> Iterator[tuple[int, int, ChunkKey, ChunkKey | None, bytes, int, int, int, int]]:
        """(slot, part, key, parent, namespace, tenant, expires_s, payload bytes, stamp); half a microsecond each."""
        slots = self.slots()
        names = ("flags", "key", "parent", "namespace", "tenant", "expires_s", "payload_bytes", "stamp")
        columns = (self._records[name][slots].tolist() for name in names)
        for slot, flags, key, parent, namespace, tenant, expires_s, size, stamp in zip(slots, *columns, strict=True):
            above = ChunkKey(parent) if flags & HAS_PARENT else None
            size &= (1 << SIZE_BITS) - 1
            yield slot, flags >> PART_BITS_AT, ChunkKey(key), above, namespace, tenant, expires_s, size, stamp

    def record(self, slot: int) -> Record:
        """What stands in `slot`. Raises: KeyError if nothing does."""
        found = unpack(bytes(self._memory[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES]))
        if found is None:
            raise KeyError(f"slot {slot} holds no chunk")
        return found

    def put(self, slot: int, record: Record) -> None:
        """Say in memory what stands in `slot`."""
        self.put_parts([slot], record)

    def put_parts(self, slots: Sequence[int], record: Record) -> None:
        """Say in memory that a chunk stands in these slots, one part of it in each, from that of `record` on."""
        data = pack_parts(record, len(slots))
        for nth, slot in enumerate(slots):
            at = slot * RECORD_BYTES
            self._memory[at : at + RECORD_BYTES] = data[nth * RECORD_BYTES : (nth + 1) * RECORD_BYTES]
            self._is_head[slot] = record.part + nth == 0
        self._change(slots)
        if record.terms.is_window and not record.part:
            self._windows.add(slots[0])
        if record.terms.expires_s:
            self._soonest_s = min(self._soonest_s, record.terms.expires_s)

    def free(self, slots: Iterable[int]) -> None:
        """Say in memory that nothing stands in these slots."""
        for slot in slots:
            self._memory[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES] = bytes(RECORD_BYTES)
            self._is_head[slot] = False
        self._change(slots)

    def _change(self, slots: Iterable[int]) -> None:
        self._unwritten.update(slots)
        self._windows.difference_update(slots)

    def taken(
        self,
        scopes: Iterable[Scope],
        before: int | None = None,
        slot_of: Callable[[ChunkKey], int | None] | None = None,
    ) -> list[int]:
        """First slots of chunks that an invalidation takes, without descendants; below generation `before`, if given.

        slot_of: finds a key's slot, so that keys cost nothing but themselves and the windows that there are.

        Costs about 5 ns a slot, and 20 ns for each slot of a tenant and each of its scopes; above a few scopes by label
        100 ns for each slot of the tenant, and for each scope what it finds.
        """
        live = self._heads.copy()
        if before is not None:
            live[live] = self._records["generation"][live] < before
        of: dict[int | None, _Slots] = {None: np.flatnonzero(live)}
        scopes, found = list(dict.fromkeys(scopes)), set[int]()
        labels: dict[int | None, set[int]] = {}  # one of each scope's that names labels, by tenant
        for scope in scopes:
            if scope.labels and scope.keys is None:
                labels.setdefault(scope.tenant, set()).add(min(scope.labels))
        labelled: dict[int | None, dict[int, _Slots]] = {}
        for scope in scopes:
            if scope.keys is not None and slot_of is not None:
                named = [slot for key in scope.keys if (slot := slot_of(key)) is not None]
                slots = np.array([*{*named, *self._windows}], np.intp)
                slots = slots[live[slots]]
            else:
                if scope.tenant not in of:
                    of[scope.tenant] = of[None][self._records["tenant"][of[None]] == scope.tenant]
                slots = of[scope.tenant]
                if scope.labels and scope.keys is None and len(labels[scope.tenant]) > _FEW_LABELS:
                    if scope.tenant not in labelled:
                        labelled[scope.tenant] = self._by_label(slots, labels[scope.tenant])
                    slots = labelled[scope.tenant][min(scope.labels)]
            found.update(self._narrowed(slots, scope))
        return sorted(found)

    def _by_label(self, slots: _Slots, labels: set[int]) -> dict[int, _Slots]:
        """For each label those of some slots whose chunks have it, or may have it."""
        records = self._records
        wild = slots[(records["flags"][slots] & IS_WILD) != 0]
        rows, columns = np.nonzero(records["labels"][slots])
        named = records["labels"][slots[rows], columns]
        is_wanted = np.isin(named, np.array(sorted(labels), np.uint64))
        rows, named = rows[is_wanted], named[is_wanted]
        in_order = np.argsort(named, kind="stable")
        rows, named = rows[in_order], named[in_order]
        found = {}
        for label in labels:
            first, last = (np.searchsorted(named, np.uint64(label), side) for side in ("left", "right"))
            found[label] = np.concatenate((slots[rows[first:last]], wild))
        return found

    def are_of(self, namespace: bytes, slots: Sequence[int]) -> list[bool]:
        """For each slot whether its chunk is of a namespace."""
        found: list[bool] = (self._records["namespace"][np.asarray(slots, np.int64)] == np.void(namespace)).tolist()
        return found

    def _narrowed(self, slots: _Slots, scope: Scope) -> list[int]:
        """Those of some slots whose chunks a scope takes."""
        records = self._records
        for name in ("tenant", "adapter"):
            if (wanted := getattr(scope, name)) is not None:
                slots = slots[records[name][slots] == wanted]
        if scope.namespace is not None:
            slots = slots[records["namespace"][slots] == np.void(scope.namespace)]
        for label in scope.labels:
            is_wild = (records["flags"][slots] & IS_WILD) != 0
            slots = slots[is_wild | (records["labels"][slots] == label).any(axis=1)]
        found: list[int] = slots.tolist()
        if scope.keys is None:
            return found
        return [slot for slot in found if slot in self._windows or self.key(slot) in scope.keys]

    def deleted(self, entries: Iterable[Invalidation]) -> list[int]:
        """First slots of chunks that invalidations of the past took, descendants included."""
        children: dict[bytes, list[int]] = {}
        found: set[int] = set()
        for entry in entries:
            slots = self.taken(entry.scopes, entry.generation)
            todo = {self.key(slot) for slot in slots}.union(*(scope.keys or () for scope in entry.scopes))
            found.update(slots)
            if todo and not children:
                children = self._children()
            while todo:
                named = [child for child in children.get(todo.pop(), ()) if child not in found]
                fresh = [child for child in named if self._records["generation"][child] < entry.generation]
                found.update(fresh)
                todo.update(map(self.key, fresh))
        return sorted(found)

    def _children(self) -> dict[bytes, list[int]]:
        """The slots of what stands on each chunk."""
        names = np.frombuffer(self._memory, np.uint8).reshape(-1, RECORD_BYTES)
        children: dict[bytes, list[int]] = {}
        heads = np.flatnonzero(self._heads)
        for slot in heads[self._records["flags"][heads] & HAS_PARENT != 0]:
            children.setdefault(names[slot, 40:72].tobytes(), []).append(int(slot))
        return children

    def newest_generation(self) -> int:
        """The highest generation that a record says."""
        live = self._records[self._records["magic"] == LIVE]
        return int(live["generation"].max()) if len(live) else 0

    def expired(self, now_s: float) -> list[int]:
        """First slots of chunks whose time is over. Costs nothing while that of none is, else about 40 ns a chunk."""
        if now_s < self._soonest_s:
            return []
        heads = np.flatnonzero(self._heads)
        timed = heads[self._records["expires_s"][heads] != 0]
        ends = self._records["expires_s"][timed]
        self._soonest_s = float(ends.min()) if len(ends) else math.inf
        slots: list[int] = timed[ends <= int(now_s)].tolist()
        return slots

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

    def key(self, slot: int) -> ChunkKey:
        """The key in the record of `slot`."""
        return ChunkKey(bytes(self._memory[slot * RECORD_BYTES + 8 : slot * RECORD_BYTES + 40]))


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
