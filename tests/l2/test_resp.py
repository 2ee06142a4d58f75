"""RESP on one connection: whatever comes, in whatever pieces, it is a reply or an OSError in time."""

import contextlib
import socket
import threading
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotspan.core.types import MIB
from hotspan.l2 import resp
from hotspan.l2.parts import parts_of
from hotspan.l2.resp import LEAST_RATE, Budget, Line, ProtocolError, Reply, ServerSaid, packed
from hotspan.testing.clock import SimulatedClock

replies = st.recursive(
    st.none() | st.integers(-(10**17), 10**17) | st.binary(max_size=200),
    lambda inner: st.lists(inner, max_size=5),
    max_leaves=12,
)


def encoded(reply: Reply) -> bytes:
    """A reply as a server sends it."""
    if reply is None:
        return b"$-1\r\n"
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    if isinstance(reply, bytes):
        return b"$%d\r\n%b\r\n" % (len(reply), reply)
    return b"*%d\r\n" % len(reply) + b"".join(map(encoded, reply))


def depth(reply: Reply) -> int:
    return 1 + max(map(depth, reply), default=0) if isinstance(reply, list) else 0


@contextlib.contextmanager
def line_to(pieces: Sequence[bytes], *, ends: bool = True) -> Iterator[Line]:
    """A connection to a server that says these pieces, and then ends or says nothing more."""
    ours, theirs = socket.socketpair()

    def say() -> None:
        with contextlib.suppress(OSError):
            for piece in pieces:
                theirs.sendall(piece)
            if ends:
                theirs.shutdown(socket.SHUT_WR)

    speaker = threading.Thread(target=say)
    speaker.start()
    line = Line(ours)
    try:
        yield line
    finally:
        line.close()
        theirs.close()
        speaker.join(60)


def cut(data: bytes, places: Sequence[int]) -> list[bytes]:
    ends = sorted({place % (len(data) + 1) for place in places} | {0, len(data)})
    return [data[start:end] for start, end in pairwise(ends)]


@settings(max_examples=100, deadline=None)
@given(st.lists(replies.filter(lambda reply: depth(reply) <= 4), max_size=4), st.lists(st.integers(0, 5000)))
def test_replies_are_read_however_they_are_cut(said: list[Reply], places: list[int]) -> None:
    """Several replies, one behind the other and cut anywhere, are read as they were meant, and nothing is left."""
    with line_to(cut(b"".join(map(encoded, said)), places), ends=False) as line:
        assert [line.reply(Budget(60)) for _ in said] == said
        assert line.is_quiet()


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(0, 200_000), min_size=1, max_size=3), st.lists(st.integers(0, 10**6)), st.integers(99, 70_000)
)
def test_values_go_where_they_should(sizes: list[int], places: list[int], step: int) -> None:
    """Values cut anywhere, with other replies between them, land in buffers of any sizes."""
    values = [bytes([n + 1]) * size for n, size in enumerate(sizes)]
    data = b"".join(encoded(value) + encoded([b"x", 1]) for value in values)
    with line_to(cut(data, places), ends=False) as line:
        for value in values:
            into = memoryview(bytearray(len(value)))
            assert line.bulk_into([into[at : at + step] for at in range(0, len(into), step)], Budget(60))
            assert into == value and line.reply(Budget(60)) == [b"x", 1]
        assert line.is_quiet()


def test_many_replies_are_read_one_after_the_other() -> None:
    """Far more replies than a buffer holds, of all lengths, are read in their order."""
    said: list[Reply] = [[n, b"x" * (n % 777)] for n in range(5000)]
    with line_to([b"".join(map(encoded, said))]) as line:
        for reply in said:
            assert line.reply(Budget(60)) == reply


@pytest.mark.parametrize("value", [None, b"", b"1234567", b"123456789", bytes(300_000)])
def test_a_value_of_another_size_is_passed_over(value: bytes | None) -> None:
    """Where there is no value, or one of another size, the answer is False, and the next reply is the next reply."""
    with line_to([encoded(value) + encoded(b"12345678")]) as line:
        into = memoryview(bytearray(8))
        assert not line.bulk_into([into], Budget(60))
        assert line.bulk_into([into], Budget(60)) and into == b"12345678"


GARBAGE = {
    "nothing": b"",
    "no reply": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "empty line": b"\r\n",
    "no number": b":1_0\r\n",
    "number too long": b":" + b"9" * 19 + b"\r\n",
    "no size": b"$x\r\n",
    "negative size": b"$-2\r\n",
    "size too large": b"$999999999999\r\n",
    "too many": b"*999999999999\r\n",
    "too deep": b"*1\r\n" * 6 + b":1\r\n",
    "cut value": b"$5\r\nab",
    "cut array": b"*2\r\n:1\r\n",
    "value too long": b"$2\r\nabcdef\r\n",
    "endless line": b"+" + b"a" * 100_000,
    "RESP3": b"%1\r\n+a\r\n:1\r\n",
}


@pytest.mark.parametrize("said", GARBAGE.values(), ids=GARBAGE.keys())
@pytest.mark.parametrize("wants_value", [False, True])
def test_what_is_no_reply_is_an_error(said: bytes, wants_value: bool) -> None:
    """Whatever a server says that the protocol does not know, and a connection that ends early, raise OSError."""
    with line_to([said]) as line, pytest.raises(ConnectionError):
        if wants_value:
            line.bulk_into([memoryview(bytearray(5))], Budget(60))
        else:
            line.reply(Budget(60))


@pytest.mark.parametrize("part", [b"*0\r\n", b":1\r\n", b"$0\r\n\r\n", b"+" + b"a" * 4000 + b"\r\n"])
def test_small_parts_are_counted_with_what_they_take(monkeypatch: pytest.MonkeyPatch, part: bytes) -> None:
    """Parts of a few bytes are objects in memory: a reply ends before they take more than it may."""
    monkeypatch.setattr(resp, "_MOST_REPLY_BYTES", MIB)
    with line_to([b"*16000\r\n" + part * 16000]) as line, pytest.raises(ProtocolError, match="memory"):
        line.reply(Budget(60))
    with line_to([b"*20000\r\n"]) as line, pytest.raises(ProtocolError, match="announced"):
        line.reply(Budget(60))


@pytest.mark.parametrize("other", [b":5\r\n", b"+OK\r\n", b"*0\r\n"])
def test_only_a_value_is_a_value(other: bytes) -> None:
    """Another kind of reply in the place of a value is an error."""
    with line_to([other]) as line, pytest.raises(ProtocolError):
        line.bulk_into([memoryview(bytearray(5))], Budget(60))


def test_a_refusal_says_its_code() -> None:
    """An error reply raises with its first word as the code, where a reply or a value was expected."""
    with line_to([b"-OOM command not allowed\r\n-MOVED 5 a:1\r\n"]) as line:
        with pytest.raises(ServerSaid, match="not allowed") as said:
            line.reply(Budget(60))
        assert said.value.code == "OOM"
        with pytest.raises(ServerSaid) as said:
            line.bulk_into([memoryview(bytearray(5))], Budget(60))
        assert said.value.code == "MOVED"


def test_a_server_that_trickles_is_given_up() -> None:
    """A byte now and then does not keep a call: it ends once the timeout is used up, plus what the bytes are worth."""
    ours, theirs = socket.socketpair()
    stopped = threading.Event()

    def trickle() -> None:
        with contextlib.suppress(OSError):
            theirs.sendall(b"$1000\r\n")
            while not stopped.wait(0.1):
                theirs.sendall(b"x")

    thread = threading.Thread(target=trickle)
    thread.start()
    line = Line(ours)
    with pytest.raises(TimeoutError):  # in 100 s all would be there
        line.bulk_into([memoryview(bytearray(1000))], Budget(0.3))
    stopped.set()
    thread.join(60)
    line.close()
    theirs.close()


def test_a_peer_that_takes_nothing_is_given_up() -> None:
    """Sending to a peer that does not receive ends after the timeout."""
    ours, theirs = socket.socketpair()
    line = Line(ours)
    with pytest.raises(TimeoutError):
        line.send([memoryview(bytearray(16 * MIB))], Budget(0.3))
    line.close()
    theirs.close()


def test_what_moves_buys_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each LEAST_RATE bytes are a second more in all, and no step may take longer than the timeout."""
    monkeypatch.setattr("hotspan.l2.resp.time", clock := SimulatedClock())
    budget = Budget(0.2)
    budget.moved(10 * LEAST_RATE)
    assert budget.left_s() == 0.2
    clock.advance(10.1)
    assert budget.left_s() == pytest.approx(0.1)
    clock.advance(0.1)
    with pytest.raises(TimeoutError):
        budget.left_s()


def test_what_nobody_asked_for_spoils_a_connection() -> None:
    """A connection on which something came between calls, or that has ended, is not quiet."""
    with line_to([b"+OK\r\n+more\r\n"], ends=False) as line:
        line.reply(Budget(60))
        assert not line.is_quiet()
    ours, theirs = socket.socketpair()
    line = Line(ours)
    assert line.is_quiet()
    theirs.close()
    assert not line.is_quiet()
    line.close()


@given(st.lists(st.integers(0, 50)), st.integers(1, 40))
def test_parts_are_the_whole(sizes: list[int], size: int) -> None:
    """Buffers cut into parts are the same bytes, in the same memory; every part but the last has the size asked for."""
    data = bytearray(range(256)) * 10
    buffers, at = [], 0
    for each in sizes:
        buffers.append(memoryview(data)[at : at + each])
        at += each
    parts = list(parts_of(buffers, size))
    assert b"".join(piece for part in parts for piece in part) == data[:at]
    assert [sum(map(len, part)) for part in parts[:-1]] == [size] * (len(parts) - 1)
    for part in parts:
        for piece in part:
            piece[:] = bytes(len(piece))
    assert not any(data[:at])


def test_commands_are_packed_by_length() -> None:
    """Arguments go as they are, line ends and all."""
    assert packed([b"GET", b"a\r\nb", b""]) == b"*3\r\n$3\r\nGET\r\n$4\r\na\r\nb\r\n$0\r\n\r\n"
