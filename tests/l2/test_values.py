"""What is read from a connection to Redis straight into place, however it comes."""

import itertools
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotspan.core import deadline
from hotspan.core.types import MIB
from hotspan.l2.redis_servers import RedisServers, Values, _TimedSocket


def read(pieces: Sequence[bytes], do: Callable[[Values], Any], timeout_s: float = 60.0, *, ends: bool = True) -> Any:
    """What `do` returns, or raises, of values that a server sends in these pieces; then it hangs up, or does not."""
    with ExitStack() as stack:
        here, there = (stack.enter_context(end) for end in socket.socketpair())

        def send() -> None:
            for piece in pieces:
                there.sendall(piece)
            if ends:
                there.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=send)
        thread.start()
        stack.callback(thread.join)
        with RedisServers("redis://nobody", timeout_s).call():
            return do(Values(SimpleNamespace(_sock=_TimedSocket(here))))  # type: ignore[arg-type]


def value(data: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(data), data)


def cut(data: bytes, places: Sequence[int]) -> list[bytes]:
    ends = sorted({min(place, len(data)) for place in places} | {0, len(data)})
    return [data[at:end] for at, end in itertools.pairwise(ends)]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 3000), min_size=1, max_size=4),
    st.lists(st.integers(0, 12_000), max_size=8),
    st.integers(1, 900),
)
def test_values_go_where_they_should(sizes: list[int], places: list[int], step: int) -> None:
    """Values that come in any pieces are read into any buffers, one reply after the other, and nothing else changes."""
    data = [bytes([n + 1]) * size for n, size in enumerate(sizes)]
    into = [bytearray(b"\xa5" * (size + 2)) for size in sizes]

    def do(values: Values) -> None:
        for each in into:
            inner = memoryview(each)[1:-1]
            assert values.read_into([inner[at : at + step] for at in range(0, len(inner), step)])
        values.check_end()

    read(cut(b"".join(map(value, data)), places), do)
    assert into == [b"\xa5" + each + b"\xa5" for each in data]


@pytest.mark.parametrize("size", [0, 3, 5, 4096])
def test_a_value_of_another_size_is_passed_over(size: int) -> None:
    """It is False, and what follows is read right."""
    into = memoryview(bytearray(4))
    pieces = [value(b"x" * size), value(b"good")]
    assert read(pieces, lambda values: [values.read_into([into]) for _ in range(2)]) == [False, True]
    assert bytes(into) == b"good"


@pytest.mark.parametrize(
    "said",
    [
        *(
            b"",
            b"$4\r\ngoo",
            b"$4\r\ngood",
            b"$4\r\ngoodxx",
            b"$four\r\n",
            b"$-1\r\n",
            b"$-5\r\n",
            b":4\r\n",
            b"+good\r\n",
        ),
        *(b"-ERR no\r\n", b"*1\r\n", b"x" * 100, b"$%d\r\n" % (MIB + 2), b"$%d\r\n" % (1 << 40), b"$4\r\ngood\r\nmore"),
    ],
)
def test_what_is_no_value_is_an_error(said: bytes) -> None:
    """Errors, other replies, sizes without sense, what is cut or too long: ConnectionError, and nothing is awaited."""

    def do(values: Values) -> None:
        values.read_into([memoryview(bytearray(4))])
        values.check_end()

    with pytest.raises(ConnectionError):
        read([said], do)


def test_a_server_that_stops_in_the_middle_is_given_up() -> None:
    """The deadline of the call ends it."""
    with pytest.raises(TimeoutError):
        read([b"$4\r\ngo"], lambda values: values.read_into([memoryview(bytearray(4))]), 0.05, ends=False)


def test_what_moves_buys_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call may take a second more per MIN_RATE bytes that it moved; no step takes more than the timeout."""
    now = [100.0]
    monkeypatch.setattr(deadline, "time", SimpleNamespace(monotonic=lambda: now[0]))
    call = deadline.Deadline(2.0)
    now[0] += 1.5
    assert call.left_s() == 0.5
    call.moved(4 * deadline.MIN_RATE)
    assert call.left_s() == 2.0
    now[0] += 4.5
    with pytest.raises(TimeoutError):
        call.left_s()
