"""What a medium must do to be an L2: named blobs that are created whole, and a log in order.

`objects.py` makes an ObjectStore of `Blobs`, `log.py` a SharedLog of a `LogMedium`. All methods block, each at most for
the medium's own timeout, and may be called from several threads.

Raises: OSError (ConnectionError, TimeoutError) from every method when the medium can't be reached or fails; with
        ENOSPC, EDQUOT, EMLINK or EFBIG when it has no room.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from hotspan.l2.base import StoreUsage


class Part(NamedTuple):
    """The first `limit` bytes of a blob."""

    name: str
    limit: int


class Addition(NamedTuple):
    """`data` is appended to a blob; a blob that is not there begins with `first`."""

    name: str
    first: bytes
    data: bytes


class Blobs(Protocol):
    """Blobs by name: paths of printable ASCII, whose last component names the chunk."""

    batch: int
    """How many chunks of a text to ask for first: many, if that takes one round trip."""

    def read(self, parts: Sequence[Part]) -> list[bytes | None]:
        """The beginnings of blobs, None for those that are not there; in one round trip where the medium can.

        Metadata that is named after its object need not be looked for where the object is not there.
        """
        ...

    def read_into(self, name: str, into: Sequence[memoryview]) -> bool:
        """Read a blob into buffers that have exactly its size. False if it is gone, or has another size."""
        ...

    def create(self, name: str, data: Sequence[memoryview | bytes]) -> bool:
        """Create a blob, seen by nobody before it is whole. False if there is one of that name, which stays."""
        ...

    def append(self, additions: Sequence[Addition]) -> None:
        """Append to small blobs, each atomically, creating those that are not there.

        Without data: from now on a blob that is there is not deleted by who began to before.
        """
        ...

    def delete(self, names: Sequence[str]) -> None:
        """Delete blobs in this order, or at once; those that are not there are no error.

        Metadata that somebody appends to meanwhile may stay; on a medium that does not evict, it has to. What is not
        deleted with its object, but emptied, begins another life.
        """
        ...

    def usage(self) -> StoreUsage:
        """How full it is."""
        ...

    def close(self) -> None:
        """Let go of connections. Methods that other threads are in may raise."""
        ...


class Entry(NamedTuple):
    """One entry of a log. body: empty for the one that a log begins with."""

    number: int
    epoch: bytes
    body: bytes


class Stretch(NamedTuple):
    """Part of a log as the medium has it.

    oldest:  the first entry that was not trimmed.
    entries: those that were asked for, in order of their numbers, up to the newest.
    """

    oldest: Entry
    entries: Sequence[Entry]


class LogMedium(Protocol):
    """A log that is never empty: it begins with an entry that has no body."""

    def is_used(self) -> bool:
        """Whether there is a log, a report or an object: a replica has been here. Changes nothing."""
        ...

    def read(self, first: int) -> Stretch | None:
        """The entries from number `first` on. None if there is no log."""
        ...

    def append(self, entry: Entry, keep: int) -> bool:
        """Add the entry after the newest one, and trim all but about the newest `keep`.

        False if there is one of that number or above already, or the log is of another epoch.
        """
        ...

    def begin(self, over: bytes, entry: Entry) -> None:
        """Replace the log with one that has this entry only, if its epoch is still `over` (empty: there is none)."""
        ...

    def write_report(self, replica: str, data: bytes | None) -> None:
        """Keep what a replica reports, in the place of its last report; None deletes it."""
        ...

    def read_reports(self) -> dict[str, bytes]:
        """What each replica reported last."""
        ...

    def unix(self) -> float:
        """The time that all replicas go by."""
        ...
