"""Files of entries in order, each durable before it is acknowledged; and the log of what was invalidated in a tier.

    log file: [ entry ][ entry ] ...        entry: [ "HSLG" | length 4 | xxh3-64 8 | JSON ]

A tier's log begins with the generation from which on it knows everything. At the next start its entries are applied to
the table, and the log begins anew. Where the log can't be trusted (its file is gone, an entry is damaged, a record is
newer than its end), nobody can tell what was invalidated: then everything in the directory is forgotten.
"""

import contextlib
import errno
import json
import logging
import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import xxhash

from hotspan.core.errors import MALFORMED
from hotspan.core.scopes import scopes_from_json, scopes_to_json
from hotspan.core.terms import Scope
from hotspan.tiers.files import Files, read_sound, whole

logger = logging.getLogger(__name__)

_HEAD = struct.Struct("<4sI8s")
_MAGIC = b"HSLG"
_SECTOR_BYTES = 512


@dataclass(frozen=True, slots=True)
class Invalidation:
    """One entry: chunks of lower generations that one of `scopes` takes are gone since `at_s` (Unix time)."""

    generation: int
    scopes: tuple[Scope, ...]
    at_s: float


@dataclass(frozen=True, slots=True)
class LogContents:
    """What a log says. is_whole: whether it can be trusted to say everything."""

    generation: int
    entries: Sequence[Invalidation]
    is_whole: bool


class LogFile:
    """JSON objects in a file that is appended to. Methods raise OSError; one thread at a time calls them.

    bytes: of the file.
    """

    def __init__(self, files: Files, path: Path) -> None:
        self._files = files
        self._path = path
        self._fd = files.open(path, os.O_RDWR | os.O_CREAT)
        self._unsure: list[int] = []  # files that the name may lead to instead after a power loss
        self._is_sound = True
        self.bytes = 0

    def bodies(self, *, drops_torn: bool = False) -> tuple[list[dict[str, Any]], bool]:
        """All objects up to the first that is damaged, and whether none is.

        drops_torn: cut off a last object that a power loss left incomplete: `add` did not return for it. The first
                    object is never torn, since `rewrite` wrote it.
        """
        size = self._files.stat(self._fd).st_size
        try:
            data = read_sound(self._files, self._fd, 0, size)
        except OSError as error:  # the rest of the disk was read before: what stood here is not known
            logger.warning("log_unreadable path=%s error=%s", self._path, str(error))
            return [], False
        bodies: list[dict[str, Any]] = []
        at = 0
        while at < len(data):
            entry = _entry(data, at)
            if entry is None and drops_torn and bodies and _is_torn(data, at):
                logger.warning("log_tail_dropped path=%s bytes=%d", self._path, len(data) - at)
                self._files.truncate(self._fd, at)
                self._files.sync(self._fd)
                break
            if entry is None:
                return bodies, False
            bodies.append(entry[0])
            at = entry[1]
        self.bytes = at
        return bodies, True

    def rewrite(self, bodies: Iterable[dict[str, Any]]) -> None:
        """Replace all objects. Durable, and at no moment is there neither log.

        If it fails, the old log goes on; unless the new one has its name already (the sync of the directory failed):
        then nothing is added until `rewrite` works, for the next start might not find it.
        """
        fresh = self._path.with_name(self._path.name + ".new")
        fd = self._files.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            data = b"".join(map(_packed, bodies))
            whole(self._files.pwrite(fd, data, 0), len(data))
            self._files.sync(fd)
            self._files.replace(fresh, self._path)
        except BaseException:
            if fresh.exists():
                self._files.close(fd)
            else:
                self._is_sound = False
                self._unsure.append(fd)
            raise
        self.close()
        self._fd, self.bytes, self._is_sound = fd, len(data), True

    def add(self, bodies: Iterable[dict[str, Any]]) -> None:
        """Write objects; on the disk when this returns.

        After a failure nothing is added until `rewrite` works: what a failed sync left unwritten, the kernel would call
        written at the next one.
        """
        if not self._is_sound:
            raise OSError(errno.EIO, "the log failed before")
        data = b"".join(map(_packed, bodies))
        try:
            whole(self._files.pwrite(self._fd, data, self.bytes), len(data))
            self._files.sync(self._fd)
        except OSError:
            self._is_sound = False
            with contextlib.suppress(OSError):
                self._files.truncate(self._fd, self.bytes)  # half an object would cost all at the next start
            raise
        self.bytes += len(data)

    def clear(self) -> None:
        """Leave nothing, durably; nothing is added until `rewrite` works."""
        self._is_sound = False
        for fd in (self._fd, *self._unsure):
            self._files.truncate(fd, 0)
            self._files.sync(fd)
        self.bytes = 0
        self._close_unsure()  # nobody writes to them any more

    def close(self) -> None:
        """Let go of the file."""
        self._files.close(self._fd)
        self._close_unsure()

    def _close_unsure(self) -> None:
        while self._unsure:
            self._files.close(self._unsure.pop())


class GenerationLog(LogFile):
    """The log file of one tier's directory.

    scopes: that were appended since it began.
    """

    scopes = 0

    def read(self) -> LogContents:
        """All entries, and whether that is all there ever was."""
        bodies, is_whole = self.bodies()
        entries: list[Invalidation] = []
        generation = -1
        try:
            for body in bodies:
                said = int(body["generation"])
                if "scope" in body:
                    entries.append(Invalidation(said, scopes_from_json(body["scope"]), float(body["at_s"])))
                generation = max(generation, said)
        except MALFORMED:
            is_whole = False
        return LogContents(max(0, generation), entries, is_whole and generation >= 0)

    def begin(self, generation: int) -> None:
        """Begin anew: all up to `generation` is settled."""
        self.rewrite([{"generation": generation}])
        self.scopes = 0

    def append(self, entry: Invalidation) -> None:
        """Write an entry; on the disk when this returns."""
        body = {"generation": entry.generation, "at_s": entry.at_s, "scope": scopes_to_json(entry.scopes)}
        self.add([body])
        self.scopes += len(entry.scopes)


def _packed(body: dict[str, Any]) -> bytes:
    data = json.dumps(body, separators=(",", ":")).encode()
    return _HEAD.pack(_MAGIC, len(data), xxhash.xxh3_64_digest(data)) + data


def _entry(data: bytes, at: int) -> tuple[dict[str, Any], int] | None:
    """The entry at `at` and where the next one begins; None if there is no whole one."""
    if at + _HEAD.size > len(data):
        return None
    magic, size, check = _HEAD.unpack_from(data, at)
    body = data[at + _HEAD.size : at + _HEAD.size + size]
    if magic != _MAGIC or len(body) != size or xxhash.xxh3_64_digest(body) != check:
        return None
    try:
        found = json.loads(body)
    except MALFORMED:
        return None
    return (found, at + _HEAD.size + size) if isinstance(found, dict) else None


def _is_torn(data: bytes, at: int) -> bool:
    """Whether what begins at `at` is one object of which some sectors were not written, and no damaged one.

    A sector that was not written is missing at the end of the file, or zero. An object that was acknowledged has all of
    its sectors; one behind which there is a whole one was acknowledged.
    """
    later = data.find(_MAGIC, at + 1)
    while later >= 0:
        if _entry(data, later) is not None:
            return False
        later = data.find(_MAGIC, later + 1)
    if len(data) - at < _HEAD.size:
        return True
    magic, size, check = _HEAD.unpack_from(data, at)
    body = data[at + _HEAD.size :]
    if magic == _MAGIC and len(body) < size:
        return bool(xxhash.xxh3_64_digest(body) != check)  # else all is there, and its length is damaged
    edges = [at, *range((at // _SECTOR_BYTES + 1) * _SECTOR_BYTES, len(data), _SECTOR_BYTES), len(data)]
    return any(stop - start >= len(_MAGIC) and not any(data[start:stop]) for start, stop in pairwise(edges))
