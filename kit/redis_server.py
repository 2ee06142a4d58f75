"""redis-server in a process of its own."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from kit.ports import free_port
from kit.waiting import PATIENCE_S

INSTALL_REDIS = "redis-server is not installed, and these tests need a real one: apt-get install redis-server"


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
