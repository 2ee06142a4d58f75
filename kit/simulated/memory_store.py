"""Blobs in memory that several replicas share, whose calls fail, hang or lie as a test says."""

import errno
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hotspan.core.clock import Clock, SystemClock
from hotspan.core.types import ChunkKey
from hotspan.l2.base import SharedInvalidation, StoreUsage
from hotspan.l2.blob_log import BlobLog
from hotspan.l2.blobs import Addition, Part
from hotspan.l2.log import SharedInvalidationLog
from hotspan.l2.metadata import LIFE_BYTES
from hotspan.l2.objects import BlobStore

LOG_ENTRIES = 1 << 16


@dataclass
class MemoryServer:
    """What all replicas see. `data` has the blobs by name: a test may change or drop them.

    before, after: called around each call with what it does to which kind of blob ("create objects", "append metadata",
                   "read log", "overwrite replicas"): what they raise is the call's error; they may wait.
    evicts:        whether it may drop metadata before its object (l2/objects.py).
    ahead_s:       of its clock, before that of the replicas' machine.
    """

    clock: Clock = field(default_factory=SystemClock)
    data: dict[str, bytes] = field(default_factory=dict)
    before: Callable[[str], None] = lambda call: None
    after: Callable[[str], None] = lambda call: None
    evicts: bool = True
    batch: int = 4
    lock: threading.Lock = field(default_factory=threading.Lock)
    ahead_s: float = 0.0

    def log(self, log_entries: int = LOG_ENTRIES) -> SharedInvalidationLog:
        """One replica's connection to the log."""
        return SharedInvalidationLog(BlobLog(self, self.clock), log_entries, self.clock)

    def store(self, log_entries: int = LOG_ENTRIES) -> BlobStore:
        """One replica's connection."""
        return BlobStore(self, self.log(log_entries), evicts=self.evicts)

    def evict(self, chunks: int) -> None:
        """As a store that is full: all but the newest so many objects go, each with its metadata."""
        with self.lock:
            names = [name for name in self.data if name.startswith("objects/")]
            gone = {name.rpartition("/")[2] for name in names[: max(0, len(names) - chunks)]}
            for name in [name for name in self.data if name.rpartition("/")[2] in gone]:
                self.data.pop(name, None)

    # -- what a test looks at ----------------------------------------------------------------------------------------

    @property
    def objects(self) -> dict[ChunkKey, str]:
        """The names of the objects that are there, by chunk."""
        return self._by_key("objects")

    @property
    def updated(self) -> set[ChunkKey]:
        """The chunks with updates."""
        return {key for key, name in self._by_key("metadata").items() if len(self.data[name]) > LIFE_BYTES}

    @property
    def entries(self) -> list[SharedInvalidation]:
        """The log."""
        return list(self.log().read(0).entries)

    def _by_key(self, kind: str) -> dict[ChunkKey, str]:
        names = [name.split("/") for name in list(self.data)]
        return {ChunkKey(bytes.fromhex(parts[-1])): "/".join(parts) for parts in names if parts[0] == kind}

    # -- blobs -------------------------------------------------------------------------------------------------------

    def read(self, parts: Sequence[Part]) -> list[bytes | None]:
        call = _call("read", *(part.name for part in parts))
        self.before(call)
        found = [self.data.get(part.name) for part in parts]
        self.after(call)
        return [None if data is None else data[: part.limit] for data, part in zip(found, parts, strict=True)]

    def read_into(self, name: str, into: Sequence[memoryview]) -> bool:
        self.before(_call("read_into", name))
        data = self.data.get(name)
        if data is None or len(data) != sum(map(len, into)):
            return False
        at = 0
        for view in into:
            view[:] = data[at : at + len(view)]
            at += len(view)
        self.after(_call("read_into", name))
        return True

    def create(self, name: str, data: Sequence[memoryview | bytes]) -> bool:
        self.before(_call("create", name))
        with self.lock:
            is_new = name not in self.data
            self.data.setdefault(name, b"".join(data))
        self.after(_call("create", name))
        return is_new

    def create_durable(self, name: str, data: bytes) -> bool:
        return self.create(name, [data])

    def append(self, additions: Sequence[Addition]) -> None:
        for one in additions:
            self.before(_call("append", one.name))
            with self.lock:
                self.data[one.name] = self.data.get(one.name, one.first) + one.data
            self.after(_call("append", one.name))

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            self.before(_call("delete", name))
            self.data.pop(name, None)
            self.after(_call("delete", name))

    def overwrite(self, name: str, data: bytes) -> None:
        self.before(_call("overwrite", name))
        self.data[name] = data
        self.after(_call("overwrite", name))

    def written_s(self, name: str) -> float | None:
        return time.time() + self.ahead_s if name in self.data else None

    def list(self, directory: str, limit: int) -> list[str]:
        self.before(_call("list", directory))
        with self.lock:
            names = list(self.data)
        return [name.rpartition("/")[2] for name in names if name.rpartition("/")[0] == directory][:limit]

    def usage(self) -> StoreUsage:
        self.before("usage")
        return StoreUsage(len(self.objects), sum(map(len, self.data.values())))

    def close(self) -> None:
        return


OBJECT_KINDS = ("head", "read", "write", "torn", "slow", "slow_write")
"""head: EIO to all reads of the object. read: to those of its frame. write: to its creation. torn: its creation
succeeds, and its second half is zeros. slow: any of these takes `slow_s`. slow_write: its creation does.
"""


@dataclass
class BadObjects(MemoryServer):
    """A store where the objects of some chunks are bad, in one of the ways in OBJECT_KINDS.

    bad: the ways, by chunk. moves: an object that was deleted is made anew elsewhere, and is sound from then on.
    wait: called with how long a slow call takes. met: calls that met a bad object.
    """

    bad: dict[ChunkKey, str] = field(default_factory=dict)
    moves: bool = False
    slow_s: float = 8.0
    wait: Callable[[float], None] = time.sleep
    met: Counter[str] = field(default_factory=Counter)

    def read(self, parts: Sequence[Part]) -> list[bytes | None]:
        for part in parts:
            if part.name in self.data and self._meet(part.name, "head", "slow") == "head":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read(parts)

    def read_into(self, name: str, into: Sequence[memoryview]) -> bool:
        if name in self.data and self._meet(name, "head", "read", "slow") in ("head", "read"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read_into(name, into)

    def create(self, name: str, data: Sequence[memoryview | bytes]) -> bool:
        kind = self._meet(name, "write", "torn", "slow", "slow_write")
        if kind == "write":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if kind == "torn":
            whole = b"".join(data)
            data = [whole[: len(whole) // 2].ljust(len(whole), b"\0")]
        return super().create(name, data)

    def delete(self, names: Sequence[str]) -> None:
        super().delete(names)
        if self.moves:
            for name in names:
                if name.startswith("objects/"):
                    self.bad.pop(_key(name), None)

    def _meet(self, name: str, *kinds: str) -> str | None:
        """The way in which an object is bad, if it is one of these; a slow one is waited for."""
        kind = self.bad.get(_key(name)) if name.startswith("objects/") else None
        if kind not in kinds:
            return None
        self.met[kind] += 1
        if kind in ("slow", "slow_write"):
            self.wait(self.slow_s)
        return kind


def _key(name: str) -> ChunkKey:
    return ChunkKey(bytes.fromhex(name.rpartition("/")[2]))


def _call(method: str, *names: str) -> str:
    return " ".join([method, *(name.partition("/")[0] for name in names[:1])])
