"""What the I/O threads of the disk engine do with one chunk. Errors end here: as a fault, and as a line of the log.

Errors are logged as text: the exception holds on to the buffers of its transfer, and a handler to it.
"""

import logging
import mmap
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from hotspan.core.clock import Clock
from hotspan.core.frame import HEADER_BYTES, FrameFault, FrameIdentity
from hotspan.tiers.base import Fault, FrameKeys
from hotspan.tiers.compressing import Packing
from hotspan.tiers.io import FrameFile, copy
from hotspan.tiers.pace import Pace
from hotspan.tiers.record import Record
from hotspan.tiers.room import NO_SPACE

if TYPE_CHECKING:  # it needs zstandard, which the node daemon does without
    from hotspan.tiers.packer import Packer

logger = logging.getLogger(__name__)

_GONE = (FrameFault.EXPIRED, FrameFault.SHREDDED)
_T = TypeVar("_T")


class Ended(NamedTuple):
    """How a transfer ended. seconds: without the wait in the queue and without rests of the pace."""

    fault: Fault | None
    seconds: float
    packing: Packing | None = None


class _Room(threading.local):
    """A thread's page-aligned memory for what is compressed, as large as the largest chunk so far."""

    def __init__(self) -> None:
        self._pages = memoryview(b"")

    def of(self, size: int) -> memoryview:
        """Shape: uint8[size]."""
        if len(self._pages) < size:
            self._pages = memoryview(mmap.mmap(-1, size))
        return self._pages[:size]


class FrameJobs:
    """Stores and loads of one slab; threads may share it.

    packer: compresses and restores; without one, chunks are stored as they are.
    """

    def __init__(
        self, frames: FrameFile, keys: FrameKeys | None, clock: Clock, pace: Pace, packer: "Packer | None"
    ) -> None:
        self._frames = frames
        self._keys = keys
        self._clock = clock
        self._pace = pace
        self._packer = packer
        self._room = _Room()

    def store(
        self,
        slots: Sequence[int],
        record: Record,
        scratch: memoryview,
        parts: Sequence[memoryview],
        write_record: Callable[[], None],
    ) -> Ended:
        """Write a chunk's frame into as many of some slots as it needs, the first ones.

        write_record: called behind it, unless the chunk was compressed and the record is another one now; may raise
                      OSError.
        """
        started_s = self._clock.monotonic()
        fault, packing = None, None
        try:
            payload = _contiguous(parts, is_filled=True)
            if self._packer is not None:
                chunk = payload
                packing = self._packer.pack(chunk, lambda: self._room.of(len(chunk)))
                if packing.is_compressed:
                    payload = self._room.of(packing.stored_bytes)
                    record = record.packed(packing.stored_bytes)
            if not self._write(slots, record, scratch, payload):
                fault = Fault.GONE
            elif packing is None or not packing.is_compressed:
                write_record()
        except OSError as error:
            fault = Fault.FULL if error.errno in NO_SPACE else Fault.IO
            logger.warning("disk_store_failed slot=%d error=%s", slots[0], str(error))
        except Exception:  # not the disk's fault, but ours or that of too little memory
            fault = Fault.DROPPED
            logger.error("disk_store_failed slot=%d error=%s", slots[0], traceback.format_exc())
        return Ended(fault, self._clock.monotonic() - started_s, packing)

    def load(self, slots: Sequence[int], record: Record, scratch: memoryview, parts: Sequence[memoryview]) -> Ended:
        """Read a chunk. What `parts` hold is undefined after a fault."""
        started_s, rested_s = self._clock.monotonic(), self._pace.rested_s
        fault, packing = None, None
        try:
            into = _contiguous(parts, is_filled=False)
            wrong, packing = self._read(slots, record, scratch, into)
            if wrong is None and len(parts) > 1:
                copy(into, parts)
        except OSError as error:
            fault = Fault.IO
            logger.warning("disk_load_failed slot=%d error=%s", slots[0], str(error))
        except Exception:
            fault = Fault.DROPPED
            logger.error("disk_load_failed slot=%d error=%s", slots[0], traceback.format_exc())
        else:
            if wrong is not None:
                fault = Fault.GONE if wrong in _GONE else Fault.CORRUPT
                logger.warning("disk_frame_quarantined slot=%d fault=%s", slots[0], wrong.value)
        rested_s = self._pace.rested_s - rested_s  # what a load takes is learnt without it
        return Ended(fault, self._clock.monotonic() - started_s - rested_s, packing)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _write(self, slots: Sequence[int], record: Record, scratch: memoryview, payload: memoryview) -> bool:
        """Whether a frame was written: False if its tenant has no key any more. Raises: OSError."""
        identity, keys, frames = self._identity(record), self._keys, self._frames
        if keys is None:
            self._cross(lambda: frames.write(slots, scratch[:HEADER_BYTES], payload, identity), payload, is_load=False)
            return True
        sealing = keys.sealing(record.terms.tenant)
        if sealing is None:
            return False
        self._cross(lambda: frames.write_sealed(slots, scratch, payload, identity, sealing), payload, is_load=False)
        return True

    def _read(
        self, slots: Sequence[int], record: Record, scratch: memoryview, into: memoryview
    ) -> tuple[FrameFault | None, Packing | None]:
        """Read a chunk from its frame, and restore it if it is compressed. Raises: OSError."""
        identity, keys, now_s = self._identity(record), self._keys, self._clock.unix()
        stored = self._room.of(record.payload_bytes) if identity.unpacked_bytes else into

        def read() -> FrameFault | None:
            if keys is None:
                return self._frames.read(slots, scratch[:HEADER_BYTES], stored, identity, now_s)
            return self._frames.read_sealed(slots, scratch, stored, identity, now_s, keys.opening)

        wrong = self._cross(read, stored, is_load=True)
        if wrong is not None or self._packer is None:
            return wrong, None
        if not identity.unpacked_bytes:
            return None, Packing("plain", len(into))
        packing = self._packer.unpack(stored, into)
        return (None, packing) if packing is not None else (FrameFault.PAYLOAD, None)

    def _identity(self, record: Record) -> FrameIdentity:
        terms = record.terms
        unpacked = record.unpacked_bytes if self._packer is not None else 0
        return FrameIdentity(
            *(record.key, record.namespace, record.stamp, terms.generation, terms.expires_s), unpacked_bytes=unpacked
        )

    def _cross(self, move: Callable[[], _T], payload: memoryview, *, is_load: bool) -> _T:
        return move() if self._packer is None else self._packer.cross(move, len(payload), is_load=is_load)


def _contiguous(parts: Sequence[memoryview], *, is_filled: bool) -> memoryview:
    """The only part itself; for several, pages that are as long together, with a copy of them if `is_filled`."""
    if len(parts) == 1:
        return parts[0]
    pages = memoryview(mmap.mmap(-1, sum(map(len, parts))))
    at = 0
    for part in parts if is_filled else ():
        copy(part, [pages[at : at + len(part)]])
        at += len(part)
    return pages
