"""An L2 in an S3 bucket, where a request takes 10 to 100 ms: one object per blob.

Names are those of objects.py and blob_log.py.

S3 has no eviction: give the bucket a lifecycle rule for `objects/`, and one for `metadata/` that keeps it a day longer.
Its LIST and its conditional writes must be strongly consistent, as AWS's are.
"""

from collections.abc import Sequence
from functools import partial

from hotspan.core.clock import Clock, SystemClock
from hotspan.l2.base import StoreUsage
from hotspan.l2.blob_log import BlobLog
from hotspan.l2.blobs import Addition, Part
from hotspan.l2.log import SharedInvalidationLog
from hotspan.l2.metadata import LIFE_BYTES, MAX_BYTES, NO_LIFE
from hotspan.l2.objects import BlobStore
from hotspan.l2.options import S3Options
from hotspan.l2.s3_bucket import Bucket
from hotspan.tiers.io import copy

_MAX_TRIES = 32


class S3Blobs:
    """Blobs in a bucket; every method takes the bucket's timeout at most."""

    batch = 4

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def read(self, parts: Sequence[Part]) -> list[bytes | None]:
        return self._bucket.each(self._begin_of, parts, self._bucket.until())

    def read_into(self, name: str, into: Sequence[memoryview]) -> bool:
        size = sum(map(len, into))
        blob = self._bucket.call(partial(self._bucket.read, name, 0, size), self._bucket.until())
        if blob is None or blob.size != size or len(blob.data) != size:
            return False
        copy(memoryview(blob.data), into)
        return True

    def create(self, name: str, data: Sequence[memoryview | bytes]) -> bool:
        return self._bucket.call(partial(self._bucket.write, name, data), self._bucket.until()) is not None

    def create_durable(self, name: str, data: bytes) -> bool:
        return self.create(name, [data])  # S3 acknowledges nothing else

    def append(self, additions: Sequence[Addition]) -> None:
        self._bucket.each(self._append, additions, self._bucket.until())

    def delete(self, names: Sequence[str]) -> None:
        """Objects first. Metadata is emptied, unless it changes meanwhile: the chunk may have been put anew and hit."""
        until = self._bucket.until()
        beside = [name for name in names if name.startswith("metadata/")]
        former = self._bucket.each(lambda name: self._bucket.read(name, 0, LIFE_BYTES + 1), beside, until)
        others = [name for name in names if not name.startswith("metadata/")]
        self._bucket.call(partial(self._bucket.delete, others), until)
        emptied = [
            partial(self._bucket.write, name, NO_LIFE, over=blob.e_tag)
            for name, blob in zip(beside, former, strict=True)
            if blob is not None and bytes(blob.data) != NO_LIFE
        ]
        self._bucket.each(lambda empty: empty(), emptied, until)

    def overwrite(self, name: str, data: bytes) -> None:
        self._bucket.call(partial(self._bucket.overwrite, name, data), self._bucket.until())

    def list(self, directory: str) -> list[str]:
        paths = self._bucket.call(partial(self._bucket.list, directory), self._bucket.until())
        return [path.rpartition("/")[2] for path in paths]

    def usage(self) -> StoreUsage:
        """Nothing, for a bucket does not say; but that it can be reached."""
        self.read([Part("epochs", 1)])
        return StoreUsage()

    def close(self) -> None:
        """Let go of connections. Blocks: for requests under way."""
        self._bucket.close()

    # -- inside: each call here blocks for a request or two, on one of the bucket's threads --------------------------

    def _begin_of(self, part: Part) -> bytes | None:
        blob = self._bucket.read(part.name, 0, part.limit)
        return None if blob is None else bytes(blob.data)

    def _append(self, addition: Addition) -> None:
        """S3 can't append: the blob is replaced on condition that it is still the one that was read."""
        for _ in range(_MAX_TRIES):
            blob = self._bucket.read(addition.name)
            if blob is not None and blob.size > MAX_BYTES:
                return  # it counts as gone, and grows no more
            before, over = (addition.first, None) if blob is None else (bytes(blob.data), blob.e_tag)
            if self._bucket.write(addition.name, before + addition.data, over=over) is not None:
                return
        raise OSError(f"{self._bucket.url}: others changed {addition.name} each time that it was appended to")


class S3Store(BlobStore):
    """An ObjectStore with a log at s3://BUCKET/PREFIX; it connects when it is first used.

    Raises: ConfigError from the constructor for settings that can't work.
    """

    log: SharedInvalidationLog

    def __init__(self, url: str, options: S3Options = S3Options(), clock: Clock | None = None) -> None:  # noqa: B008
        clock = clock or SystemClock()
        blobs = S3Blobs(Bucket(url, options.client, options.timeout_s, options.connections))
        log = SharedInvalidationLog(BlobLog(blobs, clock), options.log_entries, clock)
        super().__init__(blobs, log, is_per_tenant=options.is_per_tenant)
