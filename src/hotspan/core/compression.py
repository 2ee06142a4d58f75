"""Compression without loss of what leaves RAM: byte planes, of which those that shrink are coded with Zstandard.

    +--------+-------------------------+---------+---------+-----+-----------------+
    | header | entry of each piece, 36 | piece 0 | piece 1 | ... | zeros to a page |
    +--------+-------------------------+---------+---------+-----+-----------------+

A piece is 512 KiB of the payload, the last one shorter. Its entry has the digest of its bytes, how wide its numbers
are, which planes are coded, and the length of each.

Zstandard looks for repetitions first, which KV has none of: here it is told to skip that nearly, so that its entropy
coder does the work. The GIL is released while planes are coded, decoded, joined and digested.
"""

import struct
import threading
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import xxhash
import zstandard

from hotspan.core.planes import WIDTHS, Bytes, join, split, width_of
from hotspan.core.types import PAGE_BYTES, round_up

PIECE_BYTES = 1 << 19
MAX_SHARE = 0.95
"""What does not shrink to this share is stored as it is."""

_MAGIC = b"HSPK"
_VERSION = 1
_HEADER = struct.Struct("<4sHHIIQ")  # magic, version, zero, bytes of a piece, pieces, bytes of the payload
_ENTRY = struct.Struct("<16sBBH4I")  # digest, width, which planes are coded, zero, lengths of the planes
_PLANE_SHARE = 0.94
_MAX_WINDOW = 1 << 19
_PARAMETERS = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST,
    window_log=19,
    hash_log=6,
    chain_log=6,
    search_log=1,
    min_match=7,
    target_length=0,
    write_content_size=True,
    write_checksum=False,
)


class _Codec(threading.local):
    """A coder and a decoder of each thread: neither may be used by two at a time."""

    def __init__(self) -> None:
        self.coder = zstandard.ZstdCompressor(compression_params=_PARAMETERS)
        self.decoder = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
        self.planes = np.empty(PIECE_BYTES, np.uint8)


class _Piece(NamedTuple):
    """One piece, as its entry says. at: where its first plane begins."""

    digest: bytes
    width: int
    coded: int
    sizes: tuple[int, ...]
    at: int


_codec = _Codec()


def compress(payload: memoryview, into: memoryview) -> int:
    """Write the compressed payload into `into`; how many bytes that takes, a multiple of 4096.

    0 if that is more than 0.95 of the payload: `into` is undefined then.

    Shape:  payload uint8[n], into uint8[n or more].
    Blocks: for a few passes over the payload, with the GIL released.
    """
    source = np.frombuffer(payload, np.uint8) if len(payload) else np.empty(0, np.uint8)
    starts = range(0, len(source), PIECE_BYTES)
    limit = min(int(len(source) * MAX_SHARE), len(into)) // PAGE_BYTES * PAGE_BYTES
    at, entry_at = _HEADER.size + _ENTRY.size * len(starts), _HEADER.size
    if at > limit:
        return 0
    target = np.frombuffer(into, np.uint8)
    _HEADER.pack_into(into, 0, _MAGIC, _VERSION, 0, PIECE_BYTES, len(starts), len(source))
    for start in starts:
        piece = source[start : start + PIECE_BYTES]
        width, worth = width_of(piece)
        sizes, coded = [0] * WIDTHS[-1], 0
        for place in range(width):
            room = target[at : min(at + len(piece) // width, limit)]
            taken = _put_plane(piece, width, place, room, is_coded=bool(worth >> place & 1))
            if not taken:
                return 0
            sizes[place] = taken
            coded |= (taken < len(piece) // width) << place
            at += taken
        _ENTRY.pack_into(into, entry_at, xxhash.xxh3_128_digest(piece.data), width, coded, 0, *sizes)
        entry_at += _ENTRY.size
    size = round_up(at, PAGE_BYTES)
    target[at:size] = 0
    return size


def decompress(stored: memoryview, into: memoryview) -> bool:
    """Restore a payload of exactly the size of `into`; False if `stored` is not one, for whatever reason.

    Takes no memory besides that depends on what `stored` says: a plane is at most a piece. After False, `into` is
    undefined.

    Shape:  stored uint8[m], into uint8[n].
    Blocks: for a few passes over the payload, with the GIL released.
    """
    pieces = _pieces(stored, len(into))
    if pieces is None:
        return False
    source = np.frombuffer(stored, np.uint8)
    target = np.frombuffer(into, np.uint8) if len(into) else np.empty(0, np.uint8)
    for number, piece in enumerate(pieces):
        out = target[number * PIECE_BYTES : (number + 1) * PIECE_BYTES]
        planes = list(_planes(piece, source, len(out) // piece.width))
        if any(plane is None for plane in planes):
            return False
        join([plane for plane in planes if plane is not None], out)
        if xxhash.xxh3_128_digest(out.data) != piece.digest:
            return False
    return True


def _put_plane(piece: Bytes, width: int, place: int, room: Bytes, *, is_coded: bool) -> int:
    """Write one plane of a piece into `room`, coded if that shrinks it; how many bytes, 0 if there is no room."""
    size = len(piece) // width
    if is_coded:
        plane = _codec.planes[:size]
        split(piece, width, place, plane)
        data = np.frombuffer(_codec.coder.compress(plane.data), np.uint8)
        if len(data) < _PLANE_SHARE * size:
            if len(data) > len(room):
                return 0
            np.copyto(room[: len(data)], data)
            return len(data)
    if size > len(room):
        return 0
    split(piece, width, place, room)
    return size


def _pieces(stored: memoryview, payload_bytes: int) -> list[_Piece] | None:
    """The entries, if they describe a payload of that size in exactly these bytes; else None."""
    count = -(-payload_bytes // PIECE_BYTES)
    at = _HEADER.size + _ENTRY.size * count
    if len(stored) < at or _HEADER.unpack_from(stored) != (_MAGIC, _VERSION, 0, PIECE_BYTES, count, payload_bytes):
        return None
    pieces = []
    for number in range(count):
        digest, width, coded, zero, *sizes = _ENTRY.unpack_from(stored, _HEADER.size + number * _ENTRY.size)
        size = min(PIECE_BYTES, payload_bytes - number * PIECE_BYTES)
        if width not in WIDTHS or size % width or coded >> width or zero or any(sizes[width:]):
            return None
        pieces.append(_Piece(digest, width, coded, tuple(sizes[:width]), at))
        at += sum(sizes)
    is_whole = len(stored) == round_up(at, PAGE_BYTES) and not any(stored[at:])
    return pieces if is_whole else None


def _planes(piece: _Piece, source: Bytes, size: int) -> Iterator[Bytes | None]:
    """The planes of a piece, `size` bytes each; None for one that can't be had. Decoded ones are this thread's."""
    at = piece.at
    for place, length in enumerate(piece.sizes):
        data = source[at : at + length]
        at += length
        if piece.coded >> place & 1:
            plane = _codec.planes[place * size : (place + 1) * size]
            yield plane if _decode(data, plane) else None
        else:
            yield data if length == size else None


def _decode(data: Bytes, into: Bytes) -> bool:
    """Whether `data` is a coded plane of the size of `into`, and was decoded."""
    try:
        said = zstandard.get_frame_parameters(data.data)
        if said.content_size != len(into) or said.window_size > _MAX_WINDOW:
            return False
        with _codec.decoder.stream_reader(data.data) as reader:  # in one pass, since `into` has room for all
            return bool(reader.readinto(into) == len(into))
    except zstandard.ZstdError:
        return False
