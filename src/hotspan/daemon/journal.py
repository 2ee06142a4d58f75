"""What the daemon has to know when it starts again: data by name, in a file that is appended to.

    file:  [ frame ][ frame ] ...
    frame: [ "HSDJ" | bytes 8 | number 8 | durable 8 | xxh3-64 8 ][ entry ][ entry ] ...
    entry: [ bytes of the name 1 | of the data 4 ][ name ][ data ]

The last entry of a name counts; 0xFFFFFFFF stands for data that is gone. Each frame says how many before it were known
to be durable. If one of those is damaged, nobody can tell what was taken back: then all is forgotten. Behind them a
crash may have torn something, which nobody was promised.
"""

import asyncio
import logging
import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

import xxhash

from hotspan.core.types import MIB
from hotspan.tiers.files import Files, read_all, whole
from hotspan.tiers.io import IoQueue, IoThreads

logger = logging.getLogger(__name__)

MAX_WAIT_S = 1.0
"""How long a client waits at most to hear that something is durable."""

_HEAD = struct.Struct("<4sQQQ8s")
_SUMMED = struct.Struct("<QQQ")
_ENTRY = struct.Struct("<BI")
_MAGIC = b"HSDJ"
_GONE = 0xFFFFFFFF
_FRAME_BYTES = 4 * MIB
_SLACK_BYTES = 16 * MIB
"""By how much it may exceed twice what it has to say before it is written anew."""


class Notes(Protocol):
    """Where that is noted which has to be known after a restart.

    found: what an earlier daemon noted; whoever knows a kind of names takes it over at the start.
    """

    @property
    def found(self) -> Mapping[bytes, bytes]: ...

    def put(self, name: bytes, data: bytes | None) -> None:
        """Note data under a name of at most 255 bytes, or (None) that there is none any more. Never blocks."""
        ...


class NoNotes:
    """For a daemon that begins with nothing."""

    found: Mapping[bytes, bytes] = {}

    def put(self, name: bytes, data: bytes | None) -> None:
        return


class Journal:
    """The journal at `path`, read when it is made; the loop's thread puts, a thread of its own writes.

    on_lost: called, on that thread, when it can't be written any more: nothing on this disk may be believed at the next
             start. It is emptied for that. As long as it can't be emptied either, nothing is durable.
    Raises:  OSError from the constructor only.
    """

    def __init__(
        self,
        files: Files,
        path: Path,
        on_lost: Callable[[], None] = lambda: None,
        queue: Callable[[str, int, int], IoQueue] = IoThreads,
    ) -> None:
        self._files = files
        self._path = path
        self._on_lost = on_lost
        self._pending: dict[bytes, bytes | None] = {}
        self._waiting: list[Callable[[bool], None]] = []
        self._lock = threading.Lock()
        self._is_queued = self._is_lost = False
        self._is_empty = True
        self._writing = 0  # notes that are being written now
        self._number = self._durable = self._end = self._live_bytes = 0
        self._fds = [files.open(path, os.O_RDWR | os.O_CREAT)]
        try:
            self._live = _read(files, self._fds[0], path)
            self.found: dict[bytes, bytes] = dict(self._live)
            self._begin()
        except BaseException:
            self._close_files()
            raise
        self._queue = queue("journal", 1, 4096)

    def put(self, name: bytes, data: bytes | None) -> None:
        with self._lock:
            self._pending[name] = data
        self._flush_soon()

    @property
    def unwritten(self) -> int:
        """How many notes the process's end would lose."""
        with self._lock:
            return len(self._pending) + self._writing

    def settle(self, tell: Callable[[bool], None]) -> None:
        """Say, on the journal's thread, whether all that was put so far can't come back otherwise after a crash."""
        with self._lock:
            self._waiting.append(tell)
        self._flush_soon()

    async def settled(self, timeout_s: float = MAX_WAIT_S) -> bool:
        """The same; False, too, if the disk does not say so in time."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[bool] = loop.create_future()

        def tell(is_durable: bool) -> None:
            if not done.done():
                done.set_result(is_durable)

        self.settle(lambda is_durable: post(loop, partial(tell, is_durable)))
        try:
            return await asyncio.wait_for(done, timeout_s)
        except TimeoutError:
            return False

    def close(self, timeout_s: float) -> bool:
        """Write what is left, durably; False if that takes longer, and may still be going on."""
        self.settle(lambda is_durable: None)
        has_ended = self._queue.close(timeout_s)
        if has_ended:
            self._close_files()
        return has_ended

    # -- its thread ------------------------------------------------------------------------------------------------

    def _flush_soon(self) -> None:
        with self._lock:
            if self._is_queued:
                return
            self._is_queued = True
        self._queue.submit(lambda scratch: self._flush(), lambda: None, urgent=False)

    def _flush(self) -> None:
        with self._lock:
            pending, self._pending = self._pending, {}
            waiting, self._waiting = self._waiting, []
            self._is_queued = False
            self._writing = len(pending)
        is_durable = self._write(pending, is_awaited=bool(waiting)) if not self._is_lost else self._empty()
        with self._lock:
            self._writing = 0
        for tell in waiting:
            tell(is_durable)

    def _write(self, pending: Mapping[bytes, bytes | None], *, is_awaited: bool) -> bool:
        try:
            news = [(name, data) for name, data in pending.items() if data is not None or name in self._live]
            for frame in self._frames(news):
                self._append(self._fds[0], frame)
            for name, data in news:
                self._know(name, data)
            if is_awaited and self._durable < self._number:
                self._files.sync(self._fds[0])
                self._durable = self._number
            if self._end > 2 * self._live_bytes + _SLACK_BYTES:
                self._begin()
        except OSError as error:
            logger.error("daemon_journal_lost path=%s error=%s: restart to use the disk again", self._path, str(error))
            self._is_lost, self._is_empty = True, False
            self._live.clear()
            self._on_lost()
            return self._empty()
        return True

    def _know(self, name: bytes, data: bytes | None) -> None:
        before = self._live.pop(name, None)
        if before is not None:
            self._live_bytes -= _size(name, before)
        if data is not None:
            self._live[name] = data
            self._live_bytes += _size(name, data)

    def _begin(self) -> None:
        """Write what counts into a new file; at no moment is there neither."""
        fresh = self._path.with_name(self._path.name + ".new")
        fd = self._files.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        self._fds.append(fd)  # should this fail half-way, either may be what the next start finds
        self._number = self._durable = self._end = 0
        self._live_bytes = sum(_size(name, data) for name, data in self._live.items())
        for frame in self._frames(self._live.items()):
            self._append(fd, frame)
        self._files.sync(fd)
        self._durable = self._number
        self._files.replace(fresh, self._path)
        self._files.close(self._fds.pop(0))

    def _append(self, fd: int, frame: bytes) -> None:
        whole(self._files.pwrite(fd, frame, self._end), len(frame))
        self._end += len(frame)
        self._number += 1

    def _frames(self, entries: Iterable[tuple[bytes, bytes | None]]) -> Iterator[bytes]:
        """Frames, each to be appended before the next one is made; none for nothing."""
        parts: list[bytes] = []
        size = 0
        for name, data in entries:
            parts += [_ENTRY.pack(len(name), _GONE if data is None else len(data)), name, data or b""]
            size += sum(map(len, parts[-3:]))
            if size >= _FRAME_BYTES:
                yield _frame(b"".join(parts), self._number, self._durable)
                parts, size = [], 0
        if parts:
            yield _frame(b"".join(parts), self._number, self._durable)

    def _empty(self) -> bool:
        """Leave nothing that the next start could believe; whether that is durable."""
        if not self._is_empty:
            try:
                for fd in self._fds:
                    self._files.truncate(fd, 0)
                    self._files.sync(fd)
                self._is_empty = True
            except OSError as error:
                logger.error(
                    "daemon_journal_not_emptied path=%s error=%s: nothing that is invalidated or deleted is confirmed; "
                    "restart without --disk, and empty the directory before it is used again",
                    self._path,
                    str(error),
                )
        return self._is_empty

    def _close_files(self) -> None:
        for fd in self._fds:
            self._files.close(fd)
        self._fds = []


def post(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    """Have the loop call it, from another thread; nothing if the loop is over."""
    try:
        loop.call_soon_threadsafe(call)
    except RuntimeError:
        return


def _size(name: bytes, data: bytes) -> int:
    return _ENTRY.size + len(name) + len(data)


def _frame(body: bytes, number: int, durable: int) -> bytes:
    return _HEAD.pack(_MAGIC, len(body), number, durable, _check(body, number, durable)) + body


def _check(body: bytes, number: int, durable: int) -> bytes:
    return xxhash.xxh3_64_digest(_SUMMED.pack(len(body), number, durable) + body)


class _Frame:
    """A whole frame in `data` at `at`. Raises: ValueError if there is none."""

    def __init__(self, data: bytes, at: int) -> None:
        if at + _HEAD.size > len(data):
            raise ValueError("cut")
        magic, size, self.number, self.durable, check = _HEAD.unpack_from(data, at)
        self.end = at + _HEAD.size + size
        self.body = data[at + _HEAD.size : self.end]
        if magic != _MAGIC or len(self.body) != size or _check(self.body, self.number, self.durable) != check:
            raise ValueError("damaged")

    def entries(self) -> Iterator[tuple[bytes, bytes | None]]:
        """(name, data), in order."""
        at = 0
        while at < len(self.body):
            name_bytes, data_bytes = _ENTRY.unpack_from(self.body, at)
            at += _ENTRY.size
            name, at = self.body[at : at + name_bytes], at + name_bytes
            if data_bytes == _GONE:
                yield name, None
            else:
                yield name, self.body[at : at + data_bytes]
                at += data_bytes


def _read(files: Files, fd: int, path: Path) -> dict[bytes, bytes]:
    """What a journal says; nothing if it can't be believed."""
    data = read_all(files, fd, 0, files.stat(fd).st_size)
    found: dict[bytes, bytes] = {}
    at = number = 0
    while at < len(data):
        try:
            frame = _Frame(data, at)
        except ValueError:
            if _was_durable(data, at, number):
                logger.warning("daemon_journal_damaged path=%s: all that is on the disk is forgotten", path)
                return {}
            break
        for name, said in frame.entries():
            found.pop(name, None)
            if said is not None:
                found[name] = said
        at, number = frame.end, number + 1
    return found


def _was_durable(data: bytes, at: int, number: int) -> bool:
    """Whether a later frame says that the one of this number, which can't be read, was durable."""
    while (at := data.find(_MAGIC, at + 1)) >= 0:
        try:
            frame = _Frame(data, at)
        except ValueError:
            continue
        if frame.durable > number:
            return True
    return False
