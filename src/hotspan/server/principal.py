"""The principal of a request: identified by its credentials, and known to every task that works for it."""

import contextlib
import hmac
import json
import socket
import time
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field

from hotspan.config.tenants import Tenants
from hotspan.core.credentials import key_digest, shown_keys
from hotspan.core.errors import ConfigError
from hotspan.core.terms import DEFAULT_TENANT


@dataclass(frozen=True, slots=True)
class Principal:
    """A client or the administrator.

    tenant:   whose cache it uses.
    has_key:  it has shown that it is this tenant; without keys everybody is the default tenant, and nobody shows it.
    is_admin: it has shown the admin token.
    """

    tenant: str = DEFAULT_TENANT
    has_key: bool = False
    is_admin: bool = False


ANYBODY = Principal()

SERVER = ""
"""The owner of adapters that are nobody's in particular."""

_asking: ContextVar[Principal] = ContextVar("hotspan_principal", default=ANYBODY)


_held_since_s: ContextVar[float | None] = ContextVar("hotspan_held_since", default=None)


def current_held_since_s() -> float | None:
    """Since when the server holds the text of this task's request, by the monotonic clock; None outside of requests."""
    return _held_since_s.get()


def current_principal() -> Principal:
    """The principal that this task works for; outside of requests, the server itself as the default tenant."""
    return _asking.get()


def current_tenant() -> str:
    """The tenant whose request this task works for."""
    return _asking.get().tenant


def current_owner() -> str:
    """The tenant whose adapters this request may use besides the server's; "" without a tenant's key."""
    principal = _asking.get()
    return principal.tenant if principal.has_key and not principal.is_admin else SERVER


@contextlib.contextmanager
def asking(principal: Principal, held_s: float = 0.0) -> Iterator[None]:
    """The block, and every task started in it, works for `principal`, whose request has come now.

    held_s: for how long it was held before.
    """
    token, since = _asking.set(principal), _held_since_s.set(time.monotonic() - held_s)
    try:
        yield
    finally:
        _held_since_s.reset(since)
        _asking.reset(token)


class Credentials:
    """The keys of a server, as digests, and their principals.

    Raises: ConfigError if the admin token is some tenant's key.
    """

    def __init__(self, tenants: Tenants, admin_token: str) -> None:
        self._holders = [(key_digest(admin_token), Principal(has_key=True, is_admin=True))]
        for tenant in tenants.tenants:
            self._holders += [(digest, Principal(tenant.name, has_key=True)) for digest in tenant.keys]
        self._needs_key = tenants.has_keys
        if self._holders[0][0] in [digest for digest, _ in self._holders[1:]]:
            raise ConfigError("the admin token is also a tenant's API key: give the administrator one of its own")

    def __repr__(self) -> str:
        return f"Credentials(keys={len(self._holders)})"

    def identify(self, headers: Mapping[str, str]) -> Principal | None:
        """The principal of `Authorization: Bearer` or `X-Api-Key`; None without a valid key where one is needed.

        Takes as long for a wrong key as for a right one: all digests are compared, to their end.
        """
        found = None
        for shown in shown_keys(headers):
            digest = key_digest(shown)
            for known, holder in self._holders:
                if hmac.compare_digest(digest, known) and found is None:
                    found = holder
        return found if found is not None or self._needs_key else ANYBODY


# -- between the front of a store and the server of one model: a socket, a secret, and whose request it is -----------
#
# The front has authenticated the client. The server believes whoever shows the secret, which was made for this run and
# travels by a pipe: it is in no file, no environment and no list of processes.

PRINCIPAL = "x-hotspan-principal"
"""The header that says whose a request is; from anybody but the front it says nothing."""

CREDENTIALS = ("authorization", "x-api-key")
"""Headers that are the front's to read, and go no further."""


class LinkCredentials(Credentials):
    """Credentials of a server that only its store's front may use."""

    def __init__(self, secret: str) -> None:
        super().__init__(Tenants(), secret)

    def identify(self, headers: Mapping[str, str]) -> Principal | None:
        """The principal that the front asks for; None if the request is not from the front."""
        asking = super().identify(headers)
        if asking is None or not asking.is_admin or PRINCIPAL not in headers:
            return None
        return Principal(**json.loads(headers[PRINCIPAL]))


@dataclass(frozen=True, slots=True)
class Link:
    """The socket of one model's server, and the secret that it requires."""

    path: str
    secret: str = field(repr=False)

    def bind(self) -> socket.socket:
        """The server's socket, not yet listening."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(self.path)
        return listener

    @property
    def credentials(self) -> LinkCredentials:
        """The credentials of the server."""
        return LinkCredentials(self.secret)

    def headers(self, principal: Principal) -> dict[str, str]:
        """The headers of a request that the front sends for a principal."""
        return {"authorization": f"Bearer {self.secret}", PRINCIPAL: json.dumps(asdict(principal))}
