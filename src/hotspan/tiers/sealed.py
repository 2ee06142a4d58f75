"""Sealed frames as a whole in memory, for tiers that move objects; tiers/io.py has those that go part by part."""

from hotspan.core.frame import (
    HEADER_BYTES,
    TAG_BYTES,
    FrameFault,
    FrameIdentity,
    FrameOpening,
    FrameSealing,
    begin_sealed,
    end,
    open_sealed,
    put_tag,
    segments,
    tag_of,
    verify_header,
)


def seal_frame(scratch: memoryview, payload: memoryview, identity: FrameIdentity, sealing: FrameSealing) -> memoryview:
    """Encrypt a payload into `scratch`, header first; returns the part of it with the ciphertext.

    Shape: scratch uint8[4096 + len(payload) + 16 or more].
    """
    header, staging = scratch[:HEADER_BYTES], scratch[HEADER_BYTES:]
    cipher = begin_sealed(header, len(payload), identity, sealing)
    for index, start, stop in segments(len(payload)):
        # The tag lands where the next segment begins, which overwrites it.
        cipher.encrypt(index, payload[start:stop], staging[start : stop + TAG_BYTES])
        put_tag(header, index, staging[stop : stop + TAG_BYTES])
    end(header)
    return staging[: len(payload)]


def open_frame(
    scratch: memoryview, into: memoryview, identity: FrameIdentity, now_s: float, opening: FrameOpening
) -> FrameFault | None:
    """Decrypt the frame in `scratch` into `into`; a fault if it is not that of `identity`. Mutates both."""
    header, staging = scratch[:HEADER_BYTES], scratch[HEADER_BYTES:]
    fault = verify_header(header, len(into), identity, now_s, sealed=True)
    if fault is not None:
        return fault
    cipher = open_sealed(header, opening)
    if cipher is None:
        return FrameFault.SHREDDED
    for index, start, stop in reversed(list(segments(len(into)))):  # the tag goes where the segment behind began
        staging[stop : stop + TAG_BYTES] = tag_of(header, index)
        if not cipher.decrypt(index, staging[start : stop + TAG_BYTES], into[start:stop]):
            return FrameFault.PAYLOAD
    return None
