"""Who may ask what of a router, and whose share and whose caches a request uses."""

import hmac
import secrets
from collections.abc import Mapping

from hotspan.core.addresses import is_loopback
from hotspan.core.credentials import key_digest, shown_keys
from hotspan.http.errors import HttpError
from hotspan.http.exchange import Exchange
from hotspan.http.hosts import Hosts
from hotspan.router.types import ANYBODY, Owner

_PROXIES = ("forwarded", "x-forwarded-for", "x-real-ip")


class Access:
    """The keys of clients and of the administrator.

    header:      that names the tenant, instead of the API key.
    keys:        SHA-256 of each API key that is let in, and whom replicas take it for; none lets in everybody.
    admin_token: None lets in this machine only.
    hosts:       names that requests may ask by where they need no key; None is this machine's.
    is_shared:   replicas share texts between tenants, or have none: no client's texts are told apart here.
    """

    def __init__(
        self,
        header: str | None = None,
        keys: Mapping[bytes, str] | None = None,
        admin_token: str | None = None,
        *,
        is_shared: bool = False,
        hosts: Hosts | None = None,
    ) -> None:
        self._hosts = hosts or Hosts()
        self._is_shared = is_shared
        self._keys = keys or {}
        self._header = header.lower() if header else None
        self._admin_token = admin_token
        self._secret = secrets.token_bytes(32)

    # -- who asks ------------------------------------------------------------------------------------------------------

    def owner(self, headers: Mapping[str, str]) -> bytes:
        """The digest of the request's key, by which its body takes memory; empty if it shows no known one."""
        digests = map(key_digest, shown_keys(headers)) if self._keys else ()
        return next((digest for digest in digests if digest in self._keys), b"")

    def tenant(self, headers: Mapping[str, str]) -> str:
        """Whose share of the queue a request uses; "" if it names nobody.

        A name made of the key, which holds for one run: nobody can find a key by trying.
        """
        if self._header:
            given = headers.get(self._header, "").encode("latin-1", "backslashreplace")
        else:
            given = self._shown(headers)
        return hmac.digest(self._secret, given, "sha256")[:8].hex() if given else ""

    def owner_of_texts(self, headers: Mapping[str, str]) -> Owner:
        """Whose texts a request's are: its tenant's, or those of whoever shows the same credentials.

        The mark is the same in every router, so that all send a session to the same replica.
        """
        if self._is_shared:
            return ANYBODY
        digests = map(key_digest, shown_keys(headers)) if self._keys else ()
        if tenant := next(filter(None, map(self._keys.get, digests)), ""):
            return Owner(tenant, key_digest(f"tenant\0{tenant}"))
        named = headers.get(self._header, "").encode("latin-1", "backslashreplace") if self._header else b""
        shown = self._shown(headers)
        return Owner("", key_digest(b"%d\0%b%b" % (len(named), named, shown))) if named or shown else ANYBODY

    def _shown(self, headers: Mapping[str, str]) -> bytes:
        """The key of a request; of two, the first that is known.

        All whose two keys are both unknown have one share: else a second key, made up, would buy a new one.
        """
        keys = list(dict.fromkeys(shown_keys(headers)))
        if len(keys) > 1:
            return next((key for key in keys if key_digest(key) in self._keys), b"two keys")
        return keys[0] if keys else b""

    # -- who may -------------------------------------------------------------------------------------------------------

    def check_host(self, exchange: Exchange, *, is_admin: bool) -> None:
        """Raise HttpError 421 for a name that is not this machine's, 403 for a page of another site, where no key is
        asked.
        """
        if not self._keys or (is_admin and self._admin_token is None):
            self._hosts.check(exchange.method, exchange.headers)

    def check_client(self, exchange: Exchange, *, or_admin: bool = False) -> None:
        """Raise HttpError 401 if keys are needed and the request shows none of them.

        or_admin: the admin token will do, for what replicas take from the administrator.
        """
        if or_admin and self._shows_token(exchange):
            return
        if self._keys and not self.owner(exchange.headers):
            message = "this router needs a valid API key: send `Authorization: Bearer KEY`"
            raise HttpError(401, message, code="invalid_api_key")

    def check_metrics(self, exchange: Exchange) -> None:
        """The same as `check_admin`, where there are keys or a token."""
        if self._keys or self._admin_token is not None:
            self.check_admin(exchange)

    def check_admin(self, exchange: Exchange) -> None:
        """Raise HttpError 401 or 403 unless it is the administrator who asks."""
        if self._admin_token is None:
            if not _is_local(exchange):
                message = "administration is for this machine only: start the router with --admin-token-file"
                raise HttpError(403, message, code="permission_denied")
            return
        if not self._shows_token(exchange):
            message = "this is for the administrator: send `Authorization: Bearer ADMIN_TOKEN`"
            raise HttpError(401, message, code="invalid_api_key")

    def _shows_token(self, exchange: Exchange) -> bool:
        if self._admin_token is None:
            return False
        wanted = key_digest(self._admin_token)
        return any(hmac.compare_digest(key_digest(shown), wanted) for shown in shown_keys(exchange.headers))


def _is_local(exchange: Exchange) -> bool:
    """Whether this machine asks, and not for somebody else."""
    client = exchange.scope.get("client")
    if client is None or any(name in exchange.headers for name in _PROXIES):
        return False
    return is_loopback(client[0])
