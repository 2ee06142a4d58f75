"""Whose a request is, by a name that says nothing of the key it is made of."""

import hashlib
import hmac
import secrets
from collections.abc import Mapping


class TenantNames:
    """Names for those who ask. They hold for one run: nobody can find a key by trying.

    header: that names the tenant, instead of the API key.
    keys:   SHA-256 of API keys, and whom replicas take them for.
    """

    def __init__(self, header: str | None = None, keys: Mapping[bytes, str] | None = None) -> None:
        self._keys = {digest: tenant for digest, tenant in (keys or {}).items() if tenant}
        self._header = header.lower() if header else None
        self._secret = secrets.token_bytes(32)

    def of(self, headers: Mapping[str, str]) -> str:
        """Whose share of the queue a request is; "" if it names nobody."""
        given = headers.get(self._header) if self._header else shown_key(headers)
        return hmac.digest(self._secret, given.encode("latin-1", "replace"), "sha256")[:8].hex() if given else ""

    def at_replicas(self, headers: Mapping[str, str]) -> str:
        """The tenant whose caches a request uses; "" is the default one, or one that is not known here."""
        if not self._keys or (shown := shown_key(headers)) is None:
            return ""
        return self._keys.get(key_digest(shown), "")


def key_digest(key: str) -> bytes:
    """What is kept of an API key."""
    return hashlib.sha256(key.encode("latin-1", "replace")).digest()


def shown_key(headers: Mapping[str, str]) -> str | None:
    """The credential of a request: `Authorization: Bearer`, or `X-Api-Key`."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    given = headers.get("x-api-key")
    return given.strip() if given else None
