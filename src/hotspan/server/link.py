"""Between the store's front and one model's server: a socket, a secret, and whose request it is.

The front has authenticated the client. The server believes whoever shows the secret, which was made for this run and
travels by a pipe: it is in no file, no environment and no list of processes.
"""

import json
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from hotspan.config.tenants import Tenants
from hotspan.server.principal import Credentials, Principal

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
