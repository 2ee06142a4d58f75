"""How the demo's model directories reach the disk: seeded bfloat16 weights, and whole or not at all."""

import json
import shutil
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hotspan.core.errors import ConfigError

MARKER: Final = "hotspan_demo.json"

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor to write: normal around `mean` with deviation `std`; the rows in `zero_rows` are zero."""

    name: str
    shape: tuple[int, ...]
    std: float
    mean: float = 0.0
    zero_rows: tuple[int, ...] = ()

    @property
    def elements(self) -> int:
        return int(np.prod(self.shape))

    def values(self, seed: int) -> NDArray[np.uint16]:
        """Its elements as bfloat16 bits; they depend on the seed and the name only, not on other tensors."""
        if self.std == 0.0:
            values = np.full(self.shape, self.mean, dtype=np.float32)
        else:
            rng = np.random.Generator(np.random.PCG64([seed, zlib.crc32(self.name.encode())]))
            values = rng.standard_normal(self.shape, dtype=np.float32) * np.float32(self.std) + np.float32(self.mean)
        values[list(self.zero_rows)] = 0.0
        return bfloat16_bits(values)


def bfloat16_bits(values: Floats) -> NDArray[np.uint16]:
    """The upper halves of float32 values, rounded to nearest even. NaN is not handled: no weight is one."""
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def write_safetensors(path: Path, tensors: Sequence[Tensor], seed: int) -> None:
    """Write a safetensors file, one tensor in memory at a time.

    Format: 8 bytes little-endian header length, a JSON header padded with spaces to 8 bytes, the data
    (https://huggingface.co/docs/safetensors, "Format").
    """
    with path.open("wb") as file:
        file.write(_head([(tensor.name, tensor.shape, tensor.elements) for tensor in tensors]))
        for tensor in tensors:
            file.write(tensor.values(seed).astype("<u2").data)


def write_bfloat16(path: Path, tensors: Mapping[str, NDArray[np.uint16]]) -> None:
    """Write a safetensors file of these tensors, given as the bits of bfloat16."""
    with path.open("wb") as file:
        file.write(_head([(name, bits.shape, bits.size) for name, bits in tensors.items()]))
        for bits in tensors.values():
            file.write(np.ascontiguousarray(bits, dtype="<u2").data)


def _head(tensors: Iterable[tuple[str, tuple[int, ...], int]]) -> bytes:
    """What is in front of the data, of each tensor's name, shape and number of elements."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape, elements in tensors:
        begin, end = end, end + 2 * elements
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    return struct.pack("<Q", len(encoded)) + encoded


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file as a person would read it."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def publish(directory: Path, marker: dict[str, Any], write: Callable[[Path], None]) -> None:
    """Make sure that `directory` holds what `write` writes: made now, or complete from an earlier time.

    `write` fills a hidden sibling, which is then renamed: nobody ever sees half a directory, and of two processes at
    once the first to finish wins. `marker` identifies what was made and becomes `hotspan_demo.json`, along with the
    size of every file.

    Raises: ConfigError if the directory holds anything else.
    """
    directory = directory.absolute()
    if _holds(directory, marker):
        return
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    except OSError as error:
        raise ConfigError(
            f"{directory} can't be made ({error.strerror}): name a directory on a disk, where this user may write"
        ) from error
    try:
        part.chmod(0o755)  # mkdtemp makes it private, and an engine may run as another user
        write(part)
        write_json(part / MARKER, {**marker, "files": {f.name: f.stat().st_size for f in sorted(part.iterdir())}})
        try:
            part.rename(directory)
        except OSError:
            if not _holds(directory, marker):
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _holds(directory: Path, marker: dict[str, Any]) -> bool:
    """Whether `directory` is complete; False if there is none yet, or an empty one.

    Raises: ConfigError if it is something else.
    """
    if not directory.exists():
        return False
    if not directory.is_dir():
        raise ConfigError(f"{directory} is a file, not a directory. Name a directory that does not exist yet.")
    if not any(directory.iterdir()):
        return False
    try:
        found = json.loads((directory / MARKER).read_text(encoding="utf-8"))
        files = found.pop("files")
    except (OSError, ValueError, AttributeError, KeyError):
        raise ConfigError(
            f"{directory} holds files that hotspan did not make, and they are left alone. "
            "Name a directory that is empty or does not exist yet."
        ) from None
    if found != marker:
        raise ConfigError(
            f"{directory} holds another demo model or adapter: {_difference(found, marker)}. "
            "Name another directory, or delete this one to have it made again."
        )
    damaged = [name for name, size in files.items() if not _has_size(directory / name, size)]
    if damaged:
        raise ConfigError(f"{directory} is damaged ({', '.join(damaged)}). Delete it to have it made again.")
    return True


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _difference(found: dict[str, Any], wanted: dict[str, Any]) -> str:
    keys = [key for key in {**wanted, **found} if found.get(key) != wanted.get(key)]
    return ", ".join(f"{key} is {found.get(key)!r}, not {wanted.get(key)!r}" for key in keys)
