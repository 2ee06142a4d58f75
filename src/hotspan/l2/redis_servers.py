"""Connections to one Redis or Valkey server, or to all of a cluster; which one is asked follows from the key.

redis-py makes the connections and speaks the protocol. Ours is what it can't do: every step of a call obeys one
deadline, a large value is read from the socket into its place, and what a server says of its replies' sizes and of who
has which slot of a cluster has bounds.
"""

# mypy: disable-error-code="no-untyped-call"

import contextlib
import errno
import random
import re
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import redis
from redis.backoff import NoBackoff
from redis.connection import Connection, ConnectionPool, SSLConnection, UnixDomainSocketConnection, parse_url
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.retry import Retry

from hotspan.core.deadline import Deadline
from hotspan.core.errors import ConfigError
from hotspan.core.types import MIB
from hotspan.l2.bounds import reason
from hotspan.l2.http_client import connected

_IS_CLUSTER = re.compile(rb"^cluster_enabled:1\r?$", re.MULTILINE)
MAX_REPLY_BYTES = 32 * MIB
"""Of the replies to one call, but for values read into place. Parts of 4 bytes take 16 times as much memory."""

_MAX_SEEDS = 2
_SENT_BYTES = MIB  # in one step: what has moved extends the deadline
_HEAD_BYTES = 64  # received at once while the line before a value is awaited; more of the value would be copied


class ReplyTooLargeError(ConnectionError):
    """The replies to one call have more than MAX_REPLY_BYTES: ask for less at once."""


class Command(NamedTuple):
    """What to ask the server that has `key`. read: of its reply; raises ValueError for one that no server gives."""

    key: str
    arguments: Sequence[bytes | str | int]
    read: Callable[[Any], Any]


class Address(NamedTuple):
    """Of one server of a cluster."""

    host: str
    port: int


class _Call(threading.local):
    """The call that is under way on this thread: its deadline, and how many bytes of replies it may still take."""

    deadline = Deadline(0.0)
    room = 0


_call = _Call()


class _TimedSocket:
    """A socket whose every step ends with the deadline of the call that uses it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._is_polling = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def settimeout(self, timeout_s: float | None) -> None:
        """Zero means what it says, until another one is set; other timeouts are the deadline's matter."""
        self._is_polling = timeout_s == 0

    def recv(self, size: int) -> bytes:
        """As of a socket."""
        self._begin()
        data = self._sock.recv(size)
        _call.deadline.moved(len(data))
        self._take_room(len(data))
        return data

    def recv_into(self, into: memoryview) -> int:
        """As of a socket."""
        count = self.receive(into)
        self._take_room(count)
        return count

    def receive(self, into: memoryview) -> int:
        """As `recv_into`, of bytes whose number is bounded by whoever asks for them."""
        self._begin()
        count = self._sock.recv_into(into)
        _call.deadline.moved(count)
        return count

    def sendall(self, data: bytes | memoryview) -> None:
        """As of a socket."""
        view = memoryview(data)
        for at in range(0, len(view), _SENT_BYTES):
            piece = view[at : at + _SENT_BYTES]
            self._begin()
            self._sock.sendall(piece)
            _call.deadline.moved(len(piece))

    def shut(self) -> None:
        """From any thread: end the connection under whoever uses it."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)  # not TLS's own, which changes it under its user

    def _take_room(self, count: int) -> None:
        _call.room -= count
        if _call.room < 0:
            raise ConnectionError("the replies to one call have more bytes than they may")

    def _begin(self) -> None:
        self._sock.settimeout(0 if self._is_polling else _call.deadline.left_s())


class _Tcp(Connection):
    def _connect(self) -> Any:
        return _TimedSocket(connected(self.host, self.port, _call.deadline))


class _Tls(SSLConnection):
    def _connect(self) -> Any:
        sock = connected(self.host, self.port, _call.deadline)
        try:
            sock.settimeout(_call.deadline.left_s())
            return _TimedSocket(self._wrap_socket_with_ssl(sock))
        except BaseException:
            sock.close()
            raise


class _Unix(UnixDomainSocketConnection):
    def _connect(self) -> Any:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(_call.deadline.left_s())
            sock.connect(self.path)
        except BaseException:
            sock.close()
            raise
        return _TimedSocket(sock)


_TIMED: dict[type, type] = {Connection: _Tcp, SSLConnection: _Tls, UnixDomainSocketConnection: _Unix}
_OPTIONS: dict[str, Any] = {"retry": Retry(NoBackoff(), 0), "protocol": 2}  # version 3 replies when nobody asked


_FAULTS = (
    redis.RedisError,
    *(ValueError, TypeError, AttributeError, LookupError),  # of redis-py's parser, for what is no reply
)


class _TimedPool(ConnectionPool):
    def __init__(self, connection_class: type = Connection, **options: Any) -> None:
        super().__init__(connection_class=_TIMED[connection_class], **options)


class RedisServers:
    """The servers behind a URL. Methods may be called from several threads, and raise OSError.

    Connections are made when they are needed; one that failed is never used again.

    Raises: ConfigError from the constructor for a URL that says nothing redis-py understands. Asks no server.
    """

    def __init__(self, url: str, timeout_s: float, password: str | None = None) -> None:
        try:
            options: dict[str, Any] = parse_url(url)
            if password is not None:
                options["password"] = password
            options.pop("max_connections", None)
            self._options = options | _OPTIONS
            pool = _TimedPool(**self._options)
            pool.connection_class(**pool.connection_kwargs)
        except (redis.RedisError, TypeError, ValueError) as error:
            raise ConfigError(f"the URL of the Redis server can't be used: {error}") from error
        self._timeout_s = timeout_s
        self._name = str(options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}")
        self._host = str(options.get("host", "localhost"))
        self._pools: dict[Address | None, ConnectionPool] = {None: pool}
        self._slots: list[Address | None] | None = None  # None: not known; of one server alone: empty
        self._seeds: list[Address] = []
        self._busy: set[Connection] = set()
        self._lock = threading.Lock()
        self._closed = False

    @contextlib.contextmanager
    def call(self, reply_bytes: int | None = None) -> Iterator[Deadline]:
        """All that one call does within its deadline. Errors of redis-py become OSErrors.

        reply_bytes: of all replies at most; not above MAX_REPLY_BYTES.
        """
        _call.deadline = deadline = Deadline(self._timeout_s)
        _call.room = MAX_REPLY_BYTES if reply_bytes is None else min(reply_bytes, MAX_REPLY_BYTES)
        try:
            yield deadline
        except (redis.TimeoutError, TimeoutError) as error:
            raise TimeoutError(f"{self._name} did not answer in time") from error
        except redis.exceptions.OutOfMemoryError as error:
            raise OSError(errno.ENOSPC, f"{self._name} has no room: {reason(error)}") from error
        except _FAULTS as error:
            self._check_open()
            kind = ReplyTooLargeError if _call.room < 0 else ConnectionError
            raise kind(f"{self._name}: {reason(error)}") from error

    def ask(self, commands: Sequence[Command]) -> list[Any]:
        """What was read of the replies, in the order of the commands, in one round trip to each server."""
        numbers: defaultdict[ConnectionPool, list[int]] = defaultdict(list)
        for number, command in enumerate(commands):
            numbers[self._pool_of(command.key)].append(number)
        replies: list[Any] = [None] * len(commands)
        with contextlib.ExitStack() as stack:
            asked = {pool: stack.enter_context(self._connection(pool)) for pool in numbers}
            for pool, connection in asked.items():
                packed = connection.pack_commands([commands[number].arguments for number in numbers[pool]])
                connection.send_packed_command(packed)
            for pool, connection in asked.items():
                for number in numbers[pool]:
                    replies[number] = commands[number].read(connection.read_response())
        return replies

    def ask_all(self, arguments: Sequence[str], read: Callable[[Any], Any]) -> list[Any]:
        """What was read of each server's reply to the same command."""
        servers: set[Address | None] = set(self._known_slots()) - {None} or {None}
        replies = []
        for address in servers:
            with self._connection(self._pool_at(address)) as connection:
                connection.send_command(*arguments)
                replies.append(read(connection.read_response()))
        return replies

    @contextlib.contextmanager
    def connection(self, key: str) -> Iterator[Connection]:
        """A connection to the server that has `key`; it is closed if anything goes wrong on it."""
        with self._connection(self._pool_of(key)) as connection:
            yield connection

    def close(self) -> None:
        """Close all connections; calls that other threads are in raise."""
        with self._lock:
            self._closed = True
            for connection in self._busy:
                _shut(connection)
            pools = list(self._pools.values())
        for pool in pools:
            pool.disconnect(inuse_connections=False)

    # -- inside ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _connection(self, pool: ConnectionPool) -> Iterator[Connection]:
        self._check_open()
        connection: Connection = pool.get_connection()
        with self._lock:
            self._busy.add(connection)
        try:
            self._check_open()
            yield connection
        except BaseException:
            connection.disconnect()
            self._slots = None  # a server is gone, has given a slot away, or is another one now
            raise
        finally:
            with self._lock:
                self._busy.discard(connection)
            if self._closed:
                connection.disconnect()
            pool.release(connection)

    def _check_open(self) -> None:
        if self._closed:
            raise ConnectionError("the store is closed")

    def _pool_at(self, address: Address | None) -> ConnectionPool:
        with self._lock:
            if address not in self._pools:
                place = {} if address is None else address._asdict()
                self._pools[address] = _TimedPool(**(self._options | place))
            return self._pools[address]

    def _pool_of(self, key: str) -> ConnectionPool:
        slots = self._known_slots()
        if not slots:
            return self._pool_at(None)
        address = slots[key_slot(key.encode())]
        if address is None:
            self._slots = None
            raise ConnectionError(f"the cluster of {self._name} has no server for some keys")
        return self._pool_at(address)

    def _known_slots(self) -> list[Address | None]:
        """Which server of a cluster has which slot, as the first one says that answers; empty for a server alone."""
        slots = self._slots
        failure: Exception | None = None
        seeds = random.sample(self._seeds, min(len(self._seeds), _MAX_SEEDS))  # the same one might hang each time
        for address in [*seeds, None] if slots is None else []:
            try:
                with self._connection(self._pool_at(address)) as connection:
                    slots = self._asked_slots(connection)
                break
            except redis.exceptions.NoPermissionError:
                slots = []
                break
            except (*_FAULTS, OSError) as error:
                failure = failure or error
        if slots is None:
            raise failure or ConnectionError(f"{self._name} can't be reached")
        self._slots, self._seeds = slots, sorted({address for address in slots if address is not None})
        return slots

    def _asked_slots(self, connection: Connection) -> list[Address | None]:
        connection.send_command("INFO", "cluster")
        if not _IS_CLUSTER.search(connection.read_response()):
            return []
        connection.send_command("CLUSTER", "SLOTS")
        return self.read_slots(connection.read_response())

    def read_slots(self, reply: Any) -> list[Address | None]:
        """Which server has which slot. Raises: ValueError, TypeError for what no cluster says."""
        slots: list[Address | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        left = REDIS_CLUSTER_HASH_SLOTS
        for first, last, (host, port, *_), *_ in reply:
            address = Address(host.decode() if host else self._host, int(port))
            begin, end = int(first), int(last) + 1
            left -= end - begin
            if not 0 <= begin < end <= REDIS_CLUSTER_HASH_SLOTS or left < 0 or not 0 < address.port < 65536:
                raise ValueError(f"slots {begin} to {end}")
            slots[begin:end] = [address] * (end - begin)
        return slots


class Values:
    """Reads values from a connection straight into place, in the order in which they were asked for."""

    def __init__(self, connection: Connection) -> None:
        self._sock: Any = connection._sock  # a _TimedSocket; it has no public name
        self._left = b""

    def read_into(self, views: Sequence[memoryview]) -> bool:
        """The next reply, which is a value; False if it has not exactly the size of `views`."""
        while b"\r\n" not in self._left:
            if len(self._left) >= _HEAD_BYTES:
                raise ValueError("a reply without an end came in the place of a value")
            self._fill()
        head, _, self._left = self._left.partition(b"\r\n")
        if head[:1] != b"$":
            raise ValueError(f"{head[:80]!r} came in the place of a value")
        size, wanted = int(head[1:]), sum(map(len, views))
        if not 0 <= size <= max(wanted, MIB) + 1:
            raise ValueError(f"a value of {size} bytes was announced, and {wanted} were asked for")
        self._take(views if size == wanted else [memoryview(bytearray(size))])
        while len(self._left) < 2:
            self._fill()
        end, self._left = self._left[:2], self._left[2:]
        if end != b"\r\n":
            raise ValueError("a value is longer than was said")
        return size == wanted

    def check_end(self) -> None:
        """Raise ValueError if more came than was asked for."""
        if self._left:
            raise ValueError("more came than was asked for")

    def _take(self, views: Sequence[memoryview]) -> None:
        for view in views:
            got = min(len(view), len(self._left))
            view[:got] = self._left[:got]
            self._left = self._left[got:]
            while got < len(view):
                count = self._sock.receive(view[got:])
                if not count:
                    raise ConnectionResetError("the server closed the connection")
                got += count

    def _fill(self) -> None:
        data = self._sock.recv(_HEAD_BYTES)
        if not data:
            raise ConnectionResetError("the server closed the connection")
        self._left += data


def _shut(connection: Connection) -> None:
    sock: Any = connection._sock
    if sock is not None:
        sock.shut()
