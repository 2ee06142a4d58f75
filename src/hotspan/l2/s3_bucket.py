"""A bucket as the S3 store uses it: requests side by side under one deadline, and only OSErrors."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
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

from hotspan.core.errors import ConfigError

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult, PutMode

T = TypeVar("T")
R = TypeVar("R")

Data = bytes | memoryview | obstore.Bytes

_MOST_RETRIES = 2
_FIRST_PAUSE = timedelta(milliseconds=50)
_CONNECT_S = 1.0


@dataclass(frozen=True, slots=True)
class Blob:
    """What a read found. size: of the whole object, of which `data` may be a part. e_tag: of this version of it."""

    data: obstore.Bytes | bytes
    e_tag: str
    size: int


class Bucket:
    """The objects under one prefix of a bucket. Threads may share it.

    `read`, `write`, `delete` and `list` each block for one request. `each` runs such calls side by side, on threads of
    its own, and waits no longer than the deadline that `until` gave. All raise OSError where the bucket can't be
    reached or refuses.

    client: obstore's settings for S3. What is not in it comes from the AWS_* variables that obstore reads itself.
    """

    def __init__(self, url: str, client: Mapping[str, Any], timeout_s: float, connections: int) -> None:
        self.url = url
        self._timeout_s = timeout_s
        self._store = _opened(url, client, timeout_s)
        self._pool = ThreadPoolExecutor(connections, "hotspan-s3")  # threads begin as they are needed

    def until(self) -> float:
        """The deadline of what begins now, on `time.monotonic`."""
        return time.monotonic() + self._timeout_s

    def each(self, job: Callable[[T], R], items: Iterable[T], until: float) -> list[R]:
        """`job` of each item, side by side, in the items' order. The first OSError of a job is raised at once.

        Raises: TimeoutError at the deadline; a job that has begun then goes on to the end of its request.
        """
        return self.results([self.begin(partial(job, item)) for item in items], until)

    def call(self, job: Callable[[], R], until: float) -> R:
        """`job` alone, as `each` does it."""
        return self.results([self.begin(job)], until)[0]

    def begin(self, job: Callable[[], R]) -> Future[R]:
        """Begin a job, for `results` to wait for."""
        try:
            return self._pool.submit(job)
        except RuntimeError:
            raise ConnectionError(f"{self.url} was closed") from None

    def results(self, futures: Sequence[Future[R]], until: float) -> list[R]:
        """What the jobs returned, as `each` says."""
        done, late = wait(futures, max(0.0, until - time.monotonic()), FIRST_EXCEPTION)
        for future in late:
            future.cancel()
        try:
            for future in done:
                future.result()
        except CancelledError:
            raise ConnectionError(f"{self.url} was closed") from None
        if late:
            raise TimeoutError(f"{self.url} did not answer within {self._timeout_s:g} s")
        return [future.result() for future in futures]

    def read(self, path: str, start: int = 0, stop: int | None = None) -> Blob | None:
        """What an object has of its bytes [start, stop); None if it is not there."""
        options: GetOptions = {} if stop is None else {"range": (start, stop)}
        try:
            with _os_errors():
                return _blob(obstore.get(self._store, path, options=options))
        except FileNotFoundError:
            return None
        except ConnectionError:
            short = self._read_nothing(path, start) if stop is not None else None
            if short is None:
                raise
            return short

    def write(self, path: str, data: Data | Sequence[Data], *, over: str | None = None) -> str | None:
        """Write an object where none is, or `over` that version of it; its new version, None if that is not so."""
        mode: PutMode = "create" if over is None else {"e_tag": over}
        with _os_errors():
            try:
                return obstore.put(self._store, path, data, mode=mode, use_multipart=False)["e_tag"] or ""
            except (AlreadyExistsError, PreconditionError):
                return None
            except FileNotFoundError as error:
                raise ConnectionError(f"{self.url}: the bucket is not there") from error

    def overwrite(self, path: str, data: Data) -> None:
        """Write an object whatever is there."""
        with _os_errors():
            obstore.put(self._store, path, data, use_multipart=False)

    def delete(self, paths: Sequence[str]) -> None:
        """Delete objects, a thousand a request; those that are not there are no error."""
        if paths:
            with _os_errors():
                obstore.delete(self._store, paths)

    def list(self, directory: str) -> "list[str]":
        """The paths of all objects under a directory, sorted, a thousand a request."""
        with _os_errors():
            return sorted(meta["path"] for meta in obstore.list(self._store, directory).collect())

    def close(self) -> None:
        """Begin no more requests, and wait for those under way, each for its timeout at most."""
        self._pool.shutdown(cancel_futures=True)

    def _read_nothing(self, path: str, start: int) -> Blob | None:
        """An object that ends before `start`, of which S3 refuses to send what is behind; None if that is not so."""
        with _os_errors():
            meta = obstore.head(self._store, path)
        return Blob(b"", meta["e_tag"] or "", meta["size"]) if meta["size"] <= start else None


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
                "max_retries": _MOST_RETRIES,
                "retry_timeout": timedelta(seconds=timeout_s),
                "backoff": {"init_backoff": _FIRST_PAUSE, "max_backoff": 4 * _FIRST_PAUSE, "base": 2},
            },
        )
    except (BaseError, ValueError) as error:
        raise ConfigError(f"{url} can't be used as it is configured: {_line(error)}") from error


def _blob(got: "GetResult") -> Blob:
    meta = got.meta
    return Blob(got.bytes(), meta["e_tag"] or "", meta["size"])


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
    return str(error).partition("\n")[0]
