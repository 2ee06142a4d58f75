"""Host names that a server answers to where nobody needs a key.

A page in a browser can give its own name the address of any machine, and then asks that machine as its own server (DNS
rebinding). It can't choose the `Host` header, which has the page's name.
"""

import ipaddress
import socket
from collections.abc import Iterable

from hotspan.http.errors import HttpError

ANY = "*"


class Hosts:
    """The names of this machine, and those that the operator gave; `*` among these takes all names.

    Addresses are no names, and are always taken: whoever writes one has not been led here by a name.
    """

    def __init__(self, given: Iterable[str] = ()) -> None:
        here = socket.gethostname()
        self._names = {name.lower().rstrip(".") for name in ("localhost", here, *given)}

    def takes(self, host: str) -> bool:
        """Whether a `Host` header's value is one of these; "" is a request without one, which no browser sends."""
        name = _name_of(host.strip().lower())
        return not name or ANY in self._names or name in self._names or name.endswith(".localhost") or _is_address(name)

    def check(self, host: str) -> None:
        """Raise HttpError 421 for a name that is not one of these."""
        if not self.takes(host):
            message = (
                f"nobody needs a key here, so only this machine's names are taken, and {host[:200]!r} is none of them: "
                "give it with --allowed-host, or ask an address"
            )
            raise HttpError(421, message, code="misdirected_request")


def _name_of(host: str) -> str:
    """Without the port."""
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdecimal() else host).rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]").partition("%")[0])
    except ValueError:
        return False
    return True
