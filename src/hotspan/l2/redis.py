"""An L2 on Redis or Valkey (5 or newer), one server or a cluster.

    PREFIX:1:EPOCH:{KEY}            hash: "object" -> record 256, bytes of the frame 8, nonce 8;    and a field a mark
    PREFIX:1:EPOCH:{KEY}:NONCE:0    the first MiB of the frame, ...:1 the second, and so on
    PREFIX:1:{log}                  l2/redis_log.py

Parts are written first, under a nonce of their own, then "object" if there is none: nobody sees half of one, and who
comes second deletes its parts. Object and marks are one key, so that a server that evicts can't drop the marks of an
object and keep it. An object one of whose parts was evicted is gone; who notices deletes the rest.

The server needs `maxmemory` with a policy that evicts. With `ttl_s` and a `volatile-` policy it evicts objects and
never the log.
"""

import errno
import re
import secrets
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from hotspan.core.errors import ConfigError
from hotspan.core.types import MIB, ChunkKey
from hotspan.l2.base import Found, Landed, StoreUsage, marked
from hotspan.l2.parts import parts_of
from hotspan.l2.redis_log import RedisLog
from hotspan.l2.redis_servers import Command, RedisServers
from hotspan.l2.resp import Budget, Buffer, ProtocolError, Reply, packed, values
from hotspan.tiers.record import RECORD_BYTES, Record, pack, unpack

PART_BYTES = MIB

_AHEAD = 4
"""Parts asked for before they are read. What a full server holds for a client to read, it evicts other things for."""

_FORMAT = 1
_OBJECT = b"object"
_PLACE = struct.Struct("<Q8s")
_OBJECT_BYTES = RECORD_BYTES + _PLACE.size
_MEMORY = re.compile(rb"^(used_memory|maxmemory):(\d+)", re.MULTILINE)
_MOST_BEGINNINGS = 3
_UNPUBLISHED_S = 600
"""After which the parts of a put that was broken off expire; also how much longer parts live than what names them."""
_UNUSED_MARKS_S = 86400
"""After which marks expire whose object never came."""

# KEYS: the hash, the parts. ARGV: the object; its life in ms, 0 for ever; the same of its parts.
_PUBLISH = b"""
local parts, won = {unpack(KEYS, 2)}, -1
if redis.call('EXISTS', unpack(parts)) == #parts then won = redis.call('HSETNX', KEYS[1], 'object', ARGV[1]) end
if won ~= 1 then redis.call('UNLINK', unpack(parts)) return won end
local function live(key, life)
  if life == '0' then redis.call('PERSIST', key) else redis.call('PEXPIRE', key, life) end
end
for i = 1, #parts do live(parts[i], ARGV[3]) end
live(KEYS[1], ARGV[2])
return won
"""

# KEYS: the hash. ARGV: how long it lives in ms if nobody said yet; the marks.
_MARK = b"""
for i = 2, #ARGV do redis.call('HSET', KEYS[1], ARGV[i], '') end
if redis.call('HEXISTS', KEYS[1], 'object') == 0 then redis.call('PEXPIRE', KEYS[1], ARGV[1]) end
return 0
"""

# KEYS: the hash, the parts. ARGV: the object that is meant, or nothing.
_DELETE = b"""
if (redis.call('HGET', KEYS[1], 'object') or '') == ARGV[1] then redis.call('UNLINK', unpack(KEYS)) end
return 0
"""


class _Place(NamedTuple):
    """Where the frame of an object is."""

    frame_bytes: int
    nonce: bytes

    @property
    def parts(self) -> int:
        return -(-self.frame_bytes // PART_BYTES)


@dataclass(frozen=True, slots=True)
class _FoundHere(Found):
    """So that a `get` need not ask again where it is."""

    place: _Place


class _Asked(NamedTuple):
    """Replies, and the epoch in which they hold."""

    epoch: bytes
    replies: list[Any]


class RedisStore:
    """An ObjectStore with a log.

    url:         redis://, rediss:// (TLS, verified unless its options say otherwise) or unix://, as redis-py reads it.
    prefix:      of all keys; stores with different ones have nothing to do with each other.
    timeout_s:   how long a call may wait for the server, connecting included; each 8 MiB that it moves are a second
                 more. A server that hangs holds a call for `timeout_s`, one that trickles not much longer.
    ttl_s:       after which what was put expires, hits or not; None for never.
    log_entries: that the log keeps.
    Raises:      ConfigError from the constructor, which asks no server.
    """

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "hotspan",
        timeout_s: float = 1.0,
        ttl_s: float | None = None,
        log_entries: int = 1 << 16,
    ) -> None:
        if not prefix or set(prefix) & set("{}"):
            raise ConfigError(f"{prefix!r} can't begin the names of keys: give a word without braces")
        if timeout_s <= 0 or (ttl_s is not None and ttl_s <= 0):
            raise ConfigError(f"a timeout of {timeout_s} s, a time to live of {ttl_s} s: give more than 0")
        self._servers = RedisServers(url)
        self._prefix = f"{prefix}:{_FORMAT}"
        self._timeout_s = timeout_s
        self._life_ms = 0 if ttl_s is None else max(1, round(1000 * ttl_s))
        self.log = RedisLog(self._servers, self._prefix, timeout_s, log_entries)

    def find(self, keys: Sequence[ChunkKey], tenant: int = 0, *, is_chain: bool = True) -> list[Found | None]:
        def commands(epoch: bytes) -> list[Command]:
            return [self._command(epoch, key, partial(_read_found, key), b"HGETALL") for key in keys]

        found: list[Found | None] = self._ask(commands, Budget(self._timeout_s)).replies
        return found

    def get(self, found: Found, into: Sequence[memoryview], landed: Landed | None = None) -> bool:
        budget = Budget(self._timeout_s)
        epoch = self.log.epoch or self.log.begin(budget)
        name = self._name(epoch, found.record.key)
        place = found.place if isinstance(found, _FoundHere) else self._placed(name, found.record, budget)
        if place is None or place.frame_bytes != sum(map(len, into)):
            return False
        requests = [packed((b"GET", part)) for part in _part_names(name, place)]
        with self._servers.line(name, budget) as line:
            line.send([b"".join(requests[:_AHEAD])], budget)
            read = []
            for number, views in enumerate(parts_of(into, PART_BYTES), _AHEAD):
                read.append(line.bulk_into(views, budget))
                line.send(requests[number : number + 1], budget)
        if not all(read):
            self._servers.exchange([_deletion(name, _object(found.record, place))], budget)
        return all(read)

    def put(self, record: Record, frame: Sequence[memoryview]) -> bool:
        """As ObjectStore says. Raises: OSError (ENOSPC) if the server has no room."""
        budget = Budget(self._timeout_s)

        def is_there(epoch: bytes) -> list[Command]:
            return [self._command(epoch, record.key, _read_number, b"HEXISTS", _OBJECT)]

        asked = self._ask(is_there, budget)
        if asked.replies != [0]:
            return False
        name = self._name(asked.epoch, record.key)
        place = _Place(sum(map(len, frame)), secrets.token_bytes(8))
        parts = _part_names(name, place)
        with self._servers.line(name, budget) as line:
            for part, views in zip(parts, parts_of(frame, PART_BYTES), strict=True):
                line.send(_setting(part, views), budget)
            line.send([packed(self._publication(name, parts, _object(record, place)))], budget)
            for _ in parts:
                if line.reply(budget) != b"OK":
                    raise ProtocolError("another reply came in the place of OK")
            won = _read_number(line.reply(budget))
        if won < 0:
            raise OSError(errno.ENOSPC, "the server evicted parts of an object before it was whole")
        return won == 1

    def mark(self, marks: Mapping[ChunkKey, Sequence[bytes]]) -> None:
        life = b"%d" % (self._life_ms or 1000 * _UNUSED_MARKS_S)

        def commands(epoch: bytes) -> list[Command]:
            added = [(self._name(epoch, key), some) for key, some in marks.items() if some]
            return [Command(name, (b"EVAL", _MARK, b"1", name, life, *some), _read_number) for name, some in added]

        self._ask(commands, Budget(self._timeout_s))

    def delete(self, keys: Sequence[ChunkKey], tenant: int = 0) -> None:
        budget = Budget(self._timeout_s)

        def objects(epoch: bytes) -> list[Command]:
            return [self._command(epoch, key, _read_value, b"HGET", _OBJECT) for key in keys]

        asked = self._ask(objects, budget)
        objects_of = zip((self._name(asked.epoch, key) for key in keys), asked.replies, strict=True)
        self._servers.exchange([_deletion(name, said) for name, said in objects_of], budget)

    def usage(self) -> StoreUsage:
        """How full the servers are, with all that is on them."""
        used = most = 0
        for reply in self._servers.ask_all((b"INFO", b"memory"), Budget(self._timeout_s)):
            facts = dict(_MEMORY.findall(reply))
            used += int(facts.get(b"used_memory", 0))
            most += int(facts.get(b"maxmemory", 0))
        return StoreUsage(bytes=used, capacity_bytes=most)

    def close(self) -> None:
        self._servers.close()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _ask(self, commands: Callable[[bytes], list[Command]], budget: Budget) -> _Asked:
        """What the commands reply in the epoch that the log has at that moment."""
        for _ in range(_MOST_BEGINNINGS):
            epoch = self.log.epoch or self.log.begin(budget)
            said, *replies = self._servers.exchange([self.log.head(), *commands(epoch)], budget)
            if said == epoch:
                return _Asked(epoch, replies)
            self.log.begin(budget)
        raise ConnectionError("the log began anew again and again")

    def _command(
        self, epoch: bytes, key: ChunkKey, read: Callable[[Reply], Any], verb: bytes, *arguments: bytes
    ) -> Command:
        name = self._name(epoch, key)
        return Command(name, (verb, name, *arguments), read)

    def _name(self, epoch: bytes, key: ChunkKey) -> bytes:
        return f"{self._prefix}:{epoch.decode()}:{{{key.hex()}}}".encode()

    def _placed(self, name: bytes, record: Record, budget: Budget) -> _Place | None:
        (reply,) = self._servers.exchange([Command(name, (b"HGET", name, _OBJECT), _read_value)], budget)
        placed = _read_object(reply)
        return placed[1] if placed is not None and placed[0] == record else None

    def _publication(self, name: bytes, parts: Sequence[bytes], packed_object: bytes) -> list[bytes]:
        lives = [self._life_ms, self._life_ms and self._life_ms + 1000 * _UNPUBLISHED_S]
        keys = [b"%d" % (len(parts) + 1), name, *parts]
        return [b"EVAL", _PUBLISH, *keys, packed_object, *(b"%d" % life for life in lives)]


def _object(record: Record, place: _Place) -> bytes:
    return pack(record) + _PLACE.pack(*place)


def _read_object(data: bytes | None) -> tuple[Record, _Place] | None:
    if data is None or len(data) != _OBJECT_BYTES:
        return None
    record = unpack(data[:RECORD_BYTES])
    return None if record is None else (record, _Place(*_PLACE.unpack_from(data, RECORD_BYTES)))


def _read_found(key: ChunkKey, reply: Reply) -> Found | None:
    flat = values(reply)
    if len(flat) % 2:
        raise ProtocolError("what came is no hash")
    fields = dict(zip(flat[::2], flat[1::2], strict=True))
    placed = _read_object(fields.pop(_OBJECT, None))
    if placed is None or placed[0].key != key:
        return None
    record, place = placed
    return _FoundHere(record, marked(record.terms, fields), place)


def _part_names(name: bytes, place: _Place) -> list[bytes]:
    return [b"%b:%b:%d" % (name, place.nonce.hex().encode(), number) for number in range(place.parts)]


def _setting(part: bytes, views: Sequence[memoryview]) -> list[Buffer]:
    """A SET with an expiry, its value as it is."""
    head = b"*5\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(part), part, sum(map(len, views)))
    life = b"%d" % _UNPUBLISHED_S
    return [head, *views, b"\r\n$2\r\nEX\r\n$%d\r\n%b\r\n" % (len(life), life)]


def _deletion(name: bytes, packed_object: bytes | None) -> Command:
    """Deletes an object and its marks, if it is this one; marks alone, if there is none."""
    placed = _read_object(packed_object)
    keys = [name, *(() if placed is None else _part_names(name, placed[1]))]
    return Command(name, (b"EVAL", _DELETE, b"%d" % len(keys), *keys, packed_object or b""), _read_number)


def _read_number(reply: Reply) -> int:
    if not isinstance(reply, int):
        raise ProtocolError("what came is no number")
    return reply


def _read_value(reply: Reply) -> bytes | None:
    if not isinstance(reply, bytes | None):
        raise ProtocolError("what came is no value")
    return reply
