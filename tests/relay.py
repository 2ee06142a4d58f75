"""A line to a server that a test may cut, hold, or change what is sent on it."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable
from typing import Literal


class Relay:
    """A TCP relay to a server on the loopback.

    request, reply: from what came from one side to what goes on to the other, a piece a time; they may wait. An empty
                    piece ends the connection.
    connections:    accepted so far.
    """

    def __init__(self, port: int, scheme: str = "redis") -> None:
        self.request: Callable[[bytes], Iterable[bytes]] = lambda data: [data]
        self.reply: Callable[[bytes], Iterable[bytes]] = lambda data: [data]
        self._mode: Literal["open", "refuse", "hang"] = "open"
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self.port = int(self._listener.getsockname()[1])
        self.url = f"{scheme}://127.0.0.1:{self.port}"
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def set(self, mode: Literal["open", "refuse", "hang"]) -> None:
        """Cut all connections, and from now on relay new ones, close them at once, or never answer."""
        self._mode = mode
        self.cut()

    def close(self) -> None:
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """End all connections."""
        sockets, self._sockets = self._sockets, []
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.connections += 1
                if self._mode == "refuse":
                    client.close()
                    continue
                self._sockets.append(client)
                if self._mode == "open":
                    server = socket.create_connection(("127.0.0.1", self._target))
                    self._sockets.append(server)
                    threading.Thread(target=self._copy, args=(client, server, False), daemon=True).start()
                    threading.Thread(target=self._copy, args=(server, client, True), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket, is_reply: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                for piece in (self.reply if is_reply else self.request)(data):
                    if not piece:
                        # Not `cut`: a connection that was opened meanwhile is another one.
                        source.shutdown(socket.SHUT_RDWR)
                        return sink.shutdown(socket.SHUT_RDWR)
                    sink.sendall(piece)
            sink.shutdown(socket.SHUT_RDWR)
