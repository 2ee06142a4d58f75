"""The head of an HTTP request: rules that hold for every program that reads one.

Two programs that read the same head differently are how a client gets past the first one. What could be read in two
ways is therefore refused at each entry: router, server, front of a model store and daemon.
"""

from collections.abc import Iterable

from hotspan.core.errors import HotspanError

SESSION_HEADER = "x-amzn-sagemaker-session-id"
NEW_SESSION_HEADER = "x-amzn-sagemaker-new-session-id"
CLOSED_SESSION_HEADER = "x-amzn-sagemaker-closed-session-id"
HELD_HEADER = "x-hotspan-held-ms"
"""For how long a router has held a request, in ms: what was invalidated meanwhile is not stored again."""

ADAPTER_HEADER = "x-amzn-sagemaker-adapter-identifier"

DECISIVE = frozenset(
    (
        *(b"authorization", b"x-api-key", b"x-hotspan-principal"),
        *(b"host", b"content-length", b"content-type", b"transfer-encoding"),
        *(SESSION_HEADER.encode(), b"x-session-id", b"x-correlation-id", ADAPTER_HEADER.encode()),
    )
)
"""Headers that come at most once: who asks, where the body ends and what it is, the session, the adapter."""

_SIZES = {b"content-length", b"transfer-encoding"}
_HOP = frozenset(
    (
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection"),
        *(b"te", b"trailer", b"transfer-encoding", b"upgrade"),
    )
)
"""Headers of one connection (RFC 9110, 7.6.1)."""

RawHeaders = Iterable[tuple[bytes, bytes]]


class HeadError(HotspanError):
    """A request's head is refused; the message says why. status: what the client is answered."""

    status = 400


def check_head(target: bytes, headers: RawHeaders, decisive: frozenset[bytes] = DECISIVE, *, version: str) -> None:
    """Raise HeadError for a head that programs could read differently.

    target:  its path; the query may follow.
    headers: with lower-case names.
    version: of HTTP, such as "1.1", where each request has a Host (RFC 9112, 3.2).
    """
    if not target.startswith(b"/"):
        raise HeadError(f"the target {_shown(target)} is no path: send one that begins with /")
    seen = set()
    for name, _ in headers:
        if name in decisive:
            if name in seen:
                raise HeadError(f"the header {name.decode()} came twice: send it once")
            seen.add(name)
    if version == "1.1" and b"host" not in seen:
        raise HeadError("no host header came, which HTTP/1.1 requires: send one")
    if seen >= _SIZES:
        raise HeadError("both content-length and transfer-encoding came: send one of them")


def end_to_end(headers: RawHeaders) -> list[tuple[bytes, bytes]]:
    """The headers that go further than one connection: none of its own, and none that a `Connection` names."""
    listed, dropped = [(name.lower(), name, value) for name, value in headers], _HOP
    for low, _, value in listed:
        if low == b"connection":
            dropped |= {each.strip().lower() for each in value.split(b",")}
    return [(name, value) for low, name, value in listed if low not in dropped]


def header_text(value: bytes) -> str:
    """A header's value for a client that writes headers in UTF-8. Raises: HeadError if it is not UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise HeadError("a header is not UTF-8: send ASCII, or UTF-8") from error


def _shown(target: bytes) -> str:
    return repr(target[:80].decode("latin-1"))
