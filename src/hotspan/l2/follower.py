"""One replica's reading of the log that all share, on a thread of its own, and its word on how far it has read.

An entry counts as read once it is queued for the engine: the engine takes the queue before it admits a request, so an
invalidation binds every request that is admitted after this replica has said that it read it.
"""

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

from hotspan.core.clock import Clock, SystemClock
from hotspan.core.scopes import Backlog
from hotspan.core.terms import Scope, Terms
from hotspan.core.threads import start_worker
from hotspan.core.types import ChunkKey
from hotspan.l2.base import Found, LogPage, LogPosition, ObjectStore, SharedLog
from hotspan.l2.view import LogView

logger = logging.getLogger(__name__)

READ_EVERY_S = 0.1
STALE_S = 2.0
"""Who has not read the log for so long reads nothing from the tier: what was invalidated meanwhile is not known."""

REPORT_TTL_S = 5.0
CLOCKS_AGREE_S = 2.0
"""Clocks that differ by less count as one."""

_COMPARE_EVERY_S = 10.0
_MAX_FOREIGN = 1024
"""Scopes of one tenant that wait for the engine; with more, all of the tenant is invalidated."""

_MAX_UPDATES = 1 << 16
_LOG_FAULTS_EVERY_S = 60.0

WITNESS_S = 2.0
"""How long an invalidation waits for the other replicas to say that they have read it."""


class LogFaults(NamedTuple):
    """What went wrong with reading a log.

    malformed: entries that could not be understood. losses: of the whole log, or of entries that were not read yet.
    faults:    of reading it, that were no fault of its medium.
    """

    malformed: int = 0
    losses: int = 0
    faults: int = 0


class PendingUpdates:
    """Terms that hits added to chunks and that the store does not have yet, of a bounded number of chunks.

    One thread changes them; another may ask for their generation.
    """

    def __init__(self) -> None:
        self._terms: dict[ChunkKey, Terms] = {}

    def __len__(self) -> int:
        return len(self._terms)

    def add(self, key: ChunkKey, terms: Terms) -> int | None:
        """Terms of one more hit; the tenant whose updates had to be forgotten, if there are too many: who has most."""
        tenant: int | None = None
        if len(self._terms) >= _MAX_UPDATES and key not in self._terms:
            ((tenant, _),) = Counter(each.tenant for each in [*self._terms.values(), terms]).most_common(1)
            self._terms = {name: each for name, each in self._terms.items() if each.tenant != tenant}
        if terms.tenant != tenant:
            self._terms[key] = self._terms[key].joined(terms) if key in self._terms else terms
        return tenant

    def joined(self, found: Found) -> Found:
        """What was found, with the updates that it lacks."""
        terms = self._terms.get(found.record.key)
        return found if terms is None else replace(found, terms=found.terms.joined(terms))

    def oldest(self, count: int | None) -> dict[ChunkKey, Terms]:
        """The first so many; all of them for None."""
        return dict(islice(self._terms.items(), count))

    def remove(self, written: Mapping[ChunkKey, Terms]) -> None:
        """The store has these; what was added to them meanwhile stays."""
        for key, terms in written.items():
            if self._terms.get(key) is terms:
                del self._terms[key]

    def defer(self, key: ChunkKey) -> None:
        """Let a chunk whose updates could not be written wait behind all others."""
        if key in self._terms:
            self._terms[key] = self._terms.pop(key)

    def limit(self, generation: int) -> int:
        """A generation, or that of the earliest update: an invalidation may concern a tag that was hit before it."""
        return min([generation, *(terms.generation for terms in list(self._terms.values()))])


class LogFollower:
    """Reads the log again and again.

    since:      how far a former process of this replica came, whose chunks this one may still have on disk. What came
                later is done before all else; everything is forgotten if the log can't say what that is.
    store:      whose log it is, to be closed with it.

    view:       what it says; replaced when the log was lost and began anew.
    generation: of the newest entry read.
    applied:    of the newest entry that the engine took from the queue: what it stores may be older than those behind.
    on_foreign: called, on the thread that reads, when there is something to take from the queue.
    clock_offset_s: whole seconds by which the store's clock is ahead of this replica's.
    updates:    until they are written, this replica does not say that it has read what came after one of them.
    """

    def __init__(
        self,
        log: SharedLog,
        replica: str,
        clock: Clock | None = None,
        *,
        since: LogPosition | None = None,
        store: ObjectStore | None = None,
    ) -> None:
        self.replica = replica
        self.view = LogView()
        self.generation = self.applied = since.generation if since is not None else 0
        self.updates = PendingUpdates()
        self.on_foreign: Callable[[], None] = lambda: None
        self.clock_offset_s = 0
        self._compare_s: float | None = None  # when clocks are compared again
        self._appended = 0
        self._log = log
        self._store = store
        self._clock = clock or SystemClock()
        self._epoch = since.epoch if since is not None else None
        self._read_s = -STALE_S
        self._is_begun = self._is_missed = self._is_shared = False
        self._reported = 0
        self._wrong = LogFaults()
        self._fault_logged_s = -_LOG_FAULTS_EVERY_S
        self._queued = Backlog(_MAX_FOREIGN)
        self._queueing = threading.Lock()
        self._queued_to = self.applied  # up to this generation all that the engine has to do is, or was, queued
        self._queued_check = self._applied_check = since.check if since is not None else b""  # of those entries
        self._reading = threading.Lock()
        self._ending = threading.Event()
        self._answered = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_shared(self) -> bool:
        """Whether others write the log, as it was read last, and it is still there when this process is not."""
        return self._is_shared

    @property
    def position(self) -> LogPosition | None:
        """How far the engine has done what the log says; None before it was read."""
        if self._epoch is None or not self._is_begun:
            return None
        return LogPosition(self._epoch, self.applied, self._applied_check)

    @property
    def age_s(self) -> float:
        """How long ago the log was read."""
        return self._clock.monotonic() - self._read_s

    @property
    def is_fresh(self) -> bool:
        """Whether the log was read so lately that what it says may be relied on."""
        return self.age_s < STALE_S

    def start(self, wait_s: float = 1.0) -> None:
        """Begin to read, on a thread of its own, until `close`; waits at most `wait_s` for the log's first answer."""
        self._thread = start_worker("l2-log", self._run, is_over=self._ending.is_set)
        self._answered.wait(wait_s)

    def poll(self) -> bool:
        """Read what is new and say so. Whether that went well; never raises. Blocks: for the log's deadline."""
        with self._reading:
            started_s = self._clock.monotonic()
            try:
                self._take(self._next_page())
                self._reported = max(self._reported, self.updates.limit(self.generation))
                self._log.report(self.replica, self._reported, REPORT_TTL_S)
                self._compare_clocks(started_s)
            except OSError as error:
                if not self._is_begun and not self._is_missed:
                    self._is_missed = True
                    logger.warning("l2_not_reached error=%s: the L2 is off until its log can be read", str(error))
                elif self.is_fresh:
                    logger.warning("l2_log_not_read error=%s", str(error))
                return False
            except Exception:  # a mistake of ours must not end the thread: without it nothing is ever forgotten here
                self._fault(started_s)
                return False
            self._read_s = started_s
            self._answered.set()
            return True

    @property
    def appended(self) -> int:
        """The generation of what this replica wrote last."""
        return self._appended

    def readers(self) -> dict[str, int]:
        """How far each replica that is alive has said that it read. Raises: OSError. Blocks: for the log's deadline."""
        return self._log.replicas() | {self.replica: self.generation}

    def foreign(self) -> list[Scope]:
        """What other replicas invalidated since the last call: this one's other tiers must forget it now."""
        with self._queueing:
            self.applied, self._applied_check = self._queued_to, self._queued_check
            return self._queued.take()

    def take_faults(self) -> LogFaults:
        """What went wrong with reading the log since the last call."""
        with self._queueing:
            wrong, self._wrong = self._wrong, LogFaults()
        return wrong

    def _count(self, malformed: int = 0, losses: int = 0, faults: int = 0) -> None:
        with self._queueing:
            wrong = self._wrong
            self._wrong = LogFaults(wrong.malformed + malformed, wrong.losses + losses, wrong.faults + faults)

    def append(self, scopes: Sequence[Scope]) -> None:
        """Write an invalidation, and read it.

        Raises: OSError. Blocks: for the log's deadline, twice.
        """
        generation = self._log.append(scopes, self.replica)
        epoch, self._appended = self._epoch, generation
        while self.generation < generation and self._epoch == epoch:  # of another epoch all is read that there is
            if not self.poll() or self._ending.wait(0.001):
                raise TimeoutError("an invalidation was written to the log and can't be read")

    def close(self) -> None:
        """Stop reading, and say that this replica is gone."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join(1.0)
        with contextlib.suppress(OSError):
            self._log.forget(self.replica)
        if self._store is not None:
            self._store.close()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._ending.is_set():
            self.poll()
            self._ending.wait(READ_EVERY_S)

    def _compare_clocks(self, now_s: float) -> None:
        """Times to live in the store are by its clock. Raises: OSError."""
        if self._compare_s is not None and now_s < self._compare_s:
            return
        offset_s = self._log.clock_offset_s()
        self._compare_s = now_s + _COMPARE_EVERY_S
        if abs(offset_s - self.clock_offset_s) > CLOCKS_AGREE_S:
            self.clock_offset_s = round(offset_s)
            logger.warning(
                "l2_clocks_differ offset_s=%d: times to live go by the store's clock; set this host's", round(offset_s)
            )

    def _fault(self, now_s: float) -> None:
        """Count what is no fault of the log's medium; the others learn that this replica has not read on."""
        self._count(faults=1)
        if now_s - self._fault_logged_s >= _LOG_FAULTS_EVERY_S:
            self._fault_logged_s = now_s
            logger.exception("l2_log_fault replica=%s generation=%d", self.replica, self.generation)
        with contextlib.suppress(Exception):
            self._log.report(self.replica, self._reported, REPORT_TTL_S)

    def _next_page(self) -> LogPage:
        """What was not read yet; all that there is, where that continues nothing, or is to be known whole."""
        if self._is_begun:
            page = self._log.read(self.generation)
            if page.epoch == self._epoch:
                return page
        page = self._log.read(0)
        if page.epoch == self._epoch and page.generation < self.generation:
            return self._log.read(self.generation)  # an older copy than a former process read: the log begins anew
        return page

    def _take(self, page: LogPage) -> None:
        is_lost = page.epoch != self._epoch or page.floor > self.generation or self._was_replaced(page)
        if self._epoch is None and not page.is_shared:
            is_lost = False  # nobody wrote it but this replica, and nobody else's log was followed before
        foreign: list[Scope] = []
        if is_lost or not self._is_begun:
            self.view = LogView(page.floor)
        if is_lost:  # nobody can tell what the others invalidated meanwhile
            if self._is_begun:
                self._count(losses=1)
                logger.warning("l2_log_lost generation=%d floor=%d", self.generation, page.floor)
            foreign.append(Scope())
        for entry in page.entries:
            for scope in entry.scopes:
                self.view.add(entry.generation, scope)
            is_new = is_lost or entry.generation > self.generation
            if is_new and entry.by != self.replica:
                foreign.extend(entry.scopes)
            if is_new and not entry.is_whole:
                self._count(malformed=1)
                logger.warning("l2_log_entry_malformed generation=%d by=%s", entry.generation, entry.by)
        with self._queueing:
            self._queued.add(foreign)
            if page.entries or is_lost:
                self._queued_check = page.entries[-1].check if page.entries else b""
            self._queued_to = page.generation
        self._epoch, self.generation, self._is_begun = page.epoch, page.generation, True
        self._is_shared = page.is_shared  # last: from now on objects are judged by it
        if foreign:
            self.on_foreign()

    def _was_replaced(self, page: LogPage) -> bool:
        """Whether the entry up to which a former process read the log is another one now, or none that is kept.

        A medium may show an entry before it is durable; after a power loss another replica appends at its number.
        """
        if self._is_begun:
            return False  # who reads a log goes by the whole entry (l2/log.py)
        there = (entry.check for entry in page.entries if entry.generation == self.generation)
        return next(there, b"") != self._queued_check
