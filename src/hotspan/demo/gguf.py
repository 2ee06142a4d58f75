"""Reads a GGUF file: what it says of its model, and its tensors as float32.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, version 3, little-endian. Of the tensor types there
are those that a model of type Q4_1 has.
"""

import struct
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from hotspan.core.errors import ConfigError
from hotspan.demo.files import Floats

_NUMBERS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING: Final = 8
_ARRAY: Final = 9

_QUANTUM: Final = 32
"""Weights of one block, in every quantized type here."""

_TYPES: Final = {0: ("F32", 1, 4), 3: ("Q4_1", _QUANTUM, 20), 8: ("Q8_0", _QUANTUM, 34)}
"""Name, weights of a block, and its bytes."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor is in the file: its shape as numpy has it, its type, and its first byte."""

    shape: tuple[int, ...]
    kind: int
    offset: int


class Gguf:
    """A file's metadata, read at once, and its tensors, each read when it is asked for."""

    def __init__(self, path: Path, metadata: dict[str, Any], places: dict[str, _Place]) -> None:
        self._path, self._places = path, places
        self.metadata = metadata

    @classmethod
    def open(cls, path: Path) -> Self:
        """Raises: ConfigError if it is no GGUF file that can be read."""
        try:
            reader = _Reader(path)
            return cls(path, reader.metadata, reader.places)
        except (OSError, struct.error, KeyError, UnicodeDecodeError, ValueError) as error:
            raise ConfigError(f"{path} can't be read as GGUF ({error})") from error

    def names(self) -> list[str]:
        """Of the tensors, in the file's order."""
        return list(self._places)

    def tensor(self, name: str) -> Floats:
        """The weights of a tensor. Raises: ConfigError for an unknown type."""
        place = self._places[name]
        if place.kind not in _TYPES:
            raise ConfigError(f"{self._path}: {name} is of GGUF's type {place.kind}, which is not read here")
        kind, weights, size = _TYPES[place.kind]
        count = prod(place.shape) // weights
        raw = np.fromfile(self._path, np.uint8, count * size, offset=place.offset)
        return _READ[kind](raw.reshape(count, size)).reshape(place.shape)


class _Reader:
    """The head of a file, from its first byte to where the tensors begin."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._read = file.read
            if file.read(4) != b"GGUF" or self._number("I") != 3:
                raise ValueError("no GGUF of version 3")
            tensors, keys = self._number("Q"), self._number("Q")
            self.metadata = {self._string(): self._value(self._number("I")) for _ in range(keys)}
            found = [self._place() for _ in range(tensors)]
            align = int(self.metadata.get("general.alignment", 32))
            data = -(-file.tell() // align) * align
            self.places = {name: _Place(shape, kind, data + at) for name, shape, kind, at in found}

    def _place(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        shape = tuple(reversed([self._number("Q") for _ in range(self._number("I"))]))
        return name, shape, self._number("I"), self._number("Q")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            inner, count = self._number("I"), self._number("Q")
            take = partial(self._value, inner)
            return [take() for _ in range(count)]
        return self._number(_NUMBERS[kind])

    def _number(self, kind: str) -> Any:
        return struct.unpack(f"<{kind}", self._read(struct.calcsize(f"<{kind}")))[0]

    def _string(self) -> str:
        return bytes(self._read(self._number("Q"))).decode()


def _f32(blocks: NDArray[np.uint8]) -> Floats:
    return blocks.reshape(-1).view("<f4").astype(np.float32)


def _q8_0(blocks: NDArray[np.uint8]) -> Floats:
    """A scale in float16, then 32 signed bytes: weight = scale * byte."""
    scale = np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)
    return scale * np.ascontiguousarray(blocks[:, 2:]).view(np.int8).astype(np.float32)


def _q4_1(blocks: NDArray[np.uint8]) -> Floats:
    """Scale and minimum in float16, then 16 bytes of two weights, the low halves first: scale * half + minimum."""
    scale, low = np.ascontiguousarray(blocks[:, :4]).view("<f2").astype(np.float32).T[:, :, None]
    packed = blocks[:, 4:]
    halves = np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], axis=1)
    return np.asarray(scale * halves.astype(np.float32) + low, dtype=np.float32)


_READ: Final = {"F32": _f32, "Q8_0": _q8_0, "Q4_1": _q4_1}
