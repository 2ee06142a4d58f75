"""Bad places: slots of a slab that fail while the rest of the disk works. They are found, and used no more.

A transfer that failed, or that took as long as a stall, is followed by a test of its slots, each alone:

    the disk elsewhere   a page of DIR/lock is written, synced and read back: if not, the disk fails, and no place
    one slot             random bytes are written and read back; after a slow load the slot is only read, and after a
                         slow store it is read, and the same bytes are written again

A slot that fails its test is set aside: its record in the table says so (tiers/record.py), over restarts, too.
"""

import contextlib
import math
import mmap
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from hotspan.core.clock import Clock
from hotspan.core.types import MIB, PAGE_BYTES
from hotspan.tiers.base import Fault, Transfer
from hotspan.tiers.directory import OpenDirectory
from hotspan.tiers.files import whole
from hotspan.tiers.record import Flaw

SLOW_S = 1.0
_LEAST_BYTES_PER_S, _AT_ONCE = 25_000_000, 4
_PIECE_BYTES = MIB
_SAME_S = 0.1


class Verdict(NamedTuple):
    """What a test found.

    is_place: the disk works elsewhere, so that these slots failed and nothing else did.
    flaws:    of the slots that failed again.
    """

    is_place: bool
    flaws: Mapping[int, Flaw]


def is_suspect(transfer: Transfer) -> bool:
    """Whether the slots of a transfer that ended are to be tested."""
    if transfer.fault is None:
        return transfer.seconds > slow_s(transfer.bytes)
    return transfer.fault in (Fault.IO, Fault.CORRUPT)


def slow_s(size: int) -> float:
    """How long an I/O of so many bytes takes at most on a disk that is only slow.

    Chunks that a tier begins together end together: none of four large ones for long.
    """
    return SLOW_S + _AT_ONCE * size / _LEAST_BYTES_PER_S


class PlaceTests:
    """Tests of slots, on the thread that had the fault. What a slot holds is lost, unless `keeps`.

    One at a time: two of one slot would find each other's bytes. Where I/O goes through the page cache, only what the
    kernel reports is found.
    """

    def __init__(self, directory: OpenDirectory, clock: Clock) -> None:
        self._files = directory.files
        self._lock = directory.path / "lock"
        self._fd = directory.slab_fd
        self._slots_for = directory.geometry.slots_for
        self._slot_bytes = directory.geometry.slot_bytes
        self._piece_bytes = min(_PIECE_BYTES, -(-self._slot_bytes // PAGE_BYTES) * PAGE_BYTES)  # of one I/O
        self._is_direct = directory.direct
        self._clock = clock
        self._testing = threading.Lock()
        self._failed_s = -math.inf  # when the disk failed elsewhere

    def after(self, transfer: Transfer, slots: Sequence[int]) -> Verdict:
        """Test the slots of a transfer that is suspect. Never raises for I/O."""
        if transfer.fault is not None:
            return self.test(slots, keeps=False)
        if transfer.packing is not None and transfer.packing.is_compressed:
            slots = slots[: self._slots_for(transfer.packing.stored_bytes)]  # others may have the rest by now
        return self.test(slots, keeps=True, rewrites=not transfer.is_load)

    def test(self, slots: Sequence[int], *, keeps: bool, rewrites: bool = False) -> Verdict:
        """Test slots that nothing else uses.

        keeps: only read them, and judge how long that takes. rewrites: and how long it takes to write what they have.
        """
        with self._testing:
            if self._clock.monotonic() - self._failed_s < _SAME_S:
                return Verdict(False, {})  # a disk that hangs is not asked again by each of the transfers in flight
            if not self._works_elsewhere():
                self._failed_s = self._clock.monotonic()
                return Verdict(False, {})
            flaws = {}
            with _pages(2 * self._piece_bytes) as pages:
                for slot in slots:
                    flaw = self._flaw(slot, pages, keeps=keeps)
                    if flaw is None and rewrites:
                        flaw = self._write_flaw(slot, pages[: self._piece_bytes])
                    if flaw is not None:
                        flaws[slot] = flaw
            return Verdict(True, flaws)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _works_elsewhere(self) -> bool:
        """Whether the disk takes a page and gives it back, at another place and in time."""
        began_s = self._clock.monotonic()
        direct = os.O_DIRECT if self._is_direct else 0
        try:
            fd = self._files.open(self._lock, os.O_RDWR | direct)
            try:
                with _pages(2 * PAGE_BYTES) as pages:
                    wrote, read = pages[:PAGE_BYTES], pages[PAGE_BYTES:]
                    wrote[:] = os.urandom(PAGE_BYTES)
                    whole(self._files.pwritev(fd, [wrote], PAGE_BYTES), PAGE_BYTES)
                    self._files.sync(fd)
                    whole(self._files.preadv(fd, [read], PAGE_BYTES), PAGE_BYTES)
                    is_same = wrote == read
            finally:
                self._files.close(fd)
        except OSError:
            return False
        return is_same and self._clock.monotonic() - began_s <= SLOW_S

    def _flaw(self, slot: int, pages: memoryview, *, keeps: bool) -> Flaw | None:
        """What is wrong with a slot; None if it does what it should."""
        began_s = self._clock.monotonic()
        wrote, read = pages[: self._piece_bytes], pages[self._piece_bytes :]
        if not keeps:
            wrote[:] = os.urandom(len(wrote))
            try:
                for at, size in self._pieces(slot):
                    whole(self._files.pwritev(self._fd, [wrote[:size]], at), size)
                if not self._is_direct:
                    self._files.sync(self._fd)
            except OSError:
                return Flaw.WRITE
        try:
            for at, size in self._pieces(slot):
                whole(self._files.preadv(self._fd, [read[:size]], at), size)
                if not keeps and read[:size] != wrote[:size]:
                    return Flaw.WRONG
        except OSError:
            return Flaw.READ
        is_slow = self._clock.monotonic() - began_s > slow_s(self._slot_bytes)
        return Flaw.SLOW if is_slow else None

    def _write_flaw(self, slot: int, pages: memoryview) -> Flaw | None:
        """What is wrong with writing to a slot, which keeps its bytes. Who reads it meanwhile finds them, too."""
        took_s = 0.0
        for at, size in self._pieces(slot):
            try:
                whole(self._files.preadv(self._fd, [pages[:size]], at), size)
            except OSError:
                return Flaw.READ
            began_s = self._clock.monotonic()
            try:
                whole(self._files.pwritev(self._fd, [pages[:size]], at), size)
                if not self._is_direct:
                    self._files.sync(self._fd)
            except OSError:
                return Flaw.WRITE
            took_s += self._clock.monotonic() - began_s
        return Flaw.SLOW if took_s > slow_s(self._slot_bytes) else None

    def _pieces(self, slot: int) -> Iterator[tuple[int, int]]:
        """Where one I/O each is done in a slot, and of how many bytes."""
        first = slot * self._slot_bytes
        for start in range(0, self._slot_bytes, self._piece_bytes):
            yield first + start, min(self._piece_bytes, self._slot_bytes - start)


@contextlib.contextmanager
def _pages(size: int) -> Iterator[memoryview]:
    """Page-aligned memory that is there until the block is left."""
    room = mmap.mmap(-1, size)
    view = memoryview(room)
    try:
        yield view
    finally:
        with contextlib.suppress(BufferError):  # an exception may hold a slice: it is unmapped with that
            view.release()
            room.close()
