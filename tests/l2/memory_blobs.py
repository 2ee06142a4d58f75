"""Blobs in memory that several stores share, whose calls fail as a test says."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hotspan.core.clock import Clock
from hotspan.l2.base import StoreUsage
from hotspan.l2.blob_log import BlobLog
from hotspan.l2.blobs import Addition, Part
from hotspan.l2.log import SharedInvalidationLog
from hotspan.l2.objects import BlobStore


@dataclass
class MemoryBlobs:
    """before, after: called with a method's name around each call; what they raise is the call's error."""

    data: dict[str, bytes] = field(default_factory=dict)
    before: Callable[[str], None] = lambda method: None
    after: Callable[[str], None] = lambda method: None
    batch: int = 4

    def store(self, clock: Clock, log_entries: int = 100, *, evicts: bool = True) -> BlobStore:
        """Another replica's store."""
        return BlobStore(self, SharedInvalidationLog(BlobLog(self, clock), log_entries, clock), evicts=evicts)

    def read(self, parts: Sequence[Part]) -> list[bytes | None]:
        self.before("read")
        found = [self.data.get(part.name) for part in parts]
        self.after("read")
        return [None if data is None else data[: part.limit] for data, part in zip(found, parts, strict=True)]

    def read_into(self, name: str, into: Sequence[memoryview]) -> bool:
        self.before("read_into")
        data = self.data.get(name)
        if data is None or len(data) != sum(map(len, into)):
            return False
        at = 0
        for view in into:
            view[:] = data[at : at + len(view)]
            at += len(view)
        self.after("read_into")
        return True

    def create(self, name: str, data: Sequence[memoryview | bytes]) -> bool:
        self.before("create")
        is_new = name not in self.data
        self.data.setdefault(name, b"".join(data))
        self.after("create")
        return is_new

    def create_durable(self, name: str, data: bytes) -> bool:
        return self.create(name, [data])

    def append(self, additions: Sequence[Addition]) -> None:
        for one in additions:
            self.before("append")
            self.data[one.name] = self.data.get(one.name, one.first) + one.data
            self.after("append")

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            self.before("delete")
            self.data.pop(name, None)
            self.after("delete")

    def overwrite(self, name: str, data: bytes) -> None:
        self.before("overwrite")
        self.data[name] = data
        self.after("overwrite")

    def list(self, directory: str) -> list[str]:
        self.before("list")
        return [name.rpartition("/")[2] for name in self.data if name.rpartition("/")[0] == directory]

    def usage(self) -> StoreUsage:
        return StoreUsage()

    def close(self) -> None:
        return
