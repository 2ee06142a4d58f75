"""The node's daemon as an L2, through its Unix socket: looked up in one round trip, copied by this process itself.

A look-up pins nothing. A read asks for a lease, and copies while the daemon answers, from where the object was when it
was last heard of: if the answer says that it is still the same, it never moved, and has been leased since.
"""

import errno
import itertools
import json
import struct
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hotspan.core.buffers import placed
from hotspan.core.clock import Clock, SystemClock
from hotspan.core.deadline import Deadline
from hotspan.core.frame import segment_bytes_for
from hotspan.core.types import ChunkKey
from hotspan.l2 import bounds
from hotspan.l2.base import (
    PREAMBLE_BYTES,
    UPDATE_BYTES,
    Found,
    Landed,
    StoreUsage,
    updated,
)
from hotspan.l2.blobs import Entry, Stretch
from hotspan.l2.daemon_client import DaemonClient, DaemonConnection, Segment, understood
from hotspan.l2.daemon_protocol import (
    CHANGE_BITS,
    DESCRIBED,
    ENTRY,
    EXTENT,
    FIND,
    FOUND,
    LOG_BEGIN,
    LOG_BODY,
    LOG_ENTRY,
    LOG_HEAD,
    LOG_READ,
    MAX_KEYS,
    RESERVE,
    UPDATES,
    USAGE,
    Operation,
    Status,
)
from hotspan.l2.log import SharedInvalidationLog
from hotspan.tiers.io import copy
from hotspan.tiers.record import Record, pack, unpack

DEADLINE_S = 2.0
LEASE_S = 2.0
"""How long a copy may take."""

_MAX_DECODED = 1 << 14
_LOG_PART_BYTES = 64 * 1024  # of an entry, in one message
_MAX_LOG_BYTES = 128 << 20  # with the head of each entry
_LOG_ENTRIES = 1 << 16
_REFUSED = {Status.TOO_LARGE: errno.EFBIG, Status.NO_ROOM: errno.ENOSPC}


class _Object(NamedTuple):
    """What the daemon says of one version of an object."""

    found: Found
    size: int
    places: tuple[tuple[int, int], ...]
    version: int

    def has_bytes_of(self, version: int) -> bool:
        """Whether that version differs from this one in updates at most."""
        return self.version >> CHANGE_BITS == version >> CHANGE_BITS


class DaemonStore:
    """An ObjectStore in the shared memory of this node's `hotspan daemon`; its `log` lives there, too.

    socket:     the daemon's socket, /dev/shm/NAME.sock.
    deadline_s: of each call, copies not counted.

    A put is False, too, while somebody else is writing that object. It raises OSError with ENOSPC where all that is
    there is in use, and with EFBIG for what exceeds the segment.
    """

    def __init__(
        self, socket: Path, *, deadline_s: float = DEADLINE_S, lease_s: float = LEASE_S, clock: Clock | None = None
    ) -> None:
        self._client = DaemonClient(socket)
        self._deadline_s = deadline_s
        self._lease_s = lease_s
        self._clock = clock or SystemClock()
        medium = DaemonLogMedium(self._client, deadline_s)
        self.log = SharedInvalidationLog(medium, _LOG_ENTRIES, self._clock)
        self._decoded: dict[int, _Object | None] = {}
        self._known: dict[ChunkKey, _Object | None] = {}

    def find(self, keys: Sequence[ChunkKey], tenant: int = 0, *, is_chain: bool = True) -> list[Found | None]:
        deadline = Deadline(self._deadline_s)
        objects: list[_Object | None] = []
        while len(objects) < len(keys):
            some = keys[len(objects) : len(objects) + MAX_KEYS]
            with self._client.connection(deadline) as connection:
                _, answer = connection.ask(Operation.FIND, FIND.pack(0) + b"".join(some), deadline)
                objects += self._objects(connection, some, answer, deadline)
        return [None if each is None else each.found for each in objects]

    def get(self, found: Found, into: Sequence[memoryview], landed: Landed | None = None) -> bool:
        key = found.record.key
        deadline = Deadline(self._deadline_s)
        expires_s = self._clock.monotonic() + self._lease_s
        with self._client.connection(deadline) as connection:
            connection.send(Operation.FIND, FIND.pack(max(1, round(self._lease_s * 1000))) + key, deadline)
            known = self._known.get(key)
            was_copied = known is not None and _copy_out(connection.segment, known, found, into, landed)
            _, answer = connection.receive(deadline)
            lease, version = _lease_of(answer)
            if known is None or not known.has_bytes_of(version):
                (known,) = self._objects(connection, [key], answer, deadline)
                was_copied = known is not None and _copy_out(connection.segment, known, found, into, landed)
            if lease:
                connection.releases.append(lease)  # goes along with the next request: not before the copy
        return was_copied and bool(lease) and self._clock.monotonic() < expires_s

    def put(self, record: Record, frame: Sequence[memoryview]) -> bool:
        deadline = Deadline(self._deadline_s)
        size = PREAMBLE_BYTES + sum(map(len, frame))
        with self._client.connection(deadline) as connection:
            status, answer = connection.ask(Operation.RESERVE, RESERVE.pack(record.key, size), deadline)
            segment = connection.segment
            if status is Status.OK and segment is not None:
                preamble = memoryview(pack(record).ljust(PREAMBLE_BYTES, b"\0"))
                with understood():
                    places = _places(answer)
                if not segment.has(places, size):
                    raise ConnectionError("the daemon gave a place that is not in its segment")
                for at, part in placed([preamble, *frame], places):
                    copy(part, [segment.view[at : at + len(part)]])
                status, _ = connection.ask(Operation.COMMIT, b"", deadline)
        if status is Status.OK or status is Status.EXISTS:
            return status is Status.OK
        raise OSError(_REFUSED.get(status, errno.EIO), f"the daemon has no place for {size} bytes ({status.name})")

    def add_updates(self, updates: Mapping[ChunkKey, Sequence[bytes]]) -> None:
        messages = [b""]
        for key, added in updates.items():
            for first in range(0, len(added), 64):
                few = added[first : first + 64]
                if len(messages[-1]) > 64 * 1024:
                    messages.append(b"")
                messages[-1] += UPDATES.pack(key, len(few)) + b"".join(few)
        self._ask_all(Operation.UPDATE, filter(None, messages))

    def delete(self, keys: Sequence[ChunkKey], tenant: int = 0) -> None:
        self._ask_all(Operation.DELETE, (b"".join(keys[at : at + 2048]) for at in range(0, len(keys), 2048)))

    def usage(self) -> StoreUsage:
        answer = self._client.ask(Operation.USAGE, b"", Deadline(self._deadline_s))
        with understood():
            return StoreUsage(*USAGE.unpack(answer))

    def close(self) -> None:
        self._client.close()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _objects(
        self, connection: DaemonConnection, keys: Sequence[ChunkKey], answer: memoryview, deadline: Deadline
    ) -> list[_Object | None]:
        """What FIND answered of these keys."""
        with understood():
            versions = struct.unpack_from(f"<{len(keys)}Q", answer, FOUND.size)
            decoded = self._described(connection, keys, versions, deadline)
        objects = list(map(decoded.get, versions))
        if len(self._known) > _MAX_DECODED:
            self._known = {}
        self._known.update(zip(keys, objects, strict=True))
        return objects

    def _described(
        self, connection: DaemonConnection, keys: Sequence[ChunkKey], versions: Sequence[int], deadline: Deadline
    ) -> dict[int, _Object | None]:
        """What these versions are, and others: asked for once, and None for what is not an object of hotspan."""
        decoded = self._decoded
        new = [
            (key, version) for key, version in zip(keys, versions, strict=True) if version and version not in decoded
        ]
        if len(decoded) + len(new) > _MAX_DECODED:
            self._decoded = decoded = {version: decoded[version] for version in versions if version in decoded}
        while new:
            _, answer = connection.ask(Operation.DESCRIBE, b"".join(key for key, _ in new), deadline)
            (count,) = DESCRIBED.unpack_from(answer)
            said = struct.unpack_from(f"<{count}Q{count}H", answer, DESCRIBED.size)
            if not 0 < count <= len(new):
                raise ValueError("not as many entries as there should be")
            at = DESCRIBED.size + 10 * count
            for (_, asked), version, size in zip(new[:count], said[:count], said[count:], strict=True):
                if size:
                    decoded[version] = _decode(bytes(answer[at : at + size]), version)
                    if version >> CHANGE_BITS == asked >> CHANGE_BITS:
                        decoded[asked] = decoded[version]  # somebody has added updates since
                at += size
            del new[:count]
        return decoded

    def _ask_all(self, operation: Operation, bodies: Iterable[bytes]) -> None:
        deadline = Deadline(self._deadline_s)
        for body in bodies:
            self._client.ask(operation, body, deadline)


class DaemonLogMedium:
    """The LogMedium that the daemon keeps: with a disk it outlives the daemon, as the objects do."""

    def __init__(self, client: DaemonClient, deadline_s: float) -> None:
        self._client = client
        self._deadline_s = deadline_s

    def is_used(self) -> bool:
        return bool(self._ask(Operation.LOG_READ, LOG_READ.pack(0, 0)))  # a daemon begins its log when it starts

    def read(self, first: int) -> Stretch | None:
        data, oldest, size = bytearray(), None, 0
        for _ in range(_MAX_LOG_BYTES // _LOG_PART_BYTES):
            answer = self._ask(Operation.LOG_READ, LOG_READ.pack(first, len(data)))
            if not answer:
                return None
            with understood():
                number, epoch, has_body, size = LOG_HEAD.unpack_from(answer)
            before, oldest = oldest, Entry(number, epoch, b"?" if has_body else b"")
            if before not in (None, oldest):
                data = bytearray()  # entries were dropped meanwhile, or the log is another one
                oldest = None
                continue
            data += answer[LOG_HEAD.size :]
            if len(data) >= size:
                entries, is_whole = _entries(memoryview(data))
                return Stretch(oldest if is_whole else entries[0], entries)
            if len(answer) == LOG_HEAD.size or size > _MAX_LOG_BYTES:
                break
        raise ConnectionError(f"the daemon has no log that could be read: {len(data)} of {size} bytes")

    def append(self, entry: Entry, keep: int) -> bool:
        deadline = Deadline(self._deadline_s)
        last = len(entry.body) // _LOG_PART_BYTES * _LOG_PART_BYTES
        with self._client.connection(deadline) as connection:
            for at in range(0, last, _LOG_PART_BYTES):
                connection.ask(Operation.LOG_PART, entry.body[at : at + _LOG_PART_BYTES], deadline)
            body = LOG_ENTRY.pack(entry.number, entry.epoch) + entry.body[last:]
            status, _ = connection.ask(Operation.LOG_APPEND, body, deadline)
        if status not in (Status.OK, Status.EXISTS):
            raise ConnectionError(f"the daemon answers {status.name} to an entry of the log")
        return status is Status.OK

    def begin(self, over: bytes, entry: Entry) -> None:
        self._ask(Operation.LOG_BEGIN, LOG_BEGIN.pack(over, entry.number, entry.epoch))

    def write_report(self, replica: str, data: bytes | None) -> None:
        said = {"replica": replica, "data": None if data is None else data.decode()}
        self._ask(Operation.LOG_REPORT, json.dumps(said).encode())

    def read_reports(self) -> dict[str, bytes]:
        with understood():
            said = json.loads(self._ask(Operation.LOG_REPORTS, b""))
            return {name: bytes(data, "utf-8") for name, data in dict(said).items()}

    def unix(self) -> float:
        return SystemClock().unix()  # of this node, as the daemon is

    def _ask(self, operation: Operation, body: bytes) -> bytes:
        return self._client.ask(operation, body, Deadline(self._deadline_s))


def _entries(data: memoryview) -> tuple[list[Entry], bool]:
    """The newest entries in what LOG_READ answered; whether these are all. Raises: ConnectionError if one is cut."""
    places: deque[int] = deque()
    at, size, dropped = 0, 0, 0
    with understood():
        while at < len(data):
            places.append(at)
            size += (body := LOG_BODY.unpack_from(data, at)[-1])
            at += LOG_BODY.size + body
            while len(places) > 1 and (len(places) > bounds.MAX_LOG_ENTRIES or size > bounds.MAX_LOG_BYTES):
                size -= LOG_BODY.unpack_from(data, places.popleft())[-1]
                dropped += 1
        if at != len(data):
            raise ValueError("an entry of the log is cut")
    return [_entry(data, at) for at in places], not dropped


def _entry(data: memoryview, at: int) -> Entry:
    number, epoch, size = LOG_BODY.unpack_from(data, at)
    return Entry(number, epoch, bytes(data[at + LOG_BODY.size : at + LOG_BODY.size + size]))


def _decode(entry: bytes, version: int) -> _Object | None:
    size, extents, updates, packed = ENTRY.unpack_from(entry)
    updates_at = ENTRY.size + extents * EXTENT.size
    if len(entry) != updates_at + updates * UPDATE_BYTES:
        raise ValueError("an entry is cut")
    record = unpack(packed)
    if record is None:
        return None
    said = [entry[at : at + UPDATE_BYTES] for at in range(updates_at, len(entry), UPDATE_BYTES)]
    terms = updated(record.terms, said) if said else record.terms
    return _Object(Found(record, terms), size, _places(entry[ENTRY.size : updates_at]), version)


def _places(data: bytes | memoryview) -> tuple[tuple[int, int], ...]:
    return tuple(EXTENT.iter_unpack(data))


def _lease_of(answer: memoryview) -> tuple[int, int]:
    """The lease and the version that FIND answered of one key; 0 for none."""
    with understood():
        lease, version = struct.unpack_from("<QQ", answer)
    return lease, version


def _copy_out(
    segment: Segment | None, known: _Object, found: Found, into: Sequence[memoryview], landed: Landed | None
) -> bool:
    """Copy the frame of an object, if it is what was found, of that size, and in the segment."""
    if segment is None or known.found.record != found.record or not segment.has(known.places, known.size):
        return False
    if sum(map(len, into)) != known.size - PREAMBLE_BYTES:
        return False
    if landed is None:
        for at, part in placed(into, known.places, PREAMBLE_BYTES):
            copy(segment.view[at : at + len(part)], [part])
        return True
    header, payload = into
    step = segment_bytes_for(len(payload))
    pieces = [header, *(payload[first : first + step] for first in range(0, len(payload), step))]
    ends = itertools.accumulate(map(len, pieces[1:]))
    done, end = -len(header), 0
    for at, part in placed(pieces, known.places, PREAMBLE_BYTES):
        copy(segment.view[at : at + len(part)], [part])
        done += len(part)
        if done == end:  # a whole piece: of the payload, but for the first
            if end:
                first = (end - 1) // step * step
                landed(first, payload[first:end])
            end = next(ends, end)
    return True
