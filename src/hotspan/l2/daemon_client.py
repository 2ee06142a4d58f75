"""Connections to the daemon's Unix socket, and the segment that comes with them."""

import contextlib
import os
import select
import socket
import struct
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from hotspan.core.deadline import Deadline
from hotspan.core.errors import MALFORMED
from hotspan.core.shared_memory import Mapping
from hotspan.l2.daemon_protocol import (
    BUFFER_BYTES,
    GREETING,
    HELLO_MESSAGE,
    LEASE_ID,
    MAX_RELEASES,
    REQUEST,
    VERSION,
    Operation,
    Status,
)


@contextlib.contextmanager
def understood() -> Iterator[None]:
    """Turn what goes wrong with reading an answer into a ConnectionError: what answered is no daemon of hotspan."""
    try:
        yield
    except (struct.error, *MALFORMED) as error:
        raise ConnectionError(f"what the daemon answers has no meaning: {error}") from error


class Segment:
    """The daemon's shared memory, mapped; it stays mapped as long as anybody has it.

    The daemon hands its descriptor over, so it is the right one whatever stands under its name; and no resource tracker
    sees it, which would unlink it when this process ends.
    """

    def __init__(self, fd: int, size: int) -> None:
        found = os.fstat(fd)
        if found.st_size != size:
            raise ConnectionError(f"the daemon's segment has {found.st_size} bytes, and should have {size}")
        self.identity = (found.st_dev, found.st_ino)
        self.view = Mapping(fd, size).view

    def has(self, places: Sequence[tuple[int, int]], size: int) -> bool:
        """Whether these (offset, size) are `size` bytes of it, whatever the daemon said."""
        return sum(length for _, length in places) == size and all(
            length > 0 and offset + length <= len(self.view) for offset, length in places
        )


class DaemonConnection:
    """One connection, used by one thread at a time; closed when something went wrong on it.

    releases: ids of leases that are over; they go along with the next request.
    segment:  of which the daemon hands out places; None once it is closed, lest memory of a daemon that is gone stays.
    """

    def __init__(self, path: Path, deadline: Deadline) -> None:
        self.releases: deque[int] = deque()
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
            self._socket.settimeout(deadline.left_s())
            self._socket.connect(str(path))
            self._socket.send(HELLO_MESSAGE)
            self.segment: Segment | None = self._greeting(path)
        except BaseException:
            self._socket.close()
            raise

    def _greeting(self, path: Path) -> Segment:
        said, fds, _, _ = socket.recv_fds(self._socket, GREETING.size, 1)
        try:
            if len(said) != GREETING.size:
                raise ConnectionError(f"what listens at {path} is not hotspan's daemon, or hung up")
            status, version, size = GREETING.unpack(said)
            if (status, version) != (Status.OK, VERSION) or len(fds) != 1:
                raise ConnectionError(f"the daemon at {path} is of another version of hotspan: restart the older one")
            return Segment(fds[0], size)
        finally:
            for fd in fds:
                os.close(fd)

    def ask(self, operation: Operation, body: bytes, deadline: Deadline) -> tuple[Status, memoryview]:
        """What is answered; the body is there until the next call. Raises: OSError, and is closed then."""
        self.send(operation, body, deadline)
        return self.receive(deadline)

    def send(self, operation: Operation, body: bytes, deadline: Deadline) -> None:
        """The first half of `ask`: the daemon works on it while this process does something else."""
        releases = [self.releases.popleft() for _ in range(min(len(self.releases), MAX_RELEASES))]
        head = REQUEST.pack(operation, len(releases)) + b"".join(map(LEASE_ID.pack, releases))
        try:
            self._socket.settimeout(deadline.left_s())
            self._socket.send(head + body)
        except BaseException:
            self.close()
            raise

    def receive(self, deadline: Deadline) -> tuple[Status, memoryview]:
        """The second half."""
        try:
            self._socket.settimeout(deadline.left_s())
            size = self._socket.recv_into(self._buffer)
            if not size or self._buffer[0] == Status.BAD_REQUEST:
                raise ConnectionError("the daemon hung up, or did not understand")
            with understood():
                return Status(self._buffer[0]), self._buffer[1:size]
        except BaseException:
            self.close()
            raise

    def is_open(self) -> bool:
        """Whether nobody has hung up, neither here nor there."""
        poll = select.poll()
        try:
            poll.register(self._socket, select.POLLRDHUP)
        except ValueError:  # it was closed here
            return False
        return not poll.poll(0)

    def close(self) -> None:
        """Hang up: the daemon ends what was leased and reserved here."""
        self._socket.close()
        self.segment = None


class DaemonClient:
    """Connections to one daemon, as many as threads use them at once.

    Raises: OSError from every method when the daemon can't be reached.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._idle: list[DaemonConnection] = []
        self._segment: weakref.ref[Segment] | None = None
        self._is_closed = False
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def connection(self, deadline: Deadline) -> Iterator[DaemonConnection]:
        """A connection for this thread alone; after an error of any kind it is closed."""
        connection = self._take(deadline)
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        with self._lock:
            if not self._is_closed:
                self._idle.append(connection)
                return
        connection.close()

    def ask(self, operation: Operation, body: bytes, deadline: Deadline) -> bytes:
        """What is answered to one request. Raises: OSError, too, if it went wrong over there."""
        with self.connection(deadline) as connection:
            status, answer = connection.ask(operation, body, deadline)
            if status is not Status.OK:
                raise ConnectionError(f"the daemon answers {status.name} to {operation.name}")
            return bytes(answer)

    def close(self) -> None:
        """Close what is idle; connections in use are closed when they are given back."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _take(self, deadline: Deadline) -> DaemonConnection:
        while True:
            with self._lock:
                if self._is_closed:
                    raise ConnectionError("this store is closed")
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                return self._open(deadline)
            if connection.is_open():
                return connection
            connection.close()  # and so all others, if the daemon is gone: nothing of its memory stays mapped

    def _open(self, deadline: Deadline) -> DaemonConnection:
        connection = DaemonConnection(self.path, deadline)
        with self._lock:  # one mapping for all connections to one daemon
            known, new = None if self._segment is None else self._segment(), connection.segment
            if known is not None and new is not None and known.identity == new.identity:
                connection.segment = known
            elif new is not None:
                self._segment = weakref.ref(new)
        return connection
