"""What speaks the protocol: the reference peer, and `hotspan daemon` as a process of its own."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Protocol

import pytest

from tests.daemon_protocol.client import Client, eventually
from tests.daemon_protocol.peer import Peer

HOTSPAN = Path(sys.executable).parent / "hotspan"
SEGMENT_BYTES = 64 << 20
_START_S = 60.0


class Endpoint(Protocol):
    """Something that speaks the protocol, over a segment of SEGMENT_BYTES."""

    name: str
    """Of the segment."""

    @property
    def port(self) -> int: ...

    def restart(self) -> None: ...

    def close(self) -> None: ...


class Daemon:
    """`hotspan daemon`, running from the constructor to `close`."""

    def __init__(self) -> None:
        self.name = f"hotspan-test-{uuid.uuid4().hex}"
        self.port = 0
        self.start()

    def start(self) -> None:
        """Start it, on a free port, or start it again, where it was; returns when it answers."""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed in _end
        command = [HOTSPAN, "daemon", "--host", "127.0.0.1", "--port", self.port]
        command += ["--shared-memory-name", self.name, "--size-gib", SEGMENT_BYTES / (1 << 30)]
        self._process = subprocess.Popen([str(word) for word in command], stdout=self._log, stderr=self._log)
        if not eventually(lambda: self._process.poll() is not None or self._is_ready(), _START_S):
            self._process.kill()
            self._process.wait()
        if self._process.returncode is not None:
            self._log.seek(0)
            raise AssertionError(f"the daemon does not run: {self._log.read()[-4000:]!r}")

    def _is_ready(self) -> bool:
        """Whether it has said so, and where; read without moving the place at which it writes."""
        said = re.search(rb"is ready on http://127\.0\.0\.1:(\d+)", os.pread(self._log.fileno(), 1 << 16, 0))
        if said is not None:
            self.port = int(said[1])
        return said is not None

    def restart(self) -> None:
        """Stop, and start on the same port and with the same segment name."""
        self._end()
        self.start()

    def close(self) -> None:
        """Stop it, and leave no segment behind."""
        try:
            self._end()
        finally:
            Path("/dev/shm", self.name).unlink(missing_ok=True)

    def stop(self) -> None:
        """Kill it, so that it can clean up nothing."""
        self._process.kill()
        self._process.wait()

    def freeze(self) -> None:
        """Stop it where it is; `thaw` lets it go on."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self._process.send_signal(signal.SIGCONT)

    def _end(self) -> None:
        """As a supervisor does; it has to stop."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise
        finally:
            self._log.close()


@cache
def has_daemon() -> bool:
    """Whether the command is there."""
    asked = subprocess.run([HOTSPAN, "daemon", "--help"], capture_output=True, timeout=60, check=False)
    return asked.returncode == 0


def start(kind: str) -> Endpoint:
    """A running endpoint of one of the two kinds."""
    if kind == "reference":
        return Peer(SEGMENT_BYTES)
    if not has_daemon():
        pytest.skip("there is no `hotspan daemon`")
    return Daemon()


@pytest.fixture(scope="module", params=["reference", "hotspan"])
def endpoint(request: pytest.FixtureRequest) -> Iterator[Endpoint]:
    """What a module's tests share; each has keys of its own and leaves no lease behind."""
    endpoint = start(request.param)
    yield endpoint
    endpoint.close()


@pytest.fixture
def own_endpoint(endpoint: Endpoint) -> Iterator[Endpoint]:
    """Another of the same kind, that a test has for itself."""
    own: Endpoint = Peer(SEGMENT_BYTES) if isinstance(endpoint, Peer) else Daemon()
    yield own
    own.close()


@pytest.fixture
def client(endpoint: Endpoint) -> Iterator[Client]:
    """Speaks to the endpoint, in a bucket of its own."""
    client = Client(endpoint.port, endpoint.name, f"test-{uuid.uuid4().hex}")
    yield client
    client.close()
