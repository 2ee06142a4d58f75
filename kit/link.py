"""A network link that is slow, hangs, refuses, breaks off or garbles: a TCP proxy before a real server."""

import contextlib
import queue
import random
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

_Parts = queue.Queue[tuple[float, bytes]]
_PART = 1 << 16
_GARBLED_EVERY = 1 << 18


@dataclass(slots=True)
class Trouble:
    """What is wrong with a link, for connections that stand as for new ones.

    delay_s:     that all bytes take longer, each way; more than one may be on its way.
    bytes_per_s: of all connections together, each way; 0 is as fast as it goes.
    is_hung:     nothing arrives any more. is_refusing: connections end at once.
    breaks_at:   a connection ends after it has carried so many bytes; 0 never.
    is_garbling: a bit in about every 256 KiB of what the server says is flipped.
    """

    delay_s: float = 0.0
    bytes_per_s: float = 0.0
    is_hung: bool = False
    is_refusing: bool = False
    breaks_at: int = 0
    is_garbling: bool = False


class TroubledLink:
    """Listens on a port of its own and passes on what comes, from `open` until `close`.

    trouble: read for each part that passes; a test replaces it.
    """

    def __init__(self, host: str, port: int, seed: int = 0) -> None:
        self.trouble = Trouble()
        self._target = (host, port)
        self._rng = random.Random(seed)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: set[socket.socket] = set()
        self._free_s = [0.0, 0.0]  # when each direction is through with what it was given
        self._lock = threading.Lock()
        self._is_closed = False
        threading.Thread(target=self._accept, name="link", daemon=True).start()

    def __enter__(self) -> "TroubledLink":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all connections."""
        self._is_closed = True
        self._end(self._listener)
        for each in list(self._sockets):
            self._end(each)

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.trouble.is_refusing:
                client.close()
                continue
            try:
                server = socket.create_connection(self._target, timeout=5)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            self._sockets |= {client, server}
            ends = [(client, server, 0), (server, client, 1)]
            for source, sink, way in ends:
                parts: _Parts = queue.Queue(256)
                for run in (self._receive, self._send):
                    run_on(run, source, sink, way, parts)

    def _receive(self, source: socket.socket, sink: socket.socket, way: int, parts: _Parts) -> None:
        carried = 0
        while True:
            try:
                data = source.recv(_PART)
            except OSError:
                data = b""
            trouble = self.trouble
            carried += len(data)
            if trouble.is_refusing or (trouble.breaks_at and carried > trouble.breaks_at):
                self._end(source)
                data = b""
            if way and trouble.is_garbling and data and self._rng.random() < len(data) / _GARBLED_EVERY:
                at = self._rng.randrange(len(data))
                data = data[:at] + bytes([data[at] ^ (1 << self._rng.randrange(8))]) + data[at + 1 :]
            parts.put((time.monotonic() + trouble.delay_s, data))
            if not data:
                return

    def _send(self, source: socket.socket, sink: socket.socket, way: int, parts: _Parts) -> None:
        while True:
            due_s, data = parts.get()
            time.sleep(max(0.0, due_s - time.monotonic()))
            while self.trouble.is_hung and not self._is_closed:
                time.sleep(0.005)
            if self.trouble.bytes_per_s:
                time.sleep(self._turn_s(way, len(data) / self.trouble.bytes_per_s))
            try:
                if data:
                    sink.sendall(data)
            except OSError:
                data = b""
            if not data:
                self._end(source)
                self._end(sink)
                return

    def _turn_s(self, way: int, takes_s: float) -> float:
        """Take a turn on the wire; how long until it is over."""
        with self._lock:
            now_s = time.monotonic()
            self._free_s[way] = max(self._free_s[way], now_s) + takes_s
            return self._free_s[way] - now_s

    def _end(self, end: socket.socket) -> None:
        self._sockets.discard(end)
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()


def run_on(run: Callable[..., None], *arguments: object) -> None:
    """Call it on a thread that ends with the process."""
    threading.Thread(target=run, args=arguments, name="link", daemon=True).start()
