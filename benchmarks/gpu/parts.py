"""Files as numbered parts under a size limit, with a manifest: cut here, joined and checked on the other machine.

The files' bytes, one after the other in the manifest's order, are one xz stream; the parts are that stream, cut. Only
Python's standard library is used, so that it runs on a bare machine. The same files give the same parts, byte for byte,
on one version of liblzma.
"""

import hashlib
import json
import lzma
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

MANIFEST: Final = "manifest.json"
FORMAT: Final = 1
MAX_PART_BYTES: Final = 60_000_000

_PIECE: Final = 1 << 20


class PartsError(Exception):
    """The parts are not what the manifest says; the message says which one and what to do."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A file or a part: its name, its bytes, and their sha256 in hex."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What was cut. facts: what the files are for, such as the Python and the engine's version."""

    files: tuple[Entry, ...]
    parts: tuple[Entry, ...]
    facts: dict[str, Any] = field(default_factory=dict)

    def save(self, directory: Path) -> None:
        content = {"format": FORMAT} | asdict(self)
        (directory / MANIFEST).write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")

    @classmethod
    def load(cls, directory: Path) -> "Manifest":
        """The manifest beside the parts. Raises: PartsError if there is none that can be read."""
        path = directory / MANIFEST
        try:
            content = json.loads(path.read_text())
            if content["format"] != FORMAT:
                raise PartsError(f"{path} is of format {content['format']}, not {FORMAT}: pack again with this tree")
            files, parts = (tuple(Entry(**entry) for entry in content[name]) for name in ("files", "parts"))
            return cls(files, parts, content["facts"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise PartsError(f"{path} can't be read as a manifest ({error}): carry it with the parts") from error


def cut(files: Sequence[Path], directory: Path, part_bytes: int, facts: dict[str, Any]) -> Manifest:
    """Write the parts of `files` and their manifest into `directory`.

    Raises: PartsError if a part may be 60 MB or more, or if `directory` holds parts of another time.
    """
    if not 0 < part_bytes < MAX_PART_BYTES:
        raise PartsError(f"parts of {part_bytes} bytes: give 1 to {MAX_PART_BYTES - 1}, so that each one travels")
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.glob("part-*")):
        raise PartsError(f"{directory} holds parts already: delete them, or name another directory")
    named = sorted(files, key=lambda path: path.name)
    entries = tuple(Entry(path.name, path.stat().st_size, _digest(path)) for path in named)
    writer = _Parts(directory, part_bytes)
    compressor = lzma.LZMACompressor(preset=6)
    for path in named:
        for piece in _pieces(path):
            writer.write(compressor.compress(piece))
    writer.write(compressor.flush())
    manifest = Manifest(entries, writer.close(), facts)
    manifest.save(directory)
    return manifest


class _Parts:
    """A stream that becomes files of at most so many bytes each."""

    def __init__(self, directory: Path, part_bytes: int) -> None:
        self._directory = directory
        self._part_bytes = part_bytes
        self._buffer = bytearray()
        self._entries: list[Entry] = []

    def write(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= self._part_bytes:
            self._put(self._part_bytes)

    def close(self) -> tuple[Entry, ...]:
        """The rest as the last part; all of them."""
        if self._buffer:
            self._put(len(self._buffer))
        return tuple(self._entries)

    def _put(self, size: int) -> None:
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        name = f"part-{len(self._entries):02d}"
        (self._directory / name).write_bytes(data)
        self._entries.append(Entry(name, size, hashlib.sha256(data).hexdigest()))


def verify(directory: Path, manifest: Manifest) -> None:
    """Raise PartsError naming every part that is missing or is not what was cut."""
    wrong = []
    for part in manifest.parts:
        path = directory / part.name
        if not path.is_file():
            wrong.append(f"{part.name} is missing")
        elif path.stat().st_size != part.size or _digest(path) != part.sha256:
            wrong.append(f"{part.name} is damaged")
    if wrong:
        raise PartsError(f"{directory}: {', '.join(wrong)}; carry it again")


def join(directory: Path, into: Path) -> Manifest:
    """The files, put together again in `into` and checked.

    Raises: PartsError if a part or a file is not what was cut; then `into` holds nothing that should be used.
    """
    manifest = Manifest.load(directory)
    verify(directory, manifest)
    into.mkdir(parents=True, exist_ok=True)
    stream = _decompressed(directory, manifest)
    rest = b""
    for entry in manifest.files:
        if Path(entry.name).name != entry.name:
            raise PartsError(f"the manifest names a file {entry.name!r} outside the directory: pack again")
        rest = _put_file(into / entry.name, entry, rest, stream)
    if rest or next(stream, b""):
        raise PartsError(f"{directory}: the parts hold more than the manifest names: pack again")
    return manifest


def _put_file(path: Path, entry: Entry, rest: bytes, stream: Iterator[bytes]) -> bytes:
    """Write one file from `rest` and the stream; what was read beyond its end."""
    digest, left = hashlib.sha256(), entry.size
    with path.open("wb") as file:
        while left:
            piece = rest or next(stream, b"")
            if not piece:
                raise PartsError(f"the parts end within {entry.name}: pack again")
            mine, rest = piece[:left], piece[left:]
            file.write(mine)
            digest.update(mine)
            left -= len(mine)
    if digest.hexdigest() != entry.sha256:
        raise PartsError(f"{entry.name} is not what was packed: pack again")
    return rest


def _decompressed(directory: Path, manifest: Manifest) -> Iterator[bytes]:
    decompressor = lzma.LZMADecompressor()
    for part in manifest.parts:
        for piece in _pieces(directory / part.name):
            data = decompressor.decompress(piece)
            if data:
                yield data


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            yield piece


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    for piece in _pieces(path):
        digest.update(piece)
    return digest.hexdigest()
