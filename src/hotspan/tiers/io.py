"""Frames between memory and a file, whole, in I/Os of about 4 MiB; and the threads that move them, loads first."""

import logging
import mmap
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

from hotspan.core.deadline import Deadline
from hotspan.core.frame import (
    HEADER_BYTES,
    TAG_BYTES,
    FrameFault,
    FrameIdentity,
    FrameOpening,
    FrameSealing,
    begin_plain,
    begin_sealed,
    end,
    hash_part,
    open_sealed,
    put_tag,
    segment_bytes_for,
    segments,
    tag_of,
    verify_header,
    verify_part,
)
from hotspan.core.threads import start_worker
from hotspan.core.types import MIB, PAGE_BYTES, round_up
from hotspan.tiers.files import Buffer, Files, whole
from hotspan.tiers.pace import Pace

logger = logging.getLogger(__name__)

IO_BYTES = 4 * MIB

_NOTHING = np.empty(0, np.uint8)


def staging_bytes(payload_bytes: int) -> int:
    """What an I/O thread needs beside the header to seal or open frames: one I/O and a page for the last tag."""
    most = max(_part_bytes(payload_bytes), IO_BYTES)  # of smaller payloads, too
    return min(most, round_up(payload_bytes, PAGE_BYTES)) + PAGE_BYTES


def copy(source: Buffer, into: Sequence[memoryview]) -> None:
    """Fill the buffers, one after the other, with the GIL released, which `into[:] = source` would hold."""
    flat = np.frombuffer(source, np.uint8) if len(source) else _NOTHING
    at = 0
    for buffer in into:
        if len(buffer):
            np.copyto(np.frombuffer(buffer, np.uint8), flat[at : at + len(buffer)])
            at += len(buffer)


class FrameFile:
    """Frames in one file of equal slots. A frame lies in one slot, or in several, in the order in which they are given.

    Methods may be called from several threads, each with its own header and staging. Loads keep to the pace.
    """

    def __init__(self, files: Files, fd: int, slot_bytes: int, pace: Pace | None = None) -> None:
        self._pace = pace or Pace()
        self._files = files
        self._fd = fd
        self._slot_bytes = slot_bytes

    def write(self, slots: Sequence[int], header: memoryview, payload: memoryview, identity: FrameIdentity) -> None:
        """Write a plain frame; `payload` as it is, without a copy. Raises: OSError.

        Part by part: what was just hashed is still in the CPU's caches when it is written. The first part comes last,
        in one I/O with the header, which has the tags of all.
        """
        begin_plain(header, len(payload), identity)
        for start, part in _parts(payload):
            hash_part(header, len(payload), start, part)
            if start:
                self._move(self._files.pwritev, slots, HEADER_BYTES + start, [part])
        end(header)
        self._move(self._files.pwritev, slots, 0, [header, part])

    def write_sealed(
        self,
        slots: Sequence[int],
        scratch: memoryview,
        payload: memoryview,
        identity: FrameIdentity,
        sealing: FrameSealing,
    ) -> None:
        """Write an encrypted frame, in the order of a plain one. Raises: OSError.

        Each segment is encrypted into the staging area, its tag behind it, where the next one will begin:

            staging: [ segment 0 | tag 0 ]  ->  [ segment 0 | segment 1 | tag 1 ]  ->  ...
        """
        header, staging = scratch[:HEADER_BYTES], scratch[HEADER_BYTES:]
        cipher = begin_sealed(header, len(payload), identity, sealing)
        for start, part in _parts(payload):
            for index, first, stop in segments(len(payload), start, len(part)):
                tag_at = stop - start
                cipher.encrypt(index, payload[first:stop], staging[first - start : tag_at + TAG_BYTES])
                put_tag(header, index, staging[tag_at : tag_at + TAG_BYTES])
            if start:
                self._move(self._files.pwritev, slots, HEADER_BYTES + start, [staging[: len(part)]])
        end(header)
        self._move(self._files.pwritev, slots, 0, [header, staging[: len(part)]])

    def read(
        self, slots: Sequence[int], header: memoryview, into: memoryview, identity: FrameIdentity, now_s: float
    ) -> FrameFault | None:
        """Read a plain frame; a fault if it is not that of `identity`. Raises: OSError."""
        for start, size in self._paced(len(into)):
            part = into[start : start + size]
            if start == 0:
                self._move(self._files.preadv, slots, 0, [header, part])
                fault = verify_header(header, len(into), identity, now_s)
            else:
                self._move(self._files.preadv, slots, HEADER_BYTES + start, [part])
                fault = None
            fault = fault or verify_part(header, len(into), start, part)
            if fault is not None:
                return fault
        return None

    def read_sealed(
        self,
        slots: Sequence[int],
        scratch: memoryview,
        into: memoryview,
        identity: FrameIdentity,
        now_s: float,
        opening: FrameOpening,
    ) -> FrameFault | None:
        """Read an encrypted frame; a fault if it is not that of `identity`. Raises: OSError.

        Ciphertext lands in the staging area and is decrypted from there; the last segment first, since a tag stands
        where the segment behind it began.
        """
        header, staging = scratch[:HEADER_BYTES], scratch[HEADER_BYTES:]
        cipher = None
        for start, size in self._paced(len(into)):
            if cipher is None:
                self._move(self._files.preadv, slots, 0, [header, staging[:size]])
                fault = verify_header(header, len(into), identity, now_s, sealed=True)
                if fault is not None:
                    return fault
                cipher = open_sealed(header, opening)
                if cipher is None:
                    return FrameFault.SHREDDED
            else:
                self._move(self._files.preadv, slots, HEADER_BYTES + start, [staging[:size]])
            step = segment_bytes_for(len(into))
            for first in reversed(range(start, start + size, step)):
                last = min(first + step, start + size)
                index = first // step
                staging[last - start : last - start + TAG_BYTES] = tag_of(header, index)
                sealed = staging[first - start : last - start + TAG_BYTES]
                if not cipher.decrypt(index, sealed, into[first:last]):
                    return FrameFault.PAYLOAD
        return None

    def _paced(self, payload_bytes: int) -> Iterator[tuple[int, int]]:
        """What one I/O each reads of a payload, from its beginning: where, and how many bytes; rests in between."""
        start = 0
        while start < payload_bytes:
            worked_s = time.thread_time()
            part_bytes = segment_bytes_for(payload_bytes) if self._pace.is_slow else _part_bytes(payload_bytes)
            size = min(part_bytes, payload_bytes - start)
            yield start, size
            start += size
            self._pace.rest(time.thread_time() - worked_s)

    def _move(
        self,
        call: Callable[[int, Sequence[memoryview], int], int],
        slots: Sequence[int],
        start: int,
        buffers: Sequence[memoryview],
    ) -> None:
        """Read or write what lies `start` bytes behind the beginning of a frame: one I/O per run of adjacent slots."""
        left, size = list(buffers), sum(map(len, buffers))
        while size:
            first, inside = divmod(start, self._slot_bytes)
            last = first
            while (last - first + 1) * self._slot_bytes - inside < size and slots[last + 1] == slots[last] + 1:
                last += 1
            moved = min(size, (last - first + 1) * self._slot_bytes - inside)
            at = slots[first] * self._slot_bytes + inside
            whole(call(self._fd, _take(left, moved), at), moved)
            start, size = start + moved, size - moved


def _take(buffers: list[memoryview], size: int) -> list[memoryview]:
    """The first `size` bytes, which are taken out of `buffers`."""
    taken: list[memoryview] = []
    while size:
        taken.append(buffers[0][:size])
        buffers[0] = buffers[0][size:]
        size -= len(taken[-1])
        if not buffers[0]:
            del buffers[0]
    return taken


def _parts(payload: memoryview) -> Iterator[tuple[int, memoryview]]:
    """What one I/O each moves of a payload, and where it begins: from the second part on, then the first."""
    part_bytes = _part_bytes(len(payload))
    for start in (*range(part_bytes, len(payload), part_bytes), 0):
        yield start, payload[start : start + part_bytes]


def _part_bytes(payload_bytes: int) -> int:
    """Bytes of a payload that one I/O moves: whole segments."""
    step = segment_bytes_for(payload_bytes)
    return max(IO_BYTES // step, 1) * step


Job = Callable[[memoryview], None]
"""Work for an I/O thread, given its page-aligned scratch memory. It reports how it ended, or raises before it does."""

Dropped = Callable[[], None]
"""What to do instead, if a job is never begun; or besides, if it raised, which is a mistake of ours."""


def _do(job: Job, dropped: Dropped, scratch: memoryview) -> None:
    """Do a job. Whatever it raises, who waits for it is told, and the thread lives."""
    try:
        job(scratch)
    except Exception:  # as text: the exception holds on to the buffers of its transfer, and a handler to it
        logger.error("io_job_failed error=%s", traceback.format_exc())
        try:
            dropped()
        except Exception:
            logger.error("io_job_not_reported error=%s", traceback.format_exc())


class IoQueue(Protocol):
    """Where a tier hands its I/O: threads, or in a simulation whoever turns the crank."""

    def submit(self, job: Job, dropped: Dropped, *, urgent: bool) -> None:
        """Queue a job; returns at once. After `close` it is dropped."""
        ...

    def drop(self) -> None:
        """Drop the jobs that have not begun."""
        ...

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is queued or running; False if that took longer than `timeout_s`."""
        ...

    def close(self, timeout_s: float) -> bool:
        """Finish what is queued within `timeout_s`, drop the rest and stop; False if a thread is still in an I/O."""
        ...


class IoThreads:
    """A few threads over two queues: what a request waits for goes first.

    scratch_bytes: of page-aligned memory that each thread has for its jobs.
    """

    def __init__(self, name: str, threads: int, scratch_bytes: int = HEADER_BYTES) -> None:
        self._urgent: deque[tuple[Job, Dropped]] = deque()
        self._background: deque[tuple[Job, Dropped]] = deque()
        self._scratch_bytes = scratch_bytes
        lock = threading.Lock()
        self._wake = threading.Condition(lock)
        self._idle = threading.Condition(lock)
        self._busy = 0
        self._closing = False
        is_over = lambda: self._closing  # noqa: E731
        self._threads = [start_worker(f"{name}-{n}", self._run, is_over=is_over) for n in range(threads)]

    def submit(self, job: Job, dropped: Dropped, *, urgent: bool) -> None:
        with self._wake:
            if not self._closing:
                (self._urgent if urgent else self._background).append((job, dropped))
                self._wake.notify()
                return
        dropped()

    def drop(self) -> None:
        with self._wake:
            jobs = [*self._urgent, *self._background]
            self._urgent.clear()
            self._background.clear()
            if not self._busy:
                self._idle.notify_all()
        for _, dropped in jobs:
            dropped()

    def drain(self, timeout_s: float) -> bool:
        deadline = Deadline(timeout_s)
        with self._wake:
            while self._urgent or self._background or self._busy:
                if not (left_s := deadline.rest_s()):
                    return False
                self._idle.wait(left_s)
        return True

    def close(self, timeout_s: float) -> bool:
        done = self.drain(timeout_s)
        with self._wake:
            self._closing = True
        self.drop()
        with self._wake:
            self._wake.notify_all()
        for thread in self._threads:
            thread.join(0.1 if not done else None)
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        with mmap.mmap(-1, self._scratch_bytes) as pages:
            scratch = memoryview(pages)
            while (taken := self._next()) is not None:
                _do(*taken, scratch)
                del taken  # it holds the buffers of its transfer
                with self._idle:
                    self._busy -= 1
                    if not (self._busy or self._urgent or self._background):
                        self._idle.notify_all()
            scratch.release()

    def _next(self) -> tuple[Job, Dropped] | None:
        with self._wake:
            while True:
                if self._urgent or self._background:
                    self._busy += 1
                    return (self._urgent or self._background).popleft()
                if self._closing:
                    return None
                self._wake.wait()
