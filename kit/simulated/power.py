"""Power losses: what a directory may look like after one, for a run that was recorded.

    files = RecordingFiles(directory)
    ... run a tier on it, files.mark("acknowledged ...") ...
    for image in power_loss_images(files.recording, seed):
        image.restore(fresh_directory)          # then open it and look

Before the cut, what was written and then synced is there. Of what was written since, every write may be there, missing,
or torn at 512 bytes or 4 KiB, in any combination, whatever the order in which it was written; a change of size may be
missing with all that came after it in that file; a file may be missing if the directory was not synced since it was
made. A rename is durable when it returns (tiers/files.py syncs the directory), and is there whole or not at all.
"""

import itertools
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hotspan.core.types import PAGE_BYTES
from hotspan.tiers.files import Buffer, Files

_TEARS = (512, PAGE_BYTES)


@dataclass(frozen=True, slots=True)
class _Write:
    file: int
    at: int
    data: bytes


@dataclass(frozen=True, slots=True)
class _Resize:
    file: int
    size: int


@dataclass(frozen=True, slots=True)
class _Sync:
    file: int


@dataclass(frozen=True, slots=True)
class _Create:
    file: int
    name: str
    data: bytes | None  # what it held when the recording began; None for a new file


@dataclass(frozen=True, slots=True)
class _Rename:
    source: str
    target: str


@dataclass(frozen=True, slots=True)
class _Mark:
    value: Any


_Event = _Write | _Resize | _Sync | _Create | _Rename | _Mark


@dataclass(slots=True)
class Recording:
    """What reached the files, in order. Files are numbered, since names move."""

    events: list[_Event] = field(default_factory=list)

    @property
    def moments(self) -> int:
        """How many moments there are to lose power at."""
        return len(self.events) + 1


class RecordingFiles(Files):
    """The machine's own calls, with a record of all that changes a file in `directory`. One thread at a time."""

    def __init__(self, directory: Path) -> None:
        self.recording = Recording()
        self._directory = directory
        self._numbers: dict[str, int] = {}
        self._fds: dict[int, int] = {}
        self._made = 0

    def mark(self, value: Any) -> None:
        """Remember that the run got here: an image lists the marks before its cut."""
        self.recording.events.append(_Mark(value))

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        is_new = not path.exists()
        is_known = not is_new and path.name in self._numbers
        data = None if is_new or is_known else path.read_bytes()
        fd = super().open(path, flags, mode)
        if path.parent == self._directory:
            if not is_known:
                self._made += 1
                self._numbers[path.name] = self._made
                self._record(_Create(self._made, path.name, data))
            self._fds[fd] = self._numbers[path.name]
            if flags & os.O_TRUNC and not is_new:
                self._record(_Resize(self._fds[fd], 0))
        return fd

    def close(self, fd: int) -> None:
        super().close(fd)
        self._fds.pop(fd, None)

    def redirect(self, fd: int, to: int) -> None:
        number = self._fds.get(to)
        super().redirect(fd, to)
        if number is not None:
            self._fds[fd] = number

    def pwrite(self, fd: int, data: Buffer, at: int) -> int:
        moved = super().pwrite(fd, data, at)
        self._write(fd, at, bytes(data[:moved]))
        return moved

    def pwritev(self, fd: int, buffers: Sequence[memoryview], at: int) -> int:
        moved = super().pwritev(fd, buffers, at)
        self._write(fd, at, b"".join(buffers)[:moved])
        return moved

    def truncate(self, fd: int, size: int) -> None:
        before = os.fstat(fd).st_size
        super().truncate(fd, size)
        if fd in self._fds and size != before:
            self._record(_Resize(self._fds[fd], size))

    def punch(self, fd: int, size: int, at: int) -> None:
        super().punch(fd, size, at)
        self._write(fd, at, bytes(max(0, min(size, os.fstat(fd).st_size - at))))

    def sync(self, fd: int) -> None:
        super().sync(fd)
        if fd in self._fds:
            self._record(_Sync(self._fds[fd]))

    def replace(self, source: Path, target: Path) -> None:
        super().replace(source, target)
        self._numbers[target.name] = self._numbers.pop(source.name)
        self._record(_Rename(source.name, target.name))

    def _write(self, fd: int, at: int, data: bytes) -> None:
        if fd in self._fds:
            self._record(_Write(self._fds[fd], at, data))

    def _record(self, event: _Event) -> None:
        self.recording.events.append(event)


@dataclass(frozen=True, slots=True)
class PowerLoss:
    """One directory as a power loss may have left it.

    cut:   after how many events it came. marks: what the run had marked by then.
    """

    cut: int
    files: dict[str, bytes]
    marks: list[Any]

    def restore(self, directory: Path) -> None:
        """Make `directory` this image, and nothing else. It is made if it is not there."""
        directory.mkdir(mode=0o700, exist_ok=True)
        for name in set(os.listdir(directory)) - self.files.keys():
            (directory / name).unlink()
        for name, data in self.files.items():
            (directory / name).write_bytes(data)


def power_loss_images(recording: Recording, seed: int, count: int | None = None) -> Iterator[PowerLoss]:
    """Images of power losses at random moments: as many as are asked for, or without end."""
    rng = random.Random(seed)
    made = 0
    while count is None or made < count:
        made += 1
        yield power_loss(recording, rng.randrange(recording.moments), rng)


def power_loss(recording: Recording, cut: int, rng: random.Random) -> PowerLoss:
    """One image of a power loss after the first `cut` events."""
    events = recording.events[:cut]
    synced = {event.file: index for index, event in enumerate(events) if isinstance(event, _Sync)}
    data: dict[int, bytearray] = {}
    names: dict[str, int] = {}
    fresh: set[str] = set()  # the directory was not synced since
    unsynced: dict[int, list[_Write | _Resize]] = {}
    marks: list[Any] = []
    for index, event in enumerate(events):
        match event:
            case _Create(number, name, held):
                names[name], data[number] = number, bytearray(held or b"")
                if held is None:
                    fresh.add(name)
            case _Rename(source, target):
                names[target] = names.pop(source)
                fresh.clear()
            case _Mark(value):
                marks.append(value)
            case _Write(number) | _Resize(number):
                if index < synced.get(number, -1):
                    _apply(data[number], event)
                else:
                    unsynced.setdefault(number, []).append(event)
    # How much of what is in the caches got out: sometimes nothing, sometimes all.
    written = rng.choice((0.0, 0.2, 0.5, 0.8, 1.0))
    for number, pending in unsynced.items():
        _settle(data[number], pending, written, rng)
    lost = {name for name in sorted(fresh) if rng.random() < 0.1}
    files = {name: bytes(data[number]) for name, number in names.items() if name not in lost}
    return PowerLoss(cut, files, marks)


def _settle(data: bytearray, pending: Sequence[_Write | _Resize], written: float, rng: random.Random) -> None:
    """Let of the writes and changes of size since the last sync happen what may."""
    batch: list[_Write] = []
    for event in pending:
        if isinstance(event, _Write):
            batch.append(event)
            continue
        _scatter(data, batch, written, rng)
        batch = []
        if rng.random() >= written:
            return
        _apply(data, event)
    _scatter(data, batch, written, rng)


def _scatter(data: bytearray, writes: list[_Write], written: float, rng: random.Random) -> None:
    """Each write whole, torn or not at all, in any order."""
    if rng.random() < 0.5:
        rng.shuffle(writes)
    for write in writes:
        if rng.random() < 0.25:
            tear = rng.choice(_TEARS)
            first = -write.at % tear  # tears are between sectors of the disk, not of the write
            edges = [0, *range(first or tear, len(write.data), tear), len(write.data)]
            for start, stop in itertools.pairwise(edges):
                if rng.random() < 0.5:
                    _apply(data, _Write(write.file, write.at + start, write.data[start:stop]))
        elif rng.random() < written:
            _apply(data, write)


def _apply(data: bytearray, event: _Write | _Resize) -> None:
    size = event.size if isinstance(event, _Resize) else max(len(data), event.at + len(event.data))
    if size > len(data):
        data.extend(bytes(size - len(data)))
    if isinstance(event, _Resize):
        del data[size:]
    else:
        data[event.at : event.at + len(event.data)] = event.data
