"""Archives of models, unpacked into a private directory, with bounds on paths, number of files and size."""

import hashlib
import logging
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO

from hotspan.core.errors import ConfigError
from hotspan.core.private import private_directory
from hotspan.core.types import GIB, MIB
from hotspan.plan.weights import is_model
from hotspan.server.source import OTHER_CACHE

logger = logging.getLogger(__name__)

MAX_FILES = 100_000
MAX_RATIO = 100
"""Weights hardly shrink: what grows more than that, and by more than 1 GiB, is no model."""

_RESERVE_BYTES = GIB
_COPY_BYTES = 4 * MIB


def unpacked(archive: Path, name: str, cache: Path) -> Path:
    """The directory of the model in `archive`, unpacked below `cache`, unless that was done before.

    Blocks: while it is read.
    Raises: ConfigError if it is damaged or holds no model, leads out of its directory, or finds no room.
    """
    place = cache / f"{name}-{_digest(str(archive.resolve()))}"
    private_directory(place, "the model", OTHER_CACHE)
    try:
        found = archive.stat()
        target = place / _digest(f"{found.st_size} {found.st_mtime_ns}")
        if not target.exists():
            _unpack(archive, target)
            for other in place.iterdir():  # what the archive was before
                if other != target:
                    shutil.rmtree(other, ignore_errors=True)
    except OSError as error:
        raise ConfigError(
            f"{archive} can't be unpacked into {place} ({error.strerror or error}): make room, or {OTHER_CACHE}"
        ) from error
    return _model_in(target, archive)


def _unpack(archive: Path, target: Path) -> None:
    """All of it or nothing. Raises: ConfigError; OSError of the disk."""
    part = Path(tempfile.mkdtemp(prefix=".part-", dir=target.parent))
    try:
        try:
            with _opened(archive) as pack:
                _extract(pack, archive, part)
        except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError) as error:
            raise ConfigError(
                f"{archive} is damaged, or no archive that can be read ({error}): pack it again"
            ) from error
        part.rename(target)
        logger.info("model_unpacked archive=%s directory=%s", archive, target)
    finally:
        shutil.rmtree(part, ignore_errors=True)


@contextmanager
def _opened(archive: Path) -> Iterator[tarfile.TarFile | zipfile.ZipFile]:
    if archive.name.lower().endswith(".zip"):
        with zipfile.ZipFile(archive) as pack:
            yield pack
    else:
        with tarfile.open(archive) as tar:
            yield tar


def _extract(pack: tarfile.TarFile | zipfile.ZipFile, archive: Path, directory: Path) -> None:
    """Write the files one by one within the bounds; sizes that the archive declares are not trusted."""
    room = shutil.disk_usage(directory).free - _RESERVE_BYTES
    most = min(room, MAX_RATIO * archive.stat().st_size + GIB)
    written = 0
    for number, (name, file) in enumerate(_files(pack, archive)):
        if number >= MAX_FILES:
            raise ConfigError(f"{archive} holds more than {MAX_FILES:,} files: a model has fewer, unpack it yourself")
        path = directory / _inside(name, archive)
        path.parent.mkdir(parents=True, exist_ok=True)
        with file, path.open("xb") as output:
            while content := file.read(_COPY_BYTES):
                written += len(content)
                if written > most:
                    reason = "there is room for" if most == room else "its size lets expect"
                    raise ConfigError(
                        f"{archive} unpacks to more than the {most / GIB:.1f} GiB that {reason}: make room, or unpack "
                        "it yourself"
                    )
                output.write(content)


def _files(pack: tarfile.TarFile | zipfile.ZipFile, archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """The files; links and devices have no place in a model. Raises: ConfigError."""
    if isinstance(pack, zipfile.ZipFile):
        for info in pack.infolist():
            if not info.is_dir():
                yield info.filename, pack.open(info)
        return
    for member in pack:
        if member.isdir():
            continue
        file = pack.extractfile(member) if member.isreg() else None
        if file is None:
            raise ConfigError(f"{archive} holds {member.name!r:.200}, which is no file: pack it without links")
        yield member.name, file


def _inside(name: str, archive: Path) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\\" in name or "\0" in name:
        raise ConfigError(f"{archive} holds {name!r:.200}, which leads out of the model's directory: don't use it")
    return path


def _model_in(directory: Path, archive: Path) -> Path:
    """The model itself, which may lie in the one directory that was packed."""
    inner = list(directory.iterdir())
    for candidate in (directory, *inner):
        if is_model(candidate) and (candidate is directory or len(inner) == 1):
            return candidate
    raise ConfigError(f"{archive} holds no model: config.json or serving.properties belongs at its top")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
