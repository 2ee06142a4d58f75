"""The nouns that every layer shares."""

from enum import Enum, IntEnum
from typing import Literal, NewType

from msgspec import Struct

ChunkKey = NewType("ChunkKey", bytes)
"""32 bytes that name one chunk's KV: namespace, adapter, tokens and everything before them, KV cache group."""

Compress = Literal["auto", "never", "always"]
"""Whether a tier stores chunks compressed; "auto" leaves it to what is faster."""

PAGE_BYTES = 4096
"""What O_DIRECT, the frame header and a slot are aligned to."""

CHUNK_TOKENS = 128
"""Tokens of a chunk, where nothing else is said: megabytes of most models, so that a drive and a link move one at full
speed, while half of one, which is what a text has beyond its last whole chunk on average, is quickly computed."""

GIB = 1 << 30
MIB = 1 << 20


class Tier(Enum):
    """Where KV lives, fastest first."""

    GPU = "gpu"
    RAM = "ram"
    DISK = "disk"
    L2 = "l2"


class Lookup(IntEnum):
    """What the cache answers for one chunk."""

    MISS = 0
    HIT = 1
    RETRY = 2
    """On its way to RAM: ask again."""


class Chunk(Struct, frozen=True, gc=False):
    """One chunk as the cache knows it: its name and the name of what must stand before it.

    `parent` is None for the first chunk of a text. A chunk is useless without its ancestors.
    `index` is its place in the text, counted in chunks from 0.

    What there is for each chunk of a cache is not tracked by Python's garbage collector (`gc=False`) and may therefore
    be part of no cycle: with a million chunks, one full collection would stop the engine for a second.
    """

    key: ChunkKey
    parent: ChunkKey | None
    index: int = 0


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple
