"""The frame: whole and the one that was asked for, or a fault."""

import random
import struct
from dataclasses import replace

import pytest
import xxhash
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hotspan.core import frame
from hotspan.core.frame import (
    HEADER_BYTES,
    TAG_BYTES,
    FrameFault,
    FrameIdentity,
    begin_sealed,
    end,
    open_sealed,
    put_tag,
    seal,
    segment_bytes_for,
    segments,
    tag_of,
    verify,
    verify_header,
)
from hotspan.core.types import MIB, ChunkKey
from hotspan.testing.chunks import content, key_of
from kit.simulated.keys import FixedKeys

NAMESPACE = bytes(range(32))
IDENTITY = FrameIdentity(key_of("a"), NAMESPACE)
TENANT = 7
KEYS = FixedKeys()


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
    identity = FrameIdentity(ChunkKey(key), NAMESPACE, generation)
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


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
@example(3, 4)
@example(4, 3)
def test_another_stores_frame_is_a_fault(one: int, other: int) -> None:
    """A whole frame of the same chunk from another store is not the one that was asked for: it was left in the slot."""
    payload = memoryview(bytes(16))
    header = sealed(payload, replace(IDENTITY, stamp=one))
    expected = None if one == other else FrameFault.STAMP
    assert verify(header, payload, replace(IDENTITY, stamp=other)) is expected


def test_random_payload_flips_are_detected() -> None:
    """R3, small: of 20,000 random flips of one to eight bits in a plain payload none goes unseen."""
    rng = random.Random(3)
    payload = bytearray(content(IDENTITY.key, 8192))
    header, view = sealed(payload), memoryview(payload)
    for _ in range(20_000):
        flips = [(rng.randrange(len(payload)), 1 << rng.randrange(8)) for _ in range(rng.randint(1, 8))]
        before = bytes(payload)
        for at, bit in flips:
            payload[at] ^= bit
        assert (verify(header, view, IDENTITY) is FrameFault.PAYLOAD) == (payload != before)
        payload[:] = before


def test_truncation_at_each_page_is_detected() -> None:
    """R3: a frame of which only the first n pages are there, zeros or old bytes after them, is a fault for every n."""
    size = 2 * MIB + 3 * 4096
    payload, old = content(IDENTITY.key, size), content(IDENTITY.key, size, 1)
    whole, stale = bytes(sealed(payload)) + payload, bytes(sealed(old)) + old
    for kept in range(0, len(whole), 4096):
        for rest in (bytes(len(whole)), stale):
            cut = bytearray(whole[:kept] + rest[kept:])
            found = verify(memoryview(cut)[:4096], memoryview(cut)[4096:], IDENTITY)
            if kept == 0 and rest is stale:
                assert found is None  # nothing of it is there: that is the old frame, whole
            else:
                assert found in (FrameFault.MAGIC, FrameFault.PAYLOAD), f"{kept} bytes kept"


@given(st.binary(min_size=32, max_size=32).filter(lambda key: key != IDENTITY.key))
def test_another_key_or_namespace_is_a_fault(other: bytes) -> None:
    """A whole frame of another chunk or another namespace is not the one that was asked for."""
    payload = memoryview(content(IDENTITY.key, 100))
    header = sealed(payload)
    assert verify(header, payload, FrameIdentity(ChunkKey(other), NAMESPACE)) is FrameFault.KEY
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
    for at, value, fault in ((8, 1, "version"), (8, 3, "version"), (10, 1, "algorithm"), (10, 2, "algorithm")):
        header = sealed(payload)
        header[at] = value
        end(header)
        assert verify(header, payload, IDENTITY) is FrameFault(fault)


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
    identity = FrameIdentity(IDENTITY.key, NAMESPACE, 0x8877665544332211, 0x1122334455667788, 1_900_000_000)
    raw = bytes(sealed(payload, identity))
    assert len(raw) == 4096
    assert raw[0:8] == b"HOTSPAN\0"
    assert struct.unpack_from("<H", raw, 8) == (2,)
    assert struct.unpack_from("<H", raw, 10) == (0,)
    assert struct.unpack_from("<I", raw, 12) == (1048576,)
    assert struct.unpack_from("<Q", raw, 16) == (len(payload),)
    assert struct.unpack_from("<Q", raw, 24) == (0x1122334455667788,)
    assert struct.unpack_from("<Q", raw, 32) == (1_900_000_000,)
    assert raw[40:72] == IDENTITY.key
    assert raw[72:104] == NAMESPACE
    assert raw[104:144] == bytes(40)  # key id, writer and nonce: for encryption
    assert struct.unpack_from("<Q", raw, 144) == (0x8877665544332211,)
    assert raw[152:256] == bytes(104)
    assert raw[256:272] == xxhash.xxh3_128_digest(payload[:MIB])
    assert raw[272:288] == xxhash.xxh3_128_digest(payload[MIB:])
    assert raw[288:4080] == bytes(3792)
    assert raw[4080:4096] == xxhash.xxh3_128_digest(raw[:4080])
    assert frame._FIELDS.size == 160


# -- sealed frames -------------------------------------------------------------------------------------------------


def encrypted(
    payload: bytes | memoryview, identity: FrameIdentity = IDENTITY, keys: FixedKeys = KEYS, tenant: int = TENANT
) -> tuple[memoryview, bytearray]:
    """The header and the ciphertext of `payload` as a sealed frame."""
    header = memoryview(bytearray(b"\xff" * HEADER_BYTES))
    sealing = keys.sealing(tenant)
    assert sealing is not None
    cipher = begin_sealed(header, len(payload), identity, sealing)
    text = bytearray()
    for index, start, stop in segments(len(payload)):
        room = bytearray(stop - start + TAG_BYTES)
        cipher.encrypt(index, memoryview(payload)[start:stop], memoryview(room))
        text += room[:-TAG_BYTES]
        put_tag(header, index, room[-TAG_BYTES:])
    end(header)
    return header, text


def decrypted(
    header: memoryview,
    text: bytes | bytearray,
    identity: FrameIdentity = IDENTITY,
    keys: FixedKeys = KEYS,
    now_s: float = 0.0,
) -> bytes | FrameFault:
    """The payload of a sealed frame, or why not."""
    fault = verify_header(header, len(text), identity, now_s, sealed=True)
    if fault is not None:
        return fault
    cipher = open_sealed(header, keys.opening)
    if cipher is None:
        return FrameFault.SHREDDED
    payload = bytearray(len(text))
    for index, start, stop in segments(len(text)):
        segment = memoryview(bytes(text[start:stop]) + bytes(tag_of(header, index)))
        if not cipher.decrypt(index, segment, memoryview(payload)[start:stop]):
            return FrameFault.PAYLOAD
    return bytes(payload)


def forged(header: memoryview, at: int, value: bytes) -> memoryview:
    """The header with other bytes at `at` and a check that is right: what somebody without keys can make."""
    changed = memoryview(bytearray(header))
    changed[at : at + len(value)] = value
    end(changed)
    return changed


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 70_000), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_what_was_encrypted_comes_back(size: int, generation: int, tenant: int) -> None:
    """Whatever the size, generation and tenant, a sealed frame opens to what was sealed, and is not it."""
    payload = content(IDENTITY.key, size)
    identity = replace(IDENTITY, generation=generation)
    header, text = encrypted(payload, identity, tenant=tenant)
    assert decrypted(header, text, identity) == payload
    assert size < 16 or text != payload


def test_every_flipped_bit_of_a_sealed_header_is_detected() -> None:
    """No single bit of a sealed frame's header can flip unseen."""
    payload = content(IDENTITY.key, 8192)
    header, text = encrypted(payload)
    for at in range(HEADER_BYTES):
        for bit in range(8):
            header[at] ^= 1 << bit
            assert verify_header(header, len(text), IDENTITY, 0.0, sealed=True) is not None, f"bit {bit} of byte {at}"
            header[at] ^= 1 << bit
    assert decrypted(header, text) == payload


def test_random_flips_of_a_sealed_payload_are_detected() -> None:
    """R3, small: of 20,000 random flips of one to eight bits in a sealed payload none goes unseen."""
    rng = random.Random(4)
    header, text = encrypted(content(IDENTITY.key, 4096))
    before = bytes(text)
    cipher = open_sealed(header, KEYS.opening)
    assert cipher is not None
    room, tag = bytearray(4096), bytes(tag_of(header, 0))
    for _ in range(20_000):
        for _ in range(rng.randint(1, 8)):
            text[rng.randrange(len(text))] ^= 1 << rng.randrange(8)
        assert cipher.decrypt(0, memoryview(bytes(text) + tag), memoryview(room)) == (text == before)
        text[:] = before


@pytest.mark.parametrize("name", ["key", "namespace", "generation", "expiry", "length", "key id", "writer", "nonce"])
def test_no_field_of_a_sealed_frame_can_be_forged(name: str) -> None:
    """With any field changed and the check made right, the reader that asks for just that gets a fault."""
    identity = replace(IDENTITY, generation=5, expires_s=2_000_000_000)
    header, text = encrypted(content(IDENTITY.key, 8192), identity)
    other = key_of("other")
    at, value, asked = {
        "key": (40, other, replace(identity, key=other)),
        "namespace": (72, other, replace(identity, namespace=other)),
        "generation": (24, struct.pack("<Q", 6), replace(identity, generation=6)),
        "expiry": (32, struct.pack("<Q", 0), identity),
        "length": (16, struct.pack("<Q", 4096), identity),
        "key id": (104, KEYS.key_id(8), identity),
        "writer": (120, bytes(16), identity),
        "nonce": (136, bytes([9]) * 8, identity),
    }[name]
    size = 4096 if name == "length" else 8192
    assert decrypted(header, text, identity) == content(IDENTITY.key, 8192)
    assert decrypted(forged(header, at, value), text[:size], asked) is FrameFault.PAYLOAD


def test_every_byte_of_the_fields_is_authenticated() -> None:
    """Not one of the 256 bytes of the fields can be changed, whatever the header's check says."""
    header, text = encrypted(content(IDENTITY.key, 4096))
    for at in range(256):
        changed = forged(header, at, bytes([header[at] ^ 0x10]))
        cipher = open_sealed(changed, KEYS.opening)
        assert cipher is not None
        sealed_segment = memoryview(bytes(text) + bytes(tag_of(changed, 0)))
        assert not cipher.decrypt(0, sealed_segment, memoryview(bytearray(4096))), f"byte {at}"


def test_sealed_segments_keep_their_places() -> None:
    """Segments with their tags exchanged, doubled or cut off are faults, even with the header's check made right."""
    size = 3 * MIB
    header, text = encrypted(content(IDENTITY.key, size))
    tags = [bytes(tag_of(header, index)) for index in range(3)]
    parts = [bytes(text[start:stop]) for _, start, stop in segments(size)]
    assert decrypted(header, b"".join(parts)) == content(IDENTITY.key, size)
    for order in ((1, 0, 2), (0, 0, 2), (0, 1, 1), (2, 1, 0), (2, 0, 1)):
        changed = forged(header, 256, b"".join(tags[n] for n in order))
        assert decrypted(changed, b"".join(parts[n] for n in order)) is FrameFault.PAYLOAD, order
    cut = forged(forged(header, 16, struct.pack("<Q", 2 * MIB)), 288, bytes(16))
    assert decrypted(cut, b"".join(parts[:2])) is FrameFault.PAYLOAD


def test_two_frames_of_one_key_do_not_mix() -> None:
    """Header of one and payload of another frame of the same chunk, both whole, are a fault."""
    one, other = (encrypted(content(IDENTITY.key, 4096, version)) for version in (1, 2))
    assert decrypted(one[0], other[1]) is FrameFault.PAYLOAD
    assert decrypted(forged(one[0], 256, bytes(tag_of(other[0], 0))), other[1]) is FrameFault.PAYLOAD


def test_a_plain_frame_is_never_taken_for_a_sealed_one() -> None:
    """A reader with keys refuses plain frames, and one without keys sealed ones: nobody can downgrade a chunk."""
    payload = content(IDENTITY.key, 4096)
    plain, (header, text) = sealed(payload), encrypted(payload)
    assert decrypted(plain, payload) is FrameFault.ALGORITHM
    assert decrypted(forged(plain, 10, b"\1\0"), payload) is FrameFault.PAYLOAD
    assert verify(header, memoryview(text), IDENTITY) is FrameFault.ALGORITHM
    assert verify(forged(header, 10, b"\0\0"), memoryview(text), IDENTITY) is FrameFault.PAYLOAD


def test_only_its_own_key_opens_a_frame() -> None:
    """Any process with the tenant's root opens a frame; a shredded one's, or with another key, nobody does."""
    payload = content(IDENTITY.key, 4096)
    header, text = encrypted(payload)
    assert decrypted(header, text, keys=FixedKeys(writer=5)) == payload  # any process with the same roots
    keys = FixedKeys()
    keys.shred(TENANT + 1)
    assert decrypted(header, text, keys=keys) == payload
    keys.shred(TENANT)
    assert decrypted(header, text, keys=keys) is FrameFault.SHREDDED
    wrong = FixedKeys()
    wrong.opening = lambda key_id, writer: AESGCM(bytes(32))  # type: ignore[method-assign]
    assert decrypted(header, text, keys=wrong) is FrameFault.PAYLOAD


def test_a_sealed_frame_expires() -> None:
    """From its second of expiry on a sealed frame is a fault, before it is not."""
    identity = replace(IDENTITY, expires_s=1000)
    payload = content(IDENTITY.key, 4096)
    header, text = encrypted(payload, identity)
    assert decrypted(header, text, IDENTITY, now_s=999.9) == payload
    assert decrypted(header, text, IDENTITY, now_s=1000.0) is FrameFault.EXPIRED


def test_sealed_fields_stand_where_the_document_says() -> None:
    """docs/frame.md, read with no help of the module: a sealed frame opens with AES-GCM and these bytes alone."""
    payload = content(IDENTITY.key, MIB + 4096)
    keys = FixedKeys(writer=3)
    identity = replace(IDENTITY, generation=9, expires_s=1_900_000_000)
    header, text = encrypted(payload, identity, keys)
    raw, sealing = bytes(header), keys.sealing(TENANT)
    assert sealing is not None
    assert struct.unpack_from("<HHIQQQ", raw, 8) == (2, 1, 1048576, len(payload), 9, 1_900_000_000)
    assert (raw[40:72], raw[72:104]) == (IDENTITY.key, NAMESPACE)
    assert (raw[104:120], raw[120:136], raw[136:144]) == (sealing.key_id, sealing.writer, bytes(8))
    assert raw[144:256] == bytes(112) == raw[288:400]
    for number, (start, stop) in enumerate([(0, MIB), (MIB, MIB + 4096)]):
        segment = bytes(text[start:stop]) + raw[256 + 16 * number : 272 + 16 * number]
        counter = number.to_bytes(4, "little")
        assert sealing.aead.decrypt(raw[136:144] + counter, segment, raw[:256] + counter) == payload[start:stop]
    assert raw[4080:4096] == xxhash.xxh3_128_digest(raw[:4080])


def test_a_compressed_frame_is_of_another_version() -> None:
    """Version 3 has the chunk's length, which is part of the identity: neither kind is taken for the other."""
    payload = content(IDENTITY.key, 8192)
    compressed = replace(IDENTITY, unpacked_bytes=3 * 4096)
    header = sealed(payload, compressed)
    assert struct.unpack_from("<H", header, 8) == (3,) and struct.unpack_from("<Q", header, 152) == (3 * 4096,)
    assert verify(header, memoryview(payload), compressed) is None
    assert verify(header, memoryview(payload), IDENTITY) is FrameFault.VERSION
    assert verify(sealed(payload), memoryview(payload), compressed) is FrameFault.VERSION
    assert verify(header, memoryview(payload), replace(compressed, unpacked_bytes=4 * 4096)) is FrameFault.LENGTH
