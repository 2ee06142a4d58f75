"""Host names that a server answers to where nobody needs a key, and pages that may ask it.

A page in a browser can give its own name the address of any machine, and then asks that machine as its own server (DNS
rebinding). It can't choose the `Host` header, which has the page's name.

A page can also ask a machine by its address. For most requests its browser asks that machine first (CORS), but not for
websockets and for posts as forms make them. It can't choose the `Origin` header, which names the page's server.
"""

import ipaddress
import socket
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from hotspan.core.addresses import is_loopback
from hotspan.http.errors import HttpError
from hotspan.http.exchange import JSON

ANY = "*"

_FORMS = ("", "text/plain", "multipart/form-data", "application/x-www-form-urlencoded")
"""Types that a page of any site may post without asking first, as a form does (https://fetch.spec.whatwg.org)."""


class Hosts:
    """The names of this machine, and those that the operator gave; `*` among these takes all names.

    Addresses are no names, and are always taken: whoever writes one has not been led here by a name.

    origins: of pages that may ask whatever their host is (CORS); `*` is all.
    """

    def __init__(self, given: Iterable[str] = (), origins: Iterable[str] = ()) -> None:
        here = socket.gethostname()
        self._origins = {origin.lower() for origin in origins}
        self._names = {name.lower().rstrip(".") for name in ("localhost", here, *given)}

    def takes(self, host: str) -> bool:
        """Whether a `Host` header's value is one of these; "" is a request without one, which no browser sends."""
        name = _name_of(host.strip().lower())
        return not name or ANY in self._names or name in self._names or name.endswith(".localhost") or _is_address(name)

    def check(self, method: str | None, headers: Mapping[str, str]) -> None:
        """Raise HttpError 421 for a name that is not one of these, 403 for what a page of another site sends without
        having asked first: a websocket, or a post of a form's types.

        method: None for a websocket. A page's own name is that of `Host`, or what a proxy says that it was: no page can
        send `X-Forwarded-Host` without having asked.
        """
        host, origin = headers.get("host", ""), headers.get("origin", "").strip().lower()
        if not self.takes(host):
            message = (
                f"nobody needs a key here, so only this machine's names are taken, and {host[:200]!r} is none of them: "
                "give it with --allowed-host, or ask an address"
            )
            raise HttpError(421, message, code="misdirected_request")
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        has_asked = method is not None and (method != "POST" or kind not in _FORMS)
        own = {_name_of(each.strip().lower()) for each in (host, headers.get("x-forwarded-host", "").partition(",")[0])}
        if origin and not has_asked and not self._takes_page(origin, own):
            message = (
                f"nobody needs a key here, so only this machine's pages may send this, and {origin[:200]!r} is none of "
                f"them: give its name with --allowed-host{'' if method is None else f', or post {JSON}'}"
            )
            raise HttpError(403, message, code="permission_denied")

    def _takes_page(self, origin: str, own: set[str]) -> bool:
        """Whether a page is one of the server's own names, this machine's, or of one of those that were given. Any site
        can have an address.
        """
        if ANY in self._names or not {ANY, origin}.isdisjoint(self._origins):
            return True
        try:
            name = _name_of(urlsplit(origin).netloc)
        except ValueError:
            return False
        is_elsewhere = _is_address(name) and not is_loopback(name.strip("[]")) and name not in self._names
        return bool(name) and (name in own or (not is_elsewhere and self.takes(name)))


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
