"""A wrapped key, which says itself which key-encryption key (KEK) opens it.

length of id, 2 bytes big-endian | id, UTF-8 | what the KEK sealed
"""

from hotspan.core.errors import KeyUnavailable


def pack(wrapper_id: str, sealed: bytes) -> bytes:
    """What `wrap` returns, from what the KEK `wrapper_id` sealed."""
    name = wrapper_id.encode()
    return len(name).to_bytes(2, "big") + name + sealed


def wrapped_by(blob: bytes) -> str:
    """The id of the KEK that wrapped `blob`. Raises: KeyUnavailable if it is not a wrapped key."""
    end = 2 + int.from_bytes(blob[:2], "big")
    if not 2 < end < len(blob):
        raise changed()
    try:
        return blob[2:end].decode()
    except UnicodeDecodeError:
        raise changed() from None


def unpack(wrapper_id: str, blob: bytes) -> bytes:
    """What the KEK sealed. Raises: KeyUnavailable if it was another KEK than `wrapper_id`."""
    found = wrapped_by(blob)
    if found != wrapper_id:
        raise KeyUnavailable(
            f"the key was wrapped by {found[:100]!r} and this is {wrapper_id!r}: give --kek as it was then, "
            "or finish `hotspan keys rotate --new-kek`"
        )
    return blob[2 + len(found.encode()) :]


def changed() -> KeyUnavailable:
    """The error for a wrapped key that the right KEK does not open."""
    return KeyUnavailable(
        "a wrapped key was changed, or stands where another tenant's belongs: "
        "restore the key store as it was, or shred the tenant to give it new keys"
    )
