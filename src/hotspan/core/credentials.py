"""API keys as requests show them and as they are kept: one reading of both, for the router and the server."""

import hashlib
from collections.abc import Iterator, Mapping


def key_digest(key: str | bytes) -> bytes:
    """What is kept of an API key: SHA-256 of its bytes, UTF-8 where it is text."""
    return hashlib.sha256(key.encode(errors="backslashreplace") if isinstance(key, str) else key).digest()


def log_name(epoch: str) -> str:
    """What the log of a shared L2 is called where anybody may read it. epoch: its random name, in hexadecimal."""
    return key_digest(f"log of an L2\0{epoch}").hex()[:16]


def shown_keys(headers: Mapping[str, str]) -> Iterator[bytes]:
    """The keys that a request shows: first `Authorization: Bearer`, then `X-Api-Key`.

    headers: by lower-case name, decoded as Latin-1, as HTTP servers do.
    """
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        yield _raw(token)
    if given := headers.get("x-api-key", "").strip():
        yield _raw(given)


def _raw(value: str) -> bytes:
    """The bytes that were sent. No server decodes to other characters; if one did, they would be no key."""
    return value.strip().encode("latin-1", "backslashreplace")
