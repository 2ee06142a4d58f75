"""What a broken peer may answer instead of what it should."""

import json
from collections.abc import Callable
from typing import Any

from tests.daemon_protocol.peer import Handler


def status(code: int) -> Callable[[Handler], None]:
    """An answer with this status, after the request was read."""

    def answer(handler: Handler) -> None:
        if handler.command == "PUT":
            handler._drained(handler._size() or 0)
        handler.answer(code, b"" if code == 204 else b"<html>no</html>", "text/html")

    return answer


def sends(data: bytes, *, hang: bool = False) -> Callable[[Handler], None]:
    """Bytes instead of an answer; then the connection ends, or nothing comes any more."""

    def answer(handler: Handler) -> None:
        handler.close_connection = True
        handler.wfile.write(data)
        if hang:
            until_gone(handler)

    return answer


def trickles(handler: Handler) -> None:
    """An answer that comes a byte at a time, and never whole."""
    handler.close_connection = True
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"
    for byte in head + b"{" * 100_000:
        handler.wfile.write(bytes([byte]))
        if is_gone(handler, 0.02):
            break


def until_gone(handler: Handler) -> None:
    """Wait until the client has hung up."""
    for _ in range(30_000):  # ten minutes
        if is_gone(handler, 0.02):
            break


def is_gone(handler: Handler, wait_s: float) -> bool:
    """Whether the client hangs up within that time; what it sends meanwhile is dropped."""
    handler.connection.settimeout(wait_s)
    try:
        return not handler.connection.recv(1 << 16)
    except TimeoutError:
        return False
    except OSError:
        return True


ANSWERS: dict[str, Callable[[Handler], None]] = {
    **{str(code): status(code) for code in (201, 204, 301, 400, 401, 404, 429, 500, 502, 503, 504)},
    "nothing": sends(b""),
    "silence": sends(b"", hang=True),
    "half a status": sends(b"HTTP/1.1 2"),
    "half a head": sends(b"HTTP/1.1 200 OK\r\nContent-Le"),
    "head only": sends(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n"),
    "head and silence": sends(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n", hang=True),
    "half a body": sends(b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"id": "x", "off'),
    "half a chunk": sends(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n20\r\n{"),
    "a negative chunk": sends(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n{"),
    "no HTTP": sends(b"SSH-2.0-OpenSSH_9.6\r\n"),
    "continue for ever": sends(b"HTTP/1.1 100 Continue\r\n\r\n" * 500, hang=True),
    "endless head": sends(b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 500),
    "a long line": sends(b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000),
    "endless chunks": sends(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + (b"10000\r\n" + bytes(1 << 16) + b"\r\n") * 20
    ),
    "trickle": trickles,
}


def offsets(change: Callable[[list[dict[str, Any]]], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A twist of a lease's offsets."""
    return lambda said: {**said, "offsets": change([dict(part) for part in said["offsets"]])}


TWISTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no offsets": offsets(lambda parts: []),
    "offsets null": offsets(lambda parts: None),
    "offsets text": offsets(lambda parts: "0"),
    "offsets object": offsets(lambda parts: {"0": parts[0]}),
    "offsets numbers": offsets(lambda parts: [1, 2]),
    "offset negative": offsets(lambda parts: [{**parts[0], "offset": -16384}, *parts[1:]]),
    "offset just negative": offsets(lambda parts: [{"offset": -1, "len": 1}, *parts]),
    "offset beyond": offsets(lambda parts: [*parts[:-1], {**parts[-1], "offset": 16 << 20}]),
    "offset over the end": offsets(lambda parts: [*parts[:-1], {**parts[-1], "offset": (16 << 20) - 1}]),
    "offset 2**63": offsets(lambda parts: [*parts[:-1], {**parts[-1], "offset": 2**63}]),
    "offset 10**400": offsets(lambda parts: [*parts[:-1], {**parts[-1], "offset": 10**400}]),
    "offset float": offsets(lambda parts: [{**part, "offset": float(part["offset"])} for part in parts]),
    "offset text": offsets(lambda parts: [{**part, "offset": str(part["offset"])} for part in parts]),
    "offset true": offsets(lambda parts: [{**parts[0], "offset": True}, *parts[1:]]),
    "offset missing": offsets(lambda parts: [{"len": part["len"]} for part in parts]),
    "length 0": offsets(lambda parts: [*parts, {"offset": 0, "len": 0}]),
    "length negative": offsets(lambda parts: [*parts, {"offset": 0, "len": -1}]),
    "length huge": offsets(lambda parts: [{"offset": 0, "len": 2**62}]),
    "length 10**400": offsets(lambda parts: [{"offset": 0, "len": 10**400}]),
    "length null": offsets(lambda parts: [{**part, "len": None} for part in parts]),
    "too short": offsets(lambda parts: [*parts[:-1], {**parts[-1], "len": parts[-1]["len"] - 1}]),
    "too long": offsets(lambda parts: [*parts[:-1], {**parts[-1], "len": parts[-1]["len"] + 1}]),
    "one missing": offsets(lambda parts: parts[:-1]),
    "first missing": offsets(lambda parts: parts[1:]),
    "one twice": offsets(lambda parts: [*parts, parts[-1]]),
    "overlapping": offsets(lambda parts: [parts[0], {**parts[0], "offset": parts[0]["offset"] + 1}, *parts[2:]]),
    "rotated": offsets(lambda parts: parts[1:] + parts[:1]),
    "shifted": offsets(lambda parts: [{**part, "offset": (part["offset"] + 16384) % (16 << 20)} for part in parts]),
    "no id": lambda said: {"offsets": said["offsets"]},
    "id null": lambda said: {**said, "id": None},
    "id number": lambda said: {**said, "id": 7},
    "only id": lambda said: {"id": said["id"]},
    "list": lambda said: [said],
    "null": lambda said: None,
    "number": lambda said: 12,
    "empty": lambda said: b"",
    "text": lambda said: b"leased",
    "HTML": lambda said: b"<!DOCTYPE html><html><body>It works!</body></html>",
    "half": lambda said: json.dumps(said).encode()[:-5],
    "deep": lambda said: b"[" * 100_000,
    "not UTF-8": lambda said: b'{"id": "\xff\xfe", "offsets": []}',
    "over a MiB": lambda said: json.dumps({**said, "pad": "x" * (1 << 20)}).encode(),
}
