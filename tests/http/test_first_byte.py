"""Listening sockets that do nothing for connections until one has sent a byte."""

import fcntl
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from hotspan.http.first_byte import await_byte

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def ends(closing: ExitStack) -> Pair:
    one, other = socket.socketpair()
    return closing.enter_context(one), closing.enter_context(other)


def listening(closing: ExitStack) -> socket.socket:
    listener = closing.enter_context(socket.socket())
    listener.bind(("127.0.0.1", 0))
    listener.listen(16)
    return listener


def calling(closing: ExitStack, listener: socket.socket, said: bytes = b"") -> socket.socket:
    caller = closing.enter_context(socket.create_connection(listener.getsockname(), 10))
    caller.sendall(said)
    return caller


def test_a_byte_is_left_to_be_read(closing: ExitStack, ends: Pair) -> None:
    """Silent connections and those that were closed are no call; those that are open are passed on, too."""
    tcp, other = listening(closing), listening(closing)
    silent = calling(closing, other)
    for _ in range(3):
        calling(closing, tcp).close()
    calling(closing, tcp, b"x")
    found = await_byte([tcp, other], ends[0], 16)
    assert found is not None
    for each in found:
        closing.enter_context(each)
    assert [each.getpeername() for each, its in found.items() if its is other] == [silent.getsockname()]
    said = [each.recv(9) for each, its in found.items() if its is tcp]
    assert said[-1] == b"x"


def test_an_end_without_a_call(closing: ExitStack, ends: Pair) -> None:
    """Nothing is told of connections without a byte."""
    tcp = listening(closing)
    calling(closing, tcp).close()
    ends[1].send(b"x")
    assert await_byte([tcp], ends[0], 16) is None


def test_the_oldest_makes_room(closing: ExitStack, ends: Pair) -> None:
    """Of each listener there are at most as many connections as were asked for."""
    tcp = listening(closing)
    silent = [calling(closing, tcp) for _ in range(5)]
    calling(closing, tcp, b"x")
    found = await_byte([tcp], ends[0], 2)
    assert found is not None
    for each in found:
        closing.enter_context(each)
    assert len(found) == 2
    assert [each.recv(1) for each in silent[:4]] == [b""] * 4


def test_files_with_high_numbers(closing: ExitStack, ends: Pair) -> None:
    """A large program has more than 1,024 files open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    closing.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
    high = closing.enter_context(socket.socket(fileno=fcntl.fcntl(ends[0], fcntl.F_DUPFD_CLOEXEC, 1100)))
    ends[1].send(b"x")
    assert await_byte([listening(closing)], high, 16) is None
