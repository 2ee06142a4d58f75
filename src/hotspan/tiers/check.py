"""Verification of everything in a disk tier's directory, while it is served or while it is not."""

import mmap
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hotspan.core.clock import Clock, SystemClock
from hotspan.core.errors import DirectoryError
from hotspan.core.frame import HEADER_BYTES, FrameFault, FrameIdentity
from hotspan.core.progress import Progress
from hotspan.core.types import PAGE_BYTES, ChunkKey, round_up
from hotspan.tiers.base import FrameKeys
from hotspan.tiers.directory import TIER, OpenDirectory, open_directory
from hotspan.tiers.files import Files
from hotspan.tiers.io import FrameFile, staging_bytes
from hotspan.tiers.owned import explained
from hotspan.tiers.places import PlaceTests
from hotspan.tiers.record import Flaw, Record
from hotspan.tiers.table import DiskTable, read_geometry

Quarantine = Callable[[int, ChunkKey, Mapping[int, Flaw]], None]
"""Told of the first slot of a chunk whose frame is not what its record says, and which of its slots can't be read."""


class Stay(Protocol):
    """A chunk's stay on the disk, while which its slots hold nothing else."""

    @property
    def slots(self) -> Sequence[int]:
        """In the order of its bytes."""
        ...


Stored = Callable[[int, ChunkKey], Stay | None]
"""The stay of the chunk whose first slot that is; None if it is not there, or not yet whole."""


@dataclass(slots=True)
class CheckReport:
    """What a check found, in chunks.

    whole:   every byte is as it was stored. expired: its time is over. locked: its key is not to be had here.
    corrupt: by fault; these were quarantined. unreadable: the disk failed; if it did again while it works elsewhere,
             the chunk is forgotten.
    bad_slots: that are set aside, those of this check included.
    """

    chunks: int = 0
    whole: int = 0
    expired: int = 0
    locked: int = 0
    unreadable: int = 0
    bad_slots: int = 0
    corrupt: Counter[str] = field(default_factory=Counter)
    bytes: int = 0
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """A dict of JSON types."""
        return asdict(self) | {"corrupt": dict(self.corrupt)}


class FrameCheck:
    """Reads every frame once and holds it against its record. Runs on any thread, beside a tier that works.

    chunk_bytes: of the largest payload.
    """

    def __init__(
        self,
        directory: OpenDirectory,
        keys: FrameKeys | None,
        stored: Stored,
        quarantine: Quarantine,
        chunk_bytes: int,
        clock: Clock | None = None,
    ) -> None:
        self._chunk_bytes = chunk_bytes
        self._directory = directory
        self._keys = keys
        self._stored = stored
        self._quarantine = quarantine
        self._clock = clock or SystemClock()
        self._frames = FrameFile(directory.files, directory.slab_fd, directory.geometry.slot_bytes)
        self._tests = PlaceTests(directory, self._clock)
        self._bad: set[int] = set()

    def run(self, progress: Progress | None = None) -> dict[str, Any]:
        """The report, as JSON types. Blocks: for one read of all that is stored."""
        started = time.monotonic()
        report = CheckReport()
        with (
            mmap.mmap(-1, round_up(self._chunk_bytes, PAGE_BYTES)) as room,
            mmap.mmap(-1, HEADER_BYTES + staging_bytes(self._chunk_bytes)) as pages,
            memoryview(room) as payload,
            memoryview(pages) as scratch,
        ):
            slots = self._directory.table.heads()
            if progress is not None:
                progress.of(len(slots))
            for slot in slots:
                self._look(slot, scratch, payload, report)
                if progress is not None:
                    progress.advance()
        report.bad_slots = len(self._bad | self._directory.table.aside().keys())
        report.seconds = time.monotonic() - started
        return report.to_json()

    def _look(self, slot: int, scratch: memoryview, payload: memoryview, report: CheckReport) -> None:
        record = self._record(slot)
        stay = None if record is None else self._stored(slot, record.key)
        if record is None or stay is None:
            return  # evicted meanwhile, or still being written
        report.chunks += 1
        now_s = self._clock.unix()
        if 0 < record.terms.expires_s <= now_s:
            report.expired += 1
            return
        try:
            with payload[: record.payload_bytes] as into:
                fault = self._read(stay.slots, record, scratch, into, now_s)
        except OSError:
            report.unreadable += 1
            if flaws := self._tests.test(stay.slots, keeps=True).flaws:
                self._bad |= flaws.keys()
                self._quarantine(slot, record.key, flaws)
            return
        if self._stored(slot, record.key) is not stay:
            report.chunks -= 1  # the slot was given to another chunk while it was read
        elif fault is None:
            report.whole += 1
            report.bytes += record.chunk_bytes
        elif fault is FrameFault.EXPIRED:
            report.expired += 1
        elif fault is FrameFault.SHREDDED or (fault is FrameFault.ALGORITHM and self._keys is None):
            report.locked += 1
        else:
            report.corrupt[fault.value] += 1
            self._quarantine(slot, record.key, {})

    def _read(
        self, slots: Sequence[int], record: Record, scratch: memoryview, into: memoryview, now_s: float
    ) -> FrameFault | None:
        """Read what is stored, which its tags verify; what is compressed stays so."""
        identity = FrameIdentity(record.key, record.namespace, record.stamp, unpacked_bytes=record.unpacked_bytes)
        if self._keys is None:
            return self._frames.read(slots, scratch[:HEADER_BYTES], into, identity, now_s)
        return self._frames.read_sealed(slots, scratch, into, identity, now_s, self._keys.opening)

    def _record(self, slot: int) -> Record | None:
        try:
            return self._directory.table.record(slot)
        except KeyError:
            return None


def check_offline(path: Path, keys: FrameKeys | None) -> dict[str, Any]:
    """Verify a directory that no server uses, and quarantine what is corrupt; the report of `FrameCheck.run`.

    Raises: DirectoryError if it is in use, no disk tier's, or can't be read or written.
    """
    try:
        return _check_offline(path, keys)
    except OSError as error:
        raise explained(path, error, TIER.whose) from error


def open_unused(path: Path) -> OpenDirectory:
    """A directory that no server uses, as it was made. Raises: DirectoryError; OSError."""
    files = Files()
    table = path / TIER.table
    if not table.exists():
        raise DirectoryError(f"{path} is no disk tier's directory: it has no table")
    fd = files.open(table, os.O_RDONLY)
    try:
        geometry = read_geometry(files, fd)
    finally:
        files.close(fd)
    if geometry is None:
        raise DirectoryError(f"{path} was made by another version of hotspan or is damaged: a server begins it anew")
    return open_directory(path, geometry.slot_bytes, geometry.slab_bytes, is_new=False, step_bytes=0)


def _check_offline(path: Path, keys: FrameKeys | None) -> dict[str, Any]:
    directory = open_unused(path)
    geometry = directory.geometry
    chunks, quarantined = _whole_chunks(directory.table), dict[int, Flaw]()

    def quarantine(slot: int, key: ChunkKey, flaws: Mapping[int, Flaw]) -> None:
        quarantined.update(flaws)
        directory.table.free([slot])
        directory.table.write(slot)

    try:
        with Progress(f"checking {path}", unit="chunks") as progress:
            largest = max((len(chunk.slots) for chunk in chunks.values()), default=1) * geometry.slot_bytes
            check = FrameCheck(directory, keys, lambda slot, key: chunks.get(slot), quarantine, largest)
            report = check.run(progress)
        directory.table.set_aside(quarantined)
        directory.table.write_all(quarantined)
        directory.table.sync()
    finally:
        directory.close()
    return report


@dataclass(frozen=True, slots=True)
class _Slots:
    """A chunk's slots, in a directory that nothing else uses."""

    slots: Sequence[int]


def _whole_chunks(table: DiskTable) -> dict[int, _Slots]:
    """The slots of each chunk whose records are all there, by its first."""
    parts: dict[tuple[ChunkKey, int], dict[int, int]] = {}
    for slot in table.slots():
        record = table.record(slot)
        parts.setdefault((record.key, record.stamp), {})[record.part] = slot
    found = {}
    for of in parts.values():
        if of.keys() == set(range(table.geometry.slots_for(table.record(next(iter(of.values()))).payload_bytes))):
            found[of[0]] = _Slots([of[part] for part in range(len(of))])
    return found
