"""RESP, the protocol of Redis and Valkey, on one connection: what is large moves between socket and memory uncopied.

    request:    *2 $3 GET $1 k
    replies:    +text    -code text    :number    $4 data    *2 reply reply

A peer is believed nothing: not that it answers, nor that it ever ends.
"""

import re
import select
import socket
import ssl
import time
from collections.abc import Iterable, Sequence

from hotspan.core.types import MIB

LEAST_RATE = 8 * MIB
"""Bytes a second that a peer must move on average, once its timeout is used up."""

Buffer = bytes | memoryview
Reply = bytes | int | list["Reply"] | None

_BUFFER_BYTES = 1 << 16
_HEAD_BYTES = 64  # enough for the line before a bulk string; more of its data would be copied
_MOST_LINE_BYTES = 1 << 12
_MOST_REPLY_BYTES = 256 * MIB
_OBJECT_BYTES = 64
"""What one part of a reply takes in memory besides its data, at least."""
_MOST_DEPTH = 4
_NUMBER = re.compile(rb"-?[0-9]{1,18}")
_END = b"\r\n"


class Budget:
    """How long a call may take: `timeout_s`, and a second more for each LEAST_RATE bytes that it moved.

    So a peer that hangs holds a call for `timeout_s`, and one that trickles not much longer.
    """

    __slots__ = ("_timeout_s", "_until_s")

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._until_s = time.monotonic() + timeout_s

    def left_s(self) -> float:
        """Seconds that the next step may take. Raises: TimeoutError if there are none."""
        left = self._until_s - time.monotonic()
        if left <= 0:
            raise TimeoutError("too slow")
        return min(left, self._timeout_s)

    def moved(self, count: int) -> None:
        """So many bytes moved."""
        self._until_s += count / LEAST_RATE


class ServerSaid(ConnectionError):
    """A server's reply was an error. code: its first word."""

    def __init__(self, text: str) -> None:
        super().__init__(f"the server said: {text}")
        self.code = text.partition(" ")[0]


class ProtocolError(ConnectionError):
    """What came is not what the protocol promises."""


def packed(arguments: Sequence[bytes]) -> bytes:
    """A command as it is sent."""
    parts = [b"*%d\r\n" % len(arguments)]
    for argument in arguments:
        parts += [b"$%d\r\n" % len(argument), argument, _END]
    return b"".join(parts)


def values(reply: Reply) -> list[bytes]:
    """A list of values. Raises: ProtocolError if it is something else."""
    if isinstance(reply, list):
        found = [item for item in reply if isinstance(item, bytes)]
        if len(found) == len(reply):
            return found
    raise ProtocolError("another reply came in the place of values")


class Line:
    """One connection, used by one thread at a time. Methods raise OSError, after which it can only be closed."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._at = self._end = 0  # what was received and not yet taken

    def send(self, pieces: Iterable[Buffer], budget: Budget) -> None:
        """Send all pieces, each without a copy. Blocks while the server takes nothing."""
        for piece in pieces:
            self._socket.settimeout(budget.left_s())
            self._socket.sendall(piece)
            budget.moved(len(piece))

    def reply(self, budget: Budget) -> Reply:
        """The next reply. Raises: ServerSaid if it is an error, ProtocolError if it is none."""
        return self._reply(budget, _MOST_DEPTH, [_MOST_REPLY_BYTES])

    def bulk_into(self, views: Sequence[memoryview], budget: Budget) -> bool:
        """Read the next reply, a bulk string, into `views`; False if there is none or it has not exactly their size."""
        head = self._line(budget, _HEAD_BYTES)
        _refuse_error(head)
        if head[:1] != b"$":
            raise ProtocolError("another reply came in the place of a value")
        size, wanted = _count(head, _MOST_REPLY_BYTES), sum(map(len, views))
        if size is None:
            return False
        if size == wanted:
            self._take(views, budget)
        else:
            self._exactly(size, budget)
        self._end_of_bulk(budget, _HEAD_BYTES)
        return size == wanted

    def is_quiet(self) -> bool:
        """Whether it can be used again: nothing came that nobody asked for, the end included."""
        pending = self._socket.pending() if isinstance(self._socket, ssl.SSLSocket) else 0
        if pending or self._at < self._end:
            return False
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not poll.poll(0)

    def break_off(self) -> None:
        """From any thread: make the one that uses it fail at once."""
        shut(self._socket)

    def close(self) -> None:
        """Let go of it."""
        self._socket.close()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _reply(self, budget: Budget, depth: int, room: list[int]) -> Reply:
        head = self._line(budget, _BUFFER_BYTES)
        _refuse_error(head)
        room[0] -= _OBJECT_BYTES + len(head)
        if room[0] < 0:
            raise ProtocolError(f"a reply needs more than {_MOST_REPLY_BYTES} bytes of memory")
        kind = head[:1]
        if kind == b"+":
            return head[1:]
        if kind == b":":
            return _number(head)
        if kind == b"$":
            size = _count(head, room[0])
            if size is None:
                return None
            room[0] -= size
            data = self._exactly(size, budget)
            self._end_of_bulk(budget, _BUFFER_BYTES)
            return data
        if kind == b"*" and depth:
            count = _count(head, room[0] // _OBJECT_BYTES)
            if count is None:
                return None
            return [self._reply(budget, depth - 1, room) for _ in range(count)]
        raise ProtocolError("what came is no reply")

    def _line(self, budget: Budget, most: int) -> bytes:
        """Up to the next end of a line; at most `most` bytes are received at once, for what follows is copied."""
        while True:
            found = self._buffer.find(_END, self._at, self._end)
            if found >= 0:
                line = bytes(self._view[self._at : found])
                self._at = found + len(_END)
                return line
            if self._end - self._at > _MOST_LINE_BYTES:
                raise ProtocolError("a line without an end came")
            self._fill(budget, most)

    def _end_of_bulk(self, budget: Budget, most: int) -> None:
        while self._end - self._at < len(_END):
            self._fill(budget, most)
        if self._buffer[self._at : self._at + len(_END)] != _END:
            raise ProtocolError("a value is longer than was said")
        self._at += len(_END)

    def _fill(self, budget: Budget, most: int) -> None:
        if self._at == self._end:
            self._at = self._end = 0
        elif self._end + most > _BUFFER_BYTES:
            rest = self._end - self._at
            self._view[:rest] = bytes(self._view[self._at : self._end])
            self._at, self._end = 0, rest
        self._end += self._receive(self._view[self._end : self._end + most], budget)

    def _exactly(self, size: int, budget: Budget) -> bytes:
        if size <= self._end - self._at:
            self._at += size
            return bytes(self._view[self._at - size : self._at])
        data = bytearray(size)
        self._take([memoryview(data)], budget)
        return bytes(data)

    def _take(self, views: Sequence[memoryview], budget: Budget) -> None:
        """Fill the views: from the buffer first, then from the socket without a detour."""
        for view in views:
            got = min(len(view), self._end - self._at)
            view[:got] = self._view[self._at : self._at + got]
            self._at += got
            while got < len(view):
                got += self._receive(view[got:], budget)

    def _receive(self, into: memoryview, budget: Budget) -> int:
        self._socket.settimeout(budget.left_s())
        count = self._socket.recv_into(into)
        if not count:
            raise ConnectionResetError("the server closed the connection")
        budget.moved(count)
        return count


def shut(sock: socket.socket) -> None:
    """End a connection under whoever uses it, in any thread; no error if it has ended."""
    try:
        socket.socket.shutdown(sock, socket.SHUT_RDWR)  # not TLS's own, which would change it under its user
    except OSError:
        return


def _refuse_error(head: bytes) -> None:
    if head[:1] == b"-":
        raise ServerSaid(head[1:].decode("utf-8", "replace"))


def _number(head: bytes) -> int:
    if _NUMBER.fullmatch(head, 1) is None:
        raise ProtocolError("a number came that is none")
    return int(head[1:])


def _count(head: bytes, most: int) -> int | None:
    """How many bytes or replies follow; None for no value."""
    count = _number(head)
    if count == -1:
        return None
    if not 0 <= count <= most:
        raise ProtocolError(f"a reply of {count} bytes or parts was announced")
    return count
