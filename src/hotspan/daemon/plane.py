"""The control plane: which request does what (docs/daemon.md, and the managed-tier protocol for the first three).

    PUT    /v1/kv/{bucket}/{key}                             200, 409 there already or being written, 413, 507 no room
    POST   /v1/kv/{bucket}/{key}/leases?timeout_ms=&ttl_s=   200 {"id", "offsets"}, 404, 504 not whole in memory yet
    POST   /v1/leases/{id}/release                           200, whether or not there is such a lease
    DELETE /v1/kv/{bucket}/{key}                             200, 404, 503 gone, but the disk does not confirm it
    GET    /health, /metrics, /v1/stats                      200

A path is split as it came and each segment decoded once: `%2F` is part of a name, and `%40` is `@`.
"""

import asyncio
import json
import math
import re
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import parse_qs, unquote_to_bytes

from hotspan.core.types import ChunkKey
from hotspan.daemon.http import Answer, Body, Request, Response, Waste
from hotspan.daemon.pool import Pool, Refusal, Writing
from hotspan.daemon.stored import OWN_BUCKET, StoredObject, object_key

MOST_HOLD_S = 60.0
_MOST_SMALL_BODY = 65536
_EARLY_S = 0.1
"""A client may wait just as long as it lets us hold: the answer is sent a little before."""

_DEFAULT_TIMEOUT_MS, _DEFAULT_TTL_S = 1000.0, 30.0
_MOST_PIECE = 1 << 20  # in one read, so that one client's body does not hold up the others

_REFUSALS = {Refusal.EXISTS: 409, Refusal.TOO_LARGE: 413, Refusal.NO_ROOM: 507}
_REASONS = {
    Refusal.EXISTS: "an object of that name is there, or being written",
    Refusal.TOO_LARGE: "it is larger than the whole cache",
    Refusal.NO_ROOM: "all that is there is being read or written",
}


class Upload:
    """A body on its way into the segment."""

    refusal: Response | None = None

    def __init__(self, pool: Pool, writing: Writing) -> None:
        self._pool = pool
        self._writing = writing
        self._extents = iter(writing.object.extents)
        self._at = self._end = 0
        self.left = writing.object.size

    def buffer(self) -> memoryview:
        if self._at == self._end:
            self._at, size = next(self._extents)
            self._end = self._at + size
        return self._pool.memory[self._at : min(self._end, self._at + _MOST_PIECE)]

    def received(self, size: int) -> None:
        self._at += size
        self.left -= size

    def ended(self) -> Answer:
        self._pool.commit(self._writing)
        return Response(200)

    def lost(self) -> None:
        self._pool.abort(self._writing)


class ControlPlane:
    """Answers requests about the objects of `pool`.

    epoch: random bytes of this daemon: part of a lease's id, so that no other daemon takes it for one of its own.
    door:  path of the local door, for those who ask.
    stats: what /v1/stats says. metrics: what /metrics says.
    is_durable: of a daemon with a disk: whether what was taken back until now stays so after a crash.
    """

    def __init__(
        self,
        pool: Pool,
        epoch: bytes,
        door: str,
        stats: Callable[[], dict[str, Any]],
        metrics: Callable[[], Response],
        is_durable: Callable[[], Awaitable[bool]] | None = None,
    ) -> None:
        self._pool = pool
        self._epoch = epoch.hex()
        self._health = _json(200, {"service": "hotspan-daemon", "status": "ok", "door": door})
        self._stats = stats
        self._metrics = metrics
        self._is_durable = is_durable
        self._lease_id = re.compile(rf"{self._epoch}-([0-9a-f]{{1,16}})")

    def answer(self, request: Request) -> Body:
        """Where the body of a request goes, and what is answered then."""
        path, _, query = request.target.partition(b"?")
        try:
            parts = [unquote_to_bytes(part).decode() for part in path.split(b"/")[1:]]
        except UnicodeDecodeError:
            return _refused(request, 400, "the path is not UTF-8")
        match request.method, parts:
            case "PUT", ["v1", "kv", bucket, key] if bucket and key:
                return self._put(request, bucket, key)
            case method, _ if request.size and request.size > _MOST_SMALL_BODY:
                return _refused(request, 413, f"a {method} has no such body")
            case "POST", ["v1", "kv", bucket, key, "leases"] if bucket and key:
                return Waste(request.size or 0, lambda: self._lease(object_key(bucket, key), query))
            case "POST", ["v1", "leases", id, "release"]:
                return Waste(request.size or 0, lambda: self._release(id))
            case "DELETE", ["v1", "kv", bucket, key] if bucket and key:
                return Waste(request.size or 0, lambda: self._delete(object_key(bucket, key)))
            case "GET", ["health"]:
                return Waste(request.size or 0, self._health)
            case "GET", ["v1", "stats"]:
                return Waste(request.size or 0, lambda: _json(200, self._stats()))
            case "GET", ["metrics"]:
                return Waste(request.size or 0, self._metrics)
            case _, ["v1", "kv", _, _] | ["v1", "kv", _, _, "leases"] | ["v1", "leases", _, "release"]:
                return _refused(request, 405, "this path has no such method")
        return _refused(request, 404, "there is no such path")

    def monitor(self, request: Request) -> Body:
        """The same on a port for monitors: figures and health, and nothing of what is cached."""
        path = request.target.partition(b"?")[0]
        if request.method == "GET" and path in (b"/metrics", b"/health"):
            return self.answer(request)
        return _refused(request, 404, "this port has /metrics and /health")

    # -- what the protocol names ---------------------------------------------------------------------------------------

    def _put(self, request: Request, bucket: str, name: str) -> Body:
        if request.size is None:
            return _refused(request, 411, "a value comes with its Content-Length")
        if not request.size:
            return _refused(request, 400, "a value has at least one byte")
        found = self._pool.reserve(object_key(bucket, name), request.size, is_own=bucket == OWN_BUCKET)
        if isinstance(found, Refusal):
            return _refused(request, _REFUSALS[found], _REASONS[found])
        return Upload(self._pool, found)

    def _lease(self, key: ChunkKey, query: bytes) -> Answer:
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
        if writing is None:
            return self._leased(key, ttl_s)
        timeout_s = min(timeout_ms / 1000, MOST_HOLD_S)
        ended = asyncio.Event()
        writing.on_end.append(ended.set)  # now, and not when `_hold` is first run: it may have ended by then
        return self._hold(key, ended, ttl_s, timeout_s - min(_EARLY_S, timeout_s / 4))

    async def _hold(self, key: ChunkKey, ended: asyncio.Event, ttl_s: float, hold_s: float) -> Response:
        """The lease once the object is whole."""
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

    def _delete(self, key: ChunkKey) -> Answer:
        answer = _json(200, {}) if self._pool.delete(key) else _error(404, "there is no such object")
        return answer if self._is_durable is None else self._once_durable(self._is_durable(), answer)

    async def _once_durable(self, is_durable: Awaitable[bool], answer: Response) -> Response:
        return answer if await is_durable else _error(503, "it is gone, but the disk does not confirm that it stays so")


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


def _refused(request: Request, status: int, reason: str) -> Waste:
    return Waste(request.size or 0, _error(status, reason))


def _error(status: int, reason: str) -> Response:
    return _json(status, {"error": reason})


def _json(status: int, data: Any) -> Response:
    return Response(status, json.dumps(data).encode())
