"""The frame: whole and the one that was asked for, or a fault."""

import struct

import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hotspan.core import frame
from hotspan.core.frame import HEADER_BYTES, FrameFault, FrameIdentity, seal, segment_bytes_for, verify, verify_header
from hotspan.core.types import MIB
from hotspan.testing.chunks import content, key_of

NAMESPACE = bytes(range(32))
IDENTITY = FrameIdentity(key_of("a"), NAMESPACE)


def sealed(payload: bytes | bytearray, identity: FrameIdentity = IDENTITY) -> memoryview:
    """The header that makes `payload` a frame."""
    header = memoryview(bytearray(b"\xff" * HEADER_BYTES))
    seal(header, memoryview(payload), identity)
    return header


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 70_000), st.integers(0, 2**64 - 1), st.binary(min_size=32, max_size=32))
def test_a_sealed_frame_is_whole(size: int, generation: int, key: bytes) -> None:
    """Whatever the size, key and generation, what was sealed verifies, and sealing leaves the payload alone."""
    payload = content(IDENTITY.key, size)
    identity = FrameIdentity(key, NAMESPACE, generation)  # type: ignore[arg-type]
    assert verify(sealed(payload, identity), memoryview(payload), identity) is None


@pytest.mark.parametrize("size", [MIB - 1, MIB, MIB + 1, 2 * MIB, 4 * MIB + 4096, 5 * MIB + 17])
def test_segments_cover_the_payload(size: int) -> None:
    """Around the borders of segments a flipped first or last byte of any segment is detected."""
    payload = bytearray(size)
    header = sealed(payload)
    assert verify(header, memoryview(payload), IDENTITY) is None
    for start in range(0, size, MIB):
        for at in (start, min(start + MIB, size) - 1):
            payload[at] ^= 0x80
            assert verify(header, memoryview(payload), IDENTITY) is FrameFault.PAYLOAD
            payload[at] ^= 0x80


def test_every_flipped_header_bit_is_detected() -> None:
    """No single bit of the 4096 header bytes can flip unseen."""
    payload = memoryview(content(IDENTITY.key, 8192))
    header = sealed(payload)
    for at in range(HEADER_BYTES):
        for bit in range(8):
            header[at] ^= 1 << bit
            assert verify_header(header, len(payload), IDENTITY, 0.0) is not None, f"bit {bit} of byte {at}"
            header[at] ^= 1 << bit
    assert verify(header, payload, IDENTITY) is None


@given(st.integers(1, 5000), st.data())
def test_every_changed_payload_is_detected(size: int, data: st.DataObject) -> None:
    """A payload in which any byte changed is not the frame's."""
    payload = bytearray(content(IDENTITY.key, size))
    header = sealed(payload)
    payload[data.draw(st.integers(0, size - 1))] ^= data.draw(st.integers(1, 255))
    assert verify(header, memoryview(payload), IDENTITY) is FrameFault.PAYLOAD


@given(st.integers(1, 9000), st.integers(0, 9000))
@example(4096, 0)
def test_another_length_is_detected(size: int, other: int) -> None:
    """A payload cut short, or read too long, is a fault before its bytes are looked at."""
    if size == other:
        return
    payload = content(IDENTITY.key, 9000)
    header = sealed(payload[:size])
    assert verify(header, memoryview(payload)[:other], IDENTITY) is FrameFault.LENGTH


def test_a_short_header_is_a_fault() -> None:
    """A header of fewer than 4096 bytes is a fault and raises nothing."""
    payload = content(IDENTITY.key, 4096)
    header = sealed(payload)
    for size in (0, 7, 256, HEADER_BYTES - 1):
        assert verify(header[:size], memoryview(payload), IDENTITY) is FrameFault.SHORT


def test_swapped_payloads_are_detected() -> None:
    """Two whole frames of one key that exchange payloads are two faults."""
    one, other = content(IDENTITY.key, 4096, 1), content(IDENTITY.key, 4096, 2)
    assert verify(sealed(one), memoryview(other), IDENTITY) is FrameFault.PAYLOAD
    assert verify(sealed(other), memoryview(one), IDENTITY) is FrameFault.PAYLOAD


def test_swapped_segments_are_detected() -> None:
    """A payload whose segments changed places is a fault: a tag belongs to its place."""
    payload = bytes(MIB) + b"\1" * MIB
    assert verify(sealed(payload), memoryview(payload[MIB:] + payload[:MIB]), IDENTITY) is FrameFault.PAYLOAD


@given(st.binary(min_size=32, max_size=32).filter(lambda key: key != IDENTITY.key))
def test_another_key_or_namespace_is_a_fault(other: bytes) -> None:
    """A whole frame of another chunk or another namespace is not the one that was asked for."""
    payload = memoryview(content(IDENTITY.key, 100))
    header = sealed(payload)
    assert verify(header, payload, FrameIdentity(other, NAMESPACE)) is FrameFault.KEY  # type: ignore[arg-type]
    if other != NAMESPACE:
        assert verify(header, payload, FrameIdentity(IDENTITY.key, other)) is FrameFault.NAMESPACE


@given(st.integers(1, 2**40), st.floats(-10, 10))
def test_a_frame_expires(expires_s: int, offset_s: float) -> None:
    """From its second of expiry on a frame is a fault, before it is not."""
    payload = memoryview(bytes(16))
    header = sealed(payload, FrameIdentity(IDENTITY.key, NAMESPACE, expires_s=expires_s))
    now_s = expires_s + offset_s
    assert verify(header, payload, IDENTITY, now_s) is (FrameFault.EXPIRED if now_s >= expires_s else None)


def test_no_expiry_is_forever() -> None:
    """A frame without an expiry never expires."""
    payload = memoryview(bytes(16))
    assert verify(sealed(payload), payload, IDENTITY, 2.0**60) is None


def test_an_unknown_version_or_algorithm_is_a_fault() -> None:
    """A frame of another version or algorithm is a fault even where its check is right."""
    payload = memoryview(bytes(16))
    for at in (8, 10):
        header = sealed(payload)
        header[at] += 1
        header[4080:] = xxhash.xxh3_128_digest(header[:4080])
        assert verify(header, payload, IDENTITY) is FrameFault.VERSION


@given(st.integers(1, 1 << 34))
def test_tags_fit_the_header(payload_bytes: int) -> None:
    """For any payload the segments are whole MiB, and their tags fit between the fields and the check."""
    segment = segment_bytes_for(payload_bytes)
    assert segment % MIB == 0
    assert 256 + -(-payload_bytes // segment) * 16 <= 4080
    assert segment == MIB or -(-payload_bytes // (segment - MIB)) > 239


def test_fields_stand_where_the_document_says() -> None:
    """docs/frame.md, read with no help of the module: each field at its offset, little-endian."""
    payload = content(IDENTITY.key, MIB + 4096)
    identity = FrameIdentity(IDENTITY.key, NAMESPACE, generation=0x1122334455667788, expires_s=1_900_000_000)
    raw = bytes(sealed(payload, identity))
    assert len(raw) == 4096
    assert raw[0:8] == b"HOTSPAN\0"
    assert struct.unpack_from("<H", raw, 8) == (1,)
    assert struct.unpack_from("<H", raw, 10) == (0,)
    assert struct.unpack_from("<I", raw, 12) == (1048576,)
    assert struct.unpack_from("<Q", raw, 16) == (len(payload),)
    assert struct.unpack_from("<Q", raw, 24) == (0x1122334455667788,)
    assert struct.unpack_from("<Q", raw, 32) == (1_900_000_000,)
    assert raw[40:72] == IDENTITY.key
    assert raw[72:104] == NAMESPACE
    assert raw[104:132] == bytes(28)  # key id and nonce: for encryption
    assert raw[132:256] == bytes(124)
    assert raw[256:272] == xxhash.xxh3_128_digest(payload[:MIB])
    assert raw[272:288] == xxhash.xxh3_128_digest(payload[MIB:])
    assert raw[288:4080] == bytes(3792)
    assert raw[4080:4096] == xxhash.xxh3_128_digest(raw[:4080])
    assert frame._FIELDS.size == 132
