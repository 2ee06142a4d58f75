"""A store in memory that several replicas share, whose calls fail, hang or lie as a test says."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hotspan.core.clock import Clock, SystemClock
from hotspan.core.frame import segments
from hotspan.core.terms import Scope
from hotspan.core.types import ChunkKey
from hotspan.l2.base import Found, Landed, LogPage, SharedInvalidation, SharedLog, StoreUsage, marked
from hotspan.tiers.record import Record, pack, unpack


@dataclass(slots=True)
class MemoryServer:
    """What all replicas see. `objects` are bytes as they were put: a test may change or drop them.

    before: called with a method's name before each call of a store or its log: it may raise OSError, or wait.
    """

    objects: dict[ChunkKey, tuple[bytes, bytes]] = field(default_factory=dict)
    marks: dict[ChunkKey, set[bytes]] = field(default_factory=dict)
    entries: list[SharedInvalidation] = field(default_factory=list)
    reports: dict[str, tuple[int, float]] = field(default_factory=dict)
    floor: int = 0
    epoch: bytes = bytes(16)
    before: Callable[[str], None] = lambda method: None
    clock: Clock = field(default_factory=SystemClock)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def lose(self) -> None:
        """It restarts with nothing left."""
        self.objects.clear()
        self.marks.clear()
        latest = max([self.floor, *(entry.generation for entry in self.entries)])
        self.floor = max(latest + 1, int(self.clock.unix() * 1000))
        self.entries.clear()
        self.epoch = bytes([self.epoch[0] + 1] * 16)


class MemoryLog:
    """One replica's connection to the log."""

    def __init__(self, server: MemoryServer) -> None:
        self._server = server

    def append(self, scopes: Sequence[Scope], by: str) -> int:
        self._server.before("append")
        with self._server.lock:
            entries = self._server.entries
            generation = 1 + (entries[-1].generation if entries else self._server.floor)
            entries.append(SharedInvalidation(generation, tuple(scopes), by))
            return generation

    def read(self, after: int) -> LogPage:
        self._server.before("read")
        with self._server.lock:
            newer = [entry for entry in self._server.entries if entry.generation > after]
            last = max([self._server.floor, *(entry.generation for entry in self._server.entries[-1:])])
            return LogPage(self._server.epoch, last, self._server.floor, newer)

    def report(self, replica: str, generation: int, ttl_s: float) -> None:
        self._server.before("report")
        self._server.reports[replica] = (generation, self._server.clock.monotonic() + ttl_s)

    def forget(self, replica: str) -> None:
        self._server.before("forget")
        self._server.reports.pop(replica, None)

    def replicas(self) -> dict[str, int]:
        self._server.before("replicas")
        now_s = self._server.clock.monotonic()
        return {name: read for name, (read, until_s) in list(self._server.reports.items()) if until_s > now_s}


class MemoryStore:
    """One replica's connection to a MemoryServer."""

    def __init__(self, server: MemoryServer) -> None:
        self._server = server
        self.log: SharedLog | None = MemoryLog(server)
        self.is_closed = False

    def find(self, keys: Sequence[ChunkKey], tenant: int = 0, *, is_chain: bool = True) -> list[Found | None]:
        self._server.before("find")
        with self._server.lock:
            return [self._found(key) for key in keys]

    def get(self, found: Found, into: Sequence[memoryview], landed: Landed | None = None) -> bool:
        self._server.before("get")
        _, frame = self._server.objects.get(found.record.key, (b"", b""))
        if len(frame) != sum(map(len, into)):
            return False
        at = 0
        for part in into:
            part[:] = frame[at : at + len(part)]
            at += len(part)
        if landed is not None:
            for _, first, stop in segments(len(into[1])):
                landed(first, into[1][first:stop])
        return True

    def put(self, record: Record, frame: Sequence[memoryview]) -> bool:
        self._server.before("put")
        data = b"".join(frame)
        with self._server.lock:
            is_new = record.key not in self._server.objects
            if is_new:
                self._server.objects[record.key] = (pack(record), data)
        self._server.before("put ended")
        return is_new

    def mark(self, marks: Mapping[ChunkKey, Sequence[bytes]]) -> None:
        self._server.before("mark")
        with self._server.lock:
            for key, some in marks.items():
                self._server.marks.setdefault(key, set()).update(some)

    def delete(self, keys: Sequence[ChunkKey], tenant: int = 0) -> None:
        self._server.before("delete")
        with self._server.lock:
            for key in keys:
                self._server.objects.pop(key, None)
                self._server.marks.pop(key, None)

    def usage(self) -> StoreUsage:
        self._server.before("usage")
        objects = self._server.objects
        return StoreUsage(len(objects), sum(len(frame) for _, frame in objects.values()))

    def close(self) -> None:
        self.is_closed = True

    def _found(self, key: ChunkKey) -> Found | None:
        record = unpack(self._server.objects[key][0]) if key in self._server.objects else None
        if record is None:
            return None
        return Found(record, marked(record.terms, self._server.marks.get(key, ())))
