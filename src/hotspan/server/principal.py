"""Whose a request is: from the credential in its headers to a tenant, and from there to wherever it is asked."""

import contextlib
import hmac
import json
import socket
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field

from hotspan.config.tenants import Tenants
from hotspan.core.credentials import key_digest, shown_keys
from hotspan.core.errors import ConfigError
from hotspan.core.terms import DEFAULT_TENANT


@dataclass(frozen=True, slots=True)
class Principal:
    """Who asks.

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


def current_principal() -> Principal:
    """Whose request this task works for; outside of requests, the server itself as the default tenant."""
    return _asking.get()


def current_tenant() -> str:
    """The tenant whose request this task works for."""
    return _asking.get().tenant


def current_owner() -> str:
    """Whose adapters this task's request may name besides the server's; "" where it has shown no tenant's key."""
    principal = _asking.get()
    return principal.tenant if principal.has_key and not principal.is_admin else SERVER


@contextlib.contextmanager
def asking(principal: Principal) -> Iterator[None]:
    """What runs inside, and every task started there, works for `principal`."""
    token = _asking.set(principal)
    try:
        yield
    finally:
        _asking.reset(token)


class Credentials:
    """All keys of a server, as digests, and who shows which.

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
        """Who shows these credentials (`Authorization: Bearer`, `X-Api-Key`); None if a key is needed and this is none.

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
    """Those of a server that nobody but the front may use."""

    def __init__(self, secret: str) -> None:
        super().__init__(Tenants(), secret)

    def identify(self, headers: Mapping[str, str]) -> Principal | None:
        """For whom the front asks; None if it is not the front that asks."""
        asking = super().identify(headers)
        if asking is None or not asking.is_admin or PRINCIPAL not in headers:
            return None
        return Principal(**json.loads(headers[PRINCIPAL]))


@dataclass(frozen=True, slots=True)
class Link:
    """Where one model's server listens, and what it asks of who comes."""

    path: str
    secret: str = field(repr=False)

    def bind(self) -> socket.socket:
        """The server's socket, not yet listening."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(self.path)
        return listener

    @property
    def credentials(self) -> LinkCredentials:
        """By which the server knows the front."""
        return LinkCredentials(self.secret)

    def headers(self, principal: Principal) -> dict[str, str]:
        """By which the front asks for somebody."""
        return {"authorization": f"Bearer {self.secret}", PRINCIPAL: json.dumps(asdict(principal))}
