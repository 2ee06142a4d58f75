"""What a directory of objects may hold, and what goes first.

The modification time of an object says when it was last used, in whole minutes, less a second for each chunk that it
stands on: of what was used together, the end of a text goes first. What was left behind goes after an hour.
"""

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hotspan.core.clock import Clock
from hotspan.l2 import bounds
from hotspan.l2.base import StoreUsage
from hotspan.l2.blob_log import epoch_name, latest_epoch
from hotspan.l2.log import EPOCH_BYTES
from hotspan.l2.shared_files import TEMPORARY, FileCall, SharedFiles

OBJECTS, OBJECT, EPOCHS, LOG = "objects", "object", "epochs", "log"

_SWEEP_EVERY_S = 300.0
_LEFT_S = 3600.0
"""After which what nobody finished, and epochs that are over, are deleted."""
_UNUSED_METADATA_S = 86400.0
_KEPT = 0.9
"""Of the capacity, what a sweep leaves when there is too much."""
_TAKEN = 0.25
"""Of the room that a look saw, what may be put here before the next look: others put, too, and know as little."""


def current_epoch(files: SharedFiles) -> tuple[Path, str] | None:
    """The file of the epoch that holds, and its name (blob_log.py); None if that can't be told."""
    names = files.listed(Path(EPOCHS), bounds.MAX_EPOCHS + 1)
    number = latest_epoch(names)
    if not number or len(names) > bounds.MAX_EPOCHS:
        return None
    path = Path(epoch_name(number))
    with files.opened(path) as fd:
        epoch = os.pread(fd, EPOCH_BYTES + 1, 0)
    return (path, epoch.hex()) if len(epoch) == EPOCH_BYTES else None


@dataclass(frozen=True, slots=True)
class _Look:
    """A look at all objects: the number of those before it, and what had been put by when it began."""

    number: int
    put: list[Path]


@dataclass(frozen=True, slots=True, order=True)
class _Seen:
    """An object, oldest first."""

    used_s: float
    bytes: int
    directory: Path


class FileRoom:
    """Counts objects and deletes the oldest. Methods may be called from several threads, and raise OSError."""

    def __init__(self, files: SharedFiles, capacity_bytes: int | None, clock: Clock) -> None:
        self._files = files
        self._capacity_bytes = capacity_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._looked_s: float | None = None
        self._looks = self._newest_look = 0
        self._objects = self._bytes = self._unseen_bytes = self._evicted = 0
        # Bytes of the objects put here that no look has seen; 0 while one is being put, when a look may see it already.
        self._unseen: dict[Path, int] = {}

    @property
    def usage(self) -> StoreUsage | None:
        """As of the last look, and what was added since; None before the first."""
        with self._lock:
            if self._looked_s is None:
                return None
            return self._usage()

    def begin(self, directory: Path) -> None:
        """An object is about to be put into this directory."""
        with self._lock:
            self._unseen.setdefault(directory, 0)

    def end(self, directory: Path, size: int) -> bool:
        """It has been put, or has not (0 bytes). Whether a sweep is due."""
        with self._lock:
            if size and directory in self._unseen:
                self._unseen[directory] = size
                self._objects += 1
                self._bytes += size
                self._unseen_bytes += size
            elif not self._unseen.get(directory):
                self._unseen.pop(directory, None)
            return size > 0 and self._is_due()

    @property
    def is_due(self) -> bool:
        """Whether there may be too much, or nobody looked for long."""
        with self._lock:
            return self._is_due()

    def touch(self, fd: int, place: int, *, is_new: bool = False) -> None:
        """An object was used. place: of its chunk in its text."""
        used_s = self._clock.unix() // 60 * 60 - place
        with contextlib.suppress(PermissionError):  # another user's: it goes by when it was written
            if is_new or os.fstat(fd).st_mtime < used_s:
                os.utime(fd, (used_s, used_s))

    def look(self, call: FileCall) -> StoreUsage:
        """Count what is there."""
        look = self._begin_look()
        return self._saw(look, list(self._seen(call)))

    def sweep(self, call: FileCall, *, is_full: bool = False) -> None:
        """Delete the oldest objects until the rest fits, if they do not; some in any case if the disk is full."""
        self._sweep_left(call)
        look = self._begin_look()
        seen = sorted(self._seen(call))
        total = sum(one.bytes for one in seen)
        most = total if is_full else self._capacity_bytes
        if most is not None and (is_full or total > most):
            while seen and total > _KEPT * most:
                oldest = seen.pop(0)
                is_ours = self._files.remove(oldest.directory, call)  # and not another replica's, which counts it
                total -= oldest.bytes
                with self._lock:
                    self._evicted += is_ours
        self._saw(look, seen)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _usage(self) -> StoreUsage:
        return StoreUsage(self._objects, self._bytes, self._capacity_bytes or 0, self._evicted)

    def _is_due(self) -> bool:
        if self._looked_s is None or self._clock.monotonic() - self._looked_s > _SWEEP_EVERY_S:
            return True
        if (capacity := self._capacity_bytes) is None:
            return False
        room = capacity - self._bytes + self._unseen_bytes
        return self._bytes > capacity or self._unseen_bytes > max(_TAKEN * room, (1 - _KEPT) * capacity)

    def _begin_look(self) -> _Look:
        with self._lock:
            self._looks += 1
            return _Look(self._looks, [directory for directory, size in self._unseen.items() if size])

    def _saw(self, look: _Look, seen: list[_Seen]) -> StoreUsage:
        with self._lock:
            if look.number > self._newest_look:  # of two at once, the later one knows better
                self._newest_look = look.number
                for directory in [*look.put, *(one.directory for one in seen)]:
                    self._unseen.pop(directory, None)
                unseen = [size for size in self._unseen.values() if size]
                self._objects = len(seen) + len(unseen)
                self._unseen_bytes = sum(unseen)
                self._bytes = sum(one.bytes for one in seen) + self._unseen_bytes
                self._looked_s = self._clock.monotonic()
            return self._usage()

    def _seen(self, call: FileCall) -> Iterator[_Seen]:
        """All objects; metadata on the way whose object never came is deleted."""
        epoch = current_epoch(self._files)
        if epoch is None:
            return
        root = Path(OBJECTS, epoch[1])
        try:
            names = self._files.listed(root, bounds.MAX_OBJECTS)
        except NotADirectoryError:  # a link, or a file, which leads nowhere
            self._files.delete(root, call.step)
            return
        with self._files.walk() as enter:
            for name in names:
                call.step()
                directory = root / name
                with contextlib.suppress(FileNotFoundError):
                    try:
                        facts = os.stat(OBJECT, dir_fd=enter(directory), follow_symlinks=False)
                        yield _Seen(facts.st_mtime, facts.st_size, directory)
                    except FileNotFoundError:
                        if self._age_s(directory) > _UNUSED_METADATA_S:
                            self._files.remove(directory, call)
                    except NotADirectoryError:
                        self._files.delete(directory, call.step)

    def _sweep_left(self, call: FileCall) -> None:
        roots = [Path(OBJECTS), Path(LOG)]
        epochs = [root / name for root in roots for name in self._files.listed(root, bounds.MAX_EPOCHS)]
        current = current_epoch(self._files)  # after the listing: whatever was in it then is current, or over
        if current is not None and self._age_s(current[0]) > _LEFT_S:
            for path in epochs:
                if path.name != current[1]:
                    self._files.delete(path, call.step)
        for name in self._files.listed(Path(TEMPORARY), bounds.MAX_OBJECTS):
            path = Path(TEMPORARY, name)
            with contextlib.suppress(FileNotFoundError):
                if self._age_s(path) > _LEFT_S:
                    self._files.delete(path, call.step)

    def _age_s(self, path: Path) -> float:
        return self._clock.unix() - self._files.facts(path).st_mtime
