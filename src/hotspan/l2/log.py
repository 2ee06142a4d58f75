"""The log of invalidations that replicas share, over any medium that keeps entries in order (blobs.py).

    body of an entry = [ xxh3-64 of the rest 8 | JSON: by, scope, nonce ]

Generations are the numbers of entries, without a gap: who appends the next one has read all before it. An epoch begins
with an entry without a body at a number above all before it, in milliseconds since 1970. The medium may lose entries: a
server starts without its data or from an older copy, an entry is damaged. Each reader reads the newest entry that it
knows again; if that is another one, or there is a gap, it begins a new epoch.
"""

import json
import math
import secrets
import threading
from collections import deque
from collections.abc import Sequence
from itertools import pairwise, takewhile
from typing import Any, NamedTuple

import xxhash

from hotspan.core.clock import Clock, SystemClock
from hotspan.core.scopes import scopes_to_json
from hotspan.core.terms import Scope
from hotspan.l2 import bounds
from hotspan.l2.base import LogPage, SharedInvalidation, is_lost, read_entry
from hotspan.l2.blobs import Entry, LogMedium, Stretch

EPOCH_BYTES = 16
_CHECK_BYTES = 8
_EPOCH_READ_S = 1.0
"""After which an epoch is read again, where nobody reads the log."""

_FORGOTTEN_S = 3600.0
"""After which the report of a replica that is not alive is deleted."""

_MAX_TRIES = 8
_MAX_VOLATILE = 4096
_NEVER_S = -math.inf
_NOTHING = Entry(0, b"", b"")


class SharedInvalidationLog:
    """A SharedLog. An acknowledged entry is as durable as the medium is.

    keep: entries that are not trimmed.
    """

    def __init__(self, medium: LogMedium, keep: int, clock: Clock | None = None) -> None:
        self._medium = medium
        self._keep = keep
        self._clock = clock or SystemClock()
        self._known = _NOTHING  # the newest entry that was read or written
        self._read_s = _NEVER_S
        self._lock = threading.Lock()
        self._reported: tuple[str, int, float] | None = None
        self._report_s = 0.0  # when it is due again

    def epoch(self) -> bytes:
        """The epoch of the log as it was read lately; begins one where there is none."""
        if not self._known.epoch or self._clock.monotonic() - self._read_s > _EPOCH_READ_S:
            self.read(self._known.number)
        return self._known.epoch

    def forget_epoch(self) -> None:
        """Read the epoch before it is used again: a call of the medium failed, which may have lost everything."""
        self._read_s = _NEVER_S

    def is_used(self) -> bool:
        return self._medium.is_used()

    def append(self, scopes: Sequence[Scope], by: str) -> int:
        while True:
            known = self._known if self._known.epoch else self._latest()
            entry = Entry(self._honest(known.number + 1), known.epoch, pack_entry(scopes, by))
            if self._medium.append(entry, self._keep):
                self._saw(entry)
                return entry.number
            self._latest()

    def read(self, after: int) -> LogPage:
        for _ in range(_MAX_TRIES):
            known = self._known
            stretch = self._medium.read(min(after, known.number))
            entries = None if stretch is None else self._understood(stretch, known, after)
            if stretch is not None and entries is not None:
                newest, oldest = stretch.entries[-1], stretch.oldest
                self._saw(newest)
                floor = oldest.number if not oldest.body else oldest.number - 1
                newer = [entry for entry in entries if entry.generation > after]
                return LogPage(newest.epoch, newest.number, floor, newer)
            self._begin(stretch, max(after, known.number))
        raise ConnectionError("the log of invalidations was lost again and again")

    def report(self, replica: str, generation: int, ttl_s: float) -> None:
        now_s = self._clock.monotonic()
        report = (replica, generation, ttl_s)
        if self._reported == report and now_s < self._report_s:
            return  # what it said holds for long enough
        said = {"generation": generation, "until_s": self._medium.unix() + ttl_s}
        self._medium.write_report(replica, json.dumps(said).encode())
        self._reported, self._report_s = report, now_s + ttl_s / 4

    def forget(self, replica: str) -> None:
        self._reported = None
        self._medium.write_report(replica, None)

    def replicas(self) -> dict[str, int]:
        alive: dict[str, int] = {}
        now_s, reports = self._medium.unix(), self._medium.read_reports()
        if len(reports) > bounds.MAX_REPORTS:
            raise ConnectionError(f"more than {bounds.MAX_REPORTS} replicas report: who is alive is not known")
        for replica, data in reports.items():
            report = _report(data, now_s)
            if report is None or now_s > report.until_s + _FORGOTTEN_S:
                self._medium.write_report(replica, None)
            elif now_s < report.until_s:
                alive[replica] = report.generation
        return alive

    def clock_offset_s(self) -> float:
        before_s = self._clock.unix()
        store_s = self._medium.unix()
        return store_s - (before_s + self._clock.unix()) / 2

    # -- inside ----------------------------------------------------------------------------------------------------

    def _latest(self) -> Entry:
        self.read(self._known.number)
        return self._known

    def _saw(self, entry: Entry) -> None:
        with self._lock:
            if entry.epoch != self._known.epoch:
                self._reported = None
            if entry.number > self._known.number:  # also across epochs
                self._known = entry
            self._read_s = self._clock.monotonic()

    def _begin(self, lost: Stretch | None, least: int) -> None:
        """Begin a new epoch in the place of a log that lost entries, unless somebody else has."""
        newest = _NOTHING if lost is None else (lost.entries or [lost.oldest])[-1]
        above = max(number for number in (0, least, newest.number) if bounds.is_honest(number, self._clock.unix()))
        number = self._honest(max(int(self._medium.unix() * 1000), above + 1))
        self._medium.begin(newest.epoch, Entry(number, secrets.token_bytes(EPOCH_BYTES), b""))

    def _understood(self, stretch: Stretch, known: Entry, after: int) -> list[SharedInvalidation] | None:
        """What the entries say; None if that can't be all, or can't be honest."""
        now_s = self._clock.unix()
        if not all(bounds.is_honest(entry.number, now_s) for entry in (stretch.oldest, *stretch.entries)):
            return None
        return _invalidations(stretch, known, after)

    def _honest(self, number: int) -> int:
        """The number of an entry that is to be written. Raises: ConnectionError for one that nobody would believe."""
        if not bounds.is_honest(number, self._clock.unix()):
            raise ConnectionError(f"the log's next entry would be {number}: its numbers, or a clock, can't be right")
        return number


class VolatileLog:
    """The log of a store that can keep none: it lives and dies with this process, and no other replica reads it.

    Its generations are times, in milliseconds: what was stored before it began can't be judged, and is a miss. An entry
    comes behind all that was ever read or told of the log: what was stored at such a generation is older than it.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._epoch = secrets.token_bytes(16)
        self._began = self._floor = self._told = self._now()
        self._entries: deque[SharedInvalidation] = deque()
        self._lock = threading.Lock()

    @property
    def has_forgotten(self) -> bool:
        """Whether it had more entries than it keeps."""
        return self._floor != self._began

    def is_used(self) -> bool:
        return True  # by this process

    def append(self, scopes: Sequence[Scope], by: str) -> int:
        with self._lock:
            generation = self._told = max(self._now(), self._told + 1)
            self._entries.append(SharedInvalidation(generation, tuple(scopes), by))
            if len(self._entries) > _MAX_VOLATILE:
                self._floor = self._entries.popleft().generation
            return generation

    def read(self, after: int) -> LogPage:
        with self._lock:
            newer = list(takewhile(lambda entry: entry.generation > after, reversed(self._entries)))[::-1]
            self._told = max(after, self._told, self._now() - 1)  # no entry will come that is older than now
            return LogPage(self._epoch, self._told, self._floor, newer, is_shared=False)

    def report(self, replica: str, generation: int, ttl_s: float) -> None:
        return

    def forget(self, replica: str) -> None:
        return

    def replicas(self) -> dict[str, int]:
        return {}

    def clock_offset_s(self) -> float:
        return 0.0  # of a store on this node

    def _now(self) -> int:
        return int(self._clock.unix() * 1000)


def pack_entry(scopes: Sequence[Scope], by: str) -> bytes:
    """The body of an entry, which no other entry has. What would be too long for others to read takes whole tenants."""
    tenants = tuple(Scope(tenant=tenant) for tenant in dict.fromkeys(scope.tenant for scope in scopes))
    for some in (scopes, tenants, (Scope(),)):
        said = {"by": by, "scope": scopes_to_json(some), "nonce": secrets.token_hex(8)}
        body = checked(json.dumps(said, separators=(",", ":")).encode())
        if len(body) <= bounds.MAX_ENTRY_BYTES:
            break
    return body


def checked(data: bytes) -> bytes:
    """JSON as the body of an entry."""
    return xxhash.xxh3_64_digest(data) + data


def _invalidations(stretch: Stretch, known: Entry, after: int) -> list[SharedInvalidation] | None:
    """What the entries say; None if some are missing, are others than were known, or can't be read."""
    entries = stretch.entries
    if not entries or entries[-1].number < max(after, known.number):
        return None
    if entries[0].number > max(stretch.oldest.number, min(after, known.number)):
        return None
    if any(two.number != one.number + 1 for one, two in pairwise(entries)):
        return None
    if {stretch.oldest.epoch} != {entry.epoch for entry in entries}:
        return None
    if known.epoch == entries[0].epoch:
        if not _has(stretch, known):
            return None
    elif known.epoch and entries[-1].number <= known.number:
        return None  # of two epochs that began apart at one number, nothing could be appended to the later one
    read = [read_entry(entry.number, _body(entry.body), entry.body[:_CHECK_BYTES]) for entry in entries if entry.body]
    return None if any(map(is_lost, read)) else read


def _has(stretch: Stretch, known: Entry) -> bool:
    """Whether an entry that is known is still there, or was trimmed."""
    return known in stretch.entries or known.number < stretch.oldest.number <= stretch.entries[-1].number


class _Report(NamedTuple):
    generation: int
    until_s: float


def _report(data: bytes, now_s: float) -> _Report | None:
    """What a replica reported; None for what none can have."""
    body = _json(data) if len(data) <= bounds.MAX_REPORT_BYTES else {}
    try:
        report = _Report(int(body["generation"]), float(body["until_s"]))
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    is_honest = bounds.is_honest(report.generation, now_s) and 0 <= report.until_s <= now_s + bounds.MAX_REPORT_S
    return report if is_honest else None


def _body(data: bytes) -> Any:
    return _json(data[_CHECK_BYTES:]) if checked(data[_CHECK_BYTES:]) == data else {}


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return {}
