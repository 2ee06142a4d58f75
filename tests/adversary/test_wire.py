"""What an attacker without a key sends byte by byte: each entry refuses it, and no other host is asked for anything."""

import pytest

from .conftest import KEYS, House
from .wire import Answer, exchange, victim

pytestmark = pytest.mark.engine

ENTRIES = ("server", "router", "daemon")
KEY = f"X-Api-Key: {KEYS['acme']}\r\n".encode()
NEXT = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
"""Sent behind what is ambiguous: who answers it has read the message before it in one of two ways."""

TARGETS = (
    "*@{host}/latest",
    "*:80@{host}/latest",
    "*",
    "*x",
    "@{host}/latest",
    "http://{host}/latest",
    "http://{host}",
    "//{host}/latest",
    "///{host}/latest",
    "/\\{host}/latest",
    "/@{host}/latest",
    "/:80@{host}/latest",
    "/..//{host}/latest",
    "/%2e%2e//{host}/latest",
    "/?@{host}/latest",
    "/#@{host}/latest",
    "/v1/models?url=http://{host}/latest",
    "/v1/models%00",
    "/v1/models%0d%0aHost:%20{host}",
)
"""`host` is the address of a host that must not be connected to."""


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("target", TARGETS)
def test_no_target_leads_to_another_host(well: House, entry: str, target: str) -> None:
    """Whatever a request line names, only the replica is asked, and the answer is a refusal."""
    with victim() as other:
        line = target.format(host=f"127.0.0.1:{other.port}")
        for method in ("GET", "POST", "DELETE"):
            head = f"{method} {line} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\nConnection: close\r\n".encode()
            for answer in exchange(well.ports[entry], head + KEY + b"\r\n"):
                assert b"secret" not in answer.body
                assert 400 <= answer.status < 500 or "?" in line, (method, answer)
        assert other.connections == 0


@pytest.mark.parametrize("entry", ENTRIES)
def test_connect_is_no_tunnel(well: House, entry: str) -> None:
    """CONNECT is refused."""
    with victim() as other:
        line = f"CONNECT 127.0.0.1:{other.port} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        assert all(answer.status >= 400 for answer in exchange(well.ports[entry], line.encode(), half_close=True))
        assert other.connections == 0


def post(*headers: bytes, body: bytes = b"") -> bytes:
    """A request with a key and these headers."""
    lines = [b"POST /v1/completions HTTP/1.1", b"Host: localhost", *headers, KEY.rstrip()]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


AMBIGUOUS = {
    "two lengths": post(b"Content-Length: 2", b"Content-Length: 40", body=b"{}"),
    "two equal lengths in one": post(b"Content-Length: 2, 40", body=b"{}"),
    "length and chunks": post(b"Content-Length: 4", b"Transfer-Encoding: chunked", body=b"0\r\n\r\n"),
    "chunks and length": post(b"Transfer-Encoding: chunked", b"Content-Length: 4", body=b"0\r\n\r\n"),
    "chunks not last": post(b"Transfer-Encoding: chunked, identity", body=b"0\r\n\r\n"),
    "unknown coding": post(b"Transfer-Encoding: xchunked", body=b"0\r\n\r\n"),
    "coding behind a tab": post(b"Transfer-Encoding:\x0bchunked", body=b"0\r\n\r\n"),
    "space before the colon": post(b"Content-Length : 2", body=b"{}"),
    "space in the name": post(b"Content Length: 2", body=b"{}"),
    "signed length": post(b"Content-Length: +2", body=b"{}"),
    "hexadecimal length": post(b"Content-Length: 0x2", body=b"{}"),
    "huge length": post(b"Content-Length: 99999999999999999999999", body=b"{}"),
    "huge chunk": post(b"Transfer-Encoding: chunked", body=b"FFFFFFFFFFFFFFFFF\r\n{}\r\n0\r\n\r\n"),
    "signed chunk": post(b"Transfer-Encoding: chunked", body=b"-2\r\n{}\r\n0\r\n\r\n"),
    "chunk without its end": post(b"Transfer-Encoding: chunked", body=b"2\r\n{}XX0\r\n\r\n"),
    "bare carriage return": post(b"X-A: 1\rContent-Length: 2", body=b"{}"),
    "zero byte": post(b"X-A: 1\x00", b"Content-Length: 2", body=b"{}"),
    "no colon": post(b"Content-Length 2", body=b"{}"),
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("name", AMBIGUOUS)
def test_ambiguous_framing_is_refused_and_ends_the_connection(well: House, entry: str, name: str) -> None:
    """A message that two parsers could end at two places gets a refusal at most, and nothing behind it is answered."""
    answers = exchange(well.ports[entry], AMBIGUOUS[name] + NEXT, half_close=True)
    assert len(answers) <= 1 and all(400 <= answer.status < 500 for answer in answers), answers


@pytest.mark.parametrize("entry", ("server", "router"))
@pytest.mark.parametrize("header", ["Authorization: Bearer {key}", "X-Api-Key: {key}"])
def test_credentials_that_come_twice_are_refused(well: House, entry: str, header: str) -> None:
    """Two keys in one request name two tenants: neither counts, in either order."""
    first, second = (header.format(key=KEYS[name]).encode() for name in ("acme", "globex"))
    for one, other in ((first, second), (second, first)):
        head = (
            b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n" + one + b"\r\n" + other + b"\r\nConnection: close\r\n\r\n"
        )
        (answer,) = exchange(well.ports[entry], head)
        assert answer.status == 400, answer


@pytest.mark.parametrize("entry", ENTRIES)
def test_hosts_that_come_twice_are_refused(well: House, entry: str) -> None:
    """Two Host headers could name two places."""
    head = b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\nConnection: close\r\n\r\n"
    assert [answer.status for answer in exchange(well.ports[entry], head)] == [400]


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_request_has_a_host(well: House, entry: str) -> None:
    """HTTP/1.1 without a Host is refused (RFC 9112, 3.2), and the connection goes on or ends; HTTP/1.0 has none."""
    for head in (b"GET /health HTTP/1.1\r\n", b"GET http://h/health HTTP/1.1\r\n", b"POST /health HTTP/1.1\r\n"):
        (answer,) = exchange(well.ports[entry], head + KEY + b"Connection: close\r\n\r\n")
        assert answer.status == 400, head
    (answer,) = exchange(well.ports[entry], b"GET /health HTTP/1.0\r\n\r\n")
    assert answer.status == 200


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_folded_header_hides_nothing(well: House, entry: str) -> None:
    """A header that goes on in the next line is refused, or is one value: never a header of its own."""
    folded = post(b"X-A: 1\r\n Transfer-Encoding: chunked", b"Content-Length: 2", body=b"{}")
    answers = exchange(well.ports[entry], folded + NEXT, half_close=True)
    assert answers and answers[0].status >= 400
    assert len(answers) == 1 or answers[1].status == 200  # the body was the two bytes that the length says


@pytest.mark.parametrize("entry", ENTRIES)
def test_pipelined_requests_are_answered_in_order(well: House, entry: str) -> None:
    """Requests sent at once are answered one by one, each its own: the refused one does not shift the others."""
    asked = (
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" + b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\n\r\n" + NEXT
    )
    answers = exchange(well.ports[entry], asked)
    assert [answer.status == 200 for answer in answers] == [True, False, True]


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n",
        post(b"Content-Length: 100", body=b"{"),
        post(b"Transfer-Encoding: chunked", body=b"5\r\n{"),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x00" * 4096,
    ],
)
def test_half_a_message_holds_nobody_up(well: House, entry: str, sent: bytes) -> None:
    """A client that stops in the middle, or speaks another protocol, gets a refusal or is hung up on."""
    assert all(answer.status >= 400 for answer in exchange(well.ports[entry], sent, half_close=True))


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_head_has_a_size(well: House, entry: str) -> None:
    """Headers without end are cut off: one long line, and many short ones."""
    for flood in (b"X-A: " + b"a" * (1 << 20), b"".join(b"X-%d: a\r\n" % n for n in range(100_000))):
        answers: list[Answer] = exchange(well.ports[entry], b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + flood)
        assert all(answer.status >= 400 for answer in answers), answers
