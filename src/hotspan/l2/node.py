"""The daemon of this node as an L2: hotspan's own by its Unix socket, or whatever answers at the port.

Which of the two there is, is not known before it is there, and may change: a daemon is often started after the
replicas. So each call looks again, until hotspan's own was there once.

    nothing answers    no call succeeds, and no invalidation is durable: what comes may keep a log that others write
    at the port        objects by HTTP, which keeps no log: this replica's own is in its memory (VolatileLog)
    the Unix socket    objects and log of hotspan's daemon, for good: it is awaited while it is away

A log of one's own is replaced by the daemon's: what was invalidated until then is written there first, and who followed
it knows by the new epoch that entries may be missing.
"""

import errno
import logging
import stat
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from hotspan.core.clock import Clock, SystemClock
from hotspan.core.deadline import Deadline
from hotspan.core.terms import Scope
from hotspan.core.types import ChunkKey
from hotspan.l2.base import Found, Landed, LogPage, ObjectStore, SharedLog, StoreUsage
from hotspan.l2.daemon import DaemonStore
from hotspan.l2.hyperpod import HyperpodStore
from hotspan.l2.log import VolatileLog
from hotspan.l2.options import HyperpodOptions
from hotspan.tiers.record import Record

logger = logging.getLogger(__name__)


class NodeStore:
    """An ObjectStore with a log.

    own:     of hotspan's daemon. by_http: of whatever answers at the port.
    is_there: whether hotspan's daemon is. answers: returns if any daemon answers at the port. Raises: OSError.
    follows: whether the daemon's log is what its objects are judged by, whoever reads that; until it is they are not
             to be had.
    """

    def __init__(
        self,
        own: ObjectStore,
        by_http: ObjectStore,
        is_there: Callable[[], bool],
        answers: Callable[[], object],
        clock: Clock | None = None,
    ) -> None:
        if own.log is None:
            raise ValueError("hotspan's daemon keeps a log")
        self.own, self.by_http = own, by_http
        self._is_there = is_there
        self._is_own = False
        self.log: SharedLog = ChosenLog(own.log, lambda: self.is_own, answers, clock or SystemClock())
        self.follows: Callable[[], bool] = lambda: True

    @property
    def is_own(self) -> bool:
        """Whether hotspan's own daemon is, or was, there."""
        if not self._is_own and self._is_there():
            self._is_own = True
            logger.info("l2_daemon_found")
        return self._is_own

    def find(self, keys: Sequence[ChunkKey], tenant: int = 0, *, is_chain: bool = True) -> list[Found | None]:
        return self._store().find(keys, tenant, is_chain=is_chain)

    def get(self, found: Found, into: Sequence[memoryview], landed: Landed | None = None) -> bool:
        return self._store().get(found, into, landed)

    def put(self, record: Record, frame: Sequence[memoryview]) -> bool:
        return self._store().put(record, frame)

    def add_updates(self, updates: Mapping[ChunkKey, Sequence[bytes]]) -> None:
        self._store().add_updates(updates)

    def delete(self, keys: Sequence[ChunkKey], tenant: int = 0) -> None:
        self._store().delete(keys, tenant)

    def usage(self) -> StoreUsage:
        return self._store().usage()

    def close(self) -> None:
        self.own.close()
        self.by_http.close()

    def _store(self) -> ObjectStore:
        if not self.is_own:
            return self.by_http
        if not self.follows():
            raise OSError(errno.EBUSY, "the daemon's log was not read yet")
        return self.own


class ChosenLog:
    """A SharedLog: the daemon's once that is there, until then one in this process.

    One follower reads it. is_own: whether hotspan's daemon is there.
    answers: returns if any daemon answers at the port. Raises: OSError.
    """

    def __init__(
        self, shared: SharedLog, is_own: Callable[[], bool], answers: Callable[[], object], clock: Clock
    ) -> None:
        self._shared = shared
        self._is_own = is_own
        self._answers = answers
        self._alone = VolatileLog(clock)
        self._has_answered = self._is_shared = self._was_alone = False
        self._continues = -1  # the generation of the last page of the daemon's log
        self._choosing = threading.Lock()

    @property
    def is_shared(self) -> bool:
        """Whether it is the daemon's by now."""
        return self._is_shared

    def is_used(self) -> bool:
        return self._chosen().is_used()

    def append(self, scopes: Sequence[Scope], by: str) -> int:
        with self._choosing:
            if not self._chooses_shared():
                return self._alone.append(scopes, by)
        return self._shared.append(scopes, by)

    def read(self, after: int) -> LogPage:
        if (log := self._chosen()) is self._alone:
            self._was_alone = True
            return log.read(after)
        # A generation of the other log says nothing here: asked for what comes after it, this one would seem lost.
        page = log.read(after if not self._was_alone or after == self._continues else 0)
        self._continues = page.generation
        return page

    def report(self, replica: str, generation: int, ttl_s: float) -> None:
        self._chosen().report(replica, generation, ttl_s)

    def forget(self, replica: str) -> None:
        self._chosen().forget(replica)

    def replicas(self) -> dict[str, int]:
        return self._chosen().replicas()

    def clock_offset_s(self) -> float:
        return self._chosen().clock_offset_s()

    def _chosen(self) -> SharedLog:
        with self._choosing:
            return self._shared if self._chooses_shared() else self._alone

    def _chooses_shared(self) -> bool:
        """Whether the daemon's log counts from now on. Raises: OSError while that is not known."""
        if not self._is_shared and self._is_own():
            self._hand_over()
            self._is_shared = True
        if not self._is_shared and not self._has_answered:
            self._answers()
            self._has_answered = True
            logger.warning("l2_log_not_shared: invalidations hold on this replica only; name a log with --l2-log")
        return self._is_shared

    def _hand_over(self) -> None:
        """Write into the daemon's log what was invalidated without it: its objects are to obey that, too."""
        page = self._alone.read(0)
        if page.entries:
            scopes = dict.fromkeys(scope for entry in page.entries for scope in entry.scopes)
            self._shared.append((Scope(),) if self._alone.has_forgotten else tuple(scopes), page.entries[-1].by)


def open_node(socket: Path, address: tuple[str, int], options: HyperpodOptions, unused: Iterable[str]) -> NodeStore:
    """The daemon behind this Unix socket, once there is one, else at this address.

    unused: options that have no effect where it is hotspan's own, for the log.
    """
    by_http = HyperpodStore(*address, options)

    def is_there() -> bool:
        is_socket = _is_socket(socket)
        if is_socket and (ignored := ",".join(unused)):
            logger.warning("l2_options_without_effect options=%s: the daemon is at %s", ignored, socket)
        return is_socket

    return NodeStore(
        DaemonStore(socket, deadline_s=options.timeout_s),
        by_http,
        is_there,
        lambda: by_http.blobs.daemon.health(Deadline(options.timeout_s)),
    )


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.stat().st_mode)
    except OSError:
        return False
