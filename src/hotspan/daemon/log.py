"""The log of invalidations that all replicas of a node read, in memory, and in a file if there is a disk.

It lives as long as the objects do: a daemon that starts again begins with neither, under another epoch, or finds both
on its disk. Its generations are milliseconds since 1970, or one more than the last: what was stored under an earlier
log is older than all of its entries. Who has read further than it goes has read another one, which was lost: then it
begins anew, above that.
"""

import json
import logging
import secrets
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from hotspan.core.clock import Clock
from hotspan.core.errors import MALFORMED
from hotspan.core.scopes import scopes_to_json
from hotspan.core.terms import Scope
from hotspan.core.types import MIB
from hotspan.tiers.log import LogFile

logger = logging.getLogger(__name__)

MOST_ENTRIES = 1 << 16
MAX_BYTES = 64 * MIB
MAX_REPLICAS = 512
MAX_NAME = 200
"""Characters in the name of a replica."""

_SLACK_BYTES = 16 * MIB
"""By how much the file may exceed twice what the entries take before it is written anew."""


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
    file:       where entries are kept (`write`), and found; `is_lost`: what was found in it is not all there was.
    Raises: ValueError for what makes no sense; OSError from the constructor, if the file can't be read.
    """

    def __init__(
        self,
        clock: Clock,
        max_entries: int = MOST_ENTRIES,
        most_bytes: int = MAX_BYTES,
        file: LogFile | None = None,
    ) -> None:
        self._clock = clock
        self._max_entries, self._max_bytes = max_entries, most_bytes
        self._file = file
        self._lock = threading.Lock()
        self._unwritten: list[LogEntry] = []
        self._is_outdated = True  # the file: it is written anew
        self.is_lost = False
        self._replicas: dict[str, tuple[int, float]] = {}
        self._entries: deque[LogEntry] = deque()
        if not self._go_on():
            self.begin()

    def begin(self, above: int = 0) -> None:
        """Begin anew, above a generation and all before."""
        with self._lock:
            self.epoch = secrets.token_bytes(16)
            self.floor = self.generation = max(above + 1, self._now())
            self._entries.clear()
            self._bytes = 0
            self._is_outdated = True

    def __len__(self) -> int:
        return len(self._entries)

    def append(self, scopes: Sequence[Scope], by: str) -> int:
        """Write an entry; its generation."""
        _check_name(by)
        generation = max(self.generation + 1, self._now())
        text = json.dumps({"generation": generation, "scope": scopes_to_json(scopes), "by": by}, separators=(",", ":"))
        with self._lock:
            self._keep(LogEntry(generation, text))
            if self._file is not None:
                self._unwritten.append(self._entries[-1])
        return generation

    def write(self) -> None:
        """Have in the file, durably, what was appended so far; to be called from one other thread. Raises: OSError.

        If the file can't be written it is emptied instead: the next start then begins anew, and nothing comes back.
        """
        if self._file is None:
            return
        with self._lock:
            rewrites = self._is_outdated or self._file.bytes > 2 * self._bytes + _SLACK_BYTES
            entries = list(self._entries if rewrites else self._unwritten)
            begin = {"epoch": self.epoch.hex(), "floor": self.floor}
            self._unwritten, self._is_outdated = [], False
        bodies = [{"generation": entry.generation, "text": entry.text} for entry in entries]
        try:
            if rewrites:
                self._file.rewrite([begin, *bodies])
            elif bodies:
                self._file.add(bodies)
        except OSError as error:
            self._is_outdated = True
            logger.warning("daemon_log_not_written error=%s: a restart would begin with no log", str(error))
            self._file.clear()

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

    def _go_on(self) -> bool:
        """Take over what an earlier daemon wrote; False if that is nothing, or can't be trusted to be all."""
        if self._file is None:
            return False
        bodies, is_whole = self._file.bodies()
        self._bytes = 0
        try:
            begin, *rest = bodies
            self.epoch, self.floor = bytes.fromhex(begin["epoch"]), int(begin["floor"])
            self.generation = self.floor
            for body in rest:
                self._keep(LogEntry(int(body["generation"]), str(body["text"])))
        except MALFORMED:
            is_whole = False
        self.is_lost, self._is_outdated = not is_whole, not is_whole
        return is_whole

    def _keep(self, entry: LogEntry) -> None:
        self._entries.append(entry)
        self.generation = entry.generation
        self._bytes += len(entry.text)
        while len(self._entries) > self._max_entries or self._bytes > self._max_bytes:
            dropped = self._entries.popleft()
            self._bytes -= len(dropped.text)
            self.floor = dropped.generation

    def _now(self) -> int:
        return int(self._clock.unix() * 1000)


def _check_name(replica: str) -> None:
    if not 0 < len(replica) <= MAX_NAME:
        raise ValueError(f"a replica's name has 1 to {MAX_NAME} characters")
