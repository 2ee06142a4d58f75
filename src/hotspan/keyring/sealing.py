"""The keys under which frames are written and read, derived from a tenant's root.

    frame key = HKDF-SHA256(root, salt = writer, info = "hotspan-frame-2" | key id), 32 bytes
    nonce     = 8 bytes that the process counts up | 4 bytes of segment index

`key id` names the root (16 random bytes), `writer` is made anew for each frame (16 bytes); a frame says both. So each
frame has a key of its own. That holds in copies of a process, too: a virtual machine that is cloned, or resumed twice
from one snapshot, goes on with the same counter in every copy.
"""

import hashlib
import os
import threading
import time
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

KEY_ID_BYTES = 16
WRITER_BYTES = 16
NONCE_BYTES = 8
_PURPOSE = b"hotspan-frame-2"


@dataclass(frozen=True, slots=True)
class Root:
    """A tenant's root key: `id` is 16 bytes that frames name it by, `secret` 32 bytes."""

    id: bytes
    secret: bytes = field(repr=False)


class NonceCounter:
    """Eight bytes that never come twice, to any thread, while this object lives."""

    __slots__ = ("_lock", "_next", "_pid")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 0
        self._pid = os.getpid()

    def take(self) -> bytes:
        """The next nonce. Raises: RuntimeError in a forked child, which would repeat its parent's."""
        if os.getpid() != self._pid:
            raise RuntimeError("a forked process can't write with its parent's keys: open a keyring of its own")
        with self._lock:
            value = self._next
            self._next = value + 1
        return value.to_bytes(NONCE_BYTES, "big")


@dataclass(frozen=True, slots=True)
class Sealing:
    """What seals one frame of a tenant's. Any thread may use it; ask the keyring again for the next frame."""

    key_id: bytes
    writer: bytes
    aead: AESGCM = field(repr=False)
    _nonces: NonceCounter = field(repr=False)

    def next_nonce(self) -> bytes:
        """8 bytes, never given before with this key; a GCM nonce is these and a segment's index in 4 bytes."""
        return self._nonces.take()


def fresh_writer() -> bytes:
    """16 bytes that no other frame has, in this process or in a copy of it.

    The clock is for copies on a kernel that does not know it was copied (no VMGENID): until it reseeds, both get the
    same random bytes.
    """
    return hashlib.blake2b(os.urandom(32) + time.time_ns().to_bytes(8, "big"), digest_size=WRITER_BYTES).digest()


def frame_key(root: Root, writer: bytes) -> AESGCM:
    """The key of the frame that names `root` and `writer`. About 10 us."""
    kdf = HKDF(algorithm=SHA256(), length=32, salt=writer, info=_PURPOSE + root.id)
    return AESGCM(kdf.derive(root.secret))
