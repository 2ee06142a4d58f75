"""What the I/O threads of the L2 tier do with a store. Errors end here: as a fault, as None or as a line of the log.

Errors are logged as text: the exception holds on to the buffers of its transfer, and a handler to it.
"""

import errno
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from typing import NamedTuple

from hotspan.core.clock import Clock
from hotspan.core.frame import (
    HEADER_BYTES,
    FrameFault,
    FrameIdentity,
    seal,
    segments,
    verify,
    verify_header,
    verify_part,
)
from hotspan.core.types import Chunk, ChunkKey
from hotspan.l2 import bounds
from hotspan.l2.base import Found, ObjectStore, StoreUsage, updates_of
from hotspan.l2.view import LogView, is_of
from hotspan.tiers.base import Fault, FrameKeys
from hotspan.tiers.compressing import Packing
from hotspan.tiers.packer import Packer
from hotspan.tiers.record import Record
from hotspan.tiers.sealed import open_frame, seal_frame

logger = logging.getLogger(__name__)

_GONE = (FrameFault.EXPIRED, FrameFault.SHREDDED)
_REFUSED = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EMLINK, errno.EBUSY)
"""A store that is full, or says no for another reason, is well."""

_AWAY = (ConnectionError, TimeoutError, PermissionError)
"""The store as a whole; other errors may be of one object."""


def _is_away(error: OSError) -> bool:
    """Whether it is the store's, also while a daemon tells nothing because its log was not read yet."""
    return isinstance(error, _AWAY) or error.errno == errno.EBUSY


_MAX_FAILURES = 16
"""Of one look-up: finds one bad object among 65,536, or a few among fewer."""


class Ended(NamedTuple):
    """How a transfer ended, and when (monotonic).

    found: what is there after a store, if it may be known without asking.
    """

    fault: Fault | None
    seconds: float = 0.0
    found: Found | None = None
    packing: Packing | None = None
    ended_s: float = 0.0


DROPPED = Ended(Fault.DROPPED)


class _Framed(NamedTuple):
    """A chunk as it is to be put."""

    record: Record
    frame: list[memoryview]
    packing: Packing


class StoreJobs:
    """Jobs of one tier; threads may share it.

    view: of the store's log, as it is now. keys: None for plain frames.

    scratch: a job's own memory, whose last part, as long as a chunk, is for what is compressed:
             [ header | with keys: a frame's ciphertext, and a page | compressed ]
    """

    def __init__(
        self,
        store: ObjectStore,
        view: Callable[[], LogView],
        keys: FrameKeys | None,
        clock: Clock,
        packer: Packer,
    ) -> None:
        self._store = store
        self._view = view
        self._keys = keys
        self._clock = clock
        self._packer = packer

    def find(self, chunks: Sequence[Chunk], tenant: int) -> dict[ChunkKey, Found] | None:
        """What is there of a text; None if the store did not answer."""
        found: dict[ChunkKey, Found] = {}
        try:
            for group in _groups(chunks):
                keys = [chunk.key for chunk in group]
                is_chain = len(group) == 1 or group[1].parent is not None
                started_s = self._clock.monotonic()
                some = self._found(keys, tenant, is_chain, [])
                self._packer.asked(self._clock.monotonic() - started_s)
                found |= {one.record.key: one for one in some if one is not None}
        except OSError as error:
            logger.warning("l2_find_failed chunks=%d error=%s", len(chunks), str(error))
            return None
        return found

    def put(self, record: Record, scratch: memoryview, payload: memoryview, *, is_bad: bool = False) -> Ended:
        """Store a chunk, unless it is there; one that may not be read gives way.

        is_bad: what is there could not be read, and gives way, too.
        """
        started_s = self._clock.monotonic()
        fault, found, packing = None, None, None
        try:
            if self._is_there(record, is_bad):
                self._join_there(record)
            elif (framed := self._framed(record, scratch, payload)) is None:
                fault = Fault.GONE
            elif self._put(framed):
                found, packing = Found(framed.record, record.terms), framed.packing
            else:  # somebody else was faster
                self._join_there(record)
        except OSError as error:
            fault = Fault.DROPPED if error.errno in _REFUSED else Fault.IO
            logger.warning("l2_store_failed error=%s", str(error))
        now_s = self._clock.monotonic()
        return Ended(fault, now_s - started_s, found, packing, now_s)

    def get(self, found: Found, scratch: memoryview, into: memoryview) -> Ended:
        """Load a chunk. What `into` holds is undefined after a fault."""
        started_s = self._clock.monotonic()
        record = found.record
        packing: Packing | None = None
        wrong: Fault | FrameFault | None
        try:
            if not record.unpacked_bytes:
                wrong, packing = self._read(found, scratch, into), Packing("plain", len(into))
            else:
                stored = self._compressed(scratch, into)[: record.payload_bytes]
                wrong = self._read(found, scratch, stored)
                if wrong is None and (packing := self._packer.unpack(stored, into)) is None:
                    wrong = FrameFault.PAYLOAD
        except OSError as error:
            wrong = Fault.IO
            logger.warning("l2_load_failed error=%s", str(error))
        fault = wrong if isinstance(wrong, Fault) else None
        if isinstance(wrong, FrameFault):
            fault = Fault.GONE if wrong in _GONE else Fault.CORRUPT
            logger.warning("l2_frame_refused fault=%s", wrong.value)
        now_s = self._clock.monotonic()
        return Ended(fault, now_s - started_s, None, None if wrong else packing, now_s)

    def add_updates(self, updates: Mapping[ChunkKey, Sequence[bytes]]) -> bool:
        """Write what hits added to chunks; whether that is done."""
        try:
            self._store.add_updates(updates)
        except OSError as error:
            logger.warning("l2_updates_not_written keys=%d error=%s", len(updates), str(error))
            return False
        return True

    def delete(self, keys: Sequence[ChunkKey], tenant: int) -> None:
        """Delete what is a miss in any case."""
        try:
            self._store.delete(keys, tenant)
        except OSError as error:
            logger.warning("l2_delete_failed keys=%d error=%s", len(keys), str(error))

    def usage(self) -> StoreUsage | None:
        """How full the store is; None if it did not answer."""
        try:
            return StoreUsage(*map(bounds.usage_figure, astuple(self._store.usage())))
        except OSError as error:
            logger.warning("l2_usage_failed error=%s", str(error))
            return None

    # -- inside ----------------------------------------------------------------------------------------------------

    def _found(
        self, keys: Sequence[ChunkKey], tenant: int, is_chain: bool, failures: list[OSError]
    ) -> list[Found | None]:
        """What the store has of these. An object that it can't tell of is not there, and hides no other.

        Mutates: `failures`, those of this look-up.
        Raises:  OSError if the store does not answer, or fails too often for that to be a matter of single objects.
        """
        try:
            return list(self._store.find(keys, tenant, is_chain=is_chain))
        except OSError as error:
            failures.append(error)
            if _is_away(error) or len(failures) > _MAX_FAILURES:
                raise
            if len(keys) == 1:
                logger.warning("l2_object_not_told key=%s error=%s", keys[0].hex(), str(error))
                return [None]
        half = len(keys) // 2
        found = self._found(keys[:half], tenant, is_chain, failures)
        if is_chain and None in found:
            return found
        return found + self._found(keys[half:], tenant, is_chain, failures)

    def _framed(self, record: Record, scratch: memoryview, payload: memoryview) -> _Framed | None:
        """A chunk's frame; None if its tenant has no key any more."""
        terms, header = record.terms, scratch[:HEADER_BYTES]
        sealing = None
        if self._keys is not None and (sealing := self._keys.sealing(terms.tenant)) is None:
            return None
        room = self._compressed(scratch, payload)
        packing = self._packer.pack(payload, lambda: room)
        if packing.is_compressed:
            record = record._replace(payload_bytes=packing.stored_bytes, unpacked_bytes=len(payload))
            payload = room[: packing.stored_bytes]
        identity = replace(self._identity(record), generation=terms.generation, expires_s=terms.expires_s)
        if sealing is None:
            seal(header, payload, identity)
            return _Framed(record, [header, payload], packing)
        return _Framed(record, [header, seal_frame(scratch, payload, identity, sealing)], packing)

    def _read(self, found: Found, scratch: memoryview, payload: memoryview) -> Fault | FrameFault | None:
        """Read a frame's payload, verified; a fault if it is not that of the record. Raises: OSError."""
        record, header = found.record, scratch[:HEADER_BYTES]
        identity, now_s = self._identity(record), self._clock.unix()
        if self._keys is None:
            checked = Checked(header, payload)
            is_there = self._crossing(lambda: self._store.get(found, [header, payload], checked.landed), record)
            return checked.fault(identity, now_s) if is_there else Fault.GONE
        staging = scratch[HEADER_BYTES : HEADER_BYTES + len(payload)]
        if not self._crossing(lambda: self._store.get(found, [header, staging]), record):
            return Fault.GONE
        return open_frame(scratch, payload, identity, now_s, self._keys.opening)

    @staticmethod
    def _compressed(scratch: memoryview, chunk: memoryview) -> memoryview:
        """The part of the scratch for what is compressed."""
        return scratch[len(scratch) - len(chunk) :]

    def _identity(self, record: Record) -> FrameIdentity:
        return FrameIdentity(record.key, record.namespace, record.stamp, unpacked_bytes=record.unpacked_bytes)

    def _put(self, framed: _Framed) -> bool:
        return self._crossing(lambda: self._store.put(framed.record, framed.frame), framed.record, is_load=False)

    def _crossing(self, move: Callable[[], bool], record: Record, *, is_load: bool = True) -> bool:
        return self._packer.cross(move, record.payload_bytes, is_load=is_load)

    def _is_there(self, record: Record, is_bad: bool) -> bool:
        """Whether an object of that chunk is there, and may be read; one that may not, or can't be, is deleted."""
        found = None
        try:
            (found,) = self._store.find([record.key], record.terms.tenant, is_chain=False)
        except OSError as error:
            if _is_away(error):
                raise
            is_bad = True
        if found is not None and not is_bad:
            matched_at = self._view().matched_at(record.key, record.namespace, found.terms)
            if found.terms.generation >= matched_at and is_of(found, record, self._clock.unix()):
                return True
        if found is not None or is_bad:
            self._store.delete([record.key], record.terms.tenant)
        return False

    def _join_there(self, record: Record) -> None:
        """Somebody else stored the chunk: theirs stays, on the terms of both.

        Marked as of the beginning: nobody has looked at whether theirs outlived what was invalidated since.
        """
        self._store.add_updates({record.key: updates_of(record.terms, 0)})


class Checked:
    """A plain frame that is verified segment by segment as it lands, while its bytes are in the CPU's caches."""

    def __init__(self, header: memoryview, payload: memoryview) -> None:
        self._header = header
        self._payload = payload
        self._faults: dict[int, FrameFault | None] = {}

    def landed(self, first: int, part: memoryview) -> None:
        """A segment is there, behind the header; anew, if it had been."""
        self._faults[first] = verify_part(self._header, len(self._payload), first, part)

    def fault(self, identity: FrameIdentity, now_s: float) -> FrameFault | None:
        """None if all of it is the frame of `identity`, else why not."""
        expected = {first for _, first, _ in segments(len(self._payload))}
        if self._faults.keys() != expected:
            return verify(self._header, self._payload, identity, now_s)
        fault = verify_header(self._header, len(self._payload), identity, now_s)
        return fault or next((each for each in self._faults.values() if each is not None), None)


def _groups(chunks: Sequence[Chunk]) -> Iterator[Sequence[Chunk]]:
    """The chunks of each KV cache group; each begins with the chunk at place 0."""
    first = 0
    for at in range(1, len(chunks) + 1):
        if at == len(chunks) or chunks[at].index == 0:
            yield chunks[first:at]
            first = at
