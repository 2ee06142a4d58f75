"""An L2 on Redis or Valkey (5 or newer), one server or a cluster: a value per blob, and a stream as the log.

    PREFIX:2:objects:EPOCH:0:{KEY}    an object         PREFIX:2:metadata:EPOCH:{KEY}    its metadata
    PREFIX:2:names:{written}          written_under.py
    PREFIX:2:{log}                    a stream: ID NUMBER-0, field EPOCH, value the entry's body
    PREFIX:2:{log}:replicas           a hash: what each replica reports

The server needs `maxmemory` with a policy that evicts. With `ttl_s` and a `volatile-` policy it evicts objects and
never the log.
"""

# mypy: disable-error-code="no-untyped-call"

import re
from collections.abc import Sequence
from typing import Any

from hotspan.core.buffers import parts_of
from hotspan.core.types import MIB
from hotspan.l2 import bounds
from hotspan.l2.base import StoreUsage
from hotspan.l2.blobs import Addition, Entry, Part, Stretch
from hotspan.l2.log import SharedInvalidationLog
from hotspan.l2.metadata import MAX_BYTES
from hotspan.l2.objects import BlobStore
from hotspan.l2.options import RedisOptions
from hotspan.l2.redis_servers import Command, RedisServers, ReplyTooLargeError, Values

PIECE_BYTES = MIB
_AHEAD = 4
"""Pieces asked for before they are read. What a full server holds for a client to read, it evicts other things for."""

_PAGE = 1024
"""Entries of the log that are asked for at once; fewer where these are too large for one reply."""

_LOG_BYTES = 3 * bounds.MAX_ENTRY_BYTES
"""Of a page of the log, and of its oldest entry."""

_REPORTS_BYTES = bounds.MAX_REPORTS * (bounds.MAX_REPORT_BYTES + 32)
_FORMAT = 2
_EPOCH = re.compile(rb"[0-9a-f]{32}")
_MEMORY = re.compile(rb"^(used_memory|maxmemory):(\d+)", re.MULTILINE)

# KEYS: a blob. ARGV: what it begins with if it is not there; what is appended; its life in ms, 0 for ever; the size
# above which it counts as gone, and grows no more.
_APPEND = """
if redis.call('EXISTS', KEYS[1]) == 0 then
  redis.call('SET', KEYS[1], ARGV[1])
  if ARGV[3] ~= '0' then redis.call('PEXPIRE', KEYS[1], ARGV[3]) end
end
if redis.call('STRLEN', KEYS[1]) > tonumber(ARGV[4]) then return 0 end
return redis.call('APPEND', KEYS[1], ARGV[2])
"""

# KEYS: the log. ARGV: how many entries to keep; the entry's ID, epoch and body.
_ADD = """
local newest = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
if not newest or newest[2][1] ~= ARGV[3] then return 0 end
local said = redis.pcall('XADD', KEYS[1], 'MAXLEN', ARGV[1], ARGV[2], ARGV[3], ARGV[4])
if said.err and string.find(said.err, 'equal or smaller') then return 0 end
return said.err and said or 1
"""

# KEYS: the log. The epoch of its newest entry, '' for none.
_NEWEST = """
local newest = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
return newest and string.len(newest[2][1]) == 32 and newest[2][1] or ''
"""

# KEYS: the log. ARGV: the epoch that is over, '' for none or for what is none; the first entry's ID and epoch.
_BEGIN = """
local newest = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
local epoch = newest and newest[2][1] or ''
if string.len(epoch) ~= 32 or string.find(epoch, '[^0-9a-f]') then epoch = '' end
if epoch == ARGV[1] then
  redis.call('DEL', KEYS[1])
  redis.call('XADD', KEYS[1], ARGV[2], ARGV[3], '')
end
return 1
"""


class RedisBlobs:
    """Blobs, each a value on one server."""

    batch = 1 << 20

    def __init__(self, servers: RedisServers, prefix: str, ttl_s: float | None) -> None:
        self._servers = servers
        self._prefix = prefix
        self._life_ms = 0 if ttl_s is None else max(1, round(1000 * ttl_s))

    def read(self, parts: Sequence[Part]) -> list[bytes | None]:
        asked = [(self._key(part.name), part.limit - 1) for part in parts]
        try:
            with self._servers.call():
                said = self._servers.ask([Command(key, ("GETRANGE", key, 0, end), _value) for key, end in asked])
        except ReplyTooLargeError:
            if len(parts) == 1:
                raise
            half = len(parts) // 2
            return self.read(parts[:half]) + self.read(parts[half:])
        return [value or None for value in said]

    def read_into(self, name: str, into: Sequence[memoryview]) -> bool:
        key, pieces = self._key(name), list(parts_of(into, PIECE_BYTES))
        beyond = memoryview(bytearray(0))
        with self._servers.call(), self._servers.connection(key) as connection:
            sizes = [sum(map(len, views)) for views in pieces]
            starts = [sum(sizes[:number]) for number in range(len(sizes))]
            asked = [("GETRANGE", key, at, at + size - 1) for at, size in zip(starts, sizes, strict=True)]
            asked.append(("GETRANGE", key, sum(sizes), sum(sizes)))  # nothing, unless it is longer
            connection.send_packed_command(connection.pack_commands(asked[:_AHEAD]))
            values = Values(connection)
            is_whole = True
            for number, views in enumerate([*pieces, [beyond]], _AHEAD):
                is_whole &= values.read_into(views)
                if number < len(asked):
                    connection.send_packed_command(connection.pack_command(*asked[number]))
            values.check_end()
        return is_whole

    def create(self, name: str, data: Sequence[memoryview | bytes]) -> bool:
        key = self._key(name).encode()
        life = [b"PX", b"%d" % self._life_ms] if self._life_ms else []
        head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (4 + len(life), len(key), key, sum(map(len, data)))
        tail = b"\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(each), each) for each in [b"NX", *life])
        with self._servers.call(), self._servers.connection(key.decode()) as connection:
            connection.send_packed_command([head, *data, tail])
            reply = connection.read_response()
            if reply not in (b"OK", None):
                raise ValueError("another reply came in the place of OK")
            return reply is not None

    def overwrite(self, name: str, data: bytes) -> None:
        """Write a small blob, whatever is there; it does not expire."""
        key = self._key(name)
        with self._servers.call():
            self._servers.ask([Command(key, ("SET", key, data), _ok)])

    def append(self, additions: Sequence[Addition]) -> None:
        named = [(self._key(addition.name), addition) for addition in additions]
        asked = [("EVAL", _APPEND, 1, key, one.first, one.data, self._life_ms, MAX_BYTES) for key, one in named]
        with self._servers.call():
            self._servers.ask([Command(key, each, _number) for (key, _), each in zip(named, asked, strict=True)])

    def delete(self, names: Sequence[str]) -> None:
        keys = map(self._key, names)
        with self._servers.call():
            self._servers.ask([Command(key, ("UNLINK", key), _number) for key in keys])

    def usage(self) -> StoreUsage:
        """How full the servers are, with all that is on them."""
        used = limit = 0
        with self._servers.call():
            for facts in self._servers.ask_all(("INFO", "memory"), lambda reply: dict(_MEMORY.findall(reply))):
                used += int(facts.get(b"used_memory", 0))
                limit += int(facts.get(b"maxmemory", 0))
        return StoreUsage(bytes=used, capacity_bytes=limit)

    def close(self) -> None:
        self._servers.close()

    def _key(self, name: str) -> str:
        *kind, chunk = name.split("/")
        return f"{self._prefix}:{':'.join(kind)}:{{{chunk}}}"


class RedisLog:
    """A LogMedium. An entry is as durable as the server is: to survive its crash, it needs an append-only file."""

    def __init__(self, servers: RedisServers, prefix: str) -> None:
        self.key = f"{prefix}:{{log}}"
        self._servers = servers

    def is_used(self) -> bool:
        # Objects are of the log's epoch: without a log nobody finds one again.
        return bool(self._ask(_number, "EXISTS", self.key, f"{self.key}:replicas"))

    def read(self, first: int) -> Stretch | None:
        # The oldest is asked for last: a log that begins anew meanwhile is seen to be another one. No script: a full
        # server runs none.
        entries: list[Entry] = []  # the newest first
        count, last, left = _PAGE, "+", bounds.MAX_LOG_BYTES
        while True:
            some = ("XREVRANGE", self.key, last, f"{first}-0", "COUNT", min(count, bounds.MAX_LOG_ENTRIES + 1))
            asked = [some, ("XRANGE", self.key, "-", "+", "COUNT", 1)]
            try:
                with self._servers.call(_LOG_BYTES):
                    page, oldest = self._servers.ask([Command(self.key, each, _entries) for each in asked])
            except ReplyTooLargeError:
                if count == 1:  # of one entry that nobody wrote who is honest: what comes with it is lost
                    return Stretch(Entry(0, self._ask(_epoch, "EVAL", _NEWEST, 1, self.key), b"?"), [])
                count = max(1, count // 8)
                continue
            for entry in page:
                left -= len(entry.body)
                if entries and (left < 0 or len(entries) == bounds.MAX_LOG_ENTRIES):
                    return Stretch(entries[-1], entries[::-1])  # what is older counts as trimmed
                entries.append(entry)
            if not page or entries[-1].number <= first:
                return Stretch(oldest[0], entries[::-1]) if oldest else None
            last = str(entries[-1].number - 1)

    def append(self, entry: Entry, keep: int) -> bool:
        added = ("EVAL", _ADD, 1, self.key, keep, f"{entry.number}-0", entry.epoch.hex(), entry.body)
        return bool(self._ask(_flag, *added))

    def begin(self, over: bytes, entry: Entry) -> None:
        self._ask(_flag, "EVAL", _BEGIN, 1, self.key, over.hex(), f"{entry.number}-0", entry.epoch.hex())

    def write_report(self, replica: str, data: bytes | None) -> None:
        key = f"{self.key}:replicas"
        self._ask(_number, *(("HDEL", key, replica) if data is None else ("HSET", key, replica, data)))

    def read_reports(self) -> dict[str, bytes]:
        with self._servers.call(_REPORTS_BYTES):
            (said,) = self._servers.ask([Command(self.key, ("HGETALL", f"{self.key}:replicas"), _values)])
        return {name.decode(errors="replace"): data for name, data in zip(said[::2], said[1::2], strict=True)}

    def unix(self) -> float:
        seconds, microseconds = self._ask(_values, "TIME")
        return int(seconds) + int(microseconds) / 1e6

    def _ask(self, read: Any, *arguments: bytes | str | int) -> Any:
        with self._servers.call():
            (reply,) = self._servers.ask([Command(self.key, arguments, read)])
            return reply


class RedisStore(BlobStore):
    """An ObjectStore with a log.

    url:    redis://, rediss:// (TLS, verified unless its options say otherwise) or unix://, as redis-py reads it.
    Raises: ConfigError from the constructor, which asks no server.
    """

    log: SharedInvalidationLog

    def __init__(self, url: str, options: RedisOptions = RedisOptions()) -> None:  # noqa: B008
        self.servers = RedisServers(url, options.timeout_s, options.password)
        prefix = f"{options.prefix}:{_FORMAT}"
        log = SharedInvalidationLog(RedisLog(self.servers, prefix), options.log_entries)
        super().__init__(RedisBlobs(self.servers, prefix, options.ttl_s), log, evicts=True)


def _value(reply: Any) -> bytes:
    if not isinstance(reply, bytes):
        raise ValueError("another reply came in the place of a value")
    return reply


def _values(reply: Any) -> list[bytes]:
    return [_value(each) for each in _list(reply)]


def _list(reply: Any) -> list[Any]:
    if not isinstance(reply, list):
        raise ValueError("another reply came in the place of a list")
    return reply


def _ok(reply: Any) -> None:
    if reply not in (b"OK", True):
        raise ValueError("another reply came in the place of OK")


def _number(reply: Any) -> int:
    if not isinstance(reply, int):
        raise ValueError("another reply came in the place of a number")
    return reply


def _flag(reply: Any) -> bool:
    if reply not in (0, 1):
        raise ValueError("another reply came in the place of 0 or 1")
    return bool(reply)


def _entries(reply: Any) -> list[Entry]:
    return [_entry(each) for each in _list(reply)]


def _entry(reply: Any) -> Entry:
    """Of what is no entry of hotspan's, one that nobody can read."""
    name, (epoch, body, *_) = _list(reply)
    number, _, rest = _value(name).partition(b"-")
    is_whole = rest == b"0" and len(body) <= bounds.MAX_ENTRY_BYTES
    return Entry(int(number), _epoch(epoch), body if is_whole and _EPOCH.fullmatch(epoch) else b"?")


def _epoch(reply: Any) -> bytes:
    """An epoch by its name; empty for what is none."""
    name = _value(reply)
    return bytes.fromhex(name.decode()) if _EPOCH.fullmatch(name) else b""
