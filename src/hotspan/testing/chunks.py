"""Chunks and bytes for tests: names that differ, contents that follow from a name; and how long to wait."""

import hashlib
import mmap

from hotspan.core.types import Chunk, ChunkKey

_LOW_BITS = bytes(value & 0x0F for value in range(256))

HANG_S = 60.0
"""After which a test takes it that something hangs, also on a machine that stands still now and then."""


def key_of(name: str) -> ChunkKey:
    """The key of a chunk that a test calls `name`."""
    return ChunkKey(hashlib.sha256(name.encode()).digest())


def chain(name: str, length: int) -> list[Chunk]:
    """The chunks of one text, root first."""
    keys = [key_of(f"{name}/{n}") for n in range(length)]
    return [Chunk(key, keys[n - 1] if n else None, n) for n, key in enumerate(keys)]


def content(key: ChunkKey, size: int, version: int = 0) -> bytes:
    """`size` bytes that follow from the key and a version, and that no other key or version has.

    They shrink to about half, so that a tier that compresses does.
    """
    return hashlib.shake_128(key + version.to_bytes(4, "little")).digest(size).translate(_LOW_BITS)


def aligned(size: int, fill: bytes = b"") -> memoryview:
    """A page-aligned buffer of `size` bytes that begins with `fill`."""
    buffer = memoryview(mmap.mmap(-1, size))
    buffer[: len(fill)] = fill
    return buffer
