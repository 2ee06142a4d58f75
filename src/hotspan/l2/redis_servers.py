"""Connections to one Redis or Valkey server, or to all of a cluster; who is asked follows from the key.

redis-py reads the URL and makes the connections: names, TLS, authentication, database. What is said on them is ours.
"""

import contextlib
import random
import re
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import redis
from redis.backoff import NoBackoff
from redis.connection import Connection, parse_url
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.retry import Retry

from hotspan.core.errors import ConfigError
from hotspan.l2.resp import Budget, Line, ProtocolError, Reply, ServerSaid, packed, shut

_IS_CLUSTER = re.compile(rb"^cluster_enabled:1\r?$", re.MULTILINE)
_MOST_SEEDS = 2


class Address(NamedTuple):
    """Of one server of a cluster."""

    host: str
    port: int


class Command(NamedTuple):
    """What to ask the server that has `key`, and what its reply means.

    read: raises ProtocolError for a reply that no server gives; then the connection is not used again.
    """

    key: bytes
    arguments: Sequence[bytes]
    read: Callable[[Reply], Any]


class RedisServers:
    """The servers behind a URL. Methods may be called from several threads, and raise OSError.

    Connections are made when they are needed; one that failed is never used again, nor are those that lay idle then.
    """

    def __init__(self, url: str) -> None:
        """Raises: ConfigError for a URL that says nothing redis-py understands. Asks no server."""
        try:
            options: dict[str, Any] = parse_url(url)  # type: ignore[no-untyped-call]
            self._class: type[Connection] = options.pop("connection_class", Connection)
            options.pop("max_connections", None)
            # Two seconds for each try are for patient clients; replies of version 3 come when nobody asked.
            self._options = options | {"retry": Retry(NoBackoff(), 0), "protocol": 2}
            self._connection(None, 1.0)
        except (redis.RedisError, TypeError, ValueError) as error:
            raise ConfigError(f"the URL of the Redis server can't be used: {error}") from error
        self._lock = threading.Lock()
        self._idle: defaultdict[Address | None, list[Line]] = defaultdict(list)
        self._busy: set[Line] = set()
        self._slots: list[Address | None] | None = None  # None: not known; of one server alone: empty
        self._seeds: list[Address] = []
        self._closed = False

    def exchange(self, commands: Sequence[Command], budget: Budget) -> list[Any]:
        """What was read of the replies to all commands, in their order, in one round trip to each server."""
        numbers: defaultdict[Address | None, list[int]] = defaultdict(list)
        for number, command in enumerate(commands):
            numbers[self._address(command.key, budget)].append(number)
        replies: list[Any] = [None] * len(commands)
        with contextlib.ExitStack() as lines:
            asked = {address: lines.enter_context(self._line(address, budget)) for address in numbers}
            for address, line in asked.items():
                line.send([b"".join(packed(commands[number].arguments) for number in numbers[address])], budget)
            for address, line in asked.items():
                for number in numbers[address]:
                    replies[number] = commands[number].read(line.reply(budget))
        return replies

    @contextlib.contextmanager
    def line(self, key: bytes, budget: Budget) -> Iterator[Line]:
        """A connection to the server that has `key`, for as long as it is good."""
        with self._line(self._address(key, budget), budget) as line:
            yield line

    def ask_all(self, arguments: Sequence[bytes], budget: Budget) -> list[bytes]:
        """The text that each server replies to the same command."""
        self._address(b"", budget)
        replies = []
        servers: set[Address | None] = set(self._slots or ()) - {None} or {None}
        for address in servers:
            with self._line(address, budget) as line:
                line.send([packed(arguments)], budget)
                replies.append(_text(line.reply(budget)))
        return replies

    def close(self) -> None:
        """Close all connections; calls that other threads are in raise."""
        with self._lock:
            self._closed = True
            for line in self._busy:
                line.break_off()
        self._drop_idle()

    # -- connections -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _line(self, address: Address | None, budget: Budget) -> Iterator[Line]:
        line: Line | None = None
        is_good = False
        try:
            line = self._idle_line(address) or self._connected(address, budget)
            yield line
            is_good = True
        except TimeoutError as error:
            raise TimeoutError(f"{self._name(address)} did not answer in time") from error
        finally:
            self._end(address, line, is_good)

    def _end(self, address: Address | None, line: Line | None, is_good: bool) -> None:
        """Keep a connection that is good for another call."""
        with self._lock:
            if line is not None:
                self._busy.discard(line)
                if is_good and not self._closed:
                    self._idle[address].append(line)
                    return
            if self._slots:
                self._slots = None  # another server may have taken over
        if line is not None:
            line.close()
        self._drop_idle()

    def _idle_line(self, address: Address | None) -> Line | None:
        while True:
            with self._lock:
                if not self._idle[address]:
                    return None
                line = self._idle[address].pop()
                self._busy.add(line)
            if line.is_quiet():
                return line
            with self._lock:
                self._busy.discard(line)
            line.close()

    def _drop_idle(self) -> None:
        with self._lock:
            lines = [line for lines in self._idle.values() for line in lines]
            self._idle.clear()
        for line in lines:
            line.close()

    def _connected(self, address: Address | None, budget: Budget) -> Line:
        if self._closed:
            raise ConnectionError("the store is closed")
        connection = self._connection(address, budget.left_s())
        line = Line(_Attempt(connection, self._name(address)).socket(budget))
        with self._lock:
            if not self._closed:
                self._busy.add(line)
                return line
        line.close()
        raise ConnectionError("the store is closed")

    def _connection(self, address: Address | None, timeout_s: float) -> Connection:
        place = {} if address is None else {"host": address.host, "port": address.port}
        limits = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
        return self._class(**(self._options | place | limits))

    def _name(self, address: Address | None) -> str:
        """For messages, without what is secret in the URL."""
        if address is not None:
            return f"{address.host}:{address.port}"
        return str(self._options.get("path") or f"{self._host}:{self._options.get('port', 6379)}")

    @property
    def _host(self) -> str:
        return str(self._options.get("host", "localhost"))

    # -- who has what ----------------------------------------------------------------------------------------------

    def _address(self, key: bytes, budget: Budget) -> Address | None:
        slots = self._slots
        if slots is None:
            self._slots = slots = self._learnt(budget)
        if not slots:
            return None
        address = slots[key_slot(key)]
        if address is None:
            self._slots = None
            raise ConnectionError(f"the cluster of {self._name(None)} has no server for some keys")
        return address

    def _learnt(self, budget: Budget) -> list[Address | None]:
        """Which server of a cluster has which slot, as the first one says that answers; empty for a server alone."""
        failure: OSError | None = None
        seeds = random.sample(self._seeds, min(len(self._seeds), _MOST_SEEDS))  # the same one might hang each time
        for address in [*seeds, None]:
            try:
                with self._line(address, budget) as line:
                    line.send([packed([b"INFO", b"cluster"])], budget)
                    if not _IS_CLUSTER.search(_text(line.reply(budget))):
                        return []
                    line.send([packed([b"CLUSTER", b"SLOTS"])], budget)
                    slots = self._read_slots(line.reply(budget))
            except ServerSaid as said:
                if said.code != "NOPERM":
                    raise
                return []
            except OSError as error:
                failure = failure or error
            else:
                self._seeds = sorted({address for address in slots if address is not None})
                return slots
        raise failure or ConnectionError(f"{self._name(None)} can't be reached")

    def _read_slots(self, reply: Reply) -> list[Address | None]:
        slots: list[Address | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        left = REDIS_CLUSTER_HASH_SLOTS
        try:
            for first, last, (host, port, *_), *_ in reply:  # type: ignore[union-attr, misc]
                address = Address(host.decode() if host else self._host, int(port))  # type: ignore[union-attr, arg-type]
                begin, end = int(first), int(last) + 1  # type: ignore[arg-type]
                left -= end - begin
                if not 0 <= begin < end <= REDIS_CLUSTER_HASH_SLOTS or left < 0 or not 0 < address.port < 65536:
                    raise ValueError(f"slots {begin} to {end}")
                slots[begin:end] = [address] * (end - begin)
        except (TypeError, ValueError, AttributeError) as error:
            raise ProtocolError("what came does not say who has which slot") from error
        return slots


class _Attempt:
    """redis-py makes a connection on a thread of its own: neither the resolver nor a greeting keeps our deadlines."""

    def __init__(self, connection: Connection, name: str) -> None:
        self._connection = connection
        self._name = name
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._is_given_up = False
        self._error: Exception | None = None
        threading.Thread(target=self._run, name="hotspan-l2-connect", daemon=True).start()

    def socket(self, budget: Budget) -> socket.socket:
        """The socket, connected, which is the caller's from here on. Raises: OSError."""
        self._ended.wait(budget.left_s())
        with self._lock:
            self._is_given_up = not self._ended.is_set()
        sock: socket.socket | None = self._connection._sock  # it has no public name
        if self._is_given_up:
            if sock is not None:
                shut(sock)
            raise TimeoutError(f"{self._name} took no connection in time")
        if isinstance(self._error, redis.TimeoutError):
            raise TimeoutError(f"{self._name} took no connection in time") from self._error
        if self._error is not None:
            raise ConnectionError(f"{self._name}: {self._error}") from self._error
        if sock is None:
            raise ConnectionError(f"{self._name} closed the connection")
        self._connection._sock = None  # or it would be closed with the connection object
        return sock

    def _run(self) -> None:
        try:
            self._connection.connect()  # type: ignore[no-untyped-call]
        except (redis.RedisError, OSError, ValueError) as error:
            self._error = error
        with self._lock:
            if self._is_given_up:
                self._connection.disconnect()  # type: ignore[no-untyped-call]
            self._ended.set()


def _text(reply: Reply) -> bytes:
    if not isinstance(reply, bytes):
        raise ProtocolError("another reply came in the place of a text")
    return reply
