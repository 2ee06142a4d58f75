"""What clients of the Unix socket ask for, one message each (l2/daemon_protocol.py), on the pool and the log."""

import asyncio
import contextlib
import json
import logging
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence
from typing import cast

from hotspan.core.types import ChunkKey
from hotspan.daemon.log import NodeLog
from hotspan.daemon.pool import Pool
from hotspan.daemon.stored import Refusal, StoredObject, Writing
from hotspan.l2 import bounds
from hotspan.l2.base import UPDATE_BYTES
from hotspan.l2.blobs import Entry
from hotspan.l2.daemon_protocol import (
    BUFFER_BYTES,
    DESCRIBED,
    ENTRY,
    EXTENT,
    FIND,
    FOUND,
    LEASE_ID,
    LOG_BEGIN,
    LOG_BODY,
    LOG_ENTRY,
    LOG_HEAD,
    LOG_READ,
    MAX_KEYS,
    REQUEST,
    RESERVE,
    UPDATES,
    USAGE,
    Operation,
    Status,
)

logger = logging.getLogger(__name__)

MAX_LOAD_S = 0.5
"""How long a look-up that wants a lease waits at most for the disk; what is not there by then is a miss."""

_KEY = struct.Struct("32s")
_OK = bytes([Status.OK])
_REFUSALS = {
    Refusal.EXISTS: bytes([Status.EXISTS]),
    Refusal.TOO_LARGE: bytes([Status.TOO_LARGE]),
    Refusal.NO_ROOM: bytes([Status.NO_ROOM]),
}


Reply = bytes | Awaitable[bytes]
"""What a client is told, now or later."""


class BadRequest(Exception):
    """A client does not speak as it should."""


class Client:
    """One connection.

    writing:   what it reserved and has not committed. answering: what it waits for.
    log_body:  the beginning of an entry of the log that it is about to append.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.writing: Writing | None = None
        self.answering: asyncio.Future[None] | None = None
        self.log_body = b""
        self.is_greeted = False
        self.is_ignored = False


class Operations:
    """Does what a message asks for. is_durable: as of UnixServer."""

    def __init__(self, pool: Pool, log: NodeLog, is_durable: Callable[[], Awaitable[bool]] | None) -> None:
        self._pool = pool
        self._log = log
        self._is_durable = is_durable
        self._operations: dict[int, Callable[[Client, memoryview], Reply]] = {
            Operation.FIND: self._find,
            Operation.DESCRIBE: self._describe,
            Operation.RESERVE: self._reserve,
            Operation.COMMIT: self._commit,
            Operation.ABORT: self._abort,
            Operation.UPDATE: self._update,
            Operation.DELETE: self._delete,
            Operation.USAGE: self._usage,
            Operation.LOG_PART: self._log_part,
            Operation.LOG_APPEND: self._log_append,
            Operation.LOG_BEGIN: self._log_begin,
            Operation.LOG_READ: self._log_read,
            Operation.LOG_REPORT: self._log_report,
            Operation.LOG_REPORTS: self._log_reports,
        }

    def run(self, client: Client, message: memoryview) -> Reply:
        """What is answered to a message. Raises: BadRequest, struct.error, or one of MALFORMED."""
        operation, releases = REQUEST.unpack_from(message)
        at = REQUEST.size + releases * LEASE_ID.size
        if at > len(message):
            raise BadRequest("releases are cut")
        for (id,) in LEASE_ID.iter_unpack(message[REQUEST.size : at]):
            self._pool.release(id, client)
        return self._operations[operation](client, message[at:])

    def _find(self, client: Client, body: memoryview) -> Reply:
        (ttl_ms,) = FIND.unpack_from(body)
        keys = _keys(body[FIND.size :])
        objects = self._pool.find(keys)
        on_disk = [each.key for each in objects if each is not None and not each.extents]
        if on_disk and ttl_ms:
            return self._load(client, keys, on_disk, ttl_ms)
        return self._found(client, objects, ttl_ms)

    async def _load(self, client: Client, keys: Sequence[ChunkKey], on_disk: Sequence[ChunkKey], ttl_ms: int) -> bytes:
        """What is found once it is in memory; what does not come there is not found."""
        ends: list[asyncio.Event] = []
        for loading in filter(None, [self._pool.writing(key) or self._pool.load(key) for key in on_disk]):
            ends.append(asyncio.Event())
            loading.on_end.append(ends[-1].set)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MAX_LOAD_S):
                for ended in ends:
                    await ended.wait()
        objects = [None if each is None or not each.extents else each for each in self._pool.peek(keys)]
        return self._found(client, objects, ttl_ms)

    def _found(self, client: Client, objects: Sequence[StoredObject | None], ttl_ms: int) -> bytes:
        found = [each for each in objects if each is not None]
        asyncio.get_running_loop().call_soon(self._use, found)  # after the answer
        lease = self._pool.lease(found, ttl_ms / 1000, client) if found and ttl_ms else None
        versions = [0 if each is None else each.version for each in objects]
        head = FOUND.pack(0 if lease is None else lease.id)
        return b"".join([_OK, head, struct.pack(f"<{len(versions)}Q", *versions)])

    def _use(self, found: list[StoredObject]) -> None:
        self._pool.use([each.key for each in found])

    def _describe(self, client: Client, body: memoryview) -> bytes:
        """As many as fit into an answer: with many updates or extents the client asks again for the rest."""
        left = _max_bytes(client) - len(_OK) - DESCRIBED.size
        versions: list[int] = []
        entries: list[bytes] = []
        for stored in self._pool.peek(_keys(body)):
            entry = b"" if stored is None else _entry(stored)
            left -= len(entry) + 10
            if left < 0:
                break
            versions.append(0 if stored is None else stored.version)
            entries.append(entry)
        count = len(entries)
        sizes = struct.pack(f"<{count}Q{count}H", *versions, *map(len, entries))
        return b"".join([_OK, DESCRIBED.pack(count), sizes, *entries])

    def _reserve(self, client: Client, body: memoryview) -> bytes:
        key, size = RESERVE.unpack(body)
        if client.writing is not None or not size:
            raise BadRequest("one object of at least one byte is reserved at a time")
        found = self._pool.reserve(ChunkKey(key), size, is_own=True)
        if isinstance(found, Refusal):
            return _REFUSALS[found]
        client.writing = found
        return _OK + b"".join(EXTENT.pack(*extent) for extent in found.object.extents)

    def _commit(self, client: Client, body: memoryview) -> bytes:
        self._pool.commit(self._written(client))
        return _OK

    def _abort(self, client: Client, body: memoryview) -> bytes:
        self._pool.abort(self._written(client))
        return _OK

    def _written(self, client: Client) -> Writing:
        writing, client.writing = client.writing, None
        if writing is None:
            raise BadRequest("nothing is reserved")
        return writing

    def _noted(self, answer: bytes) -> Reply:
        """An answer that promises something, once that holds after a crash, too."""
        return answer if self._is_durable is None else self._once_durable(self._is_durable(), answer)

    async def _once_durable(self, is_durable: Awaitable[bool], answer: bytes) -> bytes:
        return answer if await is_durable else _REFUSALS[Refusal.NO_ROOM]

    def _update(self, client: Client, body: memoryview) -> Reply:
        at = 0
        while at < len(body):
            key, count = UPDATES.unpack_from(body, at)
            at += UPDATES.size
            updates = [bytes(body[at + n * UPDATE_BYTES : at + (n + 1) * UPDATE_BYTES]) for n in range(count)]
            at += count * UPDATE_BYTES
            if at > len(body):
                raise BadRequest("updates are cut")
            self._pool.add_updates({ChunkKey(key): updates})
        return self._noted(_OK)

    def _delete(self, client: Client, body: memoryview) -> Reply:
        for (key,) in _KEY.iter_unpack(body):
            self._pool.delete(ChunkKey(key))
        return self._noted(_OK)

    def _usage(self, client: Client, body: memoryview) -> bytes:
        return _OK + USAGE.pack(self._pool.objects, *self._pool.usage)

    # -- the log -------------------------------------------------------------------------------------------------------

    def _log_part(self, client: Client, body: memoryview) -> bytes:
        client.log_body += body
        if len(client.log_body) > bounds.MAX_ENTRY_BYTES:
            raise BadRequest("an entry of the log is too long")
        return _OK

    def _log_append(self, client: Client, body: memoryview) -> Reply:
        number, epoch = LOG_ENTRY.unpack_from(body)
        data, client.log_body = client.log_body + body[LOG_ENTRY.size :], b""
        if not data:
            raise BadRequest("an entry of the log has a body")
        is_appended = self._log.append(Entry(number, epoch, data))
        return self._noted(_OK) if is_appended else _REFUSALS[Refusal.EXISTS]

    def _log_begin(self, client: Client, body: memoryview) -> bytes:
        over, number, epoch = LOG_BEGIN.unpack(body)
        if not bounds.is_honest(number, self._log.unix()):
            raise BadRequest("no log has come so far")
        oldest = self._log.oldest
        self._log.begin(over if any(over) else b"", Entry(number, epoch, b""))
        if oldest is not None and self._log.oldest is not oldest:
            logger.warning("log_begins_anew generation=%d: it lost what a replica had read", number)
            self._pool.forget_own()
        return _OK  # a restart that finds the older log again loses no entry that was confirmed

    def _log_read(self, client: Client, body: memoryview) -> bytes:
        first, skip = LOG_READ.unpack(body)
        found = self._log.read(first)
        if found is None:
            return _OK
        size, room = 0, _max_bytes(client) - len(_OK) - LOG_HEAD.size
        parts: list[bytes] = []
        for entry in found.entries:
            length = LOG_BODY.size + len(entry.body)
            if room and size + length > skip:
                packed = LOG_BODY.pack(entry.number, entry.epoch, len(entry.body)) + entry.body
                parts.append(packed[max(0, skip - size) :][:room])
                room -= len(parts[-1])
            size += length
        head = LOG_HEAD.pack(found.oldest.number, found.oldest.epoch, bool(found.oldest.body), size)
        return b"".join([_OK, head, *parts])

    def _log_report(self, client: Client, body: memoryview) -> bytes:
        said = json.loads(bytes(body))
        data = said["data"]
        self._log.write_report(str(said["replica"]), None if data is None else str(data).encode())
        return _OK

    def _log_reports(self, client: Client, body: memoryview) -> bytes:
        reports = {name: data.decode() for name, data in self._log.read_reports().items()}
        return _OK + json.dumps(reports).encode()


def _keys(body: memoryview) -> list[ChunkKey]:
    keys = [key for (key,) in _KEY.iter_unpack(body)]
    if not 0 < len(keys) <= MAX_KEYS:
        raise BadRequest("too many keys, or none")
    return cast(list[ChunkKey], keys)


def _entry(stored: StoredObject) -> bytes:
    extents = b"".join(EXTENT.pack(*extent) for extent in stored.extents)
    head = ENTRY.pack(stored.size, len(stored.extents), len(stored.updates), stored.record)
    return b"".join([head, extents, *stored.updates])


def _max_bytes(client: Client) -> int:
    """Of an answer: what the socket's buffer takes in one piece."""
    return min(client.socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) - 4096, BUFFER_BYTES)
