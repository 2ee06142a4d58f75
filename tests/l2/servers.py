"""Real servers for stores to speak to, and lines to them that lie."""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

INSTALL_REDIS = "redis-server is not installed, and these tests need a real one: apt-get install redis-server"


PATIENCE_S = 60.0
"""What a machine that others use may need for anything."""

Answer = TypeVar("Answer")


def at_last(ask: Callable[[], Answer]) -> Answer:
    """The answer, asked for again while a machine that stands still makes it an OSError."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return ask()
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.005)


def free_port() -> int:
    """A port of the loopback that nobody uses, below those that the kernel gives to who wants any: it stays free."""
    while True:
        port = secrets.randbelow(16000) + 16000
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


class RedisServer:
    """redis-server in a process of its own, its data in `directory`; keeps nothing over a restart unless told to.

    arguments: of redis-server, after what is needed anyway.
    """

    def __init__(self, directory: Path, *arguments: str) -> None:
        self.program = shutil.which("redis-server")
        assert self.program is not None, INSTALL_REDIS
        self.port = free_port()
        self.socket = directory / "redis.sock"
        self._directory = directory
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it, and wait until it answers."""
        command = [
            *(str(self.program), "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._directory)),
            *("--unixsocket", str(self.socket), "--save", "", "--logfile", "redis.log", *self._arguments),
        ]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + PATIENCE_S
        while not self._answers():
            log = self._directory / "redis.log"
            assert self._process.poll() is None, log.read_text() if log.exists() else "redis-server did not start"
            assert time.monotonic() < deadline, "redis-server does not answer"
            time.sleep(0.005)

    def stop(self) -> None:
        """Kill it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(PATIENCE_S)
            self._process = None

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def ask(self, *arguments: str) -> bytes:
        """What it replies to one command, as it comes; for short replies."""
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(PATIENCE_S)
            line.connect(str(self.socket))
            parts = "".join(f"${len(each.encode())}\r\n{each}\r\n" for each in arguments)
            line.sendall(f"*{len(arguments)}\r\n{parts}".encode())
            return line.recv(1 << 20)

    def _answers(self) -> bool:
        try:
            return self.ask("PING").startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False


@contextlib.contextmanager
def redis_server(directory: Path, *arguments: str) -> Iterator[RedisServer]:
    """A server for as long as the block runs."""
    directory.mkdir(parents=True, exist_ok=True)
    server = RedisServer(directory, *arguments)
    try:
        server.start()
        yield server
    finally:
        server.stop()


class Relay:
    """A line to a server on which a test may change what is said.

    request, reply: from what came from one side to what goes on to the other, a piece a time; they may wait. An empty
                    piece ends the connection.
    """

    def __init__(self, port: int) -> None:
        self.request: Callable[[bytes], Iterable[bytes]] = lambda data: [data]
        self.reply: Callable[[bytes], Iterable[bytes]] = lambda data: [data]
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self.port = int(self._listener.getsockname()[1])
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

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
                server = socket.create_connection(("127.0.0.1", self._target))
                self.connections += 1
                self._sockets += [client, server]
                threading.Thread(target=self._copy, args=(client, server, False), daemon=True).start()
                threading.Thread(target=self._copy, args=(server, client, True), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket, is_reply: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                for piece in (self.reply if is_reply else self.request)(data):
                    if not piece:
                        return self.cut()
                    sink.sendall(piece)
            sink.shutdown(socket.SHUT_RDWR)
