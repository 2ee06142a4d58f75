"""A log of small blobs, for a medium that can list them but keeps no log of its own.

    epochs/N             the epoch; the highest number holds
    log/EPOCH/NUMBER     an entry: "B" for the one that the log begins with, "E" and its body for others
    replicas/NAME        what a replica reports, behind its name and a zero

A name is given to one writer only: so of several who append one gets a number, and of several who find that entries
were lost one begins the next epoch. Entries before a gap count as trimmed. The name of a trimmed entry is free again:
an entry counts only if the one that it follows is there before and after it is written: the older are trimmed first.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from hotspan.core.clock import Clock, SystemClock
from hotspan.l2 import bounds
from hotspan.l2.blobs import Blobs, Entry, Part, Stretch
from hotspan.l2.log import EPOCH_BYTES

_SHORT_BYTES = 32 * 1024
"""Of each entry what is read first, of many at once; longer ones are read anew, one by one."""

_PAGE = 512
"""Entries that are read at once."""

_COMPARE_EVERY_S = 60.0
"""How often the medium's clock is compared with this machine's."""

_EPOCH_EVERY_S = 1.0
"""How often the blob of the epoch is read again. Somebody may delete it alone: who begins then finds no log."""


_KINDS = ("epochs", "log", "replicas", "objects")
_LOOK_AT = 64
"""Where replicas leave something, and how many names are looked at there."""


class ListedBlobs(Blobs, Protocol):
    """Blobs whose names can be listed."""

    def list(self, directory: str, limit: int) -> list[str]:
        """The last components of the names under a directory of blobs; any `limit` of them, if there are more."""
        ...

    def overwrite(self, name: str, data: bytes) -> None:
        """Write a blob, whatever is there."""
        ...

    def create_durable(self, name: str, data: bytes) -> bool:
        """As `create`; it outlasts a loss of power of the medium."""
        ...

    def written_s(self, name: str) -> float | None:
        """When a blob was written, by the medium's own clock (Unix); None if it is gone."""
        ...


@dataclass(frozen=True, slots=True)
class _End:
    """The end of the log as it was read last. number: of the epoch."""

    number: int
    oldest: Entry
    newest: Entry


class BlobLog:
    """A LogMedium over blobs.

    machine: whose clock the medium's is compared with.
    """

    def __init__(self, blobs: ListedBlobs, clock: Clock, machine: Clock | None = None) -> None:
        self._blobs = blobs
        self._clock = clock
        self._machine = machine or SystemClock()
        self._offset_s = 0.0  # of the medium's clock to this machine's
        self._compared_s: float | None = None
        self._end: _End | None = None
        self._epoch_s = 0.0  # when the epoch's own blob was read last

    def is_used(self) -> bool:
        return any(_is_own(name) for kind in _KINDS for name in self._blobs.list(kind, _LOOK_AT))

    def read(self, first: int) -> Stretch | None:
        end = self._end
        stretch = None if end is None or end.newest.number != first else self._read_on(end)
        return stretch or self._read_all(first)

    def append(self, entry: Entry, keep: int) -> bool:
        end = self._end
        if end is None or end.newest.epoch != entry.epoch:
            return False
        name, behind = _name(entry.epoch, entry.number), Part(_name(entry.epoch, entry.number - 1), 1)
        if self._blobs.read([behind]) == [None]:
            return False  # who slept since it read the log finds this name free again: it was given, read and trimmed
        if not self._blobs.create_durable(name, b"E" + entry.body):
            return False
        holds = [Part(epoch_name(end.number), EPOCH_BYTES), Part(epoch_name(end.number + 1), 1), behind]
        *epochs, follows = self._blobs.read(holds)
        if epochs != [entry.epoch, None]:
            return False  # nobody reads it there: the epoch is over, or the medium lost it
        if follows is None:  # trimmed meanwhile: it may lie in front of what others have read
            self._blobs.delete([name])
            return False
        oldest = max(end.oldest.number, entry.number - keep + 1)
        self._blobs.delete([_name(entry.epoch, number) for number in range(end.oldest.number, oldest)])
        self._end = replace(end, oldest=end.oldest if oldest == end.oldest.number else Entry(oldest, entry.epoch, b"?"))
        return True

    def begin(self, over: bytes, entry: Entry) -> None:
        number, epoch = self._epoch()
        if epoch != over and self._numbers(epoch):
            return
        if number == bounds.MAX_EPOCH:  # nobody begins so many: it was planted, and no number would be left
            self._blobs.delete([epoch_name(number)])
            number, _ = self._epoch()
        begun = _name(entry.epoch, entry.number)
        self._blobs.create_durable(begun, b"B")  # first: an epoch without an entry is a lost log
        if not self._blobs.create_durable(epoch_name(number + 1), entry.epoch):
            self._blobs.delete([begun])

    def write_report(self, replica: str, data: bytes | None) -> None:
        name, said = _report_name(replica.encode()), replica.encode() + b"\0" + (data or b"")
        if data is None:
            self._blobs.delete([name])
        elif len(said) > bounds.MAX_REPORT_BYTES:
            raise ValueError(f"a report has {len(said)} bytes, its replica's name among them")
        else:
            before_s = self._machine.unix()
            self._blobs.overwrite(name, said)
            self._compare_clocks(name, before_s, self._machine.unix())

    def read_reports(self) -> dict[str, bytes]:
        names = [f"replicas/{name}" for name in self._blobs.list("replicas", bounds.MAX_REPORTS + 1)]
        if len(names) > bounds.MAX_REPORTS:
            raise ConnectionError(f"more than {bounds.MAX_REPORTS} replicas report: who is alive is not known")
        said = self._blobs.read([Part(name, bounds.MAX_REPORT_BYTES + 1) for name in names])
        split = {name: data.partition(b"\0") for name, data in zip(names, said, strict=True) if data is not None}
        if strange := [name for name, (replica, *_) in split.items() if name != _report_name(replica)]:
            self._blobs.delete(strange)  # no replica wrote it there
        return {replica.decode(errors="replace"): data for name, (replica, _, data) in split.items()}

    def unix(self) -> float:
        return self._clock.unix() + self._offset_s

    # -- inside ----------------------------------------------------------------------------------------------------

    def _compare_clocks(self, name: str, before_s: float, after_s: float) -> None:
        """A blob was written between these times of this machine: what time was it by the medium's clock?"""
        now_s = self._clock.monotonic()
        if self._compared_s is None or now_s - self._compared_s >= _COMPARE_EVERY_S:
            written_s = self._blobs.written_s(name)
            if written_s is not None:
                self._offset_s, self._compared_s = written_s - (before_s + after_s) / 2, now_s

    def _read_on(self, end: _End) -> Stretch | None:
        """From the newest entry that is known on, without a list; None if that is not where it was."""
        epoch, number = end.newest.epoch, end.newest.number
        is_due = self._clock.monotonic() - self._epoch_s > _EPOCH_EVERY_S
        parts = [Part(epoch_name(end.number + 1), 1), *_parts(epoch, range(number, number + 2))]
        if is_due:
            parts.append(Part(epoch_name(end.number), EPOCH_BYTES))
        is_over, *bodies = self._blobs.read(parts)
        if is_over is not None or bodies[0] is None or (is_due and bodies.pop() != epoch):
            return None
        if is_due:
            self._epoch_s = self._clock.monotonic()
        left = bounds.MAX_LOG_BYTES
        while (newest := bodies[-1]) is not None:
            left -= len(newest)
            if len(bodies) > bounds.MAX_LOG_ENTRIES or left < 0:
                return None
            bodies += self._blobs.read(_parts(epoch, [number + len(bodies)]))
        read = [_entry(number + at, epoch, body) for at, body in enumerate(bodies[:-1]) if body is not None]
        return self._stretch(end.number, read, end.oldest)

    def _read_all(self, first: int) -> Stretch | None:
        number, epoch = self._epoch()
        numbers = self._numbers(epoch) if len(epoch) == EPOCH_BYTES else []
        if numbers is None:
            return Stretch(Entry(0, epoch, b"?"), [])
        if not numbers:
            return None
        run = len(numbers) - 1
        while run and numbers[run - 1] == numbers[run] - 1:
            run -= 1
        numbers = numbers[run:]
        wanted = [one for one in numbers if one >= first] or numbers[-1:]
        entries = self._newest(epoch, wanted)
        if entries and entries[0].number == wanted[0] != numbers[0]:
            entries = self._newest(epoch, numbers[:1]) + entries
        return self._stretch(number, entries) if entries else None

    def _newest(self, epoch: bytes, numbers: Sequence[int]) -> list[Entry]:
        """Of these entries the newest that may be read, behind the last one that is gone."""
        entries: list[Entry] = []
        numbers, left = numbers[-bounds.MAX_LOG_ENTRIES :], bounds.MAX_LOG_BYTES
        for end in range(len(numbers), 0, -_PAGE):
            page = numbers[max(0, end - _PAGE) : end]
            bodies = self._blobs.read([Part(_name(epoch, one), _SHORT_BYTES) for one in page])
            for one, short in zip(reversed(page), reversed(bodies), strict=True):
                body = short
                if short is not None and len(short) == _SHORT_BYTES:
                    (body,) = self._blobs.read(_parts(epoch, [one]))
                left -= len(body or b"")
                if body is None or left < 0:
                    return entries[::-1]
                entries.append(_entry(one, epoch, body))
        return entries[::-1]

    def _numbers(self, epoch: bytes) -> list[int] | None:
        """The numbers of the entries of an epoch, in order; None if more lies there than there can be."""
        names = self._blobs.list(f"log/{epoch.hex()}", bounds.MAX_LOG_NAMES + 1)
        if len(names) > bounds.MAX_LOG_NAMES:
            return None
        now_s = self._clock.unix()
        numbers = sorted(int(name, 16) for name in names if is_number(name))
        return [number for number in numbers if bounds.is_honest(number, now_s)]

    def _stretch(self, number: int, entries: list[Entry], oldest: Entry | None = None) -> Stretch:
        oldest = oldest or entries[0]
        self._end = _End(number, oldest, entries[-1])
        while len(entries) > 1 and entries[0].number < entries[1].number - 1:
            del entries[0]  # the oldest, which was not asked for
        return Stretch(oldest, entries)

    def _epoch(self) -> tuple[int, bytes]:
        """The number and the name of the epoch that holds; 0 and nothing if there is none."""
        names = self._blobs.list("epochs", bounds.MAX_EPOCHS + 1)
        if len(names) > bounds.MAX_EPOCHS:
            raise ConnectionError(f"there are more than {bounds.MAX_EPOCHS} epochs: which one holds is not known")
        if not (number := latest_epoch(names)):
            return 0, b""
        (epoch,) = self._blobs.read([Part(epoch_name(number), EPOCH_BYTES + 1)])
        return number, epoch if epoch is not None and len(epoch) == EPOCH_BYTES else b""


def latest_epoch(names: Iterable[str]) -> int:
    """The number of the epoch that holds, of the names in `epochs`; 0 if there is none."""
    numbers = (int(name, 16) for name in names if is_number(name))
    return max((number for number in numbers if number <= bounds.MAX_EPOCH), default=0)


def epoch_name(number: int) -> str:
    return f"epochs/{number:016x}"


def _name(epoch: bytes, number: int) -> str:
    return f"log/{epoch.hex()}/{number:016x}"


def _report_name(replica: bytes) -> str:
    return f"replicas/{hashlib.sha256(replica).hexdigest()[:32]}"


def is_number(name: str) -> bool:
    """Whether a name is a number, of an epoch or of an entry."""
    return len(name) == 16 and set(name) <= set("0123456789abcdef")


def _is_own(name: str) -> bool:
    """Whether a replica gave that name to something. Directories of others may be called epochs or log, too."""
    return len(name) >= 16 and not set(name) - set("0123456789abcdef")


def _parts(epoch: bytes, numbers: Sequence[int]) -> list[Part]:
    return [Part(_name(epoch, number), bounds.MAX_ENTRY_BYTES + 2) for number in numbers]


def _entry(number: int, epoch: bytes, body: bytes) -> Entry:
    """One that is neither "B" nor "E", or is longer than any, can't be read."""
    if body == b"B":
        return Entry(number, epoch, b"")
    return Entry(number, epoch, b"?" if len(body) > bounds.MAX_ENTRY_BYTES + 1 else body[1:] or b"?")
