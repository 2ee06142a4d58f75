"""Compression: every bit back, or nothing."""

import random
import struct

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from hotspan.core import compression
from hotspan.core.compression import MAX_SHARE, PIECE_BYTES, compress, decompress
from hotspan.core.planes import WIDTHS, join, split
from hotspan.core.types import MIB, PAGE_BYTES
from hotspan.testing.chunks import content, key_of
from proofs.compression import KINDS
from proofs.compression import numbers as made

FORMATS = ("bfloat16", "float16", "float32", "fp8")


def numbers(kind: str, count: int, seed: int, spread: float = 1.0) -> bytearray:
    """As KV has them (proofs/compression.py)."""
    return made(kind, count, random.Random(seed), spread)


def compressed(payload: bytes | bytearray) -> bytes:
    """What `compress` makes of it; empty if it does not shrink."""
    into = memoryview(bytearray(len(payload)))
    return bytes(into[: compress(memoryview(payload), into)])


def restored(stored: bytes | bytearray, size: int) -> bytes | None:
    """The payload; None if there is none of that size."""
    into = memoryview(bytearray(b"\xa5" * size))
    return bytes(into) if decompress(memoryview(stored), into) else None


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(KINDS),
    st.integers(0, PIECE_BYTES + 70_000),
    st.integers(0, 2**32 - 1),
    st.floats(0.0, 30.0),
    st.binary(max_size=5),
)
def test_every_bit_is_restored(kind: str, count: int, seed: int, spread: float, tail: bytes) -> None:
    """Whatever the type, length, scale, denormals, NaNs and infinities: what is stored gives exactly the payload."""
    payload = numbers(kind, count, seed, spread) + tail
    stored = compressed(payload)
    assert len(stored) <= MAX_SHARE * len(payload) and len(stored) % PAGE_BYTES == 0
    assert not stored or restored(stored, len(payload)) == payload


@pytest.mark.parametrize(("kind", "ratio"), [("bfloat16", 1.35), ("float16", 1.1), ("float32", 1.1), ("fp8", 1.1)])
def test_kv_shrinks(kind: str, ratio: float) -> None:
    """Numbers of each type that are distributed as KV shrink."""
    payload = numbers(kind, MIB, 1)
    assert len(payload) >= ratio * len(compressed(payload))


@pytest.mark.parametrize("value", [0x00, 0x01, 0x80, 0xFF])
def test_bytes_that_are_all_equal_shrink_to_almost_nothing(value: int) -> None:
    """Memory that nobody wrote costs a page."""
    payload = bytes([value]) * (2 * MIB)
    stored = compressed(payload)
    assert len(stored) == PAGE_BYTES and restored(stored, len(payload)) == payload


@pytest.mark.parametrize("size", [0, 1, 4096, 2 * MIB, 2 * MIB + 3])
def test_what_does_not_shrink_is_left(size: int) -> None:
    """Noise, and what is too small, is not stored compressed; nothing is written behind the buffer."""
    assert compressed(np.random.default_rng(1).bytes(size)) == b""


def test_the_header_counts_as_size() -> None:
    """`compress` keeps to a buffer that is too small for what it makes."""
    payload = memoryview(numbers("bfloat16", MIB, 1))
    assert compress(payload, memoryview(bytearray(MIB))) == 0


@pytest.mark.parametrize("width", WIDTHS)
def test_planes_join_to_what_was_split(width: int) -> None:
    """For each width, and lengths around the steps in which they are joined."""
    for count in (0, 1, 65535, 65536, 65537, 150_000):
        piece = np.frombuffer(content(key_of("planes"), width * count), np.uint8) if count else np.empty(0, np.uint8)
        planes = [np.empty(count, np.uint8) for _ in range(width)]
        for place, plane in enumerate(planes):
            split(piece, width, place, plane)
            assert (plane == piece[place::width]).all()
        into = np.full(width * count, 0xA5, np.uint8)
        join(planes, into)
        assert (into == piece).all()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damage_is_a_miss(data: st.DataObject) -> None:
    """Flipped, cut, grown, overwritten: the result is no payload or the right one, and never an exception."""
    payload = numbers(data.draw(st.sampled_from(FORMATS)), 40_000, 3)
    stored = bytearray(compressed(payload))
    assert stored
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.one_of(st.integers(0, 100), st.integers(0, max(len(stored) - 1, 0))))
        kind = data.draw(st.sampled_from(["flip", "cut", "grow", "write"]))
        if kind == "cut":
            del stored[at:]
        elif kind == "grow":
            stored[at:at] = data.draw(st.binary(min_size=1, max_size=64))
        elif kind == "write":
            some = data.draw(st.binary(min_size=1, max_size=64))
            stored[at : at + len(some)] = some
        elif at < len(stored):
            stored[at] ^= 1 << data.draw(st.integers(0, 7))
    assert restored(stored, len(payload)) in (None, payload)


def test_no_flipped_byte_of_the_header_and_the_entries_gives_other_bytes() -> None:
    """Those that say where the planes are and what comes out. A plane that is said to be longer is decoded as it is."""
    payload = numbers("bfloat16", PIECE_BYTES, 1)
    stored = bytearray(compressed(payload))
    entries = compression._HEADER.size + 2 * compression._ENTRY.size
    for at in range(entries):
        stored[at] ^= 0x10
        assert restored(stored, len(payload)) in (None, payload)
        stored[at] ^= 0x10
    assert restored(stored, len(payload)) == payload


@pytest.mark.parametrize("size", [0, 1, 4095, 40_000 - 2, 80_002, 1 << 24])
def test_another_size_is_a_miss(size: int) -> None:
    """What was stored is restored to a buffer of exactly its size, and to no other."""
    assert restored(compressed(numbers("bfloat16", 40_000, 1)), size) is None


@pytest.mark.parametrize("said", [None, 1 << 40])
def test_a_plane_takes_no_more_than_its_size(said: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plane that says that it is a terabyte, or that is 64 MiB of zeros, is refused before it is decoded."""
    payload = bytes(2 * MIB)
    plane = zstandard.ZstdCompressor(write_content_size=said is not None).compress(bytes(64 * MIB))
    if said is not None:
        plane = b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", said) + plane[-16:]  # 8 bytes of size, one segment
    stored = bytearray(compressed(payload))
    digest, width, coded, zero, *sizes = compression._ENTRY.unpack_from(stored, compression._HEADER.size)
    sizes[0] = len(plane)
    compression._ENTRY.pack_into(stored, compression._HEADER.size, digest, width, coded, zero, *sizes)
    first = compression._HEADER.size + 4 * compression._ENTRY.size
    stored[first : first + len(plane)] = plane
    decoded: list[int] = []
    monkeypatch.setattr(compression._codec, "decoder", _Refusing(decoded))
    assert restored(stored, len(payload)) is None and not decoded


class _Refusing:
    """Notes that something was to be decoded."""

    def __init__(self, decoded: list[int]) -> None:
        self._decoded = decoded

    def stream_reader(self, data: object) -> object:
        self._decoded.append(1)
        raise zstandard.ZstdError("decoded")
