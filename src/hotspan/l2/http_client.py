"""HTTP/1.1 to one peer, over connections that are kept; an exchange ends within its deadline whatever the peer does.

Requests of one call go out together, each on a connection of its own, and their answers are read in turn: the peer
works on all of them at once, and here that takes no thread.
"""

import contextlib
import io
import ipaddress
import itertools
import select
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from typing import Any, NamedTuple

from hotspan.core.buffers import parts_of
from hotspan.core.deadline import Deadline
from hotspan.core.threads import start
from hotspan.core.version import __version__

Buffer = bytes | memoryview

MAX_ANSWER_BYTES = 1 << 20
"""Of an answer's body; there is no honest one of that size."""

_KEPT_S = 30.0
"""After which an idle connection is not used again."""


@dataclass(frozen=True, slots=True)
class Request:
    """target: percent-encoded. body: parts that are sent one after the other, without being joined."""

    method: str
    target: str
    body: Sequence[Buffer] = ()


class HttpResponse(NamedTuple):
    """What a peer answered."""

    status: int
    body: bytes


class Connection:
    """One connection; one request at a time. Methods raise OSError, after which it can only be closed."""

    def __init__(self, sock: socket.socket, host: str) -> None:
        self._socket = sock
        self._host = host
        self.is_kept = False
        """Whether it has answered before, and may have been closed by the peer since."""
        self.keeps = True
        """Whether it can take another request."""

    def send(self, request: Request, chunk_bytes: int, deadline: Deadline) -> None:
        """Send a request; less than all of it if the peer has answered already or hung up: see what `receive` says."""
        size = sum(memoryview(part).nbytes for part in request.body)
        head = (
            f"{request.method} {request.target} HTTP/1.1\r\nHost: {self._host}\r\nUser-Agent: hotspan/{__version__}\r\n"
            f"Content-Type: application/octet-stream\r\nContent-Length: {size}\r\n\r\n"
        )
        try:
            self._send(head.encode("ascii"), deadline)
            for piece in itertools.chain.from_iterable(parts_of(request.body, chunk_bytes)):
                if self._has_answered():
                    self.keeps = False
                    return
                self._send(piece, deadline)
        except (BrokenPipeError, ConnectionResetError):
            self.keeps = False

    def receive(self, method: str, deadline: Deadline) -> HttpResponse:
        """The answer to what was sent."""
        try:
            response = HTTPResponse(_Incoming(self._socket, deadline), method=method)  # type: ignore[arg-type]
            with contextlib.closing(response):
                response.begin()
                body = response.read(MAX_ANSWER_BYTES + 1)
                if response.length:
                    raise ConnectionError("the answer was cut, or is too long")
        except (HTTPException, ValueError) as error:
            if isinstance(error, OSError):
                raise
            raise ConnectionError(f"what came is no HTTP answer: {error!r}") from error
        if len(body) > MAX_ANSWER_BYTES:
            raise ConnectionError("the answer is too long")
        self.is_kept = True
        self.keeps = self.keeps and not response.will_close
        return HttpResponse(response.status, body)

    def is_sound(self) -> bool:
        """Whether an idle connection can be used: the peer has neither closed it nor said what nobody asked."""
        return not _is_readable(self._socket)

    def break_off(self) -> None:
        """Make the thread that uses it fail at once."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of it."""
        self._socket.close()

    def _send(self, piece: Buffer, deadline: Deadline) -> None:
        self._socket.settimeout(deadline.left_s())
        self._socket.sendall(piece)

    def _has_answered(self) -> bool:
        """Before the request was whole, as a refusal may come; TLS has bytes of its own on the way."""
        return not isinstance(self._socket, ssl.SSLSocket) and _is_readable(self._socket)


class ConnectionPool:
    """Connections to one peer, at most `limit`. Methods may be called from several threads.

    host: an address or a name.
    """

    def __init__(self, host: str, port: int, limit: int, *, use_https: bool = False, chunk_bytes: int = 65536) -> None:
        self._address = (host, port)
        self._host = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._tls = ssl.create_default_context() if use_https else None
        self._chunk_bytes = chunk_bytes
        self._changed = threading.Condition()
        self._free = limit
        self._idle: list[tuple[Connection, float]] = []
        self._busy: set[Connection] = set()
        self._closed = False

    def ask(self, request: Request, deadline: Deadline) -> HttpResponse:
        """One request's answer. Raises: OSError; for a broken peer within the deadline."""
        (answer,) = self.ask_all([request], deadline)
        if isinstance(answer, OSError):
            raise answer
        return answer

    def ask_all(self, requests: Sequence[Request], deadline: Deadline) -> list[HttpResponse | OSError]:
        """Each request's answer, or why there is none. For small ones: no body is read before all are sent."""
        answers: list[HttpResponse | OSError] = []
        while len(answers) < len(requests):
            batch = requests[len(answers) :]
            try:
                taken = self._take(len(batch), deadline)
            except OSError as error:
                return [*answers, *[error] * len(batch)]
            try:
                sent = [(request, self._sent(request, deadline)) for request in batch[:taken]]
                answers += [self._received(request, connection, deadline) for request, connection in sent]
            finally:
                self._give_back(taken)
        return answers

    def close(self) -> None:
        """Let go of all connections; calls that other threads are in raise."""
        with self._changed:
            self._closed = True
            idle, self._idle = self._idle, []
            for connection in self._busy:
                connection.break_off()
            self._changed.notify_all()
        for connection, _ in idle:
            connection.close()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _take(self, most: int, deadline: Deadline) -> int:
        """The right to some connections, at least one: who waits holds none, so that nobody waits for each other."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._free > 0 or self._closed, deadline.left_s()):
                raise TimeoutError("all connections stayed busy until the deadline")
            self._check_open()
            taken = min(most, self._free)
            self._free -= taken
            return taken

    def _give_back(self, taken: int) -> None:
        with self._changed:
            self._free += taken
            self._changed.notify_all()

    def _sent(self, request: Request, deadline: Deadline, *, is_fresh: bool = False) -> Connection | OSError:
        """The connection that a request went out on."""
        connection: Connection | None = None
        try:
            connection = None if is_fresh else self._idle_connection()
            connection = connection or self._connect(deadline)
            connection.send(request, self._chunk_bytes, deadline)
        except OSError as error:
            if connection is not None:
                self._drop(connection)
            return error
        return connection

    def _received(
        self, request: Request, connection: Connection | OSError, deadline: Deadline
    ) -> HttpResponse | OSError:
        if isinstance(connection, OSError):
            return connection
        was_kept = connection.is_kept
        try:
            answer = connection.receive(request.method, deadline)
        except OSError as error:
            self._drop(connection)
            if was_kept and isinstance(error, ConnectionResetError) and not self._closed:  # while it was idle
                return self._received(request, self._sent(request, deadline, is_fresh=True), deadline)
            return error
        self._keep(connection)
        return answer

    def _idle_connection(self) -> Connection | None:
        while True:
            with self._changed:
                self._check_open()
                if not self._idle:
                    return None
                connection, since_s = self._idle.pop()
                self._busy.add(connection)
            if time.monotonic() - since_s < _KEPT_S and connection.is_sound():
                return connection
            self._drop(connection)

    def _keep(self, connection: Connection) -> None:
        with self._changed:
            self._busy.discard(connection)
            if connection.keeps and not self._closed:
                self._idle.append((connection, time.monotonic()))
                return
        connection.close()

    def _drop(self, connection: Connection) -> None:
        with self._changed:
            self._busy.discard(connection)
        connection.close()

    def _connect(self, deadline: Deadline) -> Connection:
        sock = connected(*self._address, deadline)
        try:
            if self._tls is not None:
                sock.settimeout(deadline.left_s())
                sock = self._tls.wrap_socket(sock, server_hostname=self._address[0])
            connection = Connection(sock, self._host)
            with self._changed:
                self._check_open()
                self._busy.add(connection)
        except BaseException:
            sock.close()
            raise
        return connection

    def _check_open(self) -> None:
        if self._closed:
            raise ConnectionError("the store is closed")


class _Incoming(io.RawIOBase):
    """What comes from a socket until a deadline; also the only thing of a socket that HTTPResponse asks for."""

    def __init__(self, sock: socket.socket, deadline: Deadline) -> None:
        self._socket = sock
        self._deadline = deadline

    def makefile(self, mode: str) -> io.BufferedReader:
        return _WholeLines(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._socket.settimeout(self._deadline.left_s())
        return self._socket.recv_into(buffer)


class _WholeLines(io.BufferedReader):
    """A head that ends in the middle is a fault; HTTPResponse takes it for whole."""

    _has_begun = False

    def readline(self, size: int | None = -1, /) -> bytes:
        line = super().readline(size)
        if not line.endswith(b"\n") and len(line) != size and (line or self._has_begun):
            raise ConnectionError("the answer was cut")
        self._has_begun = True
        return line


def _is_readable(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


def connected(host: str, port: int, deadline: Deadline) -> socket.socket:
    """A TCP connection to an address or a name. Raises: OSError, by the deadline."""
    failure: OSError = ConnectionError(f"{host} has no address")
    for family, kind, protocol, _, address in _resolved(host, port, deadline):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(deadline.left_s())
            sock.connect(address)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            sock.close()
            failure = error
        else:
            return sock
    raise failure


def _resolved(host: str, port: int, deadline: Deadline) -> list[Any]:
    """What to connect to. A name is looked up on a thread: the resolver has time limits of its own only."""
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    found: list[Any] = []

    def resolve() -> None:
        try:
            found.append(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            found.append(ConnectionError(f"{host} has no address: {error}"))

    thread = start("l2-resolve", resolve)
    thread.join(deadline.left_s())
    if not found:
        raise TimeoutError(f"{host} was not resolved within the deadline")
    if isinstance(found[0], OSError):
        raise found[0]
    return list(found[0])
