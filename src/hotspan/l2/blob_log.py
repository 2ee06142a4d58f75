"""A log of small blobs, for a medium that can list them but keeps no log of its own.

    epochs/N             the epoch; the highest number holds
    log/EPOCH/NUMBER     an entry: "B" for the one that the log begins with, "E" and its body for others
    replicas/NAME        what a replica reports, behind its name and a zero

A name is given to one writer only: so of several who append one gets a number, and of several who find that entries
were lost one begins the next epoch. Entries before a gap count as trimmed.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from hotspan.core.clock import Clock
from hotspan.l2.blobs import Blobs, Entry, Part, Stretch
from hotspan.l2.log import EPOCH_BYTES

_MAX_BYTES = 1 << 26
_EPOCH_EVERY_S = 1.0
"""How often the blob of the epoch is read again. Somebody may delete it alone: who begins then finds no log."""


class ListedBlobs(Blobs, Protocol):
    """Blobs whose names can be listed."""

    def list(self, directory: str) -> list[str]:
        """The last components of the names under a directory of blobs."""
        ...

    def overwrite(self, name: str, data: bytes) -> None:
        """Write a blob, whatever is there."""
        ...

    def create_durable(self, name: str, data: bytes) -> bool:
        """As `create`; it outlasts a loss of power of the medium."""
        ...


@dataclass(frozen=True, slots=True)
class _End:
    """The end of the log as it was read last. number: of the epoch."""

    number: int
    oldest: Entry
    newest: Entry


class BlobLog:
    """A LogMedium over blobs."""

    def __init__(self, blobs: ListedBlobs, clock: Clock) -> None:
        self._blobs = blobs
        self._clock = clock
        self._end: _End | None = None
        self._epoch_s = 0.0  # when the epoch's own blob was read last

    def read(self, first: int) -> Stretch | None:
        end = self._end
        stretch = None if end is None or end.newest.number != first else self._read_on(end)
        return stretch or self._read_all(first)

    def append(self, entry: Entry, keep: int) -> bool:
        end = self._end
        if end is None or end.newest.epoch != entry.epoch:
            return False
        if not self._blobs.create_durable(_name(entry.epoch, entry.number), b"E" + entry.body):
            return False
        holds = [Part(_epoch_name(end.number), EPOCH_BYTES), Part(_epoch_name(end.number + 1), 1)]
        if self._blobs.read(holds) != [entry.epoch, None]:
            return False  # nobody reads it there: the epoch is over, or the medium lost it
        oldest = max(end.oldest.number, entry.number - keep + 1)
        self._blobs.delete([_name(entry.epoch, number) for number in range(end.oldest.number, oldest)])
        self._end = replace(end, oldest=end.oldest if oldest == end.oldest.number else Entry(oldest, entry.epoch, b"?"))
        return True

    def begin(self, over: bytes, entry: Entry) -> None:
        number, epoch = self._epoch()
        if epoch != over and self._blobs.list(f"log/{epoch.hex()}"):
            return
        begun = _name(entry.epoch, entry.number)
        self._blobs.create_durable(begun, b"B")  # first: an epoch without an entry is a lost log
        if not self._blobs.create_durable(_epoch_name(number + 1), entry.epoch):
            self._blobs.delete([begun])

    def write_report(self, replica: str, data: bytes | None) -> None:
        name = f"replicas/{hashlib.sha256(replica.encode()).hexdigest()[:32]}"
        if data is None:
            self._blobs.delete([name])
        else:
            self._blobs.overwrite(name, replica.encode() + b"\0" + data)

    def read_reports(self) -> dict[str, bytes]:
        names = [f"replicas/{name}" for name in self._blobs.list("replicas")]
        said = self._blobs.read([Part(name, _MAX_BYTES) for name in names])
        split = [data.partition(b"\0") for data in said if data is not None]
        return {replica.decode(errors="replace"): data for replica, _, data in split}

    def unix(self) -> float:
        return self._clock.unix()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _read_on(self, end: _End) -> Stretch | None:
        """From the newest entry that is known on, without a list; None if that is not where it was."""
        epoch, number = end.newest.epoch, end.newest.number
        is_due = self._clock.monotonic() - self._epoch_s > _EPOCH_EVERY_S
        parts = [Part(_epoch_name(end.number + 1), 1), *_parts(epoch, range(number, number + 2))]
        if is_due:
            parts.append(Part(_epoch_name(end.number), EPOCH_BYTES))
        is_over, *bodies = self._blobs.read(parts)
        if is_over is not None or bodies[0] is None or (is_due and bodies.pop() != epoch):
            return None
        if is_due:
            self._epoch_s = self._clock.monotonic()
        while bodies[-1] is not None:
            bodies += self._blobs.read(_parts(epoch, [number + len(bodies)]))
        return self._stretch(end.number, _entries(epoch, range(number, number + len(bodies)), bodies[:-1]), end.oldest)

    def _read_all(self, first: int) -> Stretch | None:
        number, epoch = self._epoch()
        numbers = sorted(int(name, 16) for name in self._blobs.list(f"log/{epoch.hex()}") if _is_number(name))
        if len(epoch) != EPOCH_BYTES or not numbers:
            return None
        run = len(numbers) - 1
        while run and numbers[run - 1] == numbers[run] - 1:
            run -= 1
        numbers = numbers[run:]
        wanted = [one for one in numbers if one >= first] or numbers[-1:]
        if wanted[0] != numbers[0]:
            wanted.insert(0, numbers[0])
        entries = _entries(epoch, wanted, self._blobs.read(_parts(epoch, wanted)))
        return self._stretch(number, entries) if entries else None

    def _stretch(self, number: int, entries: list[Entry], oldest: Entry | None = None) -> Stretch:
        oldest = oldest or entries[0]
        self._end = _End(number, oldest, entries[-1])
        while len(entries) > 1 and entries[0].number < entries[1].number - 1:
            del entries[0]  # the oldest, which was not asked for
        return Stretch(oldest, entries)

    def _epoch(self) -> tuple[int, bytes]:
        """The number and the name of the epoch that holds; 0 and nothing if there is none."""
        numbers = [int(name, 16) for name in self._blobs.list("epochs") if _is_number(name)]
        if not numbers:
            return 0, b""
        (epoch,) = self._blobs.read([Part(_epoch_name(max(numbers)), EPOCH_BYTES + 1)])
        return max(numbers), epoch if epoch is not None and len(epoch) == EPOCH_BYTES else b""


def _epoch_name(number: int) -> str:
    return f"epochs/{number:016x}"


def _name(epoch: bytes, number: int) -> str:
    return f"log/{epoch.hex()}/{number:016x}"


def _is_number(name: str) -> bool:
    return len(name) == 16 and set(name) <= set("0123456789abcdef")


def _parts(epoch: bytes, numbers: Sequence[int]) -> list[Part]:
    return [Part(_name(epoch, number), _MAX_BYTES) for number in numbers]


def _entries(epoch: bytes, numbers: Sequence[int], bodies: Sequence[bytes | None]) -> list[Entry]:
    """The entries behind the last one that is gone. One that is neither "B" nor "E" can't be read."""
    entries: list[Entry] = []
    for number, body in zip(numbers, bodies, strict=False):
        if body is None:
            entries.clear()
        else:
            entries.append(Entry(number, epoch, b"" if body == b"B" else body[1:] or b"?"))
    return entries
