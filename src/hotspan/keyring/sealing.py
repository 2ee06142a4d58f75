"""The keys under which frames are written and read, derived from a tenant's root.

    write key = HKDF-SHA256(root, salt = writer, info = "hotspan-frame-2" | key id), 32 bytes
    nonce     = 8 bytes that a writer counts up | 4 bytes of segment index

`key id` names the root (16 random bytes), `writer` the process that wrote (16 random bytes); a frame says both. So no
two writers share a key, and one writer never uses a nonce twice.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Set
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
    """What seals one tenant's frames now. Any thread may use it; ask the keyring again for each frame."""

    key_id: bytes
    writer: bytes
    aead: AESGCM = field(repr=False)
    _nonces: NonceCounter = field(repr=False)

    def next_nonce(self) -> bytes:
        """8 bytes, never given before with this key; a GCM nonce is these and a segment's index in 4 bytes."""
        return self._nonces.take()


def frame_key(root: Root, writer: bytes) -> AESGCM:
    """The key of what `writer` wrote under `root`. About 10 us."""
    kdf = HKDF(algorithm=SHA256(), length=32, salt=writer, info=_PURPOSE + root.id)
    return AESGCM(kdf.derive(root.secret))


class FrameKeys:
    """Frame keys derived lately, by root and writer; the least recently used goes. Not for two threads at once."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._keys: OrderedDict[tuple[bytes, bytes], AESGCM] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def get(self, key_id: bytes, writer: bytes) -> AESGCM | None:
        """The key, if it was derived lately."""
        key = self._keys.get((key_id, writer))
        if key is not None:
            self._keys.move_to_end((key_id, writer))
        return key

    def put(self, key_id: bytes, writer: bytes, key: AESGCM) -> None:
        """Remember `key`, forget the least recently used one beyond the most."""
        self._keys[key_id, writer] = key
        while len(self._keys) > self._most:
            self._keys.popitem(last=False)

    def forget(self, key_ids: Set[bytes]) -> None:
        """Drop every key derived from these roots."""
        for name in [name for name in self._keys if name[0] in key_ids]:
            del self._keys[name]

    def roots(self) -> set[bytes]:
        """The ids of the roots that keys are remembered of."""
        return {key_id for key_id, _ in self._keys}
