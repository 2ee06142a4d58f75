"""A replica's KV events as they come over the wire, in every shape that vLLM has given them from 0.11 on.

A message is [seconds, [event, ...], rank, ...]. An event is a map {"type": "BlockStored", "block_hashes": ...} or, from
older engines, an array ["BlockStored", hashes, ...] in the order of the fields below. Fields that are not known here
are skipped and fields that are not there have their defaults, but an event of an unknown type is an error: it could
have taken something away.
"""

from typing import Annotated, Any

import msgspec

TokenId = Annotated[int, msgspec.Meta(ge=0)]
Hash = int | bytes


class Stored(msgspec.Struct, tag="BlockStored", gc=False):
    """Blocks are in a medium now: a run of a text, each block with what its hash depends on besides tokens."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None = None
    token_ids: list[TokenId] = []
    block_size: int = 0
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class Removed(msgspec.Struct, tag="BlockRemoved", gc=False):
    """Blocks are in a medium no more."""

    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None


class Cleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    """The engine forgot everything."""


Event = Stored | Removed | Cleared


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[Event]


_DECODER = msgspec.msgpack.Decoder(_Batch)
_FIELDS = {str(kind.__struct_config__.tag): kind.__struct_fields__ for kind in (Stored, Removed, Cleared)}


class UnknownMessage(Exception):
    """A message is not one of KV events, or of a version that is not known."""


def events_of(payload: bytes) -> list[Event]:
    """The events of a message, in order. Raises: UnknownMessage."""
    try:
        return _DECODER.decode(payload).events
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass
    try:
        _, arrays, *_ = msgspec.msgpack.decode(payload)
        maps = [{"type": kind, **dict(zip(_FIELDS[kind], values, strict=False))} for kind, *values in arrays]
        return msgspec.convert(maps, list[Event])
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise UnknownMessage(type(error).__name__) from error
