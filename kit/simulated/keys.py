"""Keys of encryption for tests: fixed, of as many tenants as are asked for, and shreddable."""

import hashlib

from cryptography.hazmat.primitives.ciphers.aead import AESGCM


class FixedSealing:
    """One writer's key of one tenant; counts its nonces and remembers every one that it gave."""

    def __init__(self, key_id: bytes, writer: bytes, aead: AESGCM) -> None:
        self.key_id = key_id
        self.writer = writer
        self.aead = aead
        self.given: list[bytes] = []

    def next_nonce(self) -> bytes:
        nonce = len(self.given).to_bytes(8, "big")
        self.given.append(nonce)
        return nonce


class FixedKeys:
    """Stands in for the keyring (hotspan.tiers.base.FrameKeys). All instances with one `seed` open each other's frames.

    seed:      of the roots.
    writer:    which process it plays: give another one where the same tenants are opened again, as a keyring does, or
               nonces come twice.
    shredded:  tenants whose keys are gone.
    is_locked: no key can be had, as while a KMS is out of reach.
    """

    def __init__(self, writer: int = 0, seed: int = 0) -> None:
        self._seed = seed.to_bytes(8, "little")
        self._writer = _derived(b"writer", writer.to_bytes(8, "little"))[:16]
        self._sealings: dict[int, FixedSealing] = {}
        self.shredded: set[int] = set()
        self.is_locked = False

    def key_id(self, tenant: int) -> bytes:
        """What frames name the tenant's key by."""
        return _derived(b"root", tenant.to_bytes(8, "little"))[:16]

    def shred(self, tenant: int) -> None:
        """Destroy a tenant's keys."""
        self.shredded.add(tenant)

    def sealing(self, tenant: int) -> FixedSealing | None:
        if self.is_locked or tenant in self.shredded:
            return None
        if tenant not in self._sealings:
            key_id = self.key_id(tenant)
            self._sealings[tenant] = FixedSealing(key_id, self._writer, self._key(key_id, self._writer))
        return self._sealings[tenant]

    def opening(self, key_id: bytes, writer: bytes) -> AESGCM | None:
        if self.is_locked or key_id in {self.key_id(tenant) for tenant in self.shredded}:
            return None
        return self._key(key_id, writer)

    def check(self) -> None:
        """Raise AssertionError if a nonce was given twice."""
        for sealing in self._sealings.values():
            if len(set(sealing.given)) != len(sealing.given):
                raise AssertionError("a nonce was given twice")

    def _key(self, key_id: bytes, writer: bytes) -> AESGCM:
        return AESGCM(_derived(b"key", self._seed, key_id, writer))


def _derived(purpose: bytes, *parts: bytes) -> bytes:
    return hashlib.sha256(b"hotspan-test-" + purpose + b"".join(parts)).digest()
