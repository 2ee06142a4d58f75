"""The frame: the only form in which a chunk leaves RAM. Versioned, self-verifying (docs/frame.md, byte by byte).

      0        256                       4080    4096                         4096 + payload
      +--------+-------------------------+-------+-----------------------------+
      | fields | one 16-byte tag/segment | check | payload (the slot's bytes)  |
      +--------+-------------------------+-------+-----------------------------+

The check covers all fields and tags, each tag its segment of the payload: a frame is whole and this key's, or a fault.
Plain frames have xxh3 tags, which detect accidents. Sealed frames are encrypted, and their tags are AES-GCM's over the
segment, its number and all fields: nobody without the key can make, change, swap or cut one.

A payload may be compressed (core/compression.py) before it is framed: tags and lengths are those of what is stored.
"""

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

import xxhash
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from hotspan.core.types import MIB, PAGE_BYTES, ChunkKey, round_up

HEADER_BYTES = PAGE_BYTES
TAG_BYTES = 16
MAGIC = b"HOTSPAN\0"
VERSION = 2
COMPRESSED_VERSION = 3
"""Of frames whose payload is compressed, which a reader of version 2 does not take for plain ones."""

ALGORITHM_XXH3 = 0
ALGORITHM_AES_256_GCM = 1

_FIELDS = struct.Struct("<8sHHIQQQ32s32s16s16s8sQQ")
_FIELDS_BYTES = 256
_CHECK_AT = HEADER_BYTES - 16
_MAX_SEGMENTS = (_CHECK_AT - _FIELDS_BYTES) // TAG_BYTES
_UNSEALED = (bytes(16), bytes(16), bytes(8))


class FrameFault(Enum):
    """Why bytes are not the frame that was asked for; each is a miss."""

    SHORT = "short"
    MAGIC = "magic"
    VERSION = "version"
    HEADER = "header"
    ALGORITHM = "algorithm"
    KEY = "key"
    NAMESPACE = "namespace"
    LENGTH = "length"
    STAMP = "stamp"
    EXPIRED = "expired"
    SHREDDED = "shredded"
    PAYLOAD = "payload"


@dataclass(frozen=True, slots=True)
class FrameIdentity:
    """What a frame must say of itself to be a hit.

    stamp:      of the one store that wrote it, 64 random bits; a frame of another one was left in the slot.
    generation: the cache's when the chunk was stored. Written, and not compared.
    expires_s:  Unix time in seconds after which it is a miss; 0 for never. Written, and not compared: see `EXPIRED`.
    unpacked_bytes: of the chunk, if the payload is compressed; else 0.
    """

    key: ChunkKey
    namespace: bytes
    stamp: int = 0
    generation: int = 0
    expires_s: int = 0
    unpacked_bytes: int = 0

    @property
    def version(self) -> int:
        """Of its frame."""
        return COMPRESSED_VERSION if self.unpacked_bytes else VERSION


class FrameSealing(Protocol):
    """What a writer seals with: a key of its own, and a nonce for each frame that it never gives twice."""

    @property
    def key_id(self) -> bytes:
        """16 bytes: the tenant's root key."""
        ...

    @property
    def writer(self) -> bytes:
        """16 bytes: with which the writer's key was derived from it."""
        ...

    @property
    def aead(self) -> AESGCM:
        """The writer's key."""
        ...

    def next_nonce(self) -> bytes:
        """8 bytes."""
        ...


FrameOpening = Callable[[bytes, bytes], AESGCM | None]
"""From a frame's key id and writer to its key; None if the key was shredded or can't be had."""


class Segment(NamedTuple):
    """One tag's part of the payload, `[start, end)`."""

    number: int
    start: int
    end: int


class _Fields(NamedTuple):
    magic: bytes
    version: int
    algorithm: int
    segment_bytes: int
    payload_bytes: int
    generation: int
    expires_s: int
    key: bytes
    namespace: bytes
    key_id: bytes
    writer: bytes
    nonce: bytes
    stamp: int
    unpacked_bytes: int


def segment_bytes_for(payload_bytes: int) -> int:
    """Bytes under one tag: 1 MiB, more only where the header could not hold all tags (payloads over 239 MiB)."""
    return max(MIB, round_up(-(-payload_bytes // _MAX_SEGMENTS), MIB))


def segments(payload_bytes: int, start: int = 0, size: int | None = None) -> Iterator[Segment]:
    """The segments of a payload, or of `size` bytes from `start` on, in order; the payload's last may be shorter."""
    step = segment_bytes_for(payload_bytes)
    stop = payload_bytes if size is None else start + size
    for first in range(start, stop, step):
        yield Segment(first // step, first, min(first + step, stop))


class Cipher:
    """Encrypts or decrypts the segments of one frame, in any order, with the GIL released."""

    __slots__ = ("_aead", "_fields", "_nonce")

    def __init__(self, aead: AESGCM, header: memoryview) -> None:
        self._aead = aead
        self._fields = bytes(header[:_FIELDS_BYTES])
        self._nonce = _Fields._make(_FIELDS.unpack_from(header, 0)).nonce

    def encrypt(self, index: int, segment: memoryview, into: memoryview) -> None:
        """Shape: into uint8[len(segment) + 16]: the bytes, then the tag."""
        number = index.to_bytes(4, "little")
        self._aead.encrypt_into(self._nonce + number, segment, self._fields + number, into)

    def decrypt(self, index: int, sealed: memoryview, into: memoryview) -> bool:
        """Whether the segment is authentic; if not, `into` is undefined. Shape: sealed uint8[len(into) + 16]."""
        number = index.to_bytes(4, "little")
        try:
            self._aead.decrypt_into(self._nonce + number, sealed, self._fields + number, into)
        except InvalidTag:
            return False
        return True


def begin_sealed(header: memoryview, payload_bytes: int, identity: FrameIdentity, sealing: FrameSealing) -> Cipher:
    """Write the fields of a sealed frame; the cipher encrypts its segments, `put_tag` keeps their tags, `end` ends it.

    Shape: header uint8[4096]. Mutates: `header`.
    """
    secrets = (sealing.key_id, sealing.writer, sealing.next_nonce())
    _put_fields(header, payload_bytes, identity, ALGORITHM_AES_256_GCM, secrets)
    return Cipher(sealing.aead, header)


def put_tag(header: memoryview, index: int, tag: bytes | memoryview) -> None:
    """Keep the 16-byte tag of segment `index`."""
    at = _FIELDS_BYTES + index * TAG_BYTES
    header[at : at + TAG_BYTES] = tag


def tag_of(header: memoryview, index: int) -> memoryview:
    """The 16-byte tag of segment `index`; no copy."""
    at = _FIELDS_BYTES + index * TAG_BYTES
    return header[at : at + TAG_BYTES]


def end(header: memoryview) -> None:
    """Write the check over all fields and tags; from here on the header is whole."""
    header[_CHECK_AT:] = xxhash.xxh3_128_digest(header[:_CHECK_AT])


def begin_plain(header: memoryview, payload_bytes: int, identity: FrameIdentity) -> None:
    """Write the fields of a plain frame; `hash_part` puts its tags, `end` ends it. Mutates: `header`, uint8[4096]."""
    _put_fields(header, payload_bytes, identity, ALGORITHM_XXH3, _UNSEALED)


def hash_part(header: memoryview, payload_bytes: int, start: int, part: memoryview) -> None:
    """Put the tags of the segments in `part`, which begins at byte `start` of the payload and at a segment.

    Blocks: for one pass over the part (xxh3, with the GIL released).
    """
    for index, first, stop in segments(payload_bytes, start, len(part)):
        put_tag(header, index, xxhash.xxh3_128_digest(part[first - start : stop - start]))


def seal(header: memoryview, payload: memoryview, identity: FrameIdentity) -> None:
    """Write into `header` what makes it and `payload` a plain frame.

    Shape:   header uint8[4096], payload uint8[n], contiguous.
    Mutates: `header` only.
    Blocks:  for one pass over the payload (xxh3, with the GIL released).
    """
    begin_plain(header, len(payload), identity)
    hash_part(header, len(payload), 0, payload)
    end(header)


def verify_header(
    header: memoryview, payload_bytes: int, identity: FrameIdentity, now_s: float, *, sealed: bool = False
) -> FrameFault | None:
    """None if the header is whole and is that of `identity` with `payload_bytes` of payload, else why not.

    sealed: a reader with keys takes sealed frames only: a plain one could have been made by anybody.
    """
    if len(header) != HEADER_BYTES:
        return FrameFault.SHORT
    fields = _Fields._make(_FIELDS.unpack_from(header, 0))
    if fields.magic != MAGIC:
        return FrameFault.MAGIC
    if fields.version != identity.version:
        return FrameFault.VERSION
    if xxhash.xxh3_128_digest(header[:_CHECK_AT]) != header[_CHECK_AT:]:
        return FrameFault.HEADER
    if fields.algorithm != (ALGORITHM_AES_256_GCM if sealed else ALGORITHM_XXH3):
        return FrameFault.ALGORITHM
    if fields.key != identity.key:
        return FrameFault.KEY
    if fields.namespace != identity.namespace:
        return FrameFault.NAMESPACE
    lengths = (payload_bytes, segment_bytes_for(payload_bytes), identity.unpacked_bytes)
    if (fields.payload_bytes, fields.segment_bytes, fields.unpacked_bytes) != lengths:
        return FrameFault.LENGTH
    if fields.stamp != identity.stamp:
        return FrameFault.STAMP
    if fields.expires_s and now_s >= fields.expires_s:
        return FrameFault.EXPIRED
    return None


def open_sealed(header: memoryview, opening: FrameOpening) -> Cipher | None:
    """The cipher of a frame whose header was verified; None if its key is not to be had."""
    fields = _Fields._make(_FIELDS.unpack_from(header, 0))
    aead = opening(fields.key_id, fields.writer)
    return None if aead is None else Cipher(aead, header)


def verify_part(header: memoryview, payload_bytes: int, start: int, part: memoryview) -> FrameFault | None:
    """None if the tags of the segments in `part`, which begins at byte `start` of a plain payload, hold.

    Blocks: for one pass over the part (xxh3, with the GIL released).
    """
    for index, first, stop in segments(payload_bytes, start, len(part)):
        if xxhash.xxh3_128_digest(part[first - start : stop - start]) != tag_of(header, index):
            return FrameFault.PAYLOAD
    return None


def verify(header: memoryview, payload: memoryview, identity: FrameIdentity, now_s: float = 0.0) -> FrameFault | None:
    """None if header and payload are the whole plain frame of `identity`, else why not."""
    fault = verify_header(header, len(payload), identity, now_s)
    return fault or verify_part(header, len(payload), 0, payload)


def _put_fields(
    header: memoryview,
    payload_bytes: int,
    identity: FrameIdentity,
    algorithm: int,
    secrets: tuple[bytes, bytes, bytes],
) -> None:
    header[:] = bytes(HEADER_BYTES)
    _FIELDS.pack_into(
        header,
        0,
        MAGIC,
        identity.version,
        algorithm,
        segment_bytes_for(payload_bytes),
        payload_bytes,
        identity.generation,
        identity.expires_s,
        identity.key,
        identity.namespace,
        *secrets,
        identity.stamp,
        identity.unpacked_bytes,
    )
