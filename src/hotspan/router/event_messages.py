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


class _Stored(msgspec.Struct, gc=False):
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


class _Removed(msgspec.Struct, gc=False):
    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None


class Stored(_Stored, tag="BlockStored", gc=False):
    """Blocks are in a medium now: a run of a text, each block with what its hash depends on besides tokens."""


class Removed(_Removed, tag="BlockRemoved", gc=False):
    """Blocks are in a medium no more."""


class Cleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    """The engine forgot everything."""


class _StoredArray(_Stored, tag="BlockStored", array_like=True, gc=False):
    pass


class _RemovedArray(_Removed, tag="BlockRemoved", array_like=True, gc=False):
    pass


class _ClearedArray(msgspec.Struct, tag="AllBlocksCleared", array_like=True, gc=False):
    pass


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[Stored | Removed | Cleared]


class _ArrayBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_StoredArray | _RemovedArray | _ClearedArray]


Event = _Stored | _Removed | Cleared | _ClearedArray


class UnknownMessage(Exception):
    """A message is not one of KV events, or of a version that is not known."""


class EventDecoder:
    """Decodes the messages of one replica."""

    def __init__(self) -> None:
        maps, arrays = msgspec.msgpack.Decoder(_Batch), msgspec.msgpack.Decoder(_ArrayBatch)
        self._decoders: tuple[msgspec.msgpack.Decoder[Any], msgspec.msgpack.Decoder[Any]] = (maps, arrays)

    def events(self, payload: bytes) -> list[Event]:
        """What happened, in order. Raises: UnknownMessage."""
        first, second = self._decoders
        try:
            return list(first.decode(payload).events)
        except (msgspec.DecodeError, UnicodeDecodeError):
            pass
        try:
            events = list(second.decode(payload).events)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UnknownMessage(type(error).__name__) from error
        self._decoders = (second, first)  # the next will be like this one
        return events
