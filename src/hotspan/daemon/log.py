"""The log of invalidations that all replicas of a node read, in memory.

It lives as long as the objects do: a daemon that starts again begins with neither, under another epoch, or finds both
on its disk. Its generations are milliseconds since 1970, or one more than the last: what was stored under an earlier
log is older than all of its entries. Who has read further than it goes has read another one, which was lost: then it
begins anew, above that.
"""

import json
import logging
import secrets
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from hotspan.core.clock import Clock
from hotspan.core.errors import MALFORMED
from hotspan.core.scopes import scopes_to_json
from hotspan.core.terms import Scope
from hotspan.core.types import MIB
from hotspan.daemon.journal import NoNotes, Notes

logger = logging.getLogger(__name__)

MOST_ENTRIES = 1 << 16
MAX_BYTES = 64 * MIB
MAX_REPLICAS = 512
MAX_NAME = 200
"""Characters in the name of a replica."""

_BEGUN = b"E"  # epoch and floor
_ENTRY = b"L"  # followed by a generation; the entry's text
_HEAD = struct.Struct("<16sQ")


@dataclass(frozen=True, slots=True)
class LogEntry:
    """text: JSON of generation, scope and by."""

    generation: int
    text: str


@dataclass(frozen=True, slots=True)
class LogPart:
    """Entries that follow each other. has_more: there are newer ones."""

    entries: list[LogEntry]
    has_more: bool


class InvalidationLog:
    """Entries in order, and who has read how far.

    generation: of the newest entry; `floor` if there is none.
    floor:      what was invalidated up to here is not known any more: it keeps the newest `MOST_ENTRIES`, `MAX_BYTES`.
    notes:      where it is noted, and found.
    Raises: ValueError for what makes no sense.
    """

    def __init__(
        self,
        clock: Clock,
        max_entries: int = MOST_ENTRIES,
        most_bytes: int = MAX_BYTES,
        notes: Notes | None = None,
    ) -> None:
        self._clock = clock
        self._max_entries, self._max_bytes = max_entries, most_bytes
        self._notes = notes or NoNotes()
        self._replicas: dict[str, tuple[int, float]] = {}
        self._entries: deque[LogEntry] = deque()
        if _BEGUN in self._notes.found:
            self._go_on()
        else:
            self.begin()

    def begin(self, above: int = 0) -> None:
        """Begin anew, above a generation and all before."""
        for entry in self._entries:
            self._notes.put(_name(entry), None)
        self.epoch = secrets.token_bytes(16)
        self.floor = self.generation = max(above + 1, self._now())
        self._entries.clear()
        self._bytes = 0
        self._notes.put(_BEGUN, _HEAD.pack(self.epoch, self.floor))

    def __len__(self) -> int:
        return len(self._entries)

    def append(self, scopes: Sequence[Scope], by: str) -> int:
        """Write an entry; its generation."""
        _check_name(by)
        generation = max(self.generation + 1, self._now())
        text = json.dumps({"generation": generation, "scope": scopes_to_json(scopes), "by": by}, separators=(",", ":"))
        self._entries.append(LogEntry(generation, text))
        self._notes.put(_name(self._entries[-1]), text.encode())
        self.generation = generation
        self._bytes += len(text)
        while len(self._entries) > self._max_entries or self._bytes > self._max_bytes:
            dropped = self._entries.popleft()
            self._bytes -= len(dropped.text)
            self.floor = dropped.generation
            self._notes.put(_name(dropped), None)
            self._notes.put(_BEGUN, _HEAD.pack(self.epoch, self.floor))
        return generation

    def read(self, after: int, most_bytes: int) -> LogPart:
        """The entries above a generation, as many as have `most_bytes` in all, and one at least."""
        newer = 0
        for entry in reversed(self._entries):
            if entry.generation <= after:
                break
            newer += 1
        part: list[LogEntry] = []
        for entry in islice(self._entries, len(self._entries) - newer, None):
            most_bytes -= len(entry.text)
            if part and most_bytes < 0:
                return LogPart(part, True)
            part.append(entry)
        return LogPart(part, False)

    def report(self, replica: str, generation: int, ttl_s: float) -> None:
        """A replica is alive for `ttl_s`, and has read so far."""
        _check_name(replica)
        if not 0 < ttl_s < float("inf"):
            raise ValueError(f"a replica is alive for some seconds, not {ttl_s}")
        if replica not in self._replicas and len(self.replicas()) >= MAX_REPLICAS:
            raise ValueError(f"there are {MAX_REPLICAS} replicas already")
        self._replicas[replica] = (generation, self._clock.monotonic() + ttl_s)

    def forget(self, replica: str) -> None:
        """A replica is gone."""
        self._replicas.pop(replica, None)

    def replicas(self) -> dict[str, int]:
        """The replicas that are alive, and how far each has read."""
        now = self._clock.monotonic()
        self._replicas = {name: said for name, said in self._replicas.items() if said[1] > now}
        return {name: generation for name, (generation, _) in self._replicas.items()}

    def _go_on(self) -> None:
        """Take over what an earlier daemon noted."""
        found = self._notes.found
        self.epoch, self.floor = _HEAD.unpack(found[_BEGUN])
        for name in sorted(name for name in found if name.startswith(_ENTRY)):
            self._entries.append(_noted(int.from_bytes(name[len(_ENTRY) :], "big"), found[name]))
        self.generation = self._entries[-1].generation if self._entries else self.floor
        self._bytes = sum(len(entry.text) for entry in self._entries)

    def _now(self) -> int:
        return int(self._clock.unix() * 1000)


def _noted(generation: int, noted: bytes) -> LogEntry:
    """An entry as it was noted; of one that is none nobody can tell what it took, so it takes everything."""
    try:
        text = noted.decode()
        if json.loads(text)["generation"] == generation:
            return LogEntry(generation, text)
    except MALFORMED:
        pass
    logger.warning("log_entry_malformed generation=%d", generation)
    scope = scopes_to_json([Scope()])
    return LogEntry(generation, json.dumps({"generation": generation, "scope": scope, "by": ""}))


def _name(entry: LogEntry) -> bytes:
    return _ENTRY + entry.generation.to_bytes(8, "big")


def _check_name(replica: str) -> None:
    if not 0 < len(replica) <= MAX_NAME:
        raise ValueError(f"a replica's name has 1 to {MAX_NAME} characters")
