"""HTTP to a server behind a Unix socket."""

import http.client
import socket
from pathlib import Path


class UnixConnection(http.client.HTTPConnection):
    """A connection of `http.client` to a socket's path. timeout_s: of each step; None for ever."""

    def __init__(self, path: Path | str, timeout_s: float | None = None) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
