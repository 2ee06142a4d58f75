"""An L2 in an S3 bucket, where a request takes 10 to 100 ms: one object per blob.

Names are those of objects.py, blob_log.py and written_under.py.

S3 has no eviction: give the bucket a lifecycle rule for `objects/`, and one for `metadata/` that keeps it a day longer.
Its LIST and its conditional writes must be strongly consistent, as AWS's are.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    GenericError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import S3Store as ObstoreS3

from hotspan.core.clock import Clock, SystemClock
from hotspan.core.errors import ConfigError
from hotspan.l2 import bounds
from hotspan.l2.base import StoreUsage
from hotspan.l2.blob_log import BlobLog
from hotspan.l2.blobs import Addition, Part
from hotspan.l2.log import SharedInvalidationLog
from hotspan.l2.metadata import ENTRY_BYTES, LIFE_BYTES, MAX_BYTES, new_life
from hotspan.l2.objects import BlobStore
from hotspan.l2.options import S3Options
from hotspan.l2.shared_files import gather
from hotspan.tiers.io import copy

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult, PutMode

T = TypeVar("T")
R = TypeVar("R")

_MAX_TRIES = 32
_MAX_RETRIES = 2
_FIRST_PAUSE = timedelta(milliseconds=50)
_CONNECT_S = 1.0


class _Object(NamedTuple):
    """What a read found. size: of the whole object, of which `data` may be a part. e_tag: of this version of it."""

    data: bytes | bytearray
    e_tag: str
    size: int


class S3Blobs:
    """Blobs under one prefix of a bucket. Every method takes the timeout at most, and raises only OSErrors."""

    batch = 4

    def __init__(self, url: str, options: S3Options) -> None:
        self.url = url
        self._timeout_s = options.timeout_s
        self._store = _opened(url, options.client, options.timeout_s)
        self._pool = ThreadPoolExecutor(options.connections, "hotspan-s3")  # threads begin as they are needed

    def each(self, job: Callable[[T], R], items: Iterable[T], until_s: float | None = None) -> list[R]:
        """`job` of each item, side by side on threads of the store, in the items' order. The first error is raised.

        Raises: TimeoutError at the deadline; a job that has begun then goes on to the end of its request.
        """
        until_s = time.monotonic() + self._timeout_s if until_s is None else until_s
        try:
            futures = [self._pool.submit(job, item) for item in items]
        except RuntimeError:
            raise ConnectionError(f"{self.url} was closed") from None
        done, late = wait(futures, max(0.0, until_s - time.monotonic()), FIRST_EXCEPTION)
        for future in late:
            future.cancel()
        if any(future.cancelled() for future in done):
            raise ConnectionError(f"{self.url} was closed")
        for future in done:
            future.result()
        if late:
            raise TimeoutError(f"{self.url} did not answer within {self._timeout_s:g} s")
        return [future.result() for future in futures]

    def read(self, parts: Sequence[Part]) -> list[bytes | None]:
        found = self.each(lambda part: self.get(part.name, part.limit), parts)
        return [None if one is None else bytes(one.data) for one in found]

    def read_into(self, name: str, into: Sequence[memoryview]) -> bool:
        size = sum(map(len, into))
        (found,) = self.each(lambda name: self.get(name, size), [name])
        if found is None or found.size != size or len(found.data) != size:
            return False
        copy(memoryview(found.data), into)
        return True

    def create(self, name: str, data: Sequence[memoryview | bytes]) -> bool:
        # A copy: an upload may outlast its caller, whose buffers then have other bytes.
        held = memoryview(bytearray(sum(map(len, data))))
        gather(data, held)
        return self.each(lambda name: self.put(name, [held]), [name])[0]

    def create_durable(self, name: str, data: bytes) -> bool:
        return self.create(name, [data])  # S3 acknowledges nothing else

    def append(self, additions: Sequence[Addition]) -> None:
        self.each(self._append, additions)

    def delete(self, names: Sequence[str]) -> None:
        """Objects first. Metadata is emptied, unless it changes meanwhile: the chunk may have been put anew and hit.

        What is emptied begins another life: an object that was put meanwhile is gone with the updates that its hits
        rely on, and no version of metadata ever comes twice, whose tag would meet the condition again.
        """
        until_s = time.monotonic() + self._timeout_s
        beside = [name for name in names if name.startswith("metadata/")]
        former = self.each(lambda name: self.get(name, 1), beside, until_s)
        self.each(self.remove, [[name for name in names if not name.startswith("metadata/")]], until_s)
        emptied = [
            (name, found.e_tag)
            for name, found in zip(beside, former, strict=True)
            if found is not None and found.size != LIFE_BYTES
        ]
        self.each(lambda one: self.put(one[0], [new_life()], over=one[1]), emptied, until_s)

    def overwrite(self, name: str, data: bytes) -> None:
        with _os_errors():
            self.each(lambda name: obstore.put(self._store, name, data, use_multipart=False), [name])

    def written_s(self, name: str) -> float | None:
        """The server dates objects in whole seconds: the middle of that one."""

        def look(name: str) -> float | None:
            try:
                with _os_errors():
                    return obstore.head(self._store, name)["last_modified"].timestamp() + 0.5
            except FileNotFoundError:
                return None

        return self.each(look, [name])[0]

    def usage(self) -> StoreUsage:
        """Nothing, for a bucket does not say; but that it can be reached."""
        self.read([Part("epochs", 1)])
        return StoreUsage()

    def close(self) -> None:
        """Begin no more requests, and wait for those under way, each for its timeout at most."""
        self._pool.shutdown(cancel_futures=True)

    def list(self, directory: str, limit: int) -> list[str]:
        with _os_errors():
            (found,) = self.each(lambda path: _listed(self._store, path, limit), [directory])
        return sorted(found)

    # -- one request each, on a thread of the store ------------------------------------------------------------------

    def get(self, name: str, limit: int) -> _Object | None:
        """The first `limit` bytes of an object; None if it is not there."""
        options: GetOptions = {"range": (0, limit)}
        try:
            with _os_errors():
                got = obstore.get(self._store, name, options=options)
                return _Object(_received(got, limit), got.meta["e_tag"] or "", got.meta["size"])
        except FileNotFoundError:
            return None
        except ConnectionError:
            with _os_errors():
                meta = obstore.head(self._store, name)
            if meta["size"]:
                raise
            return _Object(b"", meta["e_tag"] or "", 0)  # of an empty object S3 sends no range

    def put(self, name: str, data: Sequence[memoryview | bytes], *, over: str | None = None) -> bool:
        """Write an object where none is, or `over` that version of it; False if that is not so."""
        mode: PutMode = "create" if over is None else {"e_tag": over}
        with _os_errors():
            try:
                obstore.put(self._store, name, data, mode=mode, use_multipart=False)
            except (AlreadyExistsError, PreconditionError):
                return False
            except FileNotFoundError as error:
                raise ConnectionError(f"{self.url}: the bucket is not there") from error
        return True

    def remove(self, names: Sequence[str]) -> None:
        """Delete objects, a thousand a request; those that are not there are no error."""
        if names:
            with _os_errors():
                obstore.delete(self._store, names)

    def _append(self, addition: Addition) -> None:
        """S3 can't append: the object is replaced on condition that it is still the one that was read."""
        for _ in range(_MAX_TRIES):
            found = self.get(addition.name, MAX_BYTES + 1)
            if found is not None and found.size > MAX_BYTES:
                return  # it counts as gone, and grows no more
            before, over = (addition.first, None) if found is None else (bytes(found.data), found.e_tag)
            data = addition.data or before[LIFE_BYTES : LIFE_BYTES + ENTRY_BYTES]  # an update twice: another version
            if not data or self.put(addition.name, [before + data], over=over):
                return
        raise OSError(f"{self.url}: others changed {addition.name} each time that it was appended to")


class S3Store(BlobStore):
    """An ObjectStore with a log at s3://BUCKET/PREFIX; it connects when it is first used.

    Raises: ConfigError from the constructor for options that can't work.
    """

    blobs: S3Blobs
    log: SharedInvalidationLog

    def __init__(self, url: str, options: S3Options = S3Options(), clock: Clock | None = None) -> None:  # noqa: B008
        clock = clock or SystemClock()
        blobs = S3Blobs(url, options)
        log = SharedInvalidationLog(BlobLog(blobs, clock), options.log_entries, clock)
        super().__init__(blobs, log, is_per_tenant=options.is_per_tenant)


def _opened(url: str, client: Mapping[str, Any], timeout_s: float) -> ObstoreS3:
    parts = urlsplit(url)
    if parts.scheme != "s3" or not parts.netloc:
        raise ConfigError(f"{url!r} is no bucket: write s3://BUCKET/PREFIX")
    try:
        return ObstoreS3(
            parts.netloc,
            prefix=parts.path.strip("/") or None,
            config=dict(client),  # type: ignore[arg-type]
            # The scheme of the endpoint decides, and AWS's own is https.
            client_options={
                "allow_http": True,
                "timeout": timedelta(seconds=timeout_s),
                "connect_timeout": timedelta(seconds=min(_CONNECT_S, timeout_s)),
            },
            retry_config={
                "max_retries": _MAX_RETRIES,
                "retry_timeout": timedelta(seconds=timeout_s),
                "backoff": {"init_backoff": _FIRST_PAUSE, "max_backoff": 4 * _FIRST_PAUSE, "base": 2},
            },
        )
    except (BaseError, ValueError) as error:
        raise ConfigError(f"{url} can't be used as it is configured: {_line(error)}") from error


@contextmanager
def _os_errors() -> Iterator[None]:
    """What obstore raises, as an OSError; the answers to conditions are for who set them."""
    try:
        yield
    except (AlreadyExistsError, PreconditionError):
        raise
    except (PermissionDeniedError, UnauthenticatedError) as error:
        raise PermissionError(_line(error)) from error
    except GenericError as error:
        raise ConnectionError(_line(error)) from error
    except BaseError as error:
        raise OSError(_line(error)) from error


def _line(error: Exception) -> str:
    """What happened, without obstore's pages of detail."""
    return str(error).partition("\n")[0][: bounds.MAX_REASON]


def _listed(store: ObstoreS3, path: str, limit: int) -> list[str]:
    names: list[str] = []
    for page in obstore.list(store, path):
        names += [meta["path"].rpartition("/")[2] for meta in page]
        if len(names) >= limit:
            break
    return names[:limit]


def _received(got: "GetResult", limit: int) -> bytes | bytearray:
    """The body of an answer, which a server may send longer than it was asked for."""
    data = bytearray()
    for piece in got.stream():
        if len(data) + len(piece) > limit:
            raise ConnectionError("the store sent more than it was asked for")
        data += piece
    return data
