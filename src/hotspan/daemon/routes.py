"""The daemon's HTTP routes, for clients of HyperPod's managed tier (docs/daemon.md).

A path is split as it came and each segment decoded once: `%2F` is part of a name, and `%40` is `@`.
"""

import asyncio
import json
import math
import re
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote_to_bytes

from hotspan.core.errors import HotspanError
from hotspan.core.types import MIB, ChunkKey
from hotspan.daemon.pool import Pool
from hotspan.daemon.stored import Refusal, StoredObject, Writing, object_key
from hotspan.http.bodies import read_into, read_parts
from hotspan.http.connections import HttpLimits
from hotspan.http.errors import HttpError
from hotspan.http.exchange import JSON, Exchange, Receive, Scope, Send
from hotspan.http.hosts import Hosts
from hotspan.l2.options import OWN_BUCKET

ROUTES = {
    "PUT /v1/kv/{bucket}/{key}": "Store the body. 409: there already, or being written; 413: too large; 507: no room.",
    "POST /v1/kv/{bucket}/{key}/leases": (
        "Hold an object for reading: `{id, offsets}` in the shared memory. `?timeout_ms=` waits for one that is being "
        "written, `?ttl_s=` is how long it is held. 404: not there; 504: not whole in memory yet."
    ),
    "POST /v1/leases/{id}/release": "End a lease; 200 also if there is none.",
    "DELETE /v1/kv/{bucket}/{key}": "Remove an object. 404: not there; 503: gone, but the disk does not confirm it.",
    "GET /health": "200 while the daemon serves. Also at `--metrics-port`.",
    "GET /metrics": "Prometheus metrics. Also at `--metrics-port`.",
    "GET /v1/stats": "The same figures as JSON.",
}
"""What is answered, by method and path."""

MAX_HOLD_S = 60.0
MAX_UNWANTED_BYTES = 256 * MIB
"""A body that is refused is read before the answer, so that any client gets it; a larger one is answered at once."""

_MAX_SMALL_BODY = 65536
_EARLY_S = 0.1
"""A client may wait just as long as it lets us hold: the answer is sent a little before."""

_MAX_PIECE = 1 << 20  # in one read, so that one client's body does not hold up the others
_DEFAULT_TIMEOUT_MS, _DEFAULT_TTL_S = 1000.0, 30.0

_STATUSES = {Refusal.EXISTS: 409, Refusal.TOO_LARGE: 413, Refusal.NO_ROOM: 507}
_REASONS = {
    Refusal.EXISTS: "an object of that name is there, or being written",
    Refusal.TOO_LARGE: "it is larger than the whole cache",
    Refusal.NO_ROOM: "all that is there is being read or written",
}


class Response(NamedTuple):
    """What is answered."""

    status: int
    body: bytes = b"{}"
    kind: str = JSON


class DaemonExchange(Exchange):
    """One request. The protocol has errors of its own shape, and no request ids."""

    async def fail(self, error: HotspanError) -> None:
        if not self.is_begun:
            refused = HttpError.of(error)
            response = _error(refused.status, str(error))
            headers = {"connection": "close", **refused.headers}
            await self.respond(response.status, response.body, headers=headers)

    def own_headers(self) -> dict[str, str]:
        return {}


class Upload:
    """A body on its way into the segment."""

    def __init__(self, pool: Pool, writing: Writing) -> None:
        self._pool = pool
        self._extents = iter(writing.object.extents)
        self._at = self._end = 0

    def buffer(self) -> memoryview:
        if self._at == self._end:
            self._at, size = next(self._extents)
            self._end = self._at + size
        return self._pool.memory[self._at : min(self._end, self._at + _MAX_PIECE)]

    def received(self, size: int) -> None:
        self._at += size


class Routes:
    """Answers requests about the objects of `pool`.

    epoch: random bytes of this daemon: part of a lease's id, so that no other daemon takes it for one of its own.
    socket: path of the Unix server's socket, for those who ask.
    stats: the figures of /v1/stats. metrics: the page of /metrics.
    is_durable: of a daemon with a disk: whether what was taken back until now stays so after a crash.
    hosts: names that requests may ask by, since nobody needs a key; None is this machine's.
    """

    def __init__(
        self,
        pool: Pool,
        epoch: bytes,
        socket: str,
        stats: Callable[[], dict[str, Any]],
        metrics: Callable[[], bytes],
        is_durable: Callable[[], Awaitable[bool]] | None = None,
        limits: HttpLimits | None = None,
        hosts: Hosts | None = None,
    ) -> None:
        self._pool = pool
        self._epoch = epoch.hex()
        self._health = _json(200, {"service": "hotspan-daemon", "status": "ok", "unix_socket": socket})
        self._stats = stats
        self._metrics = metrics
        self._is_durable = is_durable
        self._limits = limits or HttpLimits()
        self._hosts = hosts or Hosts()
        self._lease_id = re.compile(rf"{self._epoch}-([0-9a-f]{{1,16}})")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        exchange = DaemonExchange(scope, receive, send)
        async with exchange.answered("daemon"):
            self._check(exchange)
            await self._answer(exchange)

    async def monitor(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The same at a port for monitors: figures and health, and nothing of what is cached."""
        exchange = DaemonExchange(scope, receive, send)
        async with exchange.answered("daemon"):
            self._check(exchange)
            if exchange.method == "GET" and exchange.raw_path in (b"/metrics", b"/health"):
                await self._answer(exchange)
            else:
                await self._after_body(exchange, _error(404, "this port has /metrics and /health"))

    def _check(self, exchange: Exchange) -> None:
        """Raise HttpError for a head that could be read in two ways, is not HTTP/1's, or has a foreign host or page."""
        if exchange.scope["http_version"] not in ("1.0", "1.1"):
            raise HttpError(505, "send HTTP/1.1")
        if "upgrade" in exchange.headers:
            raise HttpError(400, "there is no other protocol here: send no Upgrade")
        exchange.check()
        self._hosts.check(exchange.method, exchange.headers)

    async def _answer(self, exchange: Exchange) -> None:
        try:
            parts = [unquote_to_bytes(part).decode() for part in exchange.raw_path.split(b"/")[1:]]
        except UnicodeDecodeError:
            await self._after_body(exchange, _error(400, "the path is not UTF-8"))
            return
        if exchange.method == "PUT" and len(parts) == 4 and parts[:2] == ["v1", "kv"] and parts[2] and parts[3]:
            await self._put(exchange, *parts[2:])
        elif (size := _length(exchange) or 0) > _MAX_SMALL_BODY:
            await self._after_body(exchange, _error(413, f"a {exchange.method} has no such body"))
        else:
            if size:
                await read_parts(exchange, self._limits, lambda part: None)
            async with exchange.watched(is_cancelled=True):
                response = await self._response(exchange.method, parts, exchange.scope["query_string"])
                await exchange.respond(response.status, response.body, response.kind)

    async def _response(self, method: str, parts: list[str], query: bytes) -> Response:
        match method, parts:
            case "POST", ["v1", "kv", bucket, key, "leases"] if bucket and key:
                return await self.lease(object_key(bucket, key), query)
            case "POST", ["v1", "leases", id, "release"]:
                return self._release(id)
            case "DELETE", ["v1", "kv", bucket, key] if bucket and key:
                return await self._delete(object_key(bucket, key))
            case "GET", ["health"]:
                return self._health
            case "GET", ["v1", "stats"]:
                return _json(200, self._stats())
            case "GET", ["metrics"]:
                return Response(200, self._metrics(), "text/plain; version=0.0.4; charset=utf-8")
            case _, ["v1", "kv", _, _] | ["v1", "kv", _, _, "leases"] | ["v1", "leases", _, "release"]:
                return _error(405, "this path has no such method")
        return _error(404, "there is no such path")

    async def _after_body(self, exchange: Exchange, response: Response) -> None:
        """Answer once an unwanted body has come; at once if it is too large, or the client waits with it."""
        headers = {}
        if "expect" in exchange.headers or "transfer-encoding" in exchange.headers:
            headers["connection"] = "close"  # the client may never send it
        elif (_length(exchange) or 0) <= MAX_UNWANTED_BYTES:
            await read_parts(exchange, self._limits, lambda part: None)
        await exchange.respond(response.status, response.body, response.kind, headers)

    # -- what the protocol names ---------------------------------------------------------------------------------------

    async def _put(self, exchange: Exchange, bucket: str, name: str) -> None:
        size = _length(exchange)
        if not size:
            reason = "a value comes with its Content-Length" if size is None else "a value has at least one byte"
            await self._after_body(exchange, _error(411 if size is None else 400, reason))
            return
        found = self._pool.reserve(object_key(bucket, name), size, is_own=bucket == OWN_BUCKET)
        if isinstance(found, Refusal):
            await self._after_body(exchange, _error(_STATUSES[found], _REASONS[found]))
            return
        try:
            await read_into(exchange, self._limits, size, Upload(self._pool, found))
        except BaseException:
            self._pool.abort(found)
            raise
        self._pool.commit(found)
        await exchange.respond(200, b"")

    async def lease(self, key: ChunkKey, query: bytes) -> Response:
        """Pin an object and tell where it is, once it is whole."""
        asked = parse_qs(query.decode("latin-1"))
        timeout_ms = _number(asked.get("timeout_ms"), _DEFAULT_TIMEOUT_MS)
        ttl_s = _number(asked.get("ttl_s"), _DEFAULT_TTL_S)
        if timeout_ms is None or timeout_ms < 0 or ttl_s is None or ttl_s <= 0:
            return _error(400, "timeout_ms and ttl_s are numbers, the second above 0")
        if ttl_s > self._pool.max_lease_s:
            # A client counts on the time that it asked for: a shorter lease would let it read what others write.
            self._pool.counts.refused_lease += 1
            return _error(
                400,
                f"ttl_s is {ttl_s:g}, and a lease lasts {self._pool.max_lease_s:g} s at most: ask for that, or start "
                "the daemon with a longer --max-lease-s",
            )
        writing = self._pool.writing(key) or self._pool.load(key)
        if writing is not None:
            ended = asyncio.Event()
            writing.on_end.append(ended.set)
            timeout_s = min(timeout_ms / 1000, MAX_HOLD_S)
            hold_s = timeout_s - min(_EARLY_S, timeout_s / 4)
            try:
                async with asyncio.timeout(hold_s):
                    await ended.wait()
            except TimeoutError:
                return _error(504, f"it is still being written, or read from disk, after {hold_s:.3g} s")
        return self._leased(key, ttl_s)

    def _leased(self, key: ChunkKey, ttl_s: float) -> Response:
        (stored,) = self._pool.find([key])
        if stored is None or not stored.extents:
            return _error(404, "there is no such object")
        self._pool.use([key])
        lease = self._pool.lease([stored], ttl_s)
        if lease is None:
            return _error(503, "there are too many leases")
        return _json(200, {"id": f"{self._epoch}-{lease.id:x}", "offsets": _offsets(stored)})

    def _release(self, id: str) -> Response:
        found = self._lease_id.fullmatch(id)
        if found is not None:
            self._pool.release(int(found[1], 16))
        return _json(200, {})

    async def _delete(self, key: ChunkKey) -> Response:
        is_deleted = self._pool.delete(key)
        if self._is_durable is not None and not await self._is_durable():
            return _error(503, "it is gone, but the disk does not confirm that it stays so")
        return _json(200, {}) if is_deleted else _error(404, "there is no such object")


def _length(exchange: Exchange) -> int | None:
    """The announced bytes of the body; None if none are."""
    length = exchange.headers.get("content-length", "")
    return int(length) if length.isdigit() else None


def _offsets(stored: StoredObject) -> list[dict[str, int]]:
    return [{"offset": offset, "len": size} for offset, size in stored.extents]


def _number(said: list[str] | None, default: float) -> float | None:
    """A number of a query; None if it is none."""
    if said is None:
        return default
    try:
        value = float(said[-1])
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _error(status: int, reason: str) -> Response:
    return _json(status, {"error": reason})


def _json(status: int, data: Any) -> Response:
    return Response(status, json.dumps(data).encode())
