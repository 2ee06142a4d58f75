"""A replica's cache as its engine sees it: blocks of texts in media, and the events that tell of them."""

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import msgspec

from hotspan.router.event_messages import Event, Hash, Removed, Stored
from hotspan.router.text import Roots, piece_keys
from hotspan.router.types import PIECE_BYTES, Medium

BLOCK_TOKENS = 4
TABLE = [bytes([token]) * (1 + 23 * token % 61) for token in range(250)]
NAMES = {Medium.GPU: "GPU", Medium.RAM: "cpu", Medium.DISK: "DISK", Medium.L2: "l2"}

Text = tuple[int, ...]


def join(ids: Sequence[int]) -> bytes | None:
    """The bytes of tokens, as a tokenizer's table has them."""
    return b"".join(TABLE[each] for each in ids) if all(each < len(TABLE) for each in ids) else None


def hash_of(tokens: Sequence[int], salt: str = "") -> int:
    """An engine's name for the block that ends where these tokens end."""
    return hash((tuple(tokens), salt)) & (2**64 - 1)


@cache
def blocks_of(text: Text) -> list[int]:
    """The hashes of a text's whole blocks."""
    ends = range(BLOCK_TOKENS, len(text) + 1, BLOCK_TOKENS)
    return [hash_of(text[:end]) for end in ends]


@cache
def keys_of(text: Text) -> list[int]:
    """The keys that a request with this text asks for."""
    return piece_keys(join(text) or b"", Roots().of_request("", ""))


def stored(text: Text, first: int, last: int, medium: Medium = Medium.GPU, **others: Any) -> Stored:
    """The event for the blocks [first, last) of a text."""
    return Stored(
        block_hashes=list[Hash](blocks_of(text)[first:last]),
        parent_block_hash=blocks_of(text)[first - 1] if first else None,
        token_ids=list(text[first * BLOCK_TOKENS : last * BLOCK_TOKENS]),
        block_size=BLOCK_TOKENS,
        medium=NAMES[medium],
        **{"extra_keys": [None] * (last - first), **others},
    )


def removed(hashes: Iterable[int], medium: Medium = Medium.GPU) -> Removed:
    """The event for blocks that are gone."""
    return Removed(block_hashes=list(hashes), medium=NAMES[medium], group_idx=0)


def message(*events: Event, at_s: float = 1.5) -> bytes:
    """A message of events as an engine packs it; with the time, so that no two lives say the same."""
    return msgspec.msgpack.encode([at_s, list(events), 0])


@cache
def pieces_of(text: Text) -> list[tuple[int, frozenset[int]]]:
    """The pieces of a text that whole blocks cover: the key of each, and the blocks that it overlaps."""
    hashes, pieces = blocks_of(text), []
    starts = [len(join(text[: at * BLOCK_TOKENS]) or b"") for at in range(len(hashes) + 1)]
    for at, key in enumerate(keys_of(text)):
        first, end = at * PIECE_BYTES, (at + 1) * PIECE_BYTES
        over = [
            name for name, start, stop in zip(hashes, starts, starts[1:], strict=False) if start < end and stop > first
        ]
        if starts[-1] >= end:
            pieces.append((key, frozenset(over)))
    return pieces


def whole_keys(texts: Iterable[Text], held: set[int]) -> set[int]:
    """The keys of the pieces all of whose blocks are held: what may be claimed."""
    return {key for text in texts for key, over in pieces_of(text) if over <= held}


class Claims:
    """An index that keeps what it is told, for one replica."""

    def __init__(self) -> None:
        self.keys: dict[Medium, set[int]] = {medium: set() for medium in Medium}

    def add(self, replica: int, medium: Medium, keys: Iterable[int]) -> None:
        self.keys[medium].update(keys)

    def remove(self, replica: int, medium: Medium, keys: Iterable[int]) -> None:
        self.keys[medium].difference_update(keys)

    def clear(self, replica: int, medium: Medium) -> None:
        self.keys[medium].clear()
