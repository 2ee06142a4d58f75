"""The log of generations on a Redis or Valkey server: one sorted set, so that it is there whole or not at all.

    score -inf   the epoch, 32 hexadecimal digits
          -n     "floor": the epoch began at generation n, or entries up to n were trimmed
           n     "n:JSON", an entry of generation n

A generation is the server's time in milliseconds, or one more than the last: what is written after a loss is above what
was lost. Where a reader finds that the log lost what had been seen of it (the server restarted without it or from an
older copy, or evicted it), the log begins a new epoch in the same step.
"""

import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hotspan.core.scopes import scopes_to_json
from hotspan.core.terms import Scope
from hotspan.l2.base import LogPage, SharedInvalidation, is_lost, read_entry
from hotspan.l2.redis_servers import Command, RedisServers
from hotspan.l2.resp import Budget, ProtocolError, Reply, values

# ARGV: a fresh epoch; the epoch and the generation that the caller saw last; then the script's own.
_BEGINNING = """
local log = KEYS[1]
local function now()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
local function epoch() return redis.call('ZRANGE', log, 0, 0)[1] end
local function floor() return -tonumber(redis.call('ZSCORE', log, 'floor')) end
local function newest()
  return math.max(floor(), tonumber(redis.call('ZRANGE', log, -1, -1, 'WITHSCORES')[2]))
end
local function begin(above)
  redis.call('DEL', log)
  redis.call('ZADD', log, '-inf', ARGV[1], -math.max(now(), above + 1), 'floor')
end
local function settle(after) -- from here on there is a log, and the caller knows no more than it
  local seen = tonumber(ARGV[3])
  if not epoch() then return begin(math.max(after, seen)) end
  local is_whole = epoch() ~= ARGV[2] or seen <= floor() or redis.call('ZCOUNT', log, seen, seen) > 0
  if not is_whole or after > newest() then begin(math.max(after, seen, newest())) end
end
"""

_EPOCH = "settle(0) return epoch()"

# ARGV: how many entries to keep; the entry.
_APPEND = """
settle(0)
local generation = math.max(newest() + 1, now())
redis.call('ZADD', log, generation, string.format('%.0f:', generation) .. ARGV[5])
local most = redis.call('ZCARD', log) - 2 - ARGV[4]
if most > 0 then
  local oldest = redis.call('ZRANGE', log, 2, 1 + most, 'WITHSCORES')
  redis.call('ZREMRANGEBYRANK', log, 2, 1 + most)
  redis.call('ZADD', log, -tonumber(oldest[#oldest]), 'floor')
end
return {epoch(), generation}
"""

# ARGV: after which generation.
_READ = """
settle(tonumber(ARGV[4]))
return {epoch(), newest(), floor(), redis.call('ZRANGEBYSCORE', log, '(' .. ARGV[4], '+inf')}
"""

# ARGV: the epoch whose entries can't be read.
_DISCARD = "if epoch() == ARGV[4] then begin(newest()) end return 0"

# KEYS: a hash, "generation:until" by replica. ARGV: replica, generation, for how many milliseconds.
_REPORT = """
local time = redis.call('TIME')
local till = time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[3]
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2] .. ':' .. string.format('%.0f', till))
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[3]) then redis.call('PEXPIRE', KEYS[1], ARGV[3]) end
return 0
"""

_REPLICAS = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local all, alive = redis.call('HGETALL', KEYS[1]), {}
for i = 1, #all, 2 do
  local generation, till = string.match(all[i + 1], '^(%d+):(%d+)$')
  if till and tonumber(till) > now then
    alive[#alive + 1] = all[i]
    alive[#alive + 1] = generation
  else
    redis.call('HDEL', KEYS[1], all[i])
  end
end
return alive
"""


@dataclass(frozen=True, slots=True)
class _Seen:
    """The newest entry that this process knows of, and in which epoch."""

    epoch: bytes = b""
    generation: int = 0


class _Page(NamedTuple):
    """A page as it came. end: of the log."""

    end: _Seen
    floor: int
    members: list[bytes]


class RedisLog:
    """A SharedLog; after each call that succeeds, `epoch` is that of the log (32 hexadecimal digits; empty before).

    An acknowledged entry is as durable as the server is: to survive its crash, it needs an append-only file.
    """

    def __init__(self, servers: RedisServers, prefix: str, timeout_s: float, entries: int) -> None:
        self.key = f"{prefix}:{{log}}".encode()
        self._replicas_key = self.key + b":replicas"
        self._servers = servers
        self._timeout_s = timeout_s
        self._entries = entries
        self._seen = _Seen()
        self.epoch = b""

    def head(self) -> Command:
        """What asks for the epoch: 32 hexadecimal digits, or None if there is no log."""
        return Command(self.key, (b"ZRANGE", self.key, b"0", b"0"), _read_head)

    def begin(self, budget: Budget) -> bytes:
        """The epoch of the log, which begins if there is none."""
        epoch: bytes = self._run(_EPOCH, _read_epoch, budget)
        self.epoch = epoch
        return epoch

    def append(self, scopes: Sequence[Scope], by: str) -> int:
        body = json.dumps({"by": by, "scope": scopes_to_json(scopes)}, separators=(",", ":")).encode()
        seen: _Seen = self._run(_APPEND, _read_seen, Budget(self._timeout_s), b"%d" % self._entries, body)
        self._saw(seen)
        return seen.generation

    def read(self, after: int) -> LogPage:
        budget = Budget(self._timeout_s)
        while True:
            page: _Page = self._run(_READ, _read_page, budget, b"%d" % after)
            entries = _read_entries(page.members)
            if entries is not None:
                self._saw(page.end)
                return LogPage(bytes.fromhex(page.end.epoch.decode()), page.end.generation, page.floor, entries)
            # An invalidation that nobody can read: all that it may take goes.
            self._run(_DISCARD, _read_nothing, budget, page.end.epoch)

    def report(self, replica: str, generation: int, ttl_s: float) -> None:
        life = b"%d" % max(1, round(ttl_s * 1000))
        script = (b"EVAL", _REPORT.encode(), b"1", self._replicas_key, replica.encode(), b"%d" % generation, life)
        self._ask(script, _read_nothing, Budget(self._timeout_s))

    def forget(self, replica: str) -> None:
        self._ask((b"HDEL", self._replicas_key, replica.encode()), _read_nothing, Budget(self._timeout_s))

    def replicas(self) -> dict[str, int]:
        script = (b"EVAL", _REPLICAS.encode(), b"1", self._replicas_key)
        found: dict[str, int] = self._ask(script, _read_replicas, Budget(self._timeout_s))
        return found

    # -- inside ----------------------------------------------------------------------------------------------------

    def _run(self, script: str, read: Callable[[Reply], Any], budget: Budget, *arguments: bytes) -> Any:
        seen = self._seen
        fresh = secrets.token_hex(16).encode()
        evaluated = (b"EVAL", (_BEGINNING + script).encode(), b"1", self.key, fresh, seen.epoch)
        return self._ask([*evaluated, b"%d" % seen.generation, *arguments], read, budget)

    def _ask(self, arguments: Sequence[bytes], read: Callable[[Reply], Any], budget: Budget) -> Any:
        (reply,) = self._servers.exchange([Command(self.key, arguments, read)], budget)
        return reply

    def _saw(self, now: _Seen) -> None:
        self.epoch = now.epoch
        seen = self._seen
        if now.epoch != seen.epoch or now.generation > seen.generation:
            self._seen = now


def _read_epoch(reply: Reply) -> bytes:
    if not isinstance(reply, bytes) or len(reply) != 32 or not set(reply) <= set(b"0123456789abcdef"):
        raise ProtocolError("what came is no epoch")
    return reply


def _read_head(reply: Reply) -> bytes | None:
    match reply:
        case []:
            return None
        case [epoch]:
            return _read_epoch(epoch)
    raise ProtocolError("what came is no epoch")


def _read_seen(reply: Reply) -> _Seen:
    match reply:
        case [epoch, int(generation)]:
            return _Seen(_read_epoch(epoch), generation)
    raise ProtocolError("what came does not say where the log ends")


def _read_page(reply: Reply) -> _Page:
    match reply:
        case [epoch, int(newest), int(floor), members]:
            return _Page(_Seen(_read_epoch(epoch), newest), floor, values(members))
    raise ProtocolError("what came is no page of the log")


def _read_nothing(reply: Reply) -> None:
    if not isinstance(reply, int):
        raise ProtocolError("what came is no number")


def _read_replicas(reply: Reply) -> dict[str, int]:
    flat = values(reply)
    try:
        return {name.decode(): int(read) for name, read in zip(flat[::2], flat[1::2], strict=True)}
    except ValueError as error:
        raise ProtocolError("what came does not say which replicas there are") from error


def _read_entries(members: Sequence[bytes]) -> list[SharedInvalidation] | None:
    """None if nothing can be read of one of them, not even its tenant."""
    entries = []
    try:
        for member in members:
            generation, _, body = member.partition(b":")
            entries.append(read_entry(int(generation), json.loads(body)))
    except (AttributeError, ValueError, RecursionError):
        return None
    return None if any(map(is_lost, entries)) else entries
