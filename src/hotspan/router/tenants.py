"""Whose a request is, by a name that says nothing of the key it is made of."""

import hmac
import secrets
from collections.abc import Mapping

from hotspan.core.credentials import key_digest, shown_keys


class TenantNames:
    """Names for those who ask. They hold for one run: nobody can find a key by trying.

    header: that names the tenant, instead of the API key.
    keys:   SHA-256 of API keys, and whom replicas take them for.
    """

    def __init__(self, header: str | None = None, keys: Mapping[bytes, str] | None = None) -> None:
        self._keys = keys or {}
        self._header = header.lower() if header else None
        self._secret = secrets.token_bytes(32)

    def of(self, headers: Mapping[str, str]) -> str:
        """Whose share of the queue a request is; "" if it names nobody."""
        if self._header:
            given = headers.get(self._header, "").encode("latin-1", "backslashreplace")
        else:
            given = self._shown(headers)
        return hmac.digest(self._secret, given, "sha256")[:8].hex() if given else ""

    def at_replicas(self, headers: Mapping[str, str]) -> str:
        """The tenant whose caches a request uses; "" is the default one, or one that is not known here."""
        for shown in shown_keys(headers) if self._keys else ():
            if tenant := self._keys.get(key_digest(shown)):
                return tenant
        return ""

    def _shown(self, headers: Mapping[str, str]) -> bytes:
        """The key of a request; of two, the first that is known.

        All whose two keys are both unknown have one share: else a second key, made up, would buy a new one.
        """
        keys = list(dict.fromkeys(shown_keys(headers)))
        if len(keys) > 1:
            return next((key for key in keys if key_digest(key) in self._keys), b"two keys")
        return keys[0] if keys else b""
