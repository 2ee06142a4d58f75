"""Models in S3: fetched once into a local directory.

    CACHE/NAME-DIGEST/         a whole model, published by one rename
    CACHE/NAME-DIGEST.part/    one on its way; its `.parts` lists what is on the disk: the next start goes on there
    CACHE/NAME-DIGEST.lock     held by whoever fetches it; others wait

The digest is of the address and of every object's path, size and ETag: what changes in the bucket is another model.
"""

import hashlib
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import BaseError, PreconditionError
from obstore.store import S3Store

from hotspan.config.environment import cache_directory
from hotspan.core.errors import ConfigError
from hotspan.core.private import locked, private_directory, sync_directory
from hotspan.core.progress import Progress
from hotspan.core.redaction import redacted_text
from hotspan.core.types import GIB, MIB

logger = logging.getLogger(__name__)

PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
"""Ends of names of files that can run code when they are read."""

OTHER_CACHE = "set XDG_CACHE_HOME to a directory of this user's"

_PART_BYTES = 32 * MIB
_WRITE_BYTES = 4 * MIB
_CONNECTIONS = 16
_ATTEMPTS = 3
_TIMEOUT = timedelta(minutes=5)
_CONNECT = timedelta(seconds=10)
_RETRY_S = 60.0
_JOURNAL = ".parts"


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One object of a model, and the file that it becomes."""

    path: str
    size: int
    e_tag: str


@dataclass(frozen=True, slots=True)
class _Part:
    """Bytes [start, stop) of a file."""

    file: RemoteFile
    start: int
    stop: int


def model_cache(environment: Mapping[str, str]) -> Path:
    """Where fetched models are kept."""
    return cache_directory(environment) / "models"


def fetch_model(url: str, cache: Path, *, is_secure: bool = False) -> Path:
    """The directory of the model at s3://BUCKET/PREFIX; what is there already is not fetched again.

    Credentials, region and endpoint are those of the AWS_* variables, a web identity, the container or the instance.
    is_secure: take no pickled weights, only safetensors.
    Blocks:    for the transfer; several at once are waited for, too.
    Raises:    ConfigError that says what is missing: the bucket, the model in it, a permission, room on the disk.
    """
    store = _opened(url)
    files = _wanted(url, _listed(url, store), is_secure=is_secure)
    private_directory(cache, "the model", OTHER_CACHE)
    name = PurePosixPath(urlsplit(url).path).name or urlsplit(url).netloc
    target = cache / f"{name}-{_digest(url, files)}"
    try:
        with locked(target.with_name(f"{target.name}.lock")):
            if not _is_whole(target, files):
                _fetch(url, store, files, target)
    except OSError as error:
        raise ConfigError(
            f"{url} can't be kept in {cache} ({error.strerror}): make room or set XDG_CACHE_HOME to a directory with "
            f"{_gib(sum(file.size for file in files))} free"
        ) from error
    return target


def _opened(url: str) -> S3Store:
    parts = urlsplit(url)
    if redacted_text(url) != url or "@" in parts.netloc:
        raise ConfigError("a model's address holds a credential: leave it out, and set AWS_ACCESS_KEY_ID and the like")
    if parts.scheme != "s3" or not parts.netloc or parts.query or parts.fragment:
        raise ConfigError(f"{url!r} is no model in S3: write s3://BUCKET/PREFIX")
    try:
        return S3Store(
            parts.netloc,
            prefix=parts.path.strip("/") or None,
            # The scheme of the endpoint decides, and AWS's own is https.
            client_options={"allow_http": True, "timeout": _TIMEOUT, "connect_timeout": _CONNECT},
            retry_config={"retry_timeout": timedelta(seconds=_RETRY_S)},
        )
    except (BaseError, ValueError) as error:
        raise ConfigError(f"{url} can't be used as it is configured: {_line(error)}") from error


def _listed(url: str, store: S3Store) -> list[RemoteFile]:
    try:
        found = [RemoteFile(each["path"], each["size"], each["e_tag"] or "") for each in obstore.list(store).collect()]
    except BaseError as error:
        raise _refused(url, error) from error
    # Consoles make a directory by an empty object of its name.
    directories = {str(parent) for file in found for parent in PurePosixPath(file.path).parents}
    return sorted(
        (file for file in found if file.size or (file.path and file.path not in directories)),
        key=lambda file: file.path,
    )


def _wanted(url: str, files: Sequence[RemoteFile], *, is_secure: bool) -> list[RemoteFile]:
    """The files to fetch. Raises: ConfigError if they are no model, or a path leads out of its directory."""
    for file in files:
        path = PurePosixPath(file.path)
        if path.is_absolute() or ".." in path.parts or str(path) != file.path or path.name == _JOURNAL:
            raise ConfigError(f"{url} has an object {file.path!r}, which can't be a file: remove or rename it")
    if "config.json" not in {file.path for file in files}:
        raise ConfigError(
            f"{url} holds no config.json: give the prefix under which a Hugging Face model's files lie, unpacked"
        )
    if not is_secure:
        return list(files)
    kept = [file for file in files if not file.path.lower().endswith(PICKLED)]
    if not any(file.path.endswith(".safetensors") for file in kept):
        raise ConfigError(f"{url} holds no *.safetensors, and secure mode loads nothing else: convert its weights")
    return kept


def _digest(url: str, files: Sequence[RemoteFile]) -> str:
    digest = hashlib.sha256(repr(url.rstrip("/")).encode())
    for file in files:
        digest.update(repr((file.path, file.size, file.e_tag)).encode())
    return digest.hexdigest()[:16]


def _is_whole(directory: Path, files: Sequence[RemoteFile]) -> bool:
    try:
        return all((directory / file.path).stat().st_size == file.size for file in files)
    except OSError:
        return False


def _fetch(url: str, store: S3Store, files: Sequence[RemoteFile], target: Path) -> None:
    """Fetch what is missing, and publish the directory. Raises: ConfigError; OSError of the disk."""
    directory = target.with_name(f"{target.name}.part")
    if target.exists():  # somebody took files out of it
        shutil.rmtree(target)
    directory.mkdir(mode=0o700, exist_ok=True)
    parts = _parts(files)
    fd = os.open(directory / _JOURNAL, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        done = _done(fd)
        missing = [number for number in range(len(parts)) if number not in done]
        needed = sum(parts[number].stop - parts[number].start for number in missing)
        _check_room(url, target.parent, needed)
        logger.info("model_fetch_began url=%s files=%d missing_bytes=%d", url, len(files), needed)
        for file in files:
            _reserve(directory / file.path, file.size)
        with ThreadPoolExecutor(_CONNECTIONS, "hotspan-model") as pool:
            jobs = [pool.submit(_fetch_part, url, store, directory, fd, number, parts[number]) for number in missing]
            try:
                with Progress(f"fetching {url}", needed // MIB, "MiB") as progress:
                    for number, job in zip(missing, jobs, strict=True):
                        job.result()
                        progress.advance((parts[number].stop - parts[number].start) // MIB)
            finally:
                pool.shutdown(cancel_futures=True)
    finally:
        os.close(fd)
    (directory / _JOURNAL).unlink()
    directory.rename(target)
    sync_directory(target.parent)
    logger.info("model_fetched url=%s directory=%s", url, target)


def _parts(files: Sequence[RemoteFile]) -> list[_Part]:
    return [
        _Part(file, start, min(start + _PART_BYTES, file.size))
        for file in files
        for start in range(0, file.size, _PART_BYTES)
    ]


def _done(journal: int) -> set[int]:
    """The numbers of the parts that are on the disk. Mutates: the journal, of which a line that was cut off goes."""
    text = os.pread(journal, os.fstat(journal).st_size, 0)
    whole = text[: text.rfind(b"\n") + 1]
    os.ftruncate(journal, len(whole))  # or the next line would make another number of it
    return {int(line) for line in whole.split() if line.isdigit()}


def _check_room(url: str, cache: Path, needed: int) -> None:
    free = shutil.disk_usage(cache).free
    if needed > free:
        raise ConfigError(
            f"{url} needs {_gib(needed)} in {cache}, and {_gib(free)} are free: make room, or set XDG_CACHE_HOME to a "
            "larger disk"
        )


def _reserve(path: Path, size: int) -> None:
    """Make a file of the right size; bytes that it already has stay."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.ftruncate(fd, size)
    finally:
        os.close(fd)


def _fetch_part(url: str, store: S3Store, directory: Path, journal: int, number: int, part: _Part) -> None:
    """Write a part of a file, then its number into the journal when it is on disk."""
    fd = os.open(directory / part.file.path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                _copy(store, part, fd)
                break
            except PreconditionError as error:
                raise ConfigError(f"{url}/{part.file.path} changed while it was fetched: start again") from error
            except BaseError as error:
                if attempt == _ATTEMPTS:
                    raise _refused(f"{url}/{part.file.path}", error) from error
                logger.warning("model_part_again path=%s start=%d: %s", part.file.path, part.start, _line(error))
        os.fdatasync(fd)
        os.write(journal, b"%d\n" % number)
    finally:
        os.close(fd)


def _copy(store: S3Store, part: _Part, fd: int) -> None:
    got = obstore.get(
        store, part.file.path, options={"range": (part.start, part.stop), "if_match": part.file.e_tag or "*"}
    )
    at = part.start
    for chunk in got.stream(min_chunk_size=_WRITE_BYTES):
        left = memoryview(chunk)
        while left:
            count = os.pwrite(fd, left, at)
            at, left = at + count, left[count:]
    if at != part.stop:
        raise BaseError(f"it ended at byte {at} instead of {part.stop}")


def _refused(url: str, error: BaseError) -> ConfigError:
    return ConfigError(
        f"{url} can't be read ({_line(error)}): look at its spelling, at AWS_REGION (the bucket's), AWS_ENDPOINT_URL "
        "and the credentials (AWS_ACCESS_KEY_ID ..., a role; AWS_SKIP_SIGNATURE=true for what is public)"
    )


def _line(error: Exception) -> str:
    """The first line of an error of obstore's."""
    return str(error).partition("\n")[0]


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
