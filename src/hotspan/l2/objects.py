"""The one ObjectStore over blobs: an object and its metadata per chunk.

    objects/EPOCH/TENANT/KEY     [ record 256 | life 16 | zeros up to 4096 ][ frame: header 4096, payload ]
    metadata/EPOCH/KEY           metadata.py

EPOCH is the log's: where that was lost and began anew, so do all objects. TENANT is 0 where tenants share names.

A medium that evicts key by key may drop metadata and keep its object: there each put begins metadata with a life of its
own. On other media metadata begins with the first update and NO_LIFE, and an object without metadata has no updates;
there metadata has to outlive its object, and a delete that can't take both at once empties it into another life.
"""

import errno
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from hotspan.core.types import ChunkKey
from hotspan.l2.base import PREAMBLE_BYTES, Found, Landed, StoreUsage, updated
from hotspan.l2.blobs import Addition, Blobs, Part
from hotspan.l2.log import SharedInvalidationLog
from hotspan.l2.metadata import LIFE_BYTES, MAX_BYTES, NO_LIFE, Metadata, new_life, pack_updates, parse_metadata
from hotspan.tiers.record import RECORD_BYTES, Record, pack, unpack

_HEAD_BYTES = RECORD_BYTES + LIFE_BYTES
_WAVE_GROWTH = 4
_MAX_TRIES = 8


class BlobStore:
    """An ObjectStore.

    log:           of the same medium; None for a medium that keeps none.
    is_per_tenant: whether names of objects tell tenants apart.
    evicts:        whether the medium may drop metadata before its object.
    """

    def __init__(
        self, blobs: Blobs, log: SharedInvalidationLog | None, *, is_per_tenant: bool = False, evicts: bool = False
    ) -> None:
        self.blobs = blobs
        self.log: SharedInvalidationLog | None = log
        self._is_per_tenant = is_per_tenant
        self.evicts = evicts

    def find(self, keys: Sequence[ChunkKey], tenant: int = 0, *, is_chain: bool = True) -> list[Found | None]:
        """As ObjectStore says; of a chain that is not there, the first `blobs.batch` chunks are asked for only."""
        found: list[Found | None] = []
        with self._epoch() as epoch:
            for some in _waves(keys, self.blobs.batch) if is_chain else [keys]:
                heads = self.blobs.read([part for key in some for part in self._parts(epoch, key, tenant)])
                found += [_found(*pair) for pair in zip(some, heads[::2], heads[1::2], strict=True)]
                if is_chain and None in found:
                    break
        return found + [None] * (len(keys) - len(found))

    def get(self, found: Found, into: Sequence[memoryview], landed: Landed | None = None) -> bool:
        record = found.record
        preamble = memoryview(bytearray(PREAMBLE_BYTES))
        with self._epoch() as epoch:
            name = self._object(epoch, record.key, record.terms.tenant)
            is_whole = self.blobs.read_into(name, [preamble, *into])
        return is_whole and unpack(bytes(preamble[:RECORD_BYTES])) == record

    def put(self, record: Record, frame: Sequence[memoryview]) -> bool:
        key, tenant = record.key, record.terms.tenant
        with self._epoch() as epoch:
            name, beside = self._object(epoch, key, tenant), _metadata(epoch, key)
            for _ in range(_MAX_TRIES):
                data, head = self.blobs.read(self._parts(epoch, key, tenant)[::-1])
                metadata = parse_metadata(data)
                if _found(key, head, data) is not None:
                    return False
                if data is not None and metadata is None:
                    self.blobs.delete([name, beside])
                    continue
                if head is not None:
                    self.blobs.delete([name])  # of another life
                life = self._new_life() if metadata is None else metadata.life
                if metadata is None and self.evicts and not self.blobs.create(beside, [life]):
                    continue
                if metadata is not None and not self.evicts:
                    # Hits of this object will rely on the updates that are there: they must outlive it, and a delete.
                    self.blobs.append([Addition(beside, life, b"")])
                preamble = (pack(record) + life).ljust(PREAMBLE_BYTES, b"\0")
                return self.blobs.create(name, [preamble, *frame])
        raise OSError(errno.EBUSY, "a chunk's metadata changed, or could not be deleted, each time that it was stored")

    def add_updates(self, updates: Mapping[ChunkKey, Sequence[bytes]]) -> None:
        with self._epoch() as epoch:
            additions = [
                Addition(_metadata(epoch, key), self._new_life(), pack_updates(some))
                for key, some in updates.items()
                if some
            ]
            self.blobs.append(additions)

    def delete(self, keys: Sequence[ChunkKey], tenant: int = 0) -> None:
        with self._epoch() as epoch:
            objects = [self._object(epoch, key, tenant) for key in keys]
            if self._is_per_tenant and not tenant:
                # Whose objects they are is not known, nor so their names; under another life they are gone as well.
                for key in keys:
                    self.blobs.create(_metadata(epoch, key), [new_life()])
            self.blobs.delete([*objects, *(_metadata(epoch, key) for key in keys)])

    def usage(self) -> StoreUsage:
        return self.blobs.usage()

    def close(self) -> None:
        self.blobs.close()

    def metadata_name(self, key: ChunkKey) -> str:
        """Of the blob beside a chunk."""
        with self._epoch() as epoch:
            return _metadata(epoch, key)

    # -- inside ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _epoch(self) -> Iterator[str]:
        """The epoch's name, for one call. If that fails the log may be lost meanwhile: it is read before the next."""
        try:
            yield "0" if self.log is None else self.log.epoch().hex()
        except OSError:
            if self.log is not None:
                self.log.forget_epoch()
            raise

    def _new_life(self) -> bytes:
        return new_life() if self.evicts else NO_LIFE

    def _object(self, epoch: str, key: ChunkKey, tenant: int) -> str:
        return f"objects/{epoch}/{tenant if self._is_per_tenant else 0:x}/{key.hex()}"

    def _parts(self, epoch: str, key: ChunkKey, tenant: int) -> tuple[Part, Part]:
        return Part(self._object(epoch, key, tenant), _HEAD_BYTES), Part(_metadata(epoch, key), MAX_BYTES + 1)


def _metadata(epoch: str, key: ChunkKey) -> str:
    return f"metadata/{epoch}/{key.hex()}"


def _found(key: ChunkKey, head: bytes | None, data: bytes | None) -> Found | None:
    """What the beginning of an object and its metadata say; None unless the object is the chunk's, and of its life."""
    metadata = Metadata(NO_LIFE) if data is None else parse_metadata(data)
    if head is None or metadata is None or head[RECORD_BYTES:_HEAD_BYTES] != metadata.life:
        return None
    record = unpack(head[:RECORD_BYTES])
    return None if record is None or record.key != key else Found(record, updated(record.terms, metadata.updates))


def _waves(keys: Sequence[ChunkKey], size: int) -> Iterator[Sequence[ChunkKey]]:
    at = 0
    while at < len(keys):
        yield keys[at : at + size]
        at, size = at + size, size * _WAVE_GROWTH
