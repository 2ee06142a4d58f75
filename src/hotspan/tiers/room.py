"""How much of the disk a slab takes: space is allocated ahead of need, and given back when the file system runs low.

    slots:   [ stored | free: have space | bare: have none ]
                        ^ take, give       ^ grow, release

One thread (the scheduler's) moves slots between the three; the system calls are made by jobs, one at a time.
"""

import contextlib
import errno
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from hotspan.core.types import GIB, MIB
from hotspan.tiers.files import Files
from hotspan.tiers.io import IoQueue

logger = logging.getLogger(__name__)

RESERVE_BYTES: Final = 2 * GIB
"""What a slab that grows leaves free on its file system, or a twentieth of that if it is less."""

NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT)
_NO_HOLES: Final = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_STEPS: Final = 16
_LONGEST_PAUSE: Final = 64
"""Looks, of which there is one a second."""


def step_bytes(slab_bytes: int) -> int:
    """How much a slab that may become `slab_bytes` grows at a time: a sixteenth, at least 64 MiB, at most 1 GiB."""
    return min(GIB, max(64 * MIB, slab_bytes // _STEPS))


class SlabSpace:
    """The space of a slab's slots on its file system. From any thread. Raises: OSError from every method."""

    def __init__(self, files: Files, fd: int, slot_bytes: int, reserve_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self._files = files
        self._fd = fd
        self._reserve_bytes = reserve_bytes

    def fitting(self, slots: int) -> int:
        """How many of so many slots can get space, with the reserve kept free."""
        above = self._above_reserve()
        return slots if above is None else max(0, min(slots, above // self.slot_bytes))

    def lacking(self) -> int:
        """How many slots would have to be released for the reserve to be free again."""
        above = self._above_reserve()
        return 0 if above is None else max(0, -(above // self.slot_bytes))

    def allocate(self, slots: Sequence[int]) -> None:
        """Give these slots space. If it fails, the file has its old length, and some of them may have space."""
        if not slots:
            return
        before = self._files.stat(self._fd).st_size
        end = (max(slots) + 1) * self.slot_bytes
        if end > before:
            self._files.truncate(self._fd, end)
        try:
            for first, count in _runs(slots):
                self._files.allocate(self._fd, count * self.slot_bytes, first * self.slot_bytes)
        except OSError:
            if end > before:
                self._files.truncate(self._fd, before)
            raise

    def release(self, slots: Sequence[int]) -> None:
        """Take the space of these slots: they read as zeros from now on."""
        for first, count in _runs(slots):
            self._files.punch(self._fd, count * self.slot_bytes, first * self.slot_bytes)

    def _above_reserve(self) -> int | None:
        """Free bytes above the reserve, negative below it; None if the file system does not know."""
        room = self._files.space(self._fd)
        if not room.f_blocks:
            return None
        return room.f_bavail * room.f_frsize - min(self._reserve_bytes, room.f_blocks * room.f_frsize // 20)


class _Attempts:
    """A call that may fail again and again: when it is tried the next time, and one line on the log for all of it.

    pauses: after 1, 2, 4, ... looks, at most 64; else at each look.
    """

    def __init__(self, event: str, *, pauses: bool = True) -> None:
        self._event = event
        self._pauses = pauses
        self._pause = 0
        self.failures = 0  # in a row

    @property
    def is_due(self) -> bool:
        """Whether it may be tried now."""
        return not self._pause

    def look(self) -> None:
        """Time passes."""
        self._pause = max(0, self._pause - 1)

    def ended(self, error: str | None) -> None:
        """It was tried: it worked, or failed with this error."""
        if error is None:
            self._pause = self.failures = 0
            return
        if not self.failures:
            logger.warning("%s error=%s", self._event, error)
        self._pause = min(1 << self.failures, _LONGEST_PAUSE) if self._pauses else 0
        self.failures = min(self.failures + 1, _LONGEST_PAUSE)


@dataclass(frozen=True, slots=True)
class _Report:
    """What a job did: these slots have space now, these have none. lacking: slots to be released; None: not asked.

    is_full: whether the file system had no space for all that was asked for; None: not asked.
    tried:   what failed, with `error`, or worked.
    """

    free: Sequence[int] = ()
    bare: Sequence[int] = ()
    lacking: int | None = None
    is_full: bool | None = None
    tried: _Attempts | None = None
    error: str | None = None


class SlotRoom:
    """Which slots can be written to.

    free, bare: slots with and without space, of `slots` in all; the last of each list is taken first.
    step:       slots that get space at a time.
    landed:     called from a job's thread when `settle` has something to do.
    least:      slots of a chunk.
    aside:      slots that are not to be used (tiers/places.py).
    """

    def __init__(
        self,
        space: SlabSpace,
        queue: IoQueue,
        slots: int,
        free: list[int],
        bare: list[int],
        step: int,
        landed: Callable[[], None],
        least: int = 1,
        aside: int = 0,
    ) -> None:
        self._least = least
        self.aside = aside
        self._space = space
        self._queue = queue
        self._slots = slots
        self._free = free
        self._bare = bare
        self._step = max(1, step)
        self._landed = landed
        self._reports: deque[_Report] = deque()
        self._moving = 0  # slots that a job is working on
        self._owed = 0  # slots that are to be released as soon as they are free
        self._returned: list[int] = []  # those of them that are free
        self._is_busy = False
        self._is_full = self._is_low = False
        self._has_holes = True
        self._growing = _Attempts("disk_not_grown")
        self._releasing = _Attempts("disk_space_not_released")
        self._looking = _Attempts("disk_space_unknown", pauses=False)
        self._grow()

    @property
    def used(self) -> int:
        """Slots that hold something, or are about to be free."""
        return self._slots - self.aside - len(self._free) - len(self._bare) - len(self._returned) - self._moving

    @property
    def capacity(self) -> int:
        """Slots that can hold something: while the file system has space, all of them."""
        return self._slots - self.aside - (len(self._bare) if self._is_full else 0)

    @property
    def is_growing(self) -> bool:
        """Whether there are no free slots for a chunk now, and there will be."""
        return not self.has_free and bool(self._bare or self._moving) and not self._is_full

    @property
    def has_free(self) -> bool:
        """Whether there are free slots for a chunk now."""
        return len(self._free) >= self._least

    def take(self, count: int) -> list[int]:
        """At most so many free slots."""
        slots = self._free[-count:]
        del self._free[-count:]
        self._grow()
        return slots

    def give(self, slot: int) -> None:
        """A slot holds nothing any more."""
        if self._owed:  # before a store takes it: else no space would go back while chunks are stored
            self._owed -= 1
            self._returned.append(slot)
        else:
            self._free.append(slot)

    def set_aside(self, slots: int) -> None:
        """So many slots that were taken are not given back."""
        self.aside += slots

    def spare(self) -> list[int]:
        """All slots that hold nothing (for tests)."""
        return sorted(self._free + self._returned + self._bare)

    def note_full(self) -> None:
        """A write found no space although its slot should have had it: some file systems write elsewhere."""
        self._is_full = True

    def look(self) -> None:
        """Find out in the background whether the file system still has its reserve. To be called every second."""
        self._growing.look()
        self._releasing.look()
        if not self._is_busy:
            asked = min(self._step, len(self._bare))
            self._submit(lambda: self._looked(asked), _Report())

    def settle(self) -> int:
        """Bring the books in line with what jobs did; how many chunks are to be evicted for the reserve."""
        evictions = 0
        while self._reports:
            report = self._reports.popleft()
            self._is_busy, self._moving = False, 0
            self._free[:0] = report.free  # those that had space before lie lower: a slab with few chunks stays short
            self._bare.extend(report.bare)
            if report.tried is not None:
                report.tried.ended(report.error)
            if report.is_full is not None:
                self._is_full = report.is_full or not self._growing.is_due
                self._note_low()
            if report.lacking is not None:
                can_release = self._has_holes and self._releasing.is_due
                self._owed = evictions = self._release(min(report.lacking, self._step)) if can_release else 0
        if self._returned and not self._is_busy:
            self._release(len(self._returned) if self._releasing.is_due else 0)
        self._grow()
        return evictions

    # -- inside --------------------------------------------------------------------------------------------------------

    def _note_low(self) -> None:
        is_low = self._is_full or self._growing.failures > 0
        if is_low is not self._is_low:
            self._is_low = is_low
            event = "disk_space_low" if is_low else "disk_space_back"
            logger.warning("%s slots=%d of=%d", event, self._slots - len(self._bare), self._slots)

    def _grow(self) -> None:
        """Have space ready for more than what is free, before it is needed."""
        if self._is_busy or self._is_full or not self._bare or len(self._free) > self._step // 2:
            return
        slots = self._bare[-self._step :]
        del self._bare[-self._step :]
        self._moving = len(slots)
        self._submit(lambda: self._grown(slots), _Report(bare=slots))

    def _release(self, slots: int) -> int:
        """Give back the space of free slots; how many more are wanted."""
        self._free[:0], self._returned = self._returned, []
        given = self._free[:slots]
        del self._free[: len(given)]
        if given:
            self._moving = len(given)
            self._submit(lambda: self._released(given), _Report(free=given))
        return slots - len(given)

    def _submit(self, job: Callable[[], _Report], dropped: _Report) -> None:
        self._is_busy = True

        def report(of: _Report) -> None:
            self._reports.append(of)
            self._landed()

        self._queue.submit(lambda scratch: report(job()), lambda: report(dropped), urgent=True)

    def _looked(self, asked: int) -> _Report:
        try:
            lacking = self._space.lacking()
            is_full = bool(lacking) or self._space.fitting(asked) < asked
            return _Report(lacking=lacking, is_full=is_full, tried=self._looking)
        except OSError as error:
            return _Report(tried=self._looking, error=str(error))

    def _grown(self, slots: list[int]) -> _Report:
        none = len(slots)
        try:
            none -= self._space.fitting(len(slots))
            self._space.allocate(slots[none:])
        except OSError as error:
            with contextlib.suppress(OSError):
                self._space.release(slots)
            return _Report(bare=slots, is_full=True, tried=self._growing, error=str(error))
        return _Report(slots[none:], slots[:none], is_full=none > 0, tried=self._growing)

    def _released(self, slots: list[int]) -> _Report:
        try:
            self._space.release(slots)
        except OSError as error:
            self._has_holes = error.errno not in _NO_HOLES
            return _Report(free=slots, tried=self._releasing, error=str(error))
        return _Report(bare=sorted(slots, reverse=True), tried=self._releasing)


def _runs(slots: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Slots that lie one after the other: the first, and how many."""
    for _, run in itertools.groupby(enumerate(sorted(slots)), lambda each: each[1] - each[0]):
        numbers = [slot for _, slot in run]
        yield numbers[0], len(numbers)
