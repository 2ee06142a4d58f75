"""The frame: the only form in which a chunk leaves RAM. Versioned, self-verifying (docs/frame.md, byte by byte).

      0        256                       4080    4096                         4096 + payload
      +--------+-------------------------+-------+-----------------------------+
      | fields | one 16-byte tag/segment | check | payload (the slot's bytes)  |
      +--------+-------------------------+-------+-----------------------------+

The check covers all fields and tags, each tag its segment of the payload: a frame is whole and this key's, or a fault.
"""

import struct
from dataclasses import dataclass
from enum import Enum

import xxhash

from hotspan.core.types import MIB, PAGE_BYTES, ChunkKey, round_up

HEADER_BYTES = PAGE_BYTES
MAGIC = b"HOTSPAN\0"
VERSION = 1
ALGORITHM_XXH3 = 0

_FIELDS = struct.Struct("<8sHHIQQQ32s32s16s12s")
_TAGS_AT = 256
_TAG_BYTES = 16
_CHECK_AT = HEADER_BYTES - 16
_MOST_SEGMENTS = (_CHECK_AT - _TAGS_AT) // _TAG_BYTES


class FrameFault(Enum):
    """Why bytes are not the frame that was asked for; each is a miss."""

    SHORT = "short"
    MAGIC = "magic"
    VERSION = "version"
    HEADER = "header"
    KEY = "key"
    NAMESPACE = "namespace"
    LENGTH = "length"
    EXPIRED = "expired"
    PAYLOAD = "payload"


@dataclass(frozen=True, slots=True)
class FrameIdentity:
    """What a frame must say of itself to be a hit.

    generation: counts invalidations; a frame of an older one is stale.
    expires_s:  Unix time in seconds after which it is a miss; 0 for never.
    """

    key: ChunkKey
    namespace: bytes
    generation: int = 0
    expires_s: int = 0


def segment_bytes_for(payload_bytes: int) -> int:
    """Bytes under one tag: 1 MiB, more only where the header could not hold all tags (payloads over 239 MiB)."""
    return max(MIB, round_up(-(-payload_bytes // _MOST_SEGMENTS), MIB))


def seal(header: memoryview, payload: memoryview, identity: FrameIdentity) -> None:
    """Write into `header` what makes it and `payload` a frame.

    Shape:   header uint8[4096], payload uint8[n], contiguous.
    Mutates: `header` only.
    Blocks:  for one pass over the payload (xxh3, with the GIL released).
    """
    segment = segment_bytes_for(len(payload))
    header[:] = bytes(HEADER_BYTES)
    _FIELDS.pack_into(
        header,
        0,
        MAGIC,
        VERSION,
        ALGORITHM_XXH3,
        segment,
        len(payload),
        identity.generation,
        identity.expires_s,
        identity.key,
        identity.namespace,
        bytes(16),
        bytes(12),
    )
    for index, start in enumerate(range(0, len(payload), segment)):
        at = _TAGS_AT + index * _TAG_BYTES
        header[at : at + _TAG_BYTES] = xxhash.xxh3_128_digest(payload[start : start + segment])
    header[_CHECK_AT:] = xxhash.xxh3_128_digest(header[:_CHECK_AT])


def verify_header(header: memoryview, payload_bytes: int, identity: FrameIdentity, now_s: float) -> FrameFault | None:
    """None if the header is whole and is that of `identity` with `payload_bytes` of payload, else why not.

    `identity.generation` and `identity.expires_s` are not compared with the frame's: the index knows them.
    """
    if len(header) != HEADER_BYTES:
        return FrameFault.SHORT
    magic, version, algorithm, segment, length, _, expires_s, key, namespace, _, _ = _FIELDS.unpack_from(header, 0)
    if magic != MAGIC:
        return FrameFault.MAGIC
    if version != VERSION or algorithm != ALGORITHM_XXH3:
        return FrameFault.VERSION
    if xxhash.xxh3_128_digest(header[:_CHECK_AT]) != header[_CHECK_AT:]:
        return FrameFault.HEADER
    if key != identity.key:
        return FrameFault.KEY
    if namespace != identity.namespace:
        return FrameFault.NAMESPACE
    if length != payload_bytes or segment != segment_bytes_for(payload_bytes):
        return FrameFault.LENGTH
    if expires_s and now_s >= expires_s:
        return FrameFault.EXPIRED
    return None


def verify(header: memoryview, payload: memoryview, identity: FrameIdentity, now_s: float = 0.0) -> FrameFault | None:
    """None if header and payload are the whole frame of `identity`, else why not.

    Blocks: for one pass over the payload (xxh3, with the GIL released).
    """
    fault = verify_header(header, len(payload), identity, now_s)
    if fault is not None:
        return fault
    segment = segment_bytes_for(len(payload))
    for index, start in enumerate(range(0, len(payload), segment)):
        at = _TAGS_AT + index * _TAG_BYTES
        if xxhash.xxh3_128_digest(payload[start : start + segment]) != header[at : at + _TAG_BYTES]:
            return FrameFault.PAYLOAD
    return None
