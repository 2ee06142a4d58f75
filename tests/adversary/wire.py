"""An attacker's socket: sends exactly these bytes and parses every answer that comes back."""

import http.client
import io
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

HANG_S = 60.0
"""A guard against a peer that neither answers nor hangs up; no test is judged by it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One HTTP response."""

    status: int
    body: bytes


def connect(port: int) -> socket.socket:
    """A connection to a port of this machine."""
    return socket.create_connection(("127.0.0.1", port), timeout=HANG_S)


def exchange(port: int, *parts: bytes, half_close: bool = False) -> list[Answer]:
    """The responses of `answered`."""
    return parsed(answered(port, *parts, half_close=half_close))


def answered(port: int, *parts: bytes, half_close: bool = False) -> bytes:
    """Everything a peer answers to these bytes until it hangs up.

    half_close: the sending side is closed after the last part.
    Raises:     TimeoutError if the peer neither answers nor hangs up in 60 s.
    """
    with connect(port) as peer:
        try:
            for part in parts:
                peer.sendall(part)
            if half_close:
                peer.shutdown(socket.SHUT_WR)
        except TimeoutError:
            raise
        except OSError:
            pass  # it hung up before it had read everything; what it answered may still be there
        received = bytearray()
        try:
            while part := peer.recv(1 << 16):
                received += part
        except ConnectionResetError:
            pass
    return bytes(received)


def parsed(received: bytes) -> list[Answer]:
    """The responses in a stream of bytes; interim ones (1xx) are left out."""
    stream = io.BytesIO(received)
    answers = []
    while stream.tell() < len(received):
        response = http.client.HTTPResponse(_Stream(stream))  # type: ignore[arg-type]
        response.begin()
        answers.append(Answer(response.status, response.read()))
    return answers


class _Stream:
    """What http.client reads a response from, which must outlive each response."""

    def __init__(self, stream: io.BytesIO) -> None:
        self._stream = stream

    def makefile(self, mode: str) -> "_Stream":
        return self

    def read(self, size: int | None = -1) -> bytes:
        return self._stream.read(-1 if size is None else size)

    def readinto(self, into: memoryview) -> int:
        return self._stream.readinto(into)

    def readline(self, limit: int = -1) -> bytes:
        return self._stream.readline(limit)

    def flush(self) -> None: ...

    def close(self) -> None: ...


class Victim:
    """A host that nobody must be led to connect to: it counts connections."""

    def __init__(self, listener: socket.socket) -> None:
        self.port: int = listener.getsockname()[1]
        self.connections = 0
        self._listener = listener
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\nConnection: close\r\n\r\nsecret")
            peer.close()


@contextmanager
def victim() -> Iterator[Victim]:
    """A host on a port of its own."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield Victim(listener)
