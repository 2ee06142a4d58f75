"""Private names for the blocks of a blended request, so that no other request ever finds them.

The engine names a block by a hash over its tokens and the name of the block before it. KV from the first reused window
on is approximate, but its tokens are exact: under the engine's own names it would be given to requests that have not
asked for blending (`tests/engine/blend/` has the negative control). So these blocks get names that are drawn for one
request. Names that the engine derives later chain from the last of them, and are private as well.
"""

import hashlib
from collections.abc import Sequence

NONCE_BYTES = 16


def private_name(nonce: bytes, index: int) -> bytes:
    """The name of one block: nobody who lacks the nonce can say it. Raises: ValueError for a nonce of another size."""
    if len(nonce) != NONCE_BYTES:
        raise ValueError(f"a nonce has {NONCE_BYTES} random bytes, not {len(nonce)}")
    return hashlib.sha256(b"hotspan-blend-1" + nonce + index.to_bytes(8, "little")).digest()


def isolated(names: Sequence[bytes], first_token: int, block_tokens: int, nonce: bytes) -> list[bytes]:
    """The names of a request's blocks, private from that on which holds `first_token`, the first approximate one."""
    first = first_token // block_tokens
    return [*names[:first], *(private_name(nonce, index) for index in range(first, len(names)))]
